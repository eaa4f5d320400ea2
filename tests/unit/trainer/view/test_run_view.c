// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/parts.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"

static tempdir dir;

static void make(void)
{
    tempdir_make(&dir);
}

static void clean(void)
{
    tempdir_remove(&dir);
}

TestSuite(run_view, .init = make, .fini = clean);

static void write_file(const char *name, const char *text)
{
    tempdir_write(&dir, name, text, strlen(text));
}

/* Steps 1 to `steps`, with losses that fall from 5 by 0.5. */
static void write_metrics(int steps, const char *further)
{
    FILE *out = fopen(tempdir_file(&dir, "metrics.jsonl"), "w");
    cr_assert_not_null(out);
    for (int step = 1; step <= steps; step++) {
        fprintf(out,
                "{\"step\":%d,\"loss\":%g,\"step_ms\":%d,\"data_wait_ms\":1,\"tokens_seen\":%d,"
                "\"tokens_per_second\":%d,\"peak_memory_bytes\":2097152}\n",
                step, 5.5 - 0.5 * step, step <= 2 ? 1000 : 10, 64 * step, 100 * step);
    }
    fputs(further, out);
    fclose(out);
}

static const char record[] =
    "{\"config\":{\"train.steps\":6,\"train.seed\":42,\"optimizer.lr\":0.001,"
    "\"optimizer.betas\":[0.9,0.95],\"output.dir\":\"<run>\",\"later.key\":true},"
    "\"model\":{\"planned_bytes\":1048576,\"parameters\":1000},\"command\":[\"ndlaunch\"]}";

static nd_run_view open_view(int64_t now)
{
    nd_run_view view;
    assert_ok(nd_run_view_open(dir.path, now, &view));
    return view;
}

static char *page_of(bool markdown, const nd_run_view *views, int count)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    cr_assert_not_null(out);
    const nd_page page = {.runs = views, .count = count, .markdown = markdown, .now = 0};
    assert_ok(nd_page_write(&page, out));
    cr_assert_eq(fclose(out), 0);
    return text;
}

/* What Markdown has of the run in the folder, whose files hold more. */
static void expect_words(const char *const *words, size_t count)
{
    nd_run_view view = open_view(0);
    char *text = page_of(true, &view, 1);
    for (size_t i = 0; i < count; i++) {
        cr_assert_not_null(strstr(text, words[i]), "no \"%s\" in:\n%s", words[i], text);
    }
    free(text);
    nd_run_view_close(&view);
}
#define EXPECT_WORDS(...)                                                                          \
    expect_words((const char *const[]){__VA_ARGS__},                                               \
                 sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

static void expect_in_page(const char *words, bool wanted)
{
    nd_run_view view = open_view(0);
    char *html = page_of(false, &view, 1);
    cr_assert_eq(strstr(html, words) != NULL, wanted, "\"%s\" in:\n%s", words, html);
    free(html);
    nd_run_view_close(&view);
}

Test(run_view, figures_of_a_finished_run)
{
    char text[ND_VERDICT_MAX];
    write_metrics(6, "{\"step\":3,\"validation_loss\":2,\"validation_ms\":5}\n"
                     "{\"step\":6,\"validation_loss\":2.5,\"validation_ms\":5}\n");
    write_file("run.json", record);
    nd_run_view view = open_view((int64_t)time(NULL));
    const nd_run_figures *f = &view.figures;
    cr_assert_eq(view.end, ND_RUN_FINISHED);
    cr_assert_str_eq(nd_run_verdict(&view, text), "finished: all 6 steps");
    cr_assert_eq(f->first_loss, 5);
    cr_assert_eq(f->last_loss, 2.5);
    cr_assert_eq(f->end_loss, 2.5);
    cr_assert_eq(f->step_ms, 10, "the first two steps do not count");
    cr_assert_eq(f->tokens_per_second, 450);
    cr_assert_float_eq(f->training_seconds, 2.04, 1e-9);
    cr_assert_float_eq(f->data_wait_share, 6 / 2040.0, 1e-9);
    cr_assert(f->best_validation == 2 && f->best_validation_step == 3 && f->last_validation == 2.5);
    cr_assert(f->planned_bytes == 1048576 && f->peak_bytes == 2097152 && f->tokens_seen == 384);
    nd_run_view_close(&view);
}

/* Losses of joined and of separate documents do not compare. */
Test(run_view, the_best_validation_has_documents_as_the_last_one)
{
    write_metrics(6, "{\"step\":2,\"validation_loss\":0.5}\n"
                     "{\"step\":4,\"validation_loss\":2,\"separate_length\":64}\n"
                     "{\"step\":6,\"validation_loss\":2.5,\"separate_length\":64}\n");
    write_file("run.json", record);
    nd_run_view view = open_view((int64_t)time(NULL));
    const nd_run_figures *f = &view.figures;
    cr_assert(f->best_validation == 2 && f->best_validation_step == 4 && f->last_validation == 2.5);
    nd_run_view_close(&view);
}

/* A shell takes it as it was typed. */
Test(run_view, the_command_is_quoted)
{
    write_metrics(2, "");
    write_file("run.json", "{\"command\":[\"ndlaunch\",\"--data-path\",\"0.7 a 0.3 b'c\",\"\"]}");
    EXPECT_WORDS("ndlaunch --data-path '0.7 a 0.3 b'\\''c' ''");
}

/* Of a run with these lines, some seconds after the last one was written; returns its verdict. */
static const char *expect_end(int steps, const char *further, int64_t later, nd_run_end end)
{
    static char verdict[ND_VERDICT_MAX];
    write_metrics(steps, further);
    nd_run_view view = open_view((int64_t)time(NULL) + later);
    cr_expect_eq(view.end, end, "%d, not %d, with %s", view.end, end, further);
    nd_run_verdict(&view, verdict);
    nd_run_view_close(&view);
    return verdict;
}

Test(run_view, how_a_run_ended)
{
    write_file("run.json", record);
    expect_end(4, "", 0, ND_RUN_RECENT);
    expect_end(4, "", 3600, ND_RUN_ENDED_EARLY);
    expect_end(4, "{\"event\":\"checkpoint\",\"step\":4,\"reason\":\"signal\"}\n", 3600,
               ND_RUN_STOPPED);
    const char *verdict =
        expect_end(4, "{\"event\":\"early_stopped\",\"step\":4,\"why\":\"<no> better\"}\n", 3600,
                   ND_RUN_STOPPED_EARLY);
    cr_assert_not_null(strstr(verdict, "step 4 of 6: <no> better"));
    unlink(tempdir_file(&dir, "run.json"));
    expect_end(4, "", 3600, ND_RUN_UNKNOWN);
}

/* A line as nd_sinks leaves it. */
#define LOST(step, sink, records)                                                                  \
    "{\"event\":\"records_lost\",\"step\":" step ",\"sink\":\"" sink "\",\"records\":" records     \
    ",\"why\":\"<no> space\"}\n"

static void expect_verdict(const char *further, nd_run_end end, const char *words, bool neutral)
{
    cr_assert_str_eq(expect_end(4, further, 3600, end), words);
    nd_run_view view = open_view((int64_t)time(NULL) + 3600);
    char *html = page_of(false, &view, 1);
    cr_assert_eq(strstr(html, "\"mood\":\"\"") != NULL, neutral, "neither good nor bad");
    cr_assert_eq(strstr(html, "\"mood\":\"bad\"") != NULL,
                 end == ND_RUN_FAILED || (end == ND_RUN_ENDED_EARLY && !neutral));
    free(html);
    nd_run_view_close(&view);
}

/* The last step that the file has is not the last one of the run. */
Test(run_view, a_run_on_a_full_disk_has_not_ended_early)
{
    write_file("run.json", record);
    expect_verdict(
        LOST("6", "metrics.jsonl", "2"), ND_RUN_FINISHED,
        "finished: all 6 steps; 2 lines of metrics.jsonl were lost, as the disk was full "
        "or failed",
        true);
    expect_verdict(
        "{\"event\":\"checkpoint\",\"step\":6,\"reason\":\"end\"}\n", ND_RUN_FINISHED,
        "finished: all 6 steps; the lines of metrics.jsonl after step 4 were lost, as the "
        "disk was full or failed",
        true);
    expect_verdict("{\"event\":\"early_stopped\",\"step\":5,\"why\":\"<no> better\"}\n" LOST(
                       "5", "metrics.jsonl", "1"),
                   ND_RUN_STOPPED_EARLY,
                   "finished early, after step 5 of 6: <no> better; 1 line of metrics.jsonl was "
                   "lost, as the disk was full or failed",
                   true);
    expect_verdict("{\"event\":\"checkpoint\",\"step\":5,\"reason\":\"signal\"}\n" LOST(
                       "5", "metrics.jsonl", "1"),
                   ND_RUN_STOPPED,
                   "stopped by a signal after step 5 of 6; --resume-from-checkpoint latest goes on "
                   "with it; 1 line of metrics.jsonl was lost, as the disk was full or failed",
                   true);
    expect_verdict(LOST("3", "metrics.jsonl", "1"), ND_RUN_ENDED_EARLY,
                   "no line after step 4 of 6: the disk took no more, or the run ended early; this "
                   "folder does not say why, the run's log does; 1 line of metrics.jsonl was lost, "
                   "as the disk was full or failed",
                   true);
    expect_verdict(
        LOST("4", "TensorBoard", "4"), ND_RUN_ENDED_EARLY,
        "ended early, after step 4 of 6, or its disk took no more lines; this folder does not say "
        "why, the run's log does",
        false);
}

#define ENDED(step, code, why)                                                                     \
    "{\"event\":\"ended\",\"step\":" step ",\"code\":" code ",\"why\":\"" why "\"}\n"

#define ELSEWHERE "; where another rank failed first, the run's log has its reason"

Test(run_view, the_last_line_says_why_a_run_ended)
{
    write_file("run.json", record);
    expect_verdict(
        ENDED("4", "74", "rank 1 was <lost>"), ND_RUN_FAILED,
        "failed after step 4 of 6; rank 0 ended with code 74: rank 1 was <lost>" ELSEWHERE, false);
    expect_verdict(
        ENDED("6", "73", "the model was not saved"), ND_RUN_FAILED,
        "failed after step 6 of 6; rank 0 ended with code 73: the model was not saved; the lines "
        "of metrics.jsonl after step 4 were lost, as the disk was full or failed",
        false);
    expect_verdict(ENDED("4", "75", "stopped by a signal after step 4 of 6, so"), ND_RUN_FAILED,
                   "stopped by a signal after step 4 of 6, so", false);
    expect_verdict("{\"event\":\"checkpoint\",\"step\":4,\"reason\":\"signal\"}\n" ENDED(
                       "4", "75", "stopped by a signal"),
                   ND_RUN_STOPPED,
                   "stopped by a signal after step 4 of 6; --resume-from-checkpoint latest goes on "
                   "with it",
                   true);
    expect_verdict(ENDED("4", "74", "lost") LOST("4", "TensorBoard", "4"), ND_RUN_FAILED,
                   "failed after step 4 of 6; rank 0 ended with code 74: lost" ELSEWHERE, false);
}

/* The step after it, or a start that has made none, is of a process that was killed. */
Test(run_view, a_later_start_takes_the_reason_back)
{
    const char unknown[] =
        "ended early, after step %d of 6, or its disk took no more lines; this folder does not say "
        "why, the run's log does";
    char words[256];
    write_file("run.json", record);
    snprintf(words, sizeof words, unknown, 4);
    expect_verdict(ENDED("4", "74", "lost") "{\"event\":\"resumed\",\"step\":4}\n",
                   ND_RUN_ENDED_EARLY, words, false);
    snprintf(words, sizeof words, unknown, 5);
    expect_verdict(ENDED("4", "74", "lost") "{\"step\":5,\"loss\":1,\"step_ms\":1}\n",
                   ND_RUN_ENDED_EARLY, words, false);
}

/* A checkpoint of step 6 of 2026-01-31 counts when no line was written since. */
Test(run_view, a_checkpoint_behind_the_last_line_tells_how_far_the_run_came)
{
    const nd_mesh mesh = {{1, 1, 1, 1, 1}};
    const nd_shape shape = fake_shape(true);
    struct timespec times[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
    char verdict[ND_VERDICT_MAX];
    fake_write(dir.path, &shape, &mesh, 1, 6, false, ND_CHECKSUM_XXH3);
    write_file("run.json", record);
    expect_end(4, "", 3600, ND_RUN_ENDED_EARLY);
    cr_assert_eq(utimensat(AT_FDCWD, tempdir_file(&dir, "metrics.jsonl"), times, 0), 0);
    nd_run_view view = open_view((int64_t)time(NULL));
    cr_assert_eq(view.end, ND_RUN_FINISHED);
    cr_assert_str_eq(nd_run_verdict(&view, verdict),
                     "finished: all 6 steps; the lines of metrics.jsonl after step 4 were lost, as "
                     "the disk was full or failed");
    nd_run_view_close(&view);
}

Test(run_view, lost_records_are_noted)
{
    write_metrics(4, LOST("3", "metrics.jsonl", "3") LOST("4", "metrics.jsonl", "2")
                         LOST("4", "wandb", "70"));
    nd_run_view view = open_view(0);
    cr_assert_eq(view.figures.lost_lines, 5);
    cr_assert_eq(view.figures.lost_tracked, 70);
    EXPECT_WORDS("lines of metrics.jsonl that were lost, as the disk was full or failed",
                 "tables do without them: 5", "another tracker did not take: 70",
                 "records\\_lost | &lt;no&gt; space");
    expect_in_page("step 3: lines were lost before: \\u003cno> space", true);
    nd_run_view_close(&view);
}

Test(run_view, settings_that_differ_come_first)
{
    write_metrics(3, "");
    write_file("run.json", record);
    nd_run_view view = open_view(0);
    char *text = page_of(true, &view, 1);
    const char *others = strstr(text, "Settings with their defaults");
    static const char *const differing[] = {
        "| optimizer.lr | 0.001 | ", "| output.dir | &lt;run&gt; |", "| later.key | true |  |"};
    cr_assert_not_null(others);
    for (size_t i = 0; i < sizeof differing / sizeof *differing; i++) {
        const char *at = strstr(text, differing[i]);
        cr_assert(at && at < others, "%s in:\n%s", differing[i], text);
    }
    cr_assert_not_null(strstr(others, "| optimizer.betas | "), "%s", text);
    cr_assert_not_null(strstr(others, "| train.seed | 42 |"), "%s", text);
    free(text);
    nd_run_view_close(&view);
}

Test(run_view, what_is_no_run_is_refused)
{
    nd_run_view view;
    assert_fails(nd_run_view_open("/tmp/nd_no_such_folder", 0, &view), ND_ERR_DATA, "no folder");
    assert_fails(nd_run_view_open(dir.path, 0, &view), ND_ERR_DATA, "no metrics.jsonl");
    write_file("metrics.jsonl", "");
    assert_fails(nd_run_view_open(dir.path, 0, &view), ND_ERR_DATA, "no step yet");
    write_metrics(1, "");
    write_file("run.json", "{\"config\":");
    assert_fails(nd_run_view_open(dir.path, 0, &view), ND_ERR_DATA, "run.json");
}

/* The newest start has the settings that count. */
Test(run_view, of_several_starts_the_last_one_counts)
{
    write_metrics(6, "");
    write_file("run.json", "{\"config\":{\"train.steps\":4}}");
    write_file("run-2.json", record);
    nd_run_view view = open_view(0);
    cr_assert_eq(view.steps_wanted, 6);
    nd_run_view_close(&view);
}

/* The loss falls from 5 by 0.5 in six steps of 64 tokens, the first two of which take a second. */
static void expect_data(const char *html, int runs)
{
    static const char mark[] = "<script type=\"application/json\" id=\"data\">";
    json_error_t error;
    const char *text = strstr(html, mark);
    cr_assert_not_null(text);
    text += sizeof mark - 1;
    json_t *data = json_loadb(text, (size_t)(strstr(text, "</script>") - text), 0, &error);
    cr_assert_not_null(data, "%s", error.text);
    cr_assert_eq(json_array_size(json_object_get(data, "runs")), (size_t)runs);
    const json_t *run = json_array_get(json_object_get(data, "runs"), 0);
    const json_t *line = json_object_get(json_object_get(run, "curves"), "loss");
    cr_assert_eq(json_array_size(json_object_get(line, "mean")), 6u);
    for (size_t i = 0; i < 6; i++) {
        const double step = (double)i + 1, seconds = i < 2 ? step : 2 + 0.01 * (step - 2);
        const struct {
            const json_t *list;
            double expected;
        } lists[] = {{json_object_get(line, "step"), step},
                     {json_object_get(line, "mean"), 5.5 - 0.5 * step},
                     {json_object_get(line, "low"), 5.5 - 0.5 * step},
                     {json_object_get(line, "high"), 5.5 - 0.5 * step},
                     {json_object_get(run, "tokens"), 64 * step},
                     {json_object_get(run, "seconds"), seconds}};
        for (size_t k = 0; k < sizeof lists / sizeof *lists; k++) {
            cr_assert_float_eq(json_number_value(json_array_get(lists[k].list, i)),
                               lists[k].expected, 1e-4);
        }
    }
    json_decref(data);
}

Test(run_view, a_page_of_one_run_and_of_two)
{
    write_metrics(6, "{\"step\":6,\"validation_loss\":2.5,\"validation_ms\":5}\n");
    write_file("run.json", record);
    nd_run_view views[2] = {open_view(0), open_view(0)};
    for (int count = 1; count <= 2; count++) {
        char *html = page_of(false, views, count);
        cr_assert_eq(strncmp(html, nd_page_mark, strlen(nd_page_mark)), 0);
        expect_data(html, count);
        cr_assert_not_null(strstr(html, "\\u003crun>"));
        cr_assert_null(strstr(html, "<run>"));
        cr_assert_null(strstr(html, "http:"));
        cr_assert_null(strstr(html, "https:"));
        free(html);
        char *markdown = page_of(true, views, count);
        cr_assert_not_null(strstr(markdown, "finished: all 6 steps"));
        cr_assert_null(strstr(markdown, "<run>"));
        cr_assert_null(strstr(markdown, "<svg"));
        free(markdown);
    }
    nd_run_view_close(&views[0]);
    nd_run_view_close(&views[1]);
}

Test(run_view, the_slowest_rank_is_named)
{
    FILE *out = fopen(tempdir_file(&dir, "metrics.jsonl"), "w");
    for (int step = 1; step <= 5; step++) {
        fprintf(out,
                "{\"step\":%d,\"loss\":1,\"step_ms\":20,\"slowest_ms\":%d,\"fastest_ms\":8,"
                "\"slowest_rank\":%d}\n",
                step, step == 5 ? 18 : 10, step == 1 ? 0 : 3);
    }
    fputs("{\"step\":6,\"loss\":1,\"step_ms\":20,\"slowest_ms\":9,\"fastest_ms\":8,"
          "\"slowest_rank\":1e9}\n",
          out);
    fclose(out);
    write_file("run.json", "{\"config\":{},\"mesh\":{\"pp\":1,\"dp_replicate\":1,\"dp_shard\":2,"
                           "\"cp\":1,\"tp\":2}}");
    EXPECT_WORDS("Rank 3 worked longest in 4 of 5 steps",
                 "worked 2.000 ms longer than the fastest, 10.0 %", "80.0 %", "10.000");
    expect_in_page("\"slowest_ms\":", true);
    write_metrics(3, "");
    expect_in_page("Slowest rank", false);
    expect_in_page("\"slowest_ms\":", false);
}

/* A call of a collective, as a profile has it. */
static void write_call(FILE *out, int rank, double begin_us, double us, const char *group,
                       int sequence)
{
    fprintf(out,
            "{\"name\":\"comm_all_reduce\",\"cat\":\"communication\",\"ph\":\"X\",\"ts\":%.3f,"
            "\"dur\":%.3f,\"pid\":%d,\"tid\":1,\"args\":{\"group\":\"%s\",\"op\":\"all_reduce\","
            "\"sequence\":%d,\"bytes\":8}},\n",
            begin_us, us, rank, group, sequence);
}

static FILE *begin_profile(const char *mesh)
{
    char record_text[256];
    FILE *out = fopen(tempdir_file(&dir, "profile.json"), "w");
    cr_assert_not_null(out);
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", out);
    snprintf(record_text, sizeof record_text,
             "{\"config\":{},\"mesh\":{\"pp\":1,\"dp_replicate\":1,\"cp\":1,%s}}", mesh);
    write_file("run.json", record_text);
    write_metrics(3, "");
    return out;
}

/* Ranks 0 and 1 are one group of tp, 2 and 3 another, both with the same sequence numbers. */
Test(run_view, a_profile_says_who_waited_for_whom)
{
    FILE *out = begin_profile("\"dp_shard\":2,\"tp\":2");
    fputs("{\"name\":\"step 3\",\"cat\":\"step\",\"ph\":\"X\",\"ts\":0,\"dur\":9000,\"pid\":0,"
          "\"tid\":0},\n",
          out);
    write_call(out, 0, 1000, 4000, "tp", 7); /* waits 3 ms for rank 1 */
    write_call(out, 1, 4000, 1000, "tp", 7);
    write_call(out, 2, 1000, 500, "tp", 7); /* only begins it: half a millisecond at most */
    write_call(out, 3, 8000, 100, "tp", 7);
    write_call(out, 0, 6000, 2000, "tp", 8); /* is the last one of the next */
    write_call(out, 1, 5500, 2500, "tp", 8);
    write_call(out, 0, 9000, 100, "world", 1); /* the others are not in the file */
    write_call(out, 9, 9000, 100, "world", 2); /* no rank of the mesh */
    write_call(out, 1, 9000, 100, "what", 1);
    fputs("{\"name\":\"parts\",\"ph\":\"M\",\"pid\":0,\"args\":{\"ranks\":4,\"found\":4}}],\n",
          out);
    fclose(out);
    EXPECT_WORDS("1 steps, 3 collectives", "longest for rank 1: 3.000 ms",
                 "| rank 0 | 6.100 | 3.000 | 0.500 | 1 |", "| rank 1 | 3.600 | 0.500 | 3.000 | 1 |",
                 "| rank 2 | 0.500 | 0.500 | 0.000 | 0 |",
                 "| rank 3 | 0.100 | 0.000 | 0.500 | 1 |");
}

/* Ranks 0 and 1 of tp have copies of a KV head, ranks 2 and 3 of another. */
Test(run_view, copies_of_kv_heads_wait_for_each_other)
{
    FILE *out = begin_profile("\"dp_shard\":1,\"tp\":4,\"kv_copies\":2");
    for (int rank = 0; rank < 4; rank++) {
        write_call(out, rank, rank == 3 ? 2000 : 1000, 4000, "kv_copies", 1);
        write_call(out, rank, 9000, 4000, "tp", 1);
    }
    fclose(out);
    EXPECT_WORDS("Who waited for whom", "3 collectives", "longest for rank 3: 1.000 ms");
}

Test(run_view, another_profile_is_refused)
{
    nd_run_view view;
    FILE *out = begin_profile("\"dp_shard\":1,\"tp\":1");
    rewind(out);
    fputs("[1, 2]                                          \n", out);
    fclose(out);
    view = open_view(0);
    nd_doc doc = {json_array()};
    assert_fails(nd_section_waits(&doc, &view), ND_ERR_DATA, "no profile");
    json_decref(doc.blocks);
    nd_run_view_close(&view);
}

Test(run_view, fp8_health_names_the_worst_layer_and_step)
{
    static const char fp8[] =
        "{\"config\":{\"train.precision\":\"fp8\",\"fp8.recipe\":\"delayed\"},"
        "\"model\":{\"linears\":14,\"fp8_linears\":13}}";
    write_file("run.json", fp8);
    write_metrics(3, "");
    EXPECT_WORDS("FP8 health", "Recipe delayed; 13 of the 14 linears", "No step was counted");
    write_metrics(3, "{\"step\":2,\"fp8_health\":{\"gradient\":{\"mlp.up_proj\":{"
                     "\"underflow\":0.25,\"underflow_layer\":1,\"saturation\":0,"
                     "\"saturation_layer\":0,\"amax\":3,\"amax_layer\":7}}}}\n"
                     "{\"step\":3,\"fp8_health\":{\"gradient\":{\"mlp.up_proj\":{"
                     "\"underflow\":0.125,\"underflow_layer\":0,\"saturation\":0,"
                     "\"saturation_layer\":0,\"amax\":null,\"amax_layer\":5}}}}\n");
    EXPECT_WORDS("2 steps were counted, the first is 2, the last 3", "gradient of mlp.up",
                 "12.500 %", "25.000 %", "layer 1, step 2", "layer 5, step 3");
    expect_in_page("\"fp8_underflow.gradient\":", true);
}

Test(run_view, data_have_their_sources)
{
    FILE *out = fopen(tempdir_file(&dir, "metrics.jsonl"), "w");
    for (int step = 1; step <= 3; step++) {
        fprintf(out,
                "{\"step\":%d,\"loss\":2,\"tokens_seen\":%d,\"source_loss\":{\"web\":%d,"
                "\"co<de\":null},\"source_tokens\":{\"web\":96,\"co<de\":0},\"step_ms\":1000,"
                "\"tokens_per_second\":128}\n"
                "{\"step\":%d,\"validation_loss\":2,\"validation_set_loss\":{\"x\":%d,\"y\":2},"
                "\"validation_set_tokens\":{\"x\":8,\"y\":8},\"validation_ms\":1}\n",
                step, 96 * step, step, step, 4 - step);
    }
    fclose(out);
    write_file("run.json",
               "{\"config\":{\"train.steps\":6},\"data\":{\"tokenizer\":\"/m/tokenizer.json\","
               "\"sources\":[{\"name\":\"web\",\"path\":\"/d/<web>\",\"format\":\"encoded text\","
               "\"tokens\":1000,\"documents\":77,\"blocks\":10,\"samples\":60,"
               "\"cache\":\"/c/1.tokens\"},{\"name\":\"co<de\",\"path\":\"/d/code\","
               "\"format\":\"llmc\",\"tokens\":500,\"documents\":null,\"blocks\":5,\"samples\":5,"
               "\"cache\":null}],\"validation\":[{\"name\":\"x\",\"path\":\"/d/x\"}]}}");
    /* 288 labels, 96 in each of three steps, whose mean loss is 2; half of 60 samples of 10
     * blocks. */
    EXPECT_WORDS("Tokenizer: /m/tokenizer.json", "288 labels counted, 75.0 %",
                 "| web | 1000 | 77 | 3 | 288 | 3 |", "/c/1.tokens", "| x | 1 | 1 | 3 |",
                 "| y | 2 | 2 | 1 |", "validation x");
    expect_in_page("\"source_loss.web\":", true);
    expect_in_page("\"validation_set_loss.x\":", true);
    expect_in_page("co<de", false);
    expect_in_page("<web>", false);
}

/* Calls of validations are not in a trace that says so. */
Test(run_view, the_time_of_a_step_is_without_validations)
{
    const char *validation = "{\"step\":6,\"validation_loss\":2,\"validation_ms\":60}\n";
    write_metrics(6, validation);
    write_file("trace.json", "{\"first_step\":3,\"steps\":4,\"validation_ms\":60,\"gemm_ms\":20}");
    EXPECT_WORDS("Steps 3 to 6, without validations", "| gemm | 5 | 50.0 % |",
                 "| everything else | 5 | 50.0 % |", "took 0.06 s");
}

Test(run_view, a_resume_says_by_whom_and_on_which_mesh)
{
    write_metrics(3, "{\"event\":\"resumed\",\"step\":3,\"from\":\"/r/checkpoint-3\",\"restart\":0,"
                     "\"load_ms\":250,\"mesh\":\"1 x 2\",\"mesh_was\":\"2 x 1\"}\n"
                     "{\"event\":\"resumed\",\"step\":3,\"from\":\"/r/checkpoint-3\",\"restart\":2,"
                     "\"load_ms\":250}\n");
    EXPECT_WORDS("the job was started anew; from checkpoint-3, loaded in 0.25 s; the mesh was "
                 "2 x 1 and is 1 x 2",
                 "restart 2 by ndlaunch; from checkpoint-3");
}

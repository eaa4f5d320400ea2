// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/parts.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/printed.h"
#include "tests/support/tempdir.h"

static tempdir dir;

TEMPDIR_SUITE(run_view, tempdir_leave_empty);

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

static char *page_of(const nd_run_view *views, int count)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    cr_assert_not_null(out);
    assert_ok(nd_page_write(views, count, 0, out));
    cr_assert_eq(fclose(out), 0);
    return text;
}

/* The block of JSON in a page. */
static json_t *data_in(const char *html)
{
    static const char mark[] = "<script type=\"application/json\" id=\"data\">";
    json_error_t error;
    const char *text = strstr(html, mark);
    cr_assert_not_null(text);
    text += sizeof mark - 1;
    json_t *data = json_loadb(text, (size_t)(strstr(text, "</script>") - text), 0, &error);
    cr_assert_not_null(data, "%s", error.text);
    return data;
}

/* The data of a page, good until the next call. */
static json_t *data_of(const nd_run_view *views, int count)
{
    static json_t *data;
    char *html = page_of(views, count);
    json_decref(data);
    data = data_in(html);
    free(html);
    return data;
}

/* Returns the data of the page of the run in the folder. */
static json_t *data_of_run(void)
{
    nd_run_view view = open_view(0);
    json_t *data = data_of(&view, 1);
    nd_run_view_close(&view);
    return data;
}

/* A part of it: "runs/0/columns/loss/first". NULL: there is none. */
static json_t *part_of(json_t *data, const char *path)
{
    char name[128];
    while (data && *path) {
        const size_t length = strcspn(path, "/");
        snprintf(name, sizeof name, "%.*s", (int)length, path);
        data = json_is_array(data) ? json_array_get(data, (size_t)atoi(name))
                                   : json_object_get(data, name);
        path += length + (path[length] == '/');
    }
    return data;
}

/* This part of the page of the run in the folder. */
static void expect_part(const char *path, const char *wanted)
{
    char *text = json_dumps(part_of(data_of_run(), path),
                            JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    cr_assert_str_eq(text, wanted);
    free(text);
}

static double number_of(json_t *data, const char *path)
{
    const json_t *number = part_of(data, path);
    return number ? json_number_value(number) : NAN;
}

Test(run_view, figures_of_a_finished_run)
{
    static const struct {
        const char *path;
        double value;
    } wanted[] = {{"runs/0/columns/loss/first", 5},
                  {"runs/0/columns/loss/end", 2.5},
                  {"runs/0/columns/step_ms/median", 10}, /* the first two do not count */
                  {"runs/0/columns/tokens_per_second/median", 450},
                  {"runs/0/columns/step_ms/sum", 2040},
                  {"runs/0/columns/validation_loss/last", 2.5},
                  {"runs/0/columns/validation_loss/least", 2},
                  {"runs/0/columns/validation_loss/least_step", 3},
                  {"runs/0/columns/peak_memory_bytes/largest", 2097152},
                  {"runs/0/record/model/planned_bytes", 1048576},
                  {"runs/0/columns/tokens_seen/last", 384},
                  {"runs/0/saved/0/step", 12},
                  {"runs/0/saved/0/bytes", 5},
                  {"runs/0/first", 1},
                  {"runs/0/last", 6},
                  {"runs/0/wanted", 6}};
    write_metrics(6, "{\"step\":3,\"validation_loss\":2,\"validation_ms\":5}\n"
                     "{\"step\":6,\"validation_loss\":2.5,\"validation_ms\":5}\n");
    write_file("run.json", record);
    cr_assert_eq(mkdir(tempdir_file(&dir, "checkpoint-12"), 0700), 0);
    write_file("checkpoint-12/half", "12345");
    json_t *data = data_of_run();
    cr_assert_str_eq(json_string_value(part_of(data, "runs/0/verdict")), "finished: all 6 steps");
    cr_assert_str_eq(json_string_value(part_of(data, "runs/0/mood")), "good");
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        const double found = number_of(data, wanted[i].path);
        cr_assert_eq(found, wanted[i].value, "%s is %g", wanted[i].path, found);
    }
    cr_assert(json_is_array(part_of(data, "defaults/optimizer.betas")),
              "a default has the form of run.json");
}

/* Losses of joined and of separate documents do not compare. */
Test(run_view, the_best_validation_has_documents_as_the_last_one)
{
    write_metrics(6, "{\"step\":2,\"validation_loss\":0.5,\"validation_set_loss\":{\"a\":0.5}}\n"
                     "{\"step\":4,\"validation_loss\":2,\"validation_set_loss\":{\"a\":3.0125},"
                     "\"separate_length\":64}\n"
                     "{\"step\":6,\"validation_loss\":2.5,\"separate_length\":64}\n");
    json_t *data = data_of_run();
    cr_assert_eq(number_of(data, "runs/0/columns/validation_loss/least"), 2);
    cr_assert_eq(number_of(data, "runs/0/columns/validation_loss/lost"), 0);
    cr_assert_eq(number_of(data, "runs/0/columns/validation_loss/least_step"), 4);
    cr_assert_eq(number_of(data, "runs/0/columns/validation_set_loss.a/least"), 3.0125);
    cr_assert_eq(number_of(data, "runs/0/curves/validation_set_loss.a/mean/1"), 3.0125);
}

/* Each skipped step is at its own place, and no number is rounded as a script would round it. The
 * sources of a run share the points of a chart. */
Test(run_view, skipped_steps_and_long_numbers_are_exact)
{
    FILE *out = fopen(tempdir_file(&dir, "metrics.jsonl"), "w");
    cr_assert_not_null(out);
    for (int step = 1; step <= 10000; step++) {
        const bool skipped = step > 9000 && step % 3 == 0;
        fprintf(out,
                "{\"step\":%d,\"source_loss\":{\"a\":1,\"b\":2,\"c\":3,\"d\":4},%s\"step_ms\":1}\n",
                step, skipped ? "\"skipped\":true," : "");
    }
    fclose(out);
    write_file("run.json", "{\"config\":{\"train.seed\":9007199254740993,\"a\":[-1,"
                           "-9007199254740993,9007199254740992]}}");
    json_t *data = data_of_run(), *skipped = part_of(data, "runs/0/skipped");
    cr_assert_eq(json_array_size(skipped), 100);
    cr_assert_eq(json_array_size(part_of(data, "runs/0/curves/source_loss.c/mean")), 300);
    cr_assert_eq(number_of(data, "runs/0/skipped/0"), 9003);
    cr_assert_eq(number_of(data, "runs/0/skipped/99"), 9300);
    json_t *config = part_of(data, "runs/0/record/config");
    cr_assert_str_eq(json_string_value(part_of(config, "train.seed")), "9007199254740993");
    cr_assert_eq(number_of(config, "a/0"), -1);
    cr_assert_str_eq(json_string_value(part_of(config, "a/1")), "-9007199254740993");
    cr_assert_eq(number_of(config, "a/2"), 9007199254740992);
}

#define SIGNALLED(step) "{\"event\":\"checkpoint\",\"step\":" step ",\"reason\":\"signal\"}\n"

/* Checks a run with these lines, read `later` s after the last was written; returns its verdict. */
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
    expect_end(4, SIGNALLED("4"), 3600, ND_RUN_STOPPED);
    const char *verdict =
        expect_end(4, "{\"event\":\"early_stopped\",\"step\":4,\"why\":\"<no> better\"}\n", 3600,
                   ND_RUN_STOPPED_EARLY);
    cr_assert_not_null(strstr(verdict, "step 4 of 6: <no> better"));
    expect_end(5, "{\"event\":\"early_stopped\",\"step\":4}\n", 3600, ND_RUN_ENDED_EARLY);
    expect_end(5, SIGNALLED("4"), 3600, ND_RUN_ENDED_EARLY);
    /* A minute, or as long as ten steps take. */
    static const char slow[] = "{\"step\":5,\"loss\":1,\"step_ms\":300000}\n";
    expect_end(4, "", 40, ND_RUN_RECENT);
    expect_end(4, "", 80, ND_RUN_ENDED_EARLY);
    expect_end(4, slow, 2900, ND_RUN_RECENT);
    expect_end(4, slow, 3100, ND_RUN_ENDED_EARLY);
    unlink(tempdir_file(&dir, "run.json"));
    expect_end(4, "", 3600, ND_RUN_UNKNOWN);
}

/* A line as nd_sinks leaves it. */
#define LOST(step, sink, records)                                                                  \
    "{\"event\":\"records_lost\",\"step\":" step ",\"sink\":\"" sink "\",\"records\":" records     \
    ",\"why\":\"<no> space\"}\n"

/* The verdict of this kind has all of these facts. */
static const char *expect_facts(const char *further, nd_run_end end, const char *const *facts)
{
    const char *verdict = expect_end(4, further, 3600, end);
    for (; *facts; facts++) {
        cr_assert_not_null(strstr(verdict, *facts), "no \"%s\" in: %s", *facts, verdict);
    }
    return verdict;
}

#define EXPECT_VERDICT(further, end, ...)                                                          \
    expect_facts(further, end, (const char *const[]){__VA_ARGS__, NULL})

/* The last step that the file has is not the last one of the run. */
Test(run_view, a_run_on_a_full_disk_has_not_ended_early)
{
    write_file("run.json", record);
    const char *whole =
        EXPECT_VERDICT(LOST("6", "metrics.jsonl", "2"), ND_RUN_FINISHED, "all 6 steps");
    cr_assert_null(strchr(whole, ','), "nothing is left out: %s", whole);
    EXPECT_VERDICT("{\"event\":\"checkpoint\",\"step\":6,\"reason\":\"end\"}\n", ND_RUN_FINISHED,
                   "all 6 steps");
    EXPECT_VERDICT("{\"event\":\"early_stopped\",\"step\":5,\"why\":\"<no> better\"}\n" LOST(
                       "5", "metrics.jsonl", "1"),
                   ND_RUN_STOPPED_EARLY, "step 5 of 6", "<no> better");
    EXPECT_VERDICT(SIGNALLED("5") LOST("5", "metrics.jsonl", "1"), ND_RUN_STOPPED, "step 5 of 6",
                   "--resume-from-checkpoint latest");
    EXPECT_VERDICT(SIGNALLED("4") LOST("5", "metrics.jsonl", "1"), ND_RUN_ENDED_EARLY,
                   "step 5 of 6");
    EXPECT_VERDICT(LOST("4", "TensorBoard", "4"), ND_RUN_ENDED_EARLY, "step 4 of 6",
                   "the run's log");
}

Test(run_view, a_finished_run_says_what_it_left_out)
{
    write_file("run.json", record);
    EXPECT_VERDICT("{\"step\":5,\"skipped\":true,\"loss\":null,\"tokens\":64,\"step_ms\":1}\n"
                   "{\"step\":6,\"skipped\":true,\"loss\":null,\"tokens\":0,\"step_ms\":1}\n"
                   "{\"event\":\"checkpoint_failed\",\"step\":4}\n"
                   "{\"event\":\"checkpoint_failed\",\"step\":4}\n",
                   ND_RUN_FINISHED, "all 6 steps", "1 step skipped", "1 step without labels",
                   "2 checkpoints not written");
}

#define ENDED(step, code, why)                                                                     \
    "{\"event\":\"ended\",\"step\":" step ",\"code\":" code ",\"why\":\"" why "\"}\n"

/* One that may have lost another rank sends the reader to the run's log. */
Test(run_view, the_last_line_says_why_a_run_ended)
{
    static const char elsewhere[] = "another rank failed first";
    write_file("run.json", record);
    EXPECT_VERDICT(ENDED("4", "74", "rank 1 was <lost>"), ND_RUN_FAILED, "step 4 of 6", "code 74",
                   "rank 1 was <lost>", elsewhere);
    EXPECT_VERDICT(ENDED("4", "124", "stuck"), ND_RUN_FAILED, "code 124: stuck", elsewhere);
    const char *own = EXPECT_VERDICT(ENDED("6", "73", "the model was not saved"), ND_RUN_FAILED,
                                     "step 6 of 6", "code 73", "the model was not saved");
    cr_assert_null(strstr(own, elsewhere), "%s", own);
    own = EXPECT_VERDICT(ENDED("4", "75", "a signal after step 4 of 6, so"), ND_RUN_FAILED,
                         "a signal after step 4 of 6, so");
    cr_assert(!strstr(own, "code") && !strstr(own, "failed"), "a stop is no failure: %s", own);
    EXPECT_VERDICT(SIGNALLED("4") ENDED("4", "75", "stopped by a signal"), ND_RUN_STOPPED,
                   "step 4 of 6", "--resume-from-checkpoint latest");
    EXPECT_VERDICT(ENDED("4", "74", "lost") LOST("4", "TensorBoard", "4"), ND_RUN_FAILED,
                   "step 4 of 6", "code 74: lost", elsewhere);
}

/* The step after it, or a start that has made none, is of a process that was killed. */
Test(run_view, a_later_start_takes_the_reason_back)
{
    static const char *const later[][2] = {
        {ENDED("4", "74", "lost") "{\"event\":\"resumed\",\"step\":4}\n", "step 4 of 6"},
        {ENDED("4", "74", "lost") "{\"step\":5,\"loss\":1,\"step_ms\":1}\n", "step 5 of 6"}};
    write_file("run.json", record);
    for (int i = 0; i < 2; i++) {
        const char *verdict =
            EXPECT_VERDICT(later[i][0], ND_RUN_ENDED_EARLY, later[i][1], "the run's log");
        cr_assert(!strstr(verdict, "lost") && !strstr(verdict, "74"), "%s", verdict);
    }
}

/* The last events of each kind are there, the newest first, and all are counted. The more runs, the
 * fewer events of a kind each run has. */
Test(run_view, many_events_of_one_kind_leave_room_for_others)
{
    static char text[64 * 1001] =
        "{\"event\":\"checkpoint_failed\",\"step\":1,\"why\":\"<disk>\"}\n";
    for (int i = 0; i < 1000; i++) {
        strcat(text, "{\"event\":\"checkpoint\",\"step\":2}\n");
    }
    write_metrics(2, text);
    json_t *data = data_of_run();
    cr_assert_eq(json_array_size(part_of(data, "runs/0/events")), 201);
    cr_assert_str_eq(nd_json_words(part_of(data, "runs/0/events/200"), "why"), "<disk>");
    cr_assert_eq(number_of(data, "runs/0/event_counts/checkpoint"), 1000);
    nd_run_view view = open_view(0), views[] = {view, view, view, view};
    cr_assert_eq(json_array_size(part_of(data_of(views, 4), "runs/3/events")), 101);
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

/* The newest start has the settings that count. ".//" is shown by the name of the folder. */
Test(run_view, of_several_starts_the_last_one_counts)
{
    write_metrics(6, "");
    write_file("run.json", "{\"config\":{\"train.steps\":4}}");
    write_file("run-2.json", "{\"config\":{\"train.steps\":5}}");
    write_file("run-3.json", record);
    nd_run_view view;
    cr_assert_eq(chdir(dir.path), 0);
    assert_ok(nd_run_view_open(".//", 0, &view));
    cr_assert_str_eq(view.name, strrchr(dir.path, '/') + 1);
    cr_assert_eq(view.steps_wanted, 6);
    nd_run_view_close(&view);
}

/* The loss falls from 5 by 0.5 in six steps of 64 tokens, the first two of which take a second. */
static void expect_curves(json_t *data, int runs)
{
    cr_assert_eq(json_array_size(json_object_get(data, "runs")), (size_t)runs);
    for (int i = 0; i < 6; i++) {
        const double step = i + 1, seconds = i < 2 ? step : 2 + 0.01 * (step - 2);
        const struct {
            const char *path;
            double expected;
        } lists[] = {{"curves/loss/step", step},
                     {"curves/loss/mean", 5.5 - 0.5 * step},
                     {"curves/loss/low", 5.5 - 0.5 * step},
                     {"curves/loss/high", 5.5 - 0.5 * step},
                     {"tokens", 64 * step},
                     {"seconds", seconds}};
        for (size_t k = 0; k < sizeof lists / sizeof *lists; k++) {
            const char *path = printed("runs/%d/%s/%d", runs - 1, lists[k].path, i);
            cr_assert_float_eq(number_of(data, path), lists[k].expected, 1e-4, "%s", path);
        }
    }
}

Test(run_view, a_page_of_one_run_and_of_two)
{
    write_metrics(6, "{\"step\":6,\"validation_loss\":2.5,\"validation_ms\":5}\n");
    write_file("run.json", record);
    nd_run_view views[2] = {open_view(0), open_view(0)};
    for (int count = 1; count <= 2; count++) {
        char *html = page_of(views, count);
        json_t *data = data_in(html);
        cr_assert_eq(strncmp(html, nd_page_mark, strlen(nd_page_mark)), 0);
        expect_curves(data, count);
        cr_assert_not_null(strstr(html, "\\u003crun>"));
        cr_assert_null(strstr(html, "<run>"));
        cr_assert_null(strstr(html, "http:"));
        cr_assert_null(strstr(html, "https:"));
        json_decref(data);
        free(html);
    }
    /* The steps of a page are those of all its runs. */
    nd_run_view_close(&views[1]);
    write_file("metrics.jsonl", "{\"step\":4,\"loss\":1,\"step_ms\":1}\n");
    views[1] = open_view(0);
    cr_assert_eq(json_array_size(part_of(data_of(views, 2), "runs/0/curves/loss/mean")), 6);
    nd_run_view_close(&views[0]);
    nd_run_view_close(&views[1]);
}

Test(run_view, the_slowest_rank_is_named)
{
    static const char *const slowest[][2] = {{"10", "0"}, {"10", "3"},  {"10", "3"},   {"18", "3"},
                                             {"10", "3"}, {"9", "1e9"}, {"null", "3"}, {"9", "4"}};
    FILE *out = fopen(tempdir_file(&dir, "metrics.jsonl"), "w");
    for (int i = 0; i < 8; i++) {
        fprintf(out,
                "{\"step\":%d,\"loss\":1,\"step_ms\":20,\"slowest_ms\":%s,\"fastest_ms\":8,"
                "\"slowest_rank\":%s}\n",
                1 + i, slowest[i][0], slowest[i][1]);
    }
    fclose(out);
    write_file("run.json", "{\"config\":{},\"mesh\":{\"pp\":1,\"dp_replicate\":1,\"dp_shard\":2,"
                           "\"cp\":1,\"tp\":2}}");
    expect_part("runs/0/slowest", "[[0,\"s0 t0\",1,2,2],[3,\"s1 t1\",4,16,10],[4,\"\",1,1,1]]");
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
    FILE *out = fopen(tempdir_file(&dir, "profile.json"), "w");
    cr_assert_not_null(out);
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", out);
    write_file("run.json",
               printed("{\"config\":{},\"mesh\":{\"pp\":1,\"dp_replicate\":1,%s}}", mesh));
    write_metrics(3, "");
    return out;
}

/* Ranks 0 and 1 are one group of tp, 2 and 3 another, both with the same sequence numbers. */
Test(run_view, a_profile_says_who_waited_for_whom)
{
    FILE *out = begin_profile("\"dp_shard\":2,\"cp\":1,\"tp\":2");
    fputs("{\"name\":\"step 3\",\"cat\":\"step\",\"ph\":\"X\",\"ts\":0,\"dur\":9000,\"pid\":0,"
          "\"tid\":0},\n{\"cat\":\"step\",\"pid\":1},\n",
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
    expect_part("runs/0/waits",
                "{\"steps\":1,\"collectives\":3,\"ranks\":[[6.1,3,0.5,1],[3.6,0.5,3,1],"
                "[0.5,0.5,0,0],[0.1,0,0.5,1]]}");
}

/* Ranks 0 and 1 of tp have copies of a KV head, ranks 2 and 3 of another; or such pairs of cp
 * exchange heads for tokens. */
Test(run_view, parts_of_an_axis_wait_for_each_other)
{
    static const char *const axes[][3] = {{"tp", "cp", "kv_copies"}, {"cp", "tp", "ulysses"}};
    for (int i = 0; i < 2; i++) {
        const char *const *axis = axes[i];
        FILE *out = begin_profile(
            printed("\"dp_shard\":1,\"%s\":4,\"%s\":1,\"%s\":2", axis[0], axis[1], axis[2]));
        for (int rank = 0; rank < 4; rank++) {
            write_call(out, rank, rank == 3 ? 2000 : 1000, 4000, axis[2], 1);
            write_call(out, rank, 9000, 4000, "world", 1);
        }
        fclose(out);
        expect_part("runs/0/waits", "{\"steps\":0,\"collectives\":3,\"ranks\":[[8,0,0,0],[8,0,0,1],"
                                    "[8,1,0,0],[8,0,1,2]]}");
    }
}

Test(run_view, another_profile_is_refused)
{
    nd_run_view view;
    fclose(begin_profile("\"dp_shard\":1,\"cp\":1,\"tp\":1"));
    expect_part("runs/0/waits", "null"); /* of one worker */
    write_file("profile.json", "[1, 2]\n");
    view = open_view(0);
    json_t *run = json_object();
    assert_fails(nd_ranks_add(&view, &run), ND_ERR_DATA, "no profile");
    json_decref(run);
    nd_run_view_close(&view);
}

Test(run_view, fp8_health_names_the_worst_layer_and_step)
{
    write_metrics(3,
                  "{\"step\":2,\"fp8_health\":{\"gradient\":{\"mlp.up_proj\":{"
                  "\"underflow\":0.25,\"underflow_layer\":1,\"saturation\":0.5,\"amax\":3,"
                  "\"amax_layer\":7}}}}\n"
                  "{\"step\":3,\"fp8_health\":{\"gradient\":{\"mlp.up_proj\":{"
                  "\"underflow\":0.125,\"underflow_layer\":0,\"amax\":null,\"amax_layer\":5}}}}\n");
    json_t *data = data_of_run();
#define UP_UNDERFLOW "runs/0/columns/fp8_health.gradient.mlp.up_proj.underflow"
    cr_assert_eq(number_of(data, UP_UNDERFLOW "/largest"), 0.25);
    cr_assert_eq(number_of(data, UP_UNDERFLOW "/largest_step"), 2);
    cr_assert_eq(number_of(data, UP_UNDERFLOW "/layer"), 1);
    cr_assert_null(part_of(data, UP_UNDERFLOW "_layer"));
    cr_assert_eq(json_array_size(part_of(data, "runs/0/curves/fp8_underflow.gradient/mean")), 2);
    cr_assert_eq(number_of(data, "runs/0/curves/fp8_saturation.gradient/mean/0"), 0.5);
}

/* The trace covers steps 3 to 6 of 8, of 10 ms each. */
Test(run_view, the_time_of_a_trace_is_that_of_its_steps)
{
    write_metrics(8, "{\"step\":6,\"validation_loss\":2,\"validation_ms\":60}\n");
    write_file("trace.json", "{\"first_step\":3,\"steps\":4,\"validation_ms\":60,\"gemm_ms\":20}");
    json_t *data = data_of_run();
    cr_assert_eq(number_of(data, "runs/0/traced_ms"), 40);
    cr_assert_eq(number_of(data, "runs/0/trace/gemm_ms"), 20);
}

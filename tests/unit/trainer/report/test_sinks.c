// SPDX-License-Identifier: Apache-2.0
#include <jansson.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/log.h"
#include "tests/support/printed.h"
#include "tests/unit/trainer/report/report_files.h"
#include "tests/unit/trainer/shapes.h"
#include "trainer/report/report.h"

static nd_config config;
static const nd_shape shape = {SIZES(256, 64, 128, 2, 4, 2, 16)};

static void make(void)
{
    tempdir_catch_stderr(&dir);
    assert_ok(nd_config_init(&config));
    config.train.steps = 10;
    config.train.sequence_length = 128;
    config.log.interval = 4;
}

TEMPDIR_SUITE(sinks, make);

static nd_report_options options_of(bool terminal)
{
    return (nd_report_options){.config = &config,
                               .shape = &shape,
                               .dir = dir.path,
                               .world_size = 4,
                               .tokens_per_step = 1024,
                               .terminal = terminal};
}

static nd_sinks open_sinks(bool terminal)
{
    nd_report_options options = options_of(terminal);
    nd_sinks sinks;
    assert_ok(nd_sinks_open(&sinks, &options));
    return sinks;
}

#define put(kind, record) nd_sinks_put(&sinks, (record).step, (nd_record){.kind = &(record)})
#define send_event(...)   assert_ok(nd_sinks_event(&sinks, &(nd_run_event){__VA_ARGS__}))

static nd_step_record record_of(int64_t step)
{
    return (nd_step_record){.step = step,
                            .loss = 1.0 / 3 / (double)step,
                            .grad_norm = 0.1,
                            .lr = 3e-4,
                            .tokens = 1000,
                            .tokens_seen = 1000 * step,
                            .step_seconds = 0.5,
                            .data_wait_seconds = 0.001,
                            .peak_memory_bytes = 12345678,
                            .wire_bytes = {4000, 50, 30, 9, 7}};
}

static const nd_validation_record validation = {
    .step = 5, .loss = 2.25, .tokens = 777, .seconds = 1.5};

static nd_status send_steps(nd_sinks *sinks, int64_t first, int64_t last)
{
    nd_status status = ND_OK;
    for (int64_t step = first; step <= last && status == ND_OK; step++) {
        nd_step_record record = record_of(step);
        status = nd_sinks_put(sinks, step, (nd_record){.step = &record});
    }
    return status;
}

#define wrote(times, part) expect_in("metrics.jsonl", times, part)

static void expect_whole_lines(const char *name)
{
    char *text = read_file(name);
    cr_expect(text[0] && text[strlen(text) - 1] == '\n', "half a line: %s", text);
    free(text);
}

static void expect_whole(const char *name, const char *wanted)
{
    char *text = read_file(name);
    cr_expect_str_eq(text, wanted);
    free(text);
}
#define wrote_only(text) expect_whole("metrics.jsonl", text)
#define said_only(text)  expect_whole("stderr", text)

/* The values that two equal runs share come before the times, which differ. */
Test(sinks, every_step_is_one_line_of_json_whose_doubles_come_back_exactly)
{
    nd_sinks sinks = open_sinks(false);
    assert_ok(send_steps(&sinks, 1, 10));
    nd_sinks_close(&sinks);
    char *text = read_file("metrics.jsonl"), *rest = text;
    for (int64_t step = 1; step <= 10; step++) {
        char *line = strsep(&rest, "\n");
        json_t *object = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
        cr_assert_not_null(object, "%s", line);
        const struct {
            const char *key;
            double value;
            bool whole, differs;
        } numbers[] = {{"step", (double)step, true},
                       {"loss", 1.0 / 3 / (double)step},
                       {"grad_norm", 0.1},
                       {"lr", 3e-4},
                       {"tokens", 1000, true},
                       {"tokens_seen", 1000 * (double)step, true},
                       {"wire_bytes", 4096, true},
                       {"peak_memory_bytes", 12345678, true, true},
                       {"step_ms", 500, true, true},
                       {"data_wait_ms", 1, true, true},
                       {"tokens_per_second", 2048, true, true},
                       {"tokens_per_second_per_worker", 512, true, true}};
        for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
            const json_t *number = json_object_get(object, numbers[i].key);
            const char *place = strstr(line, printed("\"%s\"", numbers[i].key));
            cr_assert_eq(place >= strstr(line, "\"step_ms\""), numbers[i].differs, "%s", line);
            cr_assert_eq(json_number_value(number), numbers[i].value, "%s", line);
            cr_assert_eq(json_is_integer(number), numbers[i].whole, "%s", line);
        }
        json_t *wire = json_object_get(object, "wire");
        cr_assert_eq(json_object_size(wire), ND_TRAFFIC_COUNT);
        for (int k = 0; k < ND_TRAFFIC_COUNT; k++) {
            json_t *bytes = json_object_get(wire, nd_traffic_name((nd_traffic_kind)k));
            cr_assert_eq(json_integer_value(bytes), record_of(step).wire_bytes[k]);
        }
        /* Four roundings as before, in another order: 4 epsilon. */
        double expected = 512 * nd_flops_per_token_causal(&shape, 128) * 1e-12;
        cr_assert_float_eq(json_real_value(json_object_get(object, "tflops_per_worker_causal")),
                           expected, 1e-15 * expected);
        expected = 512 * nd_flops_per_token_accelerate(&shape, 128) * 1e-12;
        cr_assert_float_eq(json_real_value(json_object_get(object, "tflops_per_worker_accelerate")),
                           expected, 1e-15 * expected);
        json_decref(object);
    }
    cr_assert_str_eq(rest, "");
    free(text);
}

Test(sinks, infinity_and_nan_are_null)
{
    nd_sinks sinks = open_sinks(false);
    nd_step_record record = record_of(1);
    record.loss = NAN;
    record.grad_norm = INFINITY;
    record.skipped = true;
    record.step_seconds = 0; /* a clock that stood still divides nothing */
    assert_ok(put(step, record));
    nd_sinks_close(&sinks);
    wrote(1, "{\"step\":1,\"skipped\":true,\"loss\":null,\"grad_norm\":null,");
    wrote(1, "\"tokens_per_second\":0,");
}

/* Absent where it is not known. What equal runs share stands before the first time, and the slowest
 * rank behind it. */
Test(sinks, separate_documents_and_the_slowest_rank_have_their_numbers)
{
    nd_sinks sinks = open_sinks(false);
    nd_step_record record = record_of(1);
    assert_ok(put(step, record));
    record.slowest_seconds = 0.25;
    record.fastest_seconds = 0.125;
    record.slowest_rank = 3;
    record.visible_pairs = 4096;
    record.balance = 1.015625;
    record.padding = 0.25;
    assert_ok(put(step, record));
    nd_sinks_close(&sinks);
    wrote(1, "balance");
    wrote(2, "slowest");
    wrote(1, "},\"visible_pairs\":4096,\"balance\":1.015625,\"padding\":0.25,\"step_ms\":500,"
             "\"data_wait_ms\":1,\"slowest_ms\":250,\"fastest_ms\":125,\"slowest_rank\":3,\"tok");
}

/* The fields of several sources stand before those that differ between equal runs. */
Test(sinks, sources_and_sets_have_their_losses)
{
    nd_sinks sinks = open_sinks(false);
    const nd_source_loss list[] = {{"web", 2.5, 900}, {"code-2", (double)NAN, 0}};
    nd_step_record record = record_of(1);
    record.sources = list;
    record.source_count = 2;
    assert_ok(put(step, record));
    const nd_validation_record sets = {
        .step = 1, .loss = 2, .tokens = 900, .sets = list, .set_count = 2};
    assert_ok(put(validation, sets));
    nd_source_loss many[256];
    for (int i = 0; i < 256; i++) {
        many[i] = (nd_source_loss){"a-name-as-long-as-the-configuration-allows-any1", -1.0 / 3,
                                   INT64_MAX};
    }
    record.sources = many;
    record.source_count = 256;
    assert_ok(put(step, record));
    nd_sinks_close(&sinks);
    wrote(1, "\"source_loss\":{\"web\":2.5,\"code-2\":null},\"source_tokens\":{\"web\":900,"
             "\"code-2\":0},\"wire_bytes\":");
    wrote(1, "{\"step\":1,\"validation_loss\":2,\"validation_tokens\":900,"
             "\"validation_set_loss\":{\"web\":2.5,\"code-2\":null},"
             "\"validation_set_tokens\":{\"web\":900,\"code-2\":0},\"validation_ms\":0}\n");
    said(1, "\n  web: 2.5000 over 900 tokens\n  code-2: nan over 0 tokens\n");
    wrote(3, "\n");
    wrote(256, "any1\":9223372036854775807");
}

Test(sinks, health_is_one_line_with_the_linears_that_run_in_fp8)
{
    nd_sinks sinks = open_sinks(false);
    nd_health_record record = {.step = 4};
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        for (int linear = 0; linear < ND_LINEAR_COUNT; linear++) {
            record.summary.worst[kind][linear] =
                (nd_health_worst){1.0 / 3, 1e-300, INFINITY, 1000001, 1000002, 1000000};
        }
        record.summary.worst[kind][0].amax_layer = -1;
    }
    assert_ok(put(health, record));
    nd_sinks_close(&sinks);
    json_t *object =
        json_load_file(tempdir_file(&dir, "metrics.jsonl"), JSON_REJECT_DUPLICATES, NULL);
    cr_assert_not_null(object);
    cr_assert_eq(json_integer_value(json_object_get(object, "step")), 4);
    const json_t *health = json_object_get(object, "fp8_health");
    cr_assert_eq(json_object_size(health), ND_OPERAND_KINDS);
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        const json_t *of = json_object_get(health, nd_operand_name((nd_operand_kind)kind));
        cr_assert_eq(json_object_size(of), ND_LINEAR_COUNT - 1);
        const json_t *last = json_object_get(of, nd_linears[6].module);
        cr_assert_eq(json_real_value(json_object_get(last, "underflow")), 1.0 / 3);
        cr_assert_eq(json_real_value(json_object_get(last, "saturation")), 1e-300);
        cr_assert(json_is_null(json_object_get(last, "amax")));
        cr_assert_eq(json_integer_value(json_object_get(last, "amax_layer")), 1000000);
        cr_assert_eq(json_integer_value(json_object_get(last, "underflow_layer")), 1000001);
        cr_assert_eq(json_integer_value(json_object_get(last, "saturation_layer")), 1000002);
    }
    json_decref(object);
}

Test(sinks, validation_is_a_record_and_a_line)
{
    nd_sinks sinks = open_sinks(false);
    assert_ok(put(validation, validation));
    nd_validation_record separate = validation;
    separate.step = 7;
    separate.separate_length = 128;
    assert_ok(put(validation, separate));
    nd_sinks_close(&sinks);
    wrote_only("{\"step\":5,\"validation_loss\":2.25,\"validation_tokens\":777,"
               "\"validation_ms\":1500}\n"
               "{\"step\":7,\"validation_loss\":2.25,\"validation_tokens\":777,"
               "\"separate_length\":128,\"validation_ms\":1500}\n");
    said_only("step 5/10  validation loss 2.2500 over 777 tokens in 1.5 s\n"
              "step 7/10  validation loss 2.2500 over 777 tokens in 1.5 s\n");
}

/* A run without a terminal, whose second step and all others take so many seconds. */
static void send_timed(int64_t steps, double second, double others)
{
    nd_sinks sinks = open_sinks(false);
    for (int64_t step = 1; step <= steps; step++) {
        nd_step_record record = record_of(step);
        record.step_seconds = step == 2 ? second : others;
        assert_ok(put(step, record));
    }
    nd_sinks_close(&sinks);
}

/* Interval 4 of 10 steps: the first, 4, 8 and the last. The figures are means over the steps since
 * the last line. */
Test(sinks, plain_lines_come_at_the_interval)
{
    send_timed(10, 1.5, 0.5); /* 2, 3, 4: mean 833 ms */
    said(4, "\n");
    said(1, "step 1/10  loss 0.3333");
    said(1, "\nstep 4/10  ");
    said(1, "\nstep 8/10  ");
    said(1, "\nstep 10/10  ");
    said(1, "  833 ms  1229 tok/s  ");
    said(0, "\033"); /* a file gets no control sequences */
    said(0, "\r");
}

/* A run of so many steps, which ends while the next line of a step is far away. */
static void send_long(int steps, double second, double others)
{
    config.train.steps = steps;
    config.log.interval = 1000;
    send_timed(steps, second, others);
}

/* 40 s a step: said after 80 s, 160 s, 320 s, 640 s and so on, and no more at the end. */
Test(sinks, a_long_run_without_a_terminal_says_the_time_left)
{
    send_long(17, 40, 40);
    said(4, " left\n");
    said(1, "step 2/17  about 10 min 00 s left\n");
    said(1, "step 16/17  about 40 s left\n");
}

/* 40 s a step, but 140 s for the second: the newest step is a tenth of the mean, which is 50 s. */
Test(sinks, the_time_left_follows_a_moving_mean)
{
    send_long(17, 140, 40);
    said(1, "step 2/17  about 12 min 30 s left\n");
}

/* 50 min a step: said after these, after 100 min, and then each time that an hour is over. */
Test(sinks, the_time_left_is_said_each_hour)
{
    send_long(9, 3000, 3000);
    said(5, " left\n");
    said(1, "step 4/9  about 4 h 10 min left\nstep 6/9  about 2 h 30 min left\n");
}

/* A bar is drawn on a terminal when the run takes 20 s or more, and is gone at the end. Each line
 * takes its row; it is drawn ten times a second at most. */
Test(sinks, a_long_run_on_a_terminal_has_a_bar)
{
    config.train.steps = 40;
    config.log.interval = 2;
    nd_sinks sinks = open_sinks(true);
    assert_ok(send_steps(&sinks, 1, 2));
    for (int64_t step = 3; step <= 7; step += 2) {
        usleep(110000);
        assert_ok(send_steps(&sinks, step, step));
        if (step == 3) {
            assert_ok(put(validation, validation));
        } else if (step == 5) {
            send_event(.kind = ND_RUN_EVENT_MODEL_SAVED, .path = "x");
        }
    }
    nd_sinks_close(&sinks);
    said(1, "step 1/40  loss 0.3333  20 s left\033[K\r\033[Kstep 2/40  loss");
    said(1, "\r\033[Kstep 5/40  validation loss");
    said(1, "step 5/40  loss 0.0667  18 s left\033[K\r\033[Kmodel saved: x\n");
    char *text = read_file("stderr");
    cr_expect_str_eq(text + strlen(text) - 4, "\r\033[K", "%s", text);
    free(text);
}

/* Neither the last step nor one without a label that counts has a bar. */
Test(sinks, a_bar_has_a_loss_and_is_not_of_the_last_step)
{
    config.train.steps = 40;
    nd_sinks sinks = open_sinks(true);
    nd_step_record record = record_of(1);
    record.tokens = 0;
    assert_ok(put(step, record));
    assert_ok(send_steps(&sinks, 40, 40));
    nd_sinks_close(&sinks);
    said(0, "\r");
}

Test(sinks, a_short_or_quiet_run_has_no_bar)
{
    config.train.steps = 39; /* of 0.5 s */
    nd_sinks sinks = open_sinks(true);
    assert_ok(send_steps(&sinks, 1, 1));
    nd_sinks_close(&sinks);
    said(0, "\r");

    cr_assert_eq(unlink(tempdir_file(&dir, "metrics.jsonl")), 0);
    tempdir_catch_stderr(&dir);
    config.train.steps = 1000;
    nd_log_init(ND_LOG_WARNING, "");
    sinks = open_sinks(true);
    assert_ok(send_steps(&sinks, 1, 1));
    nd_sinks_close(&sinks);
    said_only("");
}

Test(sinks, a_folder_with_metrics_is_refused)
{
    tempdir_write(&dir, "metrics.jsonl", "old\n", 4);
    nd_report_options options = options_of(false);
    nd_sinks sinks;
    assert_fails(nd_sinks_open(&sinks, &options), ND_ERR_CANTCREATE, "already holds a run");
    cr_assert_eq(sinks.count, 0);
    nd_sinks_close(&sinks); /* nothing is closed, as often as it is asked for */
    nd_sinks_close(&sinks);
    wrote_only("old\n");
    options.dir = "/proc/nd";
    assert_fails(nd_sinks_open(&sinks, &options), ND_ERR_CANTCREATE, "/proc/nd/metrics.jsonl");
}

/* A dead process left half a line, at the end of a file that is longer than what is read of it, or
 * as its first one. */
Test(sinks, a_run_that_continues_cuts_off_half_a_line)
{
    static char old[100000];
    memset(old, 'y', sizeof old);
    old[sizeof old - 10] = '\n';
    for (int first = 0; first < 2; first++) {
        tempdir_write(&dir, "metrics.jsonl", old, first ? 10 : sizeof old);
        nd_report_options options = options_of(false);
        nd_sinks sinks;
        options.continues = true;
        assert_ok(nd_sinks_open(&sinks, &options));
        cr_expect_eq(nd_sinks_metrics_bytes(&sinks), first ? 0 : sizeof old - 9);
        assert_ok(send_steps(&sinks, 1, 1));
        nd_sinks_close(&sinks);
        wrote(!first, "y\n{\"step\":1,");
        wrote(2 - first, "\n");
    }
}

Test(sinks, a_resume_says_both_meshes_and_what_a_rewind_passes_over)
{
    nd_sinks sinks = open_sinks(false);
    const nd_mesh now = {{1, 1, 2, 1, 2}}, was = {{1, 1, 4, 1, 1}};
    char a[128], b[128];
    send_event(.kind = ND_RUN_EVENT_RESUMED, .step = 3, .path = "/run/checkpoint-3",
               .seconds = 0.25, .mesh = &now, .mesh_was = &was);
    send_event(.kind = ND_RUN_EVENT_RESUMED, .step = 3, .path = "x", .rewound_from = 9,
               .samples = 48, .reason = "a spike");
    nd_sinks_close(&sinks);
    nd_mesh_format(&now, a, sizeof a);
    nd_mesh_format(&was, b, sizeof b);
    wrote(1, printed("\"mesh\":\"%s\",\"mesh_was\":\"%s\"", a, b));
    said(1, printed("the mesh was %s and is %s\n", b, a));
    wrote(1, "\"rewound_from\":9,\"passed_over_samples\":48,\"why\":\"a spike\"}\n");
    said(1, "step 9 was not finite, so the run goes on after step 3 from x; 48 samples");
}

/* metrics.jsonl takes a part of a line, and the log on stderr, which is shorter, goes on. */
static void fill_disk(nd_sinks *sinks)
{
    struct stat st;
    assert_ok(nd_sinks_flush(sinks));
    cr_assert_eq(stat(tempdir_file(&dir, "metrics.jsonl"), &st), 0);
    set_file_limit((rlim_t)st.st_size + 20);
}

/* metrics.jsonl has a gap, and says so when there is space again. */
Test(sinks, a_full_disk_costs_lines_and_not_the_run)
{
    char path[2000] = "one/"; /* is cut in a line, twice in this one */
    memset(path + 4, 'x', sizeof path - 5);
    nd_sinks sinks = open_sinks(false);
    const nd_run_event rewinds[] = {
        {.kind = ND_RUN_EVENT_RESUMED, .step = 7, .path = "seven"},
        {.kind = ND_RUN_EVENT_RESUMED, .step = 1, .path = path, .rewound_from = 16, .reason = path},
        {.kind = ND_RUN_EVENT_RESUMED, .step = 5, .path = "five"},
    };
    assert_ok(send_steps(&sinks, 1, 8));
    fill_disk(&sinks);
    assert_ok(send_steps(&sinks, 9, 16));
    for (int i = 0; i < 3; i++) {
        assert_ok(nd_sinks_event(&sinks, &rewinds[i]));
    }
    wrote(8, "\n");
    expect_whole_lines("metrics.jsonl");
    set_file_limit(RLIM_INFINITY);
    assert_ok(send_steps(&sinks, 17, 17));
    assert_ok(nd_sinks_flush(&sinks));
    assert_ok(send_steps(&sinks, 18, 18));
    nd_sinks_close(&sinks);
    char *text = read_file("metrics.jsonl");
    const char *one = strstr(text, "{\"event\":\"resumed\",\"step\":1,\"from\":\"one/x");
    const char *next = strstr(text, "{\"step\":17,");
    const char *lost = strstr(text, "{\"event\":\"records_lost\",\"step\":17,"
                                    "\"sink\":\"metrics.jsonl\",\"records\":8,\"why\":\"8 records "
                                    "did not go to metrics.jsonl: ");
    cr_expect(one && next && lost && one < next && next < lost, "%s", text);
    free(text);
    wrote(14, "\n");
    wrote(3, "resumed");
    wrote(2, "xxx...\"");
    wrote(1, "File too large");
    said(1, "warning: metrics.jsonl loses records of this run");
    said(1, "metrics.jsonl is written again, without 8 records");
    said(3, "warning:"); /* and of the rewind */
    said(1, "step 16 was not finite, so the run goes on after step 1 from one/xxx");
}

/* It says so at the end, and the error that the run ends with stays. */
Test(sinks, a_disk_that_stays_full_is_said_at_the_end)
{
    nd_sinks sinks = open_sinks(false);
    assert_ok(send_steps(&sinks, 1, 8));
    fill_disk(&sinks);
    assert_ok(send_steps(&sinks, 9, 17));
    (void)nd_fail(ND_ERR_NUMERIC, "what ends the run");
    nd_sinks_close(&sinks);
    cr_expect_str_eq(nd_error_last()->message, "what ends the run");
    set_file_limit(RLIM_INFINITY);
    wrote(8, "\n");
    expect_whole_lines("metrics.jsonl");
    said(1, "warning: 9 records of this run did not go to metrics.jsonl");
}

Test(sinks, metrics_that_were_deleted_are_an_error_at_the_next_line)
{
    nd_sinks sinks = open_sinks(false);
    nd_step_record record = record_of(1);
    assert_ok(put(step, record));
    assert_ok(nd_sinks_flush(&sinks));
    cr_assert_eq(unlink(tempdir_file(&dir, "metrics.jsonl")), 0);
    nd_status status = put(step, record); /* fails if the thread was quick */
    cr_assert(status == ND_OK || status == ND_ERR_CANTCREATE);
    assert_fails(nd_sinks_flush(&sinks), ND_ERR_CANTCREATE, "was deleted during the run");
    assert_fails(put(step, record), ND_ERR_CANTCREATE, "was deleted during the run");
    assert_fails(put(validation, validation), ND_ERR_CANTCREATE, "metrics.jsonl was deleted");
    nd_sinks_close(&sinks);
}

/* The words of most errors, a checkpoint's whole path, and the text of a long sample. */
Test(sinks, long_texts_are_whole)
{
    static char sample[20001], line[20100];
    const char *why = printed("%0600d", 0);
    nd_sinks sinks = open_sinks(false);
    send_event(.kind = ND_RUN_EVENT_ENDED, .step = 3, .code = 65, .reason = why);
    /* A text of JSON cannot have these bytes as they are. */
    send_event(.kind = ND_RUN_EVENT_ENDED, .reason = "a\\b\"c\x1f \xff\xc3\xa9");
    memset(sample, 'z', sizeof sample - 1);
    snprintf(line, sizeof line, "\"prompt\":\"Once\",\"text\":\"%s\"", sample);
    send_event(.kind = ND_RUN_EVENT_SAMPLE, .path = "Once", .reason = sample);
    nd_sinks_close(&sinks);
    said(1, "sample after step 0: \"Once\" goes on \"zz");
    wrote(1, printed("\"%s\"", why));
    wrote(1, line);
    wrote(1, "\"a\\u005cb\\u0022c\\u001f \\u003f\xc3\xa9\"");
}

/* A sink that counts its calls and fails from some step on. */
typedef struct counter {
    int64_t fails_at;
    int steps, validations, closed;
} counter;

static nd_status count_step(void *self, const nd_step_record *record)
{
    counter *c = self;
    c->steps++;
    return record->step < c->fails_at ? ND_OK : nd_fail(ND_ERR_CANTCREATE, "its disk is full");
}

static nd_status count_validation(void *self, const nd_validation_record *record)
{
    ((counter *)self)->validations++;
    return ND_OK;
}

static void count_close(void *self)
{
    ((counter *)self)->closed++;
}

static nd_sink counting(const char *name, counter *c)
{
    return (nd_sink){.name = name,
                     .self = c,
                     .step = count_step,
                     .validation = count_validation,
                     .close = count_close};
}

/* The files of TensorBoard take no more for some steps: it lacks these, and the run goes on. */
Test(sinks, tensorboard_on_a_full_disk_lacks_records)
{
    config.log.trackers = 1U << ND_TRACKER_TENSORBOARD;
    nd_sinks sinks = open_sinks(false);
    cr_assert_eq(sinks.count, 3);
    /* The settings and some steps of 500 bytes; metrics.jsonl is as long after as many steps. */
    set_file_limit(20000);
    assert_ok(send_steps(&sinks, 1, 60));
    assert_ok(nd_sinks_flush(&sinks));
    set_file_limit(RLIM_INFINITY);
    assert_ok(send_steps(&sinks, 61, 61));
    assert_ok(nd_sinks_flush(&sinks));
    assert_ok(send_steps(&sinks, 62, 62));
    nd_sinks_close(&sinks);
    said(1, "warning: TensorBoard loses records of this run, which goes on");
    said(1, "warning: TensorBoard is written again, without ");
    wrote(1, "{\"event\":\"records_lost\",\"step\":61,\"sink\":\"TensorBoard\",\"records\":");
}

/* A text that no record of TensorBoard takes is cut. */
Test(sinks, tensorboard_takes_a_sample_of_any_length)
{
    char *text = malloc(1 << 20);
    cr_assert_not_null(text);
    memset(text, '\n', (1 << 20) - 1); /* each line gets four blanks */
    text[(1 << 20) - 1] = '\0';
    config.log.trackers = 1U << ND_TRACKER_TENSORBOARD;
    nd_sinks sinks = open_sinks(false);
    send_event(.kind = ND_RUN_EVENT_SAMPLE, .step = 1, .path = "Once", .reason = text);
    nd_sinks_close(&sinks);
    said(0, "warning");
    free(text);
}

/* A tracker that cannot be opened costs no run either. */
Test(sinks, a_tracker_that_cannot_open_is_dropped)
{
    static const struct {
        nd_tracker tracker;
        const char *dropped;
    } cases[] = {
        {ND_TRACKER_WANDB, "warning: wandb takes no more reports"},
        {ND_TRACKER_TRACKIO, "warning: trackio takes no more reports"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        config.log.trackers = 1U << cases[i].tracker;
        nd_sinks sinks = open_sinks(false);
        assert_ok(send_steps(&sinks, 1, 10));
        nd_sinks_close(&sinks);
        said(1, cases[i].dropped);
        wrote(10, "\n");
        cr_assert_eq(unlink(tempdir_file(&dir, "metrics.jsonl")), 0);
    }
}

/* Somebody has put a file of his own, or a link, where a tracker writes. */
Test(sinks, a_tracker_whose_place_is_taken_ends_the_start)
{
    static const nd_tracker trackers[] = {ND_TRACKER_TENSORBOARD, ND_TRACKER_WANDB,
                                          ND_TRACKER_TRACKIO};
    static const char *const names[] = {"tensorboard", "wandb_sync.log", "trackio_sync.log"};
    struct stat st;
    cr_assert_eq(symlink("/nonexistent", tempdir_file(&dir, "tensorboard")), 0);
    cr_assert_eq(symlink("loot", tempdir_file(&dir, "wandb_sync.log")), 0);
    cr_assert_eq(mkfifo(tempdir_file(&dir, "trackio_sync.log"), 0600), 0);
    for (int i = 0; i < 3; i++) {
        config.log.trackers = 1U << trackers[i];
        nd_sinks sinks;
        const nd_report_options options = options_of(false);
        assert_fails(nd_sinks_open(&sinks, &options), ND_ERR_CANTCREATE, names[i]);
        cr_expect_eq(sinks.count, 0);
        cr_assert_eq(unlink(tempdir_file(&dir, "metrics.jsonl")), 0);
    }
    cr_expect_neq(stat(tempdir_file(&dir, "loot"), &st), 0);
}

/* It is closed and gets nothing more; the sinks around it go on. One without a function for a kind
 * of record is passed over. */
Test(sinks, one_that_fails_is_dropped_with_one_warning)
{
    counter before = {100}, bad = {3}, after = {100};
    nd_sinks sinks = {0};
    nd_sinks_add(&sinks, counting("before", &before));
    nd_sinks_add(&sinks, counting("wandb", &bad));
    nd_sinks_add(&sinks, counting("after", &after));
    assert_ok(send_steps(&sinks, 1, 5));
    assert_ok(put(validation, validation));
    send_event(ND_RUN_EVENT_MODEL_SAVED, 10, "x");
    nd_sinks_close(&sinks);
    cr_expect(bad.steps == 3 && bad.validations == 0 && bad.closed == 1);
    cr_expect(before.steps == 5 && before.closed == 1);
    cr_expect(after.steps == 5 && after.validations == 1 && after.closed == 1);
    said_only(
        "warning: wandb takes no more reports of this run, which goes on without it: its disk "
        "is full\n");
}

/* metrics.jsonl has no line for a saved model. */
Test(sinks, metrics_have_all_lines_but_of_the_model)
{
    nd_sinks sinks = open_sinks(false);
    static const nd_run_event_kind kinds[] = {
        ND_RUN_EVENT_CHECKPOINT_SAVED, ND_RUN_EVENT_CHECKPOINT_FAILED, ND_RUN_EVENT_EARLY_STOPPED,
        ND_RUN_EVENT_RESUMED,          ND_RUN_EVENT_MODEL_SAVED,       ND_RUN_EVENT_ENDED};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        send_event(.kind = kinds[i], .step = 9, .path = "runs/x", .reason = "why", .bytes = 7,
                   .seconds = 1.5, .blocked_seconds = 0.25, .restart = 3, .code = 65);
    }
    nd_sinks_close(&sinks);
    wrote(5, "\n");
    wrote(5, "{\"event\":\"");
    said(1, "model saved: runs/x\n");
    wrote(1, "{\"event\":\"checkpoint\",\"step\":9,\"reason\":\"why\",\"bytes\":7,"
             "\"save_ms\":1500,\"blocked_ms\":250}\n");
    wrote(1, "{\"event\":\"checkpoint_failed\",\"step\":9,\"why\":\"why\"}\n"
             "{\"event\":\"early_stopped\",\"step\":9,\"why\":\"why\"}\n"
             "{\"event\":\"resumed\",\"step\":9,\"from\":\"runs/x\",\"restart\":3,"
             "\"load_ms\":1500}\n");
    wrote(1, "{\"event\":\"ended\",\"step\":9,\"code\":65,\"why\":\"why\"}");
    said(1, "checkpoint of step 9 saved: runs/x, 7 B, durable after 1.50 s, of which the steps "
            "waited 250 ms\nearly stop after step 9: why\nresumed after step 9 from runs/x, in "
            "1.50 s\n");
}

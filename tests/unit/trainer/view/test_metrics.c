// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/metrics.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"

static tempdir dir;

static void make(void)
{
    tempdir_make(&dir);
}

static void clean(void)
{
    tempdir_remove(&dir);
}

TestSuite(metrics, .init = make, .fini = clean);

static const char *file(const char *text)
{
    return tempdir_write(&dir, "metrics.jsonl", text, strlen(text));
}

static void step_line(FILE *out, int step, double loss)
{
    fprintf(out,
            "{\"step\":%d,\"loss\":%.17g,\"grad_norm\":0.5,\"lr\":0.00029999999999999997,"
            "\"tokens\":64,\"tokens_seen\":%d,\"wire_bytes\":12,\"wire\":{\"weights\":1,"
            "\"gradients\":2,\"activations\":3,\"keys_values\":4,\"other\":2},\"step_ms\":%.17g,"
            "\"data_wait_ms\":0.25,\"tokens_per_second\":640,\"tokens_per_second_per_worker\":320,"
            "\"tflops_per_worker_causal\":0.5,\"tflops_per_worker_accelerate\":0.6,"
            "\"peak_memory_bytes\":1048576}\n",
            step, loss, step * 64, 100.5 + step);
}

static void expect_near(double got, double wanted)
{
    cr_assert_leq(fabs(got - wanted), fabs(wanted) * 9e-16, "%.17g, not %.17g", got, wanted);
}

static double number(const char *text)
{
    double value = NAN;
    const char *end = nd_metrics_number(text, text + strlen(text), &value);
    cr_assert_eq(end, text + strlen(text), "%s", text);
    return value;
}

Test(metrics, numbers_are_those_of_strtod)
{
    static const char *const texts[] = {"0",
                                        "-0.5",
                                        "12",
                                        "2.3025850929940459",
                                        "0.00029999999999999997",
                                        "1e-7",
                                        "1.5E+3",
                                        "123456789012345678901234",
                                        "9007199254740993",
                                        "3.0000000000000001e-300",
                                        "1.5e300",
                                        "0.1000000000000000055511151231257827"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        expect_near(number(texts[i]), strtod(texts[i], NULL));
    }
}

Test(metrics, what_is_no_number_is_refused)
{
    static const char *const texts[] = {"", "-", ".5", "1.", "1.e5", "1e", "1e+", "x", "NaN"};
    double value;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        const char *end = texts[i] + strlen(texts[i]);
        const char *stop = nd_metrics_number(texts[i], end, &value);
        cr_assert(!stop || stop < end, "%s", texts[i]);
    }
}

Test(metrics, a_step_has_all_its_values)
{
    nd_metrics m;
    FILE *out = fopen(tempdir_file(&dir, "metrics.jsonl"), "w");
    step_line(out, 7, 2.5);
    fclose(out);
    assert_ok(nd_metrics_read(tempdir_file(&dir, "metrics.jsonl"), 1, &m));
    cr_assert_eq(m.row_count, 1);
    const nd_metric_row *row = &m.rows[0];
    const double wanted[ND_METRIC_COUNT] = {
        [ND_METRIC_LOSS] = 2.5,
        [ND_METRIC_GRAD_NORM] = 0.5,
        [ND_METRIC_LR] = 3e-4,
        [ND_METRIC_STEP_MS] = 107.5,
        [ND_METRIC_DATA_WAIT_MS] = 0.25,
        [ND_METRIC_TOKENS_PER_SECOND] = 640,
        [ND_METRIC_TFLOPS] = 0.5,
        [ND_METRIC_PEAK_MEMORY] = 1048576,
        [ND_METRIC_WIRE] = 12,
        [ND_METRIC_WIRE_KINDS + ND_TRAFFIC_WEIGHTS] = 1,
        [ND_METRIC_WIRE_KINDS + ND_TRAFFIC_GRADIENTS] = 2,
        [ND_METRIC_WIRE_KINDS + ND_TRAFFIC_ACTIVATIONS] = 3,
        [ND_METRIC_WIRE_KINDS + ND_TRAFFIC_KEYS_VALUES] = 4,
        [ND_METRIC_WIRE_KINDS + ND_TRAFFIC_OTHER] = 2,
    };
    cr_assert_eq(row->step, 7);
    cr_assert_eq(row->tokens_seen, 448);
    cr_assert_not(row->skipped);
    for (int k = 0; k < ND_METRIC_COUNT; k++) {
        cr_assert_eq(row->value[k], (float)wanted[k], "metric %d is %g", k, (double)row->value[k]);
    }
    nd_metrics_fini(&m);
}

/* Order, blanks, and keys of later versions with values of any kind do not matter. */
Test(metrics, keys_come_in_any_order)
{
    nd_metrics m;
    const char *path =
        file("{ \"step_ms\" : 10 , \"new\" : {\"a\":[1,\"}\\\"\"]} , \"skipped\":true, "
             "\"loss\": null, \"text\":\"x,}\", \"step\": 3 }\r\n\n"
             "{\"validation_ms\":5,\"step\":3,\"validation_loss\":1.5}\n");
    assert_ok(nd_metrics_read(path, 1, &m));
    cr_assert_eq(m.row_count, 1);
    cr_assert_eq(m.rows[0].step, 3);
    cr_assert(m.rows[0].skipped);
    cr_assert(isnan(m.rows[0].value[ND_METRIC_LOSS]));
    cr_assert_eq(m.rows[0].value[ND_METRIC_STEP_MS], 10.0f);
    cr_assert_eq(m.validation_count, 1);
    cr_assert_eq(m.validations[0].loss, 1.5);
    cr_assert_not(m.half_line);
    nd_metrics_fini(&m);
}

Test(metrics, a_resumed_run_forgets_what_it_made_again)
{
    nd_metrics m;
    FILE *out = fopen(tempdir_file(&dir, "metrics.jsonl"), "w");
    for (int step = 1; step <= 5; step++) {
        step_line(out, step, 1);
    }
    fputs("{\"step\":4,\"validation_loss\":9}\n", out);
    fputs("{\"event\":\"checkpoint\",\"step\":3,\"reason\":\"interval\",\"bytes\":10,"
          "\"save_ms\":1.5,\"blocked_ms\":0.5}\n",
          out);
    fputs("{\"event\":\"resumed\",\"step\":3,\"from\":\"run/checkpoint-3\",\"restart\":1,"
          "\"load_ms\":2,\"rewound_from\":6,\"passed_over_samples\":48,\"why\":\"loss is \\u003c\"}"
          "\n",
          out);
    for (int step = 4; step <= 6; step++) {
        step_line(out, step, 2);
    }
    fclose(out);
    for (int threads = 1; threads <= 5; threads += 2) {
        assert_ok(nd_metrics_read(tempdir_file(&dir, "metrics.jsonl"), threads, &m));
        cr_assert_eq(m.row_count, 6, "%zu rows with %d threads", m.row_count, threads);
        cr_assert_eq(m.repeated, 2);
        for (int i = 0; i < 6; i++) {
            cr_assert_eq(m.rows[i].step, i + 1);
            cr_assert_eq(m.rows[i].value[ND_METRIC_LOSS], i < 3 ? 1.0f : 2.0f);
        }
        cr_assert_eq(m.validation_count, 0);
        cr_assert_eq(m.event_count, 2);
        cr_assert_eq(m.events[0].kind, ND_METRIC_EVENT_CHECKPOINT);
        cr_assert_str_eq(m.events[0].text, "interval");
        cr_assert_eq(m.events[1].kind, ND_METRIC_EVENT_RESUMED);
        cr_assert_eq(m.events[1].rewound_from, 6);
        cr_assert_eq(m.events[1].passed_over_samples, 48);
        cr_assert_str_eq(m.events[1].text, "loss is <");
        nd_metrics_fini(&m);
    }
}

/* A file may be cut anywhere: all its whole lines are read. */
Test(metrics, half_a_line_at_the_end_does_not_count)
{
    nd_metrics m;
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    step_line(out, 1, 1);
    fflush(out);
    size_t one = size;
    step_line(out, 2, 2);
    fclose(out);
    for (size_t cut = 0; cut <= size; cut++) {
        const char *path = tempdir_write(&dir, "metrics.jsonl", text, cut);
        assert_ok(nd_metrics_read(path, 2, &m));
        cr_assert_eq(m.row_count, (size_t)(cut >= one) + (cut == size), "cut at %zu", cut);
        cr_assert_eq(m.half_line, cut != 0 && cut != one && cut != size, "cut at %zu", cut);
        nd_metrics_fini(&m);
    }
    free(text);
}

Test(metrics, a_damaged_line_is_named)
{
    static const char *const bad[] = {"{\"step\":2,\"loss\":1,\"step_ms\":}",
                                      "{\"step\":2,\"step_ms\":1",
                                      "[]",
                                      "x",
                                      "{\"step\":2 \"step_ms\":1}",
                                      "{\"step\":-1,\"step_ms\":1}",
                                      "{\"step_ms\":1}",
                                      "{\"event\":\"resumed\",\"step\":2,\"from\":\"\\x\"}"};
    nd_metrics m;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[512];
        snprintf(text, sizeof text, "{\"step\":1,\"step_ms\":1}\n%s\n{\"step\":3,\"step_ms\":1}\n",
                 bad[i]);
        assert_fails(nd_metrics_read(file(text), 3, &m), ND_ERR_DATA, "line 2");
    }
}

Test(metrics, no_file_and_an_empty_one)
{
    nd_metrics m;
    assert_fails(nd_metrics_read(tempdir_file(&dir, "none"), 0, &m), ND_ERR_DATA, "none");
    assert_ok(nd_metrics_read(file(""), 0, &m));
    cr_assert_eq(m.row_count, 0);
    nd_metrics_fini(&m);
}

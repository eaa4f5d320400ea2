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
            "\"data_wait_ms\":0.25,\"slowest_ms\":90.5,\"fastest_ms\":80,\"slowest_rank\":3,"
            "\"tokens_per_second\":640,\"tokens_per_second_per_worker\":320,"
            "\"tflops_per_worker_causal\":0.5,\"tflops_per_worker_accelerate\":0.6,"
            "\"peak_memory_bytes\":1048576}\n",
            step, loss, step * 64, 100.5 + step);
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
        [ND_METRIC_SLOWEST_MS] = 90.5,
        [ND_METRIC_FASTEST_MS] = 80,
        [ND_METRIC_SLOWEST_RANK] = 3,
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

/* Steps 4 and 5 are made again with other sources, whose numbers go on behind the first ones. */
Test(metrics, losses_of_sources_and_sets_keep_their_names)
{
    nd_metrics m;
    const char *path =
        file("{\"step\":3,\"source_loss\":{\"web\":2.5,\"code\":null},"
             "\"source_tokens\":{\"web\":60,\"code\":0},\"step_ms\":1}\n"
             "{\"step\":3,\"validation_loss\":2,\"validation_set_loss\":{\"b\":3,\"a\":1},"
             "\"validation_set_tokens\":{\"b\":8,\"a\":9},\"validation_ms\":1}\n"
             "{\"step\":4,\"source_loss\":{\"web\":9},\"source_tokens\":{\"web\":64},"
             "\"step_ms\":1}\n"
             "{\"event\":\"resumed\",\"step\":3,\"from\":\"/runs/x/checkpoint-3\",\"restart\":0,"
             "\"mesh\":\"tp 2\",\"mesh_was\":\"dp_shard 2\",\"load_ms\":2}\n"
             "{\"step\":4,\"source_tokens\":{\"books\":30,\"code\":34},"
             "\"source_loss\":{\"books\":1.5,\"code\":2},\"step_ms\":1}\n");
    for (int threads = 1; threads <= 5; threads += 2) {
        assert_ok(nd_metrics_read(path, threads, &m));
        static const char *const names[] = {"web", "code", "books"};
        static const nd_source_row wanted[] = {
            {3, 60, 2.5f, 0}, {3, 0, NAN, 1}, {4, 30, 1.5f, 2}, {4, 34, 2.0f, 1}};
        cr_assert_eq(m.source_names.count, 3);
        for (int i = 0; i < 3; i++) {
            cr_assert_str_eq(m.source_names.name[i], names[i]);
        }
        cr_assert_eq(m.source_count, 4, "%zu", m.source_count);
        for (int i = 0; i < 4; i++) {
            const nd_source_row *got = &m.sources[i], *row = &wanted[i];
            cr_assert(got->step == row->step && got->tokens == row->tokens &&
                          got->source == row->source,
                      "row %d", i);
            cr_assert(isnan(row->loss) ? isnan(got->loss) : got->loss == row->loss, "row %d", i);
        }
        cr_assert_eq(m.set_count, 2);
        cr_assert(m.sets[1].loss == 1.0f && m.sets[1].tokens == 9);
        cr_assert_str_eq(m.set_names.name[m.sets[1].source], "a");
        cr_assert_str_eq(m.events[0].from, "checkpoint-3");
        cr_assert_str_eq(m.events[0].mesh, "tp 2");
        cr_assert_str_eq(m.events[0].mesh_was, "dp_shard 2");
        nd_metrics_fini(&m);
    }
}

/* A line that has both, as none of ndtrain's has: each name stays among its own. */
Test(metrics, sets_in_the_line_of_a_step_are_no_sources)
{
    nd_metrics m;
    const char *path = file("{\"step\":1,\"source_loss\":{\"web\":2.5},\"step_ms\":1}\n"
                            "{\"step\":2,\"validation_set_loss\":{\"a\":3},\"step_ms\":1}\n"
                            "{\"step\":3,\"source_loss\":{\"web\":2},\"step_ms\":1,"
                            "\"validation_loss\":2,\"validation_set_loss\":{\"a\":4}}\n");
    for (int threads = 1; threads <= 3; threads += 2) {
        assert_ok(nd_metrics_read(path, threads, &m));
        cr_assert_eq(m.row_count, 3);
        cr_assert_eq(m.source_names.count, 1);
        cr_assert_eq(m.source_count, 2, "%zu", m.source_count);
        cr_assert(m.sources[1].step == 3 && m.sources[1].source == 0 && m.sources[1].loss == 2.0f);
        cr_assert_eq(m.set_count, 1, "%zu", m.set_count);
        cr_assert_str_eq(m.set_names.name[m.sets[0].source], "a");
        cr_assert(m.sets[0].step == 3 && m.sets[0].loss == 4.0f);
        nd_metrics_fini(&m);
    }
}

/* More names than a configuration can have, and one that is too long: nothing is written behind
 * its place. */
Test(metrics, too_many_sources_are_left_out)
{
    nd_metrics m;
    FILE *out = fopen(tempdir_file(&dir, "metrics.jsonl"), "w");
    fputs("{\"step\":1,\"source_loss\":{", out);
    for (int i = 0; i < 2 * ND_DATA_SOURCES_MAX; i++) {
        fprintf(out, "%s\"%0*d\":%d", i > 0 ? "," : "", i == 0 ? 200 : 3, i, i);
    }
    fputs("},\"step_ms\":1}\n", out);
    fclose(out);
    assert_ok(nd_metrics_read(tempdir_file(&dir, "metrics.jsonl"), 1, &m));
    cr_assert_eq(m.source_names.count, ND_DATA_SOURCES_MAX);
    cr_assert_eq(m.source_count, ND_DATA_SOURCES_MAX);
    cr_assert_eq(strlen(m.source_names.name[0]), ND_DATA_SOURCE_NAME - 1);
    nd_metrics_fini(&m);
}

Test(metrics, health_of_linears)
{
    nd_metrics m;
    const char *path =
        file("{\"step\":2,\"fp8_health\":{\"input\":{\"self_attn.q_proj\":{\"underflow\":0.25,"
             "\"underflow_layer\":1,\"saturation\":0.5,\"saturation_layer\":3,\"amax\":null,"
             "\"amax_layer\":1e9},\"of_a_later_version\":{}},\"weight\":{},"
             "\"gradient\":{\"mlp.down_proj\":{\"amax\":2}}}}\n"
             "{\"event\":\"resumed\",\"step\":2,\"from\":\"x\",\"load_ms\":2}\n"
             "{\"step\":4,\"fp8_health\":{\"weight\":{\"mlp.up_proj\":{\"amax\":9}}}}\n"
             "{\"event\":\"resumed\",\"step\":3,\"from\":\"x\",\"load_ms\":2}\n");
    for (int threads = 1; threads <= 3; threads++) {
        assert_ok(nd_metrics_read(path, threads, &m));
        cr_assert_eq(m.health_count, 2, "%zu", m.health_count);
        const nd_health_row *q = &m.health[0], *down = &m.health[1];
        cr_assert(q->step == 2 && q->operand == ND_OPERAND_INPUT && q->linear == 0);
        cr_assert(q->worst.underflow == 0.25 && q->worst.underflow_layer == 1);
        cr_assert(q->worst.saturation == 0.5 && q->worst.saturation_layer == 3);
        cr_assert(isnan(q->worst.amax) && q->worst.amax_layer == -1);
        cr_assert(down->operand == ND_OPERAND_GRADIENT && down->linear == 6);
        cr_assert(down->worst.amax == 2 && isnan(down->worst.underflow));
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

// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/metrics.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/printable.h"
#include "tests/support/tempdir.h"

static tempdir dir;
static nd_metrics m; /* what the test has read last */

TEMPDIR_SUITE(metrics, tempdir_leave_empty);

static const char *file(const char *text)
{
    return tempdir_write(&dir, "metrics.jsonl", text, strlen(text));
}

static void read_metrics(const char *path)
{
    nd_metrics_fini(&m);
    assert_ok(nd_metrics_read(path, &m));
}

static void step_line(FILE *out, int step, double loss)
{
    fprintf(out,
            "{\"step\":%d,\"loss\":%.17g,\"tokens\":64,\"lr\":0.00029999999999999997,"
            "\"wire_bytes\":12,\"wire\":{\"weights\":10,\"other\":2},\"step_ms\":%.17g}\n",
            step, loss, 100.5 + step);
}

/* Returns the value of a column at this step; NaN: it has none. */
static double value_at(const char *name, double step)
{
    return nd_column_at(nd_metrics_column(&m, name), step);
}

static size_t count_of(const char *name)
{
    return nd_metrics_column(&m, name)->count;
}

static const char *event_words(size_t event, const char *key)
{
    return nd_json_words(json_array_get(m.events, event), key);
}

Test(metrics, a_step_has_all_its_values)
{
    FILE *out = fopen(tempdir_file(&dir, "metrics.jsonl"), "w");
    step_line(out, 7, 2.5);
    fclose(out);
    static const struct {
        const char *name;
        double value;
    } wanted[] = {{"loss", 2.5},      {"lr", 3e-4},         {"tokens", 64},   {"step_ms", 107.5},
                  {"wire_bytes", 12}, {"wire.weights", 10}, {"wire.other", 2}};
    read_metrics(tempdir_file(&dir, "metrics.jsonl"));
    for (size_t k = 0; k < sizeof wanted / sizeof *wanted; k++) {
        const double value = value_at(wanted[k].name, 7);
        cr_assert_eq(count_of(wanted[k].name), 1);
        cr_assert_float_eq(value, wanted[k].value, 1e-12 * wanted[k].value, "%s is %g",
                           wanted[k].name, value);
    }
    cr_assert_eq(count_of("skipped"), 0);
    cr_assert_eq(count_of("step"), 0, "a step is that of the points");
}

Test(metrics, a_step_without_labels_has_no_loss_and_is_not_a_skipped_one)
{
    read_metrics(file("{\"step\":1,\"loss\":2,\"grad_norm\":0.5,\"tokens\":64,\"step_ms\":1}\n"
                      "{\"step\":2,\"skipped\":true,\"loss\":null,\"grad_norm\":0,\"tokens\":0,"
                      "\"step_ms\":1}\n"
                      "{\"step\":3,\"skipped\":true,\"loss\":null,\"grad_norm\":null,"
                      "\"tokens\":64,\"step_ms\":1}\n"));
    cr_assert(count_of("loss") == 2 && count_of("grad_norm") == 2 && count_of("tokens") == 3);
    cr_assert(count_of("skipped") == 1 && value_at("skipped", 3) == 1);
    cr_assert(count_of("without_labels") == 1 && value_at("without_labels", 2) == 1);
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
    char text[256];
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        snprintf(text, sizeof text, "{\"step\":1,\"step_ms\":1,\"loss\":%s}\n", texts[i]);
        read_metrics(file(text));
        const double got = value_at("loss", 1), wanted = strtod(texts[i], NULL);
        cr_assert_eq(got, wanted, "%.17g, not %.17g", got, wanted);
    }
}

/* Order, blanks, and keys of later versions with values of any kind do not matter. */
Test(metrics, keys_come_in_any_order)
{
    const char *path =
        file("{ \"step_ms\" : 10 , \"new\" : {\"a\":[1,\"}\\\"\"]} , \"skipped\":true, "
             "\"loss\": null, \"text\":\"x,}\", \"step\": 3 }\r\n\n"
             "{\"validation_ms\":5,\"step\":3,\"validation_loss\":1.5}\n"
             "{\"event\":\"ended\",\"step\":0}\n");
    read_metrics(path);
    cr_assert_eq(value_at("skipped", 3), 1);
    cr_assert(count_of("loss") == 1 && isnan(value_at("loss", 3)));
    cr_assert(count_of("step_ms") == 1 && value_at("step_ms", 3) == 10);
    cr_assert_eq(value_at("validation_loss", 3), 1.5);
}

Test(metrics, a_resumed_run_forgets_what_it_made_again)
{
    FILE *out = fopen(tempdir_file(&dir, "metrics.jsonl"), "w");
    for (int step = 1; step <= 5; step++) {
        step_line(out, step, 1);
    }
    fputs("{\"step\":4,\"validation_loss\":9}\n{\"event\":\"sample\",\"step\":4}\n", out);
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
    read_metrics(tempdir_file(&dir, "metrics.jsonl"));
    const nd_column *losses = nd_metrics_column(&m, "loss");
    cr_assert_eq(losses->count, 6, "%zu losses", losses->count);
    for (size_t i = 0; i < 6; i++) {
        cr_assert_eq(losses->points[i].step, (double)i + 1);
        cr_assert_eq(losses->points[i].value, i < 3 ? 1 : 2);
    }
    cr_assert_eq(count_of("validation_loss"), 0);
    cr_assert_eq(json_array_size(m.events), 2);
    cr_assert_str_eq(event_words(0, "event"), "checkpoint");
    cr_assert_str_eq(event_words(0, "reason"), "interval");
    cr_assert_str_eq(event_words(1, "event"), "resumed");
    cr_assert_eq(nd_json_whole(json_array_get(m.events, 1), "rewound_from"), 6);
    cr_assert_str_eq(event_words(1, "why"), "loss is <");
}

/* Step 4 is made again with other sources, and without health. */
Test(metrics, numbers_in_objects_keep_their_names)
{
    const char *path =
        file("{\"step\":3,\"source_loss\":{\"web\":2.5,\"code\":null},"
             "\"source_tokens\":{\"web\":60,\"code\":0},\"step_ms\":1}\n"
             "{\"step\":3,\"validation_loss\":2,\"validation_set_loss\":{\"b\":3,\"a\":1}}\n"
             "{\"step\":3,\"fp8_health\":{\"input\":{\"self_attn.q_proj\":{\"saturation\":0.5,"
             "\"amax\":null,\"amax_layer\":1e9},\"of_a_later_version\":{}},\"weight\":{},"
             "\"gradient\":{\"mlp.down_proj\":{\"amax\":2}}}}\n"
             "{\"step\":4,\"source_loss\":{\"web\":9},\"source_tokens\":{\"web\":64},"
             "\"fp8_health\":{\"weight\":{\"mlp.up_proj\":{\"amax\":9}}},\"step_ms\":1}\n"
             "{\"event\":\"resumed\",\"step\":3,\"from\":\"/runs/x/checkpoint-3\",\"restart\":0,"
             "\"mesh\":\"tp 2\",\"mesh_was\":\"dp_shard 2\",\"load_ms\":2}\n"
             "{\"step\":4,\"source_tokens\":{\"books\":30,\"code\":34},"
             "\"source_loss\":{\"books\":1.5,\"code\":2},\"step_ms\":1}\n");
    static const struct {
        const char *name;
        double steps[2]; /* of steps 3 and 4 */
    } wanted[] = {{"source_loss.web", {2.5, NAN}},
                  {"source_tokens.web", {60, NAN}},
                  {"source_loss.code", {NAN, 2}},
                  {"source_tokens.code", {0, 34}},
                  {"source_loss.books", {NAN, 1.5}},
                  {"validation_set_loss.a", {1, NAN}},
                  {"fp8_health.input.self_attn.q_proj.saturation", {0.5, NAN}},
                  {"fp8_health.input.self_attn.q_proj.amax", {NAN, NAN}},
                  {"fp8_health.gradient.mlp.down_proj.amax", {2, NAN}},
                  {"fp8_health.weight.mlp.up_proj.amax", {NAN, NAN}}};
    read_metrics(path);
    for (size_t k = 0; k < sizeof wanted / sizeof *wanted; k++) {
        for (int i = 0; i < 2; i++) {
            const double value = value_at(wanted[k].name, 3 + i), right = wanted[k].steps[i];
            cr_assert(isnan(right) ? isnan(value) : value == right, "%s", wanted[k].name);
        }
    }
    cr_assert_eq(count_of("fp8_health.weight.mlp.up_proj.amax"), 0, "it was taken back");
    cr_assert_str_eq(event_words(0, "mesh_was"), "dp_shard 2");
}

/* More names than there is room for, and one that is too long: nothing is written behind its
 * place. */
Test(metrics, too_many_names_are_left_out)
{
    FILE *out = fopen(tempdir_file(&dir, "metrics.jsonl"), "w");
    fputs("{\"step\":1,\"source_loss\":{", out);
    for (int i = 0; i < 2 * ND_COLUMNS_MAX; i++) {
        fprintf(out, "%s\"%0*d\":%d", i > 0 ? "," : "", i == 0 ? 200 : 3, i, i);
    }
    fputs("},\"step_ms\":1}\n", out);
    fclose(out);
    read_metrics(tempdir_file(&dir, "metrics.jsonl"));
    cr_assert_eq(m.count, ND_COLUMNS_MAX);
    cr_assert_eq(value_at("source_loss.007", 1), 7);
    cr_assert_eq(count_of("source_loss.2000"), 0);
    for (int k = 0; k < m.count; k++) {
        cr_assert_lt(strlen(m.columns[k].name), ND_COLUMN_NAME);
    }
}

/* Eight objects in one another have columns; what lies deeper is passed over. */
Test(metrics, deep_objects_are_passed_over)
{
    read_metrics(file("{\"step\":1,\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"b\":7,"
                      "\"a\":{\"b\":[8,\"}\"]}}}}}}}}},\"c\":9}\n"));
    cr_assert_eq(value_at("a.a.a.a.a.a.a.a.b", 1), 7);
    cr_assert_eq(value_at("c", 1), 9);
    cr_assert_eq(m.count, 7 + 11, "the first names, eight objects, b, the deepest a, and c");
}

/* A name may hold anything, and be cut within a character. */
Test(metrics, names_are_printable)
{
    char text[256], long_name[128] = "";
    while (strlen(long_name) < ND_COLUMN_NAME) {
        strcat(long_name, "\xe2\x82\xac");
    }
    snprintf(text, sizeof text, "{\"step\":1,\"\x1b[31m\xff\":2,\"%s\":3}\n", long_name);
    read_metrics(file(text));
    cr_assert_eq(value_at("\\x1b[31m\\xff", 1), 2);
    const nd_column *last = &m.columns[m.count - 1];
    cr_assert(last->count == 1 && last->points[0].value == 3);
    cr_assert(nd_is_printable(last->name), "%s", last->name);
}

/* A file may be cut anywhere: all its whole lines are read. */
Test(metrics, half_a_line_at_the_end_does_not_count)
{
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
        read_metrics(path);
        cr_assert_eq(count_of("loss"), (size_t)(cut >= one) + (cut == size), "cut at %zu", cut);
    }
    free(text);
}

Test(metrics, a_damaged_line_is_named)
{
    static const char *const bad[] = {"{\"step\":2,\"loss\":1,\"step_ms\":}",
                                      "{\"step\":2,\"loss\":.5,\"step_ms\":1}",
                                      "{\"step\":2,\"loss\":1.,\"step_ms\":1}",
                                      "{\"step\":2,\"loss\":1e+,\"step_ms\":1}",
                                      "{\"step\":2,\"loss\":NaN,\"step_ms\":1}",
                                      "{\"step\":2,\"loss\":-,\"step_ms\":1}",
                                      "{\"step\":2,\"loss\":0x12,\"step_ms\":1}",
                                      "{\"step\":2,\"new\":[1,\"step_ms\":1}",
                                      "{\"step\":2,\"new\":{\"a\":1],\"step_ms\":1}",
                                      "{\"step\":2,}",
                                      "{\"step\":2,\"step_ms",
                                      "{\"step\":2,\"step_ms\":1",
                                      "[]",
                                      "x",
                                      "{\"step\":2 \"step_ms\":1}",
                                      "{\"step\":-1,\"step_ms\":1}",
                                      "{\"step_ms\":1}",
                                      "{\"event\":\"resumed\",\"step\":2,\"from\":\"\\x\"}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[512];
        snprintf(text, sizeof text, "{\"step\":1,\"step_ms\":1}\n%s\n{\"step\":3,\"step_ms\":1}\n",
                 bad[i]);
        assert_fails(nd_metrics_read(file(text), &m), ND_ERR_DATA, "line 2");
    }
}

Test(metrics, no_file)
{
    assert_fails(nd_metrics_read(tempdir_file(&dir, "none"), &m), ND_ERR_DATA, "none");
}

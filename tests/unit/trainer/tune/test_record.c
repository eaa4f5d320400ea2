// SPDX-License-Identifier: Apache-2.0
/* The record of autotune: what is written is read, what is damaged is said, nothing crashes. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/tensor/dtype.h"
#include "tests/support/tempdir.h"
#include "tests/unit/trainer/shapes.h"
#include "trainer/tune/measure.h"

static const nd_shape shape = {SIZES(256, 64, 96, 3, 4, 2, 16)};
static nd_config config;
static nd_tuning written;
static nd_lt_choice choices[2];
static char *text;
static json_t *root; /* of the text, for damages */

/* The last three are leading dimensions. */
#define EXTENTS(m_, n_, k_, a_, b_, d_) .m = m_, .n = n_, .k = k_, .lda = a_, .ldb = b_, .ldd = d_

static void setup(void)
{
    nd_lt_key y = {EXTENTS(96, 48, 64, 64, 64, 192),
                   .a = ND_DTYPE_F8_E4M3,
                   .b = ND_DTYPE_F8_E5M2,
                   .d = ND_DTYPE_BF16,
                   .a_transposed = 1,
                   .fast = 1,
                   .scaling = ND_LT_SCALARS,
                   .align_a = 256,
                   .align_b = 1,
                   .align_d = 64};
    nd_lt_key dw = {EXTENTS(64, 96, 64, 64, 96, 64),
                    .a = ND_DTYPE_BF16,
                    .b = ND_DTYPE_BF16,
                    .d = ND_DTYPE_F32,
                    .b_transposed = 1,
                    .beta = 1,
                    .align_a = 256,
                    .align_b = 256,
                    .align_d = 256};
    assert_ok(nd_config_init(&config));
    config.train.precision = ND_PRECISION_FP8;
    choices[0] = (nd_lt_choice){.key = y,
                                .algorithm = {1, 0xfedcba9876543210u, UINT64_MAX},
                                .workspace = 33554432,
                                .candidates = 8,
                                .picked = 3,
                                .seconds = 1.25e-3,
                                .first_seconds = 0.1 + 0.2};
    choices[1] = (nd_lt_choice){.key = dw, .algorithm = {7}};
    written = (nd_tuning){.gpu = "NVIDIA H200",
                          .capability = 90,
                          .cublaslt = 130100,
                          .seconds = 3.5,
                          .linears = {{0, 7, 0, 3e-3, 2e-3}, {3, 1, 1, -1, -1}},
                          .linear_count = 2,
                          .choices = choices,
                          .choice_count = 2};
    assert_ok(nd_record_write(&written, &config, &shape));
    assert_ok(nd_fs_format(&text, "{\"steps\": 3, \"autotune\": %s}", written.json));
    root = json_loads(text, 0, NULL);
}

static void teardown(void)
{
    json_decref(root);
    free(text);
    free(written.json);
    nd_config_fini(&config);
}

TestSuite(record, .init = setup, .fini = teardown, .timeout = 120);

static nd_status read_as(const char *from, size_t bytes, const nd_shape *of)
{
    nd_tuning *t = NULL;
    nd_status status = nd_record_read(from, bytes, "run.json", &config, of, &t);
    nd_tuning_destroy(t);
    return status;
}

static nd_status read_text(const char *from)
{
    return read_as(from, strlen(from), &shape);
}

Test(record, what_is_written_is_read)
{
    nd_tuning *t = NULL;
    assert_ok(nd_record_read(text, strlen(text), "run.json", &config, &shape, &t));
    cr_expect_str_eq(t->gpu, "NVIDIA H200");
    cr_expect(t->capability == 90 && t->cublaslt == 130100 && t->seconds == 3.5);
    cr_assert(t->choice_count == 2 && t->linear_count == 2);
    cr_expect(memcmp(t->choices, choices, sizeof choices) == 0, "every bit, times too");
    cr_expect(memcmp(t->linears, written.linears, sizeof t->linears) == 0);
    const nd_linear_choice *of = &t->linear_choice;
    cr_expect(of->fp8[0][7] == 0 && of->fp8[3][1] == 1 && of->fp8[0][0] == 0);
    cr_expect_eq(of->fp8[2][3], -1, "not asked for, so not known");
    nd_tuning_destroy(t);
}

static void expect_damaged(const char *what)
{
    char *damaged = json_dumps(root, 0);
    assert_fails(read_text(damaged), ND_ERR_DATA, what);
    free(damaged);
}

static void expect_other(const char *a, const char *b)
{
    assert_fails(read_text(text), ND_ERR_CONFIG, a);
    cr_expect(strstr(nd_error_last()->message, b), "%s", nd_error_last()->message);
}

Test(record, another_run_is_named_with_key_and_both_values)
{
    config.mesh.tp = 4;
    expect_other("mesh.tp 1", "this run has 4");
    config.mesh.tp = 1;
    config.train.sequence_length = 2048;
    expect_other("train.sequence_length 1024", "has 2048");
    config.train.precision = ND_PRECISION_BF16;
    expect_other("train.precision fp8", "has bf16");
    config.train.precision = ND_PRECISION_FP8;
    config.train.sequence_length = 1024;
    config.fp8.recipe = ND_FP8_DELAYED;
    expect_other("fp8.recipe tensorwise", "has delayed");
    config.fp8.recipe = ND_FP8_TENSORWISE;
    nd_shape other = shape;
    other.ffn = 112;
    assert_fails(read_as(text, strlen(text), &other), ND_ERR_CONFIG, "model.intermediate_size 96");
}

Test(record, each_setting_that_a_product_depends_on_is_compared)
{
    static const char *const others[][2] = {
        {"train: {micro_batch_size: 17}", "micro_batch_size 1,"},
        {"train: {gradient_accumulation_steps: 17}", "gradient_accumulation_steps 1,"},
        {"mesh: {cp: 2}", "mesh.cp 1,"},
        {"fp8: {all_gather: true}", "fp8.all_gather false,"},
        {"fp8: {filter: auto}", "fp8.filter accelerate,"},
        {"fp8: {format: e4m3}", "fp8.format hybrid,"}};
    nd_shape other = shape;
    int64_t *const numbers[] = {&other.vocab, &other.hidden,   &other.ffn,     &other.layers,
                                &other.heads, &other.kv_heads, &other.head_dim};
    for (int i = 0; i < 8; i++) {
        other = shape;
        other.tied = i == 7;
        *numbers[i % 7] += i < 7;
        cr_expect_eq(read_as(text, strlen(text), &other), ND_ERR_CONFIG, "%d", i);
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        nd_config_fini(&config);
        assert_ok(nd_config_init(&config));
        config.train.precision = ND_PRECISION_FP8;
        assert_ok(nd_config_read_text(&config, others[i][0], strlen(others[i][0]), "a test"));
        expect_other(others[i][1], "this run has");
    }
}

/* Products leave nothing to collectives where no weights are gathered. */
Test(record, blocks_count_where_products_leave_processors_to_them)
{
    config.kernels.comm_blocks = 16;
    assert_ok(read_text(text));
    config.resolved_mesh = (nd_mesh){{1, 1, 1, 1, 1}};
    assert_ok(read_text(text));
    config.resolved_mesh.size[ND_AXIS_DP_SHARD] = 2;
    expect_other("kernels.product_processors 0", "has all but 16");
    config.kernels.product_processors = 116;
    expect_other("kernels.product_processors 0", "has 116");
    config.kernels.product_processors = 0;
    config.resolved_mesh.size[ND_AXIS_DP_SHARD] = 1;
    config.launch.nccl_alone = true;
    expect_other("kernels.product_processors 0", "has all but 16");
}

Test(record, those_of_an_earlier_program_are_refused)
{
    json_object_set_new(json_object_get(root, "autotune"), "division", json_array());
    expect_damaged("made by an earlier program; choose again");
}

Test(record, data_parallel_ranks_may_be_other)
{
    config.mesh.dp_shard = 8;
    config.mesh.dp_replicate = 2;
    cr_expect_eq(read_text(text), ND_OK, "a rank's products are the same");
}

/* Each key of an object away, and each of every other type. */
static int damage_object(json_t *object)
{
    json_t *const wrong[] = {
        json_null(),          json_true(),  json_integer(-7), json_real(-0.5),
        json_string("wrong"), json_array(), json_object(),    json_integer(INT64_MAX)};
    json_t *copy = json_deep_copy(object), *value;
    const char *key;
    int damages = 0;
    json_object_foreach(copy, key, value)
    {
        if (strcmp(key, "replayed_from") == 0) {
            continue; /* not read */
        }
        json_object_del(object, key);
        if (!strstr(key, "_seconds")) {
            expect_damaged(key);
        }
        for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
            json_object_set(object, key, wrong[i]);
            char *damaged = json_dumps(root, 0);
            nd_status status = read_text(damaged);
            bool may = json_typeof(wrong[i]) == json_typeof(value) ||
                       (json_is_null(wrong[i]) && strstr(key, "seconds")) ||
                       (json_is_boolean(wrong[i]) && json_is_boolean(value)) ||
                       (json_is_number(wrong[i]) && json_is_number(value));
            cr_expect(status != ND_OK || may, "%s: taken from %s", key, damaged);
            cr_expect(status == ND_OK || strlen(nd_error_last()->message) > 20);
            free(damaged);
            damages++;
        }
        json_object_set(object, key, value);
    }
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        json_decref(wrong[i]);
    }
    json_decref(copy);
    return damages;
}

static json_t *first_of(const char *list)
{
    return json_array_get(json_object_get(json_object_get(root, "autotune"), list), 0);
}

Test(record, damaged_values_are_said)
{
    int damages = damage_object(json_object_get(root, "autotune"));
    damages += damage_object(json_object_get(json_object_get(root, "autotune"), "settings"));
    damages += damage_object(first_of("linears"));
    damages += damage_object(first_of("products"));
    cr_expect_gt(damages, 300, "%d", damages);
    json_object_set_new(first_of("products"), "algorithm", json_string("00"));
    expect_damaged("128 hexadecimal digits");
}

Test(record, what_contradicts_itself_is_said)
{
    json_t *record = json_object_get(root, "autotune");
    json_t *linears = json_object_get(record, "linears"), *first = json_array_get(linears, 0);
    json_t *product = json_array_get(json_object_get(record, "products"), 0);
    json_array_append(linears, first);
    expect_damaged("is that of an earlier entry");
    json_array_remove(linears, json_array_size(linears) - 1);
    json_object_set_new(first, "asked", json_pack("[s,s]", "self_attn.q_proj", "self_attn.o_proj"));
    expect_damaged("does not name linears of one input");
    json_object_set_new(first, "asked", json_array());
    expect_damaged("is empty");
    json_object_set_new(first, "asked", json_pack("[s]", "self_attn.q_proj"));
    json_object_set_new(product, "ldd", json_integer(95));
    expect_damaged("less than the rows of its matrix");
    json_object_set_new(product, "ldd", json_integer(96));
    json_object_set_new(product, "ldb", json_integer(63));
    expect_damaged("less than the rows of its matrix");
    json_object_set_new(product, "ldb", json_integer(64));
    json_object_set_new(product, "align", json_pack("[i,i,i]", 16, 24, 16));
    expect_damaged("powers of two");
}

Test(record, files_that_are_no_record)
{
    static const char *const files[] = {
        "", "{", "[]", "3", "{\"autotune\": 3}", "{\"a\": 1}", "{\"a\": 1, \"a\": 2}"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        assert_fails(read_text(files[i]), ND_ERR_DATA, "run.json");
    }
}

/* Cut anywhere, and with any one byte changed: read, or refused with a sentence, never a crash. */
Test(record, broken_bytes)
{
    size_t bytes = strlen(text);
    for (size_t cut = 0; cut < bytes; cut += 3) {
        cr_expect_neq(read_as(text, cut, &shape), ND_OK);
    }
    for (size_t at = 0; at < bytes; at++) {
        char kept = text[at];
        text[at] = (char)(kept ^ (1 << at % 7));
        cr_expect(read_as(text, bytes, &shape) == ND_OK || strlen(nd_error_last()->message) > 20);
        text[at] = kept;
    }
    cr_expect_eq(read_text(text), ND_OK);
}

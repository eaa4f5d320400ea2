// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/shapes.h"
#include "trainer/precision/precision.h"

enum { Q, K, V, O, GATE, UP, DOWN };

static nd_shape shape = {SIZES(128256, 4096, 14336, 32, 32, 8, 128)};
static nd_filter f; /* of the test */

static nd_config config_of(const char *filter, nd_fp8_recipe recipe)
{
    nd_config c = {
        .train = {.precision = ND_PRECISION_FP8, .sequence_length = 8192, .micro_batch_size = 1}};
    c.fp8.filter = (char *)filter;
    c.fp8.recipe = recipe;
    return c;
}

static nd_status start(const char *text, nd_fp8_recipe recipe)
{
    nd_config c = config_of(text, recipe);
    nd_filter_fini(&f);
    return nd_filter_init(&f, &c, &shape);
}

static void expect_refused(const char *text, const char *a, const char *b)
{
    assert_fails(start(text, ND_FP8_TENSORWISE), ND_ERR_CONFIG, a);
    cr_expect(strstr(nd_error_last()->message, b), "%s", nd_error_last()->message);
}

Test(filter, accelerate_leaves_out_the_first_and_the_last)
{
    assert_ok(start("accelerate", ND_FP8_TENSORWISE));
    cr_expect_eq(f.converted, 7 * 32 - 1);
    cr_expect_not(nd_filter_converts(&f, 0, Q));
    cr_expect(nd_filter_converts(&f, 0, K));
    cr_expect(nd_filter_converts(&f, 1, Q));
    cr_expect(nd_filter_converts(&f, 31, DOWN));
}

Test(filter, nothing_without_fp8)
{
    nd_config c = config_of("accelerate", ND_FP8_TENSORWISE);
    c.train.precision = ND_PRECISION_BF16;
    assert_ok(nd_filter_init(&f, &c, &shape));
    cr_expect_not(nd_filter_converts(&f, 1, K));
}

/* torchao's own words: Llama 8B's wk and wv (4096 -> 1024) stay in BF16 under both recipes. */
Test(filter, thresholds_of_torchao)
{
    assert_ok(start("auto", ND_FP8_TENSORWISE));
    cr_expect_eq(f.converted, 5 * 32);
    cr_expect(nd_filter_converts(&f, 0, Q), "it has no first and last");
    cr_expect_not(nd_filter_converts(&f, 5, K));
    cr_expect_not(nd_filter_converts(&f, 5, V));
    assert_ok(start("auto", ND_FP8_ROWWISE));
    cr_expect_eq(f.converted, 5 * 32);
    shape.hidden = 2048; /* o: 2048 x 4096, gate: 14336 x 2048, down: 2048 x 14336 */
    assert_ok(start("auto", ND_FP8_ROWWISE_GW_HP));
    cr_expect_not(nd_filter_converts(&f, 0, O));
    cr_expect(nd_filter_converts(&f, 0, GATE));
    cr_expect_not(nd_filter_converts(&f, 0, DOWN));
    cr_expect_not(nd_filter_converts(&f, 0, Q), "4096 x 2048 is at both limits");
}

/* gate_proj, (ffn, hidden), at both sides of each limit. */
Test(filter, limits_of_torchao_are_inclusive)
{
    static const struct {
        nd_fp8_recipe recipe;
        int64_t ffn, hidden;
        bool converts;
    } cases[] = {
        {ND_FP8_TENSORWISE, 1024, 4096, false}, {ND_FP8_TENSORWISE, 1040, 4096, true},
        {ND_FP8_TENSORWISE, 1024, 4112, true},  {ND_FP8_ROWWISE, 2048, 8192, false},
        {ND_FP8_ROWWISE, 2064, 8192, true},     {ND_FP8_ROWWISE, 8192, 1024, false},
        {ND_FP8_ROWWISE, 8192, 1040, true},     {ND_FP8_ROWWISE, 4096, 2048, false},
        {ND_FP8_ROWWISE, 4112, 2048, true},     {ND_FP8_ROWWISE, 4096, 2064, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shape.ffn = cases[i].ffn;
        shape.hidden = cases[i].hidden;
        const bool any = start("auto", cases[i].recipe) == ND_OK; /* refused: no linear is left */
        cr_expect_eq(any && nd_filter_converts(&f, 1, GATE), cases[i].converts, "case %zu", i);
    }
}

Test(filter, patterns)
{
    assert_ok(start("mlp,layers.3.self_attn.q_proj", ND_FP8_TENSORWISE));
    cr_expect_eq(f.converted, 3 * 32 + 1);
    cr_expect(nd_filter_converts(&f, 3, Q));
    cr_expect_not(nd_filter_converts(&f, 30, Q));
    static const struct {
        const char *text;
        int64_t converted;
    } matched[] = {
        {"*", 7 * 32},
        {"*.1?.*_proj", 70},
        {"*up_proj", 32},
        {"model.layers.?.mlp.up_proj", 10},
        {"model.layers.[0-2].mlp.up_proj", 3},
    };
    for (size_t i = 0; i < sizeof matched / sizeof *matched; i++) {
        assert_ok(start(matched[i].text, ND_FP8_TENSORWISE));
        cr_expect_eq(f.converted, matched[i].converted, "%s", matched[i].text);
    }
    expect_refused("w1", "w1 matches no linear", "layers.0 to 31 with self_attn.q_proj, ");
    expect_refused("mlp, lm_head", "lm_head", "BF16");
}

Test(filter, sizes_of_sixteen)
{
    shape.ffn = 14340;
    assert_ok(start("accelerate", ND_FP8_TENSORWISE));
    cr_expect_eq(f.converted, 4 * 32 - 1);
    expect_refused("up_proj", "14340 x 4096", "divisible by 16");
    shape.hidden = 4104;
    expect_refused("accelerate", "multiple of 16", "4104");
    shape.hidden = shape.ffn = 1024;
    shape.heads = shape.kv_heads; /* so that all linears are of 1024 x 1024 */
    expect_refused("auto", "auto no linear would run in FP8",
                   "(hidden 1024, ffn 1024, 8 heads and 8 KV heads of 128)");
}

Test(filter, conditions_of_the_mesh)
{
    nd_mesh mesh = {{1, 1, 1, 1, 8}};
    nd_config c = config_of("accelerate", ND_FP8_TENSORWISE);
    assert_ok(start("accelerate", ND_FP8_TENSORWISE));
    cr_expect_eq(nd_filter_check(&f, &c, &shape, &mesh), ND_OK);
    c.train.sequence_length = 8200;
    assert_fails(nd_filter_check(&f, &c, &shape, &mesh), ND_ERR_CONFIG, "8200 tokens");
    c.train.sequence_length = 8192;
    shape.ffn = 14352; /* 16 divides it, but not an eighth of it */
    assert_fails(nd_filter_check(&f, &c, &shape, &mesh), ND_ERR_CONFIG, "1794 x 4096");
    assert_ok(start("down_proj", ND_FP8_TENSORWISE));
    assert_fails(nd_filter_check(&f, &c, &shape, &mesh), ND_ERR_CONFIG, "4096 x 1794");
}

/* A product has micro-batch x sequence / cp tokens. */
Test(filter, tokens_of_a_rank)
{
    nd_config c = config_of("accelerate", ND_FP8_TENSORWISE);
    assert_ok(start("accelerate", ND_FP8_TENSORWISE));
    for (int cp = 1; cp <= 5; cp++) {
        nd_mesh mesh = {{1, 1, 1, 1, 1}};
        mesh.size[ND_AXIS_CP] = cp;
        for (int64_t s = 2 * cp; s <= 64 * cp; s += 2 * cp) {
            for (int64_t micro = 1; micro <= 4; micro++) {
                c.train.sequence_length = s;
                c.train.micro_batch_size = micro;
                cr_expect_eq(nd_filter_check(&f, &c, &shape, &mesh),
                             micro * (s / cp) % 16 == 0 ? ND_OK : ND_ERR_CONFIG,
                             "cp %d, sequence %lld, micro-batch %lld", cp, (long long)s,
                             (long long)micro);
            }
        }
    }
}

static void add_line(void *context, const char *text)
{
    size_t used = strlen(context);
    snprintf((char *)context + used, 4096 - used, "%s\n", text);
}

Test(filter, table_names_every_linear_once)
{
    static const char *const parts[] = {
        "223 of 225 linears in FP8, weights gathered in BF16\n",
        "x e4m3 per tensor, fast accumulation\n  input gradient: e5m2 per tensor x e4m3 per "
        "tensor\n  weight gradient: e5m2 per tensor",
        "128256 x 4096   bf16: the last linear",
        "layers.0.self_attn.q_proj",
        "first linear",
        "layers.1-31.self_attn.q_proj",
        "layers.0-31.mlp.down_proj          4096 x 14336  fp8\n",
        "lm_head"};
    char text[4096] = "";
    assert_ok(start("accelerate", ND_FP8_TENSORWISE));
    nd_config c = config_of("accelerate", ND_FP8_TENSORWISE);
    nd_device cpu = {.kind = ND_DEVICE_CPU};
    nd_rank rank = {.device = &cpu, .config = &c};
    const nd_scales s = {&rank, .recipe = nd_recipe_of(&c), .layers = 32, .filter = f};
    c.launch.device = ND_CHOOSE_CUDA; /* of a plan */
    nd_precision_each_line(&s, &shape, add_line, text);
    int lines = 0;
    for (const char *p = text; (p = strchr(p, '\n')) != NULL; p++) {
        lines++;
    }
    cr_expect_eq(lines, 4 + 9, "q in two lines, six others, the head\n%s", text);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        cr_expect(strstr(text, parts[i]), "no \"%s\" in:\n%s", parts[i], text);
    }
}

Test(filter, what_autotune_has_no_choice_for_is_named)
{
    nd_linear_choice choice = {.forced = false};
    assert_ok(start("*", ND_FP8_TENSORWISE));
    for (int input = 0; input < ND_INPUT_COUNT; input++) {
        for (int mask = 0; mask < ND_LINEAR_SETS; mask++) {
            choice.fp8[input][mask] = (int8_t)mask;
        }
    }
    cr_assert_eq(nd_filter_choose(&f, &choice), ND_OK);
    choice.fp8[ND_INPUT_GATE_UP][3] = -1;
    assert_fails(nd_filter_choose(&f, &choice), ND_ERR_DATA,
                 "in layer 0 (mlp.gate_proj, mlp.up_proj); ");
    choice.fp8[ND_INPUT_GATE_UP][3] = 4; /* a third linear */
    cr_expect_eq(nd_filter_choose(&f, &choice), ND_ERR_DATA);
}

// SPDX-License-Identifier: Apache-2.0
/* The calls of a step that is not made. That they are those of a real step is shown where products
 * are made by cuBLASLt's double: tests/hostcuda/test_tune.c. */
#include <criterion/criterion.h>
#include <math.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/shapes.h"
#include "trainer/dry/dry.h"

enum { LAYERS = 3, MICROS = 4, TOKENS = 64 };

static nd_config config;
static nd_rank rank_of_one;

static void setup(void)
{
    assert_ok(nd_config_init(&config));
    config.train.sequence_length = TOKENS;
    config.train.gradient_accumulation_steps = MICROS;
    rank_of_one =
        (nd_rank){.world_size = 1,
                  .mesh = {{1, 1, 1, 1, 1}},
                  .config = &config,
                  .shape = {SIZES(256, 64, 96, LAYERS, 4, 2, 16), .max_positions = 128,
                            .rms_eps = 1e-5, .init_std = 0.02, .rope = {.theta = 10000.0}}};
    assert_ok(nd_ops_ref(&rank_of_one.ops));
}

static void teardown(void)
{
    nd_config_fini(&config);
}

TestSuite(dry_run, .init = setup, .fini = teardown, .timeout = 60);

static int64_t times_of(const nd_calls *calls, nd_call_kind kind)
{
    int64_t times = 0;
    for (int i = 0; i < calls->count; i++) {
        times += calls->entries[i].call.kind == (int32_t)kind ? calls->entries[i].times : 0;
    }
    return times;
}

static nd_calls listed(const nd_linear_choice *choice)
{
    nd_calls calls = {0};
    assert_ok(nd_dry_run(&rank_of_one, choice, &calls));
    return calls;
}

/* Returns how often a step has such calls, as the filter has it. */
static int64_t times_of_step(nd_call_kind kind)
{
    nd_calls calls = listed(NULL);
    const int64_t times = times_of(&calls, kind);
    nd_calls_free(&calls);
    return times;
}

static int host_ranks = 1;

static nd_step_work counted(void)
{
    nd_step_work work;
    assert_ok(nd_dry_run_work(&rank_of_one, host_ranks, &work));
    return work;
}

static void use_mesh(nd_mesh mesh, int ranks)
{
    rank_of_one.mesh = mesh;
    rank_of_one.world_size = ranks;
}

/* Four products a block and three for the head, each with its two gradients. */
Test(dry_run, products_of_a_step_in_bf16)
{
    cr_expect_eq(times_of_step(ND_CALL_PRODUCT), MICROS * 3 * (4 * LAYERS + 1));
    cr_expect_eq(times_of_step(ND_CALL_PRODUCT_FP8), 0);
}

/* Full recompute makes q k v, o, and gate and up again; down's output is not needed. With
 * all_but_attention the sum with o's output is kept. Full makes the attention's forward again, four
 * of its 14 parts. */
Test(dry_run, recompute_counts)
{
    static const struct {
        nd_recompute recompute;
        int products; /* of a block, again */
    } cases[] = {
        {ND_RECOMPUTE_SELECTIVE, 0}, {ND_RECOMPUTE_ALL_BUT_ATTENTION, 2}, {ND_RECOMPUTE_FULL, 3}};
    const double attention = counted().flops_attention;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        config.parallel.recompute = cases[i].recompute;
        cr_expect_eq(times_of_step(ND_CALL_PRODUCT),
                     MICROS * (3 * (4 * LAYERS + 1) + cases[i].products * LAYERS), "case %zu", i);
        cr_expect_eq(counted().flops_attention, attention / 14 * (i == 2 ? 18 : 14), "case %zu", i);
    }
}

Test(dry_run, a_forced_choice_counts_its_products_and_casts)
{
    nd_linear_choice choice = {.forced = true};
    config.train.precision = ND_PRECISION_FP8;
    choice.fp8[3][0] = 1; /* down alone */
    nd_calls calls = listed(&choice);
    cr_expect_eq(times_of(&calls, ND_CALL_PRODUCT_FP8), MICROS * 3 * LAYERS);
    cr_expect_eq(times_of(&calls, ND_CALL_PRODUCT), MICROS * 3 * (3 * LAYERS + 1));
    cr_expect_geq(times_of(&calls, ND_CALL_FP8_CAST), MICROS * 3 * LAYERS, "input, weight, dy");
    nd_calls_free(&calls);
}

static nd_form_rule (*real_form)(const nd_device *, const nd_form_need *);

/* A backend whose products cast what nobody measures. */
static nd_form_rule casting_form(const nd_device *device, const nd_form_need *need)
{
    const nd_form_rule rule = real_form(device, need);
    return rule.maker == ND_FORM_BY_OP && !need->measured ? (nd_form_rule){ND_FORM_BY_PRODUCT}
                                                          : rule;
}

/* Where products cast, they have operands in BF16, linears with one input make one product for y
 * and one for dw, and a step casts the inputs that blocks keep as codes. Weights that travel as
 * codes are multiplied one by one. */
Test(dry_run, products_that_cast)
{
    nd_ops ops = *rank_of_one.ops;
    nd_calls calls[3];
    nd_step_work work[3];
    int64_t uncast[3] = {0, 0, 0};
    config.train.precision = ND_PRECISION_FP8;
    real_form = ops.form;
    for (int i = 0; i < 3; i++) {
        config.fp8.all_gather = i == 2;
        calls[i] = listed(NULL);
        work[i] = counted();
        for (int e = 0; e < calls[i].count; e++) {
            const nd_call *call = &calls[i].entries[e].call;
            const bool fp8 = call->kind == ND_CALL_PRODUCT_FP8;
            uncast[i] += fp8 && call->b.dtype == ND_DTYPE_BF16 && call->b.along == ND_PER_TENSOR
                             ? calls[i].entries[e].times
                             : 0;
        }
        ops.form = casting_form;
        rank_of_one.ops = &ops;
    }
    const int64_t linears = 7 * LAYERS - 1;
    cr_expect_eq(work[1].flops_fp8, work[0].flops_fp8);
    cr_expect_lt(work[1].moved_bytes, work[0].moved_bytes);
    cr_expect_eq(times_of(&calls[0], ND_CALL_PRODUCT_FP8), MICROS * 3 * linears);
    cr_expect_eq(times_of(&calls[1], ND_CALL_PRODUCT_FP8), MICROS * (2 * 4 * LAYERS + linears));
    cr_expect_eq(times_of(&calls[2], ND_CALL_PRODUCT_FP8), MICROS * 3 * linears);
    cr_expect_eq(times_of(&calls[1], ND_CALL_FP8_CAST), MICROS * (3 * LAYERS - 1));
    cr_expect_eq(uncast[0], 0);
    /* Weights of y and of dx, and the inputs that are kept in BF16: those of o, and of the first
     * layer's k and v. */
    cr_expect_eq(uncast[1], MICROS * (4 * LAYERS + linears + LAYERS + 1), "%ld", (long)uncast[1]);
    for (int i = 0; i < 3; i++) {
        nd_calls_free(&calls[i]);
    }
}

Test(dry_run, a_rank_of_a_mesh)
{
    config.train.precision = ND_PRECISION_FP8;
    use_mesh((nd_mesh){{1, 2, 2, 2, 2}}, 16);
    rank_of_one.rank = 9;
    rank_of_one.coord = nd_mesh_coord_of(&rank_of_one.mesh, 9);
    for (int ring = 0; ring < 2; ring++) {
        config.parallel.cp_comm = ring ? ND_CP_RING : ND_CP_ALLGATHER;
        cr_expect_gt(times_of_step(ND_CALL_PRODUCT), 0);
    }
}

/* Bytes of a step in BF16 on one worker, which casts so many weights from F32 once. */
static double moved_bytes(int64_t weights)
{
    const double T = TOKENS, x = T * 64 * 2, qk = T * 6 * 16 * 2, ffn = T * 96 * 2, v = T * 256 * 2;
    /* A norm reads both summands, and writes their sum and its output; the first one has one. */
    const double forward = 2 * 4 * x + 2 * qk + 3 * ffn;
    const double delta = 2 * T * 4 * 16 * 2 + T * 4 * 4;
    const double backward = 2 * 4 * x + delta + 2 * qk + 5 * ffn;
    /* Logits are read, then read and written; the last norm has no other gradient to add. */
    const double head = 4 * x + 3 * v + 3 * x, table = 2 * x + x + 2 * T * 64 * 4;
    return MICROS * (LAYERS * (forward + backward) - 2 * x + head + table) + 6.0 * (double)weights;
}

/* 6 FLOPs for each weight but the embedding's, and token; scores are made twice in attention, whose
 * forward has two products and its backward five. */
Test(dry_run, work_is_that_of_the_formula)
{
    const nd_shape *s = &rank_of_one.shape;
    const nd_step_work work = counted();
    double tokens = MICROS * TOKENS, each = 64.0 * 128 + 64.0 * 64 + 3.0 * 64 * 96;
    double weights = LAYERS * each + 256.0 * 64;
    double pairs = (double)s->heads * TOKENS * (TOKENS + 1) / 2 * MICROS * LAYERS;
    cr_expect_eq(work.flops_bf16, 6 * weights * tokens, "%g", work.flops_bf16);
    cr_expect_eq(work.flops_attention, 14 * pairs * (double)s->head_dim);
    cr_expect_eq(work.flops_fp8 + work.flops_f32 + work.wire_bytes, 0.0);
    nd_layout *layout = NULL;
    assert_ok(nd_layout_create(&(nd_layout_options){.shape = s}, &layout));
    cr_expect_eq(work.moved_bytes, moved_bytes(layout->shard_total), "%g", work.moved_bytes);
    nd_layout_destroy(layout);
    config.train.precision = ND_PRECISION_FP32;
    cr_expect_eq(counted().flops_f32, work.flops_bf16);
    config.train.precision = ND_PRECISION_FP8;
    const nd_step_work fp8 = counted();
    cr_expect_gt(fp8.flops_fp8, 0.0);
    cr_expect_eq(fp8.flops_fp8 + fp8.flops_bf16, work.flops_bf16);
}

/* With two KV heads and tp 4, two ranks have a copy of each head, which is work too. */
Test(dry_run, work_of_copies_of_kv_heads)
{
    nd_step_work work[2];
    const nd_shape *s = &rank_of_one.shape;
    const double tokens = MICROS * TOKENS, C = (double)s->hidden, D = (double)s->head_dim;
    cr_assert(s->heads == 4 && s->kv_heads == 2);
    for (int i = 0; i < 2; i++) {
        use_mesh((nd_mesh){{1, 1, 1, 1, 2 << i}, .kv_copies = 1 << i}, 2 << i);
        work[i] = counted();
    }
    /* One head of k and one of v on each rank, whether it has them alone or not. */
    const double kv = 6 * tokens * LAYERS * 2 * D * C;
    cr_expect_eq(2 * (work[1].flops_bf16 - kv), work[0].flops_bf16 - kv, "%g and %g",
                 work[0].flops_bf16, work[1].flops_bf16);
}

/* Four shards of one micro-batch: weights are gathered in BF16, and where they are freed after the
 * forward some of them again; gradients are reduced in F32. Shards are padded a little. */
Test(dry_run, work_of_a_shard_sends_weights_and_gradients)
{
    double once = (double)nd_shape_parameters(&rank_of_one.shape) * 3 / 4;
    config.train.gradient_accumulation_steps = 1;
    use_mesh((nd_mesh){{1, 1, 4, 1, 1}}, 4);
    config.parallel.reshard_after_forward = false;
    double kept = counted().wire_bytes;
    cr_expect_geq(kept, once * (2 + 4), "%g of %g", kept, once);
    cr_expect_leq(kept, once * (2 + 4) * 1.05, "%g of %g", kept, once);
    config.parallel.reshard_after_forward = true;
    const double freed = counted().wire_bytes;
    cr_expect_gt(freed, kept * 1.05);
    cr_expect_leq(freed, once * (2 + 2 + 4) * 1.05);
    /* Each of three micro-batches reduces its gradients. */
    config.train.gradient_accumulation_steps = 3;
    cr_expect_geq(counted().wire_bytes, once * (2 + 3 * 4));
}

/* With tensor parallelism the input of q k v and that of gate and up are gathered again beside
 * their input gradients, whose sums go out beside weight gradients: BF16 of each rank's tokens. */
Test(dry_run, work_of_tensor_parallelism_hides_four_exchanges_of_a_block)
{
    use_mesh((nd_mesh){{1, 1, 1, 1, 2}}, 2);
    const nd_step_work work = counted();
    const double hidden = work.wire_bytes - work.exposed_bytes;
    cr_expect_eq(hidden, MICROS * LAYERS * 4.0 * (TOKENS / 2) * 64 * 2, "%g", hidden);
    /* Beside these: the lookup and the head, each forward and backward, four of a block forward
     * and two backward, and the head's all-reduces of three numbers of each token. */
    const double all = MICROS * ((2 + 2 + 6 * LAYERS) * (TOKENS / 2) * 64.0 * 2 + 3 * 4 * TOKENS);
    cr_expect_eq(work.exposed_bytes, all, "%g", work.exposed_bytes);
}

/* Ranks 0 and 1 exchange activations, ranks 0 and 2 shards of weights and gradients. */
Test(dry_run, bytes_of_groups_of_one_host_do_not_leave_it)
{
    use_mesh((nd_mesh){{1, 1, 2, 1, 2}}, 4);
    nd_step_work on[5];
    for (host_ranks = 4; host_ranks > 0; host_ranks /= 2) {
        on[host_ranks] = counted();
        cr_expect_eq(on[host_ranks].host_bytes + on[host_ranks].wire_bytes, on[4].host_bytes);
    }
    host_ranks = 1;
    use_mesh((nd_mesh){{1, 1, 1, 1, 2}}, 2);
    cr_expect_eq(on[1].host_bytes, 0);
    cr_expect_eq(on[2].host_bytes, counted().wire_bytes, "those of tp alone");
}

/* Exposed bytes of attention's exchanges differ as the formula says, and auto takes the least. */
Test(dry_run, exposed_bytes_of_context_parallelism_are_those_of_the_formula)
{
    for (int mode = 0; mode < 8; mode++) {
        nd_cp_exchange list[ND_CP_EXCHANGES_MAX];
        double first = 0, least = INFINITY;
        config.train.precision = mode % 2 ? ND_PRECISION_FP32 : ND_PRECISION_BF16;
        config.parallel.recompute = mode / 2 % 2 ? ND_RECOMPUTE_FULL : ND_RECOMPUTE_NONE;
        const int tp = 1 + mode / 4;
        use_mesh((nd_mesh){{1, 1, 1, 4, tp}, 1}, 4 * tp);
        config.resolved_mesh = rank_of_one.mesh;
        const int count = nd_cp_list_exchanges(&rank_of_one.shape, &config, list);
        cr_assert_eq(count, tp == 1 ? 5 : 4, /* a rank of tp 2 has no four heads */
                     "ulysses 1, 2 and 4, the first two with allgather and ring");
        for (int i = 0; i < count; i++) {
            config.parallel.cp_comm = list[i].ring ? ND_CP_RING : ND_CP_ALLGATHER;
            config.resolved_mesh.ulysses = rank_of_one.mesh.ulysses = list[i].ulysses;
            const nd_step_work work = counted();
            cr_expect_eq(nd_cp_exchange_of(&rank_of_one.shape, &config).exposed_bytes,
                         list[i].exposed_bytes, "it is given");
            first = i == 0 ? work.exposed_bytes : first;
            least = fmin(least, list[i].exposed_bytes);
            cr_expect_float_eq(
                work.exposed_bytes - first, list[i].exposed_bytes - list[0].exposed_bytes, 0.5,
                "mode %d, ulysses %d, ring %d: %g and %g", mode, list[i].ulysses, list[i].ring,
                work.exposed_bytes - first, list[i].exposed_bytes - list[0].exposed_bytes);
        }
        config.parallel.cp_comm = ND_CP_AUTO;
        config.resolved_mesh.ulysses = 1;
        cr_expect_eq(nd_cp_exchange_of(&rank_of_one.shape, &config).exposed_bytes, least);
        config.resolved_mesh.ulysses = 2; /* is given */
        cr_expect_eq(nd_cp_exchange_of(&rank_of_one.shape, &config).ulysses, 2);
    }
}

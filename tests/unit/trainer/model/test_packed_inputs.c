// SPDX-License-Identifier: Apache-2.0
/*
 * Inputs of linears that the ops which make them pack: over the reference ops stands a backend
 * whose forms are copies of the rows, inverted as b, and which makes no rows where it is asked for
 * forms.
 * Counted are the forms that are made and read; loss and gradients are those without forms, bit for
 * bit, so no product reads the form of another input, of another layer or of another micro-batch.
 */
#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/mesh_ranks.h"
#include "trainer/model/model.h"

enum { LAYERS = 3, T = 32, MICROS = 2, MOST_RANKS = 4, INVERTED = 0xff };

typedef enum form_use { AS_A, AS_B, USES } form_use;

/* Of all ranks of a job. */
static struct {
    const nd_ops *ref;
    atomic_int made[USES], read[USES];
} spy;

static void copy_form(void *to, const void *from, size_t bytes, form_use use)
{
    for (size_t i = 0; i < bytes; i++) {
        ((unsigned char *)to)[i] = ((const unsigned char *)from)[i] ^ (use == AS_B ? INVERTED : 0);
    }
}

static nd_status make_form(nd_packed_form *form, nd_tensor rows, form_use use)
{
    if (form) {
        ND_CHECK(form->memory && !form->made, "a form without memory, or that is made already");
        copy_form(form->memory, rows.data, nd_tensor_bytes(rows), use);
        form->made = true;
        spy.made[use]++;
    }
    return ND_OK;
}

/* Rows in memory of the caller's, who frees it, for a result that is only packed. */
static nd_tensor blank_rows(nd_tensor like)
{
    nd_tensor rows = nd_tensor_2d(NULL, like.dtype, like.shape[0], like.shape[1]);
    rows.data = malloc(nd_tensor_bytes(rows));
    cr_assert_not_null(rows.data);
    return rows;
}

/* The rows of an operand: a copy, which the caller frees, where it is packed. */
static nd_status unpack(nd_tensor *x, const nd_packed_form *form, form_use use)
{
    if (form) {
        ND_CHECK(!x->data && form->made, "an operand with rows and a form, or with neither");
        *x = blank_rows(*x);
        copy_form(x->data, form->memory, nd_tensor_bytes(*x), use);
        spy.read[use]++;
    }
    return ND_OK;
}

/* Both forms of a result whose rows are made; `kept`: the tensor that the op was given. */
static nd_status make_forms(const nd_fuse *fuse, nd_tensor rows, nd_tensor kept)
{
    ND_CHECK(!kept.data, "rows of what is packed");
    ND_TRY(make_form(fuse->as_a, rows, AS_A));
    return make_form(fuse->as_b, rows, AS_B);
}

static bool has_forms(const nd_fuse *fuse)
{
    return fuse->as_a || fuse->as_b;
}

static nd_status spy_rmsnorm_fwd(nd_stream *stream, const nd_rmsnorm_fwd_args *args)
{
    nd_rmsnorm_fwd_args x = *args;
    if (!has_forms(&x.fuse)) {
        return spy.ref->rmsnorm_fwd(stream, args);
    }
    x.y = blank_rows(x.y);
    x.fuse = (nd_fuse){0};
    nd_status status = spy.ref->rmsnorm_fwd(stream, &x);
    status = status == ND_OK ? make_forms(&args->fuse, x.y, args->y) : status;
    free(x.y.data);
    return status;
}

static nd_status spy_swiglu_fwd(nd_stream *stream, const nd_swiglu_fwd_args *args)
{
    nd_swiglu_fwd_args x = *args;
    if (!has_forms(&x.fuse)) {
        return spy.ref->swiglu_fwd(stream, args);
    }
    x.out = blank_rows(x.out);
    x.fuse = (nd_fuse){0};
    nd_status status = spy.ref->swiglu_fwd(stream, &x);
    status = status == ND_OK ? make_forms(&args->fuse, x.out, args->out) : status;
    free(x.out.data);
    return status;
}

/* The outputs of attention as it takes them, (B, S, H, D), in rows of (B S, H D). */
static nd_tensor of_heads(nd_tensor rows, const nd_attention *a)
{
    return nd_tensor_4d(rows.data, rows.dtype, a->batch, a->sq, a->heads, a->head_dim);
}

static nd_tensor outputs_of(const nd_attention *a, nd_dtype dtype)
{
    return nd_tensor_2d(NULL, dtype, a->batch * a->sq, a->heads * a->head_dim);
}

static nd_status spy_attention_fwd(nd_stream *stream, const nd_attention_fwd_args *args)
{
    nd_attention_fwd_args x = *args;
    if (!has_forms(&x.fuse)) {
        return spy.ref->attention_fwd(stream, args);
    }
    const nd_tensor rows = blank_rows(outputs_of(&x.attention, x.out.dtype));
    x.out = of_heads(rows, &x.attention);
    x.fuse = (nd_fuse){0};
    nd_status status = spy.ref->attention_fwd(stream, &x);
    status = status == ND_OK ? make_forms(&args->fuse, rows, args->out) : status;
    free(rows.data);
    return status;
}

/* Reading the form here is not counted: no product does. */
static nd_status spy_attention_delta(nd_stream *stream, const nd_attention_delta_args *args)
{
    nd_attention_delta_args x = *args;
    if (!x.out_packed) {
        return spy.ref->attention_delta(stream, args);
    }
    nd_tensor rows = outputs_of(&x.attention, x.out.dtype);
    ND_TRY(unpack(&rows, x.out_packed, AS_B));
    spy.read[AS_B]--;
    x.out = of_heads(rows, &x.attention);
    x.out_packed = NULL;
    nd_status status = spy.ref->attention_delta(stream, &x);
    free(rows.data);
    return status;
}

static nd_status spy_matmul(nd_stream *stream, const nd_matmul_args *args)
{
    nd_matmul_args x = *args;
    ND_TRY(unpack(&x.a, args->a_packed, AS_A));
    ND_TRY(unpack(&x.b, args->b_packed, AS_B));
    x.a_packed = NULL;
    nd_status status = spy.ref->matmul(stream, &x);
    free(args->a_packed ? x.a.data : NULL);
    free(args->b_packed ? x.b.data : NULL);
    return status;
}

static size_t spy_activation_bytes(const nd_device *device, int64_t rows, int64_t columns,
                                   nd_dtype act, bool as_b)
{
    return (size_t)(rows * columns) * nd_dtype_size(act);
}

static bool spy_attention_packs(const nd_device *device, const nd_attention *a, nd_dtype act)
{
    return true;
}

typedef struct packed_case {
    const char *name;
    nd_mesh mesh;
    nd_recompute recompute;
    nd_precision precision;
    int64_t vocab; /* 0: one tile of the head holds it */
    bool forward_only;
    /* Of one rank: forms that a micro-batch of training makes and its products read, and those that
     * a micro-batch of validation makes and reads, which are all as a. */
    int made[USES], read[USES], validated_made, validated_read;
} packed_case;

/* One run of a case, with forms or without. */
typedef struct packed_run {
    const packed_case *of;
    bool packs;
    double loss[MOST_RANKS];
    int64_t count[MOST_RANKS];
    float *grad[MOST_RANKS];
} packed_run;

static nd_status run_model(nd_rank *rank, nd_model *m, packed_run *run)
{
    const bool trains = !run->of->forward_only;
    m->numbers->tokens = T;
    if (trains) {
        nd_fsdp_begin_step(&m->fsdp);
    }
    for (int micro = 0; micro < MICROS && trains; micro++) {
        ND_TRY(mesh_micro_batch(m, micro, ND_PASS_TRAIN));
    }
    ND_TRY(mesh_micro_batch(m, MICROS, ND_PASS_EVAL));
    run->loss[rank->rank] = m->numbers->loss_sum;
    run->count[rank->rank] = trains ? m->layout->shard_total : 0;
    ND_TRY(ND_ALLOC(run->count[rank->rank] + 1, &run->grad[rank->rank]));
    for (int64_t i = 0; i < run->count[rank->rank]; i++) {
        run->grad[rank->rank][i] = m->fsdp.grad[i];
    }
    return ND_OK;
}

static nd_status body(nd_rank *rank, void *context)
{
    packed_run *run = context;
    nd_ops ops = *rank->ops;
    nd_memplan plan;
    nd_model *m = NULL;
    if (run->packs) {
        ops.rmsnorm_fwd = spy_rmsnorm_fwd;
        ops.swiglu_fwd = spy_swiglu_fwd;
        ops.attention_fwd = spy_attention_fwd;
        ops.attention_delta = spy_attention_delta;
        ops.matmul = spy_matmul;
        ops.activation_packed_bytes = spy_activation_bytes;
        ops.attention_packs = spy_attention_packs;
    }
    rank->ops = &ops;
    const nd_model_options options = {.forward_only = run->of->forward_only};
    nd_status status = mesh_model_open_with(rank, &options, 1, &plan, &m);
    if (status == ND_OK) {
        status = run_model(rank, m, run);
        mesh_model_close(&plan, m);
    }
    return status;
}

static packed_run run(const packed_case *c, bool packs)
{
    packed_run result = {.of = c, .packs = packs};
    mesh_ranks job = {.mesh = c->mesh,
                      .shape = mesh_shape_of(LAYERS, false),
                      .config = mesh_config_of(),
                      .body = body,
                      .context = &result};
    job.shape.rms_eps = 1e-5;
    job.shape.vocab = c->vocab ? c->vocab : job.shape.vocab;
    job.config.train.gradient_accumulation_steps = MICROS;
    job.config.train.precision = c->precision;
    job.config.parallel.recompute = c->recompute;
    memset(spy.made, 0, sizeof spy.made);
    memset(spy.read, 0, sizeof spy.read);
    cr_assert_eq(nd_ops_ref(&spy.ref), ND_OK);
    cr_assert_eq(mesh_ranks_run(&job), ND_OK, "%s: %s", c->name, nd_error_last()->message);
    return result;
}

static void expect_counts(const packed_case *c)
{
    static const char *const uses[USES] = {"a", "b"};
    const int ranks = nd_mesh_world_size(&c->mesh), micros = c->forward_only ? 0 : MICROS;
    for (int use = 0; use < (int)USES; use++) {
        const int made = ranks * (micros * c->made[use] + (use == AS_A ? c->validated_made : 0));
        const int read = ranks * (micros * c->read[use] + (use == AS_A ? c->validated_read : 0));
        cr_expect_eq(spy.made[use], made, "%s: %d forms as %s were made, not %d", c->name,
                     spy.made[use], uses[use], made);
        cr_expect_eq(spy.read[use], read, "%s: %d products read a form as %s, not %d", c->name,
                     spy.read[use], uses[use], read);
    }
}

static void check(const packed_case *c)
{
    packed_run rows = run(c, false);
    cr_expect_eq(spy.made[AS_A] + spy.made[AS_B], 0);
    packed_run packed = run(c, true);
    expect_counts(c);
    for (int r = 0; r < nd_mesh_world_size(&c->mesh); r++) {
        cr_expect_eq(rows.count[r], packed.count[r]);
        cr_expect(rows.loss[r] == packed.loss[r] && rows.loss[r] > 0.0,
                  "%s, rank %d: loss %.17g, without forms %.17g", c->name, r, packed.loss[r],
                  rows.loss[r]);
        cr_expect_eq(memcmp(rows.grad[r], packed.grad[r], (size_t)rows.count[r] * sizeof(float)), 0,
                     "%s, rank %d: other gradients than without forms", c->name, r);
        free(rows.grad[r]);
        free(packed.grad[r]);
    }
}

#define ONE                                                                                        \
    {                                                                                              \
        {                                                                                          \
            1, 1, 1, 1, 1                                                                          \
        }                                                                                          \
    }

/* Inputs of q k v, o, gate and up, down; and of the head. */
enum { INPUTS = 4 * LAYERS, ALL = INPUTS + 1 };

Test(packed_inputs, ops_make_their_forms_and_products_read_them)
{
    const packed_case cases[] = {
        {"one worker", ONE, .made = {ALL, ALL}, .read = {ALL, ALL}, .validated_made = ALL,
         .validated_read = ALL},
        {"bf16, two tiles of the head", ONE, .precision = ND_PRECISION_BF16, .vocab = 1500,
         .made = {ALL, ALL}, .read = {ALL + 1, ALL + 1}, .validated_made = ALL,
         .validated_read = ALL + 1},
        {"selective recompute, which makes b again but for o", ONE, ND_RECOMPUTE_SELECTIVE,
         .made = {ALL, ALL}, .read = {ALL, ALL}, .validated_made = ALL, .validated_read = ALL},
        {"recompute of all but attention, which multiplies again but for o and down", ONE,
         ND_RECOMPUTE_ALL_BUT_ATTENTION, .made = {ALL + 2 * LAYERS, ALL},
         .read = {ALL + 2 * LAYERS, ALL}, .validated_made = ALL, .validated_read = ALL},
        {"full recompute, which multiplies again but for down", ONE, ND_RECOMPUTE_FULL,
         .made = {ALL + 3 * LAYERS, ALL}, .read = {ALL + 3 * LAYERS, ALL}, .validated_made = ALL,
         .validated_read = ALL},
        {"fsdp 2",
         {{1, 1, 2, 1, 1}},
         .made = {ALL, ALL},
         .read = {ALL, ALL},
         .validated_made = ALL,
         .validated_read = ALL},
        {"tp 2, which gathers the inputs of q k v, of gate and up, and of the head",
         {{1, 1, 1, 1, 2}},
         .made = {2 * LAYERS, 2 * LAYERS},
         .read = {2 * LAYERS, 2 * LAYERS},
         .validated_made = 2 * LAYERS,
         .validated_read = 2 * LAYERS},
        {"cp 2, where o has several blocks",
         {{1, 1, 1, 2, 1}},
         .made = {ALL - LAYERS, ALL - LAYERS},
         .read = {ALL - LAYERS, ALL - LAYERS},
         .validated_made = ALL - LAYERS,
         .validated_read = ALL - LAYERS},
        {"fp8, which leaves the head in bf16", ONE, .precision = ND_PRECISION_FP8, .made = {1, 1},
         .read = {1, 1}, .validated_made = 1, .validated_read = 1},
        {"validation alone", ONE, .forward_only = true, .validated_made = ALL,
         .validated_read = ALL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check(&cases[i]);
    }
}

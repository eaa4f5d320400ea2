// SPDX-License-Identifier: Apache-2.0
/*
 * Packed weights that are kept: over the reference ops stands a backend whose packed form is a copy
 * of b, and which checks at every product that a form it is given is that of the product's b.
 * Counted are the forms that are made, and the products that read one.
 */
#include <criterion/criterion.h>
#include <stdatomic.h>
#include <string.h>

#include "tests/unit/trainer/mesh_ranks.h"

enum { LAYERS = 3, T = 32, STEPS = 2 };

/* The reference's ops, and the counts of all ranks of a job. */
static struct {
    const nd_ops *ref;
    atomic_int made, read;
} spy;

/* b: what the product reads. */
static nd_status use_form(nd_kept_form *form, nd_tensor b)
{
    const size_t bytes = nd_tensor_bytes(b);
    if (!form) {
        return ND_OK;
    }
    ND_CHECK(form->memory, "a form without memory");
    if (!form->made) {
        memcpy(form->memory, b.data, bytes);
        form->made = true;
        spy.made++;
    }
    spy.read++;
    ND_CHECK(memcmp(form->memory, b.data, bytes) == 0,
             "a product reads the form of another weight");
    return ND_OK;
}

static nd_status spy_product(nd_stream *stream, const nd_product_args *x)
{
    ND_TRY(use_form(x->b.kept, x->b.stored));
    return spy.ref->product(stream, x);
}

static nd_form_rule spy_form(const nd_device *device, const nd_form_need *need)
{
    const nd_form_rule rule = spy.ref->form(device, need);
    const size_t bytes = (size_t)(need->rows * need->columns) * nd_dtype_size(need->stored);
    return rule.maker == ND_FORM_IS_STORED && need->uses > 1
               ? (nd_form_rule){ND_FORM_BY_PRODUCT, bytes}
               : rule;
}

typedef struct packed_case {
    const char *name;
    nd_mesh mesh;
    int micros;
    nd_recompute recompute;
    nd_precision precision;
    bool all_gather, tied, zero3;
    enum { KEEP_ALL = 0, KEEP_HEAD, KEEP_NONE } keep; /* which forms there is memory for */
    int64_t vocab;                                    /* 0: one tile of the head holds it */
    /* Expected of one rank and step: forms that are made, products that read one in the
     * micro-batches, and in the validation behind them. */
    int made, read, validated;
} packed_case;

/* Steps whose weights differ, each with a validation. */
static nd_status body(nd_rank *rank, void *context)
{
    const packed_case *c = context;
    const mesh_packed packed = {.blocks = c->keep == KEEP_ALL, .head = c->keep != KEEP_NONE};
    nd_ops ops = *rank->ops;
    nd_model *m = NULL;
    ops.product = spy_product;
    ops.form = spy_form;
    rank->ops = &ops;
    ND_TRY(mesh_model_open_packed(rank, NULL, packed, 1, &m));
    for (int step = 0; step < STEPS; step++) {
        m->numbers->tokens = T;
        nd_fsdp_begin_step(&m->fsdp, 0);
        for (int micro = 0; micro < c->micros; micro++) {
            ND_TRY(mesh_micro_batch(m, micro, ND_PASS_TRAIN));
        }
        ND_TRY(mesh_micro_batch(m, c->micros, ND_PASS_EVAL));
        for (int64_t i = 0; i < m->layout->shard_total; i++) {
            m->fsdp.master[i] = 0.75f * m->fsdp.master[i] + 0.01f;
        }
        nd_fsdp_weights_changed(&m->fsdp);
    }
    return ND_OK;
}

static void run(const packed_case *c)
{
    mesh_ranks job = mesh_ranks_of(c->mesh, LAYERS, c->tied, body, c);
    const int ranks = nd_mesh_world_size(&c->mesh);
    job.shape.rms_eps = 1e-5;
    job.shape.vocab = c->vocab ? c->vocab : job.shape.vocab;
    job.config.train.gradient_accumulation_steps = c->micros;
    job.config.train.precision = c->precision;
    job.config.fp8.all_gather = c->all_gather;
    job.config.parallel.recompute = c->recompute;
    job.config.parallel.reshard_after_forward = c->zero3;
    spy.made = spy.read = 0;
    cr_assert_eq(nd_ops_ref(&spy.ref), ND_OK);
    expect_ranks(&job, "%s", c->name);
    const int made = STEPS * ranks * c->made, read = STEPS * ranks * (c->read + c->validated);
    cr_expect_eq(spy.made, made, "%s: %d forms were made, not %d", c->name, spy.made, made);
    cr_expect_eq(spy.read, read, "%s: %d products read a form, not %d", c->name, spy.read, read);
}

/* Products of a forward, and as many of input gradients: q k v together, o, gate and up together,
 * down, and the head; in FP8 each linear has its own. */
enum { PRODUCTS = 4 * LAYERS + 1, FP8_PRODUCTS = 7 * LAYERS + 1, AGAIN = 3 * LAYERS };

Test(packed_weights, are_made_once_a_step_where_they_are_read_again)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}}, two = {{1, 1, 2, 1, 1}}, four = {{1, 1, 2, 1, 2}};
    const packed_case cases[] = {
        {"one micro-batch", one, 1},
        {"three", one, 3, .made = 2 * PRODUCTS, .read = 3 * 2 * PRODUCTS, .validated = PRODUCTS},
        {"three, bf16, tied", one, 3, .precision = ND_PRECISION_BF16, .tied = true,
         .made = 2 * PRODUCTS, .read = 3 * 2 * PRODUCTS, .validated = PRODUCTS},
        {"two tiles of the head, whose weight gradients read the same rows", one, 3, .vocab = 1500,
         .made = 2 * (PRODUCTS + 1) + 3, .read = 3 * (2 * (PRODUCTS + 1) + 2),
         .validated = PRODUCTS + 1},
        {"full recompute", one, 1, ND_RECOMPUTE_FULL, .made = AGAIN, .read = 2 * AGAIN,
         .validated = AGAIN},
        {"recompute of all but attention", one, 1, ND_RECOMPUTE_ALL_BUT_ATTENTION,
         .made = 2 * LAYERS, .read = 2 * 2 * LAYERS, .validated = 2 * LAYERS},
        {"selective recompute", one, 1, ND_RECOMPUTE_SELECTIVE},
        {"full recompute, two micro-batches", one, 2, ND_RECOMPUTE_FULL, .made = 2 * PRODUCTS,
         .read = 2 * (2 * PRODUCTS + AGAIN), .validated = PRODUCTS},
        {"fsdp 2 x tp 2", four, 2, .made = 2 * PRODUCTS, .read = 2 * 2 * PRODUCTS,
         .validated = PRODUCTS},
        {"blocks share buffers", two, 2, .zero3 = true, .made = 2, .read = 2 * 2, .validated = 1},
        {"only the head's are kept", one, 2, .vocab = 1500, .keep = KEEP_HEAD, .made = 2 * 2 + 2,
         .read = 2 * (2 * 2 + 2), .validated = 2},
        {"none is kept", one, 2, .keep = KEEP_NONE},
        {"codes", one, 2, .precision = ND_PRECISION_FP8, .all_gather = true,
         .made = 2 * FP8_PRODUCTS, .read = 2 * 2 * FP8_PRODUCTS, .validated = FP8_PRODUCTS},
        {"codes are cast for each product", one, 2, .precision = ND_PRECISION_FP8, .made = 2,
         .read = 2 * 2, .validated = 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run(&cases[i]);
    }
}

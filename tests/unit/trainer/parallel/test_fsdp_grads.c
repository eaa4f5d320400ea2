// SPDX-License-Identifier: Apache-2.0
/* The sums after the reduce-scatters, and the norm: every element once on every mesh. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "tests/unit/trainer/mesh_ranks.h"

enum { LAYERS = 2 };

/* The gradient that a rank has before: of what several tp ranks hold, each has its own part. */
static uint64_t seed_of(int replica, int tp)
{
    return (uint64_t)(replica * 8 + tp + 1);
}

static bool is_of_kv(const nd_param *p)
{
    return p->id == ND_PARAM_K || p->id == ND_PARAM_V || p->id == ND_PARAM_K_BIAS ||
           p->id == ND_PARAM_V_BIAS || p->id == ND_PARAM_NORM_K_ALL;
}

/* The sum over dp_replicate, of replicated parameters over tp, and of KV heads over their copies.
 * p: of any rank. */
static float summed(const nd_mesh *mesh, const nd_param *p, int64_t element)
{
    float sum = 0.0f;
    const int tp = mesh->size[ND_AXIS_TP], copies = mesh->kv_copies;
    const int blocks = p->split == ND_SPLIT_NONE ? 1
                       : is_of_kv(p)             ? tp / copies
                                                 : 0; /* 0: each rank has one */
    const int first = blocks ? (int)(element / (p->rows * p->cols / blocks)) * (tp / blocks) : 0;
    for (int r = 0; r < mesh->size[ND_AXIS_DP_REPLICATE]; r++) {
        for (int t = first; t < first + (blocks ? tp / blocks : 1); t++) {
            sum += mesh_param_value(seed_of(r, t), p, element);
        }
    }
    return sum;
}

static nd_status write_span(void *context, const nd_span *span)
{
    mesh_shards *s = context;
    const int *at = s->rank->coord.at;
    const bool several = span->param->split == ND_SPLIT_NONE || is_of_kv(span->param);
    const int tp = several ? at[ND_AXIS_TP] : 0;
    for (int64_t i = 0; i < span->rows * span->cols; i++) {
        s->fsdp.grad[span->begin + i] = mesh_param_value(seed_of(at[ND_AXIS_DP_REPLICATE], tp),
                                                         span->param, nd_span_global(span, i));
    }
    return ND_OK;
}

/* Padding gets a value that no norm overlooks, except rows that pad a vocabulary: theirs is 0, as
 * the head's backward leaves it. */
static nd_status write_gradients(mesh_shards *s)
{
    for (int64_t i = 0; i < s->layout->shard_total; i++) {
        s->fsdp.grad[i] = 1e6f;
    }
    for (int i = 0; i < s->layout->param_count; i++) {
        nd_flat_range range = nd_layout_shard_range(s->layout, &s->layout->params[i]);
        memset(s->fsdp.grad + range.begin, 0,
               (size_t)(range.end - range.begin) * sizeof *s->fsdp.grad);
    }
    return mesh_each_span(s->layout, write_span, s);
}

static nd_status check_span(void *context, const nd_span *span)
{
    const mesh_shards *s = context;
    for (int64_t i = 0; i < span->rows * span->cols; i++) {
        int64_t e = nd_span_global(span, i);
        float found = s->fsdp.grad[span->begin + i];
        float expected = summed(&s->rank->mesh, span->param, e);
        ND_CHECK(found == expected, "gradient %lld of %s is %g, not %g", (long long)e,
                 span->param->name, (double)found, (double)expected);
    }
    return ND_OK;
}

/* The squares of the whole model, by a layout of one rank. The sums are simple fractions, so the
 * squares add up exactly in any order. */
static nd_status expected_squares(const nd_rank *rank, double *out)
{
    nd_layout *whole = NULL;
    ND_TRY(nd_layout_create(&(nd_layout_options){.shape = &rank->shape}, &whole));
    *out = 0.0;
    for (int i = 0; i < whole->param_count; i++) {
        const nd_param *p = &whole->params[i];
        for (int64_t e = 0; e < p->rows * p->cols; e++) {
            double value = summed(&rank->mesh, p, e);
            *out += value * value;
        }
    }
    nd_layout_destroy(whole);
    return ND_OK;
}

static nd_status body(nd_rank *rank, void *context)
{
    double squares = NAN, expected = NAN;
    mesh_shards *s;
    ND_TRY(mesh_shards_open(rank, false, &s));
    ND_CHECK(s->rank->mesh.size[ND_AXIS_TP] > 1 || !s->fsdp.packed,
             "norm gradients have a copy at tp 1");
    ND_TRY(write_gradients(s));
    nd_fsdp_begin_step(&s->fsdp, 1);
    ND_TRY(nd_fsdp_grad_reduce(&s->fsdp, &squares));
    ND_TRY(mesh_each_span(s->layout, check_span, s));
    ND_TRY(expected_squares(s->rank, &expected));
    ND_CHECK(squares == expected, "the squares add up to %.17g, not %.17g", squares, expected);
    return ND_OK;
}

Test(fsdp_grads, sums_and_norm_of_every_mesh)
{
    static const nd_mesh meshes[] = {{{1, 1, 1, 1, 1}}, {{1, 1, 2, 1, 1}}, {{1, 2, 1, 1, 1}},
                                     {{1, 1, 1, 1, 2}}, {{1, 1, 1, 1, 4}}, {{1, 1, 3, 1, 2}},
                                     {{1, 2, 2, 1, 1}}, {{1, 2, 1, 1, 2}}, {{1, 1, 1, 2, 2}},
                                     {{1, 2, 2, 1, 2}}, {{1, 3, 1, 2, 1}}};
    for (size_t m = 0; m < sizeof meshes / sizeof *meshes; m++) {
        for (int variant = 0; variant < 8; variant++) {
            mesh_ranks job = mesh_ranks_of(meshes[m], LAYERS, variant & 1, body, NULL);
            const int *n = job.mesh.size;
            job.shape.kv_heads = variant & 4 ? 2 : 4; /* 2: with tp 4 there are copies */
            job.shape.qkv_bias = job.shape.o_bias = job.shape.mlp_bias = 1;
            job.shape.qk_norm = variant & 1 ? 2 : 1;
            job.shape.post_norm = 2;
            if (variant & 2) { /* in both segments */
                job.config.train.precision = ND_PRECISION_FP8;
                job.config.fp8.all_gather = true;
            }
            expect_ranks(&job, "dp_replicate %d dp_shard %d cp %d tp %d, variant %d", n[1], n[2],
                         n[3], n[4], variant);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
/* A model that keeps nothing for a backward has the validation loss of the training model, bit for
 * bit, in less memory, although its weights were converted as they were loaded. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "tests/unit/trainer/mesh_ranks.h"
#include "trainer/weights/weights.h"

enum {
    LAYERS = 3,
    PIECE = 75 /* elements that are read at a time: pieces end within rows */
};

/* Weights between BF16 values, so that it shows what was rounded, and how often. */
static float value_of(const nd_param *p, int64_t element)
{
    return mesh_param_value(3, p, element) + 0x1p-9f * mesh_value(4, element);
}

static nd_status want_span(void *context, const nd_span *span, float *to)
{
    for (int64_t i = 0; i < span->rows * span->cols; i++) {
        to[i] = value_of(span->param, nd_span_global(span, i));
    }
    return ND_OK;
}

/* The amax of a weight, or of one of its rows, over all ranks. */
static float amax_of(const nd_scales *s, const nd_param *p, int64_t local_row, bool of_row)
{
    const int64_t row = p->row_begin + local_row;
    const int64_t begin = of_row ? row * p->cols : 0;
    const int64_t end = of_row ? begin + p->cols : p->rows * p->cols;
    float most = 0;
    for (int64_t i = begin; i < end; i++) {
        const float x = value_of(p, i);
        most = fmaxf(most, fabsf(s->from_bf16 ? nd_bf16_to_f32(nd_bf16_from_f32(x)) : x));
    }
    return most;
}

/* Kept weights have the scales of the whole: a wrong power of two would show in no loss. */
static nd_status check_kept(const nd_model *m)
{
    const nd_scales *s = &m->scales;
    const bool rows = s->recipe.rules[ND_W_OF_Y].granularity == ND_PER_ROW;
    int64_t checked = 0;
    for (int i = 0; i < m->layout->param_count; i++) {
        const nd_param *p = &m->layout->params[i];
        if (p->segment == ND_SEGMENT_FP8) {
            const nd_scale_ref at = nd_scales_of_weight(s, p->layer, nd_linear_of_param(p->id));
            for (int64_t r = 0; r < (rows ? p->local_rows : 1); r++, checked++) {
                ND_CHECK(at.amax[r] == amax_of(s, p, r, rows), "%s: amax %lld is %g, not %g",
                         p->name, (long long)r, (double)at.amax[r], (double)amax_of(s, p, r, rows));
            }
        }
    }
    ND_CHECK(checked > 0 || !s->recipe.name, "no weight is kept as codes");
    ND_CHECK(!m->work.fp8[ND_FP8_DY] && !m->work.fp8[ND_FP8_DY_TRANSPOSED] &&
                 !m->work.fp8[ND_FP8_DY_LOCAL] && !m->work.fp8[ND_FP8_X_TRANSPOSED],
             "there are buffers of gradients");
    ND_CHECK(!m->work.fp8[ND_FP8_W] && !m->work.fp8[ND_FP8_W_TRANSPOSED], "a weight is cast again");
    return ND_OK;
}

/* Loads the weights. The amaxes of all weights of a layer are reduced together: over every group
 * once. */
static nd_status load(nd_model *m)
{
    static const nd_group_kind groups[] = {ND_GROUP_TP, ND_GROUP_DP_SHARD_CP, ND_GROUP_MODEL,
                                           ND_GROUP_DP_REPLICATE};
    const nd_scales *s = &m->scales;
    const bool kept = s->weights_kept, rows = s->recipe.rules[ND_W_OF_Y].granularity == ND_PER_ROW;
    const int64_t expected[] = {kept && rows ? LAYERS : 0, kept && rows ? LAYERS : 0,
                                kept && !rows ? LAYERS : 0, kept ? LAYERS : 0};
    int64_t before[4];
    for (int i = 0; i < 4; i++) {
        before[i] = mesh_calls(m->rank, groups[i], ND_COMM_ALL_REDUCE);
    }
    ND_TRY(nd_weights_fill(&m->fsdp, &(nd_values){.want = want_span}, true));
    for (int i = 0; i < 4; i++) {
        const int64_t calls = mesh_calls(m->rank, groups[i], ND_COMM_ALL_REDUCE) - before[i];
        ND_CHECK(calls == expected[i], "group %d has %lld reductions, not %lld", (int)groups[i],
                 (long long)calls, (long long)expected[i]);
    }
    return ND_OK;
}

static nd_status loss_of(nd_rank *rank, bool forward_only, double *loss, size_t *bytes)
{
    const nd_model_options options = {.forward_only = forward_only};
    nd_model *m = NULL;
    nd_activation_set *set;
    ND_TRY(mesh_model_open(rank, &options, 3, &m));
    if (m->fsdp.converts) {
        m->fsdp.landing_count = PIECE;
    }
    ND_TRY(load(m));
    ND_TRY(forward_only ? check_kept(m) : ND_OK);
    ND_TRY(mesh_load_batch(m, 1, &set));
    ND_TRY(nd_model_forward(m, set, ND_PASS_EVAL));
    *loss = m->numbers->loss_sum;
    *bytes = mesh_model_bytes(m);
    return ND_OK;
}

static nd_status body(nd_rank *rank, void *context)
{
    double losses[2];
    size_t bytes[2];
    for (int only = 0; only < 2; only++) {
        ND_TRY(loss_of(rank, only == 1, &losses[only], &bytes[only]));
    }
    ND_CHECK(losses[0] > 0 && memcmp(&losses[0], &losses[1], sizeof losses[0]) == 0,
             "the loss is %.17g, in training %.17g", losses[1], losses[0]);
    ND_CHECK(bytes[1] < bytes[0], "%zu bytes, in training %zu", bytes[1], bytes[0]);
    return ND_OK;
}

Test(forward_only, has_the_loss_of_the_training_model)
{
    static const struct {
        nd_mesh mesh;
        nd_precision precision;
        nd_fp8_recipe recipe;
        nd_recompute recompute;
        bool all_gather;
        const char *filter; /* NULL: all linears */
    } cases[] = {
        {{{1, 1, 1, 1, 1}}, ND_PRECISION_FP32, ND_FP8_TENSORWISE, ND_RECOMPUTE_NONE},
        {{{1, 1, 1, 1, 1}}, ND_PRECISION_BF16, ND_FP8_TENSORWISE, ND_RECOMPUTE_NONE},
        {{{1, 1, 2, 1, 2}}, ND_PRECISION_BF16, ND_FP8_TENSORWISE, ND_RECOMPUTE_SELECTIVE},
        {{{1, 2, 1, 1, 2}}, ND_PRECISION_BF16, ND_FP8_TENSORWISE, ND_RECOMPUTE_NONE},
        {{{1, 1, 3, 1, 1}}, ND_PRECISION_BF16, ND_FP8_TENSORWISE, ND_RECOMPUTE_NONE},
        {{{1, 1, 1, 1, 2}}, ND_PRECISION_FP8, ND_FP8_TENSORWISE, ND_RECOMPUTE_NONE},
        {{{1, 1, 1, 1, 1}}, ND_PRECISION_FP8, ND_FP8_TENSORWISE, ND_RECOMPUTE_FULL},
        {{{1, 1, 1, 1, 2}}, ND_PRECISION_FP8, ND_FP8_ROWWISE, ND_RECOMPUTE_NONE},
        /* Codes of weights from their F32 values; shards that end within a row, on blocks that
         * share buffers; several readers of one weight. */
        {{{1, 1, 1, 1, 2}}, ND_PRECISION_FP8, ND_FP8_TENSORWISE, ND_RECOMPUTE_NONE, true},
        {{{1, 1, 3, 1, 1}}, ND_PRECISION_FP8, ND_FP8_TENSORWISE, ND_RECOMPUTE_NONE, true},
        {{{1, 1, 3, 1, 1}}, ND_PRECISION_FP8, ND_FP8_TENSORWISE, ND_RECOMPUTE_NONE},
        {{{1, 1, 3, 1, 2}}, ND_PRECISION_FP8, ND_FP8_ROWWISE, ND_RECOMPUTE_NONE},
        {{{1, 2, 1, 1, 2}}, ND_PRECISION_FP8, ND_FP8_ROWWISE, ND_RECOMPUTE_NONE},
        {{{1, 2, 1, 1, 1}}, ND_PRECISION_FP8, ND_FP8_TENSORWISE, ND_RECOMPUTE_NONE, true},
        {{{1, 1, 1, 2, 1}}, ND_PRECISION_FP8, ND_FP8_ROWWISE_GW_HP, ND_RECOMPUTE_NONE},
        {{{1, 1, 2, 1, 2}},
         ND_PRECISION_FP8,
         ND_FP8_ROWWISE,
         .filter = "q_proj,o_proj,up_proj,down_proj"},
        {{{1, 2, 1, 1, 2}}, ND_PRECISION_FP8, ND_FP8_TENSORWISE, .filter = "k_proj,o_proj,up_proj"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mesh_ranks job = mesh_ranks_of(cases[i].mesh, LAYERS, i % 2 == 1, body, NULL);
        job.shape.rms_eps = 1e-5;
        job.config.train.precision = cases[i].precision;
        job.config.fp8.recipe = cases[i].recipe;
        job.config.parallel.recompute = cases[i].recompute;
        job.config.fp8.all_gather = cases[i].all_gather;
        job.config.fp8.filter = (char *)(cases[i].filter ? cases[i].filter : "*");
        expect_ranks(&job, "case %zu", i);
    }
}

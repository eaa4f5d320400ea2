// SPDX-License-Identifier: Apache-2.0
/*
 * The blocks of a rank may be computed range by range, as pipeline stages do: loss, gradients and
 * the gradient of the residual stream have the bits of one range of all blocks.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/unit/trainer/mesh_ranks.h"

enum { LAYERS = 3, T = 32 };

/* Blocks [0, cut), then [cut, LAYERS); an empty range comes first when cut is 0. */
static nd_status run_model(nd_model *m, int64_t cut)
{
    const nd_layer_range first = {0, cut}, rest = {cut, LAYERS};
    const nd_unit *head = nd_layout_unit(m->layout, ND_UNIT_HEAD, -1);
    nd_residual residual;
    nd_activation_set *set;
    ND_TRY(mesh_load_batch(m, 1, &set));
    m->numbers->tokens = T;
    nd_fsdp_begin_step(&m->fsdp, 0);
    ND_TRY(nd_scales_refresh(&m->scales, m->fsdp.master, m->fsdp.version));
    ND_TRY(nd_embed_forward(m, set, &residual));
    ND_TRY(nd_blocks_forward(m, set, first, ND_PASS_TRAIN,
                             nd_layout_unit(m->layout, ND_UNIT_BLOCK, cut), &residual));
    ND_TRY(nd_blocks_forward(m, set, rest, ND_PASS_TRAIN, head, &residual));
    ND_TRY(nd_head_forward(m, set, ND_PASS_TRAIN, residual));
    ND_TRY(nd_head_backward(m, set));
    ND_TRY(nd_blocks_backward(m, set, rest, nd_layout_unit(m->layout, ND_UNIT_BLOCK, cut - 1)));
    ND_TRY(nd_blocks_backward(m, set, first, NULL));
    ND_TRY(nd_embed_backward(m, set));
    ND_TRY(nd_fsdp_grad_finish(&m->fsdp));
    ND_TRY(nd_stream_sync(&m->rank->stream));
    return nd_model_give_back(m, set);
}

static nd_status expect_equal(const nd_model *whole, const nd_model *parts)
{
    const int64_t elements = whole->layout->shard_total;
    const nd_tensor dx = whole->work.dx; /* (Tl, C) behind the first block's backward */
    double sum = 0;
    for (int64_t i = 0; i < elements; i++) {
        sum += (double)whole->fsdp.grad[i] * (double)whole->fsdp.grad[i];
    }
    ND_CHECK(sum > 0, "the gradient is zero");
    ND_CHECK(memcmp(&parts->numbers->loss_sum, &whole->numbers->loss_sum, sizeof(double)) == 0,
             "the loss is %.17g, not %.17g", parts->numbers->loss_sum, whole->numbers->loss_sum);
    ND_CHECK(memcmp(parts->fsdp.grad, whole->fsdp.grad, (size_t)elements * sizeof(float)) == 0,
             "the gradients differ");
    ND_CHECK(memcmp(parts->work.dx.data, dx.data, nd_tensor_bytes(dx)) == 0,
             "the gradient of the residual stream differs");
    return ND_OK;
}

static nd_status body(nd_rank *rank, void *context)
{
    nd_model *models[LAYERS];
    for (int64_t cut = 0; cut < LAYERS; cut++) {
        ND_TRY(mesh_model_open(rank, NULL, 1, &models[cut]));
        ND_TRY(run_model(models[cut], cut));
        ND_TRY(cut > 0 ? expect_equal(models[0], models[cut]) : ND_OK);
    }
    return ND_OK;
}

Test(stages, ranges_of_blocks_give_the_bits_of_all_blocks)
{
    static const struct {
        nd_mesh mesh;
        nd_precision precision;
        nd_recompute recompute;
    } cases[] = {
        {{{1, 1, 1, 1, 1}}, ND_PRECISION_FP32, ND_RECOMPUTE_NONE},
        {{{1, 1, 2, 1, 2}}, ND_PRECISION_BF16, ND_RECOMPUTE_FULL},
        {{{1, 1, 2, 1, 1}}, ND_PRECISION_FP8, ND_RECOMPUTE_SELECTIVE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mesh_ranks job = mesh_ranks_of(cases[i].mesh, LAYERS, i == 1, body, NULL);
        job.shape.rms_eps = 1e-5;
        job.config.train.precision = cases[i].precision;
        job.config.parallel.recompute = cases[i].recompute;
        expect_ranks(&job, "case %zu", i);
    }
}

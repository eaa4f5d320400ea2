// SPDX-License-Identifier: Apache-2.0
/*
 * The blocks of a rank may be computed range by range, as pipeline stages do: loss, gradients and
 * the gradient of the residual stream have the bits of one range of all blocks.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/mesh_ranks.h"
#include "trainer/model/model.h"

enum { LAYERS = 3, T = 32 };

typedef struct results {
    double loss;
    nd_tensor dx; /* (Tl, C) behind the first block's backward; data is owned */
    float *grad;  /* (elements) of this rank's shards; owned */
    int64_t elements;
} results;

static void results_fini(results *r)
{
    free(r->dx.data);
    free(r->grad);
}

/* Blocks [0, cut), then [cut, LAYERS); an empty range comes first when cut is 0. */
static nd_status run_model(nd_model *m, int64_t cut)
{
    const nd_layer_range first = {0, cut}, rest = {cut, LAYERS};
    const nd_unit *head = nd_layout_unit(m->layout, ND_UNIT_HEAD, -1);
    int32_t ids[T], labels[T], positions[T];
    nd_residual residual;
    nd_activation_set *set = nd_model_take_set(m);
    for (int i = 0; i < T; i++) {
        ids[i] = (i * 7 + 3) % 97;
        labels[i] = (i * 13 + 5) % 97;
        positions[i] = i;
    }
    ND_TRY(nd_model_load_batch(m, set, ids, labels, positions));
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

static nd_status compute(nd_rank *rank, int64_t cut, results *out)
{
    nd_memplan plan;
    nd_model *m = NULL;
    ND_TRY(mesh_model_open(rank, 1, &plan, &m));
    nd_status status = run_model(m, cut);
    out->loss = m->numbers->loss_sum;
    out->elements = m->layout->shard_total;
    out->dx = m->work.dx;
    out->dx.data = malloc(nd_tensor_bytes(m->work.dx));
    out->grad = malloc((size_t)out->elements * sizeof *out->grad);
    if (out->dx.data && out->grad) {
        memcpy(out->dx.data, m->work.dx.data, nd_tensor_bytes(m->work.dx));
        memcpy(out->grad, m->fsdp.grad, (size_t)out->elements * sizeof *out->grad);
    } else {
        status = nd_fail_memory("results");
    }
    mesh_model_close(&plan, m);
    return status;
}

static nd_status expect_equal(const results *whole, const results *parts)
{
    size_t bytes = (size_t)whole->elements * sizeof *whole->grad;
    double sum = 0;
    for (int64_t i = 0; i < whole->elements; i++) {
        sum += (double)whole->grad[i] * (double)whole->grad[i];
    }
    ND_CHECK(sum > 0, "the gradient is zero");
    ND_CHECK(memcmp(&parts->loss, &whole->loss, sizeof whole->loss) == 0,
             "the loss is %.17g, not %.17g", parts->loss, whole->loss);
    ND_CHECK(memcmp(parts->grad, whole->grad, bytes) == 0, "the gradients differ");
    ND_CHECK(memcmp(parts->dx.data, whole->dx.data, nd_tensor_bytes(whole->dx)) == 0,
             "the gradient of the residual stream differs");
    return ND_OK;
}

static nd_status body(nd_rank *rank, void *context)
{
    results whole = {0};
    nd_status status = compute(rank, 0, &whole);
    for (int64_t cut = 1; cut < LAYERS && status == ND_OK; cut++) {
        results parts = {0};
        status = compute(rank, cut, &parts);
        status = status == ND_OK ? expect_equal(&whole, &parts) : status;
        results_fini(&parts);
    }
    results_fini(&whole);
    return status;
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
        mesh_ranks job = {.mesh = cases[i].mesh,
                          .shape = mesh_shape_of(LAYERS, i == 1),
                          .config = mesh_config_of(),
                          .body = body};
        job.shape.rms_eps = 1e-5;
        job.config.train.precision = cases[i].precision;
        job.config.parallel.recompute = cases[i].recompute;
        cr_expect_eq(mesh_ranks_run(&job), ND_OK, "case %zu: %s", i, nd_error_last()->message);
    }
}

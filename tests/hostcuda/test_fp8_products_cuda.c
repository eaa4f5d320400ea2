// SPDX-License-Identifier: Apache-2.0
/*
 * The products that a recipe's steps ask of cuBLASLt: one per converted linear and micro-batch for
 * its output, with fast accumulation, and one each for its input's and its weight's gradient,
 * without. This is torchao's (GEMM configs of its recipes) and Transformer Engine's (split
 * accumulators in dgrad and wgrad) choice.
 */
#include <criterion/criterion.h>

#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/mesh_cuda.h"
#include "trainer/step/step.h"

enum { RANKS = 4, STEPS = 2, LAYERS = 2, LINEARS = 7 * LAYERS - 1 /* all but the first q */ };

static nd_double_counts at_start[RANKS], at_end[RANKS];

static nd_status before(void *context, nd_trainer *t, int64_t step)
{
    if (step == 0) {
        at_start[t->rank->rank] = nd_double_counts_get();
    }
    return ND_OK;
}

static nd_status after(void *context, nd_trainer *t, int64_t step)
{
    nd_double_drain();
    at_end[t->rank->rank] = nd_double_counts_get();
    return ND_OK;
}

/* The kinds of the three products, or -1: not in FP8. */
typedef struct recipe_case {
    const char *name;
    nd_fp8_recipe recipe;
    int output, input_gradient, weight_gradient;
} recipe_case;

static const recipe_case recipes[] = {
    {"tensorwise", ND_FP8_TENSORWISE, ND_DOUBLE_FAST, ND_DOUBLE_B_E5M2,
     ND_DOUBLE_B_E5M2 | ND_DOUBLE_D_F32},
    {"delayed", ND_FP8_DELAYED, ND_DOUBLE_FAST, ND_DOUBLE_B_E5M2,
     ND_DOUBLE_B_E5M2 | ND_DOUBLE_D_F32},
    {"rowwise", ND_FP8_ROWWISE, ND_DOUBLE_FAST, 0, ND_DOUBLE_D_F32},
    /* A vector of scales and a single one: the product of the codes in F32, then our kernel. */
    {"rowwise_with_gw_hp", ND_FP8_ROWWISE_GW_HP, ND_DOUBLE_FAST, ND_DOUBLE_D_F32, -1},
};

static const mesh_case meshes[] = {
    {"one GPU", 1, 1, 1, 1, 1},
    {"fsdp 2 x tp 2", 1, 2, 1, 2, 1},
};

static void expect_kinds(const recipe_case *r, const mesh_case *mesh, int rank, long each)
{
    long want[ND_DOUBLE_FP8_KINDS] = {0};
    want[r->output] += each;
    want[r->input_gradient] += each;
    if (r->weight_gradient >= 0) {
        want[r->weight_gradient] += each;
    }
    for (int kind = 0; kind < ND_DOUBLE_FP8_KINDS; kind++) {
        bool adds = kind & ND_DOUBLE_ADDS, fast = kind & ND_DOUBLE_FAST;
        int added = kind | ND_DOUBLE_ADDS;
        long got = at_end[rank].fp8_products[kind] - at_start[rank].fp8_products[kind];
        long gotten = at_end[rank].fp8_products[added] - at_start[rank].fp8_products[added];
        cr_expect(!fast || !adds || got == 0, "%s: an output is added to something", r->name);
        cr_expect(adds || got + gotten == want[kind],
                  "%s, %s, rank %d: %ld products %s x %s to %s, %s accumulation; expected %ld",
                  r->name, mesh->name, rank, got + gotten,
                  kind & ND_DOUBLE_B_E5M2 ? "e5m2" : "e4m3",
                  kind & ND_DOUBLE_A_E5M2 ? "e5m2" : "e4m3",
                  kind & ND_DOUBLE_D_F32 ? "f32" : "bf16", fast ? "fast" : "full", want[kind]);
    }
}

static void run_case(const recipe_case *r, const mesh_case *mesh)
{
    tempdir dir;
    tempdir_make(&dir);
    mesh_job job = mesh_cuda_job(&dir, ND_PRECISION_FP8);
    int dp = mesh->dp_replicate * mesh->dp_shard, ranks = dp * mesh->cp * mesh->tp;
    job.shape.layers = LAYERS;
    job.steps = STEPS;
    job.recipe = r->recipe;
    job.history_length = 4;
    job.before_step = before;
    job.after_step = after;
    mesh_use_gpus(true, false);
    mesh_trained(&job, mesh);
    for (int rank = 0; rank < ranks; rank++) {
        expect_kinds(r, mesh, rank,
                     STEPS * LINEARS * (job.global_batch / (dp * mesh->micro_batch)));
    }
    tempdir_remove(&dir);
}

Test(fp8_products_cuda, only_outputs_accumulate_fast, .timeout = 600)
{
    for (size_t r = 0; r < sizeof recipes / sizeof *recipes; r++) {
        for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
            run_case(&recipes[r], &meshes[i]);
        }
    }
}

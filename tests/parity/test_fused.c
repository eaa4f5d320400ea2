// SPDX-License-Identifier: Apache-2.0
/*
 * Fused ops change no bit. While the health log counts, operands are made first, then measured and
 * cast, each by an op of its own; without it norms and SwiGLU do so on the way out.
 */
#include <criterion/criterion.h>
#include <math.h>

#include "tests/parity/mesh_data.h"
#include "tests/support/ranks.h"
#include "trainer/step/step.h"

enum { SEQUENCE = 64, BATCH = 8, STEPS = 3, VOCAB = 97 };

#define COUNT(list) (sizeof(list) / sizeof(list)[0])

static tempdir dir;

TEMPDIR_SUITE(fused, tempdir_leave_empty, .timeout = 300);

static mesh_job job_of(nd_fp8_recipe recipe)
{
    mesh_job job = mesh_sized_job(&dir, STEPS * BATCH * (SEQUENCE + 1), mesh_small_llama(VOCAB),
                                  ND_PRECISION_FP8, BATCH, SEQUENCE, STEPS);
    job.recipe = recipe;
    job.history_length = 4;
    return job;
}

static void fused_and_apart(nd_fp8_recipe recipe, const char *filter)
{
    static const mesh_case meshes[] = {
        {"one worker", 1, 1, 1, 1, 1},
        {"one worker, recompute full", 1, 1, 1, 1, 2, .recompute = ND_RECOMPUTE_FULL},
        {"tp 2, recompute selective", 1, 1, 1, 2, 1, .recompute = ND_RECOMPUTE_SELECTIVE},
        {"fsdp 2 x tp 2, recompute full", 1, 2, 1, 2, 1, .recompute = ND_RECOMPUTE_FULL},
    };
    for (size_t i = 0; i < 2 * COUNT(meshes); i++) { /* also with norms behind the branches */
        const mesh_case *mesh = &meshes[i / 2];
        mesh_job job = job_of(recipe);
        job.filter = filter;
        job.all_gather = i / 2 % 2 == 1;
        job.shape.post_norm = i % 2 == 0 ? 0 : 1 + job.all_gather;
        job.shape.family = job.shape.post_norm == 2 ? ND_FAMILY_GEMMA3_TEXT : ND_FAMILY_LLAMA;
        mesh_result fused = mesh_trained(&job, mesh);
        job.health_interval = 1;
        mesh_result apart = mesh_trained(&job, mesh);
        mesh_expect_same(&fused, &apart, MESH_LOSSES | MESH_GRADIENTS | MESH_WEIGHTS, mesh->name);
    }
}

/* The default filter leaves the first q in BF16: its group's input is needed both ways. */
Test(fused, tensorwise)
{
    fused_and_apart(ND_FP8_TENSORWISE, NULL);
}

Test(fused, delayed)
{
    fused_and_apart(ND_FP8_DELAYED, NULL);
}

/* SwiGLU's backward: one of its two results is cast, the other stored. */
Test(fused, delayed_with_gate_in_bf16)
{
    fused_and_apart(ND_FP8_DELAYED, "q_proj,k_proj,v_proj,up_proj,down_proj");
}

/* Checks each weight's amax from the optimizer: it is of this rank's part, and of this version. */
static nd_status check_amaxes(void *context, nd_trainer *t, int64_t step)
{
    const nd_model *m = t->model;
    const nd_scales *s = &m->scales;
    int *checked = context;
    ND_CHECK(s->updated && s->updated_version == m->fsdp.version, "step %ld: amaxes of version %ld",
             (long)step, (long)s->updated_version);
    for (int64_t i = 0; i < s->layers * ND_LINEAR_COUNT; i++) {
        float most = 0.0f;
        const nd_flat_range part = nd_scales_part(s, i);
        for (int64_t e = part.begin; e < part.end; e++) {
            most = fmaxf(most, fabsf(m->fsdp.master[e]));
        }
        ND_CHECK(s->updated[i] == most, "step %ld, weight %ld: amax %.9g, not %.9g", (long)step,
                 (long)i, (double)s->updated[i], (double)most);
        *checked += t->rank->rank == 0 && most > 0.0f;
    }
    return ND_OK;
}

Test(fused, the_optimizer_measures_weights)
{
    static const mesh_case meshes[] = {{"one worker", 1, 1, 1, 1, 1},
                                       {"fsdp 2 x tp 2, zero 2", 1, 2, 1, 2, 1, .zero2 = true}};
    for (size_t i = 0; i < COUNT(meshes) * 4; i++) {
        int checked = 0;
        mesh_job job = job_of(i & 1 ? ND_FP8_DELAYED : ND_FP8_TENSORWISE);
        job.optimizer = i & 2 ? ND_OPTIMIZER_SGD : ND_OPTIMIZER_ADAMW;
        job.filter = "*";
        job.after_step = check_amaxes;
        job.context = &checked;
        mesh_trained(&job, &meshes[i / 4]);
        cr_assert_gt(checked, 0, "%s", meshes[i / 4].name);
    }
}

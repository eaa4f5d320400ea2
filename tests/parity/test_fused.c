// SPDX-License-Identifier: Apache-2.0
/*
 * What is fused changes no bit. While the health log counts, operands are made first, then measured
 * and cast, each by an op of its own; without it norms and SwiGLU do so on the way out. And what
 * the optimizer leaves of the updated weights in BF16 is what a cast of them gives.
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

static mesh_job job_of(nd_precision precision)
{
    mesh_job job = mesh_sized_job(&dir, STEPS * BATCH * (SEQUENCE + 1), mesh_small_llama(VOCAB),
                                  precision, BATCH, SEQUENCE, STEPS);
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
    for (size_t i = 0; i < COUNT(meshes); i++) {
        mesh_job job = job_of(ND_PRECISION_FP8);
        job.recipe = recipe;
        job.filter = filter;
        job.all_gather = i % 2 == 1;
        mesh_result fused = mesh_trained(&job, &meshes[i]);
        job.health_interval = 1;
        mesh_result apart = mesh_trained(&job, &meshes[i]);
        mesh_expect_same(&fused, &apart, MESH_LOSSES | MESH_GRADIENTS | MESH_WEIGHTS,
                         meshes[i].name);
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

/* Copies of updated weights: every unit that is gathered next holds the master weights, rounded. */
static nd_status check_weights(void *context, nd_trainer *t, int64_t step)
{
    nd_fsdp *f = &t->model->fsdp;
    const nd_layout *layout = f->layout;
    int *resident = context;
    for (int u = 0; u < layout->unit_count; u++) {
        const nd_segment *hp = &layout->units[u].segments[ND_SEGMENT_HP];
        ND_TRY(nd_fsdp_acquire(f, &layout->units[u]));
        const nd_bf16 *all = nd_fsdp_slot_holding(f, &layout->units[u])->data[ND_SEGMENT_HP];
        const nd_bf16 *own = all + hp->shard_count * layout->shard_index;
        for (int64_t i = 0; i < hp->shard_count; i++) {
            nd_bf16 want = nd_bf16_from_f32(f->master[hp->shard_offset + i]);
            ND_CHECK(own[i] == want, "step %ld, unit %d, element %ld: %04x, not %04x", (long)step,
                     u, (long)i, own[i], want);
        }
        nd_fsdp_release(f, &layout->units[u]);
        if (t->rank->rank == 0 && step == 0) {
            *resident += nd_fsdp_resident(f, hp->shard_offset) != NULL;
        }
    }
    return ND_OK;
}

/* Where there are more blocks than buffers, blocks are cast when they are gathered; embedding and
 * head are not. */
Test(fused, the_optimizer_writes_resident_weights)
{
    static const struct {
        mesh_case mesh;
        int resident; /* units with a copy: of the blocks, embedding, norm and head */
        int layers;
    } cases[] = {
        {{"one worker", 1, 1, 1, 1, 1}, 4, 2},
        {{"ddp 2", 2, 1, 1, 1, 1}, 4, 2},
        {{"fsdp 2, zero 2", 1, 2, 1, 1, 1, .zero2 = true}, 4, 2},
        {{"fsdp 2", 1, 2, 1, 1, 1}, 2, 4},
        {{"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1}, 4, 2}, /* two blocks have a buffer each anyway */
    };
    for (size_t i = 0; i < COUNT(cases) * 2; i++) {
        const mesh_case *mesh = &cases[i / 2].mesh;
        int resident = 0;
        mesh_job job = job_of(ND_PRECISION_BF16);
        job.shape.layers = cases[i / 2].layers;
        job.optimizer = i % 2 ? ND_OPTIMIZER_SGD : ND_OPTIMIZER_ADAMW;
        job.after_step = check_weights;
        job.context = &resident;
        mesh_trained(&job, mesh);
        cr_assert_eq(resident, cases[i / 2].resident, "%s: %d units", mesh->name, resident);
    }
}

/* What the optimizer left of each weight's amax is that of this rank's part, of this version. */
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
        mesh_job job = job_of(ND_PRECISION_FP8);
        job.recipe = i & 1 ? ND_FP8_DELAYED : ND_FP8_TENSORWISE;
        job.optimizer = i & 2 ? ND_OPTIMIZER_SGD : ND_OPTIMIZER_ADAMW;
        job.filter = "*";
        job.after_step = check_amaxes;
        job.context = &checked;
        mesh_trained(&job, &meshes[i / 4]);
        cr_assert_gt(checked, 0, "%s", meshes[i / 4].name);
    }
}

// SPDX-License-Identifier: Apache-2.0
/*
 * FP8 on meshes against one worker, after updates. Steps differ: sums in another order fall to the
 * other side of a rounding to 3 bits now and then. The losses of 20 steps stay within 5e-3.
 */
#include <criterion/criterion.h>

#include "tests/parity/fp8_job.h"

enum { STEPS = 20 };

static tempdir dir;

TEMPDIR_SUITE(fp8_mesh, tempdir_leave_empty, .timeout = 600);

static void losses_stay_near(const mesh_job *job, const mesh_case *meshes, size_t count)
{
    mesh_expect_all_near(job, &mesh_one, meshes, count, (mesh_bounds){.loss = 5e-3});
}

static const mesh_case meshes_of_all_kinds[] = {
    {"ddp 2", 2, 1, 1, 1, 1},
    {"fsdp 4", 1, 4, 1, 1, 2},
    {"fsdp 2, zero-2", 1, 2, 1, 1, 1, .zero2 = true},
    {"hsdp 2 x 2", 2, 2, 1, 1, 1},
    {"tp 2", 1, 1, 1, 2, 1},
    {"tp 4", 1, 1, 1, 4, 1},
    {"tp 8, 4 KV heads", 1, 1, 1, 8, 1},
    {"cp 2", 1, 1, 2, 1, 1},
    {"cp 2, ring", 1, 1, 2, 1, 1, .ring = true},
    {"cp 2 x tp 2, ulysses", 1, 1, 2, 2, 1, .ulysses = 2},
    {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
    {"fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 1},
};

#define ON_ALL_MESHES(name, recipe, all_gather)                                                    \
    Test(fp8_mesh, name)                                                                           \
    {                                                                                              \
        const mesh_job job = fp8_mesh_job(&dir, STEPS, false, recipe, all_gather);                 \
        losses_stay_near(&job, meshes_of_all_kinds,                                                \
                         sizeof meshes_of_all_kinds / sizeof *meshes_of_all_kinds);                \
    }
ON_ALL_MESHES(tensorwise, ND_FP8_TENSORWISE, true)
ON_ALL_MESHES(tensorwise_gathered_in_bf16, ND_FP8_TENSORWISE, false)
ON_ALL_MESHES(rowwise, ND_FP8_ROWWISE, false)
ON_ALL_MESHES(rowwise_with_gw_hp, ND_FP8_ROWWISE_GW_HP, false)
ON_ALL_MESHES(delayed, ND_FP8_DELAYED, true)
ON_ALL_MESHES(delayed_gathered_in_bf16, ND_FP8_DELAYED, false)

/* Groups in which some linears stay in BF16: their input travels and is kept in BF16 and is cast
 * after its gather. */
Test(fp8_mesh, groups_of_both_kinds)
{
    static const mesh_case meshes[] = {
        {"fsdp 2 x tp 2", 1, 2, 1, 2, 1},
        {"fsdp 2 x tp 2, selective", 1, 2, 1, 2, 1, .recompute = ND_RECOMPUTE_SELECTIVE},
    };
    for (int all_gather = 0; all_gather < 2; all_gather++) {
        mesh_job job = fp8_mesh_job(&dir, STEPS, false, ND_FP8_TENSORWISE, all_gather);
        job.filter = "k_proj,up_proj,layers.1.mlp.down_proj,layers.0.self_attn.o_proj";
        losses_stay_near(&job, meshes, sizeof meshes / sizeof *meshes);
    }
}

/* Casting again in backward uses the scales of the forward pass, and delayed amaxes are not taken
 * twice. */
Test(fp8_mesh, recompute_gives_the_same_bits)
{
    static const mesh_case base[] = {{"one", 1, 1, 1, 1, 1},
                                     {"fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 1}};
    for (int recipe = ND_FP8_TENSORWISE; recipe < (int)ND_FP8_RECIPE_COUNT; recipe++) {
        mesh_job job =
            fp8_mesh_job(&dir, STEPS, false, (nd_fp8_recipe)recipe, recipe == ND_FP8_TENSORWISE);
        job.steps = 3;
        for (size_t i = 0; i < sizeof base / sizeof *base; i++) {
            mesh_expect_same_recomputed(&job, base[i]);
        }
    }
}

/*
 * Gathering codes or BF16: the scale of a weight is that of its F32 or of its BF16 values, and so
 * are the codes. While the master weights are BF16 values, as a model loaded from a BF16 file has
 * them, both are the same bits: loss and every gradient of the first step. There are more blocks
 * than the two buffers that they share.
 */
Test(fp8_mesh, all_gather_of_codes_changes_nothing_for_bf16_weights)
{
    static const mesh_case meshes[] = {
        {"one", 1, 1, 1, 1, 1}, {"fsdp 2 x tp 2", 1, 2, 1, 2, 1}, {"fsdp 4", 1, 4, 1, 1, 1}};
    static const nd_fp8_recipe recipes[] = {ND_FP8_TENSORWISE, ND_FP8_DELAYED};
    for (size_t i = 0; i < 6; i++) {
        mesh_job job = fp8_mesh_job(&dir, STEPS, false, recipes[i % 2], true);
        job.steps = 1;
        job.shape.layers = 5;
        job.bf16_weights = true;
        mesh_result on = mesh_trained(&job, &meshes[i / 2]);
        job.all_gather = false;
        mesh_result off = mesh_trained(&job, &meshes[i / 2]);
        mesh_expect_same(&on, &off, MESH_LOSSES | MESH_GRADIENTS, meshes[i / 2].name);
    }
}

// SPDX-License-Identifier: Apache-2.0
/*
 * An MLP in pieces of tokens changes no bit: losses, gradients and weights are those of an MLP in
 * one piece, on every mesh, whatever recompute keeps. The tokens of a rank are more than one block
 * of a product's sum (at most 1,024), and no multiple of it. Without AVX-512 oneDNN's F32 products
 * of fewer rows may round differently (docs/config.md): each product is then off by about sqrt(k) x
 * 6e-8 for its k <= 2,592 terms, 3e-6, of which ten times are allowed.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/parity/mesh_data.h"

enum { SEQUENCE = 2592, VOCAB = 97, STEPS = 1, BATCH = 2 };

static tempdir dir;

TEMPDIR_SUITE(tiled_mlp, tempdir_leave_empty, .timeout = 600);

static mesh_job job_of(nd_precision precision)
{
    mesh_job job = mesh_sized_job(&dir, STEPS * BATCH * (SEQUENCE + 1), mesh_small_llama(VOCAB),
                                  precision, BATCH, SEQUENCE, STEPS);
    job.shape.ffn = 192;
    job.shape.max_positions = SEQUENCE;
    job.recipe = ND_FP8_ROWWISE_GW_HP;
    return job;
}

static void compare(const mesh_job *job, mesh_case mesh, nd_recompute least)
{
    mesh.mlp_pieces = 1;
    mesh_result whole = mesh_trained(job, &mesh);
    for (nd_recompute mode = least; mode <= ND_RECOMPUTE_FULL; mode++) {
        mesh.recompute = mode;
        mesh.mlp_pieces = mode == ND_RECOMPUTE_SELECTIVE ? 2 : -1;
        mesh_result got = mesh_trained(job, &mesh);
        if (job->precision == ND_PRECISION_FP32 && !mesh_own_products()) {
            mesh_expect_near(&got, &whole, (mesh_bounds){3e-5, 3e-5, 3e-5, 3e-5}, mesh.name);
        } else {
            mesh_expect_same(&got, &whole, MESH_LOSSES | MESH_GRADIENTS | MESH_WEIGHTS, mesh.name);
        }
        cr_assert_lt(got.activation_bytes, whole.activation_bytes, "%s: memory", mesh.name);
    }
}

static const mesh_case meshes[] = {
    {"one worker", 1, 1, 1, 1, 1},
    {"fsdp 2", 1, 2, 1, 1, 1},
    {"tp 2", 1, 1, 1, 2, 1},
    {"cp 2", 1, 1, 2, 1, 1},
    {"cp 2 x tp 2", 1, 1, 2, 2, 1, .ring = true},
};

static void on_every_mesh(nd_precision precision)
{
    const mesh_job job = job_of(precision);
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        compare(&job, meshes[i], i == 0 ? ND_RECOMPUTE_NONE : ND_RECOMPUTE_FULL);
    }
}

Test(tiled_mlp, fp32)
{
    on_every_mesh(ND_PRECISION_FP32);
}

Test(tiled_mlp, bf16)
{
    on_every_mesh(ND_PRECISION_BF16);
}

Test(tiled_mlp, fp8_with_weight_gradients_in_bf16)
{
    on_every_mesh(ND_PRECISION_FP8);
}

Test(tiled_mlp, biases_and_norms_behind)
{
    mesh_job job = job_of(ND_PRECISION_BF16);
    job.shape.mlp_bias = job.shape.post_norm = 1;
    compare(&job, meshes[2], ND_RECOMPUTE_NONE);
}

Test(tiled_mlp, scales_of_all_tokens_are_refused)
{
    mesh_job job = job_of(ND_PRECISION_FP8);
    mesh_case mesh = meshes[0];
    mesh.mlp_pieces = 2;
    job.recipe = ND_FP8_TENSORWISE;
    mesh_expect_failure(&job, &mesh, ND_ERR_CONFIG);
    cr_assert_not_null(strstr(nd_error_last()->message, "parallel.tiled_mlp is 2, but fp8.recipe "
                                                        "tensorwise"),
                       "%s", nd_error_last()->message);
}

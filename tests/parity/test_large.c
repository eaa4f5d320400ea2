// SPDX-License-Identifier: Apache-2.0
/*
 * One model with parts above every block that the program handles at a time: more layers than
 * buffers of blocks, several chunks of the head on every rank, tensors of several pieces, more
 * tokens than a block of rows, more keys than a block of keys. Meshes against one worker.
 *
 * A gradient is a sum over at most 2,304 tokens in an order that depends on the mesh: relative
 * error about sqrt(2304) x 6e-8 = 2.9e-6 in the L2 norm.
 */
#include <criterion/criterion.h>

#include "tests/parity/mesh_data.h"

enum { VOCAB = 40009, SEQUENCE = 576, BATCH = 4, LAYERS = 5 };

static tempdir dir;

TEMPDIR_SUITE(large, tempdir_leave_empty, .timeout = 600);

static mesh_job job_of(nd_precision precision)
{
    mesh_job job = mesh_sized_job(&dir, BATCH * (SEQUENCE + 1), mesh_small_llama(VOCAB), precision,
                                  BATCH, SEQUENCE, 1);
    job.shape.hidden = 32;
    job.shape.ffn = 2072;
    job.shape.layers = LAYERS;
    job.shape.heads = 4;
    job.shape.kv_heads = 2;
    job.shape.head_dim = 8;
    job.shape.max_positions = SEQUENCE;
    job.optimizer = ND_OPTIMIZER_SGD;
    job.max_grad_norm = 0.0;
    job.weight_decay = 0.0;
    return job;
}

Test(large, meshes_agree_above_every_block)
{
    static const mesh_case one = {"one worker", 1, 1, 1, 1, 1, .zero2 = true};
    static const mesh_case meshes[] = {
        {"fsdp 2, micro-batch 2", 1, 2, 1, 1, 2},
        {"tp 2, micro-batch 4", 1, 1, 1, 2, 4},
        {"hsdp 2 x 2", 2, 2, 1, 1, 1},
        {"fsdp 2 x tp 2, micro-batch 2", 1, 2, 1, 2, 2, .recompute = ND_RECOMPUTE_FULL},
        {"cp 2 x tp 2, ring, micro-batch 4", 1, 1, 2, 2, 4, .ring = true},
    };
    const mesh_job job = job_of(ND_PRECISION_FP32);
    mesh_expect_all_near(&job, &one, meshes, sizeof meshes / sizeof *meshes,
                         (mesh_bounds){1e-6, 1e-5, 1e-5, 1e-6});
}

/*
 * Weights that BF16 holds exactly have the same codes before and after their gather, so the bits of
 * a step do not depend on what is gathered. The model has more blocks than the two slots for codes.
 */
Test(large, codes_are_gathered_above_every_block)
{
    enum { FFN = 2064 }; /* FP8 takes linears whose sizes are multiples of 16 */
    static const mesh_case fsdp = {"fsdp 2", 1, 2, 1, 1, 2};
    mesh_job job = job_of(ND_PRECISION_FP8);
    job.shape.ffn = FFN;
    job.recipe = ND_FP8_TENSORWISE;
    job.bf16_weights = true;
    job.all_gather = true;
    mesh_result codes = mesh_trained(&job, &fsdp);
    job.all_gather = false;
    mesh_result bf16 = mesh_trained(&job, &fsdp);
    mesh_expect_same(&codes, &bf16, MESH_LOSSES | MESH_GRADIENTS, fsdp.name);
}

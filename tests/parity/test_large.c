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

static mesh_job job_of(void)
{
    mesh_job job = mesh_sized_job(&dir, BATCH * (SEQUENCE + 1), mesh_small_llama(VOCAB),
                                  ND_PRECISION_FP32, BATCH, SEQUENCE, 1);
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
    const mesh_job job = job_of();
    mesh_expect_all_near(&job, &one, meshes, sizeof meshes / sizeof *meshes,
                         (mesh_bounds){1e-6, 1e-5, 1e-5, 1e-6});
}

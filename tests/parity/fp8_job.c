// SPDX-License-Identifier: Apache-2.0
#include "tests/parity/fp8_job.h"

enum { TOKENS = 8192 };

nd_shape fp8_shape(void)
{
    nd_shape shape = mesh_small_llama(FP8_VOCAB);
    shape.layers = FP8_LAYERS;
    return shape;
}

mesh_job fp8_job(tempdir *dir, nd_fp8_recipe recipe, bool all_gather)
{
    mesh_job job = mesh_sized_job(dir, TOKENS, fp8_shape(), ND_PRECISION_FP8, 4, FP8_SEQUENCE, 1);
    job.recipe = recipe;
    job.all_gather = all_gather;
    job.history_length = 4;
    return job;
}

mesh_job fp8_mesh_job(tempdir *dir, int64_t steps, bool same, nd_fp8_recipe recipe, bool all_gather)
{
    enum { GLOBAL_BATCH = 8, VOCAB = 97, BLOCK = FP8_SEQUENCE + 1 };
    const char *path = mesh_token_file(dir, "tokens.bin", (int)steps * GLOBAL_BATCH * BLOCK, VOCAB,
                                       same ? BLOCK : 0);
    mesh_job job = mesh_job_on_tokens(path, mesh_small_llama(VOCAB), ND_PRECISION_FP8);
    job.global_batch = GLOBAL_BATCH;
    job.sequence = FP8_SEQUENCE;
    job.steps = steps;
    job.recipe = recipe;
    job.all_gather = all_gather;
    job.history_length = 16;
    return job;
}

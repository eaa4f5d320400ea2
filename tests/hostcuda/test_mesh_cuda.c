// SPDX-License-Identifier: Apache-2.0
/*
 * The whole trainer with device cuda over the doubles: one worker and meshes, against one worker on
 * the CPU.
 *
 * Bounds. F32: as in tests/parity/test_mesh.c, gradients within 1e-5 in relative L2 and losses
 * within 1e-5. BF16: a loss is a mean over 128 tokens of terms whose logits err by a few
 * BF16 roundings (2^-8) of numbers of size about 1, in part at random: 2^-8 of it covers this. FP8:
 * E4M3 rounds both factors of a product by at most 2^-4, in the root mean square 2^-4 / sqrt(3), so
 * a result errs by 0.05 of its size and the logits behind 5 blocks by 0.05 sqrt(5) of theirs, at
 * random; the mean over 128 tokens by 0.01 of it, and a logit is below 1. Where sums differ in
 * their last bits, other values are rounded up, so two runs are apart by up to sqrt(2) of that,
 * 0.014. 2^-7 of a loss of 4.7 is 0.037, 2.6 times as much. A wrong scale, a lost wait or a missing
 * term is far above.
 */
#include <criterion/criterion.h>

#include "tests/hostcuda/cuda_ranks.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/doubles/nccl_double.h"
#include "tests/hostcuda/mesh_cuda.h"
#include "trainer/step/step.h"

static tempdir dir;

TEMPDIR_SUITE(mesh_cuda, tempdir_leave_empty, .timeout = 600);
static const mesh_case one = {"one worker", 1, 1, 1, 1, 1, .zero2 = true};

static nd_status expect_shared_buffers(void *context, nd_trainer *trainer, int64_t step)
{
    cr_expect(trainer->model->fsdp.blocks_share, "every block keeps its weights");
    return ND_OK;
}

static void compare(nd_precision precision, const mesh_case *meshes, int count, int order,
                    bool cast_units)
{
    const mesh_bounds most = {.loss = precision == ND_PRECISION_FP32   ? 1e-5
                                      : precision == ND_PRECISION_BF16 ? 1.0 / 256.0
                                                                       : 1.0 / 128.0,
                              .gradient = precision == ND_PRECISION_FP32 ? 1e-5 : 0};
    mesh_job job = mesh_cuda_job(&dir, precision);
    job.shape.layers = 5; /* more than two, so that blocks share the buffers of gathered weights */
    mesh_use_gpus(false, false);
    mesh_result want = mesh_trained(&job, &one);
    mesh_use_gpus(true, cast_units);
    job.before_step = cast_units ? expect_shared_buffers : NULL;
    nd_double_machine_get()->order = order;
    for (int i = 0; i < count; i++) {
        mesh_result got = mesh_trained(&job, &meshes[i]);
        mesh_expect_near(&got, &want, most, meshes[i].name);
    }
}

static const mesh_case meshes[] = {
    {"one GPU", 1, 1, 1, 1, 1},
    {"one GPU, full recompute, micro-batch 2", 1, 1, 1, 1, 2, .recompute = ND_RECOMPUTE_FULL},
    {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
    {"fsdp 2 x cp 2", 1, 2, 2, 1, 1},
    {"fsdp 2 x cp 2, ring", 1, 2, 2, 1, 1, .ring = true},
    {"cp 4, ulysses 2 of allgather, micro-batch 2", 1, 1, 4, 1, 2, .ulysses = 2},
    {"fsdp 2 x cp 2, all but attention", 1, 2, 2, 1, 1,
     .recompute = ND_RECOMPUTE_ALL_BUT_ATTENTION},
};

enum { MESHES = sizeof meshes / sizeof *meshes };

Test(mesh_cuda, f32)
{
    compare(ND_PRECISION_FP32, meshes, MESHES, ND_DOUBLE_LAZY, false);
}

Test(mesh_cuda, bf16)
{
    compare(ND_PRECISION_BF16, meshes, MESHES, ND_DOUBLE_LAZY, false);
}

Test(mesh_cuda, fp8)
{
    compare(ND_PRECISION_FP8, meshes, MESHES, ND_DOUBLE_LAZY, false);
}

/* Sums over pieces of tokens are rounded in another order on a GPU. */
Test(mesh_cuda, mlp_in_pieces)
{
    static const mesh_case pieces[] = {
        {"one GPU, MLP in pieces, micro-batch 2", 1, 1, 1, 1, 2, .mlp_pieces = 3},
        {"fsdp 2 x tp 2, MLP in pieces", 1, 2, 1, 2, 2, .mlp_pieces = 2},
    };
    compare(ND_PRECISION_FP32, pieces, 2, ND_DOUBLE_RANDOM, false);
    compare(ND_PRECISION_BF16, pieces, 2, ND_DOUBLE_LAZY, false);
}

/* The other streams run as early as they can: what they read must be there, what they write must be
 * free. */
Test(mesh_cuda, f32_with_eager_streams)
{
    compare(ND_PRECISION_FP32, meshes + 2, MESHES - 2, ND_DOUBLE_OTHERS, false);
    compare(ND_PRECISION_FP32, meshes + 2, 1, ND_DOUBLE_EAGER, false);
}

/* In an order that is drawn, each mesh another. */
Test(mesh_cuda, f32_with_drawn_streams)
{
    for (int m = 2; m < MESHES; m++) {
        nd_double_machine_get()->seed = (uint64_t)m;
        compare(ND_PRECISION_FP32, meshes + m, 1, ND_DOUBLE_RANDOM, false);
    }
}

/* Units are cast one at a time where weights in the compute dtype do not fit beside the state. */
Test(mesh_cuda, units_cast_one_at_a_time)
{
    compare(ND_PRECISION_BF16, meshes, 2, ND_DOUBLE_OTHERS, true);
    compare(ND_PRECISION_FP8, meshes, 2, ND_DOUBLE_LAZY, true);
}

/* launch.nccl_alone: groups of one member over NCCL give the same bits, also between CUDA graphs,
 * whose number is planned before. */
Test(mesh_cuda, groups_of_one_member_over_nccl)
{
    mesh_job job = mesh_cuda_job(&dir, ND_PRECISION_BF16);
    const mesh_case *const runs[] = {&meshes[0], &meshes[1], &meshes[3]};
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        mesh_use_gpus(true, false);
        job.nccl_alone = job.cuda_graphs = false;
        mesh_result want = mesh_trained(&job, runs[i]);
        job.nccl_alone = job.cuda_graphs = true;
        cuda_rank_alone(true);
        int64_t before = nd_double_nccl_groups();
        mesh_result got = mesh_trained(&job, runs[i]);
        cr_expect_gt(nd_double_nccl_groups(), before, "%s: no gather over NCCL", runs[i]->name);
        mesh_expect_same(&got, &want, MESH_LOSSES | MESH_NORMS, runs[i]->name);
    }
}

// SPDX-License-Identifier: Apache-2.0
/* Other lists of actions than the sequential one give a step the same bits. */
#include <criterion/criterion.h>

#include "tests/parity/fp8_job.h"
#include "tests/parity/schedules.h"
#include "tests/support/ranks.h"

static tempdir dir;

TEMPDIR_SUITE(schedules, tempdir_leave_empty, .timeout = 300);

typedef nd_status make_schedule(int micros, nd_schedule *out);

static const nd_fp8_recipe recipes[] = {ND_FP8_TENSORWISE, ND_FP8_ROWWISE, ND_FP8_ROWWISE_GW_HP,
                                        ND_FP8_DELAYED};
enum { RECIPES = sizeof recipes / sizeof *recipes };

/* Two steps in BF16 and with the first recipes. A mesh's micro-batches are those that the global
 * batch of eight leaves each rank. Returns how many more all-gathers over shards there are. */
static int64_t expect_same_bits(make_schedule *schedule, const mesh_case *mesh, int recipe_count)
{
    int64_t more = 0;
    for (int i = -1; i < recipe_count; i++) {
        mesh_job job = fp8_job(&dir, recipes[i < 0 ? 0 : i], false);
        job.precision = i < 0 ? ND_PRECISION_BF16 : job.precision;
        job.shape.layers = 3;
        job.shape.qkv_bias = job.shape.o_bias = job.shape.mlp_bias = job.shape.qk_norm = i % 2 != 0;
        job.shape.post_norm = i % 3 == 2 ? 1 : i % 3 == 1 ? 2 : 0;
        job.shape.family = job.shape.post_norm == 2 ? ND_FAMILY_GEMMA3_TEXT : ND_FAMILY_LLAMA;
        job.global_batch = 8;
        job.steps = 2;
        mesh_result expected = mesh_trained(&job, mesh);
        job.schedule = schedule;
        mesh_result found = mesh_trained(&job, mesh);
        mesh_expect_same(&found, &expected, MESH_ALL, mesh->name);
        more += found.calls[ND_GROUP_DP_SHARD_CP][ND_COMM_ALL_GATHER] -
                expected.calls[ND_GROUP_DP_SHARD_CP][ND_COMM_ALL_GATHER];
    }
    return more;
}

static const mesh_case meshes[] = {
    {"one", 1, 1, 1, 1, 1, .recompute = ND_RECOMPUTE_NONE},
    {"fsdp 2 x tp 2", 1, 2, 1, 2, 1, .recompute = ND_RECOMPUTE_FULL},
    {"fsdp 2, ZeRO-2", 1, 2, 1, 1, 1, .zero2 = true, .recompute = ND_RECOMPUTE_SELECTIVE},
    {"cp 2", 1, 1, 2, 1, 1, .recompute = ND_RECOMPUTE_ALL_BUT_ATTENTION},
    {"ddp 2", 2, 1, 1, 1, 1},
    {"hsdp 2 x 2", 2, 2, 1, 1, 1},
};
enum { MESHES = sizeof meshes / sizeof *meshes };

Test(schedules, weights_gathered_for_each_pass_change_no_bit)
{
    for (int m = 0; m < MESHES; m++) {
        const int64_t more = expect_same_bits(schedule_resharding, &meshes[m], 1);
        cr_expect(more > 0 || meshes[m].dp_shard == 1, "%s: %lld more gathers", meshes[m].name,
                  (long long)more);
    }
}

Test(schedules, delayed_weight_gradients_change_no_bit)
{
    for (int m = 0; m < MESHES; m++) {
        expect_same_bits(schedule_split, &meshes[m], RECIPES);
    }
}

/* In BF16; FP8 has the scales of one micro-batch. */
Test(schedules, micro_batches_that_overlap_change_no_bit)
{
    for (int m = 0; m < MESHES; m++) {
        expect_same_bits(schedule_overlapping, &meshes[m], 0);
    }
}

Test(schedules, fp8_has_one_micro_batch_in_flight)
{
    mesh_job job = fp8_job(&dir, ND_FP8_TENSORWISE, false);
    job.global_batch = 2;
    job.schedule = schedule_overlapping;
    mesh_expect_failure(&job, &meshes[0], ND_ERR_INTERNAL);
}

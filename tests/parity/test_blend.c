// SPDX-License-Identifier: Apache-2.0
/*
 * Losses by source: on every mesh those of one worker, whose micro-batches have one sample and so
 * one source each. The two sources have other vocabularies, so that their losses differ. Bounds as
 * in test_mesh.c.
 */
#include <criterion/criterion.h>
#include <math.h>

#include "tests/parity/mesh_data.h"
#include "tests/support/tempdir.h"

enum { STEPS = 4, VOCAB = 97, BATCH = 8, SEQUENCE = 32 };

static tempdir dir;

TEMPDIR_SUITE(blend, tempdir_leave_empty, .timeout = 300);

static mesh_job job_of(void)
{
    static char paths[2][PATH_MAX];
    mesh_job job = {.shape = mesh_small_llama(VOCAB),
                    .data_path = paths[0],
                    .second_path = paths[1],
                    .format = ND_DATA_LLMC,
                    .tokenizer = "file",
                    .global_batch = BATCH,
                    .sequence = SEQUENCE,
                    .steps = STEPS,
                    .optimizer = ND_OPTIMIZER_SGD,
                    .precision = ND_PRECISION_FP32,
                    .lr = 0.2};
    snprintf(paths[0], PATH_MAX, "%s",
             mesh_token_file(&dir, "a.bin", 60 * (SEQUENCE + 1), VOCAB, 0));
    snprintf(paths[1], PATH_MAX, "%s", mesh_token_file(&dir, "b.bin", 30 * (SEQUENCE + 1), 5, 0));
    return job;
}

static void compare(const mesh_job *job, const mesh_result *expected, const mesh_case *mesh)
{
    mesh_result got = mesh_trained(job, mesh);
    for (int s = 0; s < STEPS; s++) {
        const double *sums = got.source_sums[s], *wanted = expected->source_sums[s];
        const double tokens = sums[2] + sums[3];
        cr_assert_eq(sums[2], wanted[2], "%s", mesh->name);
        cr_assert_eq(sums[3], wanted[3], "%s", mesh->name);
        cr_assert(sums[2] > 0 && sums[3] > 0 && tokens == BATCH * SEQUENCE);
        cr_assert_lt(fabs((sums[0] + sums[1]) / tokens / got.loss[s] - 1), 1e-12, "%s", mesh->name);
        for (int j = 0; j < 2; j++) {
            cr_assert_lt(fabs(sums[j] / wanted[j] - 1), 1e-6,
                         "%s: source %d of step %d has %.9g, not %.9g", mesh->name, j, s + 1,
                         sums[j], wanted[j]);
        }
    }
}

Test(blend, losses_of_sources_are_those_of_one_worker)
{
    static const mesh_case meshes[] = {
        {"micro-batch 4", 1, 1, 1, 1, 4},
        {"fsdp 2, micro-batch 2", 1, 2, 1, 1, 2},
        {"hsdp 2 x 2 x tp 2, micro-batch 2", 2, 2, 1, 2, 2},
        {"cp 2 ring x tp 2, micro-batch 4", 1, 1, 2, 2, 4, .ring = true},
    };
    mesh_job job = job_of();
    mesh_result expected = mesh_trained(&job, &mesh_one);
    cr_assert_gt(fabs(expected.source_sums[STEPS - 1][0] / expected.source_sums[STEPS - 1][2] -
                      expected.source_sums[STEPS - 1][1] / expected.source_sums[STEPS - 1][3]),
                 0.01);
    compare(&job, &expected, &mesh_one);
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        compare(&job, &expected, &meshes[i]);
    }
    job.limits.head_rows = 8; /* the labels of a rank are in several chunks of the head */
    compare(&job, &expected, &meshes[2]);
    job.limits.head_rows = 0;
    /* Telling the losses apart changes nothing else. */
    job.one_loss = true;
    mesh_result plain = mesh_trained(&job, &meshes[0]);
    job.one_loss = false;
    expected = mesh_trained(&job, &meshes[0]);
    mesh_expect_same(&plain, &expected, MESH_LOSSES | MESH_NORMS, "one loss");
}

// SPDX-License-Identifier: Apache-2.0
/* A step of device cuda costs the host one wait, no allocation and no copy of pageable memory. */
#include <criterion/criterion.h>
#include <signal.h>

#include "runtime/device/cuda.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/mesh_cuda.h"
#include "trainer/step/step.h"

enum { RANKS = 8 };

static tempdir dir;

TEMPDIR_SUITE(step_cuda, tempdir_leave_empty, .timeout = 600);

/* One for each rank, whose thread writes it. */
typedef struct step_record {
    nd_double_counts before;
    long waits[MESH_CUDA_STEPS];
} step_record;

static step_record records[RANKS];

static nd_status before(void *context, nd_trainer *t, int64_t step)
{
    nd_double_hot(true);
    records[t->rank->rank].before = nd_double_counts_get();
    return ND_OK;
}

static nd_status after(void *context, nd_trainer *t, int64_t step)
{
    step_record *r = &records[t->rank->rank];
    nd_double_hot(false);
    r->waits[step] = nd_double_counts_get().host_waits - r->before.host_waits;
    return ND_OK;
}

static void expect_one_wait(const mesh_case *mesh, nd_precision precision, int order)
{
    mesh_job job = mesh_cuda_job(&dir, precision);
    job.before_step = before;
    job.after_step = after;
    mesh_use_gpus(true, false);
    nd_double_machine_get()->order = order;
    mesh_trained(&job, mesh);
    int ranks = mesh->dp_replicate * mesh->dp_shard * mesh->cp * mesh->tp;
    for (int i = 0; i < ranks * MESH_CUDA_STEPS; i++) {
        int rank = i / MESH_CUDA_STEPS, step = i % MESH_CUDA_STEPS;
        cr_expect_eq(records[rank].waits[step], 1, "%s: step %d of rank %d waited %ld times",
                     mesh->name, step + 1, rank, records[rank].waits[step]);
    }
}

static const mesh_case steps_of[] = {
    {"one GPU, micro-batch 1", 1, 1, 1, 1, 1},
    {"one GPU, micro-batch 2", 1, 1, 1, 1, 2, .recompute = ND_RECOMPUTE_FULL},
    {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
    {"fsdp 2 x cp 2, ring", 1, 2, 2, 1, 1, .ring = true},
    {"fsdp 2 x cp 2, ulysses", 1, 2, 2, 1, 1, .ulysses = 2},
};

/* In BF16 and FP8, with a scale that is measured at once and with delayed ones. */
Test(step_cuda, the_host_waits_once_and_nothing_is_allocated)
{
    for (size_t i = 0; i < sizeof steps_of / sizeof *steps_of; i++) {
        expect_one_wait(&steps_of[i], ND_PRECISION_BF16, ND_DOUBLE_LAZY);
    }
    expect_one_wait(&steps_of[2], ND_PRECISION_FP8, ND_DOUBLE_OTHERS);
}

/* That the double would have noticed. */
Test(step_cuda, a_copy_from_pageable_memory_is_refused, .signal = SIGABRT)
{
    nd_device *device = NULL;
    nd_stream stream;
    void *memory = NULL;
    int value = 1;
    nd_cuda_options options = {.local_workers = 1};
    cr_assert_eq(nd_device_open_cuda(&options, &device), ND_OK);
    cr_assert_eq(device->table->stream_init(device, &stream), ND_OK);
    cr_assert_eq(nd_device_alloc(device, sizeof value, &memory), ND_OK);
    cr_assert_eq(nd_copy(&stream, memory, &value, sizeof value), ND_OK);
    nd_double_hot(true);
    (void)nd_copy(&stream, memory, &value, sizeof value);
}

static nd_status signal_one_rank(void *context, nd_trainer *t, int64_t step)
{
    if (step == 1 && t->rank->rank == 1) {
        nd_trainer_request_stop(t, SIGTERM);
    }
    return ND_OK;
}

static int64_t stops[RANKS][MESH_CUDA_STEPS];

static nd_status keep_stop(void *context, nd_trainer *t, int64_t step)
{
    stops[t->rank->rank][step] = t->received->stop;
    return ND_OK;
}

Test(step_cuda, a_signal_to_one_rank_reaches_all_in_that_step)
{
    mesh_job job = mesh_cuda_job(&dir, ND_PRECISION_BF16);
    job.before_step = signal_one_rank;
    job.after_step = keep_stop;
    mesh_use_gpus(true, false);
    mesh_trained(&job, &steps_of[3]);
    for (int rank = 0; rank < 4; rank++) {
        cr_expect_eq(stops[rank][0], 0);
        cr_expect_eq(stops[rank][1], SIGTERM);
    }
}

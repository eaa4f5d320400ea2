// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_NCCL_JOB_H
#define ND_TESTS_HOSTCUDA_NCCL_JOB_H
/* A function on some ranks, each with a device, its groups and some memory, over the doubles. */
#include "tests/support/ranks.h"

enum { N = 24 };

typedef struct job {
    nd_transport *transport;
    nd_device *device;
    nd_stream stream;
    nd_mesh mesh;
    nd_groups groups;
    float *memory; /* 64 N, on the device */
    float *host;   /* 64 N, pinned */
} job;

typedef nd_status job_body(job *j);

/* To run as threads or processes; one job at a time. */
nd_ranks nccl_job_ranks(job_body *body, nd_mesh mesh, double timeout_seconds);
/* Runs them as threads; some may fail. */
nd_ranks nccl_job_run(job_body *body, nd_mesh mesh, double timeout_seconds);

/* Arguments of an operation on N floats, a sum where it reduces. */
#define FLOATS(from, to)                                                                           \
    (&(nd_comm_args){.send = (from), .recv = (to), .count = N, .dtype = ND_DTYPE_F32})

/* Enqueues a sum of the first N of all members' memory into each one's. */
nd_status sum_over(job *j, nd_group_kind kind);

#endif

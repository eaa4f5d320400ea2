// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TUNE_BENCH_H
#define ND_TUNE_BENCH_H
/* Calls of ops on the rank's GPU, on memory of their own: for their time, and so that each form of
 * product meets autotune. Before the run's memory is planned. */
#include "trainer/rank.h"
#include "trainer/dry/calls.h"

typedef struct nd_bench {
    nd_rank *rank; /* borrowed */
    char *memory;
    size_t bytes;
    char *patterns; /* host: operands' values */
} nd_bench;

/* Memory for any one of these calls. */
nd_status nd_bench_open(nd_bench *bench, nd_rank *rank, const nd_calls *calls);
/* Enqueues the call once. */
nd_status nd_bench_run(nd_bench *bench, const nd_call *call);
/* The median of a few. */
nd_status nd_bench_time(nd_bench *bench, const nd_call *call, double *seconds);
void nd_bench_close(nd_bench *bench); /* all zero is legal */

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_HISTOGRAMS_H
#define ND_RUN_HISTOGRAMS_H
/*
 * Histograms of every tensor's weights and gradients, each log.histogram_interval steps
 * (docs/formats.md). Each rank counts its shards on the host; one all-reduce for each tensor adds
 * the counts up over the ranks that share a copy of the model. What all ranks of tp hold alike is
 * counted by the first of them.
 *
 * Nothing is allocated after init. Steps without histograms cost nothing. On a GPU a step with them
 * waits until the shards have been copied to the host, 4 MiB at a time.
 */
#include "trainer/report/report.h"
#include "trainer/step/step.h"

typedef struct nd_run_histograms {
    nd_trainer *trainer; /* borrowed; NULL: none are made */
    int64_t interval;
    float *landing;  /* a GPU: pinned host memory */
} nd_run_histograms; /* all zero: none */

/* After the trainer's commit, on every rank. */
nd_status nd_run_histograms_init(nd_run_histograms *h, nd_trainer *trainer);
/* After each step, on every rank: collective when histograms are due. They go to the sinks of rank
 * 0; other ranks have none. */
nd_status nd_run_histograms_step(nd_run_histograms *h, nd_sinks *sinks);
void nd_run_histograms_fini(nd_run_histograms *h);

#endif

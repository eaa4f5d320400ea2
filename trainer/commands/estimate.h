// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMMANDS_ESTIMATE_H
#define ND_COMMANDS_ESTIMATE_H
/*
 * How long a step would take: the ops of a dry run, each kind at a rate that is printed with the
 * result. For device cuda there is an estimate for each kind of GPU in gpu_rates.h, since any
 * machine can plan any job; for device cpu one for CPUs like those here.
 */
#include <stdio.h>

#include "trainer/step/step.h"

enum { ND_ESTIMATES_MAX = 2 };

typedef struct nd_estimate {
    const char *machine;                              /* "H100", "CPU" */
    double products, attention, others, update, wire; /* seconds of a step of one worker */
    double shortest, longest; /* seconds: communication hidden behind the rest, or not at all */
    double tokens;            /* of a step, of all workers */
} nd_estimate;

/* Runs a step of the trainer's rank without computing it. *count is at most ND_ESTIMATES_MAX. */
nd_status nd_estimate_steps(const nd_trainer *trainer, nd_estimate list[ND_ESTIMATES_MAX],
                            int *count);
/* The seconds and tokens of a step in a few words, for all estimates: "H100 0.4 to 0.5 s, ...". */
void nd_estimates_print(FILE *out, const nd_estimate *list, int count);
/* The same with the parts of the step, the work and what is assumed. */
nd_status nd_estimates_explain(FILE *out, const nd_trainer *trainer);

#endif

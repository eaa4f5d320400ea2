// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMMANDS_PLAN_H
#define ND_COMMANDS_PLAN_H
/*
 * `ndtrain plan`: plan.c plans the trainer of one rank without allocating anything, and prints the
 * plan; explain.c says how long a step of it would take, and plans other settings too.
 */
#include "trainer/commands/command.h"

/* Whose plan is made. */
typedef struct nd_planner {
    const nd_config *config;
    const nd_inputs *inputs;
    nd_worker *worker; /* has the planner's device */
    int rank;
} nd_planner;

/* Plans the rank's trainer with another configuration than the planner's own, or with that one. The
 * worker's rank borrows `config`. */
nd_status nd_plan_make(const nd_planner *planner, const nd_config *config, const nd_tuning *tuning,
                       nd_trainer **out);
/* The same for a configuration that has been changed. ND_ERR_CONFIG: a run with it would be refused
 * before it plans anything. */
nd_status nd_plan_make_changed(const nd_planner *planner, nd_config *config, nd_trainer **out);
double nd_plan_bytes(const nd_trainer *trainer);

/*
 * How long a step would take: the ops of a dry run, each kind at a rate that is printed with the
 * result. For device cuda there is an estimate for each kind of GPU in gpu_rates.h, since any
 * machine can plan any job; for device cpu one for CPUs like those here.
 */
enum { ND_ESTIMATE_TEXT_MAX = 256 };
/* "H100 0.4 to 0.5 s, 800 to 1000 tokens/s; ...": for the first kind alone, or for all. */
nd_status nd_estimate_format(const nd_trainer *trainer, bool all, char out[ND_ESTIMATE_TEXT_MAX]);

/* Prints why a buffer is as large as it is, where a step's time goes, and what other settings would
 * need. */
nd_status nd_plan_explain(const nd_planner *planner);

#endif

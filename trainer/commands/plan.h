// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMMANDS_PLAN_H
#define ND_COMMANDS_PLAN_H
/*
 * `ndtrain plan`: mesh, the rule of each group, one rank's groups, parameters, the memory plan of a
 * rank, and an estimated step time, without starting anything. The same code plans a run, so the
 * plan is what a run allocates.
 */
#include <stdio.h>

#include "trainer/run/inputs.h"
#include "trainer/worker/worker.h"

/*
 * The plans of this host's workers together against its memory: ND_ERR_RESOURCE with the numbers
 * when there is not that much, a warning when it is not free now. The worker has the planner's
 * device.
 */
nd_status nd_plan_check_memory(const nd_config *config, const nd_inputs *inputs, nd_worker *worker);

/* rank: whose groups and plan are shown. */
nd_status nd_plan_print(FILE *out, const nd_config *config, const nd_inputs *inputs,
                        nd_worker *worker, int rank);

#endif

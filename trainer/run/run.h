// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_RUN_H
#define ND_RUN_RUN_H
/* The run of one worker: inputs, weights, the loop over steps, validation, the saved model. */
#include "trainer/worker/worker.h"
#include "trainer/run/inputs.h"

typedef struct nd_run_context {
    nd_worker *worker; /* joined */
    nd_inputs *inputs; /* open */
    int argc;          /* the command line, for run.json */
    char **argv;
} nd_run_context;

nd_status nd_train(const nd_run_context *run);

/* Asks the run to end at the next step boundary, alike on all ranks (ND_ERR_PREEMPTED).
 * Async-signal-safe. */
void nd_train_request_stop(int signal_number);

#endif

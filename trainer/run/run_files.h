// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_RUN_FILES_H
#define ND_RUN_RUN_FILES_H
/* The run folder of rank 0: run.json, metrics.jsonl, trace.json, the echo on the terminal. */
#include "trainer/report/metrics.h"
#include "trainer/run/run.h"
#include "trainer/step/trainer.h"

typedef struct nd_run_files {
    char *dir;           /* NULL except on rank 0 */
    nd_metrics *metrics; /* NULL except on rank 0 */
} nd_run_files;

nd_status nd_run_files_open(nd_run_files *files, const nd_run_context *run,
                            const nd_trainer *trainer);
/* Where the time of `steps` steps from first_step (counted from 1) on went, validation included:
 * <dir>/trace.json. */
nd_status nd_run_files_trace(const nd_run_files *files, const nd_trace *trace, int64_t first_step,
                             int64_t steps);
void nd_run_files_close(nd_run_files *files);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_CHECKPOINTS_PARTS_H
#define ND_RUN_CHECKPOINTS_PARTS_H
/*
 * Parts of checkpoints.h, for the files that make it up. All ranks call these functions, in the
 * same order.
 */
#include "trainer/checkpoint/restore.h"
#include "trainer/run/checkpoints.h"

/* Rank 0's value and its status go to the other ranks, through the job's store. The key is one for
 * each call, alike on all ranks; NULL and 0: no value. All ranks return rank 0's status: rank 0
 * with the error that its thread has, the others with "rank 0 <fault>". */
nd_status nd_run_tell_all(const nd_worker *worker, const char *key, nd_status status,
                          const char *fault, void *value, size_t bytes);

/* A save has ended, if it has: it is logged and recorded. ND_ERR_CANTCREATE: it failed, and
 * checkpoint.on_error is stop; ND_ERR_IO: its state was wrong, for the third time in a row. */
nd_status nd_run_checkpoints_report(nd_run_checkpoints *c, const nd_save_report *report);

/*
 * With the run folder open on rank 0, of which `opened` is the status there: its path and the name
 * of this start, and, when the run saves
 * checkpoints, each rank's look at the folder. Rank 0 writes a mark of this start into RUN/.lock. A
 * rank that does not read it there has the folder of another disk under that path, or none: its
 * part of each checkpoint would be lost.
 *
 * ND_ERR_CANTCREATE: some rank does not see the folder; that one names itself and its host.
 */
nd_status nd_run_folder_share(nd_run_checkpoints *c, nd_status opened);

/* Rank 0: a damaged checkpoint of the run becomes checkpoint-N.bad, and that is said. */
nd_status nd_run_set_damaged_aside(const char *run, int64_t step);

/* What earlier starts of the run have found about its validations. A run that early stopping had
 * ended is over again, unless it may wait for longer now. */
nd_status nd_run_best_find(nd_run_checkpoints *c);
/* The run went back to the state of its good checkpoint: of its validations those up to this state
 * count, and no later one. */
nd_status nd_run_best_rewound(nd_run_checkpoints *c);

#endif

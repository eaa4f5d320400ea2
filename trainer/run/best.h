// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_BEST_H
#define ND_RUN_BEST_H
/*
 * Which validation loss of a run was the lowest, which checkpoint has that state
 * (checkpoint.load_best), and whether the loss has stopped falling (train.early_stopping_patience).
 * Every rank has the same losses, so every rank comes to the same answers.
 *
 * Pure bookkeeping: it loads, saves and deletes nothing.
 */
#include "runtime/config/config.h"

typedef struct nd_run_best {
    int64_t step; /* the lowest loss is that after this step; 0: there was no finite one */
    double loss;
    int64_t stale;      /* validations since the last one that was lower by the threshold */
    int64_t saved_step; /* the lowest one of a state that has a checkpoint; 0: none */
    double saved_loss;
    int64_t newest_step; /* the last finite one; 0: none */
    double newest_loss;
    int64_t pending_step; /* of the last checkpoint that was begun; 0: none */
    double pending_loss;
    bool pending_validated, pending_durable; /* in either order */
} nd_run_best;                               /* all zero: nothing yet */

/* Losses of two rules do not compare: the length of blocks with separate documents, 0 for joined
 * ones. */
int64_t nd_run_best_rule(const nd_config *config);
/* A validation after `step`. The checkpoint of that state may be the best one from now on. */
void nd_run_best_validated(nd_run_best *best, const nd_config *config, int64_t step, double loss);
/* A checkpoint of the state after `step` is begun; the one before has ended. */
void nd_run_best_saving(nd_run_best *best, int64_t step);
/* The checkpoint of `step` is durable. True: it is the best one from now on. */
bool nd_run_best_saved(nd_run_best *best, int64_t step);
/* Early stopping is asked for, and its patience has come to an end. */
bool nd_run_best_is_over(const nd_run_best *best, const nd_config *config);
/*
 * What an earlier start of the run, which has gone on after `step`, knew: from metrics.jsonl and
 * the checkpoints of its folder, without losses of another rule, of which it logs how many there
 * are. ND_ERR_DATA, ND_ERR_IO: these cannot be read.
 */
nd_status nd_run_best_replay(nd_run_best *best, const nd_config *config, const char *run,
                             int64_t step);
/* What this start knew before it went back to `step`, joined to what was replayed: the best
 * checkpoint up to that step stays, also where a full disk has lost the line of its validation. */
void nd_run_best_keep(nd_run_best *best, const nd_run_best *known, int64_t step);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_CHECKPOINTS_H
#define ND_RUN_CHECKPOINTS_H
/*
 * The checkpoints of one run: what it goes on from, when it saves, and what it says about both.
 * All functions are called by every rank, in the same order.
 */
#include "trainer/checkpoint/restore.h"
#include "trainer/checkpoint/saver.h"
#include "trainer/run/resume.h"
#include "trainer/run/run_folder.h"

/*
 * Which validation loss of a run was the lowest, which checkpoint has that state
 * (checkpoint.load_best), and whether the loss has stopped falling (train.early_stopping_patience).
 * Every rank has the same losses, so every rank comes to the same answers.
 */
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

typedef struct nd_run_checkpoints {
    const nd_run_context *context;
    nd_trainer *trainer;
    nd_run_files *files;
    nd_resume resume;                   /* alike on all ranks */
    char run_id[64];                    /* of this start of the job, alike on all ranks */
    nd_saver *saver;                    /* NULL without checkpoint.interval */
    nd_manifest_pairs identity, config; /* rank 0 */
    int64_t held_step;                  /* whose state a checkpoint has, or will have */
    int64_t good_step;                  /* of the newest good checkpoint; 0: none */
    char run[ND_RESUME_PATH_MAX];       /* the run folder, absolute */
    char good[ND_RESUME_PATH_MAX];      /* the newest good checkpoint, absolute; "": none */
    int rewinds;                        /* of this start */
    bool failed;                        /* the newest save failed */
    int wrong;                          /* saves in a row that were wrong, on this rank */
    nd_run_best best;                   /* alike on all ranks */
    bool over;                          /* early stopping: the step done is the last one */
} nd_run_checkpoints;

/* Before the run folder is opened: finds the source on rank 0 and tells all. It changes nothing. */
nd_status nd_run_checkpoints_find(nd_run_checkpoints *c, const nd_run_context *context);
/*
 * With the run folder open and locked on rank 0, or with its error and status `opened`, which all
 * ranks return: looks for the newest checkpoint of a run that goes on again,
 * and sets damaged ones aside.
 * Weights, moments and position of the trainer: those of the source, or fresh ones. ND_ERR_DATA: a
 * checkpoint that was named is damaged, or all of them are.
 */
nd_status nd_run_checkpoints_load(nd_run_checkpoints *c, nd_trainer *trainer, nd_run_files *files,
                                  nd_status opened);
/* Before the first step. */
nd_status nd_run_checkpoints_start(nd_run_checkpoints *c);
/* Whether the run goes on in its folder after a step whose validation is not recorded there: the
 * start before ended in it. Alike on all ranks. */
nd_status nd_run_checkpoints_owes_validation(const nd_run_checkpoints *c, bool *out);
/* After each step: goes on with the save in flight and begins one that is due. ND_ERR_CANTCREATE
 * when a save failed and checkpoint.on_error is stop. */
nd_status nd_run_checkpoints_step(nd_run_checkpoints *c, const nd_step_result *result);
/* Between the batches of a validation: goes on with the save in flight. `flag`: the largest
 * nd_trainer_reported_save of all ranks. Errors as above. */
nd_status nd_run_checkpoints_advance(nd_run_checkpoints *c, int64_t flag);
/* After a validation of the step done, behind nd_run_checkpoints_step: the run may be over. */
nd_status nd_run_checkpoints_validated(nd_run_checkpoints *c, double loss);
/*
 * After the last step: waits until the save in flight is durable. A run that was stopped, or is
 * over early, saves its state first.
 * ND_ERR_CANTCREATE when a run that was stopped could not save.
 */
nd_status nd_run_checkpoints_finish(nd_run_checkpoints *c, bool stopped);
/* With checkpoint.load_best, before the model is saved: the weights of the checkpoint with the
 * lowest validation loss. The trainer's position stays. A damaged one is set aside, and the best of
 * the others is taken; ND_ERR_DATA when none of these was validated. */
nd_status nd_run_checkpoints_load_best(nd_run_checkpoints *c);
/* State and position of the newest good checkpoint, `good`; one that is damaged by now is set aside
 * as in nd_run_checkpoints_load. */
nd_status nd_run_checkpoints_load_good(nd_run_checkpoints *c);
/*
 * After a step that was not finite (nd_trainer_step's error, which is the thread's last): back to
 * the newest good checkpoint, as above. The samples of the steps since then are passed over.
 * ND_ERR_NUMERIC with that error's sentence when there is no checkpoint, or after ten rewinds.
 */
nd_status nd_run_checkpoints_rewind(nd_run_checkpoints *c);
/* False: a thread of the saver still runs, and uses what the run and its worker have. */
bool nd_run_checkpoints_close(nd_run_checkpoints *c);

/* Where log.dump_tensors asks for it: makes RUN/dumps, or RUN/dumps-2, ... where earlier starts
 * have left theirs, and gives the trainer its dump. ND_ERR_CANTCREATE. */
nd_status nd_run_dumps_open(const nd_run_checkpoints *c, nd_trainer *trainer);

/* The best validation: pure bookkeeping, which loads, saves and deletes nothing. */

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

/* For the files that make these functions up. */

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

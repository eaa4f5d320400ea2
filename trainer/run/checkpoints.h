// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_CHECKPOINTS_H
#define ND_RUN_CHECKPOINTS_H
/*
 * The checkpoints of one run: what it goes on from, when it saves, and what it says about both.
 * All functions are called by every rank, in the same order.
 */
#include "trainer/checkpoint/saver.h"
#include "trainer/run/best.h"
#include "trainer/run/resume.h"
#include "trainer/run/run_folder.h"

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

#endif

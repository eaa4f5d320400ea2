// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_STATE_H
#define ND_RUN_STATE_H
/*
 * The state of a run from its start to its end. run.c opens the stages of a run in the order of a
 * table, and closes them in the reverse order. Every rank calls the functions of a run, in the same
 * order, except where their comment says that rank 0 does.
 *
 * run.json says what a run was (docs/formats.md has its keys). It is written once, before step 1,
 * and is whole or absent. A run that is resumed in its folder leaves run-2.json, run-3.json, ...,
 * and appends to metrics.jsonl.
 */
#include <jansson.h>

#include "trainer/checkpoint/saver.h"
#include "trainer/report/report.h"
#include "trainer/run/run.h"
#include "trainer/tune/tune.h"

enum { ND_RUN_PATH_MAX = 4096, ND_PROFILE_EVENTS = 100000 };

/* From where a run goes on (checkpoint.resume), and in which folder. Rank 0 looks for it and tells
 * the others, so that all ranks load the same state whatever happens in the folder meanwhile. After
 * a save it is what that has saved. */
typedef struct nd_resume {
    int32_t found;                /* a checkpoint; else the run starts afresh */
    int32_t continues;            /* the run folder holds this run already */
    int32_t searched;             /* the user named no checkpoint: an older one will do */
    int64_t step;                 /* of the checkpoint; -1: there is none */
    char run[ND_RUN_PATH_MAX];    /* absolute; "": a fresh run folder */
    char source[ND_RUN_PATH_MAX]; /* folder; "": none */
} nd_resume;

/*
 * The lowest validation loss of a run, the checkpoint that has its state
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
    double pending_loss;  /* not a number: its state is not validated yet */
    bool pending_durable;
} nd_run_best; /* all zero: nothing yet */

/* Facts about the run folder, which the ranks learn from rank 0. */
typedef struct nd_run_place {
    char path[ND_RUN_PATH_MAX]; /* absolute */
    char id[64];                /* of this start of the job */
    char record[32];            /* the run.json of this start, where the ranks look for it */
    char digest[ND_HASH_HEX_MAX];
} nd_run_place;

typedef struct nd_run {
    nd_worker *worker; /* joined */
    nd_inputs *inputs; /* open */
    int argc;          /* the command line, for run.json */
    char *const *argv;
    const nd_config *config; /* of the worker's rank, as is `rank` */
    nd_rank *rank;
    nd_status status; /* when it ends */

    nd_tuning *tuning; /* NULL without autotune */
    nd_trainer *trainer;
    nd_run_samples *samples; /* NULL: none */

    /* The run folder. */
    char *dir;                    /* NULL except on rank 0 */
    bool continues;               /* the folder held this run before */
    char record[ND_RUN_PATH_MAX]; /* the run.json that this start has made; "": none */
    bool made;                    /* this start has made the folder */
    nd_run_lock lock;             /* rank 0: of the folder */
    uint64_t checkpoint_bytes;    /* rank 0: about what one takes, its model included */
    nd_sinks sinks;               /* none except on rank 0 */
    nd_run_place place;

    /* The data. */
    nd_loader *loader, *validation_loader;
    nd_source_loss *sources; /* (source_count) of the training data; owned */
    int source_count;        /* 0: one source */
    nd_source_loss *sets;    /* (set_count) of the validation; owned */
    int set_count;           /* 0: no validation */

    /* Checkpoints. */
    nd_resume resume;            /* the newest good one; alike on all ranks */
    nd_saver *saver;             /* NULL without checkpoint.interval */
    json_t *identity, *settings; /* of the manifest; owned; NULL except on rank 0 */
    int64_t held_step;           /* whose state a checkpoint has, or will have */
    int rewinds;                 /* of this start */
    bool save_failed;            /* the newest save failed */
    int wrong_saves;             /* in a row, on this rank */
    nd_run_best best;            /* alike on all ranks */

    /* log.profile_steps. */
    nd_profile profile;
    int64_t profile_first, profile_last;
    bool profiles; /* some of these steps are to come */

    /* The loop. */
    int64_t begin;                         /* steps that were done before this start */
    int64_t last_step;                     /* train.steps, or before: the data end with it */
    int64_t trace_from;                    /* the trace holds the steps after this one */
    double validation_seconds;             /* since then; not in the trace */
    int64_t step_begin;                    /* nd_clock_ns */
    int64_t sent_before[ND_TRAFFIC_COUNT]; /* when the step began */
    double gpu_bytes;                      /* in use after the first steps */
    bool began;                            /* its first step, or what comes without one */
    bool stopped;                          /* by a signal */
    bool over;                             /* the step done is the last one, before train.steps */
} nd_run;

/* A stage of a run. Each function may be NULL. */
typedef struct nd_run_stage {
    nd_status (*open)(nd_run *run);
    nd_status (*before_step)(nd_run *run);
    nd_status (*after_step)(nd_run *run, const nd_step_result *result);
    nd_status (*finish)(nd_run *run); /* after the last step */
    void (*close)(nd_run *run);       /* also of a stage that is not open */
} nd_run_stage;
extern const nd_run_stage nd_run_source, nd_run_folder, nd_run_load, nd_run_dumps, nd_run_profile,
    nd_run_saving;

/* Rank 0's value and its status go to the other ranks, through the job's store. The key is one for
 * each call, alike on all ranks; NULL and 0: no value. All ranks return rank 0's status: rank 0
 * with the error that its thread has, the others with "rank 0 <fault>". */
nd_status nd_run_tell_all(const nd_worker *worker, const char *key, nd_status status,
                          const char *fault, void *value, size_t bytes);

/* run_folder.c, run_json.c */

/* Chooses or checks the run folder, output.dir or runs/<config>-<n>, and creates it.
 * ND_ERR_CANTCREATE when it holds a run already or cannot be written. Owned by the caller. */
nd_status nd_run_folder_create(const nd_config *config, char **out);
/* The newest runs/<config>-<n> that has a checkpoint, whole or damaged (.bad); NULL without
 * one. What is no folder, or may not be read, is passed over. Owned by the caller. */
nd_status nd_run_folder_newest(const nd_config *config, char **out);
/* DIR/<name><suffix>, or, where that exists, DIR/<name>-2<suffix>, ... */
nd_status nd_run_file_next(const char *dir, const char *name, const char *suffix,
                           char out[ND_RUN_PATH_MAX]);
/* Rank 0 of a run that continues renames RUN/<name> of an earlier start to <name>.old, where it
 * exists. */
nd_status nd_run_set_aside(const nd_run *run, const char *name);
/* Rank 0 of a fresh run that ends before step 1 removes what it has written, and the folder too
 * where this start made it and nobody has put anything there. Without run.json of its own it has
 * written nothing: what lies there is another start's, which trains or has ended. */
void nd_run_forget(const nd_run *run);
/* About what one checkpoint takes, its model included. */
uint64_t nd_run_checkpoint_bytes(const nd_config *config, const nd_inputs *inputs);

/* Rank 0, whose memory is planned, writes run.json, with the command that the user typed (that of
 * ndlaunch, if it started this worker), and logs what the run is. ND_ERR_DATA when the spans that
 * do not count in the loss are damaged. */
nd_status nd_run_record(nd_run *run);
/* run.json alone, with these members that say what ran, which are taken over; NULL: memory ran out.
 * ND_ERR_CANTCREATE with a sentence when run.json exists or cannot be written. A run that continues
 * writes run-2.json, run-3.json, ... beside it. */
nd_status nd_run_record_write(nd_run *run, json_t *sections);

/* resume.c, resume_check.c */

typedef struct nd_resume_search {
    const nd_config *config; /* resolved */
    const char *run_folder;  /* a restart: the folder that the job began; else "" */
    int64_t below;           /* only checkpoints before this step; -1: all */
    bool sets_aside;         /* those of the run that goes on, without a readable manifest, are
                                renamed, and that is said; else a search that does follows. Those
                                of another run stay as they are, which each search says */
} nd_resume_search;

/* Finds what checkpoint.resume means. ND_ERR_DATA: it is a step or a folder and there is no such
 * checkpoint, it is latest and there is none, or all checkpoints of the run are damaged. */
nd_status nd_resume_find(const nd_resume_search *search, nd_resume *out);
/* Returns whether the checkpoint lies in the folder of a run that goes on, which may rename it. */
bool nd_resume_is_own(const nd_resume *resume);
/* Rank 0, under the run's lock, once the checkpoint is loaded: later checkpoints of the run are of
 * steps that it now computes again, so each is renamed (.old, or .bad without a readable manifest).
 * A checkpoint of another run changes nothing. */
nd_status nd_resume_set_later_aside(const nd_resume *resume);

/* ND_ERR_CONFIG: checkpoint.allow has a word that no compared key has, and would allow nothing. */
nd_status nd_resume_check_allowed(const nd_config *config);
/* Gives all that must be the same in a run that goes on from a checkpoint: the content of the
 * tokenizer and of the training data, sequence length, order of samples, samples of a step,
 * optimizer. Owned by the caller. */
nd_status nd_resume_identity(const nd_config *config, const nd_inputs *inputs, json_t **out);
/*
 * Compares a checkpoint with the run: its model and nd_resume_identity, and, where no step is left
 * to do, also seed, precision and optimizer. ND_ERR_CONFIG names the first difference with both
 * values, and where there are several the words of checkpoint.allow, which lists what is not
 * compared, for all of them. `logs`: logs what differs although it may.
 */
nd_status nd_resume_check(const nd_config *config, const nd_inputs *inputs, const char *folder,
                          const nd_manifest *manifest, bool logs);

/* After a step that was not finite (nd_trainer_step's error, which is the thread's last): back to
 * the newest good checkpoint, and on behind the samples of the steps since then. ND_ERR_NUMERIC
 * with that error's sentence when there is no checkpoint, or after ten rewinds. */
nd_status nd_run_rewind(nd_run *run);

/* checkpoints.c: what a run saves, and the best state of it. */

/* Goes on with the save in flight, also between the batches of a validation. `flag`: the largest
 * nd_trainer_reported_save of all ranks. Errors as below. */
nd_status nd_run_saving_advance(nd_run *run, int64_t flag);
/* Waits until the save in flight, if there is one, is durable or has failed. */
nd_status nd_run_saving_wait(nd_run *run);
/* A save has ended, if it has: it is logged and recorded. ND_ERR_CANTCREATE: it failed, and
 * checkpoint.on_error is stop; ND_ERR_IO: its state was wrong, for the third time in a row. */
nd_status nd_run_saving_report(nd_run *run, const nd_save_report *report);
/* The sinks get a validation of the state after the step done, with the length of separate
 * documents, and its loss is judged: the run may be over. */
nd_status nd_run_record_validation(nd_run *run, nd_validation_record *record);
/* Each rank says what it has found to be damaged, which is the thread's error, and rank 0 renames
 * the checkpoint. NULL: it is that of another run, and stays as it is. */
nd_status nd_run_set_damaged_aside(const nd_run *run, const char *folder, int64_t step);
/* With checkpoint.load_best, before the model is saved: the weights of the checkpoint with the
 * lowest validation loss. The trainer's position stays. A damaged one is set aside, and the best of
 * the others is taken; ND_ERR_DATA when none of these was validated. */
nd_status nd_run_load_best(nd_run *run);
/* With the state of its good checkpoint, in a run that goes on or went back: what is known of its
 * validations up to this state. A run that early stopping had ended is over again, unless it may
 * wait for longer now. */
nd_status nd_run_best_find(nd_run *run);
/* A validation after `step`. The checkpoint of that state may be the best one from now on. */
void nd_run_best_validated(nd_run_best *best, const nd_config *config, int64_t step, double loss);
/* A checkpoint of the state after `step` is begun; the one before has ended. */
void nd_run_best_saving(nd_run_best *best, int64_t step);
/* The checkpoint of `step` is durable. True: it is the best one from now on. */
bool nd_run_best_saved(nd_run_best *best, int64_t step);
/* Early stopping is asked for, and its patience has come to an end. */
bool nd_run_best_is_over(const nd_run_best *best, const nd_config *config);
/* Restores what the run knew of its best state after `step`, before it went on: from metrics.jsonl
 * and the checkpoints of its folder. ND_ERR_DATA, ND_ERR_IO: these cannot be read. */
nd_status nd_run_best_replay(nd_run_best *best, const nd_config *config, const char *run,
                             int64_t step);
/* Adds what this start knew before it went back to `step` to what was replayed: the best checkpoint
 * up to that step stays, also where a full disk has lost the line of its validation. */
void nd_run_best_keep(nd_run_best *best, const nd_run_best *known, int64_t step);

/* validation.c */

/* Validates the state after the step done where that is due: at an interval, and after the last
 * step; `at_end`: only then, since the others were validated before a rewind. */
nd_status nd_run_validate(nd_run *run, bool at_end);
/* A validation that is due after the step that the run goes on from is made where its metrics.jsonl
 * has none: a signal or a failure came before its end in the start before. */
nd_status nd_run_validate_missing(nd_run *run);

/* The profile of one rank: lines of JSON that each end with a comma. Owned by the caller. */
nd_status nd_run_profile_text(const nd_profile *profile, int rank, const char *name, char **text,
                              size_t *size);

#endif

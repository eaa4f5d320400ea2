// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_FOLDER_H
#define ND_CHECKPOINT_FOLDER_H
/*
 * The checkpoints of a run folder: names, order of events, and what is never touched.
 *
 * The name of a folder says what is in it, and one durable rename leads to the next name, so that a
 * folder with a good name is complete whenever a process or the machine dies:
 *
 *   name                        it holds                        what follows
 *   .tmp-checkpoint-STEP-RUNID  a save that has not ended       checkpoint-STEP, or the next start
 *                                                               removes it
 *   checkpoint-STEP             a whole checkpoint              .bad, .old or .del-
 *   checkpoint-STEP.old[-K]     a state to be computed again    .del- when newer ones pass it
 *   checkpoint-STEP.bad[-K]     a damaged checkpoint            stays until a user deletes it
 *   .del-checkpoint-STEP...     a deletion that has not ended   the next start removes it
 *
 * Only folders that hold a manifest of ours are deleted, unless a user asks for more. A link to a
 * folder is read as that folder. A pruning leaves it alone and does not count it, since it may lead
 * to a folder beside it; where it is renamed, that is the link.
 *
 * One process per run calls these (rank 0), while it holds the run's lock.
 */
#include "trainer/checkpoint/manifest.h"

/* Another live process works in the run folder: ND_ERR_CANTCREATE. The lock ends with the process,
 * or with nd_run_lock_release. The lock of a file system without locks is not held, of which the
 * caller judges. ND_ERR_IO: whether another process holds it is not known. */
typedef struct nd_run_lock {
    int fd; /* of RUN/.lock; -1: none */
    bool held;
} nd_run_lock;
nd_status nd_run_lock_acquire(const char *run, nd_run_lock *out);
void nd_run_lock_release(nd_run_lock *lock);

typedef enum nd_folder_kind {
    ND_FOLDER_NONE = 0, /* no name of ours */
    ND_FOLDER_WHOLE = 1,
    ND_FOLDER_BAD = 2,
    ND_FOLDER_OLD = 4,
    ND_FOLDER_BEGUN = 8,   /* .tmp-checkpoint-... */
    ND_FOLDER_DOOMED = 16, /* .del-checkpoint-... */
    ND_FOLDER_ALL = 31,
    ND_FOLDER_OURS = 32 /* for nd_folder_list: without those of other programs, but with links to
                           nowhere, which may lead to one of ours later */
} nd_folder_kind;

/* A name in a run folder, and its parts. */
typedef struct nd_folder {
    char name[256];
    nd_folder_kind kind;
    int64_t step;   /* -1: none, which only BEGUN and DOOMED may lack */
    int64_t number; /* K of one that was set aside; 1: it has none */
} nd_folder;
/* The folders whose names are of these kinds, and links to nowhere, by step, kind and number; owned
 * by the caller. A run that does not exist has none. */
nd_status nd_folder_list(const char *run, int kinds, nd_folder **out, int *count);

/* "checkpoint-STEP"; returns `out`. */
enum { ND_CHECKPOINT_NAME_MAX = 32 };
const char *nd_checkpoint_name(int64_t step, char out[ND_CHECKPOINT_NAME_MAX]);
/* RUN/checkpoint-STEP; owned by the caller. */
nd_status nd_checkpoint_path(const char *run, int64_t step, char **out);

/* Finds whether a folder looks like a checkpoint of ndtrain: it has a manifest.json or state/. */
nd_status nd_checkpoint_is_ours(const char *path, bool *out);

/* Removes what dead processes left: the temporary files and folders of a run, saves and deletions
 * that were begun, and whatever else has such a name. */
nd_status nd_checkpoint_sweep(const char *run);

/* RUN/.tmp-checkpoint-STEP-RUNID, which a save makes with ND_STATE_FOLDER in it; owned by the
 * caller. */
nd_status nd_checkpoint_temporary(const char *run, int64_t step, const char *run_id, char **out);

/*
 * All other files are durable: looks whether those of all writers are there with their sizes,
 * writes the manifest, reads it again, asks the gate (unless it is NULL), whose error prevents the
 * rename, renames the folder to checkpoint-STEP, makes the rename durable. A temporary folder that
 * has become a link is refused. A checkpoint of that step that is there already exchanges names
 * with it and is then renamed to .old; where the file system cannot exchange names, it is renamed
 * first. After a failure the temporary folder and the older checkpoint have their names again.
 */
nd_status nd_checkpoint_commit(const char *run, const char *temporary, const nd_manifest *manifest,
                               nd_status (*gate)(void *context), void *context);

/* Renames checkpoint-STEP to checkpoint-STEP.<suffix>, or <suffix>-2, -3, ... The new path is
 * owned by the caller; out may be NULL. */
nd_status nd_checkpoint_set_aside(const char *run, int64_t step, const char *suffix, char **out);

/*
 * The checkpoints that stay: the `keep_last` newest good ones, those whose step is a multiple of
 * keep_every (0: none is kept for that) and the steps `keep` (-1: none) and `best` (0: none).
 * keep_last 0 keeps all.
 *
 * Good means that the manifest can be read and, with `checks_files`, that all files are there with
 * their sizes. What is not good is not counted and not deleted, so the newest good one stays.
 */
typedef struct nd_prune_options {
    int64_t keep_last, keep_every, keep, best;
} nd_prune_options;
/* Lists those that go, the oldest first; owned by the caller. */
nd_status nd_checkpoint_prune_plan(const char *run, const nd_prune_options *options,
                                   bool checks_files, nd_folder **out, int *count);
/* Deletes a folder of ours. ND_ERR_DATA when the manifest of one that was not set aside cannot be
 * read. */
nd_status nd_folder_delete(const char *run, const nd_folder *folder);
/* The step that the `count` newest good checkpoints have all reached; -1: there are fewer. */
nd_status nd_checkpoint_reached(const char *run, int64_t count, bool checks_files, int64_t *step);

/*
 * Deletes what the plan without `checks_files` names, and, unless keep_last is 0, each .old whose
 * step the keep_last newest good checkpoints have reached again. The newest .old stays, and so does
 * one whose manifest cannot be read, and each .bad. *deleted counts all.
 */
nd_status nd_checkpoint_prune(const char *run, const nd_prune_options *options, int *deleted);

/*
 * An entry of a run folder: a checkpoint, one that was set aside, or the remains of a save or
 * deletion that did not end. It is read without a lock, so a folder may come or go meanwhile.
 */
typedef struct nd_saved {
    char name[256]; /* in the run folder */
    /* "good": the manifest is whole, and all files are there with their sizes. Else "incomplete" (a
     * file is missing, of another size, or too many), "damaged manifest" (or that of something
     * else), "newer version", "no manifest", "link to nowhere", or what the name says: ".bad",
     * ".old", "temporary", "half deleted". */
    const char *state;
    int64_t step;   /* from the name; -1: it has none */
    int64_t time;   /* UNIX time of the save; without a manifest, of the folder's last change */
    uint64_t bytes; /* of all files */
    char why[512];  /* a sentence when something is wrong; else "" */
    bool has_model; /* a Hugging Face model lies at the top */
    bool has_manifest;
    /* From the manifest: */
    char reason[16];
    nd_mesh mesh;
    nd_run_position position;
    int64_t samples_seen;
} nd_saved;

/* One folder, whatever its name; `folder` has no slash at its end. */
nd_status nd_saved_examine(const char *folder, nd_saved *out);
/* All of a run folder by step and name; owned by the caller. ND_ERR_DATA: no folder. */
nd_status nd_saved_list(const char *run, nd_saved **out, int *count);

#endif

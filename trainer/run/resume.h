// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_RESUME_H
#define ND_RUN_RESUME_H
/*
 * From where a run goes on (checkpoint.resume), and in which folder.
 *
 * Rank 0 looks for the source and tells the others through the store, so that all ranks load the
 * same state whatever happens in the folder meanwhile. A checkpoint that turns out to be damaged
 * while it is loaded is renamed and, where checkpoint.resume names no step or folder, the one
 * before it is taken.
 */
#include "trainer/checkpoint/manifest.h"
#include "trainer/run/run.h"

enum { ND_RESUME_PATH_MAX = 4096 };

typedef struct nd_resume {
    int32_t found;                   /* a checkpoint; else the run starts afresh */
    int32_t continues;               /* the run folder holds this run already */
    int32_t searched;                /* the user named no checkpoint: an older one will do */
    int64_t step;                    /* of the checkpoint; -1: there is none */
    char run[ND_RESUME_PATH_MAX];    /* absolute; "": a fresh run folder */
    char source[ND_RESUME_PATH_MAX]; /* folder; "": none */
} nd_resume;

typedef struct nd_resume_search {
    const nd_config *config; /* resolved */
    const char *run_folder;  /* a restart: the folder that the job began; else "" */
    int64_t below;           /* only checkpoints before this step; -1: all */
    bool sets_aside;         /* those of the run that goes on, without a readable manifest, are
                                renamed, and that is said; else a search that does follows. Those
                                of another run stay as they are, which each search says */
} nd_resume_search;

/*
 * Finds what checkpoint.resume means. ND_ERR_DATA: it is a step or a folder and there is no such
 * checkpoint, or it is latest and there is none; the message lists those that are there. Also for
 * auto: all checkpoints of the run are damaged.
 */
nd_status nd_resume_find(const nd_resume_search *search, nd_resume *out);

/* Whether the checkpoint lies in the folder of the run that goes on, which may then rename it. */
bool nd_resume_is_own(const nd_resume *resume);

/*
 * Rank 0, under the run's lock, once the checkpoint is loaded: later checkpoints of the run are of
 * steps that it now computes again, so each is renamed (.old, or .bad without a readable manifest)
 * before a restart takes it or pruning counts it. A checkpoint of another run changes nothing.
 */
nd_status nd_resume_set_later_aside(const nd_resume *resume);

/*
 * What must be the same in a run that goes on from a checkpoint: the content of the tokenizer and
 * of the training data, sequence length, order of samples, samples of a step, optimizer.
 */
nd_status nd_resume_identity(const nd_config *config, const nd_inputs *inputs,
                             nd_manifest_pairs *out);
/*
 * Compares a checkpoint with the run: its model and nd_resume_identity, and, where no step is left
 * to do, also seed, precision and optimizer. ND_ERR_CONFIG names the
 * first difference with both values, and where there are several the words of checkpoint.allow,
 * which lists what is not compared, for all of them. `logs`: then logs each setting, the content of
 * each file, and the samples of a step that differ although they may.
 */
nd_status nd_resume_check(const nd_config *config, const nd_inputs *inputs, const char *folder,
                          const nd_manifest *manifest, bool logs);
/* Before any worker starts: the source is there and fits the run, and checkpoint.allow names only
 * keys that are compared (else ND_ERR_CONFIG). */
nd_status nd_resume_preflight(const nd_config *config, const nd_inputs *inputs);

#endif

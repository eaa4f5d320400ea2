// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_LISTING_H
#define ND_CHECKPOINT_LISTING_H
/*
 * What lies in a run folder: its checkpoints, those that were set aside, and what saves and
 * deletions left that did not end. Only reads; needs no lock, so a folder may come or go meanwhile.
 */
#include "trainer/checkpoint/manifest.h"

typedef enum nd_saved_state {
    ND_SAVED_GOOD = 0,         /* the manifest is whole, and all files are there with their sizes */
    ND_SAVED_INCOMPLETE,       /* a file is missing, of another size, or too many */
    ND_SAVED_DAMAGED_MANIFEST, /* or the manifest of something else */
    ND_SAVED_NEWER_VERSION,
    ND_SAVED_NO_MANIFEST,
    ND_SAVED_NO_TARGET, /* a link that leads nowhere */
    ND_SAVED_BAD,       /* set aside because it is damaged */
    ND_SAVED_OLD,       /* set aside because its step is computed again */
    ND_SAVED_TEMPORARY,
    ND_SAVED_DELETED /* a deletion that did not end */
} nd_saved_state;

const char *nd_saved_state_name(nd_saved_state state); /* "good", "no manifest", ".bad" */

typedef struct nd_saved {
    char name[256]; /* in the run folder */
    nd_saved_state state;
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

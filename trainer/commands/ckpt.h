// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMMANDS_CKPT_H
#define ND_COMMANDS_CKPT_H
/*
 * `ndtrain ckpt VERB`: tools for checkpoints on disk. They need no configuration, start nothing,
 * and use memory that does not grow with the model. One file per verb; ckpt.c finds the verb and
 * prints help, ckpt_arguments.c reads the command line and the folders that it names.
 */
#include "trainer/checkpoint/manifest.h"

enum { ND_CKPT_PLACES_MAX = 2, ND_CKPT_FLAGS_MAX = 4 };

typedef struct nd_ckpt_flag {
    const char *name;  /* "--keep-last"; NULL behind the last */
    const char *value; /* what it takes: "K"; NULL: nothing */
    const char *help;  /* whole sentences */
} nd_ckpt_flag;

typedef struct nd_ckpt_call {
    const char *places[ND_CKPT_PLACES_MAX]; /* folders of the command line; NULL: not given */
    const char *values[ND_CKPT_FLAGS_MAX];  /* by flag; NULL: not given; "" when it takes none */
} nd_ckpt_call;

typedef struct nd_ckpt_verb {
    const char *name;
    const char *usage; /* behind the name: "CHECKPOINT OUT [flags]" */
    const char *help;  /* whole sentences, with the exit codes */
    int least, most;   /* folders on the command line */
    nd_ckpt_flag flags[ND_CKPT_FLAGS_MAX + 1];
    /* *code is the exit code when ND_OK is returned; it is 0 before the call. */
    nd_status (*run)(const nd_ckpt_call *call, int *code);
} nd_ckpt_verb;

extern const nd_ckpt_verb nd_ckpt_ls, nd_ckpt_verify, nd_ckpt_export, nd_ckpt_gguf, nd_ckpt_diff,
    nd_ckpt_prune;

/* arguments */

/* argv[0] is the verb. ND_ERR_CONFIG names what is wrong, and the nearest flag. */
nd_status nd_ckpt_parse(const nd_ckpt_verb *verb, int argc, char **argv, nd_ckpt_call *out);
/* A whole number of a flag; ND_ERR_CONFIG when it is none, or below `least`. */
nd_status nd_ckpt_number(const nd_ckpt_flag *flag, const char *text, int64_t least, int64_t *out);

/* folders; all results are owned by the caller */

/* The path without slashes at its end. ND_ERR_DATA: it is no folder. A run folder may be a link. */
nd_status nd_ckpt_folder(const char *argument, char **out);
/* Whether the folder itself is a checkpoint. ND_ERR_DATA: it is one by way of a link. */
nd_status nd_ckpt_is_checkpoint(const char *folder, bool *out);
/* A checkpoint: the folder itself, or the newest of a run folder. Reads its manifest. */
nd_status nd_ckpt_open(const char *argument, char **folder, nd_manifest *manifest);
/* Names a checkpoint of a run that is a link and newer than `newest`, its newest folder (-1: there
 * is none), in a warning; ND_ERR_DATA where there is no folder. */
nd_status nd_ckpt_check_links(const char *run, int64_t newest);
/* The manifest of a checkpoint folder. */
nd_status nd_ckpt_read_manifest(const char *folder, nd_manifest *manifest);

/* text */

enum { ND_CKPT_TEXT_MAX = 160 };
/* "1.25 GB"; returns `text`. */
const char *nd_ckpt_bytes(char text[ND_CKPT_TEXT_MAX], double bytes);
/* "dp_shard 2, tp 2", or "1 rank"; returns `text`. */
const char *nd_ckpt_mesh(char text[ND_CKPT_TEXT_MAX], const nd_mesh *mesh);
/* Text from a file or a folder's name, without characters that move the cursor. */
const char *nd_ckpt_printable(char text[ND_CKPT_TEXT_MAX], const char *raw);

#endif

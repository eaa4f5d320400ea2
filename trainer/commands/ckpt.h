// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMMANDS_CKPT_H
#define ND_COMMANDS_CKPT_H
/*
 * `ndtrain ckpt VERB`: tools for checkpoints on disk. They need no configuration, start nothing,
 * and use memory that does not grow with the model. ckpt.c opens the folders that the
 * command line names, and verifies.
 */
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/manifest.h"
#include "trainer/commands/command.h"

/* folders; all results are owned by the caller */

/* The path without slashes at its end. ND_ERR_DATA: it is no folder, and no link to one. */
nd_status nd_ckpt_folder(const char *argument, char **out);
/* A checkpoint: the folder itself, or the newest of a run folder. Reads its manifest. */
nd_status nd_ckpt_open(const char *argument, char **folder, nd_manifest *manifest);

/* text */

enum { ND_CKPT_TEXT_MAX = 160 };
/* "dp_shard 2, tp 2", or "1 rank"; returns `text`. */
const char *nd_ckpt_mesh(char text[ND_CKPT_TEXT_MAX], const nd_mesh *mesh);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_NAMES_H
#define ND_CHECKPOINT_NAMES_H
/*
 * Names of the state in a checkpoint: those of torch's flattened optimizer state. The master weight
 * has the Hugging Face name of its tensor, a moment is "optimizer.state.<that name>.exp_avg". Every
 * tensor also has a scalar "....step", the number of updates, as torch keeps one per parameter.
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"

/* The flat state arrays of a rank. SGD has the first only. */
typedef enum nd_state_kind {
    ND_STATE_MASTER = 0,
    ND_STATE_MOMENT1,
    ND_STATE_MOMENT2,
    ND_STATE_KINDS
} nd_state_kind;

enum { ND_STATE_NAME_MAX = 160 };

/* `param` is the tensor's Hugging Face name, below 96 characters; returns `name`. */
const char *nd_state_name(char name[ND_STATE_NAME_MAX], nd_state_kind array, const char *param);
const char *nd_state_step_name(char name[ND_STATE_NAME_MAX], const char *param);
/* "master", "exp_avg", "exp_avg_sq" */
const char *nd_state_kind_name(nd_state_kind array);

/* What torchtitan calls a tensor that Hugging Face calls `param`: layers.0.attention.wq.weight.
 * Empty when it has no such tensor. */
const char *nd_torchtitan_name(char name[ND_STATE_NAME_MAX], const char *param);

/* Whether a name stays in its folder: not empty, no slash, no leading dot, printable ASCII. */
bool nd_name_is_plain(const char *name);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DRY_DRY_PREPARE_H
#define ND_DRY_DRY_PREPARE_H
/* Ops of a dry run that make what the backend keeps for the forms they meet (nd_ops.prepare). */
#include "kernels/ops.h"

/* What stream->native of such a run points to. */
typedef struct nd_dry_target {
    const nd_ops *prepare;
    nd_device *device;
} nd_dry_target;

nd_ops nd_dry_prepare_ops(const nd_ops *real);

#endif

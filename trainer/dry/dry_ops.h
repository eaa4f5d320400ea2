// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DRY_DRY_OPS_H
#define ND_DRY_DRY_OPS_H
/* Ops for dry runs: they compute nothing and touch no memory. Both tables have the properties and
 * the queries of `real`. */
#include "trainer/dry/dry.h"

/* Calls whose time is measured go into the nd_calls that stream->native points to. */
nd_ops nd_dry_ops(const nd_ops *real);

/* What stream->native points to under nd_dry_prepare_ops. */
typedef struct nd_dry_target {
    const nd_prepare_ops *prepare;
    nd_device *device;
} nd_dry_target;

/* Ops that make what the backend keeps for the forms they meet (nd_ops.prepare). */
nd_ops nd_dry_prepare_ops(const nd_ops *real);

#endif

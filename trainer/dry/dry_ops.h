// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DRY_DRY_OPS_H
#define ND_DRY_DRY_OPS_H
/* Ops that compute nothing and touch no memory: what is timed goes into the nd_calls that
 * stream->native points to. */
#include "trainer/dry/dry.h"

/* With the properties and the scratch functions of `real`. */
nd_ops nd_dry_ops(const nd_ops *real);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_WAITS_H
#define ND_VIEW_WAITS_H
/*
 * Who waited for whom, from profile.json (docs/formats.md): of each collective the rank that
 * entered it last, and how long the others had been in their calls by then. A collective that a
 * rank only began, to wait for it later, counts with the time of the call that began it.
 */
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/mesh/mesh.h"

typedef struct nd_rank_waits {
    double communication_ms; /* in calls of communication */
    double waited_ms;        /* of it, until the last rank came */
    double caused_ms;        /* that others waited for this rank */
    int64_t last;            /* collectives that this rank entered last */
} nd_rank_waits;

typedef struct nd_waits {
    nd_rank_waits *ranks; /* [count] owned */
    int count;            /* of the mesh */
    int64_t collectives;  /* with at least two members in the file */
    int64_t steps;        /* of rank 0 */
} nd_waits;

/* ND_ERR_DATA: no such file, or of another program. */
nd_status nd_waits_read(const char *path, const nd_mesh *mesh, nd_waits *out);
void nd_waits_fini(nd_waits *waits);

#endif

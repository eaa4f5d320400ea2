// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_PROFILE_H
#define ND_RUN_PROFILE_H
/*
 * log.profile_steps: what every rank called in some steps, as RUN/profile.json, which Perfetto and
 * chrome://tracing open: ranks are processes, and all of them count from one moment, that behind a
 * barrier before the first of these steps. What lies between two steps, such as a validation, is
 * left out. docs/formats.md has the keys.
 *
 * Each rank writes its part into RUN/profile/, and rank 0 puts the parts together, so the folder
 * must be seen by all nodes. A part that cannot be written is a warning: the run goes on. Memory
 * for ND_PROFILE_EVENTS calls is taken before step 1; further calls are counted and left out.
 */
#include "trainer/rank.h"

enum { ND_PROFILE_EVENTS = 100000 };

typedef struct nd_run_profile {
    nd_rank *rank;   /* borrowed; NULL: nothing is recorded, or it is written already */
    const char *run; /* the run folder, absolute, borrowed */
    int64_t first, last;
    int64_t step_begin; /* nd_clock_ns */
    nd_profile profile;
} nd_run_profile; /* all zero: none */

/* On every rank, before the loop. */
nd_status nd_run_profile_init(nd_run_profile *p, nd_rank *rank, const char *run);
/* On every rank: before a step begins, with its number, and after it. Collective at the first of
 * the steps and at the last. */
nd_status nd_run_profile_begin(nd_run_profile *p, int64_t step);
nd_status nd_run_profile_end(nd_run_profile *p, int64_t step);
/* On every rank, after the loop: writes what a run that stopped early has. Collective. */
nd_status nd_run_profile_finish(nd_run_profile *p);
void nd_run_profile_fini(nd_run_profile *p);

/* The part of one rank: lines of JSON that each end with a comma. Owned by the caller. */
nd_status nd_run_profile_text(const nd_profile *profile, int rank, const char *name, char **text,
                              size_t *size);

#endif

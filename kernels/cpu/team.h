// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_TEAM_H
#define ND_CPU_TEAM_H
/*
 * The threads of one device. They are made once and stay: between regions they spin for a moment
 * and then sleep. A region is a number of pieces; each thread begins with its own range of them and
 * then takes pieces that others have not begun. The end of a region waits for the pieces that were
 * begun, not for the threads: while another program has a thread's CPU, the other threads do its
 * pieces. Any thread may do a piece, so the results of a body must not depend on the thread.
 *
 * The host thread that drives the device is thread 0 of the team; it alone calls these functions.
 * The other threads block every signal but those of their own faults, so that the first thread of
 * the process handles all others.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct nd_team nd_team;

/* Pieces per thread that are enough where the cut is free: a thread that has no CPU then holds up a
 * fourth of its share at most. */
enum { ND_TEAM_PIECES = 4 };

/* Does one piece. */
typedef void (*nd_team_body)(void *arg, int64_t piece);

/* No thread starts yet. */
nd_status nd_team_create(int threads, nd_team **out);
void nd_team_destroy(nd_team *team); /* NULL is legal; waits until the threads have ended */

int nd_team_threads(const nd_team *team);

/* Starts the threads, with stacks of `stack_bytes` or, for 0, of the usual size; does nothing when
 * they run. ND_ERR_RESOURCE: a limit forbids one, and none runs; the message names it. */
nd_status nd_team_start(nd_team *team, size_t stack_bytes);

/* Returns how many turns a thread of the team spins before it sleeps. GOMP_SPINCOUNT gives the
 * number, or without it OMP_WAIT_POLICY. Both are read as libgomp reads them, so one setting covers
 * its threads and ours. Without a value that libgomp would take there are 2,000 turns, about what
 * sleeping and waking cost. */
int64_t nd_cpu_spin_turns(void);

/* Starts the threads with the stacks that libgomp gives its own, after as many threads were tried
 * at once as the ops will have; `libgomp`: its threads too, which it keeps. ND_ERR_RESOURCE as
 * above. */
nd_status nd_team_start_early(nd_team *team, bool libgomp);

/* Runs body for the pieces [0, pieces) and returns when all are complete. The first call starts the
 * threads where nd_team_start was not called; if a limit forbids that, it logs a warning, and the
 * caller does all pieces of all regions. Later calls allocate nothing. A call while a region of
 * this team runs ends the process, from within its body or from another thread. So does a call, for
 * any team, on a thread that a team has started. */
void nd_team_run(nd_team *team, int64_t pieces, nd_team_body body, void *arg);

/* A number that a thread changes and others wait for. It has a cache line of its own, since the
 * others read it all the time. */
typedef struct nd_team_count {
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} nd_team_count;

/*
 * For pieces that have an order among them. nd_team_wait waits until the count has this value; it
 * spins and sleeps as between regions. The caller then sees all that was written before the
 * nd_team_set. It may wait only for a piece that was begun: it may itself have to do one that was
 * not. Counts begin as zeros, and one thread at a time calls nd_team_set.
 */
void nd_team_wait(const nd_team *team, nd_team_count *count, uint32_t value);
void nd_team_set(nd_team_count *count, uint32_t value);

/* The number of the calling thread in its team, for scratch of its own: 0 to threads - 1, and 0
 * outside of teams. */
int nd_team_thread(void);

#endif

// SPDX-License-Identifier: Apache-2.0
/*
 * UCX aborts the process when it copies from the memory of a rank that has ended. The job would
 * then blame this rank, whose abort is a consequence; so a call during which UCX aborts becomes an
 * error that names the rank that has ended.
 */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>

#include "runtime/comm/ucx/ucx.h"

enum { END_MS = 1000 }; /* a process whose memory is gone takes a moment to end */

static _Thread_local sigjmp_buf *guarded; /* where this thread's call of UCX began; NULL: nowhere */

static void on_abort(int number)
{
    sigjmp_buf *back = guarded;
    if (back) { /* else abort goes on when this returns */
        guarded = NULL;
        siglongjmp(*back, 1);
    }
}

void nd_ucx_watch_abort(void)
{
    const struct sigaction action = {.sa_handler = on_abort, .sa_flags = SA_NODEFER};
    sigaction(SIGABRT, &action, NULL);
}

/* The rank whose process has ended; -1: none that this rank talks to. */
static int find_ended(ucx_state *state)
{
    const int first = 2; /* of the pidfds */
    int n = 0;
    do {
        n = poll(state->polled + first, (nfds_t)(state->polled_count - first), END_MS);
    } while (n < 0 && errno == EINTR);
    for (int i = first; n > 0 && i < state->polled_count; i++) {
        if (state->polled[i].revents != 0) {
            return state->polled_rank[i];
        }
    }
    return -1;
}

static nd_status after_abort(ucx_state *state)
{
    const int rank = find_ended(state);
    if (rank < 0) {
        signal(SIGABRT, SIG_DFL);
        abort();
    }
    state->broken = true;
    return nd_fail(ND_ERR_IO, "rank %d has ended while rank %d copied from its memory", rank,
                   state->rank);
}

nd_status nd_ucx_guard(ucx_state *state, void (*call)(void *context), void *context)
{
    sigjmp_buf here;
    if (state->broken) {
        return nd_fail(ND_ERR_IO, "UCX cannot be used any more, since a rank has ended");
    }
    if (sigsetjmp(here, 0) != 0) {
        return after_abort(state);
    }
    guarded = &here;
    call(context);
    guarded = NULL;
    return ND_OK;
}

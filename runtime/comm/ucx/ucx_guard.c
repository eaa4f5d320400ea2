// SPDX-License-Identifier: Apache-2.0
/*
 * UCX aborts the process when it copies from the memory of a rank that has ended. The job would
 * then blame this rank, whose abort is a consequence; so a call during which UCX aborts becomes an
 * error that names the rank that has ended.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>

#include "runtime/base/process.h"
#include "runtime/comm/ucx/ucx.h"

enum { END_MS = 1000 }; /* a process whose memory is gone takes a moment to end */

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
    if (state->broken) {
        return nd_fail(ND_ERR_IO, "UCX cannot be used any more, since a rank has ended");
    }
    return nd_abort_guard(ND_ABORT_ANY, call, context) ? ND_OK : after_abort(state);
}

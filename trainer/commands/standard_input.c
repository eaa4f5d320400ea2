// SPDX-License-Identifier: Apache-2.0
/* Standard input of rank 0. The other ranks wait for it in small steps, so that they see a stop
 * signal, and so that no collective outlasts its deadline while a user thinks. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "trainer/commands/generate.h"

enum { PIECE = 1 << 16, WAIT_MS = 500 };

/* What rank 0 has read and nobody took; empty on other ranks. */
typedef struct stdin_state {
    nd_bytes bytes; /* owned */
    bool ended;
} stdin_state;

/* Whether there is what was asked for. */
static bool is_ready(const stdin_state *in, bool line)
{
    return in->ended ||
           (line && in->bytes.count > 0 && memchr(in->bytes.data, '\n', in->bytes.count));
}

/* Reads until it is ready, for WAIT_MS at most. */
static nd_status read_for_a_while(stdin_state *in, bool line)
{
    const double end = nd_clock_seconds() + WAIT_MS * 1e-3;
    char piece[PIECE];
    while (!is_ready(in, line) && nd_clock_seconds() < end) {
        struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};
        int events = poll(&p, 1, WAIT_MS);
        ssize_t n = events > 0 ? read(STDIN_FILENO, piece, sizeof piece) : -1;
        if (events == 0 || (n < 0 && errno == EINTR)) {
            return ND_OK;
        }
        if (n < 0) {
            return nd_fail(ND_ERR_IO, "cannot read standard input: %s", strerror(errno));
        }
        if (in->bytes.count + (size_t)n > ND_STDIN_BYTES_MAX) {
            return nd_fail(ND_ERR_DATA, "standard input has more than %d bytes; give it in parts",
                           ND_STDIN_BYTES_MAX);
        }
        in->ended = n == 0;
        ND_TRY(nd_bytes_add(&in->bytes, piece, (size_t)n));
    }
    return ND_OK;
}

/* Waits until rank 0 has all of its standard input or (line) a whole line. Collective over all
 * ranks. ND_ERR_PREEMPTED: one of them got a stop signal. */
static nd_status wait_for_input(stdin_state *in, nd_session *s, bool line)
{
    nd_rank *r = &s->worker->rank;
    for (;;) {
        nd_status status = r->rank == 0 ? read_for_a_while(in, line) : ND_OK;
        int64_t states[2] = {r->rank == 0 && is_ready(in, line), nd_session_signal()};
        ND_TRY(nd_session_agree_status(s, status, "read standard input"));
        ND_TRY(nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, states, 2,
                                  ND_DTYPE_I64, ND_REDOP_MAX, NULL));
        if (states[1] != 0) {
            return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal while it waited for input");
        }
        if (states[0] != 0) {
            return ND_OK;
        }
    }
}

static nd_status take_line(stdin_state *in, char **line, size_t *size)
{
    const char *end = in->bytes.count > 0 ? memchr(in->bytes.data, '\n', in->bytes.count) : NULL;
    const size_t all = end ? (size_t)(end - (char *)in->bytes.data) + 1 : in->bytes.count;
    *line = NULL;
    *size = all - (end != NULL);
    if (all == 0) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(*size + 1, line));
    memcpy(*line, in->bytes.data, *size);
    memmove(in->bytes.data, in->bytes.data + all, in->bytes.count - all);
    in->bytes.count -= all;
    return ND_OK;
}

/* The next line on all ranks, without its end, owned by the caller; NULL at the end of input. */
static nd_status next_line(stdin_state *in, nd_session *s, char **line, size_t *size)
{
    const bool first = s->worker->rank.rank == 0;
    ND_TRY(wait_for_input(in, s, true));
    nd_status status = first ? take_line(in, line, size) : ND_OK;
    int64_t has = first && *line;
    nd_rank *r = &s->worker->rank;
    ND_TRY(nd_session_agree_status(s, status, "hold a line"));
    ND_TRY(nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, &has, 1, ND_DTYPE_I64,
                              ND_REDOP_MAX, NULL));
    return has ? nd_session_share(s, ND_OK, line, size) : ND_OK;
}

nd_status nd_stdin_each_line(nd_session *s, const char *prompt,
                             nd_status (*take)(void *context, const char *line, size_t size),
                             void *context)
{
    stdin_state in = {0};
    nd_status status = ND_OK;
    for (bool ends = false; !ends && status == ND_OK;) {
        char *line = NULL;
        size_t size = 0;
        if (s->worker->rank.rank == 0 && isatty(STDIN_FILENO)) {
            fputs(prompt, stderr);
        }
        status = next_line(&in, s, &line, &size);
        ends = !line;
        status = status == ND_OK && line ? take(context, line, size) : status;
        free(line);
    }
    free(in.bytes.data);
    return status;
}

nd_status nd_stdin_read(nd_session *s, char **text, size_t *size)
{
    stdin_state in = {0};
    nd_status status = wait_for_input(&in, s, false);
    if (status != ND_OK) {
        free(in.bytes.data);
        return status;
    }
    *text = (char *)in.bytes.data; /* NULL without any */
    *size = in.bytes.count;
    return nd_session_share(s, ND_OK, text, size);
}

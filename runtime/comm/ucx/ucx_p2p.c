// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/shm_folder.h"
#include "runtime/comm/ucx/ucx.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/process.h"
#include "runtime/comm/backend.h"

enum { END_MS = 1000 }; /* a process whose memory is gone takes a moment to end */

/* The first poll entries are the worker's and the net's; pidfds follow, in no order. */
static void watch_process(ucx_state *state, int rank)
{
    ucx_peer *peer = &state->peers[rank];
    if (ucx_is_remote(state, rank) || rank == state->rank) {
        return;
    }
    peer->pidfd = (int)syscall(SYS_pidfd_open, (pid_t)peer->place.pid, 0);
    if (peer->pidfd <
        0) { /* ESRCH: it has ended. Otherwise an older kernel: the deadline remains. */
        peer->gone = errno == ESRCH;
        return;
    }
    state->polled[state->polled_count] = (struct pollfd){.fd = peer->pidfd, .events = POLLIN};
    state->polled_rank[state->polled_count++] = rank;
}

static void ucx_mark_gone(ucx_state *state, int rank)
{
    state->peers[rank].gone = true;
    for (int i = 2; i < state->polled_count; i++) {
        if (state->polled_rank[i] == rank) {
            state->polled_count--;
            state->polled[i] = state->polled[state->polled_count];
            state->polled_rank[i] = state->polled_rank[state->polled_count];
            close(state->peers[rank].pidfd);
            state->peers[rank].pidfd = -1;
            break;
        }
    }
}

static nd_status ucx_connect(nd_transport *transport, int rank)
{
    ucx_state *state = ucx_state_of(transport);
    ucx_peer *peer = &state->peers[rank];
    if (peer->endpoint || ucx_is_remote(state, rank)) {
        return ND_OK;
    }
    const ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
        .address = (const ucp_address_t *)(state->addresses + (size_t)rank * state->address_stride),
        .err_mode = UCP_ERR_HANDLING_MODE_NONE /* shared memory has no other */};
    ucs_status_t code = nd_ucx.ucp_ep_create(state->worker, &params, &peer->endpoint);
    if (code != UCS_OK) {
        peer->endpoint = NULL;
        return nd_fail(ND_ERR_IO, "rank %d cannot reach rank %d: %s; UCX_LOG_LEVEL=info tells more",
                       state->rank, rank, nd_ucx.ucs_status_string(code));
    }
    watch_process(state, rank);
    return ND_OK;
}

static bool ucx_gone(nd_transport *transport, int rank)
{
    const ucx_state *state = ucx_state_of(transport);
    return ucx_is_remote(state, rank) ? nd_net_gone(state->net, rank) : state->peers[rank].gone;
}

static void ucx_describe(nd_transport *transport, int rank, char *text, size_t size)
{
    const ucx_state *state = ucx_state_of(transport);
    const ucx_place *place = &state->peers[rank].place;
    if (place->host != state->host) {
        snprintf(text, size, " (on another host)");
        return;
    }
    nd_report_process(place->pid, text, size);
}

enum { YIELDS_BEFORE_SLEEP = 50 }; /* then the ranks that share our cores need them more */

nd_status nd_ucx_check(ucs_status_t code, const char *call)
{
    if (code == UCS_OK) {
        return ND_OK;
    }
    if (code == UCS_ERR_NO_MEMORY) {
        return nd_fail_memory("UCX (%.60s)", call);
    }
    if (code == UCS_ERR_NO_RESOURCE) {
        return nd_fail(ND_ERR_RESOURCE,
                       "UCX found no memory for its buffers (in %.60s): the limits of memory "
                       "(ulimit -v, -d) or the room in /dev/shm are too small",
                       call);
    }
    return nd_fail(ND_ERR_IO, "UCX: %s (in %.60s); UCX_LOG_LEVEL=info tells more",
                   nd_ucx.ucs_status_string(code), call);
}

static void finish(nd_p2p_request *request, bool good)
{
    request->native = NULL;
    atomic_store_explicit(&request->state, good ? ND_REQUEST_DONE : ND_REQUEST_FAILED,
                          memory_order_release);
}

static void on_sent(void *native, ucs_status_t code, void *user_data)
{
    finish(user_data, code == UCS_OK);
    nd_ucx.ucp_request_free(native);
}

static void on_received(void *native, ucs_status_t code, const ucp_tag_recv_info_t *info,
                        void *user_data)
{
    nd_p2p_request *request = user_data;
    finish(request, code == UCS_OK && info->length == request->bytes);
    nd_ucx.ucp_request_free(native);
}

/* A request that is complete at once has no native part and no callback. */
static void keep(nd_p2p_request *request, ucs_status_ptr_t native, bool good_if_done)
{
    if (UCS_PTR_IS_ERR(native)) {
        finish(request, false);
    } else if (native == NULL) {
        finish(request, good_if_done);
    } else {
        request->native = native;
    }
}

/*
 * Runs `call`, which calls UCX and holds nothing. UCX aborts the process when it copies from the
 * memory of a rank that has ended. The job would then blame this rank, whose abort is a
 * consequence; so it becomes ND_ERR_IO, which names that rank. Another abort ends the process.
 */
static nd_status guard(ucx_state *state, void (*call)(void *context), void *context)
{
    if (state->broken) {
        return nd_fail(ND_ERR_IO, "UCX cannot be used any more, since a rank has ended");
    }
    if (nd_abort_guard(ND_ABORT_ANY, call, context)) {
        return ND_OK;
    }
    int n, i = 2; /* the first of the pidfds */
    do {
        n = poll(state->polled + i, (nfds_t)(state->polled_count - i), END_MS);
    } while (n < 0 && errno == EINTR);
    if (n <= 0) {
        signal(SIGABRT, SIG_DFL);
        abort();
    }
    while (state->polled[i].revents == 0) {
        i++;
    }
    state->broken = true;
    return nd_fail(ND_ERR_IO, "rank %d has ended while rank %d copied from its memory",
                   state->polled_rank[i], state->rank);
}

typedef struct post {
    ucx_state *state;
    nd_p2p_request *request;
} post;

static void post_send(void *context)
{
    const post *p = context;
    nd_p2p_request *request = p->request;
    const ucp_request_param_t param = {.op_attr_mask =
                                           UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                       .cb.send = on_sent,
                                       .user_data = request};
    keep(request,
         nd_ucx.ucp_tag_send_nbx(p->state->peers[request->peer].endpoint, request->buffer,
                                 request->bytes, request->tag, &param),
         true);
}

static void post_recv(void *context)
{
    const post *p = context;
    nd_p2p_request *request = p->request;
    ucp_tag_recv_info_t info = {.length = request->bytes};
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                       UCP_OP_ATTR_FIELD_USER_DATA |
                                                       UCP_OP_ATTR_FIELD_RECV_INFO,
                                       .cb.recv = on_received,
                                       .user_data = request,
                                       .recv_info.tag_info = &info};
    ucs_status_ptr_t native = nd_ucx.ucp_tag_recv_nbx(
        p->state->worker, request->buffer, request->bytes, request->tag, ~UINT64_C(0), &param);
    keep(request, native, info.length == request->bytes);
}

static nd_status ucx_send(nd_transport *transport, nd_p2p_request *request)
{
    ucx_state *state = ucx_state_of(transport);
    if (ucx_is_remote(state, request->peer)) {
        return nd_net_send(state->net, request);
    }
    ND_TRY(ucx_connect(transport, request->peer));
    return guard(state, post_send, &(post){state, request});
}

static nd_status ucx_recv(nd_transport *transport, nd_p2p_request *request)
{
    ucx_state *state = ucx_state_of(transport);
    if (ucx_is_remote(state, request->peer)) {
        return nd_net_recv(state->net, request);
    }
    return guard(state, post_recv, &(post){state, request});
}

/* After a fault only. A receive is taken back; a send may stay with UCX, whose worker is then left
 * alone. */
static void ucx_cancel(nd_transport *transport, nd_p2p_request *request)
{
    ucx_state *state = ucx_state_of(transport);
    if (ucx_is_remote(state, request->peer)) {
        nd_net_cancel(state->net, request);
    } else if (request->native && !state->broken) {
        nd_ucx.ucp_request_cancel(state->worker, request->native);
        for (int i = 0; i < 100 && request->native; i++) {
            nd_ucx.ucp_worker_progress(state->worker);
        }
    }
}

static void progress_worker(void *context)
{
    const ucx_state *state = context;
    for (int i = 0; i < 16 && nd_ucx.ucp_worker_progress(state->worker) != 0; i++) {
    }
}

static nd_status ucx_progress(nd_transport *transport)
{
    ucx_state *state = ucx_state_of(transport);
    ND_TRY(guard(state, progress_worker, state));
    return state->net ? nd_net_progress(state->net) : ND_OK;
}

static void look_at_pidfds(ucx_state *state)
{
    for (int i = state->polled_count - 1; i >= 2; i--) {
        if (state->polled[i].revents != 0) {
            ucx_mark_gone(state, state->polled_rank[i]);
        }
    }
}

static nd_status ucx_wait(nd_transport *transport, int idle, double seconds)
{
    ucx_state *state = ucx_state_of(transport);
    if (idle < YIELDS_BEFORE_SLEEP) {
        sched_yield();
        return ND_OK;
    }
    ucs_status_t code = nd_ucx.ucp_worker_arm(state->worker);
    /* Something arrived meanwhile. UCX calls it a reset when that was an empty datagram to the
     * socket that wakes this rank, which any user of this host can send. */
    if (code == UCS_ERR_BUSY || code == UCS_ERR_CONNECTION_RESET) {
        return ND_OK;
    }
    ND_TRY(nd_ucx_check(code, "ucp_worker_arm"));
    int n = poll(state->polled, (nfds_t)state->polled_count, (int)(seconds * 1e3) + 1);
    if (n < 0 && errno != EINTR) {
        return nd_fail(ND_ERR_INTERNAL, "waiting for a message: poll: %s", strerror(errno));
    }
    if (n > 0) {
        look_at_pidfds(state);
    }
    return ND_OK;
}

static bool ucx_peek(nd_transport *transport, nd_tag wanted, nd_tag mask, nd_tag *found,
                     size_t *bytes)
{
    const ucx_state *state = ucx_state_of(transport);
    ucp_tag_recv_info_t info;
    if (state->net && nd_net_peek(state->net, wanted, mask, found, bytes)) {
        return true;
    }
    if (state->broken || !nd_ucx.ucp_tag_probe_nb(state->worker, wanted, mask, 0, &info)) {
        return false;
    }
    *found = info.sender_tag;
    *bytes = info.length;
    return true;
}

/* A message of an operation that this rank never entered has arrived: the other ranks still work,
 * so this rank ends without waiting for them. */
static bool is_wanted_elsewhere(nd_transport *transport)
{
    const nd_tag farewell_bit = UINT64_C(128) << ND_TAG_COMM_AT; /* no communicator has it */
    nd_tag found;
    size_t bytes;
    return ucx_peek(transport, 0, farewell_bit, &found, &bytes);
}

/* Complete when the other side has it, so no message is in flight when this rank ends. */
static nd_status send_sync(ucx_state *state, nd_p2p_request *send)
{
    const ucp_request_param_t param = {.op_attr_mask =
                                           UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                       .cb.send = on_sent,
                                       .user_data = send};
    keep(
        send,
        nd_ucx.ucp_tag_send_sync_nbx(state->peers[send->peer].endpoint, NULL, 0, send->tag, &param),
        true);
    return ND_OK;
}

/* One step of the leave-taking; false when the other side does not come in time. */
static bool meet(nd_transport *transport, int to, int from, uint64_t step, double until)
{
    ucx_state *state = ucx_state_of(transport);
    const nd_tag base = UINT64_C(255) << ND_TAG_COMM_AT | step << ND_TAG_SEQUENCE_AT;
    nd_p2p_request *send = &state->farewell[0], *recv = &state->farewell[1];
    if (ucx_connect(transport, to) != ND_OK || ucx_gone(transport, to)) {
        return false;
    }
    *send = (nd_p2p_request){.state = ND_REQUEST_POSTED, .peer = to};
    *recv = (nd_p2p_request){.state = ND_REQUEST_POSTED, .peer = from};
    send->tag = base | (nd_tag)state->rank << ND_TAG_RANK_AT;
    recv->tag = base | (nd_tag)from << ND_TAG_RANK_AT;
    if ((ucx_is_remote(state, to) ? nd_net_send(state->net, send) : send_sync(state, send)) !=
            ND_OK ||
        ucx_recv(transport, recv) != ND_OK) {
        return false;
    }
    bool met = false;
    for (int idle = 0; !met && nd_clock_seconds() < until; idle++) {
        ucx_progress(transport);
        int states[2] = {atomic_load(&send->state), atomic_load(&recv->state)};
        if (is_wanted_elsewhere(transport) || states[0] == ND_REQUEST_FAILED ||
            states[1] == ND_REQUEST_FAILED ||
            (states[1] == ND_REQUEST_POSTED && ucx_gone(transport, from)) ||
            (states[0] == ND_REQUEST_POSTED && ucx_gone(transport, to))) {
            break;
        }
        met = states[0] == ND_REQUEST_DONE && states[1] == ND_REQUEST_DONE;
        if (!met && ucx_wait(transport, idle, 0.05) != ND_OK) {
            break;
        }
    }
    ucx_cancel(transport, send);
    ucx_cancel(transport, recv);
    return met;
}

/*
 * A barrier of the world before the workers go, 2 s at most and without complaint: a rank that
 * closes its connections while another still reads would cost that one its last messages. False
 * when not all took part.
 */
static bool take_leave(nd_transport *transport)
{
    const ucx_state *state = ucx_state_of(transport);
    double until = nd_clock_seconds() + 2;
    uint64_t step = 0;
    for (int distance = 1; distance < state->size; distance *= 2) {
        int to = (state->rank + state->size - distance) % state->size;
        int from = (state->rank + distance) % state->size;
        if (!meet(transport, to, from, step++, until)) {
            return false;
        }
    }
    return true;
}

/* Without an orderly end UCX may hold requests of a peer that hangs: its worker is left to the end
 * of the process. */
static void ucx_close(nd_transport *transport, bool failed)
{
    ucx_state *state = ucx_state_of(transport);
    if (!state) {
        return;
    }
    bool orderly = !state->worker || (!failed && state->addresses && take_leave(transport));
    if (orderly && state->worker) {
        nd_ucx.ucp_worker_destroy(state->worker);
    }
    if (orderly && state->context) {
        nd_ucx.ucp_cleanup(state->context);
        nd_shm_folder_remove();
    }
    nd_net_close(state->net, orderly);
    for (int rank = 0; state->peers && rank < state->size; rank++) {
        if (state->peers[rank].pidfd >= 0) {
            close(state->peers[rank].pidfd);
        }
    }
    free(state->addresses);
    free(state->peers);
    free(state->polled);
    free(state->polled_rank);
    free(state);
}

const nd_p2p nd_ucx_p2p = {
    .connect = ucx_connect,
    .send = ucx_send,
    .recv = ucx_recv,
    .cancel = ucx_cancel,
    .progress = ucx_progress,
    .wait = ucx_wait,
    .peek = ucx_peek,
    .gone = ucx_gone,
    .describe = ucx_describe,
    .close = ucx_close,
};

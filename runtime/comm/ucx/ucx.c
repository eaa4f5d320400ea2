// SPDX-License-Identifier: Apache-2.0
/*
 * Messages over UCX within a host, tagged, of one UCP worker per rank, and over net/ between hosts.
 * Endpoints are made when a peer is first needed.
 *
 * UCX does not notice the end of a peer that shares memory with us, so ranks of this host are also
 * watched through a pidfd, which joins the descriptors that a sleeping rank polls.
 */
#include "runtime/comm/ucx/ucx.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/process.h"
#include "runtime/base/shm_folder.h"
#include "runtime/comm/backend.h"
#include "runtime/comm/net/net.h"
#include "runtime/comm/p2p.h"

/* The host and process of a rank. */
typedef struct ucx_place {
    uint64_t host; /* equal where ranks share memory and pids mean the same */
    int32_t pid;
    int32_t unused;
} ucx_place;

typedef struct ucx_peer {
    ucp_ep_h endpoint; /* NULL until needed */
    ucx_place place;
    int pidfd; /* -1: another host, or not connected */
    bool gone;
} ucx_peer;

typedef struct ucx_state {
    ucp_context_h context;
    ucp_worker_h worker;
    int rank, size;
    uint64_t host;
    char *addresses; /* [size] of address_stride bytes */
    size_t address_stride;
    ucx_peer *peers;       /* [size] */
    nd_net *net;           /* to the ranks of other hosts; NULL: there are none */
    struct pollfd *polled; /* [2 + size]: the worker, the net, then the pidfds */
    int *polled_rank;      /* [2 + size] */
    int polled_count;
    bool broken; /* UCX has aborted: it must not be called again */
    nd_p2p_request farewell[2];
} ucx_state;

static bool is_remote(const ucx_state *state, int rank)
{
    return state->peers[rank].place.host != state->host;
}

static ucx_state *state_of(const nd_transport *transport)
{
    return ((nd_p2p_transport *)transport->native)->state;
}

#define ND_UCX(call) check_code(nd_ucx.call, #call) /* of a function of the library */

static nd_status check_code(ucs_status_t code, const char *call)
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

enum {
    END_MS = 1000,           /* a process whose memory is gone takes a moment to end */
    YIELDS_BEFORE_SLEEP = 50 /* then the ranks that share our cores need them more */
};

/* The first poll entries are the worker's and the net's; pidfds follow, in no order. */
static void watch_process(ucx_state *state, int rank)
{
    ucx_peer *peer = &state->peers[rank];
    if (is_remote(state, rank) || rank == state->rank) {
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
    ucx_state *state = state_of(transport);
    ucx_peer *peer = &state->peers[rank];
    if (peer->endpoint || is_remote(state, rank)) {
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
    const ucx_state *state = state_of(transport);
    return is_remote(state, rank) ? nd_net_gone(state->net, rank) : state->peers[rank].gone;
}

static void ucx_describe(nd_transport *transport, int rank, char *text, size_t size)
{
    const ucx_state *state = state_of(transport);
    const ucx_place *place = &state->peers[rank].place;
    if (place->host != state->host) {
        snprintf(text, size, " (on another host)");
        return;
    }
    nd_report_process(place->pid, text, size);
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
static void keep_native(nd_p2p_request *request, ucs_status_ptr_t native, bool good_if_done)
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
    bool received; /* a send is complete when the other side has it */
} post;

static void post_send(void *context)
{
    const post *p = context;
    nd_p2p_request *request = p->request;
    const ucp_request_param_t param = {.op_attr_mask =
                                           UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                       .cb.send = on_sent,
                                       .user_data = request};
    ucp_ep_h endpoint = p->state->peers[request->peer].endpoint;
    ucs_status_ptr_t native =
        (p->received ? nd_ucx.ucp_tag_send_sync_nbx : nd_ucx.ucp_tag_send_nbx)(
            endpoint, request->buffer, request->bytes, request->tag, &param);
    keep_native(request, native, true);
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
    keep_native(request, native, info.length == request->bytes);
}

static nd_status ucx_send(nd_transport *transport, nd_p2p_request *request)
{
    ucx_state *state = state_of(transport);
    if (is_remote(state, request->peer)) {
        return nd_net_send(state->net, request);
    }
    ND_TRY(ucx_connect(transport, request->peer));
    return guard(state, post_send, &(post){state, request, false});
}

static nd_status ucx_recv(nd_transport *transport, nd_p2p_request *request)
{
    ucx_state *state = state_of(transport);
    if (is_remote(state, request->peer)) {
        return nd_net_recv(state->net, request);
    }
    return guard(state, post_recv, &(post){state, request, false});
}

/* After a fault only. A receive is taken back; a send may stay with UCX, whose worker is then left
 * alone. */
static void ucx_cancel(nd_transport *transport, nd_p2p_request *request)
{
    ucx_state *state = state_of(transport);
    if (is_remote(state, request->peer)) {
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
    ucx_state *state = state_of(transport);
    ND_TRY(guard(state, progress_worker, state));
    return state->net ? nd_net_progress(state->net) : ND_OK;
}

static nd_status ucx_wait(nd_transport *transport, int idle, double seconds)
{
    ucx_state *state = state_of(transport);
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
    ND_TRY(check_code(code, "ucp_worker_arm"));
    int n = poll(state->polled, (nfds_t)state->polled_count, (int)(seconds * 1e3) + 1);
    if (n < 0 && errno != EINTR) {
        return nd_fail(ND_ERR_INTERNAL, "waiting for a message: poll: %s", strerror(errno));
    }
    for (int i = state->polled_count - 1; n > 0 && i >= 2; i--) {
        if (state->polled[i].revents != 0) {
            ucx_mark_gone(state, state->polled_rank[i]);
        }
    }
    return ND_OK;
}

static bool ucx_peek(nd_transport *transport, nd_tag wanted, nd_tag mask, nd_tag *found,
                     size_t *bytes)
{
    const ucx_state *state = state_of(transport);
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

/* One step of the leave-taking; false when the other side does not come in time. */
static bool meet(nd_transport *transport, int to, int from, uint64_t step, double until)
{
    ucx_state *state = state_of(transport);
    const nd_tag base = UINT64_C(255) << ND_TAG_COMM_AT | step << ND_TAG_SEQUENCE_AT;
    nd_p2p_request *send = &state->farewell[0], *recv = &state->farewell[1];
    if (ucx_connect(transport, to) != ND_OK || ucx_gone(transport, to)) {
        return false;
    }
    *send = (nd_p2p_request){.state = ND_REQUEST_POSTED, .peer = to};
    *recv = (nd_p2p_request){.state = ND_REQUEST_POSTED, .peer = from};
    send->tag = base | (nd_tag)state->rank << ND_TAG_RANK_AT;
    recv->tag = base | (nd_tag)from << ND_TAG_RANK_AT;
    if (!is_remote(state, to)) { /* no message is to be in flight when this rank ends */
        post_send(&(post){state, send, .received = true});
    } else if (nd_net_send(state->net, send) != ND_OK) {
        return false;
    }
    if (ucx_recv(transport, recv) != ND_OK) {
        return false;
    }
    const nd_tag farewell_bit = UINT64_C(128) << ND_TAG_COMM_AT; /* no communicator has it */
    bool met = false;
    for (int idle = 0; !met && nd_clock_seconds() < until; idle++) {
        ucx_progress(transport);
        nd_tag found;
        size_t bytes;
        /* A message of an operation that this rank never entered has arrived: the other ranks still
         * work, so this rank ends without waiting for them. */
        const bool wanted_elsewhere = ucx_peek(transport, 0, farewell_bit, &found, &bytes);
        int states[2] = {atomic_load(&send->state), atomic_load(&recv->state)};
        if (wanted_elsewhere || states[0] == ND_REQUEST_FAILED || states[1] == ND_REQUEST_FAILED ||
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
    const ucx_state *state = state_of(transport);
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
    ucx_state *state = state_of(transport);
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
}

static const nd_p2p ucx_p2p = {
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

/* The transport. */

static const char shared_memory[] = "/dev/shm";

/*
 * The program's own choice, whatever UCX's environment and files say: shared memory that is this
 * user's alone, which that of sysv is not, and nothing that opens a port. With adaptive progress
 * UCX aborts the process when a datagram of a stranger wakes it before it has a peer.
 */
static nd_status read_config(ucp_config_t **out)
{
    ucp_config_t *config;
    ND_TRY(ND_UCX(ucp_config_read(NULL, NULL, &config)));
    nd_status status = ND_UCX(ucp_config_modify(config, "TLS", "posix,cma,self"));
    if (status == ND_OK) {
        status = ND_UCX(ucp_config_modify(config, "ADAPTIVE_PROGRESS", "n"));
    }
    if (status != ND_OK) {
        nd_ucx.ucp_config_release(config);
        return status;
    }
    *out = config;
    return ND_OK;
}

static nd_status create_worker(ucx_state *state)
{
    ucp_config_t *config;
    char folder[ND_SHM_FOLDER_MAX];
    ND_TRY(nd_ucx_load(state->rank == 0));
    /* UCX makes the files behind its shared memory in this folder, so that a killed process leaves
     * nothing that the next one does not remove. UCX 1.13 takes it from the environment only. */
    nd_shm_folders_clean();
    nd_shm_folder_make(folder);
    setenv("UCX_POSIX_DIR", folder[0] ? folder : shared_memory, 1);
    ND_TRY(read_config(&config));
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES |
                                               UCP_PARAM_FIELD_ESTIMATED_NUM_EPS |
                                               UCP_PARAM_FIELD_NAME,
                                 .features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP,
                                 .estimated_num_eps = (size_t)state->size,
                                 .name = "ndtrain"};
    nd_status status =
        ND_UCX(ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &state->context));
    nd_ucx.ucp_config_release(config);
    ND_TRY(status);
    const ucp_worker_params_t worker_params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_EVENTS,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
        .events = UCP_WAKEUP_TAG_RECV | UCP_WAKEUP_TAG_SEND | UCP_WAKEUP_RX | UCP_WAKEUP_TX};
    ND_TRY(ND_UCX(ucp_worker_create(state->context, &worker_params, &state->worker)));
    int fd = -1;
    ND_TRY(ND_UCX(ucp_worker_get_efd(state->worker, &fd)));
    state->polled[0] = (struct pollfd){.fd = fd, .events = POLLIN};
    state->polled[1] = (struct pollfd){.fd = -1, .events = POLLIN};
    state->polled_count = 2;
    return ND_OK;
}

static nd_status exchange_places(ucx_state *state, const nd_transport_options *options)
{
    nd_status status;
    ucx_place own = {.host = state->host, .pid = (int32_t)getpid()}, *all = NULL;
    ND_TRY(ND_ALLOC(state->size, &all));
    ND_TRY_OUT(options->exchange(options->exchange_context, &own, all, sizeof own));
    for (int r = 0; r < state->size; r++) {
        state->peers[r].place = all[r];
    }
out:
    free(all);
    return status;
}

/* First the lengths, then the addresses, padded to the longest. */
static nd_status exchange_addresses(ucx_state *state, const nd_transport_options *options)
{
    nd_status status = ND_OK;
    ucp_address_t *address = NULL;
    size_t own = 0, *lengths = NULL;
    char *mine = NULL;
    ND_TRY(ND_UCX(ucp_worker_get_address(state->worker, &address, &own)));
    ND_TRY_OUT(ND_ALLOC(state->size, &lengths));
    ND_TRY_OUT(options->exchange(options->exchange_context, &own, lengths, sizeof own));
    for (int r = 0; r < state->size; r++) {
        if (lengths[r] > state->address_stride) {
            state->address_stride = lengths[r];
        }
    }
    ND_TRY_OUT(ND_ALLOC(state->address_stride, &mine));
    ND_TRY_OUT(ND_ALLOC(state->address_stride * (size_t)state->size, &state->addresses));
    memcpy(mine, address, own);
    ND_TRY_OUT(options->exchange(options->exchange_context, mine, state->addresses,
                                 state->address_stride));
out:
    free(lengths);
    free(mine);
    nd_ucx.ucp_worker_release_address(state->worker, address);
    return status;
}

static nd_status fill_state(ucx_state *state, const nd_transport_options *options)
{
    state->rank = options->rank;
    state->size = options->size;
    ND_TRY(ND_ALLOC(state->size, &state->peers));
    for (int r = 0; r < state->size; r++) {
        state->peers[r].pidfd = -1;
    }
    ND_TRY(ND_ALLOC(state->size + 2, &state->polled));
    ND_TRY(ND_ALLOC(state->size + 2, &state->polled_rank));
    /* Equal on ranks that share memory and can wake each other: UCX asks for the same IPC
     * namespace, its sockets belong to a network namespace, and a process of another user namespace
     * may not open the descriptors behind this one's memory. */
    ND_TRY(nd_report_host((const char *const[]){"pid", "ipc", "net", "user", NULL}, &state->host));
    state->host ^= options->apart ? (uint64_t)options->rank + 1 : 0;
    ND_TRY(exchange_places(state, options));
    ND_TRY(create_worker(state));
    ND_TRY(exchange_addresses(state, options));
    int near = 0;
    while (near < state->size && !is_remote(state, near)) {
        near++;
    }
    if (near == state->size) {
        return ND_OK;
    }
    nd_comm_network network = {0};
    ND_TRY(options->network(options->exchange_context, &network));
    return nd_net_open(options, &network, &state->polled[1].fd, &state->net);
}

nd_status nd_transport_open_ucx(const nd_transport_options *options, nd_transport **out)
{
    ND_ASSERT(options->progress && options->exchange && options->timeout_seconds > 0);
    if (options->size > 1 << ND_TAG_RANK_BITS) {
        return nd_fail(ND_ERR_CONFIG, "%d ranks are more than the %d that message tags number",
                       options->size, 1 << ND_TAG_RANK_BITS);
    }
    nd_transport *transport = NULL;
    ND_TRY(nd_p2p_transport_create(&ucx_p2p, options, sizeof(ucx_state), &transport));
    nd_status status = fill_state(state_of(transport), options);
    if (status != ND_OK) { /* so that it does not take leave of ranks that it has not met */
        ((nd_p2p_transport *)transport->native)->failed = status;
        nd_transport_close(transport);
        return status;
    }
    *out = transport;
    return ND_OK;
}

nd_status nd_transport_check_ucx_room(int64_t local_workers)
{
    /* Two segments of a worker: 4,300,800 and 12,288 bytes with UCX 1.13. */
    const uint64_t each = 4313088;
    struct statvfs fs;
    nd_shm_folders_clean();
    if (statvfs(shared_memory, &fs) != 0) {
        return errno == ENOENT || errno == ENOTDIR
                   ? ND_OK
                   : nd_fail(ND_ERR_IO, "%s cannot be read: %s", shared_memory, strerror(errno));
    }
    uint64_t room = (uint64_t)fs.f_bavail * fs.f_frsize, needed = each * (uint64_t)local_workers;
    if (room >= needed) {
        return ND_OK;
    }
    return nd_fail(
        ND_ERR_RESOURCE,
        "%s has room for %.1f MiB, but the shared memory of %lld workers needs %.1f MiB; "
        "enlarge it (docker run --shm-size, mount -o remount,size=)",
        shared_memory, (double)room / 0x1p20, (long long)local_workers, (double)needed / 0x1p20);
}

// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/store.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zstd.h>
#include <zstd_errors.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/thread.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/channel.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/pmix.h"
#include "runtime/rdzv/store_server.h"
#include "runtime/rdzv/uv.h"

struct nd_store {
    nd_gate gate; /* closed: a request is open, and its thread uses what follows until its answer */
    int world_size;
    _Atomic double timeout_seconds;
    uint32_t request;
    nd_wire_buffer out;
    nd_channel *channel;
    struct store_thread *thread;           /* rank 0 of a start without ndlaunch */
    char key_path[ND_SHARED_KEY_PATH_MAX]; /* private key file to remove, or "" */
    nd_thread watcher;                     /* of the connection to rank 0 */
    nd_monitor watched;
    bool hosted; /* by rank 0 */
    nd_store_watch watch;
};

/* At the deadline of an exchange the store answers which ranks are missing; a store that has not
 * answered after this margin more is gone. */
static const int64_t margin_ns = 3000000000;

static nd_status send_request(nd_store *store, int64_t deadline)
{
    nd_status status = nd_wire_end(&store->out);
    if (status == ND_OK) {
        status = nd_channel_send(store->channel, &store->out, deadline);
    }
    store->out.size = 0;
    store->out.failed = false;
    return status;
}

/* The next answer to the open request, of the type that it must have. */
static nd_status receive(nd_store *store, nd_wire_type type, int64_t deadline, nd_wire_frame *frame,
                         nd_wire_cursor *cursor)
{
    uint32_t request;
    do { /* an answer to an earlier request is for a caller that has given up */
        ND_TRY(nd_channel_receive(store->channel, deadline, frame));
        *cursor = nd_wire_body(frame);
        request = nd_wire_get_u32(cursor);
    } while (frame->type != ND_WIRE_NONE && request != 0 && request < store->request);
    if (frame->type == ND_WIRE_NONE) {
        return nd_fail(ND_ERR_HANG, "the store has not answered request %u in time",
                       store->request);
    }
    if (frame->type == ND_WIRE_ERROR) {
        return nd_channel_error(frame);
    }
    if (frame->type != type || request != store->request) {
        return nd_fail(ND_ERR_IO, "the store answered request %u with a message of type %d",
                       store->request, (int)frame->type);
    }
    return ND_OK;
}

/* The deadline of a call that begins now. */
static int64_t deadline_of(const nd_store *store)
{
    return nd_clock_after(store->timeout_seconds) + margin_ns;
}

static void begin_request(nd_store *store, nd_wire_type type)
{
    store->request++;
    nd_wire_begin(&store->out, type);
    nd_wire_put_u32(&store->out, store->request);
}

static nd_status damaged(const char *key)
{
    return nd_fail(ND_ERR_IO, "the store sent a damaged answer about \"%s\"", key);
}

/* Asks about one key; *answer is then behind its request number. The gate is closed. */
static nd_status ask(nd_store *store, nd_wire_type type, const char *key, const void *value,
                     size_t bytes, int64_t deadline, nd_wire_cursor *answer)
{
    nd_wire_frame frame;
    const bool gets = type == ND_WIRE_GET;
    ND_ASSERT(strlen(key) < ND_WIRE_TEXT_MAX);
    begin_request(store, type);
    nd_wire_put_text(&store->out, key);
    if (!gets) {
        nd_wire_put_blob(&store->out, value, bytes);
    }
    ND_TRY(send_request(store, deadline));
    return receive(store, gets ? ND_WIRE_VALUE : ND_WIRE_DONE, deadline, &frame, answer);
}

/* The packed result of an exchange, as far as it has come. */
typedef struct result {
    uint8_t *bytes; /* [size]; NULL before the first slice */
    size_t size, got;
} result;

static nd_status take_slice(result *r, const char *name, nd_wire_cursor *cursor)
{
    size_t count;
    uint64_t offset = nd_wire_get_u64(cursor), size = nd_wire_get_u64(cursor);
    const uint8_t *data = nd_wire_get_blob(cursor, &count);
    if (!nd_wire_finished(cursor) || offset != r->got || count == 0 || count > size - offset ||
        (r->bytes && size != r->size)) {
        return damaged(name);
    }
    ND_TRY(r->bytes ? ND_OK : ND_ALLOC(size, &r->bytes));
    r->size = size;
    memcpy(r->bytes + r->got, data, count);
    r->got += count;
    return ND_OK;
}

/* Nothing is written beyond `count` bytes. */
static nd_status unpack(const result *r, void *out, size_t count)
{
    size_t got = ZSTD_decompress(out, count, r->bytes, r->size);
    if (ZSTD_isError(got) && ZSTD_getErrorCode(got) == ZSTD_error_memory_allocation) {
        return nd_fail_memory("the result of an exchange");
    }
    if (ZSTD_isError(got) || got != count) {
        return nd_fail(ND_ERR_IO, "the store sent a damaged result of an exchange");
    }
    return ND_OK;
}

static nd_status exchange(nd_store *store, const char *name, const void *send, void *recv,
                          size_t bytes)
{
    int64_t deadline = deadline_of(store);
    result r = {0};
    nd_status status;
    ND_ASSERT(strlen(name) < ND_WIRE_TEXT_MAX);
    begin_request(store, ND_WIRE_EXCHANGE);
    nd_wire_put_u64(&store->out, (uint64_t)(store->timeout_seconds * 1e3));
    nd_wire_put_text(&store->out, name);
    nd_wire_put_blob(&store->out, send, bytes);
    ND_TRY(send_request(store, deadline));
    do {
        nd_wire_frame frame;
        nd_wire_cursor cursor;
        status = receive(store, ND_WIRE_SLICE, deadline, &frame, &cursor);
        status = status == ND_OK ? take_slice(&r, name, &cursor) : status;
    } while (status == ND_OK && r.got < r.size);
    if (status == ND_OK) {
        status = unpack(&r, recv, (size_t)store->world_size * bytes);
    }
    free(r.bytes);
    return status;
}

/* Waits until no other thread has a request open, and keeps them out until nd_gate_leave. */
static nd_status enter(nd_store *store, int64_t deadline)
{
    return nd_gate_enter(&store->gate, deadline)
               ? ND_OK
               : nd_fail(ND_ERR_HANG, "another thread still waits for the store");
}

/* The gate is closed. */
static nd_status set_value(nd_store *store, const char *key, const void *value, size_t bytes,
                           int64_t deadline)
{
    nd_wire_cursor answer;
    ND_TRY(ask(store, ND_WIRE_SET, key, value, bytes, deadline, &answer));
    return nd_wire_finished(&answer) ? ND_OK : damaged(key);
}

nd_status nd_store_set(nd_store *store, const char *key, const void *value, size_t bytes)
{
    if (!store) { /* nobody else reads it */
        return ND_OK;
    }
    ND_TRY(enter(store, deadline_of(store)));
    nd_status status = set_value(store, key, value, bytes, deadline_of(store));
    nd_gate_leave(&store->gate);
    return status;
}

static nd_status get_value(nd_store *store, const char *key, void *value, size_t *bytes)
{
    nd_wire_cursor answer;
    size_t count;
    const double seconds = store->timeout_seconds;
    nd_status status = ask(store, ND_WIRE_GET, key, NULL, 0, nd_clock_after(seconds), &answer);
    if (status == ND_ERR_HANG) {
        return nd_fail(status, "nobody set the key '%.200s' within %.3g s", key, seconds);
    }
    if (status != ND_OK) {
        return nd_fail_context(status, "waiting for the key '%.200s'", key);
    }
    const uint8_t *data = nd_wire_get_blob(&answer, &count);
    if (!nd_wire_finished(&answer)) {
        return damaged(key);
    }
    if (count > *bytes) {
        return nd_fail(ND_ERR_INTERNAL, "the value of the key %s has %zu bytes, %zu fit", key,
                       count, *bytes);
    }
    if (count > 0) {
        memcpy(value, data, count);
    }
    *bytes = count;
    return ND_OK;
}

nd_status nd_store_get(nd_store *store, const char *key, void *value, size_t *bytes)
{
    ND_TRY(enter(store, deadline_of(store)));
    nd_status status = get_value(store, key, value, bytes);
    nd_gate_leave(&store->gate);
    return status;
}

nd_status nd_store_exchange(nd_store *store, const char *name, const void *send, void *recv,
                            size_t bytes)
{
    if (!store) {
        if (bytes > 0) {
            memmove(recv, send, bytes);
        }
        return ND_OK;
    }
    ND_TRY(enter(store, deadline_of(store)));
    nd_status status = exchange(store, name, send, recv, bytes);
    nd_gate_leave(&store->gate);
    return status;
}

nd_status nd_store_barrier(nd_store *store, const char *name)
{
    return nd_store_exchange(store, name, NULL, NULL, 0);
}

nd_status nd_store_check(nd_store *store, double seconds)
{
    const int64_t deadline = nd_clock_after(seconds);
    if (!store) {
        return ND_OK;
    }
    ND_TRY(enter(store, deadline));
    nd_status status = set_value(store, "check", NULL, 0, deadline);
    nd_gate_leave(&store->gate);
    return status;
}

/* Rank 0. */

/*
 * The store inside a worker: rank 0 of a start without ndlaunch runs store_server.h in a thread of
 * its own. The thread uses only its loop; the caller's thread only starts and stops it.
 */
typedef struct store_thread {
    nd_thread native;
    nd_monitor monitor; /* of the thread's end alone */
    uv_loop_t loop;
    uv_timer_t tick;
    nd_store_server *server;
    _Atomic int64_t leave_by; /* nd_clock_ns; 0: stay */
    nd_store_watch watch;
    char left_text[2 * ND_WIRE_TEXT_MAX]; /* for `lost`, or "" */
} store_thread;

static void notice(void *context, const char *line)
{
    nd_log_warning("%s", line);
}

static void on_left(void *context, nd_peer *peer, nd_wire_role role, int index, bool clean)
{
    store_thread *thread = context;
    bool closing = atomic_load(&thread->leave_by) != 0;
    if (role == ND_WIRE_WORKER && index > 0 && !clean && !closing && !thread->left_text[0]) {
        snprintf(thread->left_text, sizeof thread->left_text,
                 "%s was lost: it ended without a goodbye", nd_peer_name(peer));
    }
}

static void on_tick(uv_timer_t *timer)
{
    store_thread *thread = timer->data;
    int64_t leave_by = atomic_load(&thread->leave_by);
    if (thread->watch.lost && leave_by == 0 && thread->left_text[0]) {
        /* A tick later than the loss: other ranks have their answers about it by now. */
        thread->watch.lost(thread->watch.context, thread->left_text);
        thread->left_text[0] = '\0';
    }
    bool empty = nd_server_members(nd_store_server_engine(thread->server), ND_WIRE_WORKER) == 0;
    if (leave_by != 0 && (empty || nd_clock_ns() >= leave_by)) {
        nd_store_server_close(thread->server);
        uv_close((uv_handle_t *)timer, NULL);
    }
}

static void run_loop(void *argument)
{
    store_thread *thread = argument;
    uv_run(&thread->loop, UV_RUN_DEFAULT);
}

/* The first of the name's addresses that can be bound. */
static nd_status open_server(store_thread *thread, const nd_identity *identity, const uint8_t *key)
{
    nd_store_server_options options = {
        .loop = &thread->loop,
        .server = {.version = ND_VERSION,
                   .run_id = identity->run_id,
                   .epoch = (uint32_t)identity->restart_epoch,
                   .world_size = identity->world_size,
                   .nnodes = 1},
        .hooks = {.context = thread, .notice = notice, .left = on_left},
    };
    nd_address addresses[ND_ADDRESS_MAX];
    int count;
    ND_TRY(nd_address_resolve(identity->master_addr, identity->master_port, addresses, &count));
    memcpy(options.key, key, ND_KEY_BYTES);
    nd_status status = ND_OK;
    for (int i = 0; i < count; i++) {
        options.address = addresses[i];
        status = nd_store_server_open(&options, &thread->server);
        if (status == ND_OK) {
            break;
        }
        uv_run(&thread->loop, UV_RUN_NOWAIT); /* frees what the failed attempt opened */
    }
    explicit_bzero(options.key, sizeof options.key);
    return status;
}

/* Listens at the identity's master address and port, which it sets to what the others connect to;
 * port 0: the system chooses. The watch, which is copied, hears of every rank but rank 0, which is
 * this process; of losses that come together it hears of the first. */
static nd_status start_thread(nd_identity *identity, const uint8_t key[ND_KEY_BYTES],
                              nd_store_watch watch, store_thread **out)
{
    store_thread *thread;
    ND_TRY(ND_ALLOC(1, &thread));
    thread->watch = watch;
    thread->monitor = (nd_monitor)ND_MONITOR_INIT;
    nd_status status = ND_UV(uv_loop_init(&thread->loop));
    if (status != ND_OK) {
        free(thread);
        return status;
    }
    ND_TRY_OUT(open_server(thread, identity, key));
    snprintf(identity->master_addr, sizeof identity->master_addr, "%s",
             nd_store_server_address(thread->server));
    identity->master_port = nd_store_server_port(thread->server);
    ND_TRY_OUT(ND_UV(uv_timer_init(&thread->loop, &thread->tick)));
    thread->tick.data = thread;
    ND_TRY_OUT(ND_UV(uv_timer_start(&thread->tick, on_tick, 20, 20)));
    status =
        nd_thread_start(&thread->native, &thread->monitor, "the store's thread", run_loop, thread);
out:
    if (status != ND_OK) {
        nd_store_server_close(thread->server);
        if (thread->tick.data) {
            uv_close((uv_handle_t *)&thread->tick, NULL);
        }
        uv_run(&thread->loop, UV_RUN_DEFAULT);
        uv_loop_close(&thread->loop);
        free(thread);
        return status;
    }
    *out = thread;
    return ND_OK;
}

/* Connections. */

static nd_status connect_store(nd_store *store, const nd_identity *identity,
                               const uint8_t key[ND_KEY_BYTES])
{
    nd_status status = nd_channel_open(identity->master_addr, identity->master_port, key,
                                       store->timeout_seconds, &store->channel);
    if (status == ND_ERR_HANG && identity->source == ND_IDENTITY_PMIX) {
        (void)nd_fail_context(status, "connecting to the address that rank 0 has; "
                                      "--rdzv-endpoint ADDRESS:0 gives it another one");
    }
    ND_TRY(status);
    nd_hello hello = {.version = ND_VERSION,
                      .run_id = identity->run_id,
                      .host = identity->host,
                      .epoch = (uint32_t)identity->restart_epoch,
                      .role = ND_WIRE_WORKER,
                      .index = identity->rank};
    char run_id[ND_WIRE_TEXT_MAX];
    int world_size;
    ND_TRY(nd_channel_hello(store->channel, &hello, deadline_of(store), run_id, sizeof run_id,
                            &world_size));
    if (world_size != identity->world_size) {
        return nd_fail(ND_ERR_CONFIG, "WORLD_SIZE is %d here and %d in the store",
                       identity->world_size, world_size);
    }
    return ND_OK;
}

/* Waits for the end of the connection, and reads nothing from it. */
static void watch_rank_0(void *context)
{
    nd_store *store = context;
    struct pollfd p = {.fd = nd_channel_fd(store->channel), .events = POLLRDHUP};
    while (poll(&p, 1, -1) < 0 && errno == EINTR) {
    }
    if (!atomic_load(&store->watcher.stop)) {
        store->watch.lost(store->watch.context,
                          "rank 0, which hosts the store, was lost: it ended without a goodbye");
    }
}

/* The key, which rank 0 makes, and where its store is, for workers that PMIx started. */
typedef struct place {
    uint8_t key[ND_KEY_BYTES];
    char address[ND_ADDRESS_TEXT_MAX];
    int32_t port;
} place;

/* An address that is set already (launch.rdzv_endpoint) is where rank 0 listens. */
static nd_status host_for_pmix(nd_store *store, nd_identity *id, place *where)
{
    if (!id->master_addr[0]) {
        ND_TRY(nd_address_choose(id->host, id->nnodes, where->address));
        snprintf(id->master_addr, sizeof id->master_addr, "%s", where->address);
    }
    ND_TRY(nd_key_random(where->key));
    ND_TRY(start_thread(id, where->key, store->watch, &store->thread));
    snprintf(where->address, sizeof where->address, "%.*s", ND_ADDRESS_TEXT_MAX - 1,
             id->master_addr); /* which is numeric now */
    where->port = id->master_port;
    nd_log_debug("rank 0 hosts the store at %s port %d", where->address, where->port);
    return ND_OK;
}

static nd_status find_store_of_pmix(nd_store *store, nd_identity *id, uint8_t key[ND_KEY_BYTES])
{
    place where = {0};
    nd_status status = id->rank == 0 ? host_for_pmix(store, id, &where) : ND_OK;
    if (status == ND_OK) {
        status = nd_pmix_share(id->pmix, "place of the store", id->rank == 0, &where, sizeof where,
                               store->timeout_seconds);
    }
    if (status == ND_OK) {
        memcpy(key, where.key, ND_KEY_BYTES);
        where.address[sizeof where.address - 1] = '\0';
        snprintf(id->master_addr, sizeof id->master_addr, "%s", where.address);
        id->master_port = where.port;
    }
    explicit_bzero(&where, sizeof where);
    return status;
}

/* The key of the job and, where a rank hosts the store, its place, on rank 0 with the store itself.
 * *again: what is wrong may be right soon. */
static nd_status find_store(nd_store *store, nd_identity *id, uint8_t key[ND_KEY_BYTES],
                            bool *again)
{
    char private_file[ND_SHARED_KEY_PATH_MAX];
    *again = false;
    if (id->source == ND_IDENTITY_PMIX) {
        return find_store_of_pmix(store, id, key);
    }
    if (id->source == ND_IDENTITY_NDLAUNCH) {
        return id->key_fd < 0
                   ? nd_fail(ND_ERR_CONFIG, "ND_KEY_FD is missing; start workers with ndlaunch")
               : pread(id->key_fd, key, ND_KEY_BYTES, 0) == ND_KEY_BYTES
                   ? ND_OK
                   : nd_fail(ND_ERR_CONFIG,
                             "the inherited descriptor %d (ND_KEY_FD) does not hold the job key; "
                             "start workers with ndlaunch",
                             id->key_fd);
    }
    nd_status status = nd_shared_key(id, key, private_file);
    if (id->rank > 0) {
        /* A private file may be missing, or a former job's, until rank 0 has replaced it. */
        *again = private_file[0] != '\0';
        return status;
    }
    ND_TRY(status);
    snprintf(store->key_path, sizeof store->key_path, "%s", private_file);
    return start_thread(id, key, store->watch, &store->thread);
}

static nd_status open_store(nd_store *store, const nd_identity *identity)
{
    nd_identity id = *identity;
    uint8_t key[ND_KEY_BYTES];
    bool again;
    nd_status status;
    for (int64_t deadline = nd_clock_after(store->timeout_seconds);;) {
        status = find_store(store, &id, key, &again);
        status = status == ND_OK ? connect_store(store, &id, key) : status;
        explicit_bzero(key, sizeof key);
        if (!again || status != ND_ERR_CONFIG || store->channel || nd_clock_ns() >= deadline) {
            break;
        }
        usleep(50000);
    }
    if (again && status == ND_ERR_CONFIG && !store->channel) {
        char why[ND_ERROR_MESSAGE_MAX];
        snprintf(why, sizeof why, "%s", nd_error_last()->message);
        status = nd_fail(ND_ERR_HANG, "rank 0 was not reached within %.3g s: %s",
                         store->timeout_seconds, why);
    }
    if (status == ND_OK && store->hosted && !store->thread && store->watch.lost) {
        status = nd_thread_start(&store->watcher, &store->watched, "the thread that watches rank 0",
                                 watch_rank_0, store);
    }
    return status;
}

nd_status nd_store_open(const nd_identity *identity, double timeout_seconds,
                        const nd_store_watch *watch, nd_store **out)
{
    nd_store *store;
    *out = NULL;
    if (identity->source == ND_IDENTITY_SINGLE) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(1, &store));
    store->gate = (nd_gate)ND_GATE_INIT;
    store->watched = (nd_monitor)ND_MONITOR_INIT;
    store->world_size = identity->world_size;
    store->timeout_seconds = timeout_seconds;
    store->watch = watch ? *watch : (nd_store_watch){0};
    store->hosted = identity->source != ND_IDENTITY_NDLAUNCH;
    nd_status status = open_store(store, identity);
    if (status != ND_OK) {
        nd_store_close(store, true);
        return status;
    }
    *out = store;
    return ND_OK;
}

void nd_store_set_timeout(nd_store *store, double timeout_seconds)
{
    store->timeout_seconds = timeout_seconds;
}

void nd_store_close(nd_store *store, bool failed)
{
    if (!store) {
        return;
    }
    const bool goodbye = store->channel && (!failed || !store->hosted);
    if (store->watcher.started) {
        atomic_store(&store->watcher.stop, true);
        shutdown(nd_channel_fd(store->channel), SHUT_RD); /* which wakes it */
        nd_thread_join(&store->watcher, INFINITY);
    }
    if (goodbye) {
        nd_wire_begin(&store->out, ND_WIRE_BYE);
        send_request(store, nd_clock_ns() + margin_ns);
    }
    nd_channel_close(store->channel);
    store_thread *thread = store->thread;
    if (thread) { /* it ends once the other ranks have left the store, or at the deadline */
        const double seconds = goodbye ? store->timeout_seconds : 0;
        atomic_store(&thread->leave_by, nd_clock_ns() + (int64_t)(seconds * 1e9) + 1);
        nd_thread_join(&thread->native, INFINITY);
        nd_monitor_fini(&thread->monitor);
        uv_loop_close(&thread->loop);
        free(thread);
    }
    if (store->key_path[0]) {
        unlink(store->key_path);
    }
    nd_wire_buffer_fini(&store->out);
    nd_monitor_fini(&store->gate.monitor);
    nd_monitor_fini(&store->watched);
    free(store);
}

nd_status nd_store_network(const nd_store *store, nd_address *own, nd_tls_context **client,
                           nd_tls_context **server)
{
    return nd_channel_network(store->channel, own, client, server);
}

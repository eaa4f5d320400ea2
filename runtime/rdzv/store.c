// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/store.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/thread.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/channel.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/pmix.h"
#include "runtime/rdzv/store_thread.h"

struct nd_store {
    nd_gate gate; /* closed: a request is open, and its thread uses what follows until its answer */
    int world_size;
    _Atomic double timeout_seconds;
    uint32_t request;
    nd_wire_buffer out;
    nd_channel *channel;
    nd_store_thread *thread;               /* rank 0 of a start without ndlaunch */
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

/* The answer to a request whose caller has given up. */
static bool is_late(const nd_store *store, const nd_wire_frame *frame)
{
    nd_wire_cursor cursor = nd_wire_body(frame);
    uint32_t request = nd_wire_get_u32(&cursor);
    return frame->type != ND_WIRE_NONE && request != 0 && request < store->request;
}

/* The next answer to the open request, of the type that it must have. */
static nd_status receive(nd_store *store, nd_wire_type type, int64_t deadline, nd_wire_frame *frame,
                         nd_wire_cursor *cursor)
{
    do {
        ND_TRY(nd_channel_receive(store->channel, deadline, frame));
    } while (is_late(store, frame));
    if (frame->type == ND_WIRE_NONE) {
        return nd_fail(ND_ERR_HANG, "the store has not answered request %u in time",
                       store->request);
    }
    if (frame->type == ND_WIRE_ERROR) {
        return nd_channel_error(frame);
    }
    *cursor = nd_wire_body(frame);
    uint32_t request = nd_wire_get_u32(cursor);
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
        status = nd_unpack(r.bytes, r.size, recv, (size_t)store->world_size * bytes);
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
static nd_status set(nd_store *store, const char *key, const void *value, size_t bytes,
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
    nd_status status = set(store, key, value, bytes, deadline_of(store));
    nd_gate_leave(&store->gate);
    return status;
}

static nd_status get(nd_store *store, const char *key, void *value, size_t *bytes)
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
    nd_status status = get(store, key, value, bytes);
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
    nd_status status = set(store, "check", NULL, 0, deadline);
    nd_gate_leave(&store->gate);
    return status;
}

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

/* The key of the job and, where a rank hosts the store, its place, on rank 0 with the store itself.
 * *again: what is wrong may be right soon. */
static nd_status find_store(nd_store *store, nd_identity *id, uint8_t key[ND_KEY_BYTES],
                            bool *again)
{
    char path[ND_SHARED_KEY_PATH_MAX];
    bool private_file;
    *again = false;
    if (id->source == ND_IDENTITY_PMIX) {
        return nd_pmix_meet(id, store->timeout_seconds, key, store->watch, &store->thread);
    }
    if (id->source == ND_IDENTITY_NDLAUNCH) {
        return id->key_fd >= 0
                   ? nd_key_read_fd(id->key_fd, key)
                   : nd_fail(ND_ERR_CONFIG, "ND_KEY_FD is missing; start workers with ndlaunch");
    }
    ND_TRY(nd_shared_key_path(id, path, &private_file));
    if (id->rank > 0) {
        /* A private file may be missing, or a former job's, until rank 0 has replaced it. */
        *again = private_file;
        return nd_key_read_file(path, key);
    }
    ND_TRY(private_file ? nd_shared_key_publish(path, key) : nd_key_read_file(path, key));
    if (private_file) {
        snprintf(store->key_path, sizeof store->key_path, "%s", path);
    }
    return nd_store_thread_start(id, key, store->watch, &store->thread);
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
        nd_store_abandon(store);
        return status;
    }
    *out = store;
    return ND_OK;
}

void nd_store_set_timeout(nd_store *store, double timeout_seconds)
{
    store->timeout_seconds = timeout_seconds;
}

static void close_store(nd_store *store, bool goodbye)
{
    if (!store) {
        return;
    }
    if (store->watcher.started) {
        atomic_store(&store->watcher.stop, true);
        shutdown(nd_channel_fd(store->channel), SHUT_RD); /* which wakes it */
        nd_thread_join(&store->watcher, INFINITY);
    }
    if (store->channel && goodbye) {
        nd_wire_begin(&store->out, ND_WIRE_BYE);
        send_request(store, nd_clock_ns() + margin_ns);
    }
    nd_channel_close(store->channel);
    nd_store_thread_stop(store->thread, goodbye ? store->timeout_seconds : 0);
    if (store->key_path[0]) {
        unlink(store->key_path);
    }
    nd_wire_buffer_fini(&store->out);
    nd_gate_fini(&store->gate);
    nd_monitor_fini(&store->watched);
    free(store);
}

void nd_store_close(nd_store *store)
{
    close_store(store, true);
}

void nd_store_abandon(nd_store *store)
{
    close_store(store, store && store->channel && !store->hosted);
}

const nd_channel *nd_store_channel(const nd_store *store)
{
    return store->channel;
}

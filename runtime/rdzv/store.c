// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/store.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/channel.h"
#include "runtime/rdzv/failure_page.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/pack.h"
#include "runtime/rdzv/pmix.h"
#include "runtime/rdzv/server.h"
#include "runtime/rdzv/store_thread.h"

struct nd_store {
    pthread_mutex_t lock; /* of busy */
    pthread_cond_t idle;
    bool busy; /* a request is open: its thread uses what follows until it has the answer */
    int rank, world_size;
    _Atomic double timeout_seconds;
    uint32_t request;
    nd_wire_buffer out;
    nd_channel *channel; /* or, in a world of one, the engine itself: */
    nd_server *server;
    nd_peer *self;
    nd_wire_parser answers;
    nd_store_thread *thread;               /* rank 0 of a start without ndlaunch */
    char key_path[ND_SHARED_KEY_PATH_MAX]; /* private key file to remove, or "" */
    nd_pmix *pmix;                         /* exchanges go over it; borrowed, or NULL */
    nd_watch *watch;                       /* of the connection to rank 0 */
    bool hosted;                           /* by rank 0 */
    nd_store_lost *lost;
    void *lost_context;
    char first_failure[ND_FAILURE_FIRST_MAX]; /* that the store sent, or "" */
};

/* At the deadline the store answers which ranks are missing; a store that has not answered after
 * this margin more is gone. */
static const int64_t margin_ns = 3000000000;

static nd_status send_request(nd_store *store, int64_t deadline)
{
    nd_status status = nd_wire_end(&store->out);
    if (status == ND_OK && store->channel) {
        status = nd_channel_send(store->channel, &store->out, deadline);
    } else if (status == ND_OK) {
        nd_server_receive(store->server, store->self, store->out.data, store->out.size, 0);
    }
    store->out.size = 0;
    store->out.failed = false;
    return status;
}

static nd_status next_frame(nd_store *store, int64_t deadline, nd_wire_frame *frame)
{
    if (store->channel) {
        return nd_channel_receive(store->channel, deadline, frame);
    }
    ND_TRY(nd_wire_next(&store->answers, frame));
    if (frame->type ==
        ND_WIRE_NONE) { /* the rest of a long exchange, or a wait that no other rank will end */
        nd_server_drained(store->server, store->self);
        nd_server_tick(store->server, INT64_MAX);
        ND_TRY(nd_wire_next(&store->answers, frame));
        if (frame->type == ND_WIRE_NONE) { /* the engine answers, or gives the request up */
            return nd_fail_memory("an answer of the store");
        }
    }
    return ND_OK;
}

static void keep_first_failure(nd_store *store, const nd_wire_frame *frame)
{
    nd_wire_cursor cursor = nd_wire_body(frame);
    size_t count;
    const uint8_t *text = nd_wire_get_blob(&cursor, &count);
    if (nd_wire_finished(&cursor)) {
        snprintf(store->first_failure, sizeof store->first_failure, "%.*s", (int)count,
                 (const char *)text);
    }
}

/* A frame that does not answer the open request: news, or the late answer to a request whose caller
 * has given up. */
static bool is_other(nd_store *store, const nd_wire_frame *frame)
{
    nd_wire_cursor cursor = nd_wire_body(frame);
    if (frame->type == ND_WIRE_FAILED) {
        keep_first_failure(store, frame);
        return true;
    }
    uint32_t request = nd_wire_get_u32(&cursor);
    return frame->type != ND_WIRE_NONE && request != 0 && request < store->request;
}

/* The next answer to the open request, of the type that it must have. */
static nd_status receive(nd_store *store, nd_wire_type type, int64_t deadline, nd_wire_frame *frame,
                         nd_wire_cursor *cursor)
{
    do {
        ND_TRY(next_frame(store, deadline, frame));
    } while (is_other(store, frame));
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
    return nd_clock_ns() + (int64_t)(store->timeout_seconds * 1e9) + margin_ns;
}

static void begin_request(nd_store *store, nd_wire_type type, bool waits)
{
    store->request++;
    nd_wire_begin(&store->out, type);
    nd_wire_put_u32(&store->out, store->request);
    if (waits) {
        nd_wire_put_u64(&store->out, (uint64_t)(store->timeout_seconds * 1e3));
    }
}

static nd_status check_key(const char *key)
{
    if (strlen(key) >= ND_WIRE_TEXT_MAX) {
        return nd_fail(ND_ERR_INTERNAL, "a store key of %zu characters is above the limit of %d",
                       strlen(key), ND_WIRE_TEXT_MAX - 1);
    }
    return ND_OK;
}

static nd_status damaged(const char *what)
{
    return nd_fail(ND_ERR_IO, "the store sent a damaged answer to %s", what);
}

static nd_status set(nd_store *store, const char *key, const void *value, size_t bytes)
{
    nd_wire_frame frame;
    nd_wire_cursor cursor;
    int64_t deadline = deadline_of(store);
    ND_TRY(check_key(key));
    begin_request(store, ND_WIRE_SET, false);
    nd_wire_put_text(&store->out, key);
    nd_wire_put_blob(&store->out, value, bytes);
    ND_TRY(send_request(store, deadline));
    return receive(store, ND_WIRE_DONE, deadline, &frame, &cursor);
}

static nd_status set_once(nd_store *store, const char *key, const void *value, size_t bytes,
                          bool *set)
{
    nd_wire_frame frame;
    nd_wire_cursor cursor;
    int64_t deadline = deadline_of(store);
    ND_TRY(check_key(key));
    begin_request(store, ND_WIRE_SET_ONCE, false);
    nd_wire_put_text(&store->out, key);
    nd_wire_put_blob(&store->out, value, bytes);
    ND_TRY(send_request(store, deadline));
    ND_TRY(receive(store, ND_WIRE_SUM, deadline, &frame, &cursor));
    uint64_t sum = nd_wire_get_u64(&cursor);
    if (!nd_wire_finished(&cursor)) {
        return damaged("set once");
    }
    *set = sum == 1;
    return ND_OK;
}

static nd_status get(nd_store *store, const char *key, void *value, size_t *bytes)
{
    nd_wire_frame frame;
    nd_wire_cursor cursor;
    int64_t deadline = deadline_of(store);
    ND_TRY(check_key(key));
    begin_request(store, ND_WIRE_GET, true);
    nd_wire_put_text(&store->out, key);
    ND_TRY(send_request(store, deadline));
    ND_TRY(receive(store, ND_WIRE_VALUE, deadline, &frame, &cursor));
    size_t count;
    const uint8_t *data = nd_wire_get_blob(&cursor, &count);
    if (!nd_wire_finished(&cursor)) {
        return damaged("get");
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

static nd_status add(nd_store *store, const char *key, int64_t delta, int64_t deadline,
                     int64_t *out)
{
    nd_wire_frame frame;
    nd_wire_cursor cursor;
    ND_TRY(check_key(key));
    begin_request(store, ND_WIRE_ADD, false);
    nd_wire_put_text(&store->out, key);
    nd_wire_put_u64(&store->out, (uint64_t)delta);
    ND_TRY(send_request(store, deadline));
    ND_TRY(receive(store, ND_WIRE_SUM, deadline, &frame, &cursor));
    int64_t sum = (int64_t)nd_wire_get_u64(&cursor);
    if (!nd_wire_finished(&cursor)) {
        return damaged("add");
    }
    *out = sum;
    return ND_OK;
}

/* What a rank has of an exchange's result. */
typedef struct result {
    uint8_t *bytes; /* [size] the caller's, or `packed` */
    uint8_t *packed;
    size_t size, got;
} result;

/* At least one slice, also of nothing; the first one says whether the result is packed. */
static nd_status take_slice(result *r, nd_wire_cursor *cursor)
{
    size_t count;
    uint64_t offset = nd_wire_get_u64(cursor), packed = nd_wire_get_u64(cursor);
    const uint8_t *data = nd_wire_get_blob(cursor, &count);
    bool first = r->got == 0 && !r->packed;
    if (!nd_wire_finished(cursor) || offset != r->got ||
        (packed > 0 && (first ? packed >= r->size : packed != r->size)) ||
        (packed == 0 && r->packed)) {
        return damaged("an exchange");
    }
    if (packed > 0 && first) {
        r->size = packed;
        ND_TRY(ND_ALLOC(r->size, &r->packed));
        r->bytes = r->packed;
    }
    if (count > r->size - r->got || (count == 0 && r->size > 0)) {
        return damaged("an exchange");
    }
    if (count > 0) {
        memcpy(r->bytes + r->got, data, count);
    }
    r->got += count;
    return ND_OK;
}

static nd_status exchange(nd_store *store, const char *name, const void *send, void *recv,
                          size_t bytes)
{
    int64_t deadline = deadline_of(store);
    const size_t total = (size_t)store->world_size * bytes;
    result r = {.bytes = recv, .size = total};
    nd_status status;
    ND_TRY(check_key(name));
    begin_request(store, ND_WIRE_EXCHANGE, true);
    nd_wire_put_text(&store->out, name);
    nd_wire_put_blob(&store->out, send, bytes);
    ND_TRY(send_request(store, deadline));
    do {
        nd_wire_frame frame;
        nd_wire_cursor cursor;
        status = receive(store, ND_WIRE_SLICE, deadline, &frame, &cursor);
        status = status == ND_OK ? take_slice(&r, &cursor) : status;
    } while (status == ND_OK && r.got < r.size);
    if (status == ND_OK && r.packed) {
        status = nd_unpack(r.packed, r.size, recv, total);
    }
    free(r.packed);
    return status;
}

/* Waits until no other thread has a request open, and keeps them out until leave(). */
static nd_status enter(nd_store *store, int64_t deadline)
{
    const struct timespec until = {deadline / 1000000000, deadline % 1000000000};
    int code = 0;
    pthread_mutex_lock(&store->lock);
    while (store->busy && code == 0) {
        code = pthread_cond_timedwait(&store->idle, &store->lock, &until);
    }
    bool entered = !store->busy;
    store->busy = true;
    pthread_mutex_unlock(&store->lock);
    return entered ? ND_OK : nd_fail(ND_ERR_HANG, "another thread still waits for the store");
}

static void leave(nd_store *store)
{
    pthread_mutex_lock(&store->lock);
    store->busy = false;
    pthread_cond_signal(&store->idle);
    pthread_mutex_unlock(&store->lock);
}

/* The condition's deadlines are those of nd_clock_ns. */
static void init_lock(nd_store *store)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&store->idle, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&store->lock, NULL);
}

nd_status nd_store_set(nd_store *store, const char *key, const void *value, size_t bytes)
{
    ND_TRY(enter(store, deadline_of(store)));
    nd_status status = set(store, key, value, bytes);
    leave(store);
    return status;
}

nd_status nd_store_set_once(nd_store *store, const char *key, const void *value, size_t bytes,
                            bool *set)
{
    ND_TRY(enter(store, deadline_of(store)));
    nd_status status = set_once(store, key, value, bytes, set);
    leave(store);
    return status;
}

nd_status nd_store_get(nd_store *store, const char *key, void *value, size_t *bytes)
{
    ND_TRY(enter(store, deadline_of(store)));
    nd_status status = get(store, key, value, bytes);
    leave(store);
    return status;
}

nd_status nd_store_add(nd_store *store, const char *key, int64_t delta, int64_t *out)
{
    ND_TRY(enter(store, deadline_of(store)));
    nd_status status = add(store, key, delta, deadline_of(store), out);
    leave(store);
    return status;
}

nd_status nd_store_exchange(nd_store *store, const char *name, const void *send, void *recv,
                            size_t bytes)
{
    if (store->pmix) {
        return nd_pmix_exchange(store->pmix, name, send, recv, bytes, store->timeout_seconds);
    }
    ND_TRY(enter(store, deadline_of(store)));
    nd_status status = exchange(store, name, send, recv, bytes);
    leave(store);
    return status;
}

nd_status nd_store_barrier(nd_store *store, const char *name)
{
    return nd_store_exchange(store, name, NULL, NULL, 0);
}

nd_status nd_store_check(nd_store *store, double seconds)
{
    int64_t deadline = nd_clock_ns() + (int64_t)(seconds * 1e9), sum;
    ND_TRY(enter(store, deadline));
    nd_status status = add(store, "check", 0, deadline, &sum);
    leave(store);
    return status;
}

bool nd_store_first_failure(nd_store *store, char *text, size_t capacity)
{
    nd_wire_frame frame = {.type = ND_WIRE_NONE};
    text[0] = '\0';
    if (enter(store, deadline_of(store)) != ND_OK) {
        nd_error_clear();
        return false;
    }
    if (store->channel) {
        /* Only what has come already: until nothing is left, or the connection's end. */
        while (nd_channel_receive(store->channel, 0, &frame) == ND_OK &&
               frame.type != ND_WIRE_NONE) {
            (void)is_other(store, &frame);
        }
        nd_error_clear();
    }
    snprintf(text, capacity, "%s", store->first_failure);
    leave(store);
    return text[0] != '\0';
}

static void keep_answer(void *context, nd_peer *peer, const void *bytes, size_t count)
{
    nd_store *store = context;
    if (nd_wire_feed(&store->answers, bytes, count) != ND_OK) {
        nd_error_clear(); /* next_frame misses the answer, and reports it */
    }
}

static void drop_self(void *context, nd_peer *peer)
{
}

static void ignore_notice(void *context, const char *line)
{
}

static nd_status connect_store(nd_store *store, const nd_identity *identity,
                               const uint8_t key[ND_KEY_BYTES])
{
    ND_TRY(nd_channel_open(identity->master_addr, identity->master_port, key,
                           store->timeout_seconds, &store->channel));
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

/* Without ndlaunch: rank 0 makes or reads the key and hosts; the others wait until both are
 * there. */
static nd_status open_environment(nd_store *store, const nd_identity *identity)
{
    char path[ND_SHARED_KEY_PATH_MAX];
    uint8_t key[ND_KEY_BYTES];
    bool private_file;
    ND_TRY(nd_shared_key_path(identity, path, &private_file));
    if (identity->rank == 0) {
        ND_TRY(private_file ? nd_shared_key_publish(path, key) : nd_key_read_file(path, key));
        if (private_file) {
            snprintf(store->key_path, sizeof store->key_path, "%s", path);
        }
        nd_status status = nd_store_thread_start(identity, key, &store->thread);
        if (status == ND_OK) {
            status = connect_store(store, identity, key);
        }
        explicit_bzero(key, sizeof key);
        return status;
    }
    int64_t deadline = nd_clock_ns() + (int64_t)(store->timeout_seconds * 1e9);
    for (;;) {
        /* A private file may be missing, or a former job's, until rank 0 has replaced it. */
        nd_status status = nd_key_read_file(path, key);
        if (status == ND_OK) {
            status = connect_store(store, identity, key);
            explicit_bzero(key, sizeof key);
        }
        if (status == ND_OK || store->channel || !private_file || status != ND_ERR_CONFIG ||
            nd_clock_ns() >= deadline) {
            return status;
        }
        usleep(50000);
    }
}

static nd_status open_pmix(nd_store *store, const nd_identity *identity)
{
    nd_identity there = *identity;
    uint8_t key[ND_KEY_BYTES];
    store->pmix = identity->pmix;
    ND_TRY(nd_pmix_meet(&there, store->timeout_seconds, key, &store->thread));
    nd_status status = connect_store(store, &there, key);
    explicit_bzero(key, sizeof key);
    return status;
}

static nd_status open_ndlaunch(nd_store *store, const nd_identity *identity)
{
    uint8_t key[ND_KEY_BYTES];
    if (identity->key_fd < 0) {
        return nd_fail(ND_ERR_CONFIG, "ND_KEY_FD is missing; start workers with ndlaunch");
    }
    ND_TRY(nd_key_read_fd(identity->key_fd, key));
    nd_status status = connect_store(store, identity, key);
    explicit_bzero(key, sizeof key);
    return status;
}

nd_status nd_store_open(const nd_identity *identity, double timeout_seconds, nd_store **out)
{
    if (identity->source == ND_IDENTITY_SINGLE) {
        return nd_store_open_single(out);
    }
    nd_store *store;
    ND_TRY(ND_ALLOC(1, &store));
    init_lock(store);
    store->rank = identity->rank;
    store->world_size = identity->world_size;
    store->timeout_seconds = timeout_seconds;
    nd_status status = ND_OK;
    switch (identity->source) {
    case ND_IDENTITY_NDLAUNCH:
        status = open_ndlaunch(store, identity);
        break;
    case ND_IDENTITY_ENVIRONMENT:
        status = open_environment(store, identity);
        break;
    case ND_IDENTITY_PMIX:
        status = open_pmix(store, identity);
        break;
    case ND_IDENTITY_SINGLE:
        break;
    }
    if (status != ND_OK) {
        nd_store_abandon(store);
        return status;
    }
    store->hosted = identity->source != ND_IDENTITY_NDLAUNCH;
    *out = store;
    return ND_OK;
}

void nd_store_set_timeout(nd_store *store, double timeout_seconds)
{
    store->timeout_seconds = timeout_seconds;
}

nd_status nd_store_open_single(nd_store **out)
{
    nd_store *store;
    ND_TRY(ND_ALLOC(1, &store));
    init_lock(store);
    store->world_size = 1;
    nd_wire_parser_init(&store->answers, ND_WIRE_LIMIT_MEMBER);
    nd_server_options options = {
        .version = ND_VERSION, .run_id = "single", .world_size = 1, .nnodes = 1};
    nd_server_hooks hooks = {
        .context = store, .send = keep_answer, .drop = drop_self, .notice = ignore_notice};
    nd_status status = nd_server_create(&options, &hooks, &store->server);
    if (status == ND_OK) {
        status = nd_server_connect(store->server, &(nd_server_caller){.name = "rank 0"}, 0,
                                   &store->self);
    }
    if (status == ND_OK) {
        nd_wire_begin(&store->out, ND_WIRE_HELLO);
        nd_wire_put_u32(&store->out, ND_WIRE_PROTOCOL);
        nd_wire_put_text(&store->out, ND_VERSION);
        nd_wire_put_text(&store->out, "single");
        nd_wire_put_u32(&store->out, 0);
        nd_wire_put_u8(&store->out, ND_WIRE_WORKER);
        nd_wire_put_u32(&store->out, 0);
        nd_wire_put_text(&store->out, "localhost");
        status = send_request(store, 0);
    }
    nd_wire_frame welcome;
    if (status == ND_OK) {
        status = next_frame(store, 0, &welcome);
    }
    if (status != ND_OK) {
        nd_store_close(store);
        return status;
    }
    *out = store;
    return ND_OK;
}

static void close_store(nd_store *store, bool goodbye)
{
    if (!store) {
        return;
    }
    nd_watch_stop(store->watch);
    if (store->channel && goodbye) {
        nd_wire_begin(&store->out, ND_WIRE_BYE);
        send_request(store, nd_clock_ns() + margin_ns);
    }
    nd_channel_close(store->channel);
    nd_store_thread_stop(store->thread, goodbye ? store->timeout_seconds : 0);
    if (store->key_path[0]) {
        unlink(store->key_path);
    }
    nd_server_destroy(store->server);
    nd_wire_parser_fini(&store->answers);
    nd_wire_buffer_fini(&store->out);
    pthread_cond_destroy(&store->idle);
    pthread_mutex_destroy(&store->lock);
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

static void on_server_gone(void *context)
{
    nd_store *store = context;
    (void)store->lost(store->lost_context,
                      "rank 0, which hosts the store, was lost: it ended without a goodbye", true);
}

nd_status nd_store_watch(nd_store *store, nd_store_lost *lost, void *context)
{
    if (!store->hosted) {
        return ND_OK;
    }
    store->lost = lost;
    store->lost_context = context;
    if (store->thread) {
        nd_store_thread_watch(store->thread, lost, context);
        return ND_OK;
    }
    return nd_watch_start(nd_channel_fd(store->channel), on_server_gone, store, &store->watch);
}

nd_status nd_store_own_address(const nd_store *store, nd_address *out)
{
    *out = (nd_address){.bytes = sizeof out->storage};
    if (getsockname(nd_channel_fd(store->channel), (struct sockaddr *)&out->storage, &out->bytes) !=
        0) {
        return nd_fail_system(errno, "the own address on the way to the store");
    }
    return ND_OK;
}

nd_status nd_store_tls(const nd_store *store, bool server, nd_tls_context **out)
{
    return nd_channel_tls(store->channel, server, out);
}

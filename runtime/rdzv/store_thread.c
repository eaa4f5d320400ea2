// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/store_thread.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/thread.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/store_server.h"
#include "runtime/rdzv/uv.h"

struct nd_store_thread {
    nd_thread native;
    nd_monitor monitor; /* of the thread's end alone */
    uv_loop_t loop;
    uv_timer_t tick;
    nd_store_server *server;
    _Atomic int64_t leave_by; /* nd_clock_ns; 0: stay */
    nd_store_watch watch;
    char left_text[2 * ND_WIRE_TEXT_MAX]; /* for `lost`, or "" */
};

static void notice(void *context, const char *line)
{
    nd_log_warning("%s", line);
}

static void on_left(void *context, nd_peer *peer, nd_wire_role role, int index, bool clean)
{
    nd_store_thread *thread = context;
    bool closing = atomic_load(&thread->leave_by) != 0;
    if (role == ND_WIRE_WORKER && index > 0 && !clean && !closing && !thread->left_text[0]) {
        snprintf(thread->left_text, sizeof thread->left_text,
                 "%s was lost: it ended without a goodbye", nd_peer_name(peer));
    }
}

static void on_tick(uv_timer_t *timer)
{
    nd_store_thread *thread = timer->data;
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
    nd_store_thread *thread = argument;
    uv_run(&thread->loop, UV_RUN_DEFAULT);
}

/* The first of the name's addresses that can be bound. */
static nd_status open_server(nd_store_thread *thread, const nd_identity *identity,
                             const uint8_t *key)
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

static nd_status start_thread(nd_store_thread *thread)
{
    ND_TRY(ND_UV(uv_timer_init(&thread->loop, &thread->tick)));
    thread->tick.data = thread;
    ND_TRY(ND_UV(uv_timer_start(&thread->tick, on_tick, 20, 20)));
    return nd_thread_start(&thread->native, &thread->monitor, "the store's thread", run_loop,
                           thread);
}

nd_status nd_store_thread_start(const nd_identity *identity, const uint8_t key[ND_KEY_BYTES],
                                nd_store_watch watch, nd_store_thread **out)
{
    nd_store_thread *thread;
    ND_TRY(ND_ALLOC(1, &thread));
    thread->watch = watch;
    thread->monitor = (nd_monitor)ND_MONITOR_INIT;
    nd_status status = ND_UV(uv_loop_init(&thread->loop));
    if (status != ND_OK) {
        free(thread);
        return status;
    }
    status = open_server(thread, identity, key);
    if (status == ND_OK) {
        status = start_thread(thread);
    }
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

const nd_store_server *nd_store_thread_server(const nd_store_thread *thread)
{
    return thread->server;
}

void nd_store_thread_stop(nd_store_thread *thread, double timeout_seconds)
{
    if (thread) {
        atomic_store(&thread->leave_by, nd_clock_ns() + (int64_t)(timeout_seconds * 1e9) + 1);
        nd_thread_join(&thread->native, INFINITY);
        nd_monitor_fini(&thread->monitor);
        uv_loop_close(&thread->loop);
        free(thread);
    }
}

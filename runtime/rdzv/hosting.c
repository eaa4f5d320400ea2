// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/hosting.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/host.h"
#include "runtime/rdzv/uv.h"

struct nd_hosting {
    pthread_t thread;
    uv_loop_t loop;
    uv_timer_t watch;
    nd_host *host;
    _Atomic int64_t leave_by; /* nd_clock_ns; 0: stay */
    void *context;
    _Atomic(void (*)(void *context, const char *who)) lost; /* NULL: nobody asks */
};

static void notice(void *context, const char *line)
{
    nd_log_warning("%s", line);
}

static void on_left(void *context, nd_peer *peer, nd_wire_role role, int index, bool clean)
{
    nd_hosting *hosting = context;
    void (*lost)(void *, const char *) = atomic_load(&hosting->lost);
    if (role == ND_WIRE_WORKER && index != 0 && !clean && lost &&
        atomic_load(&hosting->leave_by) == 0) {
        lost(hosting->context, nd_peer_name(peer));
    }
}

static void on_watch(uv_timer_t *timer)
{
    nd_hosting *hosting = timer->data;
    int64_t leave_by = atomic_load(&hosting->leave_by);
    bool empty = nd_server_members(nd_host_server(hosting->host), ND_WIRE_WORKER) == 0;
    if (leave_by != 0 && (empty || nd_clock_ns() >= leave_by)) {
        nd_host_close(hosting->host);
        uv_close((uv_handle_t *)timer, NULL);
    }
}

static void *run(void *argument)
{
    nd_hosting *hosting = argument;
    uv_run(&hosting->loop, UV_RUN_DEFAULT);
    return NULL;
}

/* The first of the name's addresses that can be bound. */
static nd_status open_host(nd_hosting *hosting, const nd_identity *identity, const uint8_t *key)
{
    nd_host_options options = {
        .loop = &hosting->loop,
        .server = {.version = ND_VERSION,
                   .run_id = identity->run_id,
                   .epoch = (uint32_t)identity->epoch,
                   .world_size = identity->world_size,
                   .nnodes = 1},
        .hooks = {.context = hosting, .notice = notice, .left = on_left},
    };
    nd_address addresses[ND_ADDRESS_MAX];
    int count;
    ND_TRY(nd_address_resolve(identity->master_addr, identity->master_port, addresses, &count));
    memcpy(options.key, key, ND_KEY_BYTES);
    nd_status status = ND_OK;
    for (int i = 0; i < count; i++) {
        options.address = addresses[i];
        status = nd_host_open(&options, &hosting->host);
        if (status == ND_OK) {
            break;
        }
        uv_run(&hosting->loop, UV_RUN_NOWAIT); /* frees what the failed attempt opened */
    }
    explicit_bzero(options.key, sizeof options.key);
    return status;
}

static nd_status start_thread(nd_hosting *hosting)
{
    nd_status status = ND_UV(uv_timer_init(&hosting->loop, &hosting->watch));
    if (status == ND_OK) {
        hosting->watch.data = hosting;
        status = ND_UV(uv_timer_start(&hosting->watch, on_watch, 20, 20));
    }
    if (status == ND_OK && pthread_create(&hosting->thread, NULL, run, hosting) != 0) {
        status = nd_fail(ND_ERR_INTERNAL, "the store's thread cannot be started");
    }
    if (status != ND_OK) {
        nd_host_close(hosting->host);
        if (hosting->watch.data) {
            uv_close((uv_handle_t *)&hosting->watch, NULL);
        }
    }
    return status;
}

nd_status nd_hosting_start(const nd_identity *identity, const uint8_t key[ND_KEY_BYTES],
                           nd_hosting **out)
{
    nd_hosting *hosting;
    ND_TRY(ND_ALLOC(1, &hosting));
    nd_status status = ND_UV(uv_loop_init(&hosting->loop));
    if (status != ND_OK) {
        free(hosting);
        return status;
    }
    status = open_host(hosting, identity, key);
    if (status == ND_OK) {
        status = start_thread(hosting);
    }
    if (status != ND_OK) {
        uv_run(&hosting->loop, UV_RUN_DEFAULT);
        uv_loop_close(&hosting->loop);
        free(hosting);
        return status;
    }
    *out = hosting;
    return ND_OK;
}

int nd_hosting_port(const nd_hosting *hosting)
{
    return nd_host_port(hosting->host);
}

const char *nd_hosting_address(const nd_hosting *hosting)
{
    return nd_host_address(hosting->host);
}

void nd_hosting_watch(nd_hosting *hosting, void (*lost)(void *context, const char *who),
                      void *context)
{
    hosting->context = context;
    atomic_store(&hosting->lost, lost);
}

void nd_hosting_stop(nd_hosting *hosting, double timeout_seconds)
{
    if (hosting) {
        atomic_store(&hosting->leave_by, nd_clock_ns() + (int64_t)(timeout_seconds * 1e9) + 1);
        pthread_join(hosting->thread, NULL);
        uv_loop_close(&hosting->loop);
        free(hosting);
    }
}

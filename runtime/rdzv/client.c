// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/client_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/pmix_meet.h"

static void keep_answer(void *context, nd_peer *peer, const void *bytes, size_t count)
{
    nd_store *store = context;
    nd_status status = nd_wire_feed(&store->answers, bytes, count);
    ND_ASSERT(status == ND_OK);
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
                      .epoch = (uint32_t)identity->epoch,
                      .role = ND_WIRE_WORKER,
                      .index = identity->rank};
    char run_id[ND_WIRE_TEXT_MAX];
    int world_size;
    ND_TRY(nd_channel_hello(store->channel, &hello, nd_store_deadline(store), run_id, sizeof run_id,
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
        nd_status status = nd_hosting_start(identity, key, &store->hosting);
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
    ND_TRY(nd_pmix_meet(&there, store->timeout_seconds, key, &store->hosting));
    nd_status status = connect_store(store, &there, key);
    explicit_bzero(key, sizeof key);
    return status;
}

static nd_status open_ndlaunch(nd_store *store, const nd_identity *identity)
{
    uint8_t key[ND_KEY_BYTES];
    if (identity->key_fd < 0) {
        return nd_fail(ND_ERR_CONFIG, "ND_KEY_FD is missing: start workers with ndlaunch");
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
    store->world_size = 1;
    nd_wire_parser_init(&store->answers, ND_WIRE_LIMIT_MEMBER);
    nd_server_options options = {
        .version = ND_VERSION, .run_id = "single", .world_size = 1, .nnodes = 1};
    nd_server_hooks hooks = {
        .context = store, .send = keep_answer, .drop = drop_self, .notice = ignore_notice};
    nd_status status = nd_server_create(&options, &hooks, &store->server);
    if (status == ND_OK) {
        status = nd_server_connect(store->server, NULL, "rank 0", 0, &store->self);
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
        status = nd_store_send(store, 0);
    }
    nd_wire_frame welcome;
    if (status == ND_OK) {
        status = nd_store_next(store, 0, &welcome);
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
        nd_store_send(store, nd_clock_ns() + nd_store_margin_ns);
    }
    nd_channel_close(store->channel);
    nd_hosting_stop(store->hosting, goodbye ? store->timeout_seconds : 0);
    if (store->key_path[0]) {
        unlink(store->key_path);
    }
    nd_server_destroy(store->server);
    nd_wire_parser_fini(&store->answers);
    nd_wire_buffer_fini(&store->out);
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

static void say_lost(void *context, const char *who)
{
    nd_store *store = context;
    char sentence[ND_WIRE_TEXT_MAX + 128];
    snprintf(sentence, sizeof sentence, "%s was lost: it ended without a goodbye", who);
    store->lost(store->lost_context, sentence);
}

static void on_host_gone(void *context)
{
    say_lost(context, "rank 0, which hosts the store,");
}

nd_status nd_store_watch(nd_store *store, void (*lost)(void *context, const char *sentence),
                         void *context)
{
    if (!store->hosted) {
        return ND_OK;
    }
    store->lost = lost;
    store->lost_context = context;
    if (store->hosting) {
        nd_hosting_watch(store->hosting, say_lost, store);
        return ND_OK;
    }
    return nd_watch_start(nd_channel_fd(store->channel), on_host_gone, store, &store->watch);
}

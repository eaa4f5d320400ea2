// SPDX-License-Identifier: Apache-2.0
/* Values, and the requests of workers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/rdzv/failure_record.h"
#include "runtime/rdzv/server_state.h"

static uint32_t bucket_of(const char *key)
{
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (; *key; key++) {
        hash = (hash ^ (uint8_t)*key) * 16777619u;
    }
    return hash % ND_SERVER_BUCKETS;
}

static nd_value *find_value(const nd_server *server, const char *key)
{
    nd_value *value = server->buckets[bucket_of(key)];
    while (value && strcmp(value->key, key) != 0) {
        value = value->next;
    }
    return value;
}

/* The key is new. */
static nd_status add_value(nd_server *server, const char *key, const void *bytes, size_t count)
{
    uint8_t *block;
    nd_value **list = &server->buckets[bucket_of(key)];
    size_t total = server->value_bytes + sizeof **list + count;
    if (total > ND_SERVER_VALUES_MAX) {
        return nd_fail(ND_ERR_INTERNAL, "the store is full: %zu bytes, at most %d", total,
                       ND_SERVER_VALUES_MAX);
    }
    ND_TRY(ND_ALLOC(sizeof **list + count, &block));
    nd_value *value = (nd_value *)(void *)block;
    snprintf(value->key, sizeof value->key, "%s", key);
    if (count > 0) {
        memcpy(value->data, bytes, count);
    }
    value->bytes = count;
    value->next = *list;
    *list = value;
    server->value_bytes = total;
    return ND_OK;
}

static void send_value(nd_server *server, nd_peer *peer, uint32_t request, const nd_value *value)
{
    nd_wire_begin(&server->out, ND_WIRE_VALUE);
    nd_wire_put_u32(&server->out, request);
    nd_wire_put_blob(&server->out, value->data, value->bytes);
    nd_server_flush(server, peer);
}

static void answer_key_waiters(nd_server *server, const char *key)
{
    const nd_value *value = find_value(server, key);
    for (nd_peer *peer = server->peers; peer; peer = peer->next) {
        if (peer->wait == ND_WAIT_KEY && strcmp(peer->key, key) == 0) {
            peer->wait = ND_WAIT_NONE;
            send_value(server, peer, peer->request, value);
        }
    }
}

/* The job's first failure is known from now on. A worker may find this frame after its connection
 * broke, and knows then that another rank explains why. */
static void send_first_failure(nd_server *server, const nd_peer *but)
{
    server->sends_failure = true;
    for (nd_peer *peer = server->peers; peer; peer = peer->next) {
        if (peer != but && peer->member && peer->role == ND_WIRE_WORKER) {
            nd_server_send_failure(server, peer);
        }
    }
}

void nd_server_send_failure(nd_server *server, nd_peer *peer)
{
    const nd_value *value = find_value(server, ND_FAILURE_FIRST);
    if (server->sends_failure && value) {
        nd_wire_begin(&server->out, ND_WIRE_FAILED);
        nd_wire_put_blob(&server->out, value->data, value->bytes);
        nd_server_flush(server, peer);
    }
}

static nd_status take_set(nd_server *server, nd_peer *peer, nd_wire_cursor *cursor)
{
    char key[ND_WIRE_TEXT_MAX];
    size_t count;
    uint32_t request = nd_wire_get_u32(cursor);
    nd_wire_get_text(cursor, key, sizeof key);
    const uint8_t *bytes = nd_wire_get_blob(cursor, &count);
    if (!nd_wire_finished(cursor)) {
        return nd_fail(ND_ERR_IO, "a damaged set message");
    }
    bool is_new = !find_value(server, key);
    if (is_new) {
        ND_TRY(add_value(server, key, bytes, count));
    }
    if (is_new && strcmp(key, ND_FAILURE_FIRST) == 0) {
        server->failed_rank = peer->index;
        send_first_failure(server,
                           peer); /* before this rank, which may end the job once it knows */
    }
    nd_wire_begin(&server->out, ND_WIRE_DONE);
    nd_wire_put_u32(&server->out, request);
    nd_wire_put_u8(&server->out, is_new);
    nd_server_flush(server, peer);
    if (is_new) {
        answer_key_waiters(server, key);
    }
    return ND_OK;
}

static nd_status take_get(nd_server *server, nd_peer *peer, nd_wire_cursor *cursor, int64_t now)
{
    uint32_t request = nd_wire_get_u32(cursor);
    uint64_t timeout_ms = nd_wire_get_u64(cursor);
    char key[ND_WIRE_TEXT_MAX];
    nd_wire_get_text(cursor, key, sizeof key);
    if (!nd_wire_finished(cursor)) {
        return nd_fail(ND_ERR_IO, "a damaged get message");
    }
    const nd_value *value = find_value(server, key);
    if (value) {
        send_value(server, peer, request, value);
    } else if (timeout_ms == 0) {
        nd_server_error(server, peer, request, ND_ERR_DATA, "nobody has set the key");
    } else {
        nd_server_begin_wait(peer, ND_WAIT_KEY, request, timeout_ms, now);
        snprintf(peer->key, sizeof peer->key, "%s", key);
    }
    return ND_OK;
}

nd_status nd_server_request(nd_server *server, nd_peer *peer, const nd_wire_frame *frame,
                            int64_t now)
{
    nd_wire_cursor cursor = nd_wire_body(frame);
    /* A caller that asks before its answer came has given up, since this process did not run. */
    nd_server_abandon(server, peer);
    switch (frame->type) {
    case ND_WIRE_SET:
        return take_set(server, peer, &cursor);
    case ND_WIRE_GET:
        return take_get(server, peer, &cursor, now);
    case ND_WIRE_EXCHANGE:
        return nd_server_exchange(server, peer, &cursor, now);
    default:
        return nd_fail(ND_ERR_IO, "a message of unknown type %d", (int)frame->type);
    }
}

/* A worker that went without a goodbye counts as a failure, unless there was one before. Rank 0,
 * which hosts the store, reports the loss. The loss of rank 0 itself is sent to nobody, since no
 * rank reports it. */
static void record_loss(nd_server *server, const nd_peer *gone)
{
    char message[sizeof gone->name + 64];
    int bytes = snprintf(message, sizeof message, ND_SERVER_LOST, gone->name);
    if (!find_value(server, ND_FAILURE_FIRST) &&
        add_value(server, ND_FAILURE_FIRST, message, (size_t)bytes) == ND_OK) {
        server->failed_rank = -1;
        if (gone->index > 0) {
            send_first_failure(server, gone);
        }
        answer_key_waiters(server, ND_FAILURE_FIRST);
    }
}

void nd_server_first_failure(const nd_server *server, char *text, size_t capacity)
{
    const nd_value *value = find_value(server, ND_FAILURE_FIRST);
    snprintf(text, capacity, "%.*s", value ? (int)value->bytes : 0,
             value ? (const char *)value->data : "");
}

bool nd_server_first_unprinted(const nd_server *server, int rank)
{
    return server->failed_rank == rank && find_value(server, ND_FAILURE_FIRST) &&
           !find_value(server, ND_FAILURE_PRINTED);
}

void nd_server_worker_left(nd_server *server, nd_peer *gone, bool clean)
{
    char message[768];
    if (!clean && !server->ends) {
        record_loss(server, gone);
    }
    server->ranks[gone->index] = clean ? ND_SERVER_RANK_LEFT : ND_SERVER_RANK_LOST;
    server->left++;
    nd_server_exchange_left(server, gone, clean);
    for (nd_peer *peer = clean ? NULL : server->peers; peer; peer = peer->next) {
        if (peer->wait == ND_WAIT_KEY && strcmp(peer->key, ND_FAILURE_FIRST) != 0) {
            snprintf(message, sizeof message,
                     "%.280s was lost while others waited for the key '%.200s'", gone->name,
                     peer->key);
            peer->wait = ND_WAIT_NONE;
            nd_server_error(server, peer, peer->request, ND_ERR_IO, message);
        }
    }
}

void nd_server_store_tick(nd_server *server, int64_t now)
{
    char line[1024];
    nd_server_exchange_tick(server, now);
    for (nd_peer *peer = server->peers; peer; peer = peer->next) {
        if (peer->wait != ND_WAIT_KEY) {
            continue;
        }
        double waited = (double)(now - peer->wait_since) * 1e-9;
        if (now >= peer->deadline) {
            snprintf(line, sizeof line, "nobody set the key '%s' within %.3g s", peer->key, waited);
            peer->wait = ND_WAIT_NONE;
            nd_server_error(server, peer, peer->request, ND_ERR_HANG, line);
        } else if (now - peer->noticed >= (int64_t)ND_SERVER_NOTICE_SECONDS * 1000000000) {
            peer->noticed = now;
            snprintf(line, sizeof line, "%s waits for the key '%s' for %.0f s", peer->name,
                     peer->key, waited);
            server->hooks.notice(server->hooks.context, line);
        }
    }
}

void nd_server_store_fini(nd_server *server)
{
    for (int i = 0; i < ND_SERVER_BUCKETS; i++) {
        while (server->buckets[i]) {
            nd_value *value = server->buckets[i];
            server->buckets[i] = value->next;
            free(value);
        }
    }
    server->value_bytes = 0;
}

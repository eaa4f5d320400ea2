// SPDX-License-Identifier: Apache-2.0
/* Values, exchanges, and the requests of workers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "runtime/rdzv/ranks.h"
#include "runtime/rdzv/server_state.h"

/* Exchanges: each rank's bytes go to all ranks, once all have come. */

static void release_exchange(nd_exchange *exchange)
{
    if (--exchange->users == 0) {
        free(exchange->here);
        free(exchange->data);
        free(exchange);
    }
}

static void unlink_exchange(nd_server *server, nd_exchange *exchange)
{
    nd_exchange **at = &server->exchanges;
    while (*at && *at != exchange) {
        at = &(*at)->next;
    }
    if (*at) {
        *at = exchange->next;
    }
}

static void stop_waiting(nd_server *server, nd_peer *peer)
{
    nd_exchange *exchange = peer->exchange;
    peer->wait = ND_WAIT_NONE;
    peer->exchange = NULL;
    if (exchange) {
        if (exchange->users == 1) {
            unlink_exchange(server, exchange);
        }
        release_exchange(exchange);
    }
}

/* Every peer that waits in the exchange gets the sentence as an error. */
static void break_exchange(nd_server *server, nd_exchange *exchange, nd_status status,
                           const char *message)
{
    unlink_exchange(server, exchange);
    exchange->users++; /* ours */
    for (nd_peer *peer = server->peers; peer; peer = peer->next) {
        if (peer->exchange == exchange) {
            uint32_t request = peer->request;
            stop_waiting(server, peer);
            nd_server_error(server, peer, request, status, message);
        }
    }
    release_exchange(exchange);
}

static nd_status open_exchange(nd_server *server, const char *name, size_t count, int64_t now,
                               nd_exchange **out)
{
    for (nd_exchange *e = server->exchanges; e; e = e->next) {
        if (strcmp(e->name, name) == 0) {
            *out = e;
            return ND_OK;
        }
    }
    if (count > (size_t)ND_SERVER_EXCHANGE_MAX / (size_t)server->world_size) {
        return nd_fail(ND_ERR_INTERNAL, "an exchange of %zu bytes by each of %d ranks is too large",
                       count, server->world_size);
    }
    nd_exchange *exchange;
    ND_TRY(ND_ALLOC(1, &exchange));
    if (ND_ALLOC(server->world_size, &exchange->here) != ND_OK ||
        ND_ALLOC((size_t)server->world_size * count, &exchange->data) != ND_OK) {
        free(exchange->here);
        free(exchange);
        return nd_error_last()->status;
    }
    snprintf(exchange->name, sizeof exchange->name, "%s", name);
    exchange->bytes = count;
    exchange->since = exchange->noticed = now;
    exchange->next = server->exchanges;
    server->exchanges = exchange;
    *out = exchange;
    return ND_OK;
}

/* Sends one slice of the result; the next one follows when this one has left. */
static void send_slice(nd_server *server, nd_peer *peer)
{
    nd_exchange *exchange = peer->exchange;
    size_t total = exchange->size;
    size_t part = total - peer->sent < ND_SERVER_SLICE ? total - peer->sent : ND_SERVER_SLICE;
    nd_wire_begin(&server->out, ND_WIRE_SLICE);
    nd_wire_put_u32(&server->out, peer->request);
    nd_wire_put_u64(&server->out, peer->sent);
    nd_wire_put_u64(&server->out, total);
    nd_wire_put_blob(&server->out, exchange->data + peer->sent, part);
    peer->sent += part;
    if (peer->sent == total) {
        peer->exchange = NULL;
        release_exchange(exchange);
    }
    nd_server_flush(server, peer);
}

void nd_server_drained(nd_server *server, nd_peer *peer)
{
    if (peer->exchange && peer->wait == ND_WAIT_NONE && !peer->dropped) {
        send_slice(server, peer);
    }
}

/* All have come. The result of many ranks, of which each gets all, grows with their square, and
 * names the same hosts and digests thousands of times: it is packed once, for all. */
static void finish_exchange(nd_server *server, nd_exchange *exchange)
{
    enum { LEVEL = 1 }; /* the store's only thread packs, half a gigabyte in a second */
    const size_t bytes = (size_t)server->world_size * exchange->bytes;
    const size_t room = ZSTD_compressBound(bytes);
    uint8_t *packed = malloc(room);
    size_t used = packed ? ZSTD_compress(packed, room, exchange->data, bytes, LEVEL) : 0;
    if (!packed || ZSTD_isError(used)) { /* of its own memory */
        free(packed);
        break_exchange(server, exchange, ND_ERR_RESOURCE, "the store has no memory for a result");
        return;
    }
    uint8_t *trimmed = realloc(packed, used);
    free(exchange->data);
    exchange->data = trimmed ? trimmed : packed;
    exchange->size = used;
    unlink_exchange(server, exchange);
    exchange->users++;
    for (nd_peer *peer = server->peers; peer; peer = peer->next) {
        if (peer->exchange == exchange) {
            peer->wait = ND_WAIT_NONE;
            peer->sent = 0;
            send_slice(server, peer);
        }
    }
    release_exchange(exchange);
}

/* Ranks that left can no longer come. */
static void check_left(nd_server *server, nd_exchange *exchange)
{
    char message[512];
    for (int r = 0; r < server->world_size && server->left > 0; r++) {
        if (server->places[ND_WIRE_WORKER][r] >= ND_SERVER_PLACE_LEFT && !exchange->here[r]) {
            snprintf(message, sizeof message,
                     "the exchange '%.200s' cannot be completed: rank %d left the job",
                     exchange->name, r);
            break_exchange(server, exchange, ND_ERR_IO, message);
            return;
        }
    }
}

static nd_status take_exchange(nd_server *server, nd_peer *peer, nd_wire_cursor *cursor,
                               int64_t now)
{
    const uint64_t year_ms = 366ull * 24 * 3600 * 1000;
    char name[ND_WIRE_TEXT_MAX], message[512];
    size_t count;
    uint32_t request = nd_wire_get_u32(cursor);
    uint64_t timeout_ms = nd_wire_get_u64(cursor);
    nd_wire_get_text(cursor, name, sizeof name);
    const uint8_t *bytes = nd_wire_get_blob(cursor, &count);
    if (!nd_wire_finished(cursor)) {
        return nd_fail(ND_ERR_IO, "a damaged exchange message");
    }
    nd_exchange *exchange = NULL;
    ND_TRY(open_exchange(server, name, count, now, &exchange));
    peer->wait = ND_WAIT_EXCHANGE;
    peer->request = request;
    peer->deadline = now + (int64_t)(timeout_ms < year_ms ? timeout_ms : year_ms) * 1000000;
    peer->exchange = exchange;
    exchange->users++;
    if (count != exchange->bytes) {
        snprintf(message, sizeof message,
                 "rank %d entered the exchange '%.200s' with %zu bytes, others with %zu",
                 peer->index, name, count, exchange->bytes);
        break_exchange(server, exchange, ND_ERR_INTERNAL, message);
        return ND_OK;
    }
    if (count > 0) {
        memcpy(exchange->data + (size_t)peer->index * count, bytes, count);
    }
    exchange->here[peer->index] = true;
    exchange->arrived++;
    if (exchange->arrived == server->world_size) {
        finish_exchange(server, exchange);
    } else {
        check_left(server, exchange);
    }
    return ND_OK;
}

static bool is_missing(const void *exchange, int rank)
{
    return !((const nd_exchange *)exchange)->here[rank];
}

static bool is_unseen(const void *server, int rank)
{
    return ((const nd_server *)server)->places[ND_WIRE_WORKER][rank] == ND_SERVER_PLACE_NEVER;
}

/* "missing of 8 ranks: 3, 5 (never connected: 5)" */
static void describe_missing(const nd_server *server, const nd_exchange *exchange, char *out,
                             size_t capacity)
{
    char missing[200], never[200];
    nd_ranks_text(is_missing, exchange, 0, server->world_size, missing, sizeof missing);
    nd_ranks_text(is_unseen, server, 0, server->world_size, never, sizeof never);
    snprintf(out, capacity, "missing of %d ranks: %s%s%s%s", server->world_size, missing,
             never[0] ? " (never connected: " : "", never, never[0] ? ")" : "");
}

static void tick_exchange(nd_server *server, nd_exchange *exchange, int64_t now)
{
    char missing[512], line[1024];
    int64_t deadline = INT64_MAX;
    for (const nd_peer *peer = server->peers; peer; peer = peer->next) {
        if (peer->exchange == exchange && peer->deadline < deadline) {
            deadline = peer->deadline;
        }
    }
    double waited = (double)(now - exchange->since) * 1e-9;
    if (now >= deadline) {
        describe_missing(server, exchange, missing, sizeof missing);
        snprintf(line, sizeof line, "the exchange '%.200s' was not complete after %.3g s; %s",
                 exchange->name, waited, missing);
        break_exchange(server, exchange, ND_ERR_HANG, line);
    } else if (now - exchange->noticed >= (int64_t)ND_SERVER_NOTICE_SECONDS * 1000000000) {
        exchange->noticed = now;
        describe_missing(server, exchange, missing, sizeof missing);
        snprintf(line, sizeof line, "waiting at '%.200s' for %.0f s; %s", exchange->name, waited,
                 missing);
        server->hooks.notice(server->hooks.context, line);
    }
}

void nd_server_exchange_tick(nd_server *server, int64_t now)
{
    for (nd_exchange *e = server->exchanges, *next; e; e = next) {
        next = e->next;
        tick_exchange(server, e, now);
    }
}

/* Values. */

static nd_value *find_value(const nd_server *server, const char *key)
{
    nd_value *value = server->values;
    while (value && strcmp(value->key, key) != 0) {
        value = value->next;
    }
    return value;
}

/* The key is new. */
static nd_status add_value(nd_server *server, const char *key, const void *bytes, size_t count)
{
    uint8_t *block;
    size_t total = server->value_bytes + sizeof *server->values + count;
    if (total > ND_SERVER_VALUES_MAX) {
        return nd_fail(ND_ERR_INTERNAL, "the store is full: %zu bytes, at most %d", total,
                       ND_SERVER_VALUES_MAX);
    }
    ND_TRY(ND_ALLOC(sizeof *server->values + count, &block));
    nd_value *value = (nd_value *)(void *)block;
    snprintf(value->key, sizeof value->key, "%s", key);
    if (count > 0) {
        memcpy(value->data, bytes, count);
    }
    value->bytes = count;
    value->next = server->values;
    server->values = value;
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
    nd_wire_begin(&server->out, ND_WIRE_DONE);
    nd_wire_put_u32(&server->out, request);
    nd_server_flush(server, peer);
    if (is_new) {
        const nd_value *value = find_value(server, key);
        for (nd_peer *other = server->peers; other; other = other->next) {
            if (other->wait == ND_WAIT_KEY && strcmp(other->key, key) == 0) {
                other->wait = ND_WAIT_NONE;
                send_value(server, other, other->request, value);
            }
        }
    }
    return ND_OK;
}

static nd_status take_get(nd_server *server, nd_peer *peer, nd_wire_cursor *cursor)
{
    uint32_t request = nd_wire_get_u32(cursor);
    char key[ND_WIRE_TEXT_MAX];
    nd_wire_get_text(cursor, key, sizeof key);
    if (!nd_wire_finished(cursor)) {
        return nd_fail(ND_ERR_IO, "a damaged get message");
    }
    const nd_value *value = find_value(server, key);
    if (value) {
        send_value(server, peer, request, value);
    } else {
        peer->wait = ND_WAIT_KEY;
        peer->request = request;
        snprintf(peer->key, sizeof peer->key, "%s", key);
    }
    return ND_OK;
}

nd_status nd_server_request(nd_server *server, nd_peer *peer, const nd_wire_frame *frame,
                            int64_t now)
{
    nd_wire_cursor cursor = nd_wire_body(frame);
    /* A caller that asks before its answer came has given up, since this process did not run. The
     * others of an exchange wait until it comes again. */
    if (peer->exchange && peer->wait == ND_WAIT_EXCHANGE) {
        peer->exchange->here[peer->index] = false;
        peer->exchange->arrived--;
    }
    stop_waiting(server, peer);
    switch (frame->type) {
    case ND_WIRE_SET:
        return take_set(server, peer, &cursor);
    case ND_WIRE_GET:
        return take_get(server, peer, &cursor);
    case ND_WIRE_EXCHANGE:
        return take_exchange(server, peer, &cursor, now);
    default:
        return nd_fail(ND_ERR_IO, "a message of unknown type %d", (int)frame->type);
    }
}

void nd_server_worker_left(nd_server *server, nd_peer *gone)
{
    const bool clean = gone->goodbye;
    char message[768];
    stop_waiting(server, gone);
    if (gone->epoch != server->epoch) {
        return;
    }
    server->places[ND_WIRE_WORKER][gone->index] =
        clean ? ND_SERVER_PLACE_LEFT : ND_SERVER_PLACE_LOST;
    server->left++;
    for (nd_exchange *e = server->exchanges, *next; e; e = next) {
        next = e->next;
        if (!clean || !e->here[gone->index]) {
            snprintf(message, sizeof message, "%.280s %s while others waited at '%.200s'",
                     gone->name, clean ? "left the job" : "was lost", e->name);
            break_exchange(server, e, ND_ERR_IO, message);
        }
    }
    for (nd_peer *peer = clean ? NULL : server->peers; peer; peer = peer->next) {
        if (peer->wait == ND_WAIT_KEY) {
            snprintf(message, sizeof message,
                     "%.280s was lost while others waited for the key '%.200s'", gone->name,
                     peer->key);
            peer->wait = ND_WAIT_NONE;
            nd_server_error(server, peer, peer->request, ND_ERR_IO, message);
        }
    }
}

void nd_server_store_end(nd_server *server)
{
    for (nd_peer *peer = server->peers; peer; peer = peer->next) {
        stop_waiting(server, peer);
    }
    while (server->values) {
        nd_value *value = server->values;
        server->values = value->next;
        free(value);
    }
    server->value_bytes = 0;
}

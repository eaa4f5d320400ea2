// SPDX-License-Identifier: Apache-2.0
/* Values, and the requests of workers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/rdzv/server_state.h"

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
        answer_key_waiters(server, key);
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
    /* A caller that asks before its answer came has given up, since this process did not run. */
    nd_server_abandon(server, peer);
    switch (frame->type) {
    case ND_WIRE_SET:
        return take_set(server, peer, &cursor);
    case ND_WIRE_GET:
        return take_get(server, peer, &cursor);
    case ND_WIRE_EXCHANGE:
        return nd_server_exchange(server, peer, &cursor, now);
    default:
        return nd_fail(ND_ERR_IO, "a message of unknown type %d", (int)frame->type);
    }
}

void nd_server_worker_left(nd_server *server, nd_peer *gone, bool clean)
{
    char message[768];
    server->places[ND_WIRE_WORKER][gone->index] =
        clean ? ND_SERVER_PLACE_LEFT : ND_SERVER_PLACE_LOST;
    server->left++;
    nd_server_exchange_left(server, gone, clean);
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

void nd_server_store_fini(nd_server *server)
{
    while (server->values) {
        nd_value *value = server->values;
        server->values = value->next;
        free(value);
    }
    server->value_bytes = 0;
}

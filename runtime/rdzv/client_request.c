// SPDX-License-Identifier: Apache-2.0
/* Requests to the store and their answers. */
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/rdzv/client_internal.h"

/* The store answers at the deadline with who is missing; past this margin it is not there any
 * more. */
const int64_t nd_store_margin_ns = 3000000000;

nd_status nd_store_send(nd_store *store, int64_t deadline)
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

nd_status nd_store_next(nd_store *store, int64_t deadline, nd_wire_frame *frame)
{
    if (store->channel) {
        return nd_channel_receive(store->channel, deadline, frame);
    }
    ND_TRY(nd_wire_next(&store->answers, frame));
    if (frame->type ==
        ND_WIRE_NONE) { /* the rest of a long exchange, or a wait that nobody will end */
        nd_server_drained(store->server, store->self);
        nd_server_tick(store->server, INT64_MAX);
        ND_TRY(nd_wire_next(&store->answers, frame));
    }
    return ND_OK;
}

/* The next answer to the open request, of the type that it must have. */
static nd_status receive(nd_store *store, nd_wire_type type, int64_t deadline, nd_wire_frame *frame,
                         nd_wire_cursor *cursor)
{
    ND_TRY(nd_store_next(store, deadline, frame));
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

int64_t nd_store_deadline(const nd_store *store)
{
    return nd_clock_ns() + (int64_t)(store->timeout_seconds * 1e9) + nd_store_margin_ns;
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

nd_status nd_store_set(nd_store *store, const char *key, const void *value, size_t bytes)
{
    nd_wire_frame frame;
    nd_wire_cursor cursor;
    int64_t deadline = nd_store_deadline(store);
    ND_TRY(check_key(key));
    begin_request(store, ND_WIRE_SET, false);
    nd_wire_put_text(&store->out, key);
    nd_wire_put_blob(&store->out, value, bytes);
    ND_TRY(nd_store_send(store, deadline));
    return receive(store, ND_WIRE_DONE, deadline, &frame, &cursor);
}

nd_status nd_store_get(nd_store *store, const char *key, void *value, size_t *bytes)
{
    nd_wire_frame frame;
    nd_wire_cursor cursor;
    int64_t deadline = nd_store_deadline(store);
    ND_TRY(check_key(key));
    begin_request(store, ND_WIRE_GET, true);
    nd_wire_put_text(&store->out, key);
    ND_TRY(nd_store_send(store, deadline));
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

nd_status nd_store_add(nd_store *store, const char *key, int64_t delta, int64_t *out)
{
    nd_wire_frame frame;
    nd_wire_cursor cursor;
    int64_t deadline = nd_store_deadline(store);
    ND_TRY(check_key(key));
    begin_request(store, ND_WIRE_ADD, false);
    nd_wire_put_text(&store->out, key);
    nd_wire_put_u64(&store->out, (uint64_t)delta);
    ND_TRY(nd_store_send(store, deadline));
    ND_TRY(receive(store, ND_WIRE_SUM, deadline, &frame, &cursor));
    int64_t sum = (int64_t)nd_wire_get_u64(&cursor);
    if (!nd_wire_finished(&cursor)) {
        return damaged("add");
    }
    *out = sum;
    return ND_OK;
}

nd_status nd_store_barrier(nd_store *store, const char *name)
{
    return nd_store_exchange(store, name, NULL, NULL, 0);
}

nd_status nd_store_exchange(nd_store *store, const char *name, const void *send, void *recv,
                            size_t bytes)
{
    if (store->pmix) {
        return nd_pmix_exchange(store->pmix, name, send, recv, bytes, store->timeout_seconds);
    }
    int64_t deadline = nd_store_deadline(store);
    size_t total = (size_t)store->world_size * bytes, got = 0;
    ND_TRY(check_key(name));
    begin_request(store, ND_WIRE_EXCHANGE, true);
    nd_wire_put_text(&store->out, name);
    nd_wire_put_blob(&store->out, send, bytes);
    ND_TRY(nd_store_send(store, deadline));
    do { /* at least one slice, also of nothing */
        nd_wire_frame frame;
        nd_wire_cursor cursor;
        size_t count;
        ND_TRY(receive(store, ND_WIRE_SLICE, deadline, &frame, &cursor));
        uint64_t offset = nd_wire_get_u64(&cursor);
        const uint8_t *data = nd_wire_get_blob(&cursor, &count);
        if (!nd_wire_finished(&cursor) || offset != got || count > total - got ||
            (count == 0 && total > 0)) {
            return damaged("an exchange");
        }
        if (count > 0) {
            memcpy((uint8_t *)recv + got, data, count);
        }
        got += count;
    } while (got < total);
    return ND_OK;
}

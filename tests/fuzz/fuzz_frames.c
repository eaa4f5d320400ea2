// SPDX-License-Identifier: Apache-2.0
/*
 * Bytes of a member or a stranger for the store's engine: it may refuse them, but not crash, and
 * what it answers is whole frames. The first byte says whether a hello goes first, and into pieces
 * of which size the rest is cut.
 */
#include <string.h>

#include "runtime/rdzv/server.h"
#include "tests/fuzz/fuzz.h"

typedef struct member {
    nd_wire_parser answers;
    bool dropped;
} member;

static void on_send(void *transport, const void *bytes, size_t count)
{
    member *m = transport;
    nd_status status = nd_wire_feed(&m->answers, bytes, count);
    ND_ASSERT(status == ND_OK);
}

static void on_drop(void *transport)
{
    ((member *)transport)->dropped = true;
}

static void on_notice(void *context, const char *line)
{
    ND_ASSERT(line[0]);
}

static nd_status on_node_frame(void *context, nd_peer *peer, int node, const nd_wire_frame *frame)
{
    return ND_OK;
}

static void say_hello(nd_server *server, nd_peer *peer, int role)
{
    nd_wire_buffer out = {0};
    nd_wire_begin(&out, ND_WIRE_HELLO);
    nd_wire_put_u32(&out, ND_WIRE_PROTOCOL);
    nd_wire_put_text(&out, "1");
    nd_wire_put_text(&out, "job");
    nd_wire_put_u32(&out, 0);
    nd_wire_put_u32(&out, role);
    nd_wire_put_u32(&out, (uint32_t)role);
    nd_wire_put_text(&out, "host");
    nd_status status = nd_wire_end(&out);
    ND_ASSERT(status == ND_OK);
    nd_server_receive(server, peer, out.data, out.size, 0);
    nd_wire_buffer_fini(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    nd_server_options options = {.version = "1", .run_id = "job", .world_size = 1, .nnodes = 2};
    nd_server_hooks hooks = {
        .send = on_send, .drop = on_drop, .notice = on_notice, .node_frame = on_node_frame};
    nd_server *server;
    nd_peer *peer;
    member m = {0};
    if (size == 0) {
        return 0;
    }
    nd_wire_parser_init(&m.answers, ND_WIRE_LIMIT_MEMBER);
    nd_status status = nd_server_create(&options, &hooks, &server);
    ND_ASSERT(status == ND_OK);
    status = nd_server_connect(server, &m, "peer", 0, &peer);
    ND_ASSERT(status == ND_OK);
    if (data[0] & 1) {
        nd_wire_role role = data[0] & 2 ? ND_WIRE_NODE : ND_WIRE_WORKER;
        say_hello(server, peer, (int)role);
        ND_ASSERT(nd_server_members(server, role) == 1);
    }
    size_t piece = (size_t)(data[0] >> 2) + 1;
    for (size_t at = 1; at < size && !m.dropped; at += piece) {
        nd_server_receive(server, peer, data + at, size - at < piece ? size - at : piece, 0);
        nd_server_drained(server, peer);
    }
    nd_server_tick(server, INT64_MAX / 2);
    nd_wire_frame frame;
    do {
        status = nd_wire_next(&m.answers, &frame);
        ND_ASSERT(status == ND_OK);
    } while (frame.type != ND_WIRE_NONE);
    ND_ASSERT(m.answers.begin == m.answers.end);
    nd_server_gone(server, peer);
    nd_server_destroy(server);
    nd_wire_parser_fini(&m.answers);
    return 0;
}

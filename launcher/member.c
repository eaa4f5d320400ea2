// SPDX-License-Identifier: Apache-2.0
/* A node other than node 0: one connection to node 0, blocking until it has joined, and then on the
 * job's loop. */
#include <stdlib.h>

#include "launcher/launcher.h"
#include "launcher/nodes.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/address.h"
#include "runtime/rdzv/channel.h"
#include "runtime/rdzv/uv.h"

enum { PULSE_MS = 100 };

static const int64_t send_ns = 2000000000;     /* for a message to leave */
static const int64_t refused_ns = 5000000000;  /* for node 0 to refuse it then */
static const double failed_check_seconds = 30; /* for node 0 to be reached after a failed check */
/* For node 0 to end the job after it said stop, beside the time for it to gather nodes again. */
static const double release_seconds = 120;

struct nd_member {
    nd_nodes_options options;
    nd_channel *channel;
    char node_0[128];
    int port;
    uv_poll_t poll;
    uv_timer_t pulse;
    int64_t heard_ns, beat_ns;
    int64_t join_by;    /* for the first plan of a node that does not wait */
    int64_t stopped_ns; /* node 0 said stop, or our workers ended; 0: not yet */
    int64_t epoch;      /* of the start whose workers run, or ran last; -1: of none yet */
    bool waits;         /* before its first plan: the job runs without this node */
    bool rests;         /* it has no place in this start */
    bool ended;         /* our workers have, or there were none yet */
    bool over;          /* released, or node 0 is lost */
    int code;
};

static nd_status send_frame(nd_member *m, int type, const uint32_t *numbers, int count,
                            const char *text)
{
    nd_wire_buffer out = {0};
    nd_node_frame(&out, type, numbers, count, text);
    nd_status status = nd_wire_end(&out);
    if (status == ND_OK) {
        status = nd_channel_send(m->channel, &out, nd_clock_ns() + send_ns);
    }
    nd_wire_buffer_fini(&out);
    return status;
}

/* A text that is not one of the fields is empty. */
static void read_text(nd_wire_cursor *cursor, char *out, size_t capacity)
{
    size_t bytes = 0;
    const uint8_t *text = nd_wire_get_blob(cursor, &bytes);
    snprintf(out, capacity, "%.*s", text ? (int)bytes : 0, text ? (const char *)text : "");
}

static nd_status join(nd_member *m, const uint8_t key[ND_KEY_BYTES], nd_job_place *place)
{
    const nd_nodes_options *o = &m->options;
    char host[ND_HOST_MAX];
    double limit = nd_nodes_limit(o->config);
    if (o->cannot_start && limit > failed_check_seconds) {
        limit = failed_check_seconds;
    }
    /* Node 0 gives up at its own deadline and names the missing nodes; wait a little longer. */
    m->join_by = nd_clock_ns() + (int64_t)((2 * limit + 5) * 1e9);
    int world;
    ND_TRY(nd_endpoint_parse(o->config->launch.rdzv_endpoint, host, &m->port));
    ND_TRY(nd_channel_open(host, m->port, key, limit, &m->channel));
    snprintf(m->node_0, sizeof m->node_0, "%s", nd_channel_peer(m->channel));
    snprintf(place->master_addr, sizeof place->master_addr, "%s", m->node_0);
    place->master_port = m->port;
    nd_hello hello = {.version = ND_VERSION,
                      .run_id = "",
                      .host = o->host_name,
                      .role = ND_WIRE_NODE,
                      .index = (int)o->config->launch.node_rank};
    ND_TRY(nd_channel_hello(m->channel, &hello, m->join_by, place->job, sizeof place->job, &world));
    if (o->cannot_start) {
        /* Node 0 learns the code of this node's failed check, and refuses the node. */
        const uint32_t numbers[] = {(uint32_t)o->cannot_start, 0};
        nd_wire_frame frame;
        ND_TRY(send_frame(m, ND_NODE_FAIL, numbers, 2, NULL));
        ND_TRY(nd_channel_receive(m->channel, nd_clock_ns() + refused_ns, &frame));
        return nd_fail((nd_status)o->cannot_start, "node 0 knows that this node cannot start");
    }
    ND_TRY(send_frame(m, ND_NODE_JOIN, (uint32_t[]){(uint32_t)o->local_workers}, 1, o->job_text));
    nd_log_info("ndlaunch: joined node 0 (%s port %d) as node %d of %lld", m->node_0, m->port,
                hello.index, (long long)(o->config->launch.nnodes + o->config->launch.spare_nodes));
    return ND_OK;
}

nd_status nd_member_join(const nd_nodes_options *options, const uint8_t key[ND_KEY_BYTES],
                         nd_member **out, nd_job_place *place)
{
    nd_member *m;
    ND_TRY(ND_ALLOC(1, &m));
    m->options = *options;
    m->epoch = -1;
    m->ended = true;
    nd_status status = join(m, key, place);
    if (status != ND_OK) {
        nd_member_destroy(m);
        return status;
    }
    *out = m;
    return ND_OK;
}

void nd_member_destroy(nd_member *m)
{
    if (m) {
        nd_channel_close(m->channel);
        free(m);
    }
}

/* Finishes the job once node 0 has released this node and its workers have ended. */
static void leave(nd_member *m)
{
    if (m->over && m->ended) {
        nd_wire_buffer out = {0};
        nd_wire_begin(&out, ND_WIRE_BYE);
        if (nd_wire_end(&out) == ND_OK) {
            nd_channel_send(m->channel, &out, nd_clock_ns() + send_ns);
        }
        nd_wire_buffer_fini(&out);
        m->options.finish(m->options.context, m->code);
    }
}

/* Before this node took part in a start; the thread's error says why it will not. */
static void end_unstarted(nd_member *m)
{
    nd_log_error("%s", nd_error_last()->message);
    m->over = true;
    m->code = (int)nd_error_last()->status;
    uv_poll_stop(&m->poll);
    leave(m);
}

static void lose_node_0(nd_member *m, const char *why)
{
    char text[1200];
    if (m->over) {
        return;
    }
    if (m->epoch < 0) {
        snprintf(text, sizeof text, "%.512s", why);
        nd_fail(ND_ERR_IO, "node 0 (%s port %d) was lost while this node waited%s: %s", m->node_0,
                m->port, m->waits ? "" : " for the others to join", text);
        end_unstarted(m);
        return;
    }
    snprintf(text, sizeof text, "\nndlaunch: node 0 (%s port %d) was lost: %.1000s\n", m->node_0,
             m->port, why);
    nd_log_text(text);
    m->over = true;
    m->code = ND_ERR_IO;
    uv_poll_stop(&m->poll);
    m->options.stop(m->options.context, ND_STOP_MS);
    leave(m);
}

static void on_stop(nd_member *m, const nd_wire_frame *frame)
{
    nd_wire_cursor cursor = nd_wire_body(frame);
    int64_t epoch = nd_wire_get_u32(&cursor);
    uint32_t patience_ms = nd_wire_get_u32(&cursor);
    if (nd_wire_finished(&cursor) && epoch == m->epoch) {
        m->stopped_ns = nd_clock_ns();
        m->options.stop(m->options.context,
                        patience_ms < ND_STOP_MS ? (int)patience_ms : ND_STOP_MS);
    }
}

/* A start of the job. */
static void on_plan(nd_member *m, const nd_wire_frame *frame)
{
    char run_folder[ND_RUN_FOLDER_MAX];
    nd_wire_cursor cursor = nd_wire_body(frame);
    nd_nodes_start start = {.run_folder = run_folder};
    start.first_rank = (int)nd_wire_get_u32(&cursor);
    start.world_size = (int)nd_wire_get_u32(&cursor);
    start.epoch = nd_wire_get_u32(&cursor);
    read_text(&cursor, run_folder, sizeof run_folder);
    if (!nd_wire_finished(&cursor) || start.world_size < 1 ||
        start.world_size > m->options.world_size ||
        start.world_size % m->options.local_workers != 0 || !m->ended || start.epoch <= m->epoch) {
        lose_node_0(m, "it sent a plan that does not fit this node's state");
        return;
    }
    m->epoch = start.epoch;
    m->ended = m->rests = false;
    m->stopped_ns = 0;
    m->options.start(m->options.context, &start);
}

/* The job is at work without this node, which stays connected as long as node 0 gives signs of
 * life. */
static void wait_on(nd_member *m)
{
    if (m->epoch < 0 && !m->waits) {
        m->waits = true;
        nd_log_info("ndlaunch: this node waits without workers until the job needs it");
    }
}

/* The job goes on without this node, which stays connected. */
static void on_rest(nd_member *m)
{
    wait_on(m);
    if (m->epoch >= 0 && m->ended && !m->rests) {
        m->rests = true;
        m->stopped_ns = 0;
        nd_log_warning("ndlaunch: the job goes on without this node, which waits without workers");
    }
}

static void on_error(nd_member *m, const nd_wire_frame *frame)
{
    nd_channel_error(frame);
    if (m->epoch < 0) {
        end_unstarted(m);
    } else {
        lose_node_0(m, nd_error_last()->message);
    }
}

static void on_release(nd_member *m, const nd_wire_frame *frame)
{
    char reason[512];
    nd_wire_cursor cursor = nd_wire_body(frame);
    m->code = (int)nd_wire_get_u32(&cursor);
    read_text(&cursor, reason, sizeof reason);
    if (reason[0]) {
        nd_log_warning("ndlaunch: the job ended with code %d%s: %s", m->code,
                       m->epoch < 0 ? " before this node took part" : "", reason);
    }
    m->over = true;
    uv_poll_stop(&m->poll);
    if (!m->ended) {
        m->options.stop(m->options.context, ND_STOP_MS);
    }
    leave(m);
}

static void on_readable(uv_poll_t *poll, int uv_status, int events)
{
    nd_member *m = poll->data;
    while (!m->over) {
        nd_wire_frame frame;
        if (nd_channel_receive(m->channel, 0, &frame) != ND_OK) {
            lose_node_0(m, nd_error_last()->message);
            return;
        }
        m->heard_ns = nd_clock_ns();
        if (frame.type == ND_WIRE_NONE) {
            return;
        }
        switch ((int)frame.type) {
        case ND_NODE_STOP:
            on_stop(m, &frame);
            break;
        case ND_NODE_PLAN:
            on_plan(m, &frame);
            break;
        case ND_NODE_REST:
            on_rest(m);
            break;
        case ND_NODE_RELEASE:
            on_release(m, &frame);
            break;
        case ND_WIRE_ERROR:
            on_error(m, &frame);
            break;
        default: /* a beat, which node 0 sends once the job has begun */
            wait_on(m);
            break;
        }
    }
}

static void on_pulse(uv_timer_t *timer)
{
    nd_member *m = timer->data;
    int64_t now = nd_clock_ns();
    if (m->over) {
        return;
    }
    if (now - m->beat_ns > (int64_t)ND_NODE_BEAT_MS * 1000000) {
        m->beat_ns = now;
        if (send_frame(m, ND_NODE_BEAT, NULL, 0, NULL) != ND_OK) {
            lose_node_0(m, nd_error_last()->message);
            return;
        }
    }
    const bool joins = m->epoch < 0 && !m->waits;
    if (joins && now > m->join_by) {
        nd_fail(ND_ERR_HANG,
                "node 0 (%s port %d) waited for other nodes, and gave no answer in time", m->node_0,
                m->port);
        end_unstarted(m);
        return;
    }
    if (!joins && now - m->heard_ns > (int64_t)ND_NODE_SILENT_MS * 1000000) {
        lose_node_0(m, "it gave no sign of life for 15 s");
        return;
    }
    double limit = nd_nodes_limit(m->options.config) + release_seconds;
    if (m->stopped_ns && (double)(now - m->stopped_ns) * 1e-9 > limit) {
        lose_node_0(m, "it neither ended the job nor started it again in time");
    }
}

nd_status nd_member_watch(nd_member *m)
{
    m->heard_ns = m->beat_ns = nd_clock_ns();
    ND_TRY(ND_UV(uv_timer_init(m->options.loop, &m->pulse)));
    ND_TRY(ND_UV(uv_poll_init(m->options.loop, &m->poll, nd_channel_fd(m->channel))));
    m->pulse.data = m->poll.data = m;
    ND_TRY(ND_UV(uv_timer_start(&m->pulse, on_pulse, PULSE_MS, PULSE_MS)));
    return ND_UV(uv_poll_start(&m->poll, UV_READABLE, on_readable));
}

void nd_member_failed(nd_member *m, int code)
{
    const uint32_t numbers[] = {(uint32_t)code, (uint32_t)m->epoch};
    if (!m->over && send_frame(m, ND_NODE_FAIL, numbers, 2, NULL) != ND_OK) {
        lose_node_0(m, nd_error_last()->message);
    }
}

void nd_member_asked(nd_member *m)
{
    if (m->rests && !m->over) { /* the job does not need this node */
        m->over = true;
        m->code = ND_ERR_PREEMPTED;
        uv_poll_stop(&m->poll);
        leave(m);
    } else {
        nd_member_failed(m, ND_ERR_PREEMPTED);
    }
}

void nd_member_ended(nd_member *m, const nd_nodes_end *end, const char *screen)
{
    const uint32_t numbers[] = {(uint32_t)end->code, (uint32_t)m->epoch, end->asked,
                                end->left_behind, end->own};
    m->ended = true;
    nd_log_text(screen);
    if (!m->over && send_frame(m, ND_NODE_END, numbers, 5, screen) != ND_OK) {
        lose_node_0(m, nd_error_last()->message);
    }
    leave(m);
}

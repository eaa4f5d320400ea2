// SPDX-License-Identifier: Apache-2.0
/* A node other than node 0: one connection to node 0, blocking until it has joined, and then on the
 * job's loop. */
#include <stdlib.h>

#include "launcher/launcher.h"
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

typedef struct member {
    nd_nodes nodes; /* whose address and port are node 0's */
    nd_channel *channel;
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
} member;

static nd_status send_frame(member *m, int type, const uint32_t *numbers, int count,
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

static nd_status join(member *m, const uint8_t key[ND_KEY_BYTES])
{
    nd_nodes *n = &m->nodes;
    const nd_job_options *o = n->options.job;
    char host[ND_HOST_MAX];
    double limit = nd_nodes_limit(o->config);
    if (o->cannot_start && limit > failed_check_seconds) {
        limit = failed_check_seconds;
    }
    /* Node 0 gives up at its own deadline and names the missing nodes; wait a little longer. */
    m->join_by = nd_clock_ns() + (int64_t)((2 * limit + 5) * 1e9);
    int world;
    ND_TRY(nd_endpoint_parse(o->config->launch.rdzv_endpoint, host, &n->master_port));
    ND_TRY(nd_channel_open(host, n->master_port, key, limit, &m->channel));
    snprintf(n->master_addr, sizeof n->master_addr, "%s", nd_channel_peer(m->channel));
    nd_hello hello = {.version = ND_VERSION,
                      .run_id = "",
                      .host = n->options.host_name,
                      .role = ND_WIRE_NODE,
                      .index = (int)o->config->launch.node_rank};
    ND_TRY(nd_channel_hello(m->channel, &hello, m->join_by, n->job, sizeof n->job, &world));
    if (o->cannot_start) {
        /* Node 0 learns the code of this node's failed check, and refuses the node. */
        const uint32_t numbers[] = {(uint32_t)o->cannot_start, 0};
        nd_wire_frame frame;
        ND_TRY(send_frame(m, ND_NODE_FAIL, numbers, 2, NULL));
        ND_TRY(nd_channel_receive(m->channel, nd_clock_ns() + refused_ns, &frame));
        return nd_fail((nd_status)o->cannot_start, "node 0 knows that this node cannot start");
    }
    ND_TRY(send_frame(m, ND_NODE_JOIN, (uint32_t[]){(uint32_t)o->local_workers}, 1, o->job_text));
    nd_log_info("ndlaunch: joined node 0 (%s port %d) as node %d of %lld", n->master_addr,
                n->master_port, hello.index,
                (long long)(o->config->launch.nnodes + o->config->launch.spare_nodes));
    return ND_OK;
}

/* Finishes the job once node 0 has released this node and its workers have ended. */
static void leave(member *m)
{
    if (m->over && m->ended) {
        (void)send_frame(m, ND_WIRE_BYE, NULL, 0, NULL);
        m->nodes.options.finish(m->nodes.options.context, m->code);
    }
}

/* Ends this node with the code, its workers too. */
static void end_node(member *m, int code)
{
    m->over = true;
    m->code = code;
    uv_poll_stop(&m->poll);
    if (!m->ended) {
        m->nodes.options.stop(m->nodes.options.context, ND_STOP_MS);
    }
    leave(m);
}

/* Before this node took part in a start; the thread's error says why it will not. */
static void end_unstarted(member *m)
{
    nd_log_error("%s", nd_error_last()->message);
    end_node(m, (int)nd_error_last()->status);
}

static void lose_node_0(member *m, const char *why)
{
    char text[1200];
    if (m->over) {
        return;
    }
    if (m->epoch < 0) {
        snprintf(text, sizeof text, "%.512s", why);
        nd_fail(ND_ERR_IO, "node 0 (%s port %d) was lost while this node waited%s: %s",
                m->nodes.master_addr, m->nodes.master_port,
                m->waits ? "" : " for the others to join", text);
        end_unstarted(m);
        return;
    }
    snprintf(text, sizeof text, "\nndlaunch: node 0 (%s port %d) was lost: %.1000s\n",
             m->nodes.master_addr, m->nodes.master_port, why);
    nd_log_text(text);
    end_node(m, ND_ERR_IO);
}

static void on_stop(member *m, const nd_wire_frame *frame)
{
    nd_wire_cursor cursor = nd_wire_body(frame);
    int64_t epoch = nd_wire_get_u32(&cursor);
    uint32_t patience_ms = nd_wire_get_u32(&cursor);
    if (nd_wire_finished(&cursor) && epoch == m->epoch) {
        m->stopped_ns = nd_clock_ns();
        m->nodes.options.stop(m->nodes.options.context,
                              patience_ms < ND_STOP_MS ? (int)patience_ms : ND_STOP_MS);
    }
}

/* A start of the job. */
static void on_plan(member *m, const nd_wire_frame *frame)
{
    char run_folder[ND_RUN_FOLDER_MAX];
    nd_wire_cursor cursor = nd_wire_body(frame);
    nd_nodes_start start = {.run_folder = run_folder};
    start.first_rank = (int)nd_wire_get_u32(&cursor);
    start.world_size = (int)nd_wire_get_u32(&cursor);
    start.epoch = nd_wire_get_u32(&cursor);
    read_text(&cursor, run_folder, sizeof run_folder);
    if (!nd_wire_finished(&cursor) || start.world_size < 1 ||
        start.world_size > m->nodes.options.job->world_size ||
        start.world_size % m->nodes.options.job->local_workers != 0 || !m->ended ||
        start.epoch <= m->epoch) {
        lose_node_0(m, "it sent a plan that does not fit this node's state");
        return;
    }
    m->epoch = start.epoch;
    m->ended = m->rests = false;
    m->stopped_ns = 0;
    m->nodes.options.start(m->nodes.options.context, &start);
}

/* The job is at work without this node, which stays connected as long as node 0 gives signs of
 * life. */
static void wait_on(member *m)
{
    if (m->epoch < 0 && !m->waits) {
        m->waits = true;
        nd_log_info("ndlaunch: this node waits without workers until the job needs it");
    }
}

static void on_release(member *m, const nd_wire_frame *frame)
{
    char reason[512];
    nd_wire_cursor cursor = nd_wire_body(frame);
    int code = (int)nd_wire_get_u32(&cursor);
    read_text(&cursor, reason, sizeof reason);
    if (reason[0]) {
        nd_log_warning("ndlaunch: the job ended with code %d%s: %s", code,
                       m->epoch < 0 ? " before this node took part" : "", reason);
    }
    end_node(m, code);
}

static void on_readable(uv_poll_t *poll, int uv_status, int events)
{
    member *m = poll->data;
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
        case ND_NODE_REST: /* the job goes on without this node, which stays connected */
            wait_on(m);
            if (m->epoch >= 0 && m->ended && !m->rests) {
                m->rests = true;
                m->stopped_ns = 0;
                nd_log_warning("ndlaunch: the job goes on without this node, which waits without "
                               "workers");
            }
            break;
        case ND_NODE_RELEASE:
            on_release(m, &frame);
            break;
        case ND_WIRE_ERROR:
            nd_channel_error(&frame);
            if (m->epoch < 0) {
                end_unstarted(m);
            } else {
                lose_node_0(m, nd_error_last()->message);
            }
            break;
        default: /* a beat, which node 0 sends once the job has begun */
            wait_on(m);
            break;
        }
    }
}

static void on_pulse(uv_timer_t *timer)
{
    member *m = timer->data;
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
                "node 0 (%s port %d) waited for other nodes, and gave no answer in time",
                m->nodes.master_addr, m->nodes.master_port);
        end_unstarted(m);
        return;
    }
    if (!joins && now - m->heard_ns > (int64_t)ND_NODE_SILENT_MS * 1000000) {
        lose_node_0(m, "it gave no sign of life for 15 s");
        return;
    }
    double limit = nd_nodes_limit(m->nodes.options.job->config) + release_seconds;
    if (m->stopped_ns && (double)(now - m->stopped_ns) * 1e-9 > limit) {
        lose_node_0(m, "it neither ended the job nor started it again in time");
    }
}

static void failed(nd_nodes *nodes, int code)
{
    member *m = (member *)nodes;
    const uint32_t numbers[] = {(uint32_t)code, (uint32_t)m->epoch};
    if (!m->over && send_frame(m, ND_NODE_FAIL, numbers, 2, NULL) != ND_OK) {
        lose_node_0(m, nd_error_last()->message);
    }
    nodes->options.stop(nodes->options.context,
                        ND_STOP_MS); /* of a restart nothing is known here */
}

static void ended(nd_nodes *nodes, const nd_nodes_end *end, const char *screen)
{
    member *m = (member *)nodes;
    const uint32_t numbers[] = {(uint32_t)end->code, (uint32_t)m->epoch, end->asked,
                                end->left_behind, end->weight};
    m->ended = true;
    nd_log_text(screen);
    if (!m->over && send_frame(m, ND_NODE_END, numbers, 5, screen) != ND_OK) {
        lose_node_0(m, nd_error_last()->message);
    }
    leave(m);
}

static void asked(nd_nodes *nodes, int number)
{
    member *m = (member *)nodes;
    if (m->rests && !m->over) { /* the job does not need this node */
        end_node(m, ND_ERR_PREEMPTED);
    } else {
        failed(nodes, ND_ERR_PREEMPTED);
    }
}

static void destroy(nd_nodes *nodes)
{
    nd_channel_close(((member *)nodes)->channel);
    free(nodes);
}

nd_status nd_member_join(const nd_nodes_options *options, const uint8_t key[ND_KEY_BYTES],
                         nd_nodes **out)
{
    static const nd_nodes_role role = {failed, ended, asked, destroy};
    member *m;
    ND_TRY(ND_ALLOC(1, &m));
    *out = &m->nodes;
    m->nodes.role = &role;
    m->nodes.options = *options;
    m->epoch = -1;
    m->ended = true;
    ND_TRY(join(m, key));
    m->heard_ns = m->beat_ns = nd_clock_ns();
    ND_TRY(ND_UV(uv_timer_init(options->loop, &m->pulse)));
    ND_TRY(ND_UV(uv_poll_init(options->loop, &m->poll, nd_channel_fd(m->channel))));
    m->pulse.data = m->poll.data = m;
    ND_TRY(ND_UV(uv_timer_start(&m->pulse, on_pulse, PULSE_MS, PULSE_MS)));
    return ND_UV(uv_poll_start(&m->poll, UV_READABLE, on_readable));
}

// SPDX-License-Identifier: Apache-2.0
/*
 * Node 0 of several: gathers the nodes, watches them while workers run, and gathers them again
 * before a restart. The store's hooks only record what arrived; the pulse acts on it, outside of
 * the store's calls.
 */
#include <stdlib.h>
#include <string.h>

#include "launcher/nodes.h"
#include "launcher/roster.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/rdzv/uv.h"

enum { PULSE_MS = 20 };

static const int64_t second_ns = 1000000000;
static const int64_t notice_ns = 10000000000; /* between lines about missing nodes */
static const int64_t stop_ns = 20000000000;   /* for a node to end its workers after a stop */
static const int64_t leave_ns = 3000000000;   /* for nodes to leave after the release */
static const double refusing_seconds = 10;    /* for members to join, so that they can be refused */

typedef enum state {
    GATHERING = 0, /* before the first start */
    RUNNING,       /* workers run on some node */
    BETWEEN,       /* all have ended; there may be a further start */
    RELEASED,
} state;

struct nd_coordinator {
    nd_nodes_options options;
    nd_server *server; /* NULL until all are to be gathered */
    uv_timer_t pulse;
    nd_roster roster;
    nd_status refused;
    int refused_count; /* nodes that were refused when they joined */
    char refusal[ND_ERROR_MESSAGE_MAX];
    state state;
    int64_t epoch, next_epoch;
    bool asked; /* a signal to a launcher asked the job to end */
    bool stop_sent;
    bool restarts; /* BETWEEN: the nodes are gathered for start next_epoch */
    int64_t stop_ns, release_ns, beat_ns, gather_ns, noticed_ns;
    char run_folder[ND_RUN_FOLDER_MAX];
    nd_nodes_end own, end; /* of this node, of all: how the last start ended */
    int code;
};

nd_status nd_coordinator_create(const nd_nodes_options *options, nd_coordinator **out)
{
    nd_coordinator *c;
    ND_TRY(ND_ALLOC(1, &c));
    c->options = *options;
    nd_status status =
        nd_roster_init((int)options->config->launch.nnodes, options->host_name, &c->roster);
    if (status != ND_OK) {
        free(c);
        return status;
    }
    if (options->cannot_start) {
        c->refused = (nd_status)options->cannot_start;
        snprintf(c->refusal, sizeof c->refusal,
                 "node 0 (%s) failed its start-up check; see its own output for the reason",
                 options->host_name);
    }
    *out = c;
    return ND_OK;
}

void nd_coordinator_destroy(nd_coordinator *c)
{
    if (c) {
        nd_roster_fini(&c->roster);
        free(c);
    }
}

/* Sends nothing to a node that is not connected. */
static void send_frame(nd_coordinator *c, int index, int type, const uint32_t *numbers, int count,
                       const char *text)
{
    nd_wire_buffer out = {0};
    nd_node_frame(&out, type, numbers, count, text);
    if (c->roster.nodes[index].peer && nd_wire_end(&out) == ND_OK) {
        nd_server_send(c->server, c->roster.nodes[index].peer, out.data, out.size);
    }
    nd_wire_buffer_fini(&out);
}

/* Until all nodes have joined. */

static nd_status refuse(nd_coordinator *c, nd_status status)
{
    c->refused = status;
    snprintf(c->refusal, sizeof c->refusal, "%s", nd_error_last()->message);
    return status;
}

/* A node's first frame: compares its settings with those of this node. */
static nd_status on_join(nd_coordinator *c, nd_peer *peer, int index, nd_wire_cursor *cursor)
{
    nd_node *n = &c->roster.nodes[index];
    size_t bytes;
    uint32_t workers = nd_wire_get_u32(cursor);
    const uint8_t *blob = nd_wire_get_blob(cursor, &bytes);
    bool first = c->state == GATHERING;
    bool again = c->options.config->launch.max_restarts > 0 && c->state != RELEASED && !n->peer;
    if (!nd_wire_finished(cursor) || !(first || again)) {
        return nd_fail(ND_ERR_IO, "node %d joined with a damaged message, or late", index);
    }
    if (c->refused != ND_OK) {
        c->refused_count++;
        return nd_fail(c->refused, "%s", c->refusal);
    }
    char ours[ND_WIRE_TEXT_MAX + 32], theirs[ND_WIRE_TEXT_MAX + 32];
    snprintf(ours, sizeof ours, "node 0 (%s)", c->options.host_name);
    snprintf(theirs, sizeof theirs, "node %d (%s)", index, nd_peer_host(peer));
    char *text = strndup((const char *)blob, bytes);
    nd_status status = text ? nd_config_diff(c->options.job_text, ours, text, theirs)
                            : nd_fail_memory("the settings of node %d", index);
    free(text);
    if (status == ND_OK && (int)workers != c->options.local_workers) {
        status =
            nd_fail(ND_ERR_CONFIG, "%s has %u workers, %s has %d; start equally many on all nodes",
                    theirs, workers, ours, c->options.local_workers);
    }
    if (status != ND_OK) { /* one that comes back may be corrected and come once more */
        return first ? refuse(c, status) : status;
    }
    n->peer = peer;
    n->joined = true;
    n->waits = !first;
    snprintf(n->host, sizeof n->host, "%s", nd_peer_host(peer));
    return ND_OK;
}

/* Or the code with which its check failed. */
static nd_status on_failed_check(nd_coordinator *c, const nd_peer *peer, int index, int code)
{
    c->refused_count++;
    if (c->refused != ND_OK) {
        return nd_fail(c->refused, "%s", c->refusal);
    }
    nd_status status = nd_fail(code > 0 ? (nd_status)code : ND_ERR_INTERNAL,
                               "node %d (%s) failed its start-up check; see its own output for the "
                               "reason",
                               index, nd_peer_host(peer));
    return c->state == GATHERING ? refuse(c, status) : status;
}

static void refuse_all(nd_coordinator *c, nd_status status, const char *why)
{
    for (int i = 1; i < c->roster.count; i++) {
        if (c->roster.nodes[i].peer) {
            nd_server_refuse(c->server, c->roster.nodes[i].peer, status, why);
        }
    }
    int64_t deadline = nd_clock_ns() + second_ns; /* for the refusals to leave */
    while (nd_server_members(c->server, ND_WIRE_NODE) > 0 && nd_clock_ns() < deadline) {
        uv_run(c->options.loop, UV_RUN_ONCE);
    }
}

/* A warning, or at the deadline the error. */
static nd_status report_missing(nd_coordinator *c, double seconds, bool last)
{
    char line[512];
    ND_TRY(nd_roster_missing(&c->roster, seconds, line, sizeof line));
    if (!last) {
        nd_log_warning("ndlaunch: %s", line);
        return ND_OK;
    }
    return nd_fail(ND_ERR_HANG,
                   "%s (launch.rdzv_timeout_seconds, and time to index JSONL); start ndlaunch "
                   "there with --node-rank, the same endpoint and the same key",
                   line);
}

static nd_status wait_for_nodes(nd_coordinator *c)
{
    double limit = nd_nodes_limit(c->options.config);
    int64_t begin = nd_clock_ns(), noticed = begin;
    while (!nd_roster_all_joined(&c->roster)) {
        uv_run(c->options.loop, UV_RUN_ONCE); /* the store ticks ten times a second */
        int64_t now = nd_clock_ns();
        double waited = (double)(now - begin) * 1e-9;
        /* A coordinator that cannot start stays for a while to refuse the members, which would
         * otherwise wait for it until their deadline. */
        bool leaves = !c->options.cannot_start || c->refused_count >= c->roster.count - 1 ||
                      waited > refusing_seconds;
        if (c->refused != ND_OK && leaves) {
            return nd_fail(c->refused, "%s", c->refusal);
        }
        if (waited > limit && !nd_roster_all_joined(&c->roster)) {
            return report_missing(c, limit, true);
        }
        if (now - noticed > notice_ns) {
            noticed = now;
            ND_TRY(report_missing(c, waited, false));
        }
    }
    return ND_OK;
}

/* All nodes are here, and each of them gets its part of a start. */
static void begin_start(nd_coordinator *c)
{
    c->state = RUNNING;
    c->stop_sent = c->restarts = c->asked = false;
    nd_roster_begin(&c->roster);
}

static void send_plans(nd_coordinator *c)
{
    for (int i = 1; i < c->roster.count; i++) {
        uint32_t first_rank = (uint32_t)(i * c->options.local_workers);
        const uint32_t numbers[] = {first_rank, (uint32_t)c->options.world_size,
                                    (uint32_t)c->epoch};
        send_frame(c, i, ND_NODE_PLAN, numbers, 3, c->run_folder);
    }
}

nd_status nd_coordinator_gather(nd_coordinator *c, nd_server *server)
{
    c->server = server;
    nd_status status = wait_for_nodes(c);
    if (status != ND_OK) {
        char why[ND_ERROR_MESSAGE_MAX];
        snprintf(why, sizeof why, "%s", nd_error_last()->message);
        refuse_all(c, status, why);
        return nd_fail(status, "%s", why);
    }
    begin_start(c);
    send_plans(c);
    return ND_OK;
}

/* While workers run. */

/* Closes a node's connection: its launcher must be started again. */
static void part_with(nd_coordinator *c, int index, const char *why)
{
    nd_node *n = &c->roster.nodes[index];
    nd_peer *peer = n->peer;
    n->peer = NULL;
    n->joined = n->waits = false;
    if (peer) {
        nd_server_refuse(c->server, peer, ND_ERR_IO, why);
    }
}

static void lose_node(nd_coordinator *c, int index, const char *why)
{
    part_with(c, index, why);
    nd_node_lose(&c->roster.nodes[index], index, why);
}

void nd_coordinator_on_left(void *context, nd_peer *peer, nd_wire_role role, int index, bool clean)
{
    nd_coordinator *c = context;
    if (role != ND_WIRE_NODE || c->roster.nodes[index].peer != peer) {
        return;
    }
    nd_node *n = &c->roster.nodes[index];
    n->peer = NULL;
    n->joined = n->waits = false; /* it may join again */
    n->heard_ns = nd_clock_ns();
    if (c->state == RUNNING) {
        lose_node(c, index, "its connection to node 0 was closed");
    }
}

nd_status nd_coordinator_on_frame(void *context, nd_peer *peer, int index,
                                  const nd_wire_frame *frame)
{
    nd_coordinator *c = context;
    nd_node *n = &c->roster.nodes[index];
    nd_wire_cursor cursor = nd_wire_body(frame);
    bool joins = (int)frame->type == ND_NODE_JOIN || (int)frame->type == ND_NODE_FAIL;
    if (!joins && (n->peer != peer || n->waits)) {
        return nd_fail(ND_ERR_IO, "node %d sent a message before it had joined", index);
    }
    n->heard_ns = nd_clock_ns();
    switch ((int)frame->type) {
    case ND_NODE_JOIN:
        return on_join(c, peer, index, &cursor);
    case ND_NODE_BEAT:
        return ND_OK;
    case ND_NODE_FAIL: {
        int code = (int)nd_wire_get_u32(&cursor);
        bool ours = nd_wire_get_u32(&cursor) == (uint32_t)c->epoch;
        if (nd_wire_finished(&cursor) && n->peer != peer) {
            return on_failed_check(c, peer, index, code);
        }
        if (nd_wire_finished(&cursor) && ours && c->state == RUNNING) {
            nd_node_fail(n, code);
        }
        c->asked |= ours && c->state == BETWEEN && code == ND_ERR_PREEMPTED;
        break;
    }
    case ND_NODE_END: {
        size_t bytes;
        int code = (int)nd_wire_get_u32(&cursor);
        bool ours = nd_wire_get_u32(&cursor) == (uint32_t)c->epoch;
        bool asked = nd_wire_get_u32(&cursor) != 0;
        const uint8_t *screen = nd_wire_get_blob(&cursor, &bytes);
        if (nd_wire_finished(&cursor) && ours && !n->ended && c->state == RUNNING) {
            nd_node_end(n, code, (const char *)screen, bytes);
            c->asked |= asked;
        }
        break;
    }
    default:
        return nd_fail(ND_ERR_IO, "node %d sent a message of unknown type %d", index,
                       (int)frame->type);
    }
    return nd_wire_finished(&cursor) ? ND_OK
                                     : nd_fail(ND_ERR_IO, "node %d sent a damaged message", index);
}

/* All workers of this start have ended: shows the first failure and asks the job what follows. */
static void conclude(nd_coordinator *c)
{
    nd_nodes_end *end = &c->end;
    *end = (nd_nodes_end){.node = nd_roster_first_failure(&c->roster), .asked = c->asked};
    c->state = BETWEEN;
    if (end->node >= 0) {
        const nd_node *n = &c->roster.nodes[end->node];
        end->code = n->code;
        end->occurred_ns = n->lost ? n->heard_ns : n->failed_ns;
        fputs(n->screen ? n->screen : "", stderr);
        snprintf(end->words, sizeof end->words, "node %d (host %.128s) %s", end->node, n->host,
                 n->lost                       ? "was lost"
                 : n->code == ND_ERR_PREEMPTED ? "was stopped"
                                               : "failed first");
    }
    if (end->node == 0 && c->own.words[0]) { /* this node knows more about its own workers */
        nd_nodes_end told = *end;
        told.occurred_ns = c->own.occurred_ns;
        snprintf(told.words, sizeof told.words, "%s", c->own.words);
        c->options.over(c->options.context, &told);
    } else {
        c->options.over(c->options.context, end);
    }
}

void nd_coordinator_release(nd_coordinator *c, int code)
{
    if (c->state == RELEASED) {
        return;
    }
    c->state = RELEASED;
    c->release_ns = nd_clock_ns();
    c->code = code;
    for (int i = 1; i < c->roster.count; i++) {
        send_frame(c, i, ND_NODE_RELEASE, (uint32_t[]){(uint32_t)code}, 1, c->end.words);
    }
}

void nd_coordinator_restart(nd_coordinator *c, int64_t epoch, const char *run_folder)
{
    if (c->state == BETWEEN) {
        c->restarts = true;
        c->next_epoch = epoch;
        c->gather_ns = c->noticed_ns = nd_clock_ns();
        snprintf(c->run_folder, sizeof c->run_folder, "%s", run_folder);
        if (!nd_roster_all_joined(&c->roster)) {
            (void)report_missing(c, 0, false);
        }
    }
}

/* Workers run nowhere: starts them once all nodes are here, or gives up. */
static void gather_again(nd_coordinator *c, int64_t now)
{
    double limit = nd_nodes_limit(c->options.config);
    double waited = (double)(now - c->gather_ns) * 1e-9;
    if (c->asked) {
        nd_coordinator_release(c, ND_ERR_PREEMPTED);
    } else if (c->restarts && nd_roster_all_joined(&c->roster)) {
        begin_start(c);
        c->epoch = c->next_epoch;
        c->options.start(c->options.context, c->epoch, c->run_folder); /* the store expects them */
        send_plans(c);
    } else if (c->restarts && waited > limit) {
        (void)report_missing(c, limit, true);
        nd_log_error("ndlaunch: %s", nd_error_last()->message);
        nd_coordinator_release(c, c->end.code);
    } else if (c->restarts && now - c->noticed_ns > notice_ns) {
        c->noticed_ns = now;
        (void)report_missing(c, waited, false);
    }
}

static void watch_nodes(nd_coordinator *c, int64_t now)
{
    static const char silent[] = "it gave no sign of life for 15 s";
    bool beat = now - c->beat_ns > (int64_t)ND_NODE_BEAT_MS * 1000000;
    c->beat_ns = beat ? now : c->beat_ns;
    for (int i = 1; i < c->roster.count; i++) {
        nd_node *n = &c->roster.nodes[i];
        if (beat) {
            send_frame(c, i, ND_NODE_BEAT, NULL, 0, NULL);
        }
        bool quiet =
            n->peer && !n->waits && now - n->heard_ns > (int64_t)ND_NODE_SILENT_MS * 1000000;
        if (quiet && c->state == RUNNING) {
            lose_node(c, i, silent);
        } else if (quiet && c->state == BETWEEN) {
            part_with(c, i, silent);
        } else if (!n->ended && !n->lost && c->stop_sent && now - c->stop_ns > stop_ns) {
            lose_node(c, i, "it did not end its workers within 20 s");
        }
    }
}

/* Ends the workers everywhere once one has failed. */
static void pass_on_failure(nd_coordinator *c, int64_t now)
{
    if (c->stop_sent || !nd_roster_has_failed(&c->roster)) {
        return;
    }
    int code = c->roster.nodes[nd_roster_first_failure(&c->roster)].code;
    int patience_ms = c->options.patience_ms(c->options.context, code);
    c->stop_sent = true;
    c->stop_ns = now;
    for (int i = 1; i < c->roster.count; i++) {
        const uint32_t numbers[] = {(uint32_t)c->epoch, (uint32_t)patience_ms};
        send_frame(c, i, ND_NODE_STOP, numbers, 2, NULL);
    }
    c->options.stop(c->options.context, patience_ms);
}

static void on_pulse(uv_timer_t *timer)
{
    nd_coordinator *c = timer->data;
    int64_t now = nd_clock_ns();
    watch_nodes(c, now);
    if (c->state == RUNNING) {
        pass_on_failure(c, now);
        if (nd_roster_all_over(&c->roster)) {
            conclude(c);
        }
    } else if (c->state == BETWEEN) {
        gather_again(c, now);
    }
    if (c->state == RELEASED &&
        (nd_server_members(c->server, ND_WIRE_NODE) == 0 || now - c->release_ns > leave_ns)) {
        c->options.finish(c->options.context, c->code);
    }
}

nd_status nd_coordinator_watch(nd_coordinator *c)
{
    ND_TRY(ND_UV(uv_timer_init(c->options.loop, &c->pulse)));
    c->pulse.data = c;
    return ND_UV(uv_timer_start(&c->pulse, on_pulse, PULSE_MS, PULSE_MS));
}

void nd_coordinator_failed(nd_coordinator *c, int code)
{
    nd_node_fail(&c->roster.nodes[0], code);
}

void nd_coordinator_ended(nd_coordinator *c, const nd_nodes_end *end, const char *screen)
{
    nd_node_end(&c->roster.nodes[0], end->code, screen, strlen(screen));
    c->asked |= end->asked;
    c->own = *end;
}

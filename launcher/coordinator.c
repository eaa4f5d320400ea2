// SPDX-License-Identifier: Apache-2.0
/*
 * Node 0 of several: gathers the nodes, watches them while workers run, and gathers them again
 * before a restart. The store's hooks only record what arrived; the pulse acts on it, outside of
 * the store's calls.
 */
#include <stdlib.h>
#include <string.h>

#include "launcher/nodes.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/rdzv/ranks.h"
#include "runtime/rdzv/uv.h"

enum { PULSE_MS = 20 };

static const int64_t second_ns = 1000000000;
static const int64_t notice_ns = 10000000000; /* between lines about missing nodes */
static const int64_t stop_ns = 20000000000;   /* for a node to end its workers after a stop */
static const int64_t leave_ns = 3000000000;   /* for nodes to leave after the release */
static const double refusing_seconds = 10;    /* for members to join, so that they can be refused */

typedef struct nd_node {
    nd_peer *peer; /* NULL: not connected */
    bool joined;
    bool waits; /* it joined and waits for the next start; the workers of this one were lost */
    bool lost, ended; /* in this start */
    int64_t heard_ns;
    int code;
    int64_t failed_ns; /* when its first failure arrived here, 0: none */
    char host[ND_WIRE_TEXT_MAX];
    char *screen; /* owned */
} nd_node;

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
    int count;
    nd_node *nodes; /* [count]; 0 is this one */
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
    c->count = (int)options->config->launch.nnodes;
    nd_status status = ND_ALLOC(c->count, &c->nodes);
    if (status != ND_OK) {
        free(c);
        return status;
    }
    c->nodes[0].joined = true;
    snprintf(c->nodes[0].host, sizeof c->nodes[0].host, "%s", options->host_name);
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
    for (int i = 0; c && i < c->count; i++) {
        free(c->nodes[i].screen);
    }
    if (c) {
        free(c->nodes);
        free(c);
    }
}

/* Sends nothing to a node that is not connected. */
static void send_frame(nd_coordinator *c, int index, int type, const uint32_t *numbers, int count,
                       const char *text)
{
    nd_wire_buffer out = {0};
    nd_node_frame(&out, type, numbers, count, text);
    if (c->nodes[index].peer && nd_wire_end(&out) == ND_OK) {
        nd_server_send(c->server, c->nodes[index].peer, out.data, out.size);
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
    nd_node *n = &c->nodes[index];
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
        status = nd_fail(ND_ERR_CONFIG, "%s has %u workers, %s has %d: all nodes need equally many",
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
    for (int i = 1; i < c->count; i++) {
        if (c->nodes[i].peer) {
            nd_server_refuse(c->server, c->nodes[i].peer, status, why);
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
    char missing[256], line[512];
    bool *here;
    int absent = 0;
    ND_TRY(ND_ALLOC(c->count, &here));
    for (int i = 0; i < c->count; i++) {
        here[i] = c->nodes[i].joined;
        absent += !here[i];
    }
    nd_ranks_text(here, false, c->count, missing, sizeof missing);
    free(here);
    snprintf(line, sizeof line, "%s %s of %d nodes %s after %.3g s", absent > 1 ? "nodes" : "node",
             missing, c->count, absent > 1 ? "are missing" : "is missing", seconds);
    if (!last) {
        nd_log_warning("ndlaunch: %s", line);
        return ND_OK;
    }
    return nd_fail(ND_ERR_HANG,
                   "%s (launch.rdzv_timeout_seconds, and time to index JSONL); start ndlaunch "
                   "there with --node-rank, the same endpoint and the same key",
                   line);
}

static bool all_joined(const nd_coordinator *c)
{
    for (int i = 0; i < c->count; i++) {
        if (!c->nodes[i].joined) {
            return false;
        }
    }
    return true;
}

static nd_status wait_for_nodes(nd_coordinator *c)
{
    double limit = nd_nodes_limit(c->options.config);
    int64_t begin = nd_clock_ns(), noticed = begin;
    while (!all_joined(c)) {
        uv_run(c->options.loop, UV_RUN_ONCE); /* the store ticks ten times a second */
        int64_t now = nd_clock_ns();
        double waited = (double)(now - begin) * 1e-9;
        /* A coordinator that cannot start stays for a while to refuse the members, which would
         * otherwise wait for it until their deadline. */
        bool leaves = !c->options.cannot_start || c->refused_count >= c->count - 1 ||
                      waited > refusing_seconds;
        if (c->refused != ND_OK && leaves) {
            return nd_fail(c->refused, "%s", c->refusal);
        }
        if (waited > limit && !all_joined(c)) {
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
    for (int i = 0; i < c->count; i++) {
        nd_node *n = &c->nodes[i];
        free(n->screen);
        n->screen = NULL;
        n->lost = n->ended = n->waits = false;
        n->code = 0;
        n->failed_ns = 0;
        n->heard_ns = nd_clock_ns();
    }
}

static void send_plans(nd_coordinator *c)
{
    for (int i = 1; i < c->count; i++) {
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

static void record_failure(nd_node *n, int code)
{
    n->code = n->failed_ns == 0 ? code : n->code;
    n->failed_ns = n->failed_ns == 0 ? nd_clock_ns() : n->failed_ns;
}

/* Closes a node's connection: its launcher must be started again. */
static void part_with(nd_coordinator *c, int index, const char *why)
{
    nd_node *n = &c->nodes[index];
    nd_peer *peer = n->peer;
    n->peer = NULL;
    n->joined = n->waits = false;
    if (peer) {
        nd_server_refuse(c->server, peer, ND_ERR_IO, why);
    }
}

static void record_lost(nd_coordinator *c, int index, const char *why)
{
    nd_node *n = &c->nodes[index];
    char text[512];
    part_with(c, index, why);
    if (n->lost || n->ended) {
        return;
    }
    n->lost = true;
    record_failure(n, ND_ERR_IO);
    n->code = ND_ERR_IO;
    snprintf(text, sizeof text, "\nndlaunch: node %d (host %s) was lost: %s\n", index, n->host,
             why);
    free(n->screen);
    n->screen = strdup(text);
}

void nd_coordinator_on_left(void *context, nd_peer *peer, nd_wire_role role, int index, bool clean)
{
    nd_coordinator *c = context;
    if (role != ND_WIRE_NODE || c->nodes[index].peer != peer) {
        return;
    }
    nd_node *n = &c->nodes[index];
    n->peer = NULL;
    n->joined = n->waits = false; /* it may join again */
    if (c->state == RUNNING) {
        record_lost(c, index, "its connection to node 0 was closed");
    }
}

nd_status nd_coordinator_on_frame(void *context, nd_peer *peer, int index,
                                  const nd_wire_frame *frame)
{
    nd_coordinator *c = context;
    nd_node *n = &c->nodes[index];
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
            record_failure(n, code);
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
            n->ended = true;
            c->asked |= asked;
            n->screen = bytes > 0 ? strndup((const char *)screen, bytes) : NULL;
            if (code != 0) {
                record_failure(n, code);
                n->code = code;
            }
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

/*
 * A failure with a lower weight explains one with a higher weight, whichever arrived first: a
 * failure on one node makes the others lose peers (74), and a stop at a step boundary (75) explains
 * no failure.
 */
static int weight(const nd_node *n)
{
    return n->code == ND_ERR_PREEMPTED ? 2 : n->code == ND_ERR_IO && !n->lost ? 1 : 0;
}

static int first_failure(const nd_coordinator *c)
{
    int first = -1;
    for (int i = 0; i < c->count; i++) {
        const nd_node *n = &c->nodes[i];
        if (n->failed_ns == 0) {
            continue;
        }
        const nd_node *f = first < 0 ? NULL : &c->nodes[first];
        if (!f || weight(n) < weight(f) ||
            (weight(n) == weight(f) && n->failed_ns < f->failed_ns)) {
            first = i;
        }
    }
    return first;
}

/* All workers of this start have ended: shows the first failure and asks the job what follows. */
static void conclude(nd_coordinator *c)
{
    nd_nodes_end *end = &c->end;
    *end = (nd_nodes_end){.node = first_failure(c), .asked = c->asked};
    c->state = BETWEEN;
    if (end->node >= 0) {
        const nd_node *n = &c->nodes[end->node];
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
    for (int i = 1; i < c->count; i++) {
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
        if (!all_joined(c)) {
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
    } else if (c->restarts && all_joined(c)) {
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
    for (int i = 1; i < c->count; i++) {
        nd_node *n = &c->nodes[i];
        if (beat) {
            send_frame(c, i, ND_NODE_BEAT, NULL, 0, NULL);
        }
        bool quiet =
            n->peer && !n->waits && now - n->heard_ns > (int64_t)ND_NODE_SILENT_MS * 1000000;
        if (quiet && c->state == RUNNING) {
            record_lost(c, i, silent);
        } else if (quiet && c->state == BETWEEN) {
            part_with(c, i, silent);
        } else if (!n->ended && !n->lost && c->stop_sent && now - c->stop_ns > stop_ns) {
            record_lost(c, i, "it did not end its workers within 20 s");
        }
    }
}

/* Ends the workers everywhere once one has failed. */
static void pass_on_failure(nd_coordinator *c, int64_t now)
{
    bool failed = false;
    for (int i = 0; i < c->count; i++) {
        const nd_node *n = &c->nodes[i];
        failed |= n->failed_ns != 0 && (n->code != ND_ERR_PREEMPTED || n->lost);
    }
    if (!failed || c->stop_sent) {
        return;
    }
    int code = c->nodes[first_failure(c)].code;
    int patience_ms = c->options.patience_ms(c->options.context, code);
    c->stop_sent = true;
    c->stop_ns = now;
    for (int i = 1; i < c->count; i++) {
        const uint32_t numbers[] = {(uint32_t)c->epoch, (uint32_t)patience_ms};
        send_frame(c, i, ND_NODE_STOP, numbers, 2, NULL);
    }
    c->options.stop(c->options.context, patience_ms);
}

static bool all_over(const nd_coordinator *c)
{
    for (int i = 0; i < c->count; i++) {
        if (!c->nodes[i].ended && !c->nodes[i].lost) {
            return false;
        }
    }
    return true;
}

static void on_pulse(uv_timer_t *timer)
{
    nd_coordinator *c = timer->data;
    int64_t now = nd_clock_ns();
    watch_nodes(c, now);
    if (c->state == RUNNING) {
        pass_on_failure(c, now);
        if (all_over(c)) {
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
    record_failure(&c->nodes[0], code);
}

void nd_coordinator_ended(nd_coordinator *c, int code, const nd_nodes_end *how, const char *screen)
{
    nd_node *own = &c->nodes[0];
    own->ended = true;
    c->asked |= how->asked;
    c->own = *how;
    own->screen = screen[0] ? strdup(screen) : NULL;
    if (code != 0) {
        record_failure(own, code);
        own->code = code;
    }
}

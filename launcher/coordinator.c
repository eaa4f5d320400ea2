// SPDX-License-Identifier: Apache-2.0
#include "launcher/nodes.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/rdzv/ranks.h"
#include "runtime/rdzv/uv.h"

/* Node 0 of several until all nodes are there and agree. */

static const int64_t second_ns = 1000000000;
static const int64_t notice_ns = 10000000000; /* between lines about missing nodes */
static const double refusing_seconds = 10;    /* for the others to come and be told */

nd_status nd_nodes_create(nd_job *job)
{
    nd_nodes *nodes;
    ND_TRY(ND_ALLOC(1, &nodes));
    nodes->count = (int)job->config->launch.nnodes;
    nd_status status = ND_ALLOC(nodes->count, &nodes->all);
    if (status != ND_OK) {
        free(nodes);
        return status;
    }
    nodes->all[0].joined = true;
    if (job->cannot_start) {
        nodes->refused = (nd_status)job->cannot_start;
        snprintf(nodes->refusal, sizeof nodes->refusal,
                 "node 0 (%s) cannot start: its check failed, as its own lines say",
                 job->host_name);
    }
    snprintf(nodes->all[0].host, sizeof nodes->all[0].host, "%s", job->host_name);
    job->nodes = nodes;
    return ND_OK;
}

void nd_nodes_destroy(nd_nodes *nodes)
{
    for (int i = 0; nodes && i < nodes->count; i++) {
        free(nodes->all[i].screen);
    }
    if (nodes) {
        free(nodes->all);
        free(nodes);
    }
}

static nd_status refuse(nd_nodes *nodes, nd_status status)
{
    nodes->refused = status;
    snprintf(nodes->refusal, sizeof nodes->refusal, "%s", nd_error_last()->message);
    return status;
}

nd_status nd_nodes_take_join(nd_job *job, nd_peer *peer, int index, nd_wire_cursor *cursor)
{
    nd_nodes *nodes = job->nodes;
    nd_node *n = &nodes->all[index];
    size_t bytes;
    uint32_t workers = nd_wire_get_u32(cursor);
    const uint8_t *blob = nd_wire_get_blob(cursor, &bytes);
    if (!nd_wire_finished(cursor) || nodes->running) {
        return nd_fail(ND_ERR_IO, "node %d joined with a damaged message, or late", index);
    }
    if (nodes->refused != ND_OK) {
        nodes->turned_away++;
        return nd_fail(nodes->refused, "%s", nodes->refusal);
    }
    char ours[ND_WIRE_TEXT_MAX + 32], theirs[ND_WIRE_TEXT_MAX + 32];
    snprintf(ours, sizeof ours, "node 0 (%s)", job->host_name);
    snprintf(theirs, sizeof theirs, "node %d (%s)", index, nd_peer_host(peer));
    char *text = strndup((const char *)blob, bytes);
    nd_status status = text ? nd_config_diff(job->job_text, ours, text, theirs)
                            : nd_fail(ND_ERR_INTERNAL, "out of host memory");
    free(text);
    if (status == ND_OK && (int)workers != job->local_workers) {
        status = nd_fail(ND_ERR_CONFIG, "%s has %u workers, %s has %d: all nodes need equally many",
                         theirs, workers, ours, job->local_workers);
    }
    if (status != ND_OK) {
        return refuse(nodes, status);
    }
    n->peer = peer;
    n->joined = true;
    snprintf(n->host, sizeof n->host, "%s", nd_peer_host(peer));
    return ND_OK;
}

nd_status nd_nodes_take_failed_check(nd_nodes *nodes, const nd_peer *peer, int index, int code)
{
    nodes->turned_away++;
    if (nodes->refused != ND_OK) {
        return nd_fail(nodes->refused, "%s", nodes->refusal);
    }
    return refuse(nodes,
                  nd_fail(code > 0 ? (nd_status)code : ND_ERR_INTERNAL,
                          "node %d (%s) cannot start: its check failed, as its own lines say",
                          index, nd_peer_host(peer)));
}

void nd_nodes_send(nd_job *job, int index, int type, const uint32_t *numbers, int count,
                   const char *text)
{
    nd_wire_buffer out = {0};
    nd_node_frame(&out, type, numbers, count, text);
    if (job->nodes->all[index].peer && nd_wire_end(&out) == ND_OK) {
        nd_server_send(nd_store_server_engine(job->store), job->nodes->all[index].peer, out.data,
                       out.size);
    }
    nd_wire_buffer_fini(&out);
}

static void refuse_all(nd_job *job, nd_status status, const char *why)
{
    for (int i = 1; i < job->nodes->count; i++) {
        if (job->nodes->all[i].peer) {
            nd_server_refuse(nd_store_server_engine(job->store), job->nodes->all[i].peer, status,
                             why);
        }
    }
    int64_t deadline = nd_clock_ns() + second_ns; /* the refusals go out */
    while (nd_server_members(nd_store_server_engine(job->store), ND_WIRE_NODE) > 0 &&
           nd_clock_ns() < deadline) {
        uv_run(&job->loop, UV_RUN_ONCE);
    }
}

static nd_status say_missing(nd_nodes *nodes, double seconds, bool last)
{
    char missing[256], line[512];
    bool *here;
    int absent = 0;
    ND_TRY(ND_ALLOC(nodes->count, &here));
    for (int i = 0; i < nodes->count; i++) {
        here[i] = nodes->all[i].joined;
        absent += !here[i];
    }
    nd_ranks_text(here, false, nodes->count, missing, sizeof missing);
    free(here);
    snprintf(line, sizeof line, "%s %s of %d nodes %s after %.3g s", absent > 1 ? "nodes" : "node",
             missing, nodes->count, absent > 1 ? "are missing" : "is missing", seconds);
    if (!last) {
        nd_log_warning("ndlaunch: %s", line);
        return ND_OK;
    }
    return nd_fail(ND_ERR_HANG,
                   "%s (launch.rdzv_timeout_seconds, and time to index JSONL): start ndlaunch "
                   "there with --node-rank, the "
                   "same endpoint and the same key",
                   line);
}

static bool all_joined(const nd_nodes *nodes)
{
    for (int i = 0; i < nodes->count; i++) {
        if (!nodes->all[i].joined) {
            return false;
        }
    }
    return true;
}

nd_status nd_nodes_gather(nd_job *job)
{
    nd_nodes *nodes = job->nodes;
    nd_status status = ND_OK;
    double limit = nd_nodes_limit(job);
    int64_t begin = nd_clock_ns(), noticed = begin;
    while (status == ND_OK && !all_joined(nodes)) {
        uv_run(&job->loop, UV_RUN_ONCE); /* the store ticks ten times a second */
        int64_t now = nd_clock_ns();
        double waited = (double)(now - begin) * 1e-9;
        /* A node that cannot start itself stays a while to tell the others, who would wait for it
         * in vain. */
        bool told = !job->cannot_start || nodes->turned_away >= nodes->count - 1 ||
                    waited > refusing_seconds;
        if (nodes->refused != ND_OK && told) {
            status = nd_fail(nodes->refused, "%s", nodes->refusal);
        } else if (waited > limit && !all_joined(nodes)) {
            status = say_missing(nodes, limit, true);
        } else if (now - noticed > notice_ns) {
            noticed = now;
            status = say_missing(nodes, waited, false);
        }
    }
    if (status != ND_OK) {
        char why[ND_ERROR_MESSAGE_MAX];
        snprintf(why, sizeof why, "%s", nd_error_last()->message);
        refuse_all(job, status, why);
        return nd_fail(status, "%s", why);
    }
    nodes->running = true;
    for (int i = 1; i < nodes->count; i++) {
        nd_nodes_send(job, i, ND_NODE_PLAN,
                      (uint32_t[]){(uint32_t)(i * job->local_workers), (uint32_t)job->world_size},
                      2, NULL);
        nodes->all[i].heard_ns = nd_clock_ns();
    }
    return ND_OK;
}

/* Node 0 of several while workers run. Hooks of the store only take notes; what follows from them
 * is done by the pulse, outside of it. */

enum { PULSE_MS = 20 };

static const int64_t stop_ns = 20000000000; /* for a node to end its workers when told */
static const int64_t leave_ns = 3000000000; /* for nodes to leave after the release */

static void note_failure(nd_node *n, int code)
{
    n->code = n->failed_ns == 0 ? code : n->code;
    n->failed_ns = n->failed_ns == 0 ? nd_clock_ns() : n->failed_ns;
}

static void note_lost(nd_nodes *nodes, int index, const char *why)
{
    nd_node *n = &nodes->all[index];
    char text[512];
    if (n->lost || n->ended) {
        return;
    }
    n->lost = true;
    note_failure(n, ND_ERR_IO);
    n->code = ND_ERR_IO;
    snprintf(text, sizeof text, "\nndlaunch: node %d (host %s) was lost: %s\n", index, n->host,
             why);
    free(n->screen);
    n->screen = strdup(text);
}

void nd_nodes_on_left(void *context, nd_peer *peer, nd_wire_role role, int index, bool clean)
{
    nd_nodes *nodes = ((nd_job *)context)->nodes;
    if (role != ND_WIRE_NODE || !nodes || nodes->all[index].peer != peer) {
        return;
    }
    nodes->all[index].peer = NULL;
    if (nodes->running) {
        note_lost(nodes, index, "its connection to node 0 was closed");
    } else {
        nodes->all[index].joined = false; /* it may come again */
    }
}

nd_status nd_nodes_on_frame(void *context, nd_peer *peer, int index, const nd_wire_frame *frame)
{
    nd_job *job = context;
    nd_node *n = &job->nodes->all[index];
    nd_wire_cursor cursor = nd_wire_body(frame);
    n->heard_ns = nd_clock_ns();
    switch ((int)frame->type) {
    case ND_NODE_JOIN:
        return nd_nodes_take_join(job, peer, index, &cursor);
    case ND_NODE_BEAT:
        return ND_OK;
    case ND_NODE_FAIL: {
        int code = (int)nd_wire_get_u32(&cursor);
        if (!job->nodes->running && nd_wire_finished(&cursor)) {
            return nd_nodes_take_failed_check(job->nodes, peer, index, code);
        }
        note_failure(n, code);
        break;
    }
    case ND_NODE_END: {
        size_t bytes;
        int code = (int)nd_wire_get_u32(&cursor);
        const uint8_t *screen = nd_wire_get_blob(&cursor, &bytes);
        if (nd_wire_finished(&cursor)) {
            n->ended = true;
            n->screen = bytes > 0 ? strndup((const char *)screen, bytes) : NULL;
            if (code != 0) {
                note_failure(n, code);
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

/* Causes first: a lost peer (74) is mostly another failure's echo, a stop at a boundary (75) is no
 * failure. */
static int weight(const nd_node *n)
{
    return n->code == ND_ERR_PREEMPTED ? 2 : n->code == ND_ERR_IO && !n->lost ? 1 : 0;
}

static int first_failure(const nd_nodes *nodes)
{
    int first = -1;
    for (int i = 0; i < nodes->count; i++) {
        const nd_node *n = &nodes->all[i];
        if (n->failed_ns == 0) {
            continue;
        }
        const nd_node *f = first < 0 ? NULL : &nodes->all[first];
        if (!f || weight(n) < weight(f) ||
            (weight(n) == weight(f) && n->failed_ns < f->failed_ns)) {
            first = i;
        }
    }
    return first;
}

static void release_all(nd_job *job)
{
    nd_nodes *nodes = job->nodes;
    char reason[ND_WIRE_TEXT_MAX + 64] = "";
    int first = first_failure(nodes);
    if (first >= 0) {
        const nd_node *n = &nodes->all[first];
        nodes->code = n->code;
        fputs(n->screen ? n->screen : "", stderr);
        snprintf(reason, sizeof reason, "node %d (host %s) %s", first, n->host,
                 n->lost                       ? "was lost"
                 : n->code == ND_ERR_PREEMPTED ? "was stopped"
                                               : "failed first");
    }
    nodes->released = true;
    nodes->release_ns = nd_clock_ns();
    for (int i = 1; i < nodes->count; i++) {
        nd_nodes_send(job, i, ND_NODE_RELEASE, (uint32_t[]){(uint32_t)nodes->code}, 1, reason);
    }
}

static void watch_nodes(nd_job *job, int64_t now)
{
    nd_nodes *nodes = job->nodes;
    bool beat = now - nodes->beat_ns > (int64_t)ND_NODE_BEAT_MS * 1000000;
    nodes->beat_ns = beat ? now : nodes->beat_ns;
    for (int i = 1; i < nodes->count; i++) {
        nd_node *n = &nodes->all[i];
        if (beat) {
            nd_nodes_send(job, i, ND_NODE_BEAT, NULL, 0, NULL);
        }
        if (!n->lost && now - n->heard_ns > (int64_t)ND_NODE_SILENT_MS * 1000000) {
            note_lost(nodes, i, "it gave no sign of life for 15 s");
        } else if (!n->ended && nodes->stop_sent && now - nodes->stop_ns > stop_ns) {
            note_lost(nodes, i, "it did not end its workers within 20 s");
        }
    }
}

static void on_pulse(uv_timer_t *timer)
{
    nd_job *job = timer->data;
    nd_nodes *nodes = job->nodes;
    int64_t now = nd_clock_ns();
    bool failed = false, over = true;
    watch_nodes(job, now);
    for (int i = 0; i < nodes->count; i++) {
        const nd_node *n = &nodes->all[i];
        failed |= n->failed_ns != 0 && (n->code != ND_ERR_PREEMPTED || n->lost);
        over &= n->ended || n->lost;
    }
    if (failed && !nodes->stop_sent) {
        nodes->stop_sent = true;
        nodes->stop_ns = now;
        for (int i = 1; i < nodes->count; i++) {
            nd_nodes_send(job, i, ND_NODE_STOP, NULL, 0, NULL);
        }
        nd_job_stop(job);
    }
    if (over && !nodes->released) {
        release_all(job);
    }
    if (nodes->released &&
        (nd_server_members(nd_store_server_engine(job->store), ND_WIRE_NODE) == 0 ||
         now - nodes->release_ns > leave_ns)) {
        nd_job_finish(job, nodes->code);
    }
}

nd_status nd_collect_watch(nd_job *job)
{
    ND_TRY(ND_UV(uv_timer_init(&job->loop, &job->nodes->pulse)));
    job->nodes->pulse.data = job;
    return ND_UV(uv_timer_start(&job->nodes->pulse, on_pulse, PULSE_MS, PULSE_MS));
}

void nd_collect_failed(nd_job *job, int code)
{
    note_failure(&job->nodes->all[0], code);
}

void nd_collect_ended(nd_job *job, int code, const char *screen)
{
    nd_node *own = &job->nodes->all[0];
    own->ended = true;
    own->screen = screen[0] ? strdup(screen) : NULL;
    if (code != 0) {
        note_failure(own, code);
        own->code = code;
    }
}

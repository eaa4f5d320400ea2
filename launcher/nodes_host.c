// SPDX-License-Identifier: Apache-2.0
/* Node 0 of several while workers run. Hooks of the store only take notes; what follows from them
 * is done by the pulse, outside of it. */
#include <stdlib.h>
#include <string.h>

#include "launcher/nodes_internal.h"
#include "runtime/base/clock.h"
#include "runtime/rdzv/uv.h"

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
    if (nodes->released && (nd_server_members(nd_host_server(job->store), ND_WIRE_NODE) == 0 ||
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

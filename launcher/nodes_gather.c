// SPDX-License-Identifier: Apache-2.0
/* Node 0 of several until all nodes are there and agree. */
#include <stdlib.h>
#include <string.h>

#include "launcher/nodes_internal.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/rdzv/ranks.h"

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
        nd_server_send(nd_host_server(job->store), job->nodes->all[index].peer, out.data, out.size);
    }
    nd_wire_buffer_fini(&out);
}

static void refuse_all(nd_job *job, nd_status status, const char *why)
{
    for (int i = 1; i < job->nodes->count; i++) {
        if (job->nodes->all[i].peer) {
            nd_server_refuse(nd_host_server(job->store), job->nodes->all[i].peer, status, why);
        }
    }
    int64_t deadline = nd_clock_ns() + second_ns; /* the refusals go out */
    while (nd_server_members(nd_host_server(job->store), ND_WIRE_NODE) > 0 &&
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

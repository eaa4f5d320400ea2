// SPDX-License-Identifier: Apache-2.0
/* Nodes join node 0: their settings are compared, and one that differs is refused. */
#include "launcher/coordinator.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"

static const int64_t spare_ns = 10000000000; /* for spare nodes, once the others are here */
static const double refusing_seconds = 10;   /* for members to join, so that they can be refused */

static nd_status refuse(nd_coordinator *c, nd_status status)
{
    c->refused = status;
    snprintf(c->refusal, sizeof c->refusal, "%s", nd_error_last()->message);
    return status;
}

nd_status nd_gather_join(nd_coordinator *c, nd_peer *peer, int index, nd_wire_cursor *cursor)
{
    nd_node *n = &c->roster.nodes[index];
    size_t bytes;
    uint32_t workers = nd_wire_get_u32(cursor);
    const uint8_t *blob = nd_wire_get_blob(cursor, &bytes);
    bool first = c->epoch < 0 && c->state != ND_NODES_RELEASED;
    bool again =
        c->options.config->launch.max_restarts > 0 && c->state != ND_NODES_RELEASED && !n->peer;
    if (c->refused != ND_OK) {
        c->refused_count++;
        return nd_fail(c->refused, "%s", c->refusal);
    }
    if (!nd_wire_finished(cursor) || !(first || again)) {
        return nd_fail(ND_ERR_IO, "node %d joined with a damaged message, or late", index);
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
    if (!first && n->place < 0) {
        nd_log_info("ndlaunch: node %d (host %s) joined and is a spare", index, n->host);
    }
    return ND_OK;
}

nd_status nd_gather_failed_check(nd_coordinator *c, const nd_peer *peer, int index, int code)
{
    c->refused_count++;
    if (c->refused != ND_OK) {
        return nd_fail(c->refused, "%s", c->refusal);
    }
    nd_status status = nd_fail(code > 0 ? (nd_status)code : ND_ERR_INTERNAL,
                               "node %d (%s) failed its start-up check; see its own output for the "
                               "reason",
                               index, nd_peer_host(peer));
    return c->epoch < 0 ? refuse(c, status) : status;
}

void nd_gather_warn_missing(const nd_coordinator *c, double seconds)
{
    char line[512];
    nd_roster_missing(&c->roster, seconds, line, sizeof line);
    if (seconds > 0) {
        nd_log_warning("ndlaunch: %s", line);
    } else {
        nd_log_warning("ndlaunch: %s; start the same command there within %g s", line,
                       nd_nodes_limit(c->options.config));
    }
}

nd_status nd_gather_fail_missing(const nd_coordinator *c, double seconds)
{
    char line[512];
    nd_roster_missing(&c->roster, seconds, line, sizeof line);
    return nd_fail(ND_ERR_HANG,
                   "%s (launch.rdzv_timeout_seconds, and time to encode text); start ndlaunch "
                   "there with --node-rank, the same endpoint and the same key",
                   line);
}

int nd_gather_fitting(const nd_coordinator *c)
{
    const nd_config *config = c->options.config;
    nd_config fewer;
    int joined = nd_roster_joined(&c->roster);
    int most = joined < c->roster.most_places ? joined : c->roster.most_places;
    for (int n = most; config->launch.min_nodes > 0 && n >= config->launch.min_nodes; n--) {
        if (nd_config_with_nodes(config, n, &fewer) == ND_OK) {
            return n;
        }
    }
    return 0;
}

bool nd_gather_is_complete(nd_coordinator *c, int64_t now)
{
    int joined = nd_roster_joined(&c->roster);
    c->enough_ns = joined < c->roster.places ? 0 : c->enough_ns ? c->enough_ns : now;
    return joined == c->roster.count || (c->enough_ns && now - c->enough_ns > spare_ns);
}

bool nd_gather_is_refused(const nd_coordinator *c, double waited)
{
    /* A coordinator that cannot start stays for a while to refuse the members, which would
     * otherwise wait for it until their deadline. */
    bool leaves = !c->options.cannot_start || c->refused_count >= c->roster.count - 1 ||
                  waited > refusing_seconds;
    bool refused = c->refused != ND_OK && leaves;
    if (refused) {
        nd_fail(c->refused, "%s", c->refusal);
    }
    return refused;
}

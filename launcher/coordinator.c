// SPDX-License-Identifier: Apache-2.0
/*
 * Node 0: hosts the store, gathers the nodes before each start, gives it its nodes, watches them
 * while workers run, and prints the failure screen of the node that failed first. The store's hooks
 * only record what arrived; the pulse acts on it, outside of the store's calls. It is regular where
 * there are other nodes; what this node does wakes it, too.
 */
#include <stdlib.h>
#include <string.h>

#include "launcher/launcher.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/uv.h"

enum {
    PULSE_MS = 20,
    NOTICE_MS = 10000, /* between lines about missing nodes */
};

typedef enum coordinator_state {
    BETWEEN = 0, /* before the first start, or all have ended; there may be a further one */
    RUNNING,     /* workers run on some node */
    RELEASED,
} coordinator_state;

typedef struct coordinator {
    nd_nodes nodes;
    uv_timer_t pulse;
    uv_timer_t restart; /* until the nodes are gathered for the next start */
    nd_roster roster;
    nd_status refused;
    int refused_count; /* nodes that were refused when they joined */
    char refusal[ND_ERROR_MESSAGE_MAX];
    coordinator_state state;
    int64_t epoch;    /* -1 before the first start */
    bool asked;       /* a signal to a launcher asked the job to end */
    bool left_behind; /* a killed worker of this start did not end */
    bool stop_sent;
    bool gathers; /* BETWEEN: the nodes are gathered for the next start */
    bool fewer;   /* and it does not wait for nodes that are not here */
    int64_t stop_ns, release_ns, beat_ns, gather_ns, noticed_ns;
    int64_t enough_ns;     /* before the first start: when each place had a node; 0: not yet */
    nd_nodes_end own, end; /* of this node, of all: how the last start ended */
    int code;
} coordinator;

static void wake(coordinator *c);

/* For a node to end its workers after a stop, or to say that one of them does not end. */
static const int64_t stop_ns = (ND_STOP_MS + ND_REAP_MS + 7000) * INT64_C(1000000);
static const int64_t leave_ns = 3000000000; /* for nodes to leave after the release */

static nd_server *server_of(const coordinator *c)
{
    return nd_store_server_engine(c->nodes.store);
}

/* Sends nothing to a node that is not connected. */
static void send_frame(coordinator *c, int index, int type, const uint32_t *numbers, int count,
                       const char *text)
{
    nd_wire_buffer out = {0};
    nd_node_frame(&out, type, numbers, count, text);
    if (c->roster.nodes[index].peer && nd_wire_end(&out) == ND_OK) {
        nd_server_send(server_of(c), c->roster.nodes[index].peer, out.data, out.size);
    }
    nd_wire_buffer_fini(&out);
}

/* Names the spare nodes that have replaced others since the last start. */
static void report_replaced(const coordinator *c)
{
    const nd_roster *r = &c->roster;
    int workers = c->nodes.options.job->local_workers;
    for (int p = 0; p < r->places; p++) {
        if (r->former[p] >= 0 && r->former[p] != r->holder[p]) {
            nd_log_warning("ndlaunch: node %d (host %s) takes the place of node %d (host %s), "
                           "ranks %d to %d",
                           r->holder[p], r->nodes[r->holder[p]].host, r->former[p],
                           r->nodes[r->former[p]].host, p * workers, (p + 1) * workers - 1);
        }
    }
}

/* Workers of this start. */
static int world_size(const coordinator *c)
{
    return c->roster.places * c->nodes.options.job->local_workers;
}

static void send_plans(coordinator *c)
{
    for (int i = 1; i < c->roster.count; i++) {
        const nd_node *n = &c->roster.nodes[i];
        if (n->place >= 0) {
            uint32_t first_rank = (uint32_t)(n->place * c->nodes.options.job->local_workers);
            const uint32_t numbers[] = {first_rank, (uint32_t)world_size(c), (uint32_t)c->epoch};
            send_frame(c, i, ND_NODE_PLAN, numbers, 3, c->nodes.options.run_folder);
        } else {
            send_frame(c, i, ND_NODE_REST, NULL, 0, NULL);
        }
    }
}

/* Nodes join node 0: their settings are compared, and one that differs is refused. */

static const int64_t spare_ns = 10000000000; /* for spare nodes, once the others are here */
static const double refusing_seconds = 10;   /* for members to join, so that they can be refused */

static nd_status refuse(coordinator *c, nd_status status)
{
    c->refused = status;
    snprintf(c->refusal, sizeof c->refusal, "%s", nd_error_last()->message);
    return status;
}

/* A node's first frame: compares its settings with those of this node. */
static nd_status take_join(coordinator *c, nd_peer *peer, int index, nd_wire_cursor *cursor)
{
    nd_node *n = &c->roster.nodes[index];
    size_t bytes;
    uint32_t workers = nd_wire_get_u32(cursor);
    const uint8_t *blob = nd_wire_get_blob(cursor, &bytes);
    bool first = c->epoch < 0 && c->state != RELEASED;
    bool again =
        c->nodes.options.job->config->launch.max_restarts > 0 && c->state != RELEASED && !n->peer;
    if (c->refused != ND_OK) {
        c->refused_count++;
        return nd_fail(c->refused, "%s", c->refusal);
    }
    if (!nd_wire_finished(cursor) || !(first || again)) {
        return nd_fail(ND_ERR_IO, "node %d joined with a damaged message, or late", index);
    }
    char ours[ND_WIRE_TEXT_MAX + 32], theirs[ND_WIRE_TEXT_MAX + 32];
    snprintf(ours, sizeof ours, "node 0 (%s)", c->nodes.options.host_name);
    snprintf(theirs, sizeof theirs, "node %d (%s)", index, nd_peer_host(peer));
    char *text = strndup((const char *)blob, bytes);
    nd_status status = text ? nd_config_diff(c->nodes.options.job->job_text, ours, text, theirs)
                            : nd_fail_memory("the settings of node %d", index);
    free(text);
    if (status == ND_OK && (int)workers != c->nodes.options.job->local_workers) {
        status =
            nd_fail(ND_ERR_CONFIG, "%s has %u workers, %s has %d; start equally many on all nodes",
                    theirs, workers, ours, c->nodes.options.job->local_workers);
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

/* A node whose check failed sends the code instead. */
static nd_status take_failed_check(coordinator *c, const nd_peer *peer, int index, int code)
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

/* Warns of the nodes that are missing after `seconds`; 0: the wait for a restart begins. */
static void warn_missing(const coordinator *c, double seconds)
{
    char line[512];
    nd_roster_missing(&c->roster, seconds, line, sizeof line);
    if (seconds > 0) {
        nd_log_warning("ndlaunch: %s", line);
    } else {
        nd_log_warning("ndlaunch: %s; start the same command there within %g s", line,
                       nd_nodes_limit(c->nodes.options.job->config));
    }
}

/* The most nodes out of those that are here with which a start may go on (launch.min_nodes); 0:
 * none. The last reason why a number does not do is the thread's error then. */
static int fitting_nodes(const coordinator *c)
{
    const nd_config *config = c->nodes.options.job->config;
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

/* While workers run. */

/* Closes the connection of a node, if it has one: its launcher must be started again. */
static void part_with(coordinator *c, int index, nd_status status, const char *why)
{
    nd_node *n = &c->roster.nodes[index];
    nd_peer *peer = n->peer;
    n->peer = NULL;
    n->joined = n->waits = false;
    if (peer) {
        nd_server_refuse(server_of(c), peer, status, why);
    }
}

static void lose_node(coordinator *c, int index, const char *why)
{
    part_with(c, index, ND_ERR_IO, why);
    nd_node_lose(&c->roster.nodes[index], index, why);
}

static void on_left(void *context, nd_peer *peer, nd_wire_role role, int index, bool clean)
{
    coordinator *c = context;
    if (role != ND_WIRE_NODE || c->roster.nodes[index].peer != peer) {
        return;
    }
    nd_node *n = &c->roster.nodes[index];
    n->peer = NULL;
    n->joined = n->waits = false; /* it may join again */
    if (c->state == RUNNING && n->place >= 0) {
        lose_node(c, index, "its connection to node 0 was closed");
    } else if (c->epoch >= 0 && c->state != RELEASED && n->place < 0) {
        nd_log_warning("ndlaunch: spare node %d (host %s) was lost", index, n->host);
    }
}

/* The workers of a node have ended. */
static void take_end(coordinator *c, nd_node *n, const nd_nodes_end *end, const char *screen,
                     size_t bytes)
{
    nd_node_end(n, end, screen, bytes);
    c->asked |= end->asked;
    c->left_behind |= end->left_behind;
}

static nd_status on_frame(void *context, nd_peer *peer, int index, const nd_wire_frame *frame)
{
    coordinator *c = context;
    nd_node *n = &c->roster.nodes[index];
    nd_wire_cursor cursor = nd_wire_body(frame);
    bool joins = (int)frame->type == ND_NODE_JOIN || (int)frame->type == ND_NODE_FAIL;
    bool early = n->peer != peer || (n->waits && (int)frame->type != ND_NODE_BEAT);
    if (!joins && early) {
        return nd_fail(ND_ERR_IO, "node %d sent a message before it had joined", index);
    }
    n->heard_ns = nd_clock_ns();
    switch ((int)frame->type) {
    case ND_NODE_JOIN:
        return take_join(c, peer, index, &cursor);
    case ND_NODE_BEAT:
        return ND_OK;
    case ND_NODE_FAIL: {
        int code = (int)nd_wire_get_u32(&cursor);
        bool ours = nd_wire_get_u32(&cursor) == (uint32_t)c->epoch;
        if (nd_wire_finished(&cursor) && n->peer != peer) {
            return take_failed_check(c, peer, index, code);
        }
        if (nd_wire_finished(&cursor) && ours && c->state == RUNNING) {
            nd_node_fail(n, code);
        }
        /* Only a signal to that launcher sends this code, whatever start it knew of. */
        c->asked |= code == ND_ERR_PREEMPTED && n->place >= 0 && !n->waits;
        break;
    }
    case ND_NODE_END: {
        size_t bytes;
        nd_nodes_end end = {.code = (int)nd_wire_get_u32(&cursor)};
        bool ours = nd_wire_get_u32(&cursor) == (uint32_t)c->epoch;
        end.asked = nd_wire_get_u32(&cursor) != 0;
        end.left_behind = nd_wire_get_u32(&cursor) != 0;
        end.weight = (nd_failure_weight)nd_wire_get_u32(&cursor);
        const char *screen = (const char *)nd_wire_get_blob(&cursor, &bytes);
        if (nd_wire_finished(&cursor) && ours && !n->ended && c->state == RUNNING) {
            take_end(c, n, &end, screen, bytes);
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

/* A restart waits until a lost node is back. */
static bool lacks_nodes(const coordinator *c)
{
    const nd_roster *r = &c->roster;
    return r->places == r->most_places && nd_roster_joined(r) < r->places;
}

/* The job ends with this code. */
static void release(coordinator *c, int code)
{
    if (c->state == RELEASED) {
        return;
    }
    uv_timer_stop(&c->restart);
    wake(c);
    c->state = RELEASED;
    c->release_ns = nd_clock_ns();
    c->code = code;
    for (int i = 1; i < c->roster.count; i++) {
        send_frame(c, i, ND_NODE_RELEASE, (uint32_t[]){(uint32_t)code}, 1, c->end.words);
    }
}

static void on_restart(uv_timer_t *timer)
{
    coordinator *c = timer->data;
    c->fewer = c->roster.places < c->roster.most_places;
    c->gathers = true;
    c->gather_ns = c->noticed_ns = nd_clock_ns();
    wake(c);
    if (lacks_nodes(c)) {
        warn_missing(c, 0);
    }
}

/* All workers of this start have ended: shows the first failure and asks the job what follows. */
static void conclude(coordinator *c)
{
    nd_nodes_end *end = &c->end;
    *end = (nd_nodes_end){.node = nd_roster_first_failure(&c->roster),
                          .asked = c->asked,
                          .left_behind = c->left_behind,
                          .lacks_nodes = lacks_nodes(c)};
    c->state = BETWEEN;
    if (end->node >= 0) {
        const nd_node *n = &c->roster.nodes[end->node];
        end->code = n->failure.code;
        nd_log_text(n->screen ? n->screen : "");
        snprintf(end->words, sizeof end->words, "node %d (host %.128s) %s", end->node, n->host,
                 n->lost                               ? "was lost"
                 : n->failure.code == ND_ERR_PREEMPTED ? "was stopped"
                                                       : "failed first");
    }
    nd_nodes_end told = *end;
    if (end->node == 0 && c->own.words[0]) { /* this node knows more about its own workers */
        snprintf(told.words, sizeof told.words, "%s", c->own.words);
    }
    double wait_seconds;
    if (c->nodes.options.restarts(c->nodes.options.context, &told, &wait_seconds)) {
        uv_timer_start(&c->restart, on_restart, (uint64_t)(wait_seconds * 1e3), 0);
    } else {
        release(c, end->code);
    }
}

/* Nodes are missing, or were refused: the thread's error says why. A node whose own check failed
 * has said so. */
static void give_up(coordinator *c, int code)
{
    char why[ND_ERROR_MESSAGE_MAX];
    snprintf(why, sizeof why, "%s", nd_error_last()->message);
    if (!c->nodes.options.job->cannot_start) {
        nd_log_error("ndlaunch: %s", why);
    }
    for (int i = 1; i < c->roster.count && c->epoch < 0; i++) {
        part_with(c, i, (nd_status)code, why);
    }
    release(c, code);
}

/* Each place of the start has its node. */
static void start_workers(coordinator *c)
{
    if (c->roster.count > c->roster.places) {
        report_replaced(c);
        char working[256], spares[256];
        nd_roster_text(&c->roster, true, working, sizeof working);
        nd_roster_text(&c->roster, false, spares, sizeof spares);
        nd_log_info("ndlaunch: workers on nodes %s; spare nodes: %s", working,
                    spares[0] ? spares : "none yet, but one can join at any time");
    }
    c->state = RUNNING;
    c->stop_sent = c->gathers = c->asked = c->left_behind = false;
    nd_roster_begin(&c->roster);
    const nd_nodes_start start = {.epoch = ++c->epoch,
                                  .world_size = world_size(c),
                                  .run_folder = c->nodes.options.run_folder};
    if (c->epoch > 0) { /* the store takes only the workers of this start from here on */
        char run_id[ND_WIRE_TEXT_MAX];
        nd_restart_run_id(c->nodes.job, c->epoch, run_id, sizeof run_id);
        nd_server_restart(server_of(c), run_id, (uint32_t)c->epoch, start.world_size);
    }
    c->nodes.options.start(c->nodes.options.context, &start);
    send_plans(c);
}

/* Sets the places of the next start when the job does not wait for further nodes: as many as the
 * nodes that are here can fill. Without such a number they stay as they are. */
static void fit_places(coordinator *c)
{
    nd_config config;
    int before = c->roster.places, places = fitting_nodes(c);
    c->fewer = false;
    if (places == 0 || places == before) {
        return;
    }
    nd_roster_set_places(&c->roster, places);
    if (nd_config_with_nodes(c->nodes.options.job->config, places, &config) == ND_OK) {
        char mesh[128];
        nd_log_warning("ndlaunch: the job goes on with %d of %d nodes: mesh %s, "
                       "train.gradient_accumulation_steps %lld",
                       places, c->roster.most_places,
                       nd_mesh_format(&config.resolved_mesh, mesh, sizeof mesh),
                       (long long)config.train.gradient_accumulation_steps);
    }
}

/* Workers run nowhere: starts them once each place has a node, or gives up. */
static void gather(coordinator *c, int64_t now)
{
    const bool first = c->epoch < 0;
    const nd_config *config = c->nodes.options.job->config;
    double waited = (double)(now - c->gather_ns) * 1e-9;
    int joined = nd_roster_joined(&c->roster);
    if (c->asked) {
        release(c, ND_ERR_PREEMPTED);
        return;
    }
    if (!c->gathers) {
        return;
    }
    /* A coordinator that cannot start stays for a while to refuse the members, which would
     * otherwise wait for it until their deadline. */
    bool leaves = !c->nodes.options.job->cannot_start || c->refused_count >= c->roster.count - 1 ||
                  waited > refusing_seconds;
    if (first && c->refused != ND_OK && leaves) {
        give_up(c, (int)nd_fail(c->refused, "%s", c->refusal));
        return;
    }
    bool late = waited > nd_nodes_limit(config) && joined < c->roster.places;
    if (!first && (c->fewer || late)) {
        fit_places(c);
    }
    c->enough_ns = joined < c->roster.places ? 0 : c->enough_ns ? c->enough_ns : now;
    if (first && c->enough_ns && joined < c->roster.count && now - c->enough_ns <= spare_ns) {
        return; /* spare nodes may come */
    }
    if (nd_roster_assign(&c->roster)) {
        start_workers(c);
    } else if (late) {
        char line[512];
        nd_roster_missing(&c->roster, nd_nodes_limit(config), line, sizeof line);
        nd_status status = nd_fail(ND_ERR_HANG,
                                   "%s (launch.rdzv_timeout_seconds, and time to encode text); "
                                   "start ndlaunch there with --node-rank, the same endpoint and "
                                   "the same key",
                                   line);
        give_up(c, first ? (int)status : c->end.code);
    } else if (now - c->noticed_ns > (int64_t)NOTICE_MS * 1000000) {
        c->noticed_ns = now;
        warn_missing(c, waited);
    }
}

static void watch_nodes(coordinator *c, int64_t now)
{
    static const char silent[] = "it gave no sign of life for 15 s";
    bool beat = now - c->beat_ns > (int64_t)ND_NODE_BEAT_MS * 1000000;
    c->beat_ns = beat ? now : c->beat_ns;
    for (int i = 1; i < c->roster.count; i++) {
        nd_node *n = &c->roster.nodes[i];
        if (beat) {
            send_frame(c, i, ND_NODE_BEAT, NULL, 0, NULL);
        }
        bool quiet = n->peer && now - n->heard_ns > (int64_t)ND_NODE_SILENT_MS * 1000000;
        bool works = n->place >= 0 && !n->waits;
        if (quiet && c->state == RUNNING && works) {
            lose_node(c, i, silent);
        } else if (quiet && c->state != RELEASED) {
            nd_log_warning("ndlaunch: node %d (host %s) gave no sign of life for 15 s", i, n->host);
            part_with(c, i, ND_ERR_IO, silent);
        } else if (works && !n->ended && !n->lost && c->stop_sent && now - c->stop_ns > stop_ns) {
            lose_node(c, i, "it did not end its workers within 40 s");
        }
    }
}

/* Ends the workers everywhere once one has failed. */
static void pass_on_failure(coordinator *c, int64_t now)
{
    int first = nd_roster_first_failure(&c->roster);
    int code = first < 0 ? ND_OK : c->roster.nodes[first].failure.code;
    if (c->stop_sent || first < 0 || code == ND_ERR_PREEMPTED) { /* a stop is no failure */
        return;
    }
    int patience_ms = c->nodes.options.patience_ms(c->nodes.options.context, code);
    c->stop_sent = true;
    c->stop_ns = now;
    for (int i = 1; i < c->roster.count; i++) {
        const uint32_t numbers[] = {(uint32_t)c->epoch, (uint32_t)patience_ms};
        if (c->roster.nodes[i].place >= 0 && !c->roster.nodes[i].waits) {
            send_frame(c, i, ND_NODE_STOP, numbers, 2, NULL);
        }
    }
    c->nodes.options.stop(c->nodes.options.context, patience_ms);
}

static void on_pulse(uv_timer_t *timer)
{
    coordinator *c = timer->data;
    int64_t now = nd_clock_ns();
    if (c->epoch >= 0) {
        watch_nodes(c, now);
    }
    if (c->state == RUNNING) {
        pass_on_failure(c, now);
        if (nd_roster_all_over(&c->roster)) {
            conclude(c);
        }
    } else if (c->state == BETWEEN) {
        gather(c, now);
    }
    if (c->state == RELEASED &&
        (nd_server_members(server_of(c), ND_WIRE_NODE) == 0 || now - c->release_ns > leave_ns)) {
        c->nodes.options.finish(c->nodes.options.context, c->code);
    }
}

static void wake(coordinator *c)
{
    uv_timer_start(&c->pulse, on_pulse, 0, c->roster.count > 1 ? PULSE_MS : 0);
}

static void failed(nd_nodes *nodes, int code)
{
    coordinator *c = (coordinator *)nodes;
    nd_node_fail(&c->roster.nodes[0], code);
    wake(c);
}

static void ended(nd_nodes *nodes, const nd_nodes_end *end, const char *screen)
{
    coordinator *c = (coordinator *)nodes;
    take_end(c, &c->roster.nodes[0], end, screen, strlen(screen));
    c->own = *end;
    wake(c);
}

static void asked(nd_nodes *nodes, int number)
{
    coordinator *c = (coordinator *)nodes;
    if (c->state == BETWEEN) {
        nd_log_warning("ndlaunch: signal %s: the job ends before restart %lld", strsignal(number),
                       (long long)c->epoch + 1);
        release(c, ND_ERR_PREEMPTED);
    }
}

static void destroy(nd_nodes *nodes)
{
    nd_roster_fini(&((coordinator *)nodes)->roster);
    free(nodes);
}

static void on_notice(void *context, const char *line)
{
    nd_log_info("ndlaunch: %s", line);
}

/* The store listens at launch.rdzv_endpoint, or at a free port of loopback. Other hosts can
 * reach the store only where the job has a key file. */
static nd_status find_endpoint(const nd_config *config, nd_address *out)
{
    nd_address addresses[ND_ADDRESS_MAX];
    char host[ND_HOST_MAX] = "127.0.0.1";
    int port = 0, count = 0;
    if (config->launch.rdzv_endpoint[0]) {
        ND_TRY(nd_endpoint_parse(config->launch.rdzv_endpoint, host, &port));
    }
    ND_TRY(nd_address_resolve(host, port, addresses, &count));
    *out = addresses[0];
    return nd_address_is_loopback(out) || config->launch.rdzv_key_file[0]
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "launch.rdzv_endpoint %s is open to other hosts and needs a key; make one "
                         "with `ndlaunch --make-key FILE`, copy it to all nodes, and name it with "
                         "--rdzv-key-file",
                         config->launch.rdzv_endpoint);
}

static nd_status open_store(coordinator *c, const uint8_t key[ND_KEY_BYTES])
{
    nd_nodes *n = &c->nodes;
    uint8_t bytes[ND_KEY_BYTES];
    nd_store_server_options options = {
        .loop = n->options.loop,
        .server = {.version = ND_VERSION,
                   .run_id = n->job,
                   .world_size = n->options.job->world_size,
                   .nnodes = c->roster.count},
        .hooks = {.context = c, .notice = on_notice, .left = on_left, .node_frame = on_frame},
    };
    /* A key file may serve many jobs, so the job's name comes from a random number of its own. */
    ND_TRY(nd_key_random(bytes));
    snprintf(n->job, sizeof n->job, "nd-%02x%02x%02x%02x", bytes[0], bytes[1], bytes[2], bytes[3]);
    ND_TRY(find_endpoint(n->options.job->config, &options.address));
    memcpy(options.key, key, ND_KEY_BYTES);
    nd_status status = nd_store_server_open(&options, &n->store);
    explicit_bzero(options.key, sizeof options.key);
    ND_TRY(status);
    snprintf(n->master_addr, sizeof n->master_addr, "%s", nd_store_server_address(n->store));
    n->master_port = nd_store_server_port(n->store);
    return ND_OK;
}

nd_status nd_coordinator_open(const nd_nodes_options *options, const uint8_t key[ND_KEY_BYTES],
                              nd_nodes **out)
{
    static const nd_nodes_role role = {failed, ended, asked, destroy};
    const nd_config *config = options->job->config;
    coordinator *c;
    ND_TRY(ND_ALLOC(1, &c));
    *out = &c->nodes;
    c->nodes.role = &role;
    c->nodes.options = *options;
    c->epoch = -1;
    ND_TRY(nd_roster_init((int)config->launch.nnodes, (int)config->launch.spare_nodes,
                          options->host_name, &c->roster));
    if (options->job->cannot_start) {
        c->refused = (nd_status)options->job->cannot_start;
        snprintf(c->refusal, sizeof c->refusal,
                 "node 0 (%s) failed its start-up check; see its own output for the reason",
                 options->host_name);
    }
    ND_TRY(open_store(c, key));
    c->gathers = true;
    c->gather_ns = c->noticed_ns = nd_clock_ns();
    ND_TRY(ND_UV(uv_timer_init(options->loop, &c->restart)));
    ND_TRY(ND_UV(uv_timer_init(options->loop, &c->pulse)));
    c->restart.data = c->pulse.data = c;
    wake(c);
    return ND_OK;
}

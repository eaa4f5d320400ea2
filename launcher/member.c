// SPDX-License-Identifier: Apache-2.0
#include "launcher/nodes.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/address.h"
#include "runtime/rdzv/uv.h"

/* A node other than 0: one connection to node 0's store, on the job's loop once its workers run. */

enum { PULSE_MS = 100 };

static const int64_t send_ns = 2000000000; /* for a message to leave */
static const double telling_seconds = 30;  /* for node 0 to be there when this node cannot start */
static const int64_t release_ns = 60000000000; /* for node 0 to end the job once told to stop */

struct nd_join {
    nd_channel *channel;
    uv_poll_t poll;
    uv_timer_t pulse;
    int64_t heard_ns, beat_ns;
    int64_t stopped_ns;   /* node 0 said stop, 0: not yet */
    bool watching, ended; /* handles open; our workers have ended */
    bool over;            /* released, or node 0 is lost */
    int code;
};

static nd_status send_frame(nd_join *join, int type, const uint32_t *numbers, int count,
                            const char *text)
{
    nd_wire_buffer out = {0};
    nd_node_frame(&out, type, numbers, count, text);
    nd_status status = nd_wire_end(&out);
    if (status == ND_OK) {
        status = nd_channel_send(join->channel, &out, nd_clock_ns() + send_ns);
    }
    nd_wire_buffer_fini(&out);
    return status;
}

static nd_status take_plan(nd_job *job, int64_t deadline)
{
    nd_wire_frame frame;
    ND_TRY(nd_channel_receive(job->join->channel, deadline, &frame));
    if (frame.type == ND_WIRE_ERROR) {
        return nd_channel_error(&frame);
    }
    nd_wire_cursor cursor = nd_wire_body(&frame);
    job->first_rank = (int)nd_wire_get_u32(&cursor);
    int world = (int)nd_wire_get_u32(&cursor);
    if ((int)frame.type != ND_NODE_PLAN || !nd_wire_finished(&cursor) || world != job->world_size) {
        return nd_fail(ND_ERR_IO, "node 0 did not answer with a plan for this job");
    }
    return ND_OK;
}

static nd_status join_job(nd_job *job, const uint8_t key[ND_KEY_BYTES])
{
    nd_join *join = job->join;
    char host[ND_HOST_MAX];
    double limit = nd_nodes_limit(job);
    if (job->cannot_start && limit > telling_seconds) {
        limit = telling_seconds;
    }
    /* Node 0 gives up at its own deadline and says who was missing: a little later than that. */
    int64_t deadline = nd_clock_ns() + (int64_t)((2 * limit + 5) * 1e9);
    int world;
    ND_TRY(nd_endpoint_parse(job->config->launch.rdzv_endpoint, host, &job->master_port));
    ND_TRY(nd_channel_open(host, job->master_port, key, limit, &join->channel));
    snprintf(job->master_addr, sizeof job->master_addr, "%s", nd_channel_peer(join->channel));
    nd_hello hello = {.version = ND_VERSION,
                      .run_id = "",
                      .host = job->host_name,
                      .role = ND_WIRE_NODE,
                      .index = (int)job->config->launch.node_rank};
    ND_TRY(
        nd_channel_hello(join->channel, &hello, deadline, job->run_id, sizeof job->run_id, &world));
    if (job->cannot_start) {
        return send_frame(join, ND_NODE_FAIL, (uint32_t[]){(uint32_t)job->cannot_start}, 1, NULL);
    }
    ND_TRY(send_frame(join, ND_NODE_JOIN, (uint32_t[]){(uint32_t)job->local_workers}, 1,
                      job->job_text));
    nd_status status = take_plan(job, deadline);
    return status == ND_ERR_HANG || status == ND_ERR_IO
               ? nd_fail_context(status, "waiting for the other nodes to join node 0")
               : status;
}

nd_status nd_nodes_join(nd_job *job, const uint8_t key[ND_KEY_BYTES])
{
    ND_TRY(ND_ALLOC(1, &job->join));
    return join_job(job, key);
}

void nd_join_destroy(nd_join *join)
{
    if (join) {
        nd_channel_close(join->channel);
        free(join);
    }
}

static void leave(nd_job *job)
{
    nd_join *join = job->join;
    if (join->over && join->ended && join->watching) {
        nd_wire_buffer out = {0};
        nd_wire_begin(&out, ND_WIRE_BYE);
        if (nd_wire_end(&out) == ND_OK) {
            nd_channel_send(join->channel, &out, nd_clock_ns() + send_ns);
        }
        nd_wire_buffer_fini(&out);
        nd_job_finish(job, join->code);
    }
}

static void lose_node_0(nd_job *job, const char *why)
{
    nd_join *join = job->join;
    if (join->over) {
        return;
    }
    fprintf(stderr, "\nndlaunch: node 0 (%s port %d) was lost: %s\n", job->master_addr,
            job->master_port, why);
    join->over = true;
    join->code = ND_ERR_IO;
    uv_poll_stop(&join->poll);
    nd_job_stop(job);
    leave(job);
}

static void released(nd_job *job, const nd_wire_frame *frame)
{
    nd_join *join = job->join;
    char reason[512];
    size_t bytes;
    nd_wire_cursor cursor = nd_wire_body(frame);
    join->code = (int)nd_wire_get_u32(&cursor);
    const uint8_t *text = nd_wire_get_blob(&cursor, &bytes);
    snprintf(reason, sizeof reason, "%.*s", text ? (int)bytes : 0, text ? (const char *)text : "");
    if (reason[0]) {
        nd_log_warning("ndlaunch: the job ended with code %d: %s", join->code, reason);
    }
    join->over = true;
    uv_poll_stop(&join->poll);
    if (job->running > 0) {
        nd_job_stop(job);
    }
    leave(job);
}

static void on_readable(uv_poll_t *poll, int uv_status, int events)
{
    nd_job *job = poll->data;
    nd_join *join = job->join;
    while (!join->over) {
        nd_wire_frame frame;
        if (nd_channel_receive(join->channel, 0, &frame) != ND_OK) {
            lose_node_0(job, nd_error_last()->message);
            return;
        }
        join->heard_ns = nd_clock_ns();
        if (frame.type == ND_WIRE_NONE) {
            return;
        }
        switch ((int)frame.type) {
        case ND_NODE_STOP:
            join->stopped_ns = nd_clock_ns();
            nd_job_stop(job);
            break;
        case ND_NODE_RELEASE:
            released(job, &frame);
            break;
        case ND_WIRE_ERROR:
            nd_channel_error(&frame);
            lose_node_0(job, nd_error_last()->message);
            break;
        default: /* a beat */
            break;
        }
    }
}

static void on_pulse(uv_timer_t *timer)
{
    nd_job *job = timer->data;
    nd_join *join = job->join;
    int64_t now = nd_clock_ns();
    if (join->over) {
        return;
    }
    if (now - join->beat_ns > (int64_t)ND_NODE_BEAT_MS * 1000000) {
        join->beat_ns = now;
        if (send_frame(join, ND_NODE_BEAT, NULL, 0, NULL) != ND_OK) {
            lose_node_0(job, nd_error_last()->message);
            return;
        }
    }
    if (now - join->heard_ns > (int64_t)ND_NODE_SILENT_MS * 1000000) {
        lose_node_0(job, "it gave no sign of life for 15 s");
    } else if (join->stopped_ns && now - join->stopped_ns > release_ns) {
        lose_node_0(job, "it did not end the job within 60 s of stopping it");
    }
}

nd_status nd_join_watch(nd_job *job)
{
    nd_join *join = job->join;
    join->heard_ns = join->beat_ns = nd_clock_ns();
    ND_TRY(ND_UV(uv_timer_init(&job->loop, &join->pulse)));
    ND_TRY(ND_UV(uv_poll_init(&job->loop, &join->poll, nd_channel_fd(join->channel))));
    join->pulse.data = join->poll.data = job;
    join->watching = true;
    ND_TRY(ND_UV(uv_timer_start(&join->pulse, on_pulse, PULSE_MS, PULSE_MS)));
    return ND_UV(uv_poll_start(&join->poll, UV_READABLE, on_readable));
}

void nd_join_failed(nd_job *job, int code)
{
    nd_join *join = job->join;
    if (!join->over &&
        send_frame(join, ND_NODE_FAIL, (uint32_t[]){(uint32_t)code}, 1, NULL) != ND_OK) {
        lose_node_0(job, nd_error_last()->message);
    }
}

void nd_join_ended(nd_job *job, int code, const char *screen)
{
    nd_join *join = job->join;
    join->ended = true;
    if (screen[0]) {
        fputs(screen, stderr);
    }
    if (!join->over &&
        send_frame(join, ND_NODE_END, (uint32_t[]){(uint32_t)code}, 1, screen) != ND_OK) {
        lose_node_0(job, nd_error_last()->message);
    }
    leave(job);
}

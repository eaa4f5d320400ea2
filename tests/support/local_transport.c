// SPDX-License-Identifier: Apache-2.0
#include "tests/support/local_transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/thread.h"
#include "runtime/comm/p2p.h"
/*
 * Messages between ranks that are threads. Each rank has a box with the sends to it that are not
 * received yet and the receives it has posted. Whoever completes a pair copies from buffer to
 * buffer; the request that waited in the box is BUSY meanwhile. Waiting is a condition variable
 * with a deadline.
 */
typedef struct local_box {
    nd_monitor monitor;
    uint64_t events;       /* arrivals and completions so far */
    nd_p2p_request *sends; /* to this rank, oldest first */
    nd_p2p_request *recvs; /* of this rank, oldest first */
    bool gone;
} local_box;

struct nd_local_hub {
    int size;
    local_box *boxes; /* [size] */
};

typedef struct local_state {
    nd_local_hub *hub;
    local_box *box; /* this rank's */
    uint64_t seen;  /* events at the end of the last wait */
} local_state;

static local_state *state_of(const nd_transport *transport)
{
    return ((nd_p2p_transport *)transport->native)->state;
}

static void list_append(nd_p2p_request **list, nd_p2p_request *request)
{
    while (*list) {
        list = &(*list)->next;
    }
    request->next = NULL;
    *list = request;
}

static nd_p2p_request *list_take(nd_p2p_request **list, nd_tag tag)
{
    for (; *list; list = &(*list)->next) {
        nd_p2p_request *request = *list;
        if (request->tag == tag) {
            *list = request->next;
            atomic_store_explicit(&request->state, ND_REQUEST_BUSY, memory_order_relaxed);
            return request;
        }
    }
    return NULL;
}

static bool list_remove(nd_p2p_request **list, const nd_p2p_request *request)
{
    for (; *list; list = &(*list)->next) {
        if (*list == request) {
            *list = request->next;
            return true;
        }
    }
    return false;
}

static void notify(local_box *box)
{
    nd_monitor_lock(&box->monitor);
    box->events++;
    nd_monitor_tell(&box->monitor);
    nd_monitor_unlock(&box->monitor);
}

/* Copies one message; the last access to the other's request is the store of its state, under its
 * box's lock. */
static void deliver(nd_p2p_request *send, nd_p2p_request *recv, nd_p2p_request *mine,
                    local_box *others_box)
{
    nd_p2p_request *other = mine == send ? recv : send;
    int result = send->bytes == recv->bytes ? ND_REQUEST_DONE : ND_REQUEST_FAILED;
    if (result == ND_REQUEST_DONE && send->bytes > 0) {
        memcpy(recv->buffer, send->buffer, send->bytes);
    }
    atomic_store_explicit(&mine->state, result, memory_order_release);
    nd_monitor_lock(&others_box->monitor);
    atomic_store_explicit(&other->state, result, memory_order_release);
    others_box->events++;
    nd_monitor_tell(&others_box->monitor);
    nd_monitor_unlock(&others_box->monitor);
}

static nd_status local_connect(nd_transport *transport, int rank)
{
    return ND_OK;
}

static nd_status local_send(nd_transport *transport, nd_p2p_request *request)
{
    local_box *box = &state_of(transport)->hub->boxes[request->peer];
    nd_monitor_lock(&box->monitor);
    nd_p2p_request *recv = list_take(&box->recvs, request->tag);
    if (!recv) {
        list_append(&box->sends, request);
        box->events++;
        nd_monitor_tell(&box->monitor);
    }
    nd_monitor_unlock(&box->monitor);
    if (recv) {
        deliver(request, recv, request, box);
    }
    return ND_OK;
}

static nd_status local_recv(nd_transport *transport, nd_p2p_request *request)
{
    local_state *state = state_of(transport);
    nd_monitor_lock(&state->box->monitor);
    nd_p2p_request *send = list_take(&state->box->sends, request->tag);
    if (!send) {
        list_append(&state->box->recvs, request);
    }
    nd_monitor_unlock(&state->box->monitor);
    if (send) {
        deliver(send, request, request, &state->hub->boxes[request->peer]);
    }
    return ND_OK;
}

/* Taken out of its list, or waited for while the other thread is copying (which always ends). */
static void local_cancel(nd_transport *transport, nd_p2p_request *request)
{
    local_state *state = state_of(transport);
    local_box *boxes[2] = {state->box, &state->hub->boxes[request->peer]};
    for (int i = 0; i < 2; i++) {
        nd_monitor_lock(&boxes[i]->monitor);
        list_remove(i == 0 ? &boxes[i]->recvs : &boxes[i]->sends, request);
        nd_monitor_unlock(&boxes[i]->monitor);
    }
    nd_monitor_lock(&state->box->monitor);
    while (atomic_load_explicit(&request->state, memory_order_acquire) == ND_REQUEST_BUSY) {
        nd_monitor_wait(&state->box->monitor, ND_CLOCK_NEVER);
    }
    nd_monitor_unlock(&state->box->monitor);
}

/* Messages move inside send and recv. */
static nd_status local_progress(nd_transport *transport)
{
    return ND_OK;
}

static nd_status local_wait(nd_transport *transport, int idle, double seconds)
{
    local_state *state = state_of(transport);
    const int64_t until = nd_clock_after(seconds);
    nd_monitor_lock(&state->box->monitor);
    while (state->box->events == state->seen && nd_monitor_wait(&state->box->monitor, until)) {
    }
    state->seen = state->box->events;
    nd_monitor_unlock(&state->box->monitor);
    return ND_OK;
}

static bool local_peek(nd_transport *transport, nd_tag wanted, nd_tag mask, nd_tag *found,
                       size_t *bytes)
{
    local_box *box = state_of(transport)->box;
    nd_monitor_lock(&box->monitor);
    const nd_p2p_request *request = box->sends;
    while (request && ((request->tag ^ wanted) & mask) != 0) {
        request = request->next;
    }
    if (request) {
        *found = request->tag;
        *bytes = request->bytes;
    }
    nd_monitor_unlock(&box->monitor);
    return request != NULL;
}

static bool local_gone(nd_transport *transport, int rank)
{
    local_box *box = &state_of(transport)->hub->boxes[rank];
    nd_monitor_lock(&box->monitor);
    bool gone = box->gone;
    nd_monitor_unlock(&box->monitor);
    return gone;
}

static void local_describe(nd_transport *transport, int rank, char *text, size_t size)
{
    snprintf(text, size, "%s", local_gone(transport, rank) ? " (its thread has ended)" : "");
}

static void local_close(nd_transport *transport, bool failed)
{
    local_state *state = state_of(transport);
    nd_monitor_lock(&state->box->monitor);
    state->box->gone = true;
    nd_monitor_unlock(&state->box->monitor);
    for (int i = 0; i < state->hub->size; i++) {
        notify(&state->hub->boxes[i]);
    }
}

static const nd_p2p local_p2p = {
    .connect = local_connect,
    .send = local_send,
    .recv = local_recv,
    .cancel = local_cancel,
    .progress = local_progress,
    .wait = local_wait,
    .peek = local_peek,
    .gone = local_gone,
    .describe = local_describe,
    .close = local_close,
};

nd_status nd_local_hub_create(int size, nd_local_hub **out)
{
    ND_ASSERT(size >= 1);
    nd_local_hub *hub = NULL;
    ND_TRY(ND_ALLOC(1, &hub));
    nd_status status = ND_ALLOC(size, &hub->boxes);
    if (status != ND_OK) {
        free(hub);
        return status;
    }
    hub->size = size;
    for (int i = 0; i < size; i++) {
        hub->boxes[i].monitor = (nd_monitor)ND_MONITOR_INIT;
    }
    *out = hub;
    return ND_OK;
}

void nd_local_hub_destroy(nd_local_hub *hub)
{
    if (!hub) {
        return;
    }
    for (int i = 0; i < hub->size; i++) {
        nd_monitor_fini(&hub->boxes[i].monitor);
    }
    free(hub->boxes);
    free(hub);
}

nd_status nd_transport_open_local(nd_local_hub *hub, int rank, double timeout_seconds,
                                  nd_progress_slot *progress, nd_transport **out)
{
    ND_ASSERT(rank >= 0 && rank < hub->size && timeout_seconds > 0 && progress);
    const nd_transport_options options = {
        .rank = rank, .size = hub->size, .timeout_seconds = timeout_seconds, .progress = progress};
    ND_TRY(nd_p2p_transport_create(&local_p2p, &options, sizeof(local_state), out));
    *state_of(*out) = (local_state){.hub = hub, .box = &hub->boxes[rank]};
    return ND_OK;
}

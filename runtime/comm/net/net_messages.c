// SPDX-License-Identifier: Apache-2.0
/* Messages between ranks, which a sender and a receiver of this process wait for. */
#include "runtime/comm/net/net_state.h"

#include <stdlib.h>
#include <string.h>

/* The oldest with this peer and tag; NULL: none. */
static nd_p2p_request *net_take(nd_p2p_request **list, int peer, nd_tag tag)
{
    for (; *list; list = &(*list)->next) {
        nd_p2p_request *request = *list;
        if (request->peer == peer && request->tag == tag) {
            *list = request->next;
            return request;
        }
    }
    return NULL;
}

bool nd_net_peek(const nd_net *net, nd_tag wanted, nd_tag mask, nd_tag *found, size_t *bytes)
{
    for (const net_arrival *a = net->arrivals; a; a = a->next) {
        if ((a->tag & mask) == (wanted & mask) && !a->request) {
            *found = a->tag;
            *bytes = a->bytes;
            return true;
        }
    }
    return false;
}

void nd_net_cancel(nd_net *net, nd_p2p_request *request)
{
    net->stopped = net->stopped || request->native;
    request->native = NULL;
}

static nd_status damaged(void)
{
    return nd_fail(ND_ERR_IO, "a rank sent what is no message");
}

static void spare(nd_net *net, net_arrival *arrival)
{
    arrival->next = net->spare_arrivals;
    net->spare_arrivals = arrival;
}

static net_arrival *take_arrival(nd_net *net, const nd_p2p_request *wanted)
{
    for (net_arrival **a = &net->arrivals; *a; a = &(*a)->next) {
        net_arrival *arrival = *a;
        if (arrival->rank == wanted->peer && arrival->tag == wanted->tag && !arrival->request) {
            if (arrival->complete) { /* else its source still fills it */
                *a = arrival->next;
            }
            return arrival;
        }
    }
    return NULL;
}

bool nd_net_match(nd_net *net, nd_p2p_request *request)
{
    net_arrival *arrival = take_arrival(net, request);
    if (!arrival) {
        net_append(&net->posted, request);
        return false;
    }
    bool fits = arrival->bytes == request->bytes;
    if (!arrival->complete) {
        arrival->request = request;
        return false;
    }
    bool offer = arrival->offer;
    if (!offer && fits && request->bytes > 0) {
        memcpy(request->buffer, arrival->data, request->bytes);
    }
    spare(net, arrival);
    if (!offer || !fits) {
        net_finish(request, fits);
        return false;
    }
    net_append(&net->ready, request);
    return true;
}

static nd_status keep_arrival(nd_net *net, net_source *source, bool offer)
{
    size_t bytes = (size_t)source->in.head.bytes;
    net_arrival *arrival = net->spare_arrivals, **last = &net->arrivals;
    if (arrival) {
        net->spare_arrivals = arrival->next;
    } else if (!(arrival = malloc(sizeof *arrival))) {
        return nd_fail_memory("a message of %zu bytes", bytes);
    }
    arrival->next = NULL;
    arrival->rank = source->rank;
    arrival->tag = source->in.head.tag;
    arrival->bytes = bytes;
    arrival->offer = offer;
    arrival->complete = offer || bytes == 0;
    arrival->request = NULL;
    while (*last) {
        last = &(*last)->next;
    }
    *last = arrival;
    if (!arrival->complete) {
        source->arrival = arrival;
        source->to = arrival->data;
        source->left = bytes;
    }
    return ND_OK;
}

/* The bytes of the message come into the buffer of the request. */
static nd_status begin_payload(net_source *source, nd_p2p_request *request)
{
    if (request->bytes != source->in.head.bytes) {
        net_finish(request, false);
        return damaged();
    }
    if (request->bytes == 0) {
        net_finish(request, true);
        return ND_OK;
    }
    source->request = request;
    source->to = request->buffer;
    source->left = request->bytes;
    return ND_OK;
}

nd_status nd_net_take_head(nd_net *net, net_source *source, nd_p2p_request **answered)
{
    const net_head *head = &source->in.head;
    nd_p2p_request *request;
    *answered = NULL;
    switch (head->kind) {
    case NET_EAGER:
        if (head->bytes > NET_EAGER_BYTES) {
            return damaged();
        }
        request = net_take(&net->posted, source->rank, head->tag);
        return request ? begin_payload(source, request) : keep_arrival(net, source, false);
    case NET_OFFER:
        request = net_take(&net->posted, source->rank, head->tag);
        if (!request) {
            return keep_arrival(net, source, true);
        }
        if (request->bytes != head->bytes) {
            net_finish(request, false);
            return ND_OK;
        }
        net_append(&net->ready, request);
        *answered = request;
        return ND_OK;
    case NET_READY:
        *answered = net_take(&net->held, source->rank, head->tag);
        return *answered ? ND_OK : damaged();
    case NET_DATA:
        request = net_take(&net->ready, source->rank, head->tag);
        return request ? begin_payload(source, request) : damaged();
    default:
        return damaged();
    }
}

void nd_net_end_payload(nd_net *net, net_source *source)
{
    net_arrival *arrival = source->arrival;
    if (source->request) {
        net_finish(source->request, true);
    } else if (arrival->request) { /* asked for meanwhile */
        nd_p2p_request *request = arrival->request;
        bool fits = request->bytes == arrival->bytes;
        if (fits) {
            memcpy(request->buffer, arrival->data, arrival->bytes);
        }
        for (net_arrival **a = &net->arrivals; *a; a = &(*a)->next) {
            if (*a == arrival) {
                *a = arrival->next;
                break;
            }
        }
        spare(net, arrival);
        net_finish(request, fits);
    } else {
        arrival->complete = true;
    }
    source->request = NULL;
    source->arrival = NULL;
}

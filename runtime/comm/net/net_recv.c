// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/net/net_state.h"

#include <stdlib.h>
#include <string.h>

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

nd_status nd_net_recv(nd_net *net, nd_p2p_request *request)
{
    request->native = net;
    net_arrival *arrival = take_arrival(net, request);
    if (!arrival) {
        net_append(&net->posted, request);
        return ND_OK;
    }
    bool fits = arrival->bytes == request->bytes;
    if (!arrival->complete) {
        arrival->request = request;
        return ND_OK;
    }
    bool offer = arrival->offer;
    if (!offer && fits && request->bytes > 0) {
        memcpy(request->buffer, arrival->data, request->bytes);
    }
    spare(net, arrival);
    if (!offer || !fits) {
        net_finish(request, fits);
        return ND_OK;
    }
    net_append(&net->ready, request);
    return nd_net_queue(net, request->peer, NET_READY, request->tag, request->bytes, NULL);
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

static nd_status take_head(nd_net *net, net_source *source)
{
    const net_head *head = &source->in.head;
    nd_p2p_request *request;
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
        return nd_net_queue(net, source->rank, NET_READY, head->tag, request->bytes, NULL);
    case NET_READY:
        request = net_take(&net->held, source->rank, head->tag);
        return request
                   ? nd_net_queue(net, source->rank, NET_DATA, head->tag, request->bytes, request)
                   : damaged();
    case NET_DATA:
        request = net_take(&net->ready, source->rank, head->tag);
        return request ? begin_payload(source, request) : damaged();
    default:
        return damaged();
    }
}

static void end_payload(nd_net *net, net_source *source)
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

static nd_status take_hello(nd_net *net, net_source *source)
{
    const net_hello *hello = &source->in.hello;
    const char welcome = NET_WELCOME;
    bool idle;
    if (memcmp(hello->token, net->token, sizeof net->token) != 0 || hello->rank < 0 ||
        hello->rank >= net->size || net->peers[hello->rank].known) {
        return damaged();
    }
    source->rank = hello->rank;
    net->peers[hello->rank].known = true;
    net->strangers--;
    return nd_link_write(source->link, &welcome, 1, &idle);
}

static nd_status read_source(nd_net *net, net_source *source)
{
    bool idle;
    for (size_t count = 1; count > 0;) {
        bool payload = source->left > 0;
        char *to = payload ? source->to : (char *)source->in.bytes + source->filled;
        size_t room = payload ? source->left : sizeof source->in - source->filled;
        ND_TRY(nd_link_read(source->link, to, room, &count));
        if (payload) {
            source->to += count;
            source->left -= count;
            if (source->left == 0) {
                end_payload(net, source);
            }
        } else if ((source->filled += count) == sizeof source->in) {
            source->filled = 0;
            ND_TRY(source->rank < 0 ? take_hello(net, source) : take_head(net, source));
        }
    }
    return nd_link_flush(source->link, &idle); /* the handshake's answers */
}

void nd_net_end_source(nd_net *net, net_source *source)
{
    for (net_source **s = &net->sources; *s; s = &(*s)->next) {
        if (*s == source) {
            *s = source->next;
            break;
        }
    }
    if (source->rank >= 0) {
        net->peers[source->rank].gone = true;
    } else {
        net->strangers--;
    }
    nd_link_close(source->link);
    free(source);
}

void nd_net_serve_source(nd_net *net, net_source *source)
{
    nd_status status = read_source(net, source);
    if (status != ND_OK) {
        net_keep_failure(net, source->rank < 0 ? ND_OK : status);
        nd_net_end_source(net, source);
    }
}

// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/net/net_state.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"

static const double retry_seconds = 0.1;

static void net_finish(nd_p2p_request *request, bool good)
{
    request->native = NULL;
    atomic_store_explicit(&request->state, good ? ND_REQUEST_DONE : ND_REQUEST_FAILED,
                          memory_order_release);
}

static void net_append(nd_p2p_request **list, nd_p2p_request *request)
{
    while (*list) {
        list = &(*list)->next;
    }
    request->next = NULL;
    *list = request;
}

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

/* After an error, which it clears: that of a peer or a stranger is no failure of this rank. */
static void net_keep_failure(nd_net *net, nd_status status)
{
    bool own = status == ND_ERR_RESOURCE || status == ND_ERR_INTERNAL;
    if (own && net->failed.status == ND_OK) {
        net->failed = *nd_error_last();
        net->failed.status = status;
    }
    nd_error_clear();
}

static void end_frame(nd_net *net, net_peer *peer, bool good)
{
    net_frame *frame = peer->queue;
    peer->queue = frame->next;
    if (frame->request) {
        net_finish(frame->request, good);
    }
    frame->next = net->spare_frames;
    net->spare_frames = frame;
}

static nd_status take_frame(nd_net *net, net_frame **out)
{
    if (!net->spare_frames) {
        return ND_ALLOC(1, out);
    }
    *out = net->spare_frames;
    net->spare_frames = (*out)->next;
    return ND_OK;
}

/* Before the peer's answer the connection is made again, as if nothing had been said. */
static void lose(nd_net *net, net_peer *peer, nd_status status)
{
    net_keep_failure(net, status);
    nd_link_close(peer->link);
    peer->link = NULL;
    peer->said_hello = false;
    if (!peer->welcome) {
        net->retries += peer->retry_at == 0;
        peer->retry_at = nd_clock_seconds() + retry_seconds;
        return;
    }
    peer->gone = true;
    while (peer->queue) {
        end_frame(net, peer, false);
    }
}

static void connect_to(nd_net *net, net_peer *peer)
{
    net->retries -= peer->retry_at != 0;
    peer->retry_at = 0;
    nd_status status = nd_link_connect(&peer->card.address, net->client, net->epoll, &peer->link);
    if (status != ND_OK) {
        lose(net, peer, status);
    }
}

/* Copies from the queue what fits into a chunk. Its requests end when the socket has taken it. */
static size_t fill(nd_net *net, net_peer *peer)
{
    size_t used = 0;
    for (net_frame *frame = peer->queue; frame && used < sizeof net->plain; frame = frame->next) {
        const size_t payload = frame->request ? frame->request->bytes : 0;
        while (frame->done < sizeof frame->head + payload && used < sizeof net->plain) {
            bool head = frame->done < sizeof frame->head;
            const char *from =
                head ? (const char *)&frame->head + frame->done
                     : (const char *)frame->request->buffer + (frame->done - sizeof frame->head);
            size_t left = (head ? sizeof frame->head : sizeof frame->head + payload) - frame->done;
            size_t n = left < sizeof net->plain - used ? left : sizeof net->plain - used;
            memcpy(net->plain + used, from, n);
            frame->done += n;
            used += n;
        }
    }
    return used;
}

static nd_status write_queue(nd_net *net, net_peer *peer)
{
    bool idle;
    ND_TRY(nd_link_flush(peer->link, &idle));
    if (idle && nd_tls_established(peer->link->tls) && !peer->said_hello) {
        net_hello hello = {.rank = net->rank};
        memcpy(hello.token, peer->card.token, sizeof hello.token);
        peer->said_hello = true;
        return nd_link_write(peer->link, &hello, sizeof hello, &idle);
    }
    while (idle && peer->welcome && peer->queue) {
        while (peer->queue &&
               peer->queue->done ==
                   sizeof(net_head) + (peer->queue->request ? peer->queue->request->bytes : 0)) {
            end_frame(net, peer, true);
        }
        size_t count = fill(net, peer);
        if (count > 0) {
            ND_TRY(nd_link_write(peer->link, net->plain, count, &idle));
        }
    }
    return ND_OK;
}

/* Reads the answer to the hello, and notices the end. */
static nd_status read_answer(net_peer *peer)
{
    char answer;
    size_t count;
    do {
        ND_TRY(nd_link_read(peer->link, &answer, 1, &count));
        if (count > 0 && (peer->welcome || !peer->said_hello || answer != NET_WELCOME)) {
            return nd_fail(ND_ERR_IO, "a rank answered what is no welcome");
        }
        peer->welcome = peer->welcome || count > 0;
    } while (count > 0);
    return ND_OK;
}

void nd_net_serve_peer(nd_net *net, net_peer *peer)
{
    nd_status status = read_answer(peer);
    status = status == ND_OK ? write_queue(net, peer) : status;
    if (status != ND_OK) {
        lose(net, peer, status);
    }
}

/* Errors are those of this rank; what a peer does ends its connection. */
static nd_status queue_frame(nd_net *net, int rank, net_kind kind, nd_tag tag, size_t bytes,
                             nd_p2p_request *request)
{
    net_peer *peer = &net->peers[rank];
    net_frame *frame, **last = &peer->queue;
    ND_TRY(take_frame(net, &frame));
    *frame = (net_frame){.head = {.tag = tag, .bytes = bytes, .kind = kind}, .request = request};
    while (*last) {
        last = &(*last)->next;
    }
    *last = frame;
    if (!peer->link && peer->retry_at == 0) {
        connect_to(net, peer);
    } else if (peer->link && peer->welcome) {
        nd_status status = write_queue(net, peer);
        if (status != ND_OK) {
            lose(net, peer, status);
        }
    }
    return net_failure(net);
}

nd_status nd_net_send(nd_net *net, nd_p2p_request *request)
{
    request->native = net;
    if (net->peers[request->peer].gone) {
        net_finish(request, false);
        return ND_OK;
    }
    if (request->bytes <= NET_EAGER_BYTES) {
        return queue_frame(net, request->peer, NET_EAGER, request->tag, request->bytes, request);
    }
    net_append(&net->held, request);
    return queue_frame(net, request->peer, NET_OFFER, request->tag, request->bytes, NULL);
}

void nd_net_retry(nd_net *net)
{
    double now = net->retries > 0 ? nd_clock_seconds() : 0;
    for (int rank = 0; net->retries > 0 && rank < net->size; rank++) {
        net_peer *peer = &net->peers[rank];
        if (peer->retry_at != 0 && peer->retry_at <= now) {
            connect_to(net, peer);
        }
    }
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
    return queue_frame(net, request->peer, NET_READY, request->tag, request->bytes, NULL);
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
        return queue_frame(net, source->rank, NET_READY, head->tag, request->bytes, NULL);
    case NET_READY:
        request = net_take(&net->held, source->rank, head->tag);
        return request
                   ? queue_frame(net, source->rank, NET_DATA, head->tag, request->bytes, request)
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

// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/net/net_state.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"

static const double retry_seconds = 0.1;

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

static void end_written(nd_net *net, net_peer *peer)
{
    while (peer->queue &&
           peer->queue->done ==
               sizeof(net_head) + (peer->queue->request ? peer->queue->request->bytes : 0)) {
        end_frame(net, peer, true);
    }
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
        end_written(net, peer);
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

nd_status nd_net_queue(nd_net *net, int rank, net_kind kind, nd_tag tag, size_t bytes,
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
        return nd_net_queue(net, request->peer, NET_EAGER, request->tag, request->bytes, request);
    }
    net_append(&net->held, request);
    return nd_net_queue(net, request->peer, NET_OFFER, request->tag, request->bytes, NULL);
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

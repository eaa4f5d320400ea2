// SPDX-License-Identifier: Apache-2.0
/* Connections between ranks: how they begin, what goes over them, and how they end. */
#include "runtime/comm/net/net_state.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "runtime/base/clock.h"

/* Keepalive notices a silent other side of an idle connection after 10 + 4 * 5 s. */
static const int idle_seconds = 10, probe_seconds = 5, probes = 4;
/* With doubled waits of at least 0.2 s these take 25 s. TCP_USER_TIMEOUT would also end a
 * connection whose other side is only busy, and answers that it has no room. */
enum { LOST_RESENDS = 7 };

static nd_status lost(int code)
{
    if (code == ENOMEM || code == ENOBUFS) {
        return nd_fail_memory("a connection between ranks");
    }
    return nd_fail(ND_ERR_IO, "a connection between ranks is lost: %s", strerror(code));
}

static nd_status create(int fd, nd_tls_context *context, bool connecting, int epoll, nd_link **out)
{
    const int on = 1;
    nd_link *link;
    nd_status status = ND_ALLOC(1, &link);
    if (status != ND_OK) {
        close(fd);
        return status;
    }
    *link = (nd_link){.fd = fd, .epoll = epoll, .connecting = connecting, .wants_out = connecting};
    struct epoll_event event = {.events = EPOLLIN | (connecting ? EPOLLOUT : 0), .data.ptr = link};
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_seconds, sizeof idle_seconds);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &probe_seconds, sizeof probe_seconds);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    status = nd_tls_create(context, &link->tls);
    if (status == ND_OK && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
        status = nd_fail_system(errno, "a connection between ranks");
    }
    if (status != ND_OK) {
        nd_link_close(link);
        return status;
    }
    *out = link;
    return ND_OK;
}

nd_status nd_link_connect(const nd_address *to, nd_tls_context *client, int epoll, nd_link **out)
{
    int fd = socket(to->storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return nd_fail_system(errno, "a socket between ranks");
    }
    if (connect(fd, (const struct sockaddr *)&to->storage, to->bytes) != 0 &&
        errno != EINPROGRESS) {
        nd_status status = lost(errno);
        close(fd);
        return status;
    }
    return create(fd, client, true, epoll, out);
}

nd_status nd_link_accept(int fd, nd_tls_context *server, int epoll, nd_link **out)
{
    return create(fd, server, false, epoll, out);
}

void nd_link_close(nd_link *link)
{
    if (link) {
        nd_tls_destroy(link->tls);
        close(link->fd);
        free(link);
    }
}

static nd_status want_out(nd_link *link, bool wanted)
{
    struct epoll_event event = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0), .data.ptr = link};
    if (wanted != link->wants_out) {
        link->wants_out = wanted;
        if (epoll_ctl(link->epoll, EPOLL_CTL_MOD, link->fd, &event) != 0) {
            return lost(errno);
        }
    }
    return ND_OK;
}

nd_status nd_link_flush(nd_link *link, bool *idle)
{
    *idle = false;
    if (link->connecting) { /* has the connection come about? */
        int error = 0;
        struct sockaddr_storage peer;
        socklen_t bytes = sizeof error, peer_bytes = sizeof peer;
        getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
        if (error != 0) {
            return lost(error);
        }
        link->connecting = getpeername(link->fd, (struct sockaddr *)&peer, &peer_bytes) != 0;
    }
    while (!link->connecting) {
        const void *bytes;
        size_t count = nd_tls_pending(link->tls, &bytes);
        if (count == 0) {
            *idle = true;
            return want_out(link, false);
        }
        ssize_t n = send(link->fd, bytes, count, MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            break;
        }
        if (n < 0 && errno != EINTR) {
            return lost(errno);
        }
        nd_tls_sent(link->tls, n > 0 ? (size_t)n : 0);
    }
    return want_out(link, true);
}

nd_status nd_link_write(nd_link *link, const void *bytes, size_t count, bool *idle)
{
    ND_ASSERT(count <= ND_LINK_CHUNK);
    const void *pending;
    if (nd_tls_pending(link->tls, &pending) > 0) {
        return nd_fail(ND_ERR_IO, "a connection between ranks took no answer");
    }
    ND_TRY(nd_tls_write(link->tls, bytes, count));
    return nd_link_flush(link, idle);
}

nd_status nd_link_read(nd_link *link, void *out, size_t capacity, size_t *count)
{
    unsigned char cipher[ND_LINK_CHUNK];
    bool closed;
    ND_TRY(nd_tls_read(link->tls, out, capacity, count, &closed));
    if (*count == 0 && !closed && !link->connecting) {
        ssize_t n = recv(link->fd, cipher, sizeof cipher, 0);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
            return ND_OK;
        }
        if (n < 0) {
            return lost(errno);
        }
        ND_TRY(n > 0 ? nd_tls_input(link->tls, cipher, (size_t)n) : ND_OK);
        ND_TRY(nd_tls_read(link->tls, out, capacity, count, &closed));
        closed = closed || n == 0;
    }
    return closed ? nd_fail(ND_ERR_IO, "a connection between ranks was closed") : ND_OK;
}

/* To other ranks. */

enum {
    STRANGERS_MORE = 64, /* connections without a hello, beside one of each rank */
    EVENTS = 64,
};
/* Apart from the store's, so that neither answers for the other. */
static const nd_tls_use use_of_ranks = {
    .identity = "ndtrain-ranks", .records = ND_TLS_RECORDS, .keeps_buffers = true};
static const double stranger_seconds = 5, flush_seconds = 2, deaf_seconds = 0.1,
                    retry_seconds = 0.1;

/* After an error, which it clears: that of a peer or a stranger is no failure of this rank. */
static void keep_failure(nd_net *net, nd_status status)
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

/* Before the peer's answer the connection is made again, as if nothing had been said. */
static void lose(nd_net *net, net_peer *peer, nd_status status)
{
    keep_failure(net, status);
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
static size_t fill_chunk(nd_net *net, net_peer *peer)
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
        size_t count = fill_chunk(net, peer);
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

/* Queues a frame. A fault of the peer ends its connection; only faults of this rank are errors. */
static nd_status queue_frame(nd_net *net, net_kind kind, nd_p2p_request *request)
{
    net_peer *peer = &net->peers[request->peer];
    const bool bytes = kind == NET_EAGER || kind == NET_DATA;
    net_frame *frame = net->spare_frames, **last = &peer->queue;
    if (frame) {
        net->spare_frames = frame->next;
    } else {
        ND_TRY(ND_ALLOC(1, &frame));
    }
    *frame = (net_frame){.head = {.tag = request->tag, .bytes = request->bytes, .kind = kind},
                         .request = bytes ? request : NULL};
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
        return queue_frame(net, NET_EAGER, request);
    }
    net_append(&net->held, request);
    return queue_frame(net, NET_OFFER, request);
}

nd_status nd_net_recv(nd_net *net, nd_p2p_request *request)
{
    request->native = net;
    return nd_net_match(net, request) ? queue_frame(net, NET_READY, request) : ND_OK;
}

/* From other ranks. */

static nd_status take_hello(nd_net *net, net_source *source)
{
    const net_hello *hello = &source->in.hello;
    const char welcome = NET_WELCOME;
    bool idle;
    if (memcmp(hello->token, net->token, sizeof net->token) != 0 || hello->rank < 0 ||
        hello->rank >= net->size || net->peers[hello->rank].known) {
        return nd_fail(ND_ERR_IO, "a rank sent what is no message");
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
        nd_p2p_request *answered = NULL;
        bool payload = source->left > 0;
        char *to = payload ? source->to : (char *)source->in.bytes + source->filled;
        size_t room = payload ? source->left : sizeof source->in - source->filled;
        ND_TRY(nd_link_read(source->link, to, room, &count));
        if (payload) {
            source->to += count;
            source->left -= count;
            if (source->left == 0) {
                nd_net_end_payload(net, source);
            }
        } else if ((source->filled += count) == sizeof source->in) {
            source->filled = 0;
            ND_TRY(source->rank < 0 ? take_hello(net, source)
                                    : nd_net_take_head(net, source, &answered));
            if (answered) {
                bool offer = source->in.head.kind == NET_OFFER;
                ND_TRY(queue_frame(net, offer ? NET_READY : NET_DATA, answered));
            }
        }
    }
    return nd_link_flush(source->link, &idle); /* the handshake's answers */
}

static void end_source(nd_net *net, net_source *source)
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

/* Ends connections that said no hello in time. Where there are none and `more` is true, it ends the
 * oldest that has not proved the key. */
static void drop_strangers(nd_net *net, bool more)
{
    double old = nd_clock_seconds() - stranger_seconds;
    net_source *oldest = NULL;
    for (net_source *s = net->sources, *next; s; s = next) {
        next = s->next;
        if (s->rank < 0 && s->since < old) {
            end_source(net, s);
            more = false;
        } else if (s->rank < 0 && !nd_tls_established(s->link->tls)) {
            oldest = s; /* the newest are first */
        }
    }
    if (more && oldest) {
        end_source(net, oldest);
    }
}

/* A listener that cannot accept would otherwise wake this rank again and again. */
static void set_deaf(nd_net *net, double until)
{
    struct epoll_event event = {.events = until == 0 ? EPOLLIN : 0}; /* without a link */
    net->deaf_until = until;
    epoll_ctl(net->epoll, EPOLL_CTL_MOD, net->listener, &event);
}

static void accept_one(nd_net *net, int fd)
{
    net_source *source;
    if (ND_ALLOC(1, &source) != ND_OK) {
        nd_error_clear();
        close(fd);
        return;
    }
    *source = (net_source){.rank = -1, .since = nd_clock_seconds()};
    if (nd_link_accept(fd, net->server, net->epoll, &source->link) != ND_OK) {
        nd_error_clear();
        free(source);
        return;
    }
    source->next = net->sources;
    net->sources = source;
    net->strangers++;
}

static void accept_all(nd_net *net)
{
    for (;;) {
        int fd = accept4(net->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR)) {
            return;
        }
        if (fd < 0) { /* no descriptor, or no memory */
            int strangers = net->strangers;
            drop_strangers(net, true);
            if (net->strangers == strangers) {
                set_deaf(net, nd_clock_seconds() + deaf_seconds);
            }
            return;
        }
        drop_strangers(net, net->strangers >= net->size + STRANGERS_MORE);
        accept_one(net, fd);
    }
}

/* Serves a link that has an event; an event before it may have ended the link's owner. */
static void serve(nd_net *net, const nd_link *link)
{
    nd_status status = ND_OK;
    for (net_source *s = net->sources; s; s = s->next) {
        if (s->link == link) {
            status = read_source(net, s);
            if (status != ND_OK) {
                keep_failure(net, s->rank < 0 ? ND_OK : status);
                end_source(net, s);
            }
            return;
        }
    }
    for (int rank = 0; rank < net->size; rank++) {
        net_peer *peer = &net->peers[rank];
        if (peer->link == link) {
            status = read_answer(peer);
            status = status == ND_OK ? write_queue(net, peer) : status;
            if (status != ND_OK) {
                lose(net, peer, status);
            }
            return;
        }
    }
}

nd_status nd_net_progress(nd_net *net)
{
    struct epoll_event events[EVENTS];
    if (net->stopped) {
        return ND_OK;
    }
    int n = epoll_wait(net->epoll, events, EVENTS, 0);
    for (int i = 0; i < n; i++) {
        if (events[i].data.ptr) {
            serve(net, events[i].data.ptr);
        } else {
            accept_all(net);
        }
    }
    if (net->strangers > 0 && n < EVENTS) { /* what they have said is read */
        drop_strangers(net, false);
    }
    if (net->deaf_until != 0 && net->deaf_until <= nd_clock_seconds()) {
        set_deaf(net, 0);
    }
    const double now = net->retries > 0 ? nd_clock_seconds() : 0;
    for (int rank = 0; net->retries > 0 && rank < net->size; rank++) {
        net_peer *peer = &net->peers[rank];
        if (peer->retry_at != 0 && peer->retry_at <= now) {
            connect_to(net, peer);
        }
    }
    return net_failure(net);
}

bool nd_net_gone(const nd_net *net, int rank)
{
    const net_peer *peer = &net->peers[rank];
    struct tcp_info info = {0};
    socklen_t bytes = sizeof info;
    if (peer->gone || !peer->link || peer->link->connecting) {
        return peer->gone;
    }
    /* Nobody has acknowledged what was sent for about half a minute. */
    return getsockopt(peer->link->fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 &&
           info.tcpi_retransmits >= LOST_RESENDS;
}

static nd_status listen_at(nd_net *net, const nd_address *own, nd_net_card *card)
{
    const int on = 1;
    nd_address at = *own;
    ((struct sockaddr_in *)&at.storage)->sin_port = 0; /* at the same place in both families */
    net->listener = socket(at.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    net->epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN}; /* without a link */
    if (net->listener < 0 || net->epoll < 0) {
        return nd_fail_system(errno, "the socket at which other ranks connect");
    }
    setsockopt(net->listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(net->listener, (struct sockaddr *)&at.storage, at.bytes) != 0 ||
        listen(net->listener, SOMAXCONN) != 0 ||
        getsockname(net->listener, (struct sockaddr *)&at.storage, &at.bytes) != 0 ||
        epoll_ctl(net->epoll, EPOLL_CTL_ADD, net->listener, &event) != 0) {
        char text[ND_ADDRESS_TEXT_MAX];
        int code = errno;
        nd_address_text(own, text);
        return nd_fail(ND_ERR_IO, "rank %d cannot listen at %s for the ranks of other hosts: %s",
                       net->rank, text, strerror(code));
    }
    card->address = at;
    return ND_OK;
}

nd_status nd_net_open(const nd_transport_options *options, const nd_comm_network *network, int *fd,
                      nd_net **out)
{
    nd_net *net;
    nd_net_card card = {0}, *all = NULL;
    nd_tls_context_set(network->client, &use_of_ranks);
    nd_tls_context_set(network->server, &use_of_ranks);
    nd_status status = ND_ALLOC(1, &net);
    if (status != ND_OK) {
        nd_tls_context_destroy(network->client);
        nd_tls_context_destroy(network->server);
        return status;
    }
    net->rank = options->rank;
    net->size = options->size;
    net->listener = net->epoll = -1;
    net->client = network->client;
    net->server = network->server;
    ND_TRY_OUT(ND_ALLOC(options->size, &net->peers));
    ND_TRY_OUT(listen_at(net, &network->address, &card));
    if (getrandom(net->token, sizeof net->token, 0) != (ssize_t)sizeof net->token) {
        status = nd_fail_system(errno, "random bytes");
    }
    memcpy(card.token, net->token, sizeof card.token);
    ND_TRY_OUT(status);
    ND_TRY_OUT(ND_ALLOC(options->size, &all));
    ND_TRY_OUT(options->exchange(options->exchange_context, &card, all, sizeof card));
    for (int rank = 0; rank < options->size; rank++) {
        net->peers[rank].card = all[rank];
    }
out:
    free(all);
    if (status != ND_OK) {
        nd_net_close(net, false);
        return status;
    }
    *fd = net->epoll;
    *out = net;
    return ND_OK;
}

static bool is_flushed(const nd_net *net)
{
    int rank = 0;
    while (rank < net->size && (!net->peers[rank].queue || net->peers[rank].gone)) {
        rank++;
    }
    return rank == net->size;
}

static void free_frames(net_frame *frame)
{
    for (net_frame *next; frame; frame = next) {
        next = frame->next;
        free(frame);
    }
}

static void free_arrivals(net_arrival *arrival)
{
    for (net_arrival *next; arrival; arrival = next) {
        next = arrival->next;
        free(arrival);
    }
}

static void close_all(nd_net *net)
{
    for (int rank = 0; net->peers && rank < net->size; rank++) {
        nd_link_close(net->peers[rank].link);
        free_frames(net->peers[rank].queue);
    }
    free_frames(net->spare_frames);
    free_arrivals(net->arrivals);
    free_arrivals(net->spare_arrivals);
    for (net_source *s = net->sources, *next; s; s = next) {
        next = s->next;
        nd_link_close(s->link);
        free(s);
    }
}

void nd_net_close(nd_net *net, bool flush)
{
    if (!net) {
        return;
    }
    for (double until = nd_clock_seconds() + flush_seconds;
         flush && !net->stopped && !is_flushed(net) && nd_clock_seconds() < until;) {
        poll(&(struct pollfd){.fd = net->epoll, .events = POLLIN}, 1, 50);
        flush = nd_net_progress(net) == ND_OK;
    }
    close_all(net);
    if (net->listener >= 0) {
        close(net->listener);
    }
    if (net->epoll >= 0) {
        close(net->epoll);
    }
    nd_tls_context_destroy(net->client);
    nd_tls_context_destroy(net->server);
    free(net->peers);
    free(net);
}

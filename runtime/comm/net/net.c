// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/net/net_state.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "runtime/base/clock.h"

enum {
    STRANGERS_MORE = 64, /* connections without a hello, beside one of each rank */
    EVENTS = 64,
};
/* Apart from the store's, so that neither answers for the other. */
static const nd_tls_use use_of_ranks = {
    .identity = "ndtrain-ranks", .records = ND_TLS_RECORDS, .keeps_buffers = true};
static const double stranger_seconds = 5, flush_seconds = 2, deaf_seconds = 0.1;

/* Ends connections that said no hello in time. Where there are none and `more` is true, it ends the
 * oldest that has not proved the key. */
static void drop_strangers(nd_net *net, bool more)
{
    double old = nd_clock_seconds() - stranger_seconds;
    net_source *oldest = NULL;
    for (net_source *s = net->sources, *next; s; s = next) {
        next = s->next;
        if (s->rank < 0 && s->since < old) {
            nd_net_end_source(net, s);
            more = false;
        } else if (s->rank < 0 && !nd_tls_established(s->link->tls)) {
            oldest = s; /* the newest are first */
        }
    }
    if (more && oldest) {
        nd_net_end_source(net, oldest);
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

/* What an event belongs to may have ended with an event before it. */
static void serve(nd_net *net, const nd_link *link)
{
    for (net_source *s = net->sources; s; s = s->next) {
        if (s->link == link) {
            nd_net_serve_source(net, s);
            return;
        }
    }
    for (int rank = 0; rank < net->size; rank++) {
        if (net->peers[rank].link == link) {
            nd_net_serve_peer(net, &net->peers[rank]);
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
    if (net->retries > 0) {
        nd_net_retry(net);
    }
    return net_failure(net);
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

bool nd_net_gone(const nd_net *net, int rank)
{
    const net_peer *peer = &net->peers[rank];
    return peer->gone || (peer->link && nd_link_is_dead(peer->link));
}

void nd_net_cancel(nd_net *net, nd_p2p_request *request)
{
    net->stopped = net->stopped || request->native;
    request->native = NULL;
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

nd_status nd_net_open(int rank, int size, const nd_address *own, nd_tls_context *client,
                      nd_tls_context *server, nd_net_card *card, nd_net **out)
{
    nd_net *net;
    nd_tls_context_set(client, &use_of_ranks);
    nd_tls_context_set(server, &use_of_ranks);
    nd_status status = ND_ALLOC(1, &net);
    if (status != ND_OK) {
        nd_tls_context_destroy(client);
        nd_tls_context_destroy(server);
        return status;
    }
    net->rank = rank;
    net->size = size;
    net->listener = net->epoll = -1;
    net->client = client;
    net->server = server;
    status = ND_ALLOC(size, &net->peers);
    status = status == ND_OK ? listen_at(net, own, card) : status;
    if (status == ND_OK &&
        getrandom(net->token, sizeof net->token, 0) != (ssize_t)sizeof net->token) {
        status = nd_fail_system(errno, "random bytes");
    }
    if (status != ND_OK) {
        nd_net_close(net, false);
        return status;
    }
    memcpy(card->token, net->token, sizeof card->token);
    *out = net;
    return ND_OK;
}

void nd_net_meet(nd_net *net, const nd_net_card *cards)
{
    for (int rank = 0; rank < net->size; rank++) {
        net->peers[rank].card = cards[rank];
    }
}

int nd_net_fd(const nd_net *net)
{
    return net->epoll;
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

// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/net/link.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

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

/* Whether the connection has come about. */
static nd_status end_connect(nd_link *link)
{
    int error = 0;
    struct sockaddr_storage peer;
    socklen_t bytes = sizeof error, peer_bytes = sizeof peer;
    getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error != 0) {
        return lost(error);
    }
    link->connecting = getpeername(link->fd, (struct sockaddr *)&peer, &peer_bytes) != 0;
    return ND_OK;
}

nd_status nd_link_flush(nd_link *link, bool *idle)
{
    *idle = false;
    if (link->connecting) {
        ND_TRY(end_connect(link));
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

bool nd_link_is_dead(const nd_link *link)
{
    struct tcp_info info = {0};
    socklen_t bytes = sizeof info;
    return !link->connecting && getsockopt(link->fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 &&
           info.tcpi_retransmits >= LOST_RESENDS;
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

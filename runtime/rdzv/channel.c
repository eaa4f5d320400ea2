// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/channel.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"

struct nd_channel {
    int fd;
    uint8_t key[ND_KEY_BYTES];
    nd_tls_context *context;
    nd_tls *tls;
    nd_wire_parser parser;
    char peer[ND_ADDRESS_TEXT_MAX];
};

static const int64_t attempt_ns = 10000000000; /* for one address and its handshake */
static const int64_t notice_ns = 10000000000;

/* ND_ERR_HANG when nothing happens until the deadline. */
static nd_status wait_for(int fd, short events, int64_t deadline)
{
    for (;;) {
        int64_t left = deadline - nd_clock_ns();
        struct pollfd p = {.fd = fd, .events = events};
        int n = poll(
            &p, 1, left <= 0 ? 0 : (int)(left / 1000000 < 3600000 ? left / 1000000 + 1 : 3600000));
        if (n > 0) {
            return ND_OK;
        }
        if (n < 0 && errno != EINTR) {
            return nd_fail(ND_ERR_IO, "waiting for the store failed: %s", strerror(errno));
        }
        if (n == 0 && nd_clock_ns() >= deadline) {
            return nd_fail(ND_ERR_HANG, "no answer from the store");
        }
    }
}

static nd_status push_output(nd_channel *channel, int64_t deadline)
{
    const void *cipher;
    size_t count;
    while ((count = nd_tls_pending(channel->tls, &cipher)) > 0) {
        ssize_t n = send(channel->fd, cipher, count, MSG_NOSIGNAL);
        if (n >= 0) {
            nd_tls_sent(channel->tls, (size_t)n);
        } else if (errno == EAGAIN) {
            ND_TRY(wait_for(channel->fd, POLLOUT, deadline));
        } else if (errno != EINTR) {
            return nd_fail(ND_ERR_IO, "the connection to the store is lost: %s", strerror(errno));
        }
    }
    return ND_OK;
}

/* Reads once what is there; *count 0: nothing now. */
static nd_status pull_input(nd_channel *channel, bool *any)
{
    char cipher[17 << 10];
    ssize_t n = recv(channel->fd, cipher, sizeof cipher, 0);
    *any = n > 0;
    if (n == 0) {
        return nd_fail(ND_ERR_IO, "the store closed the connection");
    }
    if (n < 0) {
        return errno == EAGAIN || errno == EINTR
                   ? ND_OK
                   : nd_fail(ND_ERR_IO, "the connection to the store is lost: %s", strerror(errno));
    }
    return nd_tls_input(channel->tls, cipher, (size_t)n);
}

static nd_status connect_socket(const nd_address *address, int64_t deadline, int *out)
{
    int fd = socket(address->storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return nd_fail(ND_ERR_IO, "no socket: %s", strerror(errno));
    }
    int error = 0;
    socklen_t bytes = sizeof error;
    nd_status status = ND_OK;
    if (connect(fd, (const struct sockaddr *)&address->storage, address->bytes) != 0) {
        error = errno;
        if (error == EINPROGRESS) {
            status = wait_for(fd, POLLOUT, deadline);
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
        }
    }
    if (status == ND_OK && error != 0) {
        status = nd_fail(ND_ERR_IO, "%s", strerror(error));
    }
    if (status != ND_OK) {
        close(fd);
        return status;
    }
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    *out = fd;
    return ND_OK;
}

static nd_status try_address(nd_channel *channel, const nd_address *address, int64_t deadline)
{
    int64_t soon = nd_clock_ns() + attempt_ns;
    deadline = deadline < soon ? deadline : soon;
    /* The session first: a store whose places are taken drops a connection that says nothing. */
    ND_TRY(nd_tls_create(channel->context, &channel->tls));
    nd_status status = connect_socket(address, deadline, &channel->fd);
    status = status == ND_OK ? push_output(channel, deadline) : status;
    while (status == ND_OK && !nd_tls_established(channel->tls)) {
        bool any;
        status = wait_for(channel->fd, POLLIN, deadline);
        status = status == ND_OK ? pull_input(channel, &any) : status;
        status = status == ND_OK ? push_output(channel, deadline) : status;
    }
    if (status != ND_OK) {
        nd_tls_destroy(channel->tls);
        channel->tls = NULL;
        if (channel->fd >= 0) {
            close(channel->fd);
        }
        channel->fd = -1;
        return status;
    }
    nd_address_text(address, channel->peer);
    return ND_OK;
}

static nd_status try_name(nd_channel *channel, const char *host, int port, int64_t deadline)
{
    nd_address addresses[ND_ADDRESS_MAX];
    int count;
    ND_TRY(nd_address_resolve(host, port, addresses, &count));
    nd_status status = ND_OK;
    for (int i = 0; i < count; i++) {
        status = try_address(channel, &addresses[i], deadline);
        if (status == ND_OK || status == ND_ERR_CONFIG) {
            break;
        }
    }
    return status;
}

static nd_status connect_until(nd_channel *channel, const char *host, int port,
                               double timeout_seconds)
{
    char reason[ND_ERROR_MESSAGE_MAX];
    int64_t begin = nd_clock_ns(), deadline = begin + (int64_t)(timeout_seconds * 1e9);
    int64_t noticed = begin;
    useconds_t pause_us = 10000;
    for (;;) {
        nd_status status = try_name(channel, host, port, deadline);
        if (status == ND_OK) {
            return ND_OK;
        }
        snprintf(reason, sizeof reason, "%s", nd_error_last()->message);
        if (status == ND_ERR_CONFIG) {
            return nd_fail(ND_ERR_CONFIG,
                           "the store at %s port %d refuses this member: %s; all members of a job "
                           "need the key of its node 0",
                           host, port, reason);
        }
        int64_t now = nd_clock_ns();
        if (now + (int64_t)pause_us * 1000 >= deadline) {
            return nd_fail(ND_ERR_HANG,
                           "the store at %s port %d was not reached within %.3g s: %s; is node 0 "
                           "running, and is its port open to this host?",
                           host, port, timeout_seconds, reason);
        }
        if (now - noticed >= notice_ns) {
            noticed = now;
            nd_log_warning("waiting for the store at %s port %d for %.0f s: %s", host, port,
                           (double)(now - begin) * 1e-9, reason);
        }
        usleep(pause_us);
        pause_us = pause_us < 250000 ? pause_us * 2 : 500000;
    }
}

nd_status nd_channel_open(const char *host, int port, const uint8_t key[ND_KEY_BYTES],
                          double timeout_seconds, nd_channel **out)
{
    nd_channel *channel;
    ND_TRY(ND_ALLOC(1, &channel));
    channel->fd = -1;
    memcpy(channel->key, key, ND_KEY_BYTES);
    /* Frames come from a store that has the key; the limit guards against damage only. */
    nd_wire_parser_init(&channel->parser, ND_WIRE_LIMIT_MEMBER);
    nd_status status = nd_tls_context_create(false, key, &channel->context);
    if (status == ND_OK) {
        status = connect_until(channel, host, port, timeout_seconds);
    }
    if (status != ND_OK) {
        nd_channel_close(channel);
        return status;
    }
    *out = channel;
    return ND_OK;
}

void nd_channel_close(nd_channel *channel)
{
    if (channel) {
        nd_tls_destroy(channel->tls);
        nd_tls_context_destroy(channel->context);
        nd_wire_parser_fini(&channel->parser);
        if (channel->fd >= 0) {
            close(channel->fd);
        }
        explicit_bzero(channel->key, sizeof channel->key);
        free(channel);
    }
}

nd_status nd_channel_send(nd_channel *channel, const nd_wire_buffer *frames, int64_t deadline)
{
    ND_TRY(nd_tls_write(channel->tls, frames->data, frames->size));
    return push_output(channel, deadline);
}

/* Moves decrypted bytes into the parser; *any: there were some. */
static nd_status decrypt(nd_channel *channel, bool *any)
{
    char plain[16 << 10];
    size_t count;
    bool closed = false;
    *any = false;
    do {
        ND_TRY(nd_tls_read(channel->tls, plain, sizeof plain, &count, &closed));
        ND_TRY(nd_wire_feed(&channel->parser, plain, count));
        *any |= count > 0;
    } while (count > 0);
    return closed ? nd_fail(ND_ERR_IO, "the store closed the connection") : ND_OK;
}

nd_status nd_channel_receive(nd_channel *channel, int64_t deadline, nd_wire_frame *frame)
{
    for (;;) {
        bool any;
        ND_TRY(nd_wire_next(&channel->parser, frame));
        if (frame->type != ND_WIRE_NONE) {
            return ND_OK;
        }
        ND_TRY(decrypt(channel, &any));
        if (any) {
            continue;
        }
        if (deadline > nd_clock_ns()) {
            ND_TRY(wait_for(channel->fd, POLLIN, deadline));
        }
        ND_TRY(pull_input(channel, &any));
        if (!any && deadline <= nd_clock_ns()) {
            return ND_OK; /* type NONE */
        }
    }
}

nd_status nd_channel_network(const nd_channel *channel, nd_address *own, nd_tls_context **client,
                             nd_tls_context **server)
{
    *own = (nd_address){.bytes = sizeof own->storage};
    if (getsockname(channel->fd, (struct sockaddr *)&own->storage, &own->bytes) != 0) {
        return nd_fail_system(errno, "the own address on the way to the store");
    }
    nd_tls_context *made;
    ND_TRY(nd_tls_context_create(false, channel->key, &made));
    nd_status status = nd_tls_context_create(true, channel->key, server);
    if (status != ND_OK) {
        nd_tls_context_destroy(made);
        return status;
    }
    *client = made;
    return ND_OK;
}

int nd_channel_fd(const nd_channel *channel)
{
    return channel->fd;
}

const char *nd_channel_peer(const nd_channel *channel)
{
    return channel->peer;
}

nd_status nd_channel_error(const nd_wire_frame *frame)
{
    char message[ND_ERROR_MESSAGE_MAX];
    nd_wire_cursor cursor = nd_wire_body(frame);
    nd_wire_get_u32(&cursor);
    uint32_t status = nd_wire_get_u32(&cursor);
    nd_wire_get_text(&cursor, message, sizeof message);
    if (!nd_wire_finished(&cursor) || status == 0 || status > 255) {
        return nd_fail(ND_ERR_IO, "the store sent a damaged error message");
    }
    return nd_fail((nd_status)status, "%s", message);
}

nd_status nd_channel_hello(nd_channel *channel, const nd_hello *hello, int64_t deadline,
                           char *run_id, size_t capacity, int *world_size)
{
    nd_wire_buffer out = {0};
    nd_wire_begin(&out, ND_WIRE_HELLO);
    nd_wire_put_u32(&out, ND_WIRE_PROTOCOL);
    nd_wire_put_text(&out, hello->version);
    nd_wire_put_text(&out, hello->run_id);
    nd_wire_put_u32(&out, hello->epoch);
    nd_wire_put_u32(&out, hello->role);
    nd_wire_put_u32(&out, (uint32_t)hello->index);
    nd_wire_put_text(&out, hello->host);
    nd_status status = nd_wire_end(&out);
    if (status == ND_OK) {
        status = nd_channel_send(channel, &out, deadline);
    }
    nd_wire_buffer_fini(&out);
    nd_wire_frame frame;
    if (status == ND_OK) {
        status = nd_channel_receive(channel, deadline, &frame);
    }
    if (status != ND_OK) {
        return nd_fail_context(status, "saying hello to the store");
    }
    if (frame.type == ND_WIRE_ERROR) {
        return nd_channel_error(&frame);
    }
    nd_wire_cursor cursor = nd_wire_body(&frame);
    nd_wire_get_text(&cursor, run_id, capacity);
    *world_size = (int)nd_wire_get_u32(&cursor);
    if (frame.type != ND_WIRE_WELCOME || !nd_wire_finished(&cursor)) {
        return nd_fail(ND_ERR_IO, "the store did not answer hello as it should");
    }
    return ND_OK;
}

// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/host.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/rdzv/uv.h"

enum {
    TICK_MS = 100,
    BACKLOG = 511,
    CIPHER_BYTES = 17 << 10, /* one TLS record with its overhead */
};

/* A connection that is being dropped has this long to take its last bytes. */
static const int64_t linger_ns = 2000000000;

typedef struct connection {
    struct connection *next, *previous;
    nd_host *host;
    uv_tcp_t tcp;
    nd_tls *tls;
    nd_peer *peer; /* NULL once the engine knows that it is gone */
    int writes;    /* in flight */
    bool dropping;
    int64_t dropping_since;
} connection;

struct nd_host {
    uv_loop_t *loop;
    uv_tcp_t listener;
    uv_timer_t tick;
    nd_tls_context *tls;
    nd_server *server;
    nd_server_hooks hooks;
    connection *connections;
    bool waiting; /* a connection was not accepted for want of room */
    bool dropping, closing;
    bool told_full; /* that no file can be opened any more */
    int handles;    /* not yet closed: listener, tick, connections */
    int port;
    char address[ND_ADDRESS_TEXT_MAX];
    char received[64 << 10], plain[CIPHER_BYTES];
};

typedef struct outgoing {
    uv_write_t request;
    connection *connection;
    char bytes[];
} outgoing;

static void release_host(nd_host *host)
{
    if (--host->handles == 0) {
        nd_server_destroy(host->server);
        nd_tls_context_destroy(host->tls);
        free(host);
    }
}

static void on_connection_closed(uv_handle_t *handle)
{
    connection *c = handle->data;
    nd_host *host = c->host;
    nd_tls_destroy(c->tls);
    free(c);
    release_host(host);
}

static void on_handle_closed(uv_handle_t *handle)
{
    release_host(handle->data);
}

static void close_connection(connection *c)
{
    nd_host *host = c->host;
    if (uv_is_closing((uv_handle_t *)&c->tcp)) {
        return;
    }
    if (c->next) {
        c->next->previous = c->previous;
    }
    if (c->previous) {
        c->previous->next = c->next;
    } else {
        host->connections = c->next;
    }
    nd_peer *peer = c->peer;
    c->peer = NULL;
    uv_close((uv_handle_t *)&c->tcp, on_connection_closed);
    if (peer) {
        nd_server_gone(host->server, peer);
    }
}

/* Closes what the engine dropped, once its last bytes are out. */
static void reap(nd_host *host)
{
    if (!host->dropping) {
        return;
    }
    host->dropping = false;
    int64_t now = nd_clock_ns();
    for (connection *c = host->connections, *next; c; c = next) {
        next = c->next;
        if (c->dropping && (c->writes == 0 || now - c->dropping_since > linger_ns)) {
            close_connection(c);
        } else {
            host->dropping |= c->dropping;
        }
    }
}

static void on_written(uv_write_t *request, int status)
{
    outgoing *out = request->data;
    connection *c = out->connection;
    free(out);
    c->writes--;
    if (status == 0 && c->writes == 0 && c->peer && !c->dropping) {
        nd_server_drained(c->host->server, c->peer);
    }
    reap(c->host);
}

/* Hands ciphertext to the socket. */
static void flush(connection *c)
{
    char cipher[CIPHER_BYTES];
    size_t count;
    while ((count = nd_tls_output(c->tls, cipher, sizeof cipher)) > 0) {
        outgoing *out = uv_is_closing((uv_handle_t *)&c->tcp) ? NULL : malloc(sizeof *out + count);
        if (!out) {
            continue; /* the peer sees a damaged channel and leaves */
        }
        memcpy(out->bytes, cipher, count);
        out->connection = c;
        out->request.data = out;
        uv_buf_t buffer = uv_buf_init(out->bytes, (unsigned)count);
        if (uv_write(&out->request, (uv_stream_t *)&c->tcp, &buffer, 1, on_written) != 0) {
            free(out);
            continue;
        }
        c->writes++;
    }
}

static void send_to_peer(void *context, nd_peer *peer, const void *bytes, size_t count)
{
    connection *c = nd_peer_transport(peer);
    if (nd_tls_established(c->tls) && nd_tls_write(c->tls, bytes, count) == ND_OK) {
        flush(c);
    }
}

static void drop_connection(connection *c)
{
    c->dropping = c->host->dropping = true;
    c->dropping_since = nd_clock_ns();
}

static void drop_peer(void *context, nd_peer *peer)
{
    drop_connection(nd_peer_transport(peer));
}

static void on_buffer(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer)
{
    nd_host *host = ((connection *)handle->data)->host;
    *buffer = uv_buf_init(host->received, sizeof host->received);
}

/* Decrypts what arrived and gives it to the engine. */
static nd_status take_input(connection *c, const char *bytes, size_t count)
{
    nd_host *host = c->host;
    nd_status status = nd_tls_input(c->tls, bytes, count);
    flush(c); /* handshake, or an alert */
    while (status == ND_OK && !c->dropping) {
        size_t plain;
        bool closed;
        status = nd_tls_read(c->tls, host->plain, sizeof host->plain, &plain, &closed);
        if (status != ND_OK || plain == 0) {
            if (closed) {
                drop_connection(c);
            }
            break;
        }
        nd_server_receive(host->server, c->peer, host->plain, plain, nd_clock_ns());
    }
    return status;
}

static void accept_waiting(nd_host *host);

static void on_read(uv_stream_t *stream, ssize_t count, const uv_buf_t *buffer)
{
    connection *c = stream->data;
    nd_host *host = c->host;
    if (count < 0) {
        close_connection(c);
    } else if (count > 0 && !c->dropping) {
        if (take_input(c, buffer->base, (size_t)count) != ND_OK) {
            nd_server_note_refused(host->server, nd_peer_name(c->peer), nd_error_last()->message,
                                   nd_clock_ns());
            drop_connection(c);
        }
        reap(host);
    }
    if (host->waiting && !host->closing) {
        accept_waiting(host);
    }
}

static void name_of(uv_tcp_t *tcp, char *out, size_t capacity)
{
    nd_address address = {.bytes = sizeof address.storage};
    char text[ND_ADDRESS_TEXT_MAX];
    int bytes = (int)sizeof address.storage;
    uv_tcp_getpeername(tcp, (struct sockaddr *)&address.storage, &bytes);
    address.bytes = (socklen_t)bytes;
    nd_address_text(&address, text);
    snprintf(out, capacity, "%s port %d", text, nd_address_port(&address));
}

static nd_status open_connection(nd_host *host)
{
    connection *c;
    char name[ND_ADDRESS_TEXT_MAX + 16];
    ND_TRY(ND_ALLOC(1, &c));
    nd_status status = nd_tls_create(host->tls, &c->tls);
    if (status != ND_OK) {
        free(c);
        return status;
    }
    c->host = host;
    status = ND_UV(uv_tcp_init(host->loop, &c->tcp));
    if (status != ND_OK) {
        nd_tls_destroy(c->tls);
        free(c);
        return status;
    }
    c->tcp.data = c;
    host->handles++;
    if (uv_accept((uv_stream_t *)&host->listener, (uv_stream_t *)&c->tcp) != 0) {
        uv_close((uv_handle_t *)&c->tcp, on_connection_closed);
        return ND_OK;
    }
    uv_tcp_nodelay(&c->tcp, 1);
    name_of(&c->tcp, name, sizeof name);
    status = nd_server_connect(host->server, c, name, nd_clock_ns(), &c->peer);
    if (status != ND_OK) {
        uv_close((uv_handle_t *)&c->tcp, on_connection_closed);
        return status;
    }
    c->next = host->connections;
    if (c->next) {
        c->next->previous = c;
    }
    host->connections = c;
    status = ND_UV(uv_read_start((uv_stream_t *)&c->tcp, on_buffer, on_read));
    if (status != ND_OK) {
        close_connection(c);
    }
    return status;
}

static void accept_waiting(nd_host *host)
{
    host->waiting = !nd_server_has_room(host->server, nd_clock_ns());
    if (!host->waiting && open_connection(host) != ND_OK) {
        host->hooks.notice(host->hooks.context, nd_error_last()->message);
    }
}

/* libuv accepts and closes what comes while this process may open no further file, and tells nobody: so we look. */
static void look_for_room(nd_host *host)
{
    int listener;
    if (host->told_full || uv_fileno((uv_handle_t *)&host->listener, &listener) != 0) {
        return;
    }
    int fd = fcntl(listener, F_DUPFD_CLOEXEC, 0);
    if (fd >= 0) {
        close(fd);
    } else if (errno == EMFILE || errno == ENFILE) {
        host->told_full = true;
        host->hooks.notice(host->hooks.context,
                           "no further file can be opened (ulimit -n): the store refuses workers "
                           "and nodes that are not connected yet");
    }
}

static void on_connection(uv_stream_t *listener, int status)
{
    if (status == 0) {
        accept_waiting(listener->data);
    } else {
        look_for_room(listener->data);
    }
}

static void on_tick(uv_timer_t *timer)
{
    nd_host *host = timer->data;
    look_for_room(host);
    nd_server_tick(host->server, nd_clock_ns());
    reap(host);
    if (host->waiting) {
        accept_waiting(host);
        reap(host);
    }
}

static nd_status bind_listener(nd_host *host, const nd_address *address)
{
    nd_address_text(address, host->address);
    int rc = uv_tcp_bind(&host->listener, (const struct sockaddr *)&address->storage, 0);
    if (rc == 0) {
        rc = uv_listen((uv_stream_t *)&host->listener, BACKLOG, on_connection);
    }
    if (rc == UV_EADDRINUSE) {
        return nd_fail(ND_ERR_IO,
                       "port %d of %s is in use by another program: choose another port, or on one "
                       "host none at all",
                       nd_address_port(address), host->address);
    }
    if (rc == UV_EADDRNOTAVAIL) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s is not an address of this host: node 0 must run on the host that the "
                       "endpoint names",
                       host->address);
    }
    if (rc != 0) {
        return nd_fail(ND_ERR_IO, "the store cannot listen at %s port %d: %s", host->address,
                       nd_address_port(address), uv_strerror(rc));
    }
    nd_address bound = {.bytes = sizeof bound.storage};
    int bytes = (int)sizeof bound.storage;
    ND_TRY(ND_UV(uv_tcp_getsockname(&host->listener, (struct sockaddr *)&bound.storage, &bytes)));
    host->port = nd_address_port(&bound);
    return ND_OK;
}

static nd_status start_listening(nd_host *host, const nd_address *address)
{
    ND_TRY(ND_UV(uv_tcp_init(host->loop, &host->listener)));
    host->listener.data = host;
    host->handles++;
    ND_TRY(ND_UV(uv_timer_init(host->loop, &host->tick)));
    host->tick.data = host;
    host->handles++;
    ND_TRY(bind_listener(host, address));
    return ND_UV(uv_timer_start(&host->tick, on_tick, TICK_MS, TICK_MS));
}

nd_status nd_host_open(const nd_host_options *options, nd_host **out)
{
    nd_host *host;
    ND_TRY(ND_ALLOC(1, &host));
    host->loop = options->loop;
    host->hooks = options->hooks;
    nd_server_hooks hooks = options->hooks;
    hooks.send = send_to_peer;
    hooks.drop = drop_peer;
    nd_status status = nd_tls_context_create(true, options->key, &host->tls);
    if (status == ND_OK) {
        status = nd_server_create(&options->server, &hooks, &host->server);
    }
    if (status != ND_OK) {
        nd_tls_context_destroy(host->tls);
        free(host);
        return status;
    }
    status = start_listening(host, &options->address);
    if (status != ND_OK) {
        nd_host_close(host);
        return status;
    }
    *out = host;
    return ND_OK;
}

void nd_host_close(nd_host *host)
{
    if (!host) {
        return;
    }
    host->closing = true;
    host->handles++; /* until the end of this function */
    while (host->connections) {
        close_connection(host->connections);
    }
    if (host->listener.data) {
        uv_close((uv_handle_t *)&host->listener, on_handle_closed);
    }
    if (host->tick.data) {
        uv_close((uv_handle_t *)&host->tick, on_handle_closed);
    }
    release_host(host);
}

nd_server *nd_host_server(nd_host *host)
{
    return host->server;
}

int nd_host_port(const nd_host *host)
{
    return host->port;
}

const char *nd_host_address(const nd_host *host)
{
    return host->address;
}

// SPDX-License-Identifier: Apache-2.0
/* A connection to the store from its accept to its end. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/rdzv/host_internal.h"
#include "runtime/rdzv/uv.h"

/* A connection that is being dropped has this long to take its last bytes. */
static const int64_t linger_ns = 2000000000;

typedef struct outgoing {
    uv_write_t request;
    nd_connection *connection;
    char bytes[];
} outgoing;

void nd_host_release(nd_host *host)
{
    if (--host->handles == 0) {
        nd_server_destroy(host->server);
        nd_tls_context_destroy(host->tls);
        free(host);
    }
}

static void on_connection_closed(uv_handle_t *handle)
{
    nd_connection *c = handle->data;
    nd_host *host = c->host;
    nd_tls_destroy(c->tls);
    free(c);
    nd_host_release(host);
}

void nd_host_close_connection(nd_connection *c)
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
void nd_host_reap(nd_host *host)
{
    if (!host->dropping) {
        return;
    }
    host->dropping = false;
    int64_t now = nd_clock_ns();
    for (nd_connection *c = host->connections, *next; c; c = next) {
        next = c->next;
        if (c->dropping && (c->writes == 0 || now - c->dropping_since > linger_ns)) {
            nd_host_close_connection(c);
        } else {
            host->dropping |= c->dropping;
        }
    }
}

static void on_written(uv_write_t *request, int status)
{
    outgoing *out = request->data;
    nd_connection *c = out->connection;
    free(out);
    c->writes--;
    if (status == 0 && c->writes == 0 && c->peer && !c->dropping) {
        nd_server_drained(c->host->server, c->peer);
    }
    nd_host_reap(c->host);
}

/* Hands ciphertext to the socket. */
static void flush(nd_connection *c)
{
    char cipher[ND_HOST_CIPHER_BYTES];
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

void nd_host_send_to_peer(void *context, nd_peer *peer, const void *bytes, size_t count)
{
    nd_connection *c = nd_peer_transport(peer);
    if (nd_tls_established(c->tls) && nd_tls_write(c->tls, bytes, count) == ND_OK) {
        flush(c);
    }
}

static void drop_connection(nd_connection *c)
{
    c->dropping = c->host->dropping = true;
    c->dropping_since = nd_clock_ns();
}

void nd_host_drop_peer(void *context, nd_peer *peer)
{
    drop_connection(nd_peer_transport(peer));
}

static void on_buffer(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer)
{
    nd_host *host = ((nd_connection *)handle->data)->host;
    *buffer = uv_buf_init(host->received, sizeof host->received);
}

/* Decrypts what arrived and gives it to the engine. */
static nd_status take_input(nd_connection *c, const char *bytes, size_t count)
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

static void on_read(uv_stream_t *stream, ssize_t count, const uv_buf_t *buffer)
{
    nd_connection *c = stream->data;
    nd_host *host = c->host;
    if (count < 0) {
        nd_host_close_connection(c);
    } else if (count > 0 && !c->dropping) {
        if (take_input(c, buffer->base, (size_t)count) != ND_OK) {
            nd_server_note_refused(host->server, nd_peer_name(c->peer), nd_error_last()->message,
                                   nd_clock_ns());
            drop_connection(c);
        }
        nd_host_reap(host);
    }
    if (host->waiting && !host->closing) {
        nd_host_accept(host);
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
    nd_connection *c;
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
        nd_host_close_connection(c);
    }
    return status;
}

void nd_host_accept(nd_host *host)
{
    host->waiting = !nd_server_has_room(host->server, nd_clock_ns());
    if (!host->waiting && open_connection(host) != ND_OK) {
        host->hooks.notice(host->hooks.context, nd_error_last()->message);
    }
}

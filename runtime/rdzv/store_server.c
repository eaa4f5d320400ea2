// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/store_server.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/rdzv/uv.h"

enum { CIPHER_BYTES = 17 << 10 }; /* one TLS record with its overhead */

typedef struct connection {
    struct connection *next, *previous;
    nd_store_server *store;
    uv_tcp_t tcp;
    nd_tls *tls;
    nd_peer *peer; /* NULL once the engine knows that it is gone */
    int writes;    /* in flight */
    bool dropping;
    int64_t dropping_since;
} connection;

struct nd_store_server {
    uv_loop_t *loop;
    uv_tcp_t listener;
    uv_timer_t tick;
    nd_tls_context *tls;
    nd_server *server;
    nd_server_hooks hooks;
    connection *connections;
    bool waiting; /* a connection waits because all places for strangers are occupied */
    bool dropping, closing;
    bool told_full; /* the user knows that no further file can be opened */
    int handles;    /* not yet closed: listener, tick, connections */
    int port;
    char address[ND_ADDRESS_TEXT_MAX];
    char received[64 << 10], plain[CIPHER_BYTES];
};

/* A connection that is being dropped may receive its last bytes for this long. */
static const int64_t linger_ns = 2000000000;

typedef struct outgoing {
    uv_write_t request;
    connection *connection;
    char bytes[];
} outgoing;

static void release(nd_store_server *store)
{
    if (--store->handles == 0) {
        nd_server_destroy(store->server);
        nd_tls_context_destroy(store->tls);
        free(store);
    }
}

static void on_connection_closed(uv_handle_t *handle)
{
    connection *c = handle->data;
    nd_store_server *store = c->store;
    nd_tls_destroy(c->tls);
    free(c);
    release(store);
}

static void close_connection(connection *c)
{
    nd_store_server *store = c->store;
    if (uv_is_closing((uv_handle_t *)&c->tcp)) {
        return;
    }
    if (c->next) {
        c->next->previous = c->previous;
    }
    if (c->previous) {
        c->previous->next = c->next;
    } else {
        store->connections = c->next;
    }
    nd_peer *peer = c->peer;
    c->peer = NULL;
    uv_close((uv_handle_t *)&c->tcp, on_connection_closed);
    if (peer) {
        nd_server_gone(store->server, peer);
    }
}

/* Closes what the engine dropped, once its last bytes are out. */
static void reap(nd_store_server *store)
{
    if (!store->dropping) {
        return;
    }
    store->dropping = false;
    int64_t now = nd_clock_ns();
    for (connection *c = store->connections, *next; c; c = next) {
        next = c->next;
        if (c->dropping && (c->writes == 0 || now - c->dropping_since > linger_ns)) {
            close_connection(c);
        } else {
            store->dropping |= c->dropping;
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
        nd_server_drained(c->store->server, c->peer);
    }
    reap(c->store);
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
    c->dropping = c->store->dropping = true;
    c->dropping_since = nd_clock_ns();
}

static void drop_peer(void *context, nd_peer *peer)
{
    drop_connection(nd_peer_transport(peer));
}

static void on_buffer(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer)
{
    nd_store_server *store = ((connection *)handle->data)->store;
    *buffer = uv_buf_init(store->received, sizeof store->received);
}

/* Decrypts what arrived and gives it to the engine. */
static nd_status receive(connection *c, const char *bytes, size_t count)
{
    nd_store_server *store = c->store;
    nd_status status = nd_tls_input(c->tls, bytes, count);
    flush(c); /* handshake, or an alert */
    while (status == ND_OK && !c->dropping) {
        size_t plain;
        bool closed;
        status = nd_tls_read(c->tls, store->plain, sizeof store->plain, &plain, &closed);
        if (status != ND_OK || plain == 0) {
            if (closed) {
                drop_connection(c);
            }
            break;
        }
        nd_server_receive(store->server, c->peer, store->plain, plain, nd_clock_ns());
    }
    return status;
}

static void accept_waiting(nd_store_server *store);

static void on_read(uv_stream_t *stream, ssize_t count, const uv_buf_t *buffer)
{
    connection *c = stream->data;
    nd_store_server *store = c->store;
    if (count < 0) {
        close_connection(c);
    } else if (count > 0 && !c->dropping) {
        if (receive(c, buffer->base, (size_t)count) != ND_OK) {
            nd_server_note_refused(store->server, nd_peer_name(c->peer), nd_error_last()->message,
                                   nd_clock_ns());
            drop_connection(c);
        }
        reap(store);
    }
    if (store->waiting && !store->closing) {
        accept_waiting(store);
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

static nd_status open_connection(nd_store_server *store)
{
    connection *c;
    char name[ND_ADDRESS_TEXT_MAX + 16];
    ND_TRY(ND_ALLOC(1, &c));
    nd_status status = nd_tls_create(store->tls, &c->tls);
    if (status != ND_OK) {
        free(c);
        return status;
    }
    c->store = store;
    status = ND_UV(uv_tcp_init(store->loop, &c->tcp));
    if (status != ND_OK) {
        nd_tls_destroy(c->tls);
        free(c);
        return status;
    }
    c->tcp.data = c;
    store->handles++;
    if (uv_accept((uv_stream_t *)&store->listener, (uv_stream_t *)&c->tcp) != 0) {
        uv_close((uv_handle_t *)&c->tcp, on_connection_closed);
        return ND_OK;
    }
    uv_tcp_nodelay(&c->tcp, 1);
    name_of(&c->tcp, name, sizeof name);
    status = nd_server_connect(store->server, c, name, nd_clock_ns(), &c->peer);
    if (status != ND_OK) {
        uv_close((uv_handle_t *)&c->tcp, on_connection_closed);
        return status;
    }
    c->next = store->connections;
    if (c->next) {
        c->next->previous = c;
    }
    store->connections = c;
    status = ND_UV(uv_read_start((uv_stream_t *)&c->tcp, on_buffer, on_read));
    if (status != ND_OK) {
        close_connection(c);
    }
    return status;
}

static void accept_waiting(nd_store_server *store)
{
    store->waiting = !nd_server_has_room(store->server, nd_clock_ns());
    if (!store->waiting && open_connection(store) != ND_OK) {
        store->hooks.notice(store->hooks.context, nd_error_last()->message);
    }
}

enum {
    TICK_MS = 100,
    BACKLOG = 511,
};

static void on_handle_closed(uv_handle_t *handle)
{
    release(handle->data);
}

/* While this process may open no further file, libuv accepts and closes new connections without an
 * error: so it is checked here. */
static void look_for_room(nd_store_server *store)
{
    int listener;
    if (store->told_full || uv_fileno((uv_handle_t *)&store->listener, &listener) != 0) {
        return;
    }
    int fd = fcntl(listener, F_DUPFD_CLOEXEC, 0);
    if (fd >= 0) {
        close(fd);
    } else if (errno == EMFILE || errno == ENFILE) {
        store->told_full = true;
        store->hooks.notice(store->hooks.context,
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
    nd_store_server *store = timer->data;
    look_for_room(store);
    nd_server_tick(store->server, nd_clock_ns());
    reap(store);
    if (store->waiting) {
        accept_waiting(store);
        reap(store);
    }
}

static nd_status bind_listener(nd_store_server *store, const nd_address *address)
{
    nd_address_text(address, store->address);
    int rc = uv_tcp_bind(&store->listener, (const struct sockaddr *)&address->storage, 0);
    if (rc == 0) {
        rc = uv_listen((uv_stream_t *)&store->listener, BACKLOG, on_connection);
    }
    if (rc == UV_EADDRINUSE) {
        return nd_fail(ND_ERR_IO,
                       "port %d of %s is in use by another program; choose another port, or on one "
                       "host none at all",
                       nd_address_port(address), store->address);
    }
    if (rc == UV_EADDRNOTAVAIL) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s is not an address of this host; run node 0 on the host that the "
                       "endpoint names",
                       store->address);
    }
    if (rc != 0) {
        return nd_fail(ND_ERR_IO, "the store cannot listen at %s port %d: %s", store->address,
                       nd_address_port(address), uv_strerror(rc));
    }
    nd_address bound = {.bytes = sizeof bound.storage};
    int bytes = (int)sizeof bound.storage;
    ND_TRY(ND_UV(uv_tcp_getsockname(&store->listener, (struct sockaddr *)&bound.storage, &bytes)));
    store->port = nd_address_port(&bound);
    return ND_OK;
}

static nd_status start_listening(nd_store_server *store, const nd_address *address)
{
    ND_TRY(ND_UV(uv_tcp_init(store->loop, &store->listener)));
    store->listener.data = store;
    store->handles++;
    ND_TRY(ND_UV(uv_timer_init(store->loop, &store->tick)));
    store->tick.data = store;
    store->handles++;
    ND_TRY(bind_listener(store, address));
    return ND_UV(uv_timer_start(&store->tick, on_tick, TICK_MS, TICK_MS));
}

nd_status nd_store_server_open(const nd_store_server_options *options, nd_store_server **out)
{
    nd_store_server *store;
    ND_TRY(ND_ALLOC(1, &store));
    store->loop = options->loop;
    store->hooks = options->hooks;
    nd_server_hooks hooks = options->hooks;
    hooks.send = send_to_peer;
    hooks.drop = drop_peer;
    nd_status status = nd_tls_context_create(true, options->key, &store->tls);
    if (status == ND_OK) {
        status = nd_server_create(&options->server, &hooks, &store->server);
    }
    if (status != ND_OK) {
        nd_tls_context_destroy(store->tls);
        free(store);
        return status;
    }
    status = start_listening(store, &options->address);
    if (status != ND_OK) {
        nd_store_server_close(store);
        return status;
    }
    *out = store;
    return ND_OK;
}

void nd_store_server_close(nd_store_server *store)
{
    if (!store) {
        return;
    }
    store->closing = true;
    store->handles++; /* until the end of this function */
    while (store->connections) {
        close_connection(store->connections);
    }
    if (store->listener.data) {
        uv_close((uv_handle_t *)&store->listener, on_handle_closed);
    }
    if (store->tick.data) {
        uv_close((uv_handle_t *)&store->tick, on_handle_closed);
    }
    release(store);
}

nd_server *nd_store_server_engine(nd_store_server *store)
{
    return store->server;
}

int nd_store_server_port(const nd_store_server *store)
{
    return store->port;
}

const char *nd_store_server_address(const nd_store_server *store)
{
    return store->address;
}

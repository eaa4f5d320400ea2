// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/store_server.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/rdzv/uv.h"

enum { PLAIN_BYTES = 16 << 10 }; /* one TLS record */

typedef struct connection {
    struct connection *next, *previous;
    nd_store_server *store;
    uv_tcp_t tcp;
    nd_tls *tls;   /* NULL until its first bytes come: a silent connection takes little memory */
    nd_peer *peer; /* NULL once the engine knows that it is gone */
    int writes;    /* in flight */
    bool dropping; /* to be closed when its last bytes are out */
    int64_t dropping_since;
} connection;

struct nd_store_server {
    uv_loop_t *loop;
    uv_poll_t listener; /* of listen_fd; -1: none yet */
    int listen_fd;
    uv_timer_t tick, again; /* again: looks for connections that wait */
    nd_tls_context *tls;
    nd_server *server;
    nd_server_hooks hooks;
    connection *connections;
    bool waiting; /* connections wait because all places for strangers are taken */
    bool closing;
    bool told_full; /* the user knows that no further connection can be accepted */
    int handles;    /* not yet closed: listener, timers, connections */
    int port;
    char address[ND_ADDRESS_TEXT_MAX];
    char received[64 << 10], plain[PLAIN_BYTES];
};

/* A connection that is being dropped may receive its last bytes for this long. */
static const int64_t linger_ns = 2000000000;

typedef struct outgoing {
    uv_write_t request;
    connection *connection;
    char bytes[];
} outgoing;

static int port_of(const nd_address *address)
{
    /* The port lies at the same place in both families. */
    return ntohs(((const struct sockaddr_in *)&address->storage)->sin_port);
}

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
    *(c->previous ? &c->previous->next : &store->connections) = c->next;
    nd_peer *peer = c->peer;
    c->peer = NULL;
    uv_close((uv_handle_t *)&c->tcp, on_connection_closed);
    if (peer) {
        nd_server_gone(store->server, peer);
    }
}

/* Closes what the engine dropped, once its last bytes are out. */
static void close_if_done(connection *c)
{
    if (c->dropping && c->writes == 0) {
        close_connection(c);
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
    close_if_done(c);
}

/* Hands ciphertext to the socket. True: there was some. */
static bool flush(connection *c)
{
    const void *cipher;
    size_t count = c->tls ? nd_tls_pending(c->tls, &cipher) : 0;
    if (count == 0) {
        return false;
    }
    outgoing *out = uv_is_closing((uv_handle_t *)&c->tcp) ? NULL : malloc(sizeof *out + count);
    if (out) { /* else the peer sees a damaged channel and leaves */
        memcpy(out->bytes, cipher, count);
        out->connection = c;
        out->request.data = out;
        uv_buf_t buffer = uv_buf_init(out->bytes, (unsigned)count);
        bool written = uv_write(&out->request, (uv_stream_t *)&c->tcp, &buffer, 1, on_written) == 0;
        c->writes += written;
        if (!written) {
            free(out);
        }
    }
    nd_tls_sent(c->tls, count);
    return true;
}

static void send_to_peer(void *transport, const void *bytes, size_t count)
{
    connection *c = transport;
    if (c->tls && nd_tls_established(c->tls) && nd_tls_write(c->tls, bytes, count) == ND_OK) {
        flush(c);
    }
}

static void drop_connection(void *transport)
{
    connection *c = transport;
    if (!c->dropping) {
        c->dropping = true;
        c->dropping_since = nd_clock_ns();
    }
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
    bool first = !c->tls;
    if (first) {
        ND_TRY(nd_tls_create(store->tls, &c->tls));
    }
    nd_status status = nd_tls_input(c->tls, bytes, count);
    bool answered = flush(c) && status == ND_OK; /* handshake, or an alert */
    if (first || answered) {
        nd_server_receive(store->server, c->peer, NULL, 0, nd_clock_ns());
    }
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

static void accept_some(nd_store_server *store);

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
        close_if_done(c);
    }
    if (store->waiting && !store->closing) {
        accept_some(store);
    }
}

/* Takes the socket, also where it fails. */
static nd_status open_connection(nd_store_server *store, int fd, const nd_address *from)
{
    connection *c = NULL;
    char address[ND_ADDRESS_TEXT_MAX], name[ND_ADDRESS_TEXT_MAX + 16];
    nd_status status = ND_ALLOC(1, &c);
    status = status == ND_OK ? ND_UV(uv_tcp_init(store->loop, &c->tcp)) : status;
    if (status != ND_OK) {
        close(fd);
        free(c);
        return status;
    }
    c->store = store;
    c->tcp.data = c;
    store->handles++;
    c->next = store->connections;
    if (c->next) {
        c->next->previous = c;
    }
    store->connections = c;
    status = ND_UV(uv_tcp_open(&c->tcp, fd));
    if (status != ND_OK) {
        close(fd);
        goto out;
    }
    uv_tcp_nodelay(&c->tcp, 1);
    nd_address_text(from, address);
    snprintf(name, sizeof name, "%s port %d", address, port_of(from));
    ND_TRY_OUT(nd_server_connect(store->server, c, name, nd_clock_ns(), &c->peer));
    ND_TRY_OUT(ND_UV(uv_read_start((uv_stream_t *)&c->tcp, on_buffer, on_read)));
out:
    if (status != ND_OK) {
        close_connection(c);
    }
    return status;
}

enum {
    TICK_MS = 100,
    AGAIN_MS = 20,
    BACKLOG = 4096, /* as far as the system allows it (net.core.somaxconn) */
    BATCH = 64      /* connections that are accepted before those that are there are served */
};

static bool has_unread(void *transport)
{
    connection *c = transport;
    uv_os_fd_t fd;
    char byte;
    return uv_fileno((uv_handle_t *)&c->tcp, &fd) == 0 &&
           recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

static void on_again(uv_timer_t *timer)
{
    accept_some(timer->data);
}

static void on_listener(uv_poll_t *poll, int status, int events)
{
    accept_some(poll->data);
}

/* With `wait` the listener is not looked at until a place may be free. */
static void watch_listener(nd_store_server *store, bool wait)
{
    if (wait) {
        uv_timer_start(&store->again, on_again, AGAIN_MS, 0);
    }
    if (wait != store->waiting) {
        store->waiting = wait;
        if (wait) {
            uv_poll_stop(&store->listener);
        } else {
            uv_poll_start(&store->listener, UV_READABLE, on_listener);
        }
    }
}

/* False: nothing more can be accepted for now; *wait: though connections are there. Room is made
 * only for a connection that waits: none is dropped for one that does not come. */
static bool accept_one(nd_store_server *store, bool *wait)
{
    struct pollfd p = {.fd = store->listen_fd, .events = POLLIN};
    nd_address from = {.bytes = sizeof from.storage};
    void *leaving;
    if (poll(&p, 1, 0) <= 0) {
        return false;
    }
    while (!nd_server_has_room(store->server, nd_clock_ns(), &leaving)) {
        if (!leaving) {
            *wait = true;
            return false;
        }
        close_connection(leaving);
    }
    int fd = accept4(store->listen_fd, (struct sockaddr *)&from.storage, &from.bytes,
                     SOCK_NONBLOCK | SOCK_CLOEXEC);
    const int code = errno;
    if (fd >= 0) {
        if (open_connection(store, fd, &from) != ND_OK) {
            store->hooks.notice(store->hooks.context, nd_error_last()->message);
        }
        return true;
    }
    *wait = code == EMFILE || code == ENFILE || code == ENOMEM || code == ENOBUFS;
    if (*wait && !store->told_full) {
        char line[256];
        store->told_full = true;
        snprintf(line, sizeof line,
                 "no further connection can be accepted: %s%s; the store refuses workers and nodes "
                 "that are not connected yet",
                 strerror(code), code == EMFILE ? " (ulimit -n)" : "");
        store->hooks.notice(store->hooks.context, line);
    }
    /* Others concern one connection that is gone. */
    return !*wait && code != EAGAIN && code != EWOULDBLOCK;
}

static void accept_some(nd_store_server *store)
{
    bool wait = false;
    for (int i = 0; i < BATCH && accept_one(store, &wait); i++) {
    }
    watch_listener(store, wait);
}

static void on_handle_closed(uv_handle_t *handle)
{
    release(handle->data);
}

static void on_tick(uv_timer_t *timer)
{
    nd_store_server *store = timer->data;
    nd_server_tick(store->server, nd_clock_ns());
    /* Some had their last bytes out when they were dropped, or do not leave. Thousands may be
     * dropped at a time, so only the tick looks at all of them. */
    int64_t now = nd_clock_ns();
    for (connection *c = store->connections, *next; c; c = next) {
        next = c->next;
        if (c->dropping && (c->writes == 0 || now - c->dropping_since > linger_ns)) {
            close_connection(c);
        }
    }
}

static nd_status fail_listen(const nd_store_server *store, const nd_address *address, int code)
{
    if (code == EADDRINUSE) {
        return nd_fail(ND_ERR_IO, "port %d of %s is in use by another program; choose another port",
                       port_of(address), store->address);
    }
    if (code == EADDRNOTAVAIL) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s is not an address of this host; run node 0 on the host that the "
                       "endpoint names",
                       store->address);
    }
    return nd_fail(ND_ERR_IO, "the store cannot listen at %s port %d: %s", store->address,
                   port_of(address), strerror(code));
}

static nd_status bind_listener(nd_store_server *store, const nd_address *address)
{
    const int on = 1;
    nd_address bound = {.bytes = sizeof bound.storage};
    nd_address_text(address, store->address);
    int fd = socket(address->storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    store->listen_fd = fd;
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(fd, (const struct sockaddr *)&address->storage, address->bytes) != 0 ||
        listen(fd, BACKLOG) != 0 ||
        getsockname(fd, (struct sockaddr *)&bound.storage, &bound.bytes) != 0) {
        return fail_listen(store, address, errno);
    }
    store->port = port_of(&bound);
    return ND_OK;
}

static nd_status start_timer(nd_store_server *store, uv_timer_t *timer)
{
    ND_TRY(ND_UV(uv_timer_init(store->loop, timer)));
    timer->data = store;
    store->handles++;
    return ND_OK;
}

static nd_status start_listening(nd_store_server *store, const nd_address *address)
{
    ND_TRY(start_timer(store, &store->tick));
    ND_TRY(start_timer(store, &store->again));
    ND_TRY(bind_listener(store, address));
    ND_TRY(ND_UV(uv_poll_init(store->loop, &store->listener, store->listen_fd)));
    store->listener.data = store;
    store->handles++;
    ND_TRY(ND_UV(uv_poll_start(&store->listener, UV_READABLE, on_listener)));
    return ND_UV(uv_timer_start(&store->tick, on_tick, TICK_MS, TICK_MS));
}

nd_status nd_store_server_open(const nd_store_server_options *options, nd_store_server **out)
{
    nd_store_server *store;
    nd_server_options server = options->server;
    struct rlimit limit; /* of this process's open files as it is now */
    const bool limited = getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur <= INT32_MAX;
    server.files = limited ? (int64_t)limit.rlim_cur : INT32_MAX;
    ND_TRY(ND_ALLOC(1, &store));
    store->listen_fd = -1;
    store->loop = options->loop;
    store->hooks = options->hooks;
    nd_server_hooks hooks = options->hooks;
    hooks.send = send_to_peer;
    hooks.drop = drop_connection;
    hooks.unread = has_unread;
    nd_status status = nd_tls_context_create(true, options->key, &store->tls);
    if (status == ND_OK) {
        status = nd_server_create(&server, &hooks, &store->server);
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
    uv_handle_t *handles[] = {(uv_handle_t *)&store->listener, (uv_handle_t *)&store->tick,
                              (uv_handle_t *)&store->again};
    for (size_t i = 0; i < sizeof handles / sizeof *handles; i++) {
        if (handles[i]->data) {
            uv_close(handles[i], on_handle_closed);
        }
    }
    if (store->listen_fd >= 0) {
        close(store->listen_fd);
        store->listen_fd = -1;
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

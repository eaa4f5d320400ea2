// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/host.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/rdzv/host_internal.h"
#include "runtime/rdzv/uv.h"

enum {
    TICK_MS = 100,
    BACKLOG = 511,
};

static void on_handle_closed(uv_handle_t *handle)
{
    nd_host_release(handle->data);
}

/* libuv accepts and closes what comes while this process may open no further file, and tells
 * nobody: so we look. */
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
        nd_host_accept(listener->data);
    } else {
        look_for_room(listener->data);
    }
}

static void on_tick(uv_timer_t *timer)
{
    nd_host *host = timer->data;
    look_for_room(host);
    nd_server_tick(host->server, nd_clock_ns());
    nd_host_reap(host);
    if (host->waiting) {
        nd_host_accept(host);
        nd_host_reap(host);
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
    hooks.send = nd_host_send_to_peer;
    hooks.drop = nd_host_drop_peer;
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
        nd_host_close_connection(host->connections);
    }
    if (host->listener.data) {
        uv_close((uv_handle_t *)&host->listener, on_handle_closed);
    }
    if (host->tick.data) {
        uv_close((uv_handle_t *)&host->tick, on_handle_closed);
    }
    nd_host_release(host);
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

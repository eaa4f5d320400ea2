// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SUPPORT_PORT_H
#define ND_TESTS_SUPPORT_PORT_H
/* Ports of loopback for programs that need one before another process listens there. */
#include <arpa/inet.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <unistd.h>

#include "runtime/base/status.h"

static inline int port_socket(struct sockaddr_in *address)
{
    socklen_t bytes = sizeof *address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    *address =
        (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    ND_ASSERT(fd >= 0 && bind(fd, (struct sockaddr *)address, bytes) == 0 &&
              getsockname(fd, (struct sockaddr *)address, &bytes) == 0);
    return fd;
}

/*
 * For a minute the system gives this port to nobody who does not name it, so that tests that run
 * beside this one do not meet there: the end of a connection that it closed first waits there
 * (TIME_WAIT), and a listener with SO_REUSEADDR, which all of ours set, may have the port.
 */
static inline int port_reserve(void)
{
    struct sockaddr_in address, other;
    int on = 1, listener = port_socket(&address), client = port_socket(&other);
    /* Set behind the bind, so that only a port that is free of all is chosen. */
    ND_ASSERT(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
              listen(listener, 1) == 0 &&
              connect(client, (struct sockaddr *)&address, sizeof address) == 0);
    int server = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    char byte;
    ND_ASSERT(server >= 0);
    close(server);
    ND_ASSERT(read(client, &byte, 1) == 0); /* its end has come: it is the server's that waits */
    close(client);
    close(listener);
    return ntohs(address.sin_port);
}

/* A connection to the port, or -1 and errno where nobody listens. */
static inline int port_connect(int port)
{
    const struct sockaddr_in to = {.sin_family = AF_INET,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                   .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (const struct sockaddr *)&to, sizeof to) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* A port where nobody listens, and nobody can until *fd is closed. */
static inline int port_silent(int *fd)
{
    struct sockaddr_in address;
    *fd = port_socket(&address);
    return ntohs(address.sin_port);
}

#endif

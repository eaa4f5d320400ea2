// SPDX-License-Identifier: Apache-2.0
#include "tests/launch/crowd.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/process.h"

/* -1: refused, as long as nobody listens. */
static int connect_silently(int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                             .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static void connect_all(struct pollfd *sockets, int count, int port)
{
    for (int i = 0; i < count; i++) {
        sockets[i].events = POLLIN;
        while ((sockets[i].fd = connect_silently(port)) < 0) {
            usleep(10000);
        }
    }
}

/* Those that the store dropped come back until nobody listens. */
static void stay(struct pollfd *returning, int count, int port)
{
    for (;;) {
        poll(returning, (nfds_t)count, -1);
        for (int i = 0; i < count; i++) {
            if (returning[i].revents) {
                close(returning[i].fd);
                returning[i].fd = connect_silently(port);
            }
        }
    }
}

pid_t crowd_start(crowd size, int port)
{
    int ready[2];
    char byte = 0;
    int all = size.held + size.returning;
    if (nd_limits_raise_files() < all + 64) {
        return 0;
    }
    struct pollfd *sockets = calloc((size_t)all, sizeof *sockets);
    cr_assert(sockets && pipe(ready) == 0);
    pid_t pid = fork();
    cr_assert(pid >= 0, "%s", strerror(errno));
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        connect_all(sockets, all, port);
        byte = 1;
        if (write(ready[1], &byte, 1) == 1) {
            stay(sockets, size.returning, port);
        }
        _exit(1);
    }
    close(ready[1]);
    cr_assert_eq(read(ready[0], &byte, 1), 1, "the crowd ended");
    close(ready[0]);
    free(sockets);
    return pid;
}

void crowd_stop(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

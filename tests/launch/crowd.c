// SPDX-License-Identifier: Apache-2.0
#include "tests/launch/crowd.h"

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
#include "tests/support/port.h"

/* -1: refused, as long as nobody listens. */
static int connect_once(int port, bool speaks)
{
    int fd = port_connect(port);
    if (fd >= 0 && speaks) {
        send(fd, "\x16", 1, MSG_NOSIGNAL); /* the first byte of a handshake */
    }
    return fd;
}

static bool speaks(const crowd *size, int i)
{
    return size->speaks && i % 2 == 1;
}

static void connect_all(struct pollfd *sockets, const crowd *size, int port)
{
    for (int i = 0; i < size->held + size->returning; i++) {
        sockets[i].events = POLLIN;
        while ((sockets[i].fd = connect_once(port, speaks(size, i))) < 0) {
            usleep(10000);
        }
    }
}

/* Those that the store dropped come back until nobody listens. */
static void stay(struct pollfd *returning, const crowd *size, int port)
{
    for (;;) {
        poll(returning, (nfds_t)size->returning, -1);
        for (int i = 0; i < size->returning; i++) {
            if (returning[i].revents) {
                close(returning[i].fd);
                returning[i].fd = connect_once(port, speaks(size, i));
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
        connect_all(sockets, &size, port);
        byte = 1;
        if (write(ready[1], &byte, 1) == 1) {
            stay(sockets, &size, port);
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

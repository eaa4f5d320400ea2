// SPDX-License-Identifier: Apache-2.0
#include "tests/launch/proxy.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/port.h"

enum { PAIRS_MAX = 64 };

typedef struct pair {
    int fds[2]; /* of the client, of the store; -1: closed */
    long passed;
    int number;
    bool stalled, harmed;
} pair;

static void close_pair(pair *p, bool reset)
{
    const struct linger now = {.l_onoff = 1};
    for (int i = 0; i < 2; i++) {
        if (reset) {
            setsockopt(p->fds[i], SOL_SOCKET, SO_LINGER, &now, sizeof now);
        }
        close(p->fds[i]);
        p->fds[i] = -1;
    }
}

static bool write_all(int fd, const char *bytes, ssize_t count)
{
    while (count > 0) {
        ssize_t n = send(fd, bytes, (size_t)count, MSG_NOSIGNAL);
        if (n <= 0) {
            return false;
        }
        bytes += n;
        count -= n;
    }
    return true;
}

/* Bytes from side `from` to the other one. */
static void pass(pair *p, int from, const proxy_rule *rule)
{
    char bytes[4096];
    ssize_t n = recv(p->fds[from], bytes, sizeof bytes, 0);
    bool counts = (from == 0) == rule->to_store && p->number >= rule->from &&
                  p->number <= rule->last && !p->harmed;
    if (n <= 0) {
        close_pair(p, false);
        return;
    }
    long left = rule->after - p->passed; /* that pass unharmed */
    if (counts && left < n) {
        p->harmed = true;
        switch (rule->harm) {
        case PROXY_CORRUPTS:
            bytes[left] ^= 0x20;
            break;
        case PROXY_STALLS:
            p->stalled = true;
            n = left;
            break;
        case PROXY_DROPS:
        case PROXY_RESETS:
            write_all(p->fds[!from], bytes, left);
            close_pair(p, rule->harm == PROXY_RESETS);
            return;
        }
    }
    p->passed += counts ? n : 0;
    if (!write_all(p->fds[!from], bytes, n)) {
        close_pair(p, false);
    }
}

static void accept_pair(int listener, pair *pairs, int *number, int target)
{
    int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    int store = port_connect(target);
    for (int i = 0; client >= 0 && store >= 0 && i < PAIRS_MAX; i++) {
        if (pairs[i].fds[0] < 0) {
            pairs[i] = (pair){.fds = {client, store}, .number = (*number)++};
            return;
        }
    }
    close(client); /* nobody listens yet: the client comes again */
    close(store);
}

static void run(const proxy_rule *rule, int listener, int target)
{
    pair pairs[PAIRS_MAX];
    int number = 0;
    for (int i = 0; i < PAIRS_MAX; i++) {
        pairs[i] = (pair){.fds = {-1, -1}};
    }
    for (;;) {
        struct pollfd polled[1 + 2 * PAIRS_MAX] = {{.fd = listener, .events = POLLIN}};
        for (int i = 0; i < 2 * PAIRS_MAX; i++) {
            const pair *p = &pairs[i / 2];
            polled[1 + i] =
                (struct pollfd){.fd = p->stalled ? -1 : p->fds[i % 2], .events = POLLIN};
        }
        if (poll(polled, 1 + 2 * PAIRS_MAX, -1) < 0 && errno != EINTR) {
            return;
        }
        for (int i = 0; i < 2 * PAIRS_MAX; i++) {
            if (polled[1 + i].revents && pairs[i / 2].fds[0] >= 0) {
                pass(&pairs[i / 2], i % 2, rule);
            }
        }
        if (polled[0].revents) {
            accept_pair(listener, pairs, &number, target);
        }
    }
}

pid_t proxy_start(const proxy_rule *rule, int port, int target)
{
    const int on = 1;
    const struct sockaddr_in at = {.sin_family = AF_INET,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                   .sin_port = htons((uint16_t)port)};
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert(listener >= 0 &&
                  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                  bind(listener, (const struct sockaddr *)&at, sizeof at) == 0 &&
                  listen(listener, PAIRS_MAX) == 0,
              "%s", strerror(errno));
    pid_t pid = fork();
    cr_assert_geq(pid, 0, "%s", strerror(errno));
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        run(rule, listener, target);
        _exit(1);
    }
    close(listener);
    return pid;
}

void proxy_stop(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

// SPDX-License-Identifier: Apache-2.0
/*
 * Connections without the key must not delay a join: a job of two nodes starts while a hostile
 * client holds many connections to its store. ND_CROWD=all: as many as the project promises. The
 * small crowd meets a node 0 that may open few files, so that it fills all places of strangers.
 */
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "runtime/base/clock.h"
#include "runtime/base/process.h"
#include "tests/launch/tiny_job.h"
#include "tests/support/patience.h"
#include "tests/support/port.h"
#include "tests/support/skip.h"

enum { TRIES = 3 };

/* A hostile client on loopback: a process with connections to the store without the key. They say
 * nothing, or send one byte and then nothing. It ends with its parent. */
typedef struct crowd {
    int held;      /* connections that are opened once and held */
    int returning; /* connections that come back as soon as they are dropped */
    bool speaks;   /* every other connection sends one byte */
} crowd;

/* Number i of the crowd. -1: refused, as long as nobody listens. */
static int connect_once(const crowd *size, int i, int port)
{
    int fd = port_connect(port);
    if (fd >= 0 && size->speaks && i % 2 == 1) {
        send(fd, "\x16", 1, MSG_NOSIGNAL); /* the first byte of a handshake */
    }
    return fd;
}

static void connect_all(struct pollfd *sockets, const crowd *size, int port)
{
    for (int i = 0; i < size->held + size->returning; i++) {
        sockets[i].events = POLLIN;
        while ((sockets[i].fd = connect_once(size, i, port)) < 0) {
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
                returning[i].fd = connect_once(size, i, port);
            }
        }
    }
}

/* Waits until all are connected, the returning ones first, so that the store drops these first. It
 * must listen at the port or do so soon. 0: the process may not open as many files. */
static pid_t crowd_start(crowd size, int port)
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

static void crowd_stop(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

static tempdir dir;
static tiny_nodes job;

static void setup(void)
{
    tiny_write_inputs(&dir);
    tiny_nodes_meet(&job, &dir); /* for the key */
    launched_use_test_worker("self", "0");
}

TEMPDIR_SUITE(crowd, setup);

/* A node whose launcher may open so many files. */
static void start_node(launched *l, int node, const char *endpoint, int files)
{
    const char *name = printed("node%d", node);
    tiny_arguments a = {0};
    tiny_add(&a, WORDS("/bin/sh", "-c",
                       printed("ulimit -n %d; exec %s \"$@\"", files, launched_program("ndlaunch")),
                       "sh", "--num-processes", "4", "--dp-shard-size", "-1", "--nnodes", "2",
                       "--node-rank", printed("%d", node), "--rdzv-endpoint", endpoint,
                       "--rdzv-key-file", job.key_file, "--rdzv-timeout-seconds", "100"));
    tiny_add(&a, tiny_flags(&dir, name));
    launched_start(l, &dir, name, a.list);
}

static bool is_all(void)
{
    const char *which = getenv("ND_CROWD");
    return which && strcmp(which, "all") == 0;
}

/* Seconds from the start of node 1, for which node 0 and the crowd wait, to the end of a job whose
 * workers only join. NAN: the crowd may not be as large here. */
static double join_seconds(crowd size, int files)
{
    launched nodes[2];
    int port = port_reserve();
    const char *endpoint = printed("127.0.0.1:%d", port);
    start_node(&nodes[0], 0, endpoint, files);
    pid_t hostile = crowd_start(size, port);
    double begin = nd_clock_seconds();
    start_node(&nodes[1], 1, endpoint, files);
    for (int i = 1; i >= 0; i--) {
        launched_expect(&nodes[i], 0);
    }
    double seconds = nd_clock_seconds() - begin;
    if (hostile) {
        crowd_stop(hostile);
    }
    return hostile ? seconds : NAN;
}

/* The best of a few tries, as other programs compute beside this one. */
static void delays_by_less_than(double most, crowd size, int files)
{
    double more = INFINITY;
    for (int i = 0; i < TRIES && !(more < most); i++) {
        double alone = join_seconds((crowd){.held = 1}, files), crowded = join_seconds(size, files);
        if (isnan(crowded)) {
            tempdir_remove(&dir);
            skip_test("the limit of open files (ulimit -Hn) is too low for the crowd");
        }
        fprintf(stderr, "joined in %.2f s alone and in %.2f s beside %d connections\n", alone,
                crowded, size.held + size.returning);
        more = crowded - alone;
    }
    cr_assert_lt(more, most, "the job joined %.2f s later", more);
}

Test(crowd, of_silent_connections_delays_a_join_by_less_than_a_second)
{
    if (is_all()) {
        delays_by_less_than(1.0, (crowd){2000, 500, false}, 4096);
    } else {
        delays_by_less_than(patience(1.0), (crowd){300, 100, false}, 256);
    }
}

/* Each has its place for 250 ms, and there are more of them than places: a node 0 with 256 files
 * and 8 workers has 80 at most. */
Test(crowd, of_connections_with_one_byte_delays_a_join_little)
{
    if (is_all()) {
        delays_by_less_than(3.0, (crowd){2000, 500, true}, 4096);
    } else {
        delays_by_less_than(patience(1.0), (crowd){200, 80, true}, 256);
    }
}

// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/outlet.h"

enum { PIPE_BYTES = 8192 };

static int reader, writer;

static void make_pipe(void)
{
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    reader = ends[0];
    writer = ends[1];
    cr_assert_eq(fcntl(writer, F_SETPIPE_SZ, PIPE_BYTES), PIPE_BYTES);
}

TestSuite(outlet, .init = make_pipe, .timeout = 60);

/* As another process does that has the same pipe: it holds an open file of its own. */
static void fill(int fd)
{
    static const char page[4096];
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int own = open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY);
    cr_assert_geq(own, 0);
    for (size_t part = sizeof page; part > 0;) {
        part = write(own, page, part) > 0 ? part : part / 2;
    }
    close(own);
}

static void drain(void)
{
    char bytes[PIPE_BYTES];
    cr_assert_gt(read(reader, bytes, sizeof bytes), 0);
}

/* Room that poll sees is taken at once, while `takes` says so. */
static bool takes;
static int taken;

int poll(struct pollfd *fds, nfds_t count, int timeout_ms)
{
    const struct timespec time = {timeout_ms / 1000, timeout_ms % 1000 * 1000000L};
    if (takes && count == 1) {
        drain();
        fill(writer);
        taken++;
        return 1;
    }
    return (int)syscall(SYS_ppoll, fds, count, timeout_ms < 0 ? NULL : &time, NULL, 0);
}

Test(outlet, room_that_another_process_takes_is_none)
{
    nd_outlet out = {.fd = writer};
    fill(writer);
    takes = true;
    cr_expect_not(nd_outlet_write(&out, "a line\n", 7));
    takes = false;
    cr_expect_gt(taken, 0);
    cr_expect_eq(atomic_load(&out.lost), 1);
}

static void on_alarm(int number)
{
    (void)number;
}

/* A signal that ends a wait is no room. */
Test(outlet, a_signal_makes_no_room)
{
    nd_outlet out = {.fd = writer};
    const struct sigaction action = {.sa_handler = on_alarm};
    cr_assert_eq(sigaction(SIGALRM, &action, NULL), 0);
    fill(writer);
    alarm(1);
    cr_expect_not(nd_outlet_write(&out, "a line\n", 7));
    cr_expect_eq(atomic_load(&out.lost), 1);
}

/* Only the first bytes wait. */
Test(outlet, the_rest_of_a_long_text_is_counted_by_lines)
{
    static char text[3 * PIPE_BYTES];
    char got[2 * PIPE_BYTES];
    nd_outlet out = {.fd = writer};
    memset(text, 'x', sizeof text);
    for (size_t i = 1023; i < sizeof text; i += 1024) { /* 24 lines, 8 in the pipe */
        text[i] = '\n';
    }
    cr_expect_not(nd_outlet_write(&out, text, sizeof text));
    cr_expect_eq(atomic_load(&out.lost), 16);
    const double begin = nd_clock_seconds();
    cr_expect_not(nd_outlet_write(&out, "one\ntwo\nand a half", 18));
    cr_expect_lt(nd_clock_seconds() - begin, ND_OUTLET_PATIENCE_MS / 1000.0, "it waits again");
    cr_expect_eq(atomic_load(&out.lost), 19);
    drain();
    cr_expect(nd_outlet_write(&out, "heard\n", 6));
    ssize_t n = read(reader, got, sizeof got - 1);
    cr_assert_gt(n, 0);
    got[n] = '\0';
    cr_expect_str_eq(got,
                     "\nwarning: 19 lines are missing here, which nobody read for 5 s\nheard\n");
    cr_expect(nd_outlet_write(&out, "heard\n", 6));
    cr_expect_eq(read(reader, got, sizeof got), 6, "it is said once");
}

/* A terminal that is stopped, and a socket. */
Test(outlet, terminals_and_sockets)
{
    int ends[2], terminal = posix_openpt(O_RDWR | O_NOCTTY);
    static char page[4096];
    memset(page, 'x', sizeof page);
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    cr_assert(terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0);
    const int fds[] = {ends[1], open(ptsname(terminal), O_RDWR | O_NOCTTY)};
    for (size_t i = 0; i < 2; i++) {
        nd_outlet out = {.fd = fds[i]};
        cr_assert_geq(fds[i], 0);
        int pages = 0;
        while (pages < 1000 && nd_outlet_write(&out, page, sizeof page)) {
            pages++;
        }
        cr_expect_lt(pages, 1000, "%zu: nobody reads, and all was written", i);
        cr_expect_geq(atomic_load(&out.lost), 1);
        cr_expect_eq(fcntl(fds[i], F_GETFL) & O_NONBLOCK, 0, "%zu: others share this flag", i);
    }
}

Test(outlet, what_cannot_be_written_stops_nobody)
{
    close(reader);
    signal(SIGPIPE, SIG_IGN);
    nd_outlet out = {.fd = writer}, closed = {.fd = -1};
    nd_outlet full = {.fd = open("/dev/full", O_WRONLY)};
    cr_assert_geq(full.fd, 0);
    cr_expect(nd_outlet_write(&out, "a line\n", 7));
    cr_expect(nd_outlet_write(&closed, "a line\n", 7));
    cr_expect(nd_outlet_write(&full, "a line\n", 7));
}

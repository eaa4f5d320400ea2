// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/outlet.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/clock.h"

enum { PIPE_PART = 4096 }; /* a pipe takes so many bytes at once, or none of them */

/*
 * Like write, but fails with EAGAIN where that would wait. Other processes share the flags of a
 * standard stream, so it is opened anew instead of making it non-blocking. Room that poll has seen
 * may be another process's by the time of a write: poll alone is for where a stream cannot be
 * opened, as a terminal of another user.
 */
static ssize_t write_now(int fd, const char *bytes, size_t count)
{
    struct stat st;
    char path[32];
    if (fstat(fd, &st) != 0) {
        return -1;
    }
    if (S_ISSOCK(st.st_mode)) {
        return send(fd, bytes, count, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    if (!S_ISFIFO(st.st_mode) && !isatty(fd)) {
        return write(fd, bytes, count);
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int own = open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (own < 0) {
        struct pollfd p = {.fd = fd, .events = POLLOUT};
        if (poll(&p, 1, 0) == 0) {
            errno = EAGAIN;
            return -1;
        }
        return write(fd, bytes, count);
    }
    const ssize_t written = write(own, bytes, count);
    const int error = errno;
    close(own);
    errno = error;
    return written;
}

/* False: it is too late. A signal, or room that is gone again, ends the wait early. */
static bool wait_room(int fd, int64_t end_ns)
{
    enum { PAUSE_MS = 1 }; /* so that room which is none is not asked for all the time */
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    const int64_t left_ms = (end_ns - nd_clock_ns()) / 1000000;
    if (left_ms <= 0) {
        return false;
    }
    (void)poll(NULL, 0, PAUSE_MS);
    (void)poll(&p, 1, (int)left_ms);
    return true;
}

/* Returns how many bytes are written, or lie where nothing can be done about them. */
static size_t write_patiently(nd_outlet *o, const char *bytes, size_t count)
{
    const int64_t patience_ns = atomic_load(&o->unread) ? 0 : ND_OUTLET_PATIENCE_MS * 1000000LL;
    const int64_t end_ns = nd_clock_ns() + patience_ns;
    size_t done = 0;
    while (done < count) {
        const size_t part = count - done < PIPE_PART ? count - done : PIPE_PART;
        const ssize_t n = write_now(o->fd, bytes + done, part);
        if (n > 0) {
            done += (size_t)n;
        } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
            done = count;
        } else if (!wait_room(o->fd, end_ns)) {
            break;
        }
    }
    atomic_store(&o->unread, done < count);
    return done;
}

/* False: there is still no room. */
static bool tell_lost(nd_outlet *o)
{
    char text[160];
    const long lines = atomic_exchange(&o->lost, 0);
    if (lines == 0) { /* another thread says it */
        return true;
    }
    int n = snprintf(text, sizeof text,
                     "%swarning: %ld lines are missing here, which nobody read for %d s\n",
                     atomic_load(&o->torn) ? "\n" : "", lines, ND_OUTLET_PATIENCE_MS / 1000);
    if (write_patiently(o, text, (size_t)n) < (size_t)n) {
        atomic_fetch_add(&o->lost, lines);
        return false;
    }
    atomic_store(&o->torn, false);
    return true;
}

bool nd_outlet_write(nd_outlet *outlet, const char *bytes, size_t count)
{
    size_t done = 0;
    if (atomic_load(&outlet->lost) == 0 || tell_lost(outlet)) {
        done = write_patiently(outlet, bytes, count);
    }
    if (done < count) {
        long lines = bytes[count - 1] != '\n'; /* a line whose end alone is lost counts, too */
        for (size_t i = done; i < count; i++) {
            lines += bytes[i] == '\n';
        }
        if (done > 0) {
            atomic_store(&outlet->torn, true);
        }
        atomic_fetch_add(&outlet->lost, lines);
    }
    return done == count;
}

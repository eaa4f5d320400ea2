// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/watch.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct nd_watch {
    pthread_t thread;
    int fd, stop; /* the socket; an eventfd */
    void (*gone)(void *context);
    void *context;
};

static void *run(void *argument)
{
    nd_watch *watch = argument;
    struct pollfd polled[2] = {{.fd = watch->fd, .events = POLLRDHUP},
                               {.fd = watch->stop, .events = POLLIN}};
    while (poll(polled, 2, -1) < 0 && errno == EINTR) {
    }
    if (!polled[1].revents && polled[0].revents) {
        watch->gone(watch->context);
    }
    return NULL;
}

nd_status nd_watch_start(int fd, void (*gone)(void *context), void *context, nd_watch **out)
{
    nd_watch *watch;
    ND_TRY(ND_ALLOC(1, &watch));
    *watch =
        (nd_watch){.fd = fd, .stop = eventfd(0, EFD_CLOEXEC), .gone = gone, .context = context};
    int code = watch->stop < 0 ? errno : pthread_create(&watch->thread, NULL, run, watch);
    if (code != 0) {
        if (watch->stop >= 0) {
            close(watch->stop);
        }
        free(watch);
        return nd_fail(ND_ERR_INTERNAL, "the thread that watches rank 0 cannot be started: %s",
                       strerror(code));
    }
    *out = watch;
    return ND_OK;
}

void nd_watch_stop(nd_watch *watch)
{
    if (watch) {
        eventfd_write(watch->stop, 1);
        pthread_join(watch->thread, NULL);
        close(watch->stop);
        free(watch);
    }
}

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_WATCH_H
#define ND_RDZV_WATCH_H
/*
 * A thread that waits for the other end of a socket to go away: how a rank without a launcher
 * learns that the store's host, rank 0, has died, whatever the rank is doing. It only looks at the
 * socket's state and reads nothing from it.
 */
#include "runtime/base/status.h"

typedef struct nd_watch nd_watch;

/* `gone` is called once, in the thread. The descriptor is borrowed until nd_watch_stop. */
nd_status nd_watch_start(int fd, void (*gone)(void *context), void *context, nd_watch **out);
void nd_watch_stop(nd_watch *watch); /* waits for the thread; NULL is legal */

#endif

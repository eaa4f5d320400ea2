// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_LAUNCH_CROWD_H
#define ND_TESTS_LAUNCH_CROWD_H
/*
 * A hostile client on loopback: a process with connections to the store without the key. They say
 * nothing, or send one byte and then nothing. It ends with its parent.
 */
#include <stdbool.h>
#include <sys/types.h>

typedef struct crowd {
    int held;      /* connections that are opened once and held */
    int returning; /* connections that come back as soon as they are dropped */
    bool speaks;   /* every other connection sends one byte */
} crowd;

/* Waits until all are connected, the returning ones first, so that the store drops these first. It
 * must listen at the port or do so soon. 0: the process may not open as many files. */
pid_t crowd_start(crowd size, int port);
void crowd_stop(pid_t pid);

#endif

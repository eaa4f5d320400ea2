// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_LAUNCH_PROXY_H
#define ND_TESTS_LAUNCH_PROXY_H
/*
 * A hostile network on loopback: a process between a client and the store that passes bytes on
 * until so many have gone one way, and then does harm. It ends with its parent.
 */
#include <stdbool.h>
#include <sys/types.h>

typedef enum proxy_harm { PROXY_DROPS, PROXY_RESETS, PROXY_CORRUPTS, PROXY_STALLS } proxy_harm;

typedef struct proxy_rule {
    proxy_harm harm;
    bool to_store;  /* the direction whose bytes are counted */
    long after;     /* bytes of one connection */
    int from, last; /* the connections that are harmed, by the order in which they come, from 0 */
} proxy_rule;

/* Listens at `port` and passes on to `target`, both of loopback. */
pid_t proxy_start(const proxy_rule *rule, int port, int target);
void proxy_stop(pid_t pid);

#endif

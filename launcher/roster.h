// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_ROSTER_H
#define ND_LAUNCHER_ROSTER_H
/*
 * What node 0 knows about each node of the job: whether it is connected, which place it has in this
 * start, how its workers ended, and which failure came first. Data without frames and timers.
 *
 * A start has a place for each node with workers; place p has the ranks from p x local workers on.
 * A node without a place is a spare.
 */
#include "runtime/rdzv/server.h"

typedef struct nd_node {
    nd_peer *peer; /* NULL: not connected */
    bool joined;
    bool waits; /* it joined and waits for a later start: a spare, or its workers of this one were
                   lost */
    int place;  /* in this start, -1: it has no workers */
    bool lost, ended; /* in this start */
    int64_t heard_ns;
    int code;
    bool own;          /* nd_nodes_end */
    int64_t failed_ns; /* when its first failure arrived at node 0, 0: none */
    char host[ND_WIRE_TEXT_MAX];
    char *screen; /* owned */
} nd_node;

typedef struct nd_roster {
    nd_node *nodes; /* [count]; 0 is node 0 itself */
    int count, places;
    int most_places; /* of the first start */
    int *holder;     /* [most_places] node that has it, -1: none */
    int *former;     /* [most_places] the same in the last start */
} nd_roster;

nd_status nd_roster_init(int places, int spares, const char *own_host, nd_roster *out);
void nd_roster_fini(nd_roster *roster);
/* Forgets how the last start ended. */
void nd_roster_begin(nd_roster *roster);

int nd_roster_joined(const nd_roster *roster); /* how many nodes are connected */
/* The next start has so many places, at most those of the first one. Nodes of places that are gone
 * become spares, until nd_roster_assign. */
void nd_roster_set_places(nd_roster *roster, int places);
/*
 * Gives each place of the next start a node: the one that has it, if that is still connected, else
 * the first spare by node rank. False, without changes: too few nodes are connected.
 */
bool nd_roster_assign(nd_roster *roster);
/* The nodes that have workers (or else the connected ones without), as "0, 2-3". */
void nd_roster_text(const nd_roster *roster, bool working, char *out, size_t capacity);
/* No node has workers of this start any more. */
bool nd_roster_all_over(const nd_roster *roster);
/* The node with the failure that explains the others, or else one that was stopped at a step
 * boundary (75); -1: neither. */
int nd_roster_first_failure(const nd_roster *roster);
/* "node 1 of 2 nodes is missing after 10 s", without a time when that is 0; with spare nodes also
 * how many of them are needed */
void nd_roster_missing(const nd_roster *roster, double seconds, char *out, size_t capacity);

/* Records when its first failure arrived, and that one's code. */
void nd_node_fail(nd_node *node, int code);
/* Records that the node itself was lost, and the screen that says why; does nothing when its
 * workers have ended. */
void nd_node_lose(nd_node *node, int index, const char *why);
/* Its workers have ended. The screen is copied; bytes may be 0. */
void nd_node_end(nd_node *node, int code, bool own, const char *screen, size_t bytes);

#endif

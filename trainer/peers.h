// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TRAINER_PEERS_H
#define ND_TRAINER_PEERS_H
/*
 * What the ranks of a job tell each other about where they run: their hosts, for run.json, and the GPU each took, so
 * that no two of them train on one.
 */
#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/store.h"

enum { ND_GPU_ID_MAX = 64 };

typedef struct nd_peer_card {
    char host[128];
    char gpu[ND_GPU_ID_MAX]; /* names the hardware, as its PCI address does; "" without a GPU */
} nd_peer_card;

typedef struct nd_peers {
    nd_peer_card *cards; /* [world_size], owned */
    const char **
        hosts; /* [host_count] each name once, in the order of ranks; owned, the names belong to the cards */
    int host_count;
} nd_peers;

/* All ranks call it. ND_ERR_CONFIG naming two ranks of one host that have the same GPU. */
nd_status nd_peers_meet(nd_store *store, const nd_identity *identity, const char *gpu,
                        nd_peers *out);
void nd_peers_fini(nd_peers *peers);

/* The check and the list by themselves. */
nd_status nd_peers_check_gpus(const nd_peer_card *cards, int count);
nd_status nd_peers_list_hosts(nd_peers *peers, int count);

#endif

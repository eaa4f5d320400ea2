// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WORKER_PEERS_H
#define ND_WORKER_PEERS_H
/*
 * What the ranks of a job tell each other about where they run: hosts, for run.json; masks of CPUs,
 * so that a mask is divided among those who share it; devices, so that all have the same kind and
 * no two the same GPU.
 */
#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/store.h"

enum { ND_GPU_ID_MAX = 64 };

typedef struct nd_peer_card {
    char host[128];
    uint64_t cpus; /* digest of the mask of CPUs that the process was given */
} nd_peer_card;

typedef struct nd_peer_device {
    char kind[16];           /* "cpu", "cuda" */
    char gpu[ND_GPU_ID_MAX]; /* names the hardware, as its PCI address does; "" without a GPU */
} nd_peer_device;

typedef struct nd_peers {
    nd_peer_card *cards; /* [world_size], owned */
    const char *
        *hosts; /* [host_count] each once, in the order of ranks; owned, but not the names */
    int host_count;
    int sharers,
        share; /* ranks of this host with the same CPUs as this one, and its number among them */
} nd_peers;

/* All ranks call it. */
nd_status nd_peers_meet(nd_store *store, const nd_identity *identity, nd_peers *out);
/* All ranks call it with the device each opened. ND_ERR_CONFIG naming two ranks whose devices do
 * not go together. */
nd_status nd_peers_compare_devices(nd_store *store, const nd_identity *identity,
                                   const nd_peers *peers, const char *kind, const char *gpu);
void nd_peers_fini(nd_peers *peers);

/* The same on cards that are there. */
nd_status nd_peers_take(nd_peers *peers, int count, int rank); /* cards are set: the rest follows */
nd_status nd_peers_check_devices(const nd_peer_card *cards, const nd_peer_device *devices,
                                 int count);

#endif

// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/affinity.h"
#include "trainer/worker/worker.h"

typedef struct placed {
    const char *host, *gpu;
    int rank;
} placed;

/* Orders by host and GPU, then by rank: equal ones become adjacent. */
static int by_gpu(const void *a, const void *b)
{
    const placed *x = a, *y = b;
    int order = strcmp(x->host, y->host);
    order = order ? order : strcmp(x->gpu, y->gpu);
    return order ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

static nd_status check_gpus(const placed *sorted, int count)
{
    for (int i = 1; i < count; i++) {
        const placed *a = &sorted[i - 1], *b = &sorted[i];
        if (a->gpu[0] && strcmp(a->host, b->host) == 0 && strcmp(a->gpu, b->gpu) == 0) {
            return nd_fail(ND_ERR_CONFIG,
                           "ranks %d and %d of host %s would both train on GPU %s; start fewer "
                           "tasks on a node, or let each see all GPUs (srun --gpus-per-node)",
                           a->rank, b->rank, a->host, a->gpu);
        }
    }
    return ND_OK;
}

nd_status nd_peers_check_devices(const nd_peer_card *cards, const nd_peer_device *devices,
                                 int count)
{
    placed *sorted = NULL;
    for (int i = 1; i < count; i++) {
        if (strcmp(devices[i].kind, devices[0].kind) != 0) {
            return nd_fail(ND_ERR_CONFIG,
                           "rank 0 (host %s) trains on %s, but rank %d (host %s) on %s; name one "
                           "with --device, or start the job on nodes that are alike",
                           cards[0].host, devices[0].kind, i, cards[i].host, devices[i].kind);
        }
    }
    ND_TRY(ND_ALLOC(count, &sorted));
    for (int i = 0; i < count; i++) {
        sorted[i] = (placed){cards[i].host, devices[i].gpu, i};
    }
    qsort(sorted, (size_t)count, sizeof *sorted, by_gpu);
    nd_status status = check_gpus(sorted, count);
    free(sorted);
    return status;
}

nd_status nd_peers_index(nd_peers *peers, int count, int rank)
{
    const nd_peer_card *own = &peers->cards[rank];
    peers->sharers = peers->share = 0;
    ND_TRY(ND_ALLOC(count, &peers->hosts));
    for (int i = 0; i < count; i++) {
        const nd_peer_card *card = &peers->cards[i];
        bool known = false; /* ranks of a host are adjacent or cyclic: looking back finds it soon */
        for (int k = peers->host_count - 1; k >= 0 && !known; k--) {
            known = strcmp(peers->hosts[k], card->host) == 0;
        }
        if (!known) {
            peers->hosts[peers->host_count++] = card->host;
        }
        if (card->cpus == own->cpus && strcmp(card->host, own->host) == 0) {
            peers->share += i < rank;
            peers->sharers++;
        }
    }
    return ND_OK;
}

nd_status nd_peers_meet(nd_store *store, const nd_identity *identity, nd_peers *out)
{
    nd_peers peers = {0};
    nd_peer_card own = {0};
    snprintf(own.host, sizeof own.host, "%s", identity->host);
    ND_TRY(nd_affinity_digest(&own.cpus));
    ND_TRY(ND_ALLOC(identity->world_size, &peers.cards));
    nd_status status = nd_store_exchange(store, "hosts", &own, peers.cards, sizeof own);
    for (int i = 0; i < identity->world_size && status == ND_OK;
         i++) { /* another process sent them */
        peers.cards[i].host[sizeof own.host - 1] = '\0';
    }
    status =
        status == ND_OK ? nd_peers_index(&peers, identity->world_size, identity->rank) : status;
    if (status != ND_OK) {
        nd_peers_fini(&peers);
        return status;
    }
    *out = peers;
    return ND_OK;
}

nd_status nd_peers_compare_devices(nd_store *store, const nd_identity *identity,
                                   const nd_peers *peers, const char *kind, const char *gpu)
{
    nd_peer_device own = {0}, *all = NULL;
    snprintf(own.kind, sizeof own.kind, "%s", kind);
    snprintf(own.gpu, sizeof own.gpu, "%s", gpu);
    ND_TRY(ND_ALLOC(identity->world_size, &all));
    nd_status status = nd_store_exchange(store, "devices", &own, all, sizeof own);
    for (int i = 0; i < identity->world_size && status == ND_OK; i++) {
        all[i].kind[sizeof own.kind - 1] = all[i].gpu[sizeof own.gpu - 1] = '\0';
    }
    status =
        status == ND_OK ? nd_peers_check_devices(peers->cards, all, identity->world_size) : status;
    free(all);
    return status;
}

void nd_peers_fini(nd_peers *peers)
{
    free(peers->hosts);
    free(peers->cards);
    *peers = (nd_peers){0};
}

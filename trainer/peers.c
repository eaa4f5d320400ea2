// SPDX-License-Identifier: Apache-2.0
#include "trainer/peers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* By host and GPU, then by rank: equal ones become neighbours. Ranks are the cards' addresses. */
static int by_gpu(const void *a, const void *b)
{
    const nd_peer_card *x = *(const nd_peer_card *const *)a, *y = *(const nd_peer_card *const *)b;
    int order = strcmp(x->host, y->host);
    order = order ? order : strcmp(x->gpu, y->gpu);
    return order ? order : (x > y) - (x < y);
}

nd_status nd_peers_check_gpus(const nd_peer_card *cards, int count)
{
    nd_status status = ND_OK;
    const nd_peer_card **sorted = NULL;
    ND_TRY(ND_ALLOC(count, &sorted));
    for (int i = 0; i < count; i++) {
        sorted[i] = &cards[i];
    }
    qsort(sorted, (size_t)count, sizeof *sorted, by_gpu);
    for (int i = 1; i < count && status == ND_OK; i++) {
        const nd_peer_card *a = sorted[i - 1], *b = sorted[i];
        if (a->gpu[0] && strcmp(a->host, b->host) == 0 && strcmp(a->gpu, b->gpu) == 0) {
            status = nd_fail(ND_ERR_CONFIG,
                             "ranks %d and %d of host %s would both train on GPU %s; start fewer "
                             "tasks on a node, or ask for one GPU each (srun --gpus-per-task=1)",
                             (int)(a - cards), (int)(b - cards), a->host, a->gpu);
        }
    }
    free(sorted);
    return status;
}

nd_status nd_peers_list_hosts(nd_peers *peers, int count)
{
    ND_TRY(ND_ALLOC(count, &peers->hosts));
    for (int i = 0; i < count; i++) {
        /* Ranks of a host are neighbours, or come round and round: a look back finds it soon. */
        bool known = false;
        for (int k = peers->host_count - 1; k >= 0 && !known; k--) {
            known = strcmp(peers->hosts[k], peers->cards[i].host) == 0;
        }
        if (!known) {
            peers->hosts[peers->host_count++] = peers->cards[i].host;
        }
    }
    return ND_OK;
}

nd_status nd_peers_meet(nd_store *store, const nd_identity *identity, const char *gpu,
                        nd_peers *out)
{
    nd_peers peers = {0};
    nd_peer_card own = {0};
    snprintf(own.host, sizeof own.host, "%s", identity->host);
    snprintf(own.gpu, sizeof own.gpu, "%s", gpu);
    ND_TRY(ND_ALLOC(identity->world_size, &peers.cards));
    nd_status status = nd_store_exchange(store, "hosts", &own, peers.cards, sizeof own);
    for (int i = 0; i < identity->world_size && status == ND_OK; i++) { /* of another process */
        peers.cards[i].host[sizeof own.host - 1] = '\0';
        peers.cards[i].gpu[sizeof own.gpu - 1] = '\0';
    }
    status = status == ND_OK ? nd_peers_check_gpus(peers.cards, identity->world_size) : status;
    status = status == ND_OK ? nd_peers_list_hosts(&peers, identity->world_size) : status;
    if (status != ND_OK) {
        nd_peers_fini(&peers);
        return status;
    }
    *out = peers;
    return ND_OK;
}

void nd_peers_fini(nd_peers *peers)
{
    free(peers->hosts);
    free(peers->cards);
    *peers = (nd_peers){0};
}

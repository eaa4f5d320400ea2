// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/pmix_meet.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "runtime/rdzv/address.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/pmix.h"
#include "runtime/rdzv/reach.h"

typedef struct place {
    uint8_t key[ND_KEY_BYTES];
    char address[ND_ADDRESS_TEXT_MAX];
    int32_t port;
} place;

static nd_status host_store(nd_identity *id, const nd_reach_card *cards, place *where,
                            nd_hosting **hosting)
{
    if (!id->master_addr[0]) {
        ND_TRY(nd_reach_choose(cards, id->world_size, where->address));
        snprintf(id->master_addr, sizeof id->master_addr, "%s", where->address);
    }
    ND_TRY(nd_key_random(where->key));
    ND_TRY(nd_hosting_start(id, where->key, hosting));
    snprintf(where->address, sizeof where->address, "%s", nd_hosting_address(*hosting));
    where->port = nd_hosting_port(*hosting);
    nd_log_debug("rank 0 hosts the store at %s port %d", where->address, where->port);
    return ND_OK;
}

nd_status nd_pmix_meet(nd_identity *identity, double timeout_seconds, uint8_t key[ND_KEY_BYTES],
                       nd_hosting **hosting)
{
    nd_reach_card own, *cards = NULL;
    place where = {0};
    memset(&own, 0, sizeof own);
    nd_reach_describe(NULL, identity->host, &own);
    ND_TRY(ND_ALLOC(identity->world_size, &cards));
    nd_status status = nd_pmix_exchange(identity->pmix, "networks of the ranks", &own, cards,
                                        sizeof own, timeout_seconds);
    if (status == ND_OK && identity->rank == 0) {
        status = host_store(identity, cards, &where, hosting);
    }
    free(cards);
    if (status == ND_OK) {
        status = nd_pmix_share(identity->pmix, "place of the store", &where, sizeof where,
                               timeout_seconds);
    }
    if (status == ND_OK) {
        memcpy(key, where.key, ND_KEY_BYTES);
        where.address[sizeof where.address - 1] = '\0';
        snprintf(identity->master_addr, sizeof identity->master_addr, "%s", where.address);
        identity->master_port = where.port;
    }
    explicit_bzero(&where, sizeof where);
    return status;
}

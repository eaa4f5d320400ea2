// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_REACH_H
#define ND_RDZV_REACH_H
/* At which of its addresses the other ranks reach rank 0, where nobody has named one. */
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/rdzv/address.h"

/* What each rank tells the others of the place where it runs. */
typedef struct nd_reach_card {
    uint64_t network; /* equal on ranks that reach each other over loopback */
    char host[128];
} nd_reach_card;

/*
 * The running system and its network: two nodes that are one host share both, two containers of it
 * do not. boot_id_file has the system's number of this boot; NULL: Linux's own. Where it cannot be
 * read the host's name stands for it.
 */
void nd_reach_describe(const char *boot_id_file, const char *host, nd_reach_card *card);

/*
 * Rank 0's choice: loopback where all ranks share its network, else the address from which it would
 * send to a rank elsewhere, else that of its first interface. ND_ERR_CONFIG when there is none.
 */
nd_status nd_reach_choose(const nd_reach_card *cards, int world_size,
                          char out[ND_ADDRESS_TEXT_MAX]);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_PMIX_MEET_H
#define ND_RDZV_PMIX_MEET_H
/*
 * How workers that PMIx started find their store: rank 0 makes the job key, hosts the store at an
 * address that the others can reach, and hands out key and place over PMIx, so that neither is in a
 * file, an argument or the environment.
 */
#include "runtime/rdzv/hosting.h"

/*
 * All ranks call it. identity->master_addr and master_port are set; one that is given already
 * (launch.rdzv_endpoint) is where rank 0 listens. *hosting is NULL but on rank 0, where it is the
 * caller's.
 */
nd_status nd_pmix_meet(nd_identity *identity, double timeout_seconds, uint8_t key[ND_KEY_BYTES],
                       nd_hosting **hosting);

#endif

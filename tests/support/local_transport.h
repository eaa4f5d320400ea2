// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEST_LOCAL_TRANSPORT_H
#define ND_TEST_LOCAL_TRANSPORT_H
/* A transport whose ranks are threads of this process: a hub made once, then one transport for each
 * thread. */
#include "runtime/comm/comm.h"

typedef struct nd_local_hub nd_local_hub;
nd_status nd_local_hub_create(int size, nd_local_hub **out);
void nd_local_hub_destroy(nd_local_hub *hub);
nd_status nd_transport_open_local(nd_local_hub *hub, int rank, double timeout_seconds,
                                  nd_progress_slot *progress, nd_transport **out);

#endif

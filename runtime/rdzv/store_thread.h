// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_STORE_THREAD_H
#define ND_RDZV_STORE_THREAD_H
/*
 * The store inside a worker: rank 0 of a start without ndlaunch runs store_server.h in a thread of
 * its own. The thread uses only its loop; the caller's thread only starts and stops it.
 */
#include <stdint.h>

#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/store.h"
#include "runtime/rdzv/store_server.h"
#include "runtime/rdzv/tls.h"

typedef struct nd_store_thread nd_store_thread;

/* Listens at the identity's master address and port; port 0: the system chooses. The watch, which
 * is copied, hears of every rank but rank 0, which is this process; of losses that come together it
 * hears of the first. */
nd_status nd_store_thread_start(const nd_identity *identity, const uint8_t key[ND_KEY_BYTES],
                                nd_store_watch watch, nd_store_thread **out);
/* For its port and address. */
const nd_store_server *nd_store_thread_server(const nd_store_thread *thread);
/* Waits until the other ranks have left the store, at most timeout_seconds, then ends the thread.
 * NULL is legal. */
void nd_store_thread_stop(nd_store_thread *thread, double timeout_seconds);

#endif

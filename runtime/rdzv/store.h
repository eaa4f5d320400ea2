// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_STORE_H
#define ND_RDZV_STORE_H
/*
 * A worker's connection to the job's store: small values exchanged before communicators exist.
 *
 * Blocking calls with deadlines, from any thread: a call waits for another one that is open as long
 * as for its answer, then it is ND_ERR_HANG. The channel is TLS 1.3 with the job's 32-byte key as
 * external PSK. A world of one has no store: its callers have NULL, and one path, since set,
 * exchange, barrier and check take that. While an exchange or a barrier waits, the process that
 * runs the store prints every 10 seconds which ranks are missing.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/rdzv/channel.h"
#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/tls.h"

typedef struct nd_store nd_store;

/*
 * Where rank 0 runs the store, `lost` is called in a thread of its own, at once, when a rank ends
 * without a goodbye, whatever the other ranks are doing. Rank 0 watches every other rank, the
 * others watch rank 0. On rank 0 it may be called several times. Never under ndlaunch, which
 * watches its workers itself.
 */
typedef struct nd_store_watch {
    void (*lost)(void *context, const char *message);
    void *context;
} nd_store_watch;

/* Connects, authenticates and says hello (version, run id, rank). ND_ERR_IO / ND_ERR_HANG /
 * ND_ERR_CONFIG (wrong key, other version) with a sentence. timeout_seconds also bounds each later
 * call. The watch begins here; it is copied, and NULL is legal. */
nd_status nd_store_open(const nd_identity *identity, double timeout_seconds,
                        const nd_store_watch *watch, nd_store **out);
/* Sets the time limit of each later call. */
void nd_store_set_timeout(nd_store *store, double timeout_seconds);
/* Says goodbye, and on rank 0 waits for the other ranks. After a failure of this rank it waits for
 * nobody, and where rank 0 hosts the store, whose ranks then hear that this one was lost, it says
 * no goodbye. NULL is legal. */
void nd_store_close(nd_store *store, bool failed);

/* Sets the key unless it exists. */
nd_status nd_store_set(nd_store *store, const char *key, const void *value, size_t bytes);
/* Waits until the key exists. *bytes in: capacity, out: size. A larger value is ND_ERR_INTERNAL. */
nd_status nd_store_get(nd_store *store, const char *key, void *value, size_t *bytes);
/*
 * Checks that this process still belongs to the current start of the job: the store answers, which
 * it does on no connection of an earlier start. Any thread may ask. Waits at most so long, for the
 * store and for a call of another thread together: ND_ERR_IO or ND_ERR_HANG then.
 */
nd_status nd_store_check(nd_store *store, double seconds);
/* All ranks of the job; `name` names the barrier in messages. */
nd_status nd_store_barrier(nd_store *store, const char *name);
/* Allgather over all ranks: send (bytes), recv (world_size x bytes). One message each way per
 * rank. */
nd_status nd_store_exchange(nd_store *store, const char *name, const void *send, void *recv,
                            size_t bytes);

/* For connections between ranks: the address from which this process reaches the store, and
 * contexts with the job's key. Not in a world of one. */
nd_status nd_store_network(const nd_store *store, nd_address *own, nd_tls_context **client,
                           nd_tls_context **server);

#endif

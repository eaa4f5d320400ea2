// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_STORE_H
#define ND_RDZV_STORE_H
/*
 * A worker's connection to the job's store: small values exchanged before communicators exist.
 *
 * Blocking calls with deadlines, from any thread: a call waits for another one that is open as long
 * as for its answer, then it is ND_ERR_HANG. The channel is TLS 1.3 with the job's 32-byte key as
 * external PSK. A world of one has no store: its callers have NULL, and one path, since set,
 * exchange, barrier and check take that. While a call waits, the process that runs the store prints
 * every 10 seconds which ranks are missing.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/rdzv/address.h"
#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/tls.h"

typedef struct nd_store nd_store;

/* Connects, authenticates and says hello (version, run id, rank). ND_ERR_IO / ND_ERR_HANG /
 * ND_ERR_CONFIG (wrong key, other version) with a sentence. timeout_seconds also bounds each later
 * call. */
nd_status nd_store_open(const nd_identity *identity, double timeout_seconds, nd_store **out);
/* Sets the time limit of each later call. */
void nd_store_set_timeout(nd_store *store, double timeout_seconds);
void nd_store_close(nd_store *store); /* sends a goodbye; NULL is legal */
/* The same after a failure of this rank: sends no goodbye and waits for no other rank. */
void nd_store_abandon(nd_store *store);

/*
 * Called in a thread of its own when another rank ended without a goodbye. `first`: no rank has
 * reported a failure before, so that this loss is the reason for what follows; or that rank was the
 * first, and ended before it had printed its message, which `message` then has. False: not now; on
 * rank 0 the store asks again, every 20 ms.
 */
typedef bool nd_store_lost(void *context, const char *message, bool first);

/*
 * Where rank 0 runs the store: notices at once when a rank ends without a goodbye, whatever the
 * other ranks are doing. Rank 0 watches every other rank, the others watch rank 0. On rank 0 `lost`
 * may be called several times. Does nothing under ndlaunch, which watches its workers itself.
 */
nd_status nd_store_watch(nd_store *store, nd_store_lost *lost, void *context);

/* Sets the key unless it exists. *is_new: it did not; NULL where that does not matter. */
nd_status nd_store_set(nd_store *store, const char *key, const void *value, size_t bytes,
                       bool *is_new);
/* Waits until the key exists; with a time limit of 0 it only asks, and ND_ERR_DATA says that nobody
 * has set it. *bytes in: capacity, out: size. A larger value is ND_ERR_INTERNAL. */
nd_status nd_store_get(nd_store *store, const char *key, void *value, size_t *bytes);
/*
 * Whether this process still belongs to the current start of the job: the store answers, which it
 * does on no connection of an earlier start. Any thread may ask. Waits at most so long, for the
 * store and for a call of another thread together: ND_ERR_IO or ND_ERR_HANG then.
 */
nd_status nd_store_check(nd_store *store, double seconds);
/*
 * Whether the store has sent this process the job's first failure (failure_record.h). `text` then
 * gets its message. The store sends it to every rank at once. So this also answers, after the
 * connection to the store broke, whether a rank had begun to report before. Does not ask the store.
 */
bool nd_store_first_failure(nd_store *store, char *text, size_t capacity);
/* All ranks of the job; `name` names the barrier in messages. */
nd_status nd_store_barrier(nd_store *store, const char *name);
/* Allgather over all ranks: send (bytes), recv (world_size x bytes). One message each way per
 * rank. */
nd_status nd_store_exchange(nd_store *store, const char *name, const void *send, void *recv,
                            size_t bytes);

/*
 * For connections between ranks: the address from which this process reaches the store, whose port
 * does not count, and a context with the job's key. Not in a world of one.
 */
nd_status nd_store_own_address(const nd_store *store, nd_address *out);
nd_status nd_store_tls(const nd_store *store, bool server, nd_tls_context **out);

#endif

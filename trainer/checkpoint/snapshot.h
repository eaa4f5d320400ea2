// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_SNAPSHOT_H
#define ND_CHECKPOINT_SNAPSHOT_H
/*
 * The state of one rank as the writer's thread reads it.
 *
 * On a CPU the snapshot is the live memory, which the update leaves alone until the writer has
 * passed a unit. On a GPU it is detached: pinned memory of its own, filled unit by unit on a stream
 * of its own; the update on the device waits for the unit's copy, and the writer for its event. The
 * small entries that are alike on all ranks are always copied at the begin.
 */
#include "trainer/checkpoint/shard.h"
#include "trainer/step/step.h"

typedef struct nd_snapshot nd_snapshot;

/* State arrays and extras of a trainer, as nd_shard_plan_options has them. */
nd_status nd_snapshot_describe(const nd_trainer *trainer, int *arrays,
                               nd_state_extra extras[ND_STATE_EXTRAS_MAX], int *extra_count);
/* Pinned memory that a snapshot on a GPU allocates. */
size_t nd_snapshot_pinned_bytes(const nd_shard_plan *plan);
/* Trainer and plan are borrowed. */
nd_status nd_snapshot_create(nd_trainer *trainer, const nd_shard_plan *plan, nd_snapshot **out);
void nd_snapshot_destroy(nd_snapshot *snapshot); /* NULL is legal */

bool nd_snapshot_is_detached(const nd_snapshot *snapshot);

/* The rank's thread, after the update of a step: enqueues all copies. */
nd_status nd_snapshot_begin(nd_snapshot *snapshot);
/*
 * Digests of what other ranks hold alike, [ND_ALIKE_COUNT]: of this rank's shards, padding
 * included, or of the tensors in them that tp does not split. 0 where there are no such ranks. On a
 * CPU the writer's thread adds those of each unit before the unit may change; on a GPU they are
 * there when nd_snapshot_wait_copied has returned.
 */
nd_status nd_snapshot_digest(nd_snapshot *snapshot, int unit);
const uint64_t *nd_snapshot_digests(const nd_snapshot *snapshot);

/* The rank's thread: work enqueued later on the rank's stream runs after the unit's copy. Detached
 * snapshots only. */
nd_status nd_snapshot_hold_update(nd_snapshot *snapshot, int unit);
/* The rank's thread: the host waits for all copies. */
nd_status nd_snapshot_wait(nd_snapshot *snapshot);

/* The rank's thread: nd_snapshot_wait_copied returns at once until the next begin. NULL is
 * legal. */
void nd_snapshot_cancel(nd_snapshot *snapshot);

/* The writer's thread: waits until the unit's copy is there. */
nd_status nd_snapshot_wait_copied(nd_snapshot *snapshot, int unit);
/* An nd_piece_data; context is the snapshot. */
const float *nd_snapshot_piece(void *context, int piece, nd_state_kind array);
const float *const *nd_snapshot_extras(const nd_snapshot *snapshot);

#endif

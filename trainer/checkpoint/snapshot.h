// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_SNAPSHOT_H
#define ND_CHECKPOINT_SNAPSHOT_H
/*
 * The state of one rank as the writer's thread reads it, and its files.
 *
 * On a CPU the snapshot is the live memory, which the update leaves alone until the writer has
 * passed a unit. On a GPU it is detached: pinned memory of its own, filled unit by unit on a stream
 * of its own; the update on the device waits for the unit's copy, and the writer for its event. The
 * small entries that are alike on all ranks are always copied at the begin, by the rank that writes
 * them.
 */
#include <stdatomic.h>

#include "trainer/checkpoint/shard.h"
#include "trainer/step/step.h"

typedef struct nd_snapshot {
    nd_trainer *trainer; /* borrowed */
    nd_status (*unit)(void *context, int unit);
    void *context;
    nd_shard_plan plan;
    const float *live[ND_STATE_KINDS]; /* on the device */
    void *live_extras[ND_STATE_EXTRAS_MAX];
    float *extras[ND_STATE_EXTRAS_MAX]; /* host copies, of those in the plan */
    bool alike[ND_ALIKE_COUNT];         /* other ranks hold the same */
    uint64_t *digests;                  /* [ND_ALIKE_COUNT]; pinned where detached */
    /* Detached: */
    bool detached;
    float *memory;         /* pinned; all pieces of all arrays, in the order of writing */
    nd_stream stream;      /* of the copies */
    nd_event updated;      /* the last update is complete */
    nd_event *copied;      /* [unit_count]: the copy of the unit is complete */
    atomic_bool cancelled; /* the writer's thread waits for no copy until the next begin */
} nd_snapshot;

/* Pinned memory of the snapshot of a trainer, which may be only planned, on a GPU. */
nd_status nd_snapshot_pinned_bytes(const nd_trainer *trainer, size_t *bytes);
/* nd_snapshot_write calls `unit` as nd_shard_data says. */
nd_status nd_snapshot_init(nd_snapshot *snapshot, nd_trainer *trainer, nd_checksum checksum,
                           nd_status (*unit)(void *context, int unit), void *context);
void nd_snapshot_fini(nd_snapshot *snapshot); /* an all-zero one is legal */

/* The rank's thread, after the update of a step: enqueues all copies. */
nd_status nd_snapshot_begin(nd_snapshot *snapshot);
/*
 * The writer's thread: nd_shard_write of the snapshot. The record has digests of what other ranks
 * hold alike, of all state arrays: of this rank's shards, padding included, or of the tensors in
 * them that tp does not split; 0 where there are no such ranks. On a CPU those of a unit are added
 * before the unit may change.
 */
nd_status nd_snapshot_write(nd_snapshot *snapshot, const char *folder, int64_t updates,
                            nd_shard_record *out);

#endif

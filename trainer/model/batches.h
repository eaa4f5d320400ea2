// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MODEL_BATCHES_H
#define ND_MODEL_BATCHES_H
/*
 * Micro-batches on their way to the device.
 *
 * On a GPU they have a stream of their own and two slots, in turns: a micro-batch is copied while
 * the one before it is computed. The copy waits until all that reads the slot's old content is done
 * and compute waits for the copy, both by events; the host waits for neither. On a CPU a copy is
 * made by the thread that computes, and one slot is enough.
 *
 * Positions are read by the ops of a block, whose CUDA graphs keep addresses: on a GPU they go on
 * from the slot to a place that stays.
 */
#include "runtime/device/memplan.h"
#include "runtime/device/staging.h"
#include "trainer/layout/layout.h"
#include "trainer/rank.h"

enum { ND_BATCH_SLOTS = 2 };

/* Arrays of one slot: 256-byte aligned, neighbours, so that one copy brings all. */
typedef enum nd_batch_array {
    ND_BATCH_IDS = 0,
    ND_BATCH_LABELS, /* in head order: (head chunk, tp peer, row) */
    ND_BATCH_POSITIONS,
    ND_BATCH_ARRAYS
} nd_batch_array;

typedef struct nd_batches {
    nd_rank *rank; /* borrowed, as are dims */
    const nd_dims *dims;
    nd_staging staging;
    nd_stream stream; /* of the copies */
    int slots, current;
    int32_t *memory;               /* (slots, arrays, T padded) */
    int32_t *positions;            /* (T) of the current micro-batch, always in one place */
    nd_event read[ND_BATCH_SLOTS]; /* compute has read the slot */
} nd_batches;

void nd_batches_plan(nd_batches *batches, nd_rank *rank, const nd_dims *dims, nd_memplan *plan);
/* After the plan was committed: the stream of the copies, and their memory on the host. */
nd_status nd_batches_open(nd_batches *batches);
void nd_batches_close(nd_batches *batches);

/* One array (T) of the current micro-batch; on the device. */
int32_t *nd_batches_at(const nd_batches *batches, nd_batch_array array);

/*
 * The next micro-batch becomes the current one; its arrays (T) of the host are not read after the
 * return. What is enqueued on the rank's stream from here on sees it, what is there already the one
 * before.
 */
nd_status nd_batches_load(nd_batches *batches, const int32_t *inputs, const int32_t *labels,
                          const int32_t *positions);

#endif

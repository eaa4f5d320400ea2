// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MODEL_ACTIVATIONS_H
#define ND_MODEL_ACTIVATIONS_H
/*
 * A set is what one micro-batch keeps on one stage from its forward to its backward. A micro-batch
 * takes a set before its forward and gives it back after its last use (model.h).
 *
 * What a block keeps depends on `recompute`. What it does not keep lives in buffers that all blocks
 * share, and is computed again by the same ops, so the results are the same bits.
 *   none               everything
 *   selective          not the norm outputs (h1, h2) and the SwiGLU output (act); matmul and
 *                      attention outputs are kept
 *   all_but_attention  what attention leaves (o, lse), and the residual stream before and after it
 *                      (x_in, x_mid). In long sequences attention is most of a forward; in a Llama
 *                      3.1 8B this is 3 times what full keeps, and selective keeps 11.5 times
 *   full               only the block's input (x_in)
 * Without a backward nothing is kept.
 * In FP8 with a scale per tensor h1, h2 and act are kept as codes.
 */
#include "runtime/device/memplan.h"
#include "trainer/context/cp.h"
#include "trainer/data/data.h"
#include "trainer/precision/precision.h"

/* Micro-batches on their way to the device. */

/* (T) each, on the device. */
typedef struct nd_micro_batch {
    int32_t *ids;
    int32_t *labels;           /* in head order: (head chunk, tp peer, row) */
    int32_t *positions;        /* on a GPU the same address for every micro-batch of a set */
    const int32_t *first_keys; /* nd_cp_first_keys, likewise; NULL: documents are joined */
    const int64_t *sent;       /* what else that made; on the host */
    int slot;
    /* The sources of the batch's samples: number i, sources[i], has the labels
     * source_labels + i * nd_batches.stride, where those of the others are -100. 0: they are not
     * told apart. */
    int source_count;
    const int *sources;
    int32_t *source_labels; /* also in head order */
} nd_micro_batch;

enum { ND_RING_MOST = 64 };

/*
 * Each micro-batch that is in flight has a slot. On a GPU the copies have a stream of their own and
 * there is one slot more: one micro-batch is copied while the one before it is computed. The copy
 * waits until all that reads the slot's old content is done, and compute waits for the copy, both
 * by events; the host waits for neither. On a CPU a copy is made by the thread that computes.
 *
 * Positions and first keys are read by the ops of a block, whose CUDA graphs keep addresses: on a
 * GPU they are copied on from the slot to a fixed place of the set.
 */
typedef struct nd_batch_slot {
    bool taken;
    nd_event read; /* compute has read the slot */
} nd_batch_slot;

typedef struct nd_batches {
    nd_rank *rank; /* borrowed, as are dims */
    const nd_dims *dims;
    /* A ring in host memory, pinned on CUDA, where the host puts what is copied. When the ring
     * reaches a place again, it is waited for only if its copy has not run yet. */
    int32_t *ring; /* (ring_count, each) */
    int ring_count, ring_next;
    nd_event copied[ND_RING_MOST];
    nd_stream stream; /* of the copies */
    int slots, next;
    nd_batch_slot *slot;  /* [slots]; owned, as is found */
    int sources;          /* most of them in one micro-batch; 0: they are not told apart; set before
                        nd_batches_plan, as are these */
    nd_cp_key_sizes keys; /* 0 numbers: documents are joined */
    /* (slots): ids, labels, positions (T padded) each, first keys (padded), labels by source
     * (sources, T padded) */
    int32_t *memory;
    int64_t stride, common, each; /* numbers: T padded, before labels by source, of a slot */
    int64_t in_use;               /* positions, and first keys behind them */
    int *found;                   /* (slots, sources) in the micro-batch */
    int64_t *sent; /* (slots, keys.sent); owned, as is the scratch of nd_cp_first_keys */
    char *dealing;
    int32_t *positions; /* (sets, T padded and first keys padded) of the micro-batches in flight;
                           NULL: those in memory */
} nd_batches;

/* sets: the most micro-batches in flight. */
void nd_batches_plan(nd_batches *batches, nd_rank *rank, const nd_dims *dims, int sets,
                     nd_memplan *plan);
/* Makes the stream of the copies, and their memory on the host, after the plan was committed. */
nd_status nd_batches_open(nd_batches *batches);
void nd_batches_close(nd_batches *batches);

/* Loads micro-batch `micro` of a step. The host's arrays are not read after the return. What is
 * enqueued on the rank's stream from here on sees the micro-batch, until it was given back and its
 * slot's turn comes again. set: the number of its set. */
nd_status nd_batches_load(nd_batches *batches, const nd_step_batch *from, int micro, int set,
                          nd_micro_batch *out);
/* All that reads the micro-batch is enqueued. */
nd_status nd_batches_give_back(nd_batches *batches, const nd_micro_batch *batch);

/* Activations. */

struct nd_model;

/* One block keeps a tensor for each row of block_acts.def, which has the shapes. */
typedef struct nd_block_acts {
#define ND_ACT(field, shape, kept, reader, input, lender, name) nd_tensor field;
#include "trainer/model/block_acts.def"
#undef ND_ACT
} nd_block_acts;

/* The head keeps this. */
typedef struct nd_head_acts {
    nd_tensor x;    /* (Tl, C) residual stream after the last block */
    nd_tensor rstd; /* (Tl) F32 */
    nd_tensor dh;   /* (Tl, C) gradient of the normed x */
} nd_head_acts;

typedef struct nd_activation_set {
    nd_micro_batch batch;
    int64_t T, Tl; /* tokens of the micro-batch, and of this tp rank: those of dims, or fewer
                              after nd_activations_narrow */
    nd_layer_range layers; /* of the stage */
    nd_block_acts *blocks; /* [layers]; owned */
    nd_head_acts head;
    bool taken, loaded;
    int micro; /* which micro-batch of the step it holds */
} nd_activation_set;

static inline nd_block_acts *nd_set_block(const nd_activation_set *set, int64_t layer)
{
    return &set->blocks[layer - set->layers.begin];
}

/* True if the linears with this input multiply again in the backward, because blocks do not keep
 * their output, or for o the residual stream with it. */
bool nd_recompute_multiplies(nd_recompute recompute, nd_input input);
/* The set's views get so many rows, at most those of dims; T is a multiple of Tl. */
void nd_activations_narrow(nd_activation_set *set, int64_t T, int64_t Tl);

#endif

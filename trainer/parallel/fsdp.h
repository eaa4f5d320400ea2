// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PARALLEL_FSDP_H
#define ND_PARALLEL_FSDP_H
/*
 * Fully sharded data parallel: this rank's shards of weights, gradients and moments, and the
 * gathered units.
 *
 * Protocol per unit: prefetch (begins the all-gather) -> acquire (its weights are valid) -> release
 * (its buffer may be reused). Gradients: grad_acquire (a buffer for the unit's unsharded gradient)
 * -> the model writes them -> grad_release (begins the reduce-scatter) -> grad_finish before the
 * optimizer. Behind the last micro-batch each unit's shard is also summed over dp_replicate (HSDP),
 * while the backward goes on. nd_fsdp_grad_reduce ends these sums and makes the others.
 *
 * reshard_after_forward true: blocks share two buffers (ZeRO-3), even blocks one and odd blocks the
 * other. Adjacent blocks are never in the same buffer, and a block is in the same buffer in every
 * pass, as CUDA graphs need. false: every unit keeps its buffer (ZeRO-2), and it is gathered once
 * per optimizer step, since the weights do not change between micro-batches. The head is never
 * resharded. One shard (DDP) keeps every unit in the compute dtype, or, in fp32, uses the master
 * weights themselves. With one shard the gradient buffer of a unit is its slice of the accumulator.
 *
 * A model without a backward has no F32 master weights, unless it computes in F32. Its weights are
 * converted while they are loaded (nd_fsdp_put), and this rank's part of a unit is kept as it is
 * gathered: in the unit's own buffer, or, where blocks share buffers, in memory of its own. Weights
 * of FP8 linears become codes; since a scale follows from a whole weight, or a whole row, they are
 * loaded twice: nd_fsdp_measure comes before nd_fsdp_put.
 *
 * A unit's segments are gathered as a group of two all-gathers: HP in the compute dtype, FP8 in
 * codes that each rank casts from its F32 shard with the precomputed scales of whole weights
 * (precision.h). Their gradients are reduce-scattered as a group too.
 */
#include "runtime/device/memplan.h"
#include "trainer/layout/layout.h"
#include "trainer/precision/precision.h"
#include "trainer/rank.h"

enum { ND_FSDP_BLOCK_SLOTS = 2 };

typedef struct nd_weight_slot {
    const nd_unit *unit; /* the unit in it or on its way to it; NULL: none */
    int64_t version;     /* of the weights it was gathered from */
    int64_t own_version; /* of the weights whose BF16 part of this rank the optimizer wrote here */
    bool held;           /* between acquire and release */
    bool pending;        /* `gathered` is not waited for yet */
    void *data[ND_SEGMENT_COUNT]; /* HP: act dtype; FP8: codes */
    nd_event gathered[ND_SEGMENT_COUNT];
} nd_weight_slot;

typedef struct nd_grad_slot {
    const nd_unit *unit; /* NULL: free */
    bool pending;
    bool fresh;  /* nothing written yet: products overwrite, sums start at zero */
    bool adds;   /* pending: `received` is to be added to the accumulator */
    float *data; /* unsharded, F32: segment HP, then FP8 */
    float *
        received; /* reduce-scattered shard of a later micro-batch, then added to the accumulator */
    nd_event reduced[ND_SEGMENT_COUNT];
} nd_grad_slot;

typedef struct nd_fsdp {
    nd_rank *rank;
    nd_layout *layout;
    nd_scales *scales;
    nd_dtype act;
    bool resident; /* every unit has its own weight buffer */
    bool aliased;  /* gathered weights are the master weights */
    bool converts; /* there are no master weights: loaded ones become what is gathered */
    int64_t version;
    float *master, *grad, *moment1, *moment2; /* (shard_total); NULL where there are none */
    void *kept[ND_SEGMENT_COUNT]; /* where that is no unit's buffer: the shards of the blocks */
    float *landing;               /* (landing_count) loaded weights before they are converted */
    nd_bf16 *rounded;             /* (landing_count) of them, where codes are made from BF16 */
    int64_t landing_count;
    bool blocks_share; /* the block slots; else every block has its own */
    int slot_count, *slot_of_unit;
    nd_weight_slot *slots;
    nd_grad_slot grad_slots[ND_FSDP_BLOCK_SLOTS + 1]; /* blocks, then embedding and head */
    int *released; /* [units]: micro-batches of this step whose gradient the accumulator holds */
    bool *zeroed;  /* [params]: with one shard, the accumulator was zeroed in this step */
    /* Sums over replicas. */
    int micros;        /* of a step, after which a unit's sum begins; 0: it never does */
    nd_exchange *sums; /* [units + params], begun */
    int sum_count;
    float *packed; /* (packed_count): gradients that are summed over tp */
    int64_t packed_count;
} nd_fsdp;

/* Wants the memory of shards and gradients. Rank, layout and scales (NULL: no FP8) are borrowed.
 * forward_only: weights alone, in the compute dtype: no gradients, no moments, and no call that
 * needs them. */
nd_status nd_fsdp_init(nd_fsdp *fsdp, nd_rank *rank, nd_layout *layout, nd_scales *scales,
                       bool forward_only, nd_memplan *plan);
/* Bytes of the gathered weights where every unit has its own buffer. */
size_t nd_fsdp_own_bytes(const nd_fsdp *fsdp);
/* Chooses the slots of gathered weights and wants their memory, after init and before the first
 * gather. shares: blocks share buffers with one shard too, as with several, because not all weights
 * fit in the compute dtype. */
nd_status nd_fsdp_plan_weights(nd_fsdp *fsdp, bool shares, nd_memplan *plan);
void nd_fsdp_fini(nd_fsdp *fsdp);

/* The master weights changed: gathered copies are stale. */
void nd_fsdp_weights_changed(nd_fsdp *fsdp);

/* The most elements of a call of nd_fsdp_put that are converted. */
enum { ND_FSDP_PIECE = 1 << 22 };
/*
 * Elements [begin, begin + count) of the flat state arrays, which belong to `param`: F32 on the
 * host. They become master weights, or are converted; on the CPU they may lie in these master
 * weights, or anywhere in `landing`, already. Complete at the return.
 */
nd_status nd_fsdp_put(nd_fsdp *fsdp, const nd_param *param, int64_t begin, int64_t count,
                      const float *values);
/*
 * Without master weights all FP8 weights of a unit are measured before they are put, between
 * nd_scales_begin_weights and nd_scales_settle_weights of its layer: the same elements that are put
 * later, each time whole rows or a part of one.
 */
nd_status nd_fsdp_measure(nd_fsdp *fsdp, const nd_param *param, int64_t begin, int64_t count,
                          const float *values);
/* Without master weights: this rank's shard of a unit's segment, as it is gathered. */
void *nd_fsdp_kept(const nd_fsdp *fsdp, const nd_unit *unit, nd_segment_kind kind);
/* The dtype of a segment as it is gathered: act, or codes. */
nd_dtype nd_fsdp_gathered_dtype(const nd_fsdp *fsdp, nd_segment_kind kind);

/*
 * Returns where the optimizer writes the BF16 copy of element `begin` of the flat state arrays and
 * of the elements after it in its segment: this rank's part of a unit that has a buffer of its own.
 * NULL: weights are cast when their unit is gathered, because buffers are shared, or hold codes, or
 * the weights are F32.
 */
nd_bf16 *nd_fsdp_resident(const nd_fsdp *fsdp, int64_t begin);
/* The optimizer changed the master weights and wrote all of those copies. */
void nd_fsdp_weights_updated(nd_fsdp *fsdp);

/* No-op when the unit is there, when its buffer is in use, and for NULL. */
nd_status nd_fsdp_prefetch(nd_fsdp *fsdp, const nd_unit *unit);
/* The unit's weights are valid on the stream until the release: gathers them unless they are there,
 * or waits for what was prefetched. A unit is acquired once at a time. */
nd_status nd_fsdp_acquire(nd_fsdp *fsdp, const nd_unit *unit);
/* All that reads the weights is enqueued; the buffer may be used for another unit. */
void nd_fsdp_release(nd_fsdp *fsdp, const nd_unit *unit);
/* The buffers of all units are free: each is gathered again before it is read. None is held. */
nd_status nd_fsdp_reshard(nd_fsdp *fsdp);

/* Rows of the adjacent parameters first..last (one product), local block, act dtype. The unit must
 * be acquired. */
nd_tensor nd_fsdp_weight(const nd_fsdp *fsdp, nd_param_id first, nd_param_id last, int64_t layer);
/* Codes of a parameter of segment FP8, local block. The unit must be acquired. */
nd_tensor nd_fsdp_codes(const nd_fsdp *fsdp, nd_param_id id, int64_t layer);

/* The accumulators of all units hold no gradient yet. After `micros` micro-batches the gradient of
 * a unit begins to be summed over replicas; 0: nothing is. */
void nd_fsdp_begin_step(nd_fsdp *fsdp, int micros);
/* Gives the unit a buffer for its unsharded gradient; what was in it is on its way into the shards
 * before. */
nd_status nd_fsdp_grad_acquire(nd_fsdp *fsdp, const nd_unit *unit);
/* F32 gradient of the same rows. The unit must be grad-acquired. */
nd_tensor nd_fsdp_grad(const nd_fsdp *fsdp, nd_param_id first, nd_param_id last, int64_t layer);
/* beta of the products that write this unit's gradients: 0 while it is fresh, else 1. */
float nd_fsdp_grad_beta(const nd_fsdp *fsdp, const nd_unit *unit);
/* Zeroes a parameter's gradient when its unit is fresh: for gradients that are sums (norms,
 * lookups). */
nd_status nd_fsdp_grad_zero_if_fresh(nd_fsdp *fsdp, nd_param_id id, int64_t layer);
/* The unit's gradient is complete: it begins to be reduced into the shards. */
nd_status nd_fsdp_grad_release(nd_fsdp *fsdp, const nd_unit *unit);
/* All reduce-scatters of this micro-batch are complete and added up. */
nd_status nd_fsdp_grad_finish(nd_fsdp *fsdp);
/*
 * The rest of a step's gradient synchronisation:
 *
 *  1. HSDP: the sums over dp_replicate that began unit by unit end
 *  2. KV heads of which several tp ranks have copies (each rank saw only its queries): summed over
 *     the copies in the order of their ranks, so that all get the same bits
 *  3. norms, and biases that tp does not split (each tp rank saw only its tokens): packed, summed
 *     over tp, then over dp_replicate; with tp 1 they are among those of 1
 *
 * *squares, on the device, becomes the square of the gradient's global L2 norm, the same number on
 * every rank.
 */
nd_status nd_fsdp_grad_reduce(nd_fsdp *fsdp, double *squares);

/* True if the unit's buffer never holds another unit, so that it is gathered once for each version
 * of the weights. */
static inline bool nd_fsdp_has_own_slot(const nd_fsdp *fsdp, const nd_unit *unit)
{
    return !fsdp->blocks_share || unit->kind != ND_UNIT_BLOCK;
}
/* The slot that holds the unit's current weights, or NULL: its buffers are part of the key of a
 * block's CUDA graphs. */
nd_weight_slot *nd_fsdp_slot_holding(const nd_fsdp *fsdp, const nd_unit *unit);

#endif

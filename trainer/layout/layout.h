// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAYOUT_LAYOUT_H
#define ND_LAYOUT_LAYOUT_H
/*
 * The parameter table of one rank: which tensors exist, what tensor parallelism leaves of them
 * here, and where they lie. Allocation, init, sharding, loading, saving, the optimizer and the
 * memory plan all iterate it.
 *
 * A unit is what is gathered and released together: the embedding, each decoder block, the tail
 * (final norm and head). A unit has up to two segments, HP (compute dtype) and FP8 (converted
 * linears), each a flat buffer of elements, padded and cut evenly over the `shards` members of
 * dp_shard_cp. The same offsets index master weights, gradients, moments and codes.
 *
 * With tied embeddings the table lies in the tail unit, is used by the lookup too, and there is no
 * embedding unit.
 */
#include "trainer/layout/shape.h"
#include "runtime/mesh/mesh.h"
#include "kernels/ops.h"

typedef enum nd_param_id {
#define ND_PARAM(id, unit, name, rows, cols, split, init, decay, fp8) ND_PARAM_##id,
#include "trainer/layout/llama_params.def"
#undef ND_PARAM
    ND_PARAM_COUNT
} nd_param_id;

typedef enum nd_split { ND_SPLIT_NONE = 0, ND_SPLIT_ROWS, ND_SPLIT_COLS } nd_split;
typedef enum nd_init { ND_INIT_NORMAL = 0, ND_INIT_ONE } nd_init;
typedef enum nd_unit_kind { ND_UNIT_EMBED = 0, ND_UNIT_BLOCK, ND_UNIT_TAIL } nd_unit_kind;
typedef enum nd_segment_kind {
    ND_SEGMENT_HP = 0,
    ND_SEGMENT_FP8,
    ND_SEGMENT_COUNT
} nd_segment_kind;

typedef struct nd_param {
    nd_param_id id;
    int64_t layer;                  /* -1 outside of blocks */
    char name[96];                  /* Hugging Face tensor name */
    int axes;                       /* 1: vector, cols is 1 */
    int64_t rows, cols;             /* global extents */
    int64_t local_rows, local_cols; /* here; vocabulary rows padded to tp */
    int64_t row_begin, col_begin;   /* global place of the local block */
    nd_split split;
    nd_init init;
    bool decay, fp8;
    uint64_t stream; /* Philox stream of its initial values */
    int unit;
    nd_segment_kind segment;
    int64_t offset; /* elements, in the unit's segment */
} nd_param;

typedef struct nd_segment {
    int64_t used;         /* elements of parameters */
    int64_t count;        /* padded: shards x shard_count */
    int64_t shard_count;  /* elements of one shard */
    int64_t shard_offset; /* of this segment's shard in the rank's flat state arrays */
} nd_segment;

typedef struct nd_unit {
    nd_unit_kind kind;
    int64_t layer; /* -1 outside of blocks */
    int first_param, param_count;
    nd_segment segments[ND_SEGMENT_COUNT];
} nd_unit;

typedef struct nd_layout {
    nd_param *params;
    int param_count;
    nd_unit *units; /* [embed], blocks 0..L-1, tail */
    int unit_count;
    int first_block; /* unit of layer 0: 1, or 0 when tied */
    int tail;
    bool tied;
    int shards, shard_index;
    int64_t shard_total; /* elements of all shards of this rank: length of each flat state array */
} nd_layout;

/*
 * converts(context, param) says which linears an FP8 recipe takes (NULL: none). The layout of every
 * rank of a dp_shard_cp group is the same but for shard_index; of a tp group but for row_begin and
 * col_begin.
 */
nd_status nd_layout_create(const nd_llama_shape *shape, const nd_mesh *mesh, nd_coord coord,
                           bool (*converts)(void *context, const nd_param *param), void *context,
                           nd_layout **out);
void nd_layout_destroy(nd_layout *layout);

/* Index of a parameter; layer -1 outside of blocks. With tied embeddings HEAD is EMBED. */
int nd_layout_find(const nd_layout *layout, nd_param_id id, int64_t layer);

/*
 * A run of elements that are neighbours both in this rank's shard and in the global row-major
 * tensor.
 */
typedef struct nd_run {
    const nd_param *param;
    int64_t global_begin; /* element of the flattened global tensor */
    int64_t state_begin;  /* element of the rank's flat state arrays */
    int64_t count;
} nd_run;

/* Visits all runs of shard `shard_index` of `unit`, ascending. Padding belongs to no run. */
nd_status nd_layout_each_run(const nd_layout *layout, int unit, int shard_index,
                             nd_status (*visit)(void *context, const nd_run *run), void *context);

/* The part of a parameter's local block that this rank's shard holds, in the flat state arrays;
 * begin == end: none. */
nd_flat_range nd_layout_shard_range(const nd_layout *layout, const nd_param *param);

/* Ranges of the flat state arrays with their weight decay, for the optimizer; owned by the
 * caller. */
nd_status nd_layout_decay_ranges(const nd_layout *layout, nd_flat_range **out, int *count);

/* Ranges of the flat state arrays that hold parameters replicated over tp (norms); owned by the
 * caller. */
nd_status nd_layout_replicated_ranges(const nd_layout *layout, nd_flat_range **out, int *count);

#endif

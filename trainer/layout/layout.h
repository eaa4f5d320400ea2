// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAYOUT_LAYOUT_H
#define ND_LAYOUT_LAYOUT_H
/*
 * This says where the parameters of a model lie. It is pure data, without memory and without
 * communication.
 *
 *   dims     the extents of one rank's step
 *   layout   the parameters of one rank, in units and segments
 *   linears  the linears of a block, and the inputs that they share
 *
 * Layer numbers are global everywhere. Only the layout knows which layers are on this rank.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "runtime/base/status.h"
#include "runtime/config/config.h"
#include "runtime/mesh/mesh.h"
#include "runtime/tensor/dtype.h"
#include "trainer/shape/shape.h"

/* dims; the letters are those of docs/tour.md */

typedef struct nd_dims {
    int64_t B;                        /* micro-batch: sequences */
    int64_t S;                        /* global sequence length */
    int64_t s;                        /* S / cp: local sequence length */
    int64_t T;                        /* B s: local tokens */
    int64_t Tl;                       /* T / tp: tokens between the tensor-parallel regions */
    int64_t chunks;                   /* 1; with context parallel 2 (zig-zag) */
    int64_t chunk;                    /* s / chunks: tokens of one chunk */
    int64_t C, D;                     /* hidden, head size */
    int64_t rotated;                  /* elements of a head that RoPE turns */
    int64_t H, K, F;                  /* local query heads, KV heads, ffn: global / tp; K >= 1 */
    int64_t kv_copies, kv_copy;       /* ranks that have these KV heads, and which this one is */
    int64_t QKV;                      /* (H + 2 K) D: columns of the fused projection */
    int64_t normed;                   /* H + K heads of q and k that are normed; 0: none are */
    bool qk_as_one;                   /* all of those of q, and all of k, as one */
    bool pre_norm, post_norm;         /* norms are before the branches, behind them */
    float norm_plus;                  /* is added to the weights of norms */
    bool gelu;                        /* the MLP's activation is GELU, not SiLU */
    float attention_scale;            /* of scores */
    float stream_eps;                 /* of the norms of the residual stream */
    float lookup_scale, head_scale;   /* of embeddings, of what the head multiplies; 1: none */
    int64_t vocab;                    /* global vocabulary */
    int64_t V;                        /* local rows: vocabulary padded to tp, / tp */
    int64_t vocab_first, vocab_valid; /* first row held here, rows that are real */
    int64_t head_rows;                /* tokens per tp peer of one head chunk */
    int64_t head_columns;             /* columns of one tile of its logits; V: one tile */
    int64_t piece;                    /* tokens of a piece of the MLP; T: it is one piece */
    nd_dtype act;                     /* BF16, or F32 in precision fp32 */
} nd_dims;

nd_dims nd_dims_of(const nd_shape *shape, const nd_mesh *mesh, nd_coord coord,
                   const nd_config *config, bool gpu);
/* Makes dims for calls of up to `tokens` rows, a multiple of tp, of any sequences: one sample of
 * that length, without context parallelism. */
nd_dims nd_dims_of_rows(nd_dims dims, const nd_mesh *mesh, int64_t tokens);

/*
 * layout
 *
 * The parameter table of one rank: which tensors exist, what tensor parallelism leaves of them
 * here, and where they lie. Allocation, init, sharding, loading, saving, the optimizer and the
 * memory plan all iterate it.
 *
 * A stage is a range of layers, with the embedding before the first and the head behind the last. A
 * unit is what is gathered and released together: the embedding, each decoder block, the head with
 * the final norm. A unit has up to two segments, HP (compute dtype) and FP8 (converted linears),
 * each a flat buffer of elements, padded and cut evenly over the `shards` members of dp_shard_cp.
 * The shards of a unit's segments are adjacent in the rank's flat state arrays: F32 master weights,
 * gradients and moments.
 *
 * With tied embeddings the table lies in the head's unit, is used by the lookup too, and there is
 * no embedding unit.
 *
 * Several ranks of tp may hold the same block of a tensor: all of them where tp does not split it,
 * and adjacent ranks the same heads of K and V, with their biases, where the KV heads cannot be cut
 * into as many parts (nd_shape_kv_copies). Such copies have the same bits: each reads them, their
 * gradients are added up over the copies (fsdp.h), and each updates them. The first copy is the
 * owner: it alone saves them and counts them in norms.
 */
typedef enum nd_param_id {
#define ND_PARAM(id, unit, name, rows, cols, split, init, decay, when) ND_PARAM_##id,
#include "trainer/layout/params.def"
    ND_PARAM_COUNT
} nd_param_id;

typedef enum nd_split { ND_SPLIT_NONE = 0, ND_SPLIT_ROWS, ND_SPLIT_COLS } nd_split;
typedef enum nd_init { ND_INIT_NORMAL = 0, ND_INIT_ONE, ND_INIT_ZERO } nd_init;
typedef enum nd_unit_kind { ND_UNIT_EMBEDDING = 0, ND_UNIT_BLOCK, ND_UNIT_HEAD } nd_unit_kind;
typedef enum nd_segment_kind {
    ND_SEGMENT_HP = 0,
    ND_SEGMENT_FP8,
    ND_SEGMENT_COUNT
} nd_segment_kind;

typedef struct nd_layer_range {
    int64_t begin, end;
} nd_layer_range;

typedef struct nd_stage {
    nd_layer_range layers;
    bool embeds, has_head;
} nd_stage;

enum { ND_PARAM_NAME = 96 };

typedef struct nd_param {
    nd_param_id id;
    int64_t layer; /* -1 outside of blocks */
    char name[ND_PARAM_NAME];
    /* The tensor of a Hugging Face folder that holds it, from row file_row on; where the family has
     * a tensor of its own for each parameter, it has the same name. */
    char file_name[ND_PARAM_NAME];
    int64_t file_row, file_rows;
    /* The file has so many elements of a head of head_rows rows as adjacent pairs that RoPE turns.
     * Here the first elements of all pairs come first. 0: as in the file. */
    int64_t paired, head_rows;
    int axes;                       /* 1: vector, cols is 1 */
    int64_t rows, cols;             /* global extents */
    int64_t local_rows, local_cols; /* here; vocabulary rows padded to tp */
    int64_t row_begin, col_begin;   /* global place of the local block */
    nd_split split;
    int copies; /* adjacent ranks of tp that hold this block */
    bool owned; /* this rank is the first of them */
    nd_init init;
    bool decay, fp8;
    uint64_t random_stream; /* of Philox, for its initial values */
    const struct nd_unit *unit;
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
    int index;     /* in nd_layout.units */
    int first_param, param_count;
    nd_segment segments[ND_SEGMENT_COUNT];
    int64_t shard_offset, shard_count; /* of both segments' shards in the flat state arrays */
} nd_unit;

typedef struct nd_layout {
    nd_stage *stages; /* of this rank */
    int stage_count;
    nd_param *params;
    int param_count;
    nd_unit *units; /* stage by stage: [embedding], blocks, [head] */
    int unit_count;
    int *unit_of_layer;  /* [layers of the model]; -1: not on this rank */
    int64_t layers;      /* of the model */
    int block_count;     /* blocks on this rank */
    int embedding, head; /* units; -1: not on this rank, or (embedding) tied */
    bool tied;
    int shards, shard_index;
    int64_t shard_total; /* elements of all shards of this rank: length of each flat state array */
} nd_layout;

typedef struct nd_layout_options {
    const nd_shape *shape;
    const nd_mesh *mesh; /* NULL: of one rank */
    nd_coord coord;
    const nd_stage *stages; /* of this rank; with 0 of them: one stage, the whole model */
    int stage_count;
    /* This says which linears an FP8 recipe takes; NULL: none. */
    bool (*converts)(void *context, const nd_param *param);
    void *context;
} nd_layout_options;

/*
 * The options are not kept. The layout of every rank of a dp_shard_cp group is the same but for
 * shard_index; of a tp group but for row_begin, col_begin and owned.
 */
nd_status nd_layout_create(const nd_layout_options *options, nd_layout **out);
void nd_layout_destroy(nd_layout *layout);

/* True if models of this shape have the parameter. */
bool nd_shape_has(const nd_shape *shape, nd_param_id id);
/* The number of all parameters; a tied head is counted once. */
int64_t nd_shape_parameters(const nd_shape *shape);

/* NULL: not on this rank. `layer` is -1 outside of blocks. With tied embeddings the table is in the
 * head's unit, and the parameter HEAD is EMBED. */
const nd_unit *nd_layout_unit(const nd_layout *layout, nd_unit_kind kind, int64_t layer);
const nd_param *nd_layout_param(const nd_layout *layout, nd_param_id id, int64_t layer);

/* A view of the adjacent parameters first..last of one segment, whose buffer is `base`. */
nd_tensor nd_layout_view(const nd_layout *layout, nd_param_id first, nd_param_id last,
                         int64_t layer, void *base, nd_dtype dtype);

/*
 * A rectangle of a parameter whose elements are adjacent, row by row, in a shard: rows
 * [row, row + rows) and columns [col, col + cols) of the global tensor. A vector has one column.
 */
typedef struct nd_span {
    const nd_param *param;
    int64_t row, col;
    int64_t rows, cols;
    int64_t begin; /* its first element in the flat state arrays; in the unit's flat shard:
                      begin - unit->shard_offset */
} nd_span;

typedef nd_status nd_span_visit(void *context, const nd_span *span);

/*
 * Visits all that shard `shard` of the unit holds of its parameters, in the order of the table: up
 * to three spans of each, as a shard's border may lie within a row, ascending in the shard. Padding
 * belongs to no span. A rank can ask for every shard, not only for its own.
 */
nd_status nd_layout_each_span(const nd_layout *layout, const nd_unit *unit, int shard,
                              nd_span_visit *visit, void *context);

/* Visits the elements of a span that lie in [begin, end) of the flat state arrays: up to three
 * spans. */
nd_status nd_span_each_part(const nd_span *span, int64_t begin, int64_t end, nd_span_visit *visit,
                            void *context);

/* Returns how many elements of a span are adjacent in the flattened global tensor too: all, or a
 * row. */
static inline int64_t nd_span_adjacent(const nd_span *span)
{
    return span->cols == span->param->cols ? span->rows * span->cols : span->cols;
}

/* The number in the flattened global tensor of the span's element `element`. */
static inline int64_t nd_span_global(const nd_span *span, int64_t element)
{
    return (span->row + element / span->cols) * span->param->cols + span->col +
           element % span->cols;
}

/* The number in the file's tensor of an element of the parameter, and how many from it on are
 * adjacent there. */
int64_t nd_param_in_file(const nd_param *param, int64_t element);
int64_t nd_param_adjacent(const nd_param *param, int64_t element);

/* The part of a parameter's local block that this rank's shard holds, in the flat state arrays;
 * begin == end: none. */
nd_flat_range nd_layout_shard_range(const nd_layout *layout, const nd_param *param);

/* linears: those of a block, in module order */

typedef enum nd_linear {
#define ND_LINEAR(id, module, rows, cols, split, input) ND_LINEAR_##id,
#include "trainer/layout/params.def"
    ND_LINEAR_COUNT
} nd_linear;

/* Linears read these: the normed input of q k v; the attention output; the normed input of gate and
 * up; SwiGLU's output. Linears with the same input are adjacent. */
typedef enum nd_input {
    ND_INPUT_QKV = 0,
    ND_INPUT_O,
    ND_INPUT_GATE_UP,
    ND_INPUT_DOWN,
    ND_INPUT_COUNT
} nd_input;

typedef struct nd_linear_row {
    nd_param_id param, bias; /* nd_shape_has says whether there is a bias */
    nd_input input;
    const char *module; /* "self_attn.q_proj" */
} nd_linear_row;

extern const nd_linear_row nd_linears[ND_LINEAR_COUNT];

/* Returns how many linears read an input; *first is the first of them. */
int nd_input_linears(nd_input input, int *first);
/* -1: the parameter is no linear's weight. */
int nd_linear_of_param(nd_param_id id);
/* Out and in features: global with tp 1, else those of one of tp ranks. */
void nd_linear_sizes(const nd_shape *shape, int linear, int64_t tp, int64_t *out, int64_t *in);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAYOUT_LAYOUT_H
#define ND_LAYOUT_LAYOUT_H
/*
 * What a model is and where its parameters lie: pure data, without memory and without
 * communication.
 *
 *   family   which model types there are
 *   shape    the numbers of a model, as a Hugging Face config.json says them
 *   dims     the extents of one rank's step
 *   layout   the parameters of one rank, in units and segments
 *   cp_exchange  what ranks of cp may exchange, and what they wait for
 *   linears  the linears of a block, and the inputs that they share
 *
 * Layer numbers are global everywhere. Only the layout knows which layers are on this rank.
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "kernels/rope.h"
#include "runtime/base/math.h"
#include "runtime/base/status.h"
#include "runtime/config/config.h"
#include "runtime/mesh/mesh.h"
#include "runtime/tensor/dtype.h"

/* family */

typedef enum nd_family {
#define ND_FAMILY(id, ...) ND_FAMILY_##id,
#include "trainer/layout/family.def"
#undef ND_FAMILY
    ND_FAMILY_COUNT
} nd_family;

/* A switch of a family: a key of config.json decides, or without one `on` does. */
typedef struct nd_family_switch {
    const char *key; /* NULL: none */
    bool on;         /* where the key is absent */
} nd_family_switch;

/* "default": rope_type in config.json. */
const char *nd_rope_type_name(nd_rope_type type);

/* Which layers of a family have a sliding window. */
typedef enum nd_window_rule {
    ND_WINDOW_NEVER = 0,
    ND_WINDOW_SET,     /* all layers, where sliding_window is there and not null */
    ND_WINDOW_ALL,     /* all layers, where sliding_window is absent or not null */
    ND_WINDOW_LISTED,  /* those of them for which layer_types does not say full_attention */
    ND_WINDOW_SWITCHED /* with use_sliding_window, those from layer max_window_layers on */
} nd_window_rule;

typedef struct nd_family_row {
    const char *model_type, *architecture; /* "llama", "LlamaForCausalLM" */
    nd_family_switch qkv_bias, o_bias, mlp_bias;
    int64_t qk_norm; /* as in nd_shape */
    nd_window_rule window;
    int fused; /* a file has one tensor for gate and up (1), and one for q k v (2) */
    /* Where the keys are absent: */
    int64_t kv_heads, head_dim, max_positions;
    double rms_eps, dropout;
    int64_t bos_id, eos_id;
    /* Switches that most families lack. */
    bool scaled;             /* has the keys of the multipliers */
    bool tied;               /* tie_word_embeddings where it is absent */
    double theta;            /* rope_theta where it is absent; 0: 10000 */
    int64_t post_norm;       /* as in nd_shape */
    const char *norms[3];    /* a file's names of NORM_2, POST_1 and POST_2; NULL: params.def's */
    double partial;          /* partial_rotary_factor where it is absent; 0: has no such key */
    bool interleaved;        /* RoPE turns adjacent elements of a head in a file's q and k */
    bool query_scaled;       /* yarn where rope_parameters is absent, with llama_4_scaling_beta */
    int64_t unturned_period; /* no_rope_layer_interval where it is absent; 0: has no such key */
    int64_t window_period;   /* each so many-th layer has no window without layer_types; 0: none */
    const char *window_key;  /* the key of that number; NULL: none */
    bool full_unturned;      /* no RoPE in layers without the window, where there is one */
    double window_theta;     /* nd_shape's where it is absent; 0: one RoPE for all layers */
    const char *window_theta_key; /* that has it in the old spelling; NULL: none */
    bool gelu;                    /* the MLP's activation is the tanh form of GELU, not SiLU */
    double norm_plus;             /* is added to the weights of all norms; not with qk_norm 2 */
    bool root_scale;              /* embeddings are multiplied by the root of hidden_size */
    int64_t query_scalar;         /* query_pre_attn_scalar where it is absent; 0: has no such key */
} nd_family_row;

extern const nd_family_row nd_families[ND_FAMILY_COUNT];

/* shape */

enum { ND_LAYERS_MAX = 4096, ND_ENDS_MAX = 16 };

typedef struct nd_layer_set {
    uint64_t bits[ND_LAYERS_MAX / 64];
} nd_layer_set;

static inline bool nd_layer_set_has(const nd_layer_set *set, int64_t layer)
{
    return set->bits[layer / 64] >> (layer % 64) & 1;
}

static inline void nd_layer_set_add(nd_layer_set *set, int64_t layer)
{
    set->bits[layer / 64] |= UINT64_C(1) << (layer % 64);
}

typedef struct nd_shape {
    nd_family family;
    int64_t vocab;    /* V */
    int64_t hidden;   /* C */
    int64_t ffn;      /* F */
    int64_t layers;   /* L */
    int64_t heads;    /* H */
    int64_t kv_heads; /* K */
    int64_t head_dim; /* D */
    int64_t max_positions;
    double rms_eps;
    double init_std; /* initializer_range */
    bool tied;       /* tie_word_embeddings */
    nd_rope_config rope;
    int64_t bos_id, eos_id;         /* -1: none; eos: the first when it is a list */
    int32_t more_ends[ND_ENDS_MAX]; /* the ids of the list behind the first */
    int64_t more_end_count;
    bool eos_is_default; /* the config.json that was read has no eos_token_id */
    /* Switches, 0 or 1. */
    int64_t qkv_bias, o_bias, mlp_bias; /* the linears have biases */
    int64_t qk_norm;   /* RMSNorm of q and k before RoPE; 1: of each head; 2: of all heads as one */
    int64_t post_norm; /* norms: 0: before attention and MLP; 1: behind them; 2: both */
    /* Sliding window: a query sees this many keys, itself among them; 0: all before it. */
    int64_t window;
    nd_layer_set full;     /* layers without the window, where there is one */
    nd_layer_set unturned; /* layers without RoPE */
    int64_t rotated;       /* elements of a head that RoPE turns; 0: all */
    double window_theta;   /* of default RoPE in the layers with the window; 0: they have `rope` */
    /* Multipliers; 0: 1, and for attention_scale head_dim^-0.5. */
    double embedding_scale; /* of what the lookup gives */
    double residual_scale;  /* of what a branch adds to the residual stream */
    double attention_scale; /* of the scores */
    double logits_divisor;
} nd_shape;

/* Reads a config.json. ND_ERR_DATA names file, key, value and what is supported. Both RoPE
 * spellings are read. */
nd_status nd_shape_read(const char *path, nd_shape *out);
/* The same from memory; `name` stands for the text in messages. */
nd_status nd_shape_parse(const char *text, size_t bytes, const char *name, nd_shape *out);
/* Writes a config.json that transformers opens (torch_dtype = dtype_name, and the old RoPE spelling
 * where it can say what holds). */
nd_status nd_shape_write(const nd_shape *shape, const char *dtype_name, const char *path);

/*
 * ND_ERR_CONFIG with all numbers when an axis does not divide what it splits: heads and ffn by tp;
 * the heads of a tp rank by the ranks of the group ulysses, which also divide its KV heads or are a
 * multiple of them; the sequence by 2 cp (by cp
 * when cp is 1); local tokens micro_batch x sequence / cp by tp; head_dim even.
 */
nd_status nd_shape_check_mesh(const nd_shape *shape, const nd_mesh *mesh, int64_t micro_batch,
                              int64_t sequence);

/* What the ranks of cp exchange for attention: heads among `ulysses` of them, keys among the
 * others. */
typedef struct nd_cp_exchange {
    int ulysses;
    bool ring; /* else allgather; means nothing where ulysses is cp */
    double
        exposed_bytes; /* that a rank sends in a step and waits for at once, as a dry run counts */
} nd_cp_exchange;

enum { ND_CP_EXCHANGES_MAX = 32 };

/* Those that the model allows, from ulysses 1, allgather before ring; returns their number. */
int nd_cp_list_exchanges(const nd_shape *shape, const nd_config *config,
                         nd_cp_exchange list[ND_CP_EXCHANGES_MAX]);
/* That of the job. parallel.cp_comm auto takes the first one with the least exposed bytes. */
nd_cp_exchange nd_cp_exchange_of(const nd_shape *shape, const nd_config *config);
/* config->resolved_mesh with its ranks, and with the copies of KV heads. */
nd_mesh nd_shape_mesh(const nd_shape *shape, const nd_config *config);
/* "allgather", "ulysses", "ulysses 2, then ring"; returns buffer. */
const char *nd_cp_exchange_format(const nd_cp_exchange *exchange, const nd_mesh *mesh, char *buffer,
                                  size_t size);

/* RoPE turns so many elements of a head, the first ones. */
static inline int64_t nd_shape_rotated(const nd_shape *shape)
{
    return shape->rotated > 0 ? shape->rotated : shape->head_dim;
}

/* Whether RoPE turns the queries and keys of a layer. */
static inline bool nd_shape_turns(const nd_shape *shape, int64_t layer)
{
    return !nd_layer_set_has(&shape->unturned, layer);
}

/*
 * The residual stream is kept divided by residual_scale, so that a branch is added as it is. The
 * norms that read the stream do not see that if their eps is divided by its square; the embedding's
 * multiplier takes it in.
 */
static inline double nd_shape_stream_eps(const nd_shape *shape)
{
    const double scale = shape->residual_scale > 0 ? shape->residual_scale : 1;
    return shape->rms_eps / (scale * scale);
}
/* What multiplies a row of the table on its way into the residual stream; 1: nothing. */
static inline double nd_shape_lookup_scale(const nd_shape *shape)
{
    const double root = nd_families[shape->family].root_scale ? sqrt((double)shape->hidden) : 1;
    const double scale = shape->embedding_scale > 0 ? shape->embedding_scale : root;
    return shape->residual_scale > 0 ? scale / shape->residual_scale : scale;
}

/*
 * How many adjacent ranks of tp hold the same KV heads: 1 where each rank has its own. Meshes of
 * ranks have it too (nd_mesh.kv_copies), for the group that adds up the gradients. Copies times KV
 * heads is the least common multiple of these heads and tp. A rank's query heads see its KV heads
 * in equal shares where each KV head, taken `copies` times, is dealt to the ranks in order: rank i
 * of those with the same k heads has in place s head (i k + s) / copies of them.
 */
static inline int64_t nd_shape_kv_copies(const nd_shape *shape, int64_t tp)
{
    return tp / nd_gcd(shape->kv_heads, tp);
}

/* KV heads of each rank of tp. */
static inline int64_t nd_shape_local_kv_heads(const nd_shape *shape, int64_t tp)
{
    return shape->kv_heads / nd_gcd(shape->kv_heads, tp);
}

/* The window of a layer in sequences of up to `keys`; 0: a query sees all before it. */
int64_t nd_shape_window(const nd_shape *shape, int64_t layer, int64_t keys);

/* The number of all parameters; a tied head is counted once. */
int64_t nd_shape_parameters(const nd_shape *shape);

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
/* The same for calls of up to `tokens` rows, a multiple of tp, of any sequences: one sample of that
 * length, without context parallel. */
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
    /* Where the file has the elements that RoPE turns as adjacent pairs: how many of a head, and
     * the head's rows. Here the first elements of all pairs come first. 0: as in the file. */
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
    nd_family family;
    int shards, shard_index;
    int64_t shard_total; /* elements of all shards of this rank: length of each flat state array */
} nd_layout;

typedef struct nd_layout_options {
    const nd_shape *shape;
    const nd_mesh *mesh;
    nd_coord coord;
    const nd_stage *stages; /* of this rank; with 0 of them: one stage, the whole model */
    int stage_count;
    /* Which linears an FP8 recipe takes; NULL: none. */
    bool (*converts)(void *context, const nd_param *param);
    void *context;
} nd_layout_options;

/*
 * The options are not kept. The layout of every rank of a dp_shard_cp group is the same but for
 * shard_index; of a tp group but for row_begin, col_begin and owned.
 */
nd_status nd_layout_create(const nd_layout_options *options, nd_layout **out);
void nd_layout_destroy(nd_layout *layout);

/*
 * Numbers of parameters in the order of the whole model: embedding, blocks, head, and in a unit the
 * order of the table. A parameter's number and its name are the same on every rank, whatever its
 * stages. Numbers lie below nd_layout_numbers, and some belong to no parameter.
 */
int64_t nd_layout_numbers(const nd_layout *layout);
int64_t nd_layout_number(const nd_layout *layout, const nd_param *param);
void nd_layout_name(const nd_layout *layout, int64_t number, char name[ND_PARAM_NAME]);

/* Whether models of this shape have the parameter. */
bool nd_shape_has(const nd_shape *shape, nd_param_id id);

/* NULL: not on this rank. `layer` is -1 outside of blocks. With tied embeddings the table is in the
 * head's unit, and the parameter HEAD is EMBED. */
const nd_unit *nd_layout_unit(const nd_layout *layout, nd_unit_kind kind, int64_t layer);
const nd_param *nd_layout_param(const nd_layout *layout, nd_param_id id, int64_t layer);

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

/* How many elements of a span are adjacent in the flattened global tensor too: all, or a row. */
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

/* Ranges of the flat state arrays with their weight decay, for the optimizer; owned by the
 * caller. */
nd_status nd_layout_decay_ranges(const nd_layout *layout, nd_flat_range **out, int *count);

/* linears: those of a block, in module order */

typedef enum nd_linear {
#define ND_LINEAR(id, module, rows, cols, split, input) ND_LINEAR_##id,
#include "trainer/layout/params.def"
    ND_LINEAR_COUNT
} nd_linear;

/* What linears read: the normed input of q k v; the attention output; the normed input of gate and
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

/* How many linears read an input, and the first of them. */
int nd_input_linears(nd_input input, int *first);
/* -1: the parameter is no linear's weight. */
int nd_linear_of_param(nd_param_id id);
const char *nd_input_name(nd_input input); /* "self_attn.qkv_proj": its linears as one */
/* Out and in features: global with tp 1, else those of one of tp ranks. */
void nd_linear_sizes(const nd_shape *shape, int linear, int64_t tp, int64_t *out, int64_t *in);

#endif

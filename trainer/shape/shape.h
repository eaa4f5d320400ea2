// SPDX-License-Identifier: Apache-2.0
#ifndef ND_SHAPE_SHAPE_H
#define ND_SHAPE_SHAPE_H
/*
 * The shape of a model: its family, which family.def lists, and its numbers, as a Hugging Face
 * config.json says them. Pure data, without memory and without communication. Layer numbers are
 * global everywhere.
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/rope.h"
#include "runtime/base/math.h"
#include "runtime/base/status.h"
#include "runtime/mesh/mesh.h"

/* family */

typedef enum nd_family {
#define ND_FAMILY(id, ...) ND_FAMILY_##id,
#include "trainer/shape/family.def"
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

/* The layers of a family that have a sliding window. */
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
    /* Values of keys that are absent: */
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
/* Like nd_shape_read, but from memory; `name` stands for the text in messages. */
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

/* RoPE turns so many elements of a head, the first ones. */
static inline int64_t nd_shape_rotated(const nd_shape *shape)
{
    return shape->rotated > 0 ? shape->rotated : shape->head_dim;
}

/* Returns whether RoPE turns the queries and keys of a layer. */
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
/* Returns the factor of a row of the table on its way into the residual stream; 1: none. */
static inline double nd_shape_lookup_scale(const nd_shape *shape)
{
    const double root = nd_families[shape->family].root_scale ? sqrt((double)shape->hidden) : 1;
    const double scale = shape->embedding_scale > 0 ? shape->embedding_scale : root;
    return shape->residual_scale > 0 ? scale / shape->residual_scale : scale;
}

/*
 * The number of adjacent ranks of tp that hold the same KV heads: 1 where each rank has its own.
 * Meshes of ranks have it too (nd_mesh.kv_copies), for the group that adds up the gradients. Copies
 * times KV heads are the least common multiple of these and tp. A rank's query heads see its KV
 * heads in equal shares where each KV head, taken `copies` times, is dealt to the ranks in order:
 * rank i of those with the same k heads has in place s head (i k + s) / copies of them.
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

#endif

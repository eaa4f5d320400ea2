// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/manifest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "trainer/checkpoint/manifest_names.h"

#define NUMBER_MAX ((int64_t)1 << 40)

#define NUMBER(name, member, ...)                                                                  \
    {                                                                                              \
        name, offsetof(nd_shape, member), __VA_ARGS__                                              \
    }
#define IDLE                  .is_idle = true
#define EXTENT(name, member)  NUMBER(name, member, .least = 1, .most = NUMBER_MAX)
#define INTEGER(name, member) NUMBER(name, member, .least = -1, .most = NUMBER_MAX)
#define REAL(name, member)    NUMBER(name, member, .is_real = true)
/* These came later: older manifests lack them. */
#define SWITCH(name, member)     NUMBER(name, member, .may_lack = true, .most = 1)
#define COUNT(name, member)      NUMBER(name, member, .may_lack = true, .most = NUMBER_MAX)
#define LATER_REAL(name, member) NUMBER(name, member, .may_lack = true, .is_real = true)

const nd_shape_number nd_shape_numbers[ND_SHAPE_NUMBERS] = {
    EXTENT("vocab_size", vocab),
    EXTENT("hidden_size", hidden),
    EXTENT("intermediate_size", ffn),
    EXTENT("num_hidden_layers", layers),
    EXTENT("num_attention_heads", heads),
    EXTENT("num_key_value_heads", kv_heads),
    EXTENT("head_dim", head_dim),
    NUMBER("max_position_embeddings", max_positions, .least = 1, .most = NUMBER_MAX, IDLE),
    REAL("rms_norm_eps", rms_eps),
    NUMBER("initializer_range", init_std, .is_real = true, IDLE),
    REAL("rope_theta", rope.theta),
    REAL("rope_factor", rope.factor),
    REAL("rope_low_freq_factor", rope.low_freq_factor),
    REAL("rope_high_freq_factor", rope.high_freq_factor),
    INTEGER("rope_original_max_position_embeddings", rope.original_max_positions),
    NUMBER("bos_token_id", bos_id, .least = -1, .most = NUMBER_MAX, IDLE),
    NUMBER("eos_token_id", eos_id, .least = -1, .most = NUMBER_MAX, IDLE),
    SWITCH("qkv_bias", qkv_bias),
    SWITCH("o_bias", o_bias),
    SWITCH("mlp_bias", mlp_bias),
    NUMBER("qk_norm", qk_norm, .may_lack = true, .most = 2),
    NUMBER("post_norm", post_norm, .may_lack = true, .most = 2),
    COUNT("sliding_window", window),
    COUNT("rotated", rotated),
    LATER_REAL("rope_beta_fast", rope.beta_fast),
    LATER_REAL("rope_beta_slow", rope.beta_slow),
    LATER_REAL("rope_attention_factor", rope.attention_factor),
    SWITCH("rope_exact_range", rope.exact_range),
    LATER_REAL("llama_4_scaling_beta", rope.query_beta),
    LATER_REAL("embedding_multiplier", embedding_scale),
    LATER_REAL("residual_multiplier", residual_scale),
    LATER_REAL("attention_multiplier", attention_scale),
    LATER_REAL("logits_scaling", logits_divisor),
    LATER_REAL("sliding_rope_theta", window_theta),
};
const nd_shape_layers nd_shape_layer_sets[ND_SHAPE_LAYER_SETS] = {
    {"full_attention_layers", offsetof(nd_shape, full)},
    {"layers_without_rope", offsetof(nd_shape, unturned)},
};
const char *const nd_segment_names[ND_SEGMENT_COUNT] = {"hp", "fp8"};

void nd_manifest_pairs_fini(nd_manifest_pairs *pairs)
{
    for (int i = 0; i < pairs->count; i++) {
        free(pairs->list[i].key);
        free(pairs->list[i].value);
    }
    free(pairs->list);
    *pairs = (nd_manifest_pairs){0};
}

void nd_manifest_fini(nd_manifest *manifest)
{
    nd_manifest_pairs_fini(&manifest->identity);
    nd_manifest_pairs_fini(&manifest->config);
    nd_layout_destroy(manifest->layout);
    free(manifest->writers);
    *manifest = (nd_manifest){0};
}

nd_status nd_manifest_pairs_add(nd_manifest_pairs *pairs, const char *key, const char *value)
{
    if (pairs->count == pairs->capacity) {
        int capacity = pairs->capacity ? 2 * pairs->capacity : 16;
        void *list = realloc(pairs->list, (size_t)capacity * sizeof *pairs->list);
        if (!list) {
            return nd_fail_memory("a manifest");
        }
        pairs->list = list;
        pairs->capacity = capacity;
    }
    nd_manifest_pair pair = {0};
    ND_TRY(nd_fs_format(&pair.key, "%s", key));
    nd_status status = nd_fs_format(&pair.value, "%s", value);
    if (status != ND_OK) {
        free(pair.key);
        return status;
    }
    pairs->list[pairs->count++] = pair;
    return ND_OK;
}

const char *nd_manifest_pairs_find(const nd_manifest_pairs *pairs, const char *key)
{
    for (int i = 0; i < pairs->count; i++) {
        if (strcmp(pairs->list[i].key, key) == 0) {
            return pairs->list[i].value;
        }
    }
    return NULL;
}

static bool is_in_fp8_segment(void *layout, const nd_param *param)
{
    const nd_param *own = nd_layout_param(layout, param->id, param->layer);
    return own && own->segment == ND_SEGMENT_FP8;
}

static nd_status layout_like(const nd_shape *shape, const nd_mesh *mesh, nd_coord coord,
                             const nd_layout *segments, nd_layout **out)
{
    const nd_layout_options options = {.shape = shape,
                                       .mesh = mesh,
                                       .coord = coord,
                                       .converts = is_in_fp8_segment,
                                       .context = (void *)segments};
    return nd_layout_create(&options, out);
}

nd_status nd_manifest_set_layout(nd_manifest *manifest, const nd_layout *layout)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    return layout_like(&manifest->shape, &one, (nd_coord){{0}}, layout, &manifest->layout);
}

nd_status nd_manifest_layout(const nd_manifest *manifest, const nd_mesh *mesh, nd_coord coord,
                             nd_layout **out)
{
    return layout_like(&manifest->shape, mesh, coord, manifest->layout, out);
}

static double shape_value(const nd_shape *shape, const nd_shape_number *number)
{
    const char *at = (const char *)shape + number->offset;
    return number->is_real ? *(const double *)(const void *)at
                           : (double)*(const int64_t *)(const void *)at;
}

void nd_shape_print(const nd_shape *shape, FILE *text)
{
    fprintf(text, "%s %d %d\n", nd_families[shape->family].model_type, shape->tied,
            (int)shape->rope.type);
    for (int i = 0; i < ND_SHAPE_NUMBERS; i++) {
        const nd_shape_number *n = &nd_shape_numbers[i];
        const char *at = (const char *)shape + n->offset;
        n->is_real ? fprintf(text, "%s %a\n", n->name, *(const double *)at)
                   : fprintf(text, "%s %lld\n", n->name, (long long)*(const int64_t *)at);
    }
    for (int i = 0; i < ND_SHAPE_LAYER_SETS; i++) {
        const nd_layer_set *set = nd_shape_layers_of(shape, i);
        for (int64_t l = 0; l < shape->layers; l++) {
            nd_layer_set_has(set, l)
                ? fprintf(text, "%s %lld\n", nd_shape_layer_sets[i].name, (long long)l)
                : 0;
        }
    }
    for (int64_t i = 0; i < shape->more_end_count; i++) {
        fprintf(text, "end %d\n", (int)shape->more_ends[i]);
    }
    for (int64_t i = 0; shape->rope.type == ND_ROPE_LONGROPE && i < ND_ROPE_LONG_PAIRS; i++) {
        fprintf(text, "%a %a\n", (double)shape->rope.short_factor[i],
                (double)shape->rope.long_factor[i]);
    }
}

nd_status nd_shape_compare(const nd_shape *a, const char *name_a, const nd_shape *b,
                           const char *name_b)
{
    if (a->family != b->family) {
        return nd_fail(
            ND_ERR_CONFIG, "%s has model_type %s, and %s has %s; these are different models",
            name_a, nd_families[a->family].model_type, name_b, nd_families[b->family].model_type);
    }
    for (int i = 0; i < ND_SHAPE_NUMBERS; i++) {
        const nd_shape_number *number = &nd_shape_numbers[i];
        double x = shape_value(a, number), y = shape_value(b, number);
        if (x != y && !number->is_idle) {
            return nd_fail(ND_ERR_CONFIG,
                           "%s has %s %.10g, and %s has %.10g; these are different models", name_a,
                           number->name, x, name_b, y);
        }
    }
    for (int i = 0; i < ND_SHAPE_LAYER_SETS; i++) {
        if (memcmp(nd_shape_layers_of(a, i), nd_shape_layers_of(b, i), sizeof a->full) != 0) {
            return nd_fail(ND_ERR_CONFIG, "%s has other %s than %s; these are different models",
                           name_a, nd_shape_layer_sets[i].name, name_b);
        }
    }
    if (a->rope.type != b->rope.type) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s has rope_type %s, and %s has %s; these are different models", name_a,
                       nd_rope_type_name(a->rope.type), name_b, nd_rope_type_name(b->rope.type));
    }
    const size_t factors = sizeof a->rope.short_factor;
    if (memcmp(a->rope.short_factor, b->rope.short_factor, factors) != 0 ||
        memcmp(a->rope.long_factor, b->rope.long_factor, factors) != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s has another short_factor or long_factor of RoPE than %s; these are "
                       "different models",
                       name_a, name_b);
    }
    if (a->tied != b->tied) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s has tie_word_embeddings %s, and %s has %s; these are different models",
                       name_a, a->tied ? "true" : "false", name_b, b->tied ? "true" : "false");
    }
    return ND_OK;
}

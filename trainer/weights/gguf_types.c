// SPDX-License-Identifier: Apache-2.0
#include "trainer/weights/gguf.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Types. */

static float half_at(const uint8_t *at)
{
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return nd_f16_to_f32(half);
}

static void load_f32(const uint8_t *block, float *values)
{
    memcpy(values, block, sizeof *values);
}

static void load_f16(const uint8_t *block, float *values)
{
    *values = half_at(block);
}

static void load_bf16(const uint8_t *block, float *values)
{
    nd_bf16 code;
    memcpy(&code, block, sizeof code);
    *values = nd_bf16_to_f32(code);
}

/* A scale, and 32 integers of 8 bits. */
static void load_q8_0(const uint8_t *block, float *values)
{
    const float scale = half_at(block);
    for (int i = 0; i < 32; i++) {
        values[i] = (float)(int8_t)block[2 + i] * scale;
    }
}

/* A scale, and 32 integers of 4 bits: the low halves of 16 bytes, then the high ones. */
static void load_q4_0(const uint8_t *block, float *values)
{
    const float scale = half_at(block);
    for (int i = 0; i < 32; i++) {
        values[i] = scale * (float)((block[2 + i % 16] >> i / 16 * 4 & 15) - 8);
    }
}

/* The same with an offset behind the scale. */
static void load_q4_1(const uint8_t *block, float *values)
{
    const float scale = half_at(block), offset = half_at(block + 2);
    for (int i = 0; i < 32; i++) {
        values[i] = scale * (float)(block[4 + i % 16] >> i / 16 * 4 & 15) + offset;
    }
}

/* A scale of scales and one of offsets, eight of each in 6 bits, then eight times 32 integers of
 * 4 bits: the low halves of 32 bytes, then the high ones. The last four scales and offsets have
 * their upper bits above those of the first four. */
static void load_q4_k(const uint8_t *block, float *values)
{
    for (int s = 0; s < 8; s++) {
        const uint8_t *low = block + 4 + s % 4, *high = low + 4, *rest = low + 8;
        const int scale = s < 4 ? *low & 63 : (*rest & 15) | (*low >> 2 & 48);
        const int offset = s < 4 ? *high & 63 : *rest >> 4 | (*high >> 2 & 48);
        const float times = half_at(block) * (float)scale;
        const float less = half_at(block + 2) * (float)offset;
        for (int i = 0; i < 32; i++) {
            values[32 * s + i] =
                times * (float)(block[16 + s / 2 * 32 + i] >> s % 2 * 4 & 15) - less;
        }
    }
}

/* 256 integers of 6 bits, as 4 low and 2 high ones, sixteen scales of 8 bits, and a scale of
 * those. */
static void load_q6_k(const uint8_t *block, float *values)
{
    const float all = half_at(block + 208);
    for (int i = 0; i < 256; i++) {
        const int half = i / 128, part = i % 128 / 32, at = i % 32; /* half: of the block */
        const int low = block[64 * half + part % 2 * 32 + at] >> part / 2 * 4 & 15;
        const int high = block[128 + 32 * half + at] >> part * 2 & 3;
        const float scale = all * (float)(int8_t)block[192 + i / 16];
        values[i] = scale * (float)((low | high << 4) - 32);
    }
}

static bool store_f32(const float *value, uint8_t *out)
{
    memcpy(out, value, sizeof *value);
    return true;
}

static bool store_bf16(const float *value, uint8_t *out)
{
    const nd_bf16 code = nd_bf16_from_f32(*value);
    memcpy(out, &code, sizeof code);
    return true;
}

/* The nearest, ties to even. */
static bool store_f16(const float *value, uint8_t *out)
{
    uint32_t bits;
    memcpy(&bits, value, sizeof bits);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    const uint32_t code = magnitude < 0x38800000 /* below 2^-14: a multiple of 2^-24 */
                              ? (uint32_t)lrintf(fabsf(*value) * 0x1p24f)
                              : (rounded >> 13) - (112 << 10);
    const uint16_t f16 = (uint16_t)((bits >> 16 & 0x8000) | code);
    memcpy(out, &f16, sizeof f16);
    return rounded < 0x47800000;
}

/* The scale is the greatest magnitude / 127; quotients are rounded to the nearest, halves away from
 * zero. */
static bool store_q8_0(const float *values, uint8_t *out)
{
    float largest = 0;
    for (int i = 0; i < 32; i++) {
        if (!isfinite(values[i])) {
            return false;
        }
        largest = fmaxf(largest, fabsf(values[i]));
    }
    const float scale = largest / 127, factor = scale >= FLT_MIN ? 1 / scale : 0;
    for (int i = 0; i < 32; i++) {
        out[2 + i] = (uint8_t)(int8_t)roundf(values[i] * factor);
    }
    return store_f16(&scale, out);
}

const char *nd_gguf_type_name(int64_t type)
{
    static const char *const names[] = {
        [0] = "F32",     [1] = "F16",      [2] = "Q4_0",   [3] = "Q4_1",    [6] = "Q5_0",
        [7] = "Q5_1",    [8] = "Q8_0",     [9] = "Q8_1",   [10] = "Q2_K",   [11] = "Q3_K",
        [12] = "Q4_K",   [13] = "Q5_K",    [14] = "Q6_K",  [15] = "Q8_K",   [16] = "IQ2_XXS",
        [17] = "IQ2_XS", [18] = "IQ3_XXS", [19] = "IQ1_S", [20] = "IQ4_NL", [21] = "IQ3_S",
        [22] = "IQ2_S",  [23] = "IQ4_XS",  [28] = "F64",   [29] = "IQ1_M",  [30] = "BF16",
        [34] = "TQ1_0",  [35] = "TQ2_0",   [39] = "MXFP4"};
    const bool known = type < (int64_t)(sizeof names / sizeof *names) && names[type];
    return known ? names[type] : "unknown";
}

const nd_gguf_type nd_gguf_types[ND_GGUF_TYPES] = {
    [ND_GGUF_FP32] = {1, 4, load_f32, store_f32, 0},
    [ND_GGUF_FP16] = {1, 2, load_f16, store_f16, 1},
    [2] = {32, 18, load_q4_0},
    [3] = {32, 20, load_q4_1},
    [ND_GGUF_Q8_0] = {32, 34, load_q8_0, store_q8_0, 7},
    [12] = {256, 144, load_q4_k},
    [14] = {256, 210, load_q6_k},
    [ND_GGUF_BF16] = {1, 2, load_bf16, store_bf16, 32},
};

/* Keys and names. */

bool nd_gguf_has_family(nd_family family)
{
    return family == ND_FAMILY_LLAMA || family == ND_FAMILY_QWEN2 || family == ND_FAMILY_QWEN3;
}

#define KEY(kind, key, member, config, needed)                                                     \
    {                                                                                              \
        key, ND_GGUF_##kind, offsetof(nd_shape, member), config, needed                            \
    }
const nd_gguf_key nd_gguf_keys[ND_GGUF_KEYS] = {
    KEY(U32, ".vocab_size", vocab, "vocab_size", false),
    KEY(U32, ".context_length", max_positions, "max_position_embeddings", true),
    KEY(U32, ".embedding_length", hidden, "hidden_size", true),
    KEY(U32, ".block_count", layers, "num_hidden_layers", true),
    KEY(U32, ".feed_forward_length", ffn, "intermediate_size", true),
    KEY(U32, ".attention.head_count", heads, "num_attention_heads", true),
    KEY(U32, ".attention.head_count_kv", kv_heads, "num_key_value_heads", false),
    KEY(U32, ".attention.key_length", head_dim, "head_dim", false),
    KEY(U32, ".attention.value_length", head_dim, NULL, false),
    KEY(U32, ".rope.dimension_count", head_dim, NULL, false),
    KEY(F32, ".attention.layer_norm_rms_epsilon", rms_eps, "rms_norm_eps", true),
    KEY(F32, ".rope.freq_base", rope.theta, "rope_theta", false),
    KEY(U32, "tokenizer.ggml.bos_token_id", bos_id, "bos_token_id", false),
    KEY(U32, "tokenizer.ggml.eos_token_id", eos_id, "eos_token_id", false),
};

const nd_gguf_splitting nd_gguf_splittings[ND_GGUF_SPLITTINGS] = {
    {"gpt-2", 1, {ND_SPLIT_GPT2}, false}, /* also of bytes without merges */
    {"llama-bpe", 1, {ND_SPLIT_LLAMA3}, true},
    {"qwen2", 1, {ND_SPLIT_QWEN2}, false},
    {"smollm", 2, {ND_SPLIT_EACH_DIGIT, ND_SPLIT_GPT2}, false},
};

/* Of all parameters that these families have. */
static const char *const parts[ND_PARAM_COUNT] = {
    [ND_PARAM_EMBED] = "token_embd.weight",   [ND_PARAM_NORM_1] = "attn_norm.weight",
    [ND_PARAM_Q] = "attn_q.weight",           [ND_PARAM_K] = "attn_k.weight",
    [ND_PARAM_V] = "attn_v.weight",           [ND_PARAM_O] = "attn_output.weight",
    [ND_PARAM_NORM_2] = "ffn_norm.weight",    [ND_PARAM_GATE] = "ffn_gate.weight",
    [ND_PARAM_UP] = "ffn_up.weight",          [ND_PARAM_DOWN] = "ffn_down.weight",
    [ND_PARAM_NORM_F] = "output_norm.weight", [ND_PARAM_HEAD] = "output.weight",
    [ND_PARAM_Q_BIAS] = "attn_q.bias",        [ND_PARAM_K_BIAS] = "attn_k.bias",
    [ND_PARAM_V_BIAS] = "attn_v.bias",        [ND_PARAM_O_BIAS] = "attn_output.bias",
    [ND_PARAM_GATE_BIAS] = "ffn_gate.bias",   [ND_PARAM_UP_BIAS] = "ffn_up.bias",
    [ND_PARAM_DOWN_BIAS] = "ffn_down.bias",   [ND_PARAM_NORM_Q] = "attn_q_norm.weight",
    [ND_PARAM_NORM_K] = "attn_k_norm.weight",
};

void nd_gguf_name(const nd_param *param, char name[ND_PARAM_NAME])
{
    const char *part = parts[param->id];
    ND_ASSERT(part);
    if (param->layer < 0) {
        snprintf(name, ND_PARAM_NAME, "%s", part);
    } else {
        snprintf(name, ND_PARAM_NAME, "blk.%lld.%s", (long long)param->layer, part);
    }
}

nd_status nd_gguf_layout(const nd_shape *shape, nd_layout **out)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    ND_TRY(nd_layout_create(&(nd_layout_options){.shape = shape, .mesh = &one}, out));
    for (int i = 0; i < (*out)->param_count && shape->family == ND_FAMILY_LLAMA; i++) {
        nd_param *p = &(*out)->params[i];
        if (p->id == ND_PARAM_Q || p->id == ND_PARAM_K || p->id == ND_PARAM_Q_BIAS ||
            p->id == ND_PARAM_K_BIAS) {
            p->paired = p->head_rows = shape->head_dim;
        }
    }
    return ND_OK;
}

float nd_gguf_factor(const nd_rope_config *rope, int64_t head_dim, int64_t pair)
{
    const nd_rope_config plain = {.theta = rope->theta};
    return (float)(nd_rope_frequency(&plain, head_dim, pair) /
                   nd_rope_frequency(rope, head_dim, pair));
}

nd_status nd_gguf_refuse(const nd_gguf *g, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return nd_fail(ND_ERR_DATA, "\"%s\": %s", g->path, text);
}

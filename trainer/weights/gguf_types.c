// SPDX-License-Identifier: Apache-2.0
#include "trainer/weights/gguf.h"

#include <float.h>
#include <math.h>
#include <string.h>

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

/* A scale, an offset, and 32 integers of 4 bits in the order of load_q4_0. */
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

nd_status nd_gguf_read(int fd, const char *path, const nd_safetensors_tensor *t, int64_t head_dim,
                       int64_t begin, int64_t count, float *out)
{
    enum { BYTES = 1 << 15 };
    const nd_gguf_type *type = &nd_gguf_types[t->number % ND_GGUF_TURNED];
    const int64_t turned = t->number >= ND_GGUF_TURNED ? head_dim : 0, block = type->block;
    const nd_param param = {.rows = t->shape[0],
                            .cols = t->axes > 1 ? t->shape[1] : 1,
                            .paired = turned,
                            .head_rows = turned};
    uint8_t bytes[BYTES];
    float part[ND_GGUF_BLOCK_MAX];
    for (int64_t left = 0, n = 0; count > 0; count -= n, begin += n) {
        const int64_t place = nd_param_in_file(&param, begin), first = place / block;
        int64_t at = place % block; /* in the first block */
        n = nd_min(nd_min(nd_param_adjacent(&param, begin), count),
                   BYTES / type->bytes * block - at);
        const int64_t blocks = (at + n + block - 1) / block;
        ND_TRY(nd_fs_pread(fd, path, bytes, (size_t)(blocks * type->bytes),
                           (int64_t)t->begin + first * type->bytes));
        left = n;
        for (int64_t b = 0, k = 0; b < blocks; b++, left -= k, out += k, at = 0) {
            k = nd_min(left, block - at);
            type->load(bytes + b * type->bytes, k < block ? part : out);
            if (k < block) {
                memcpy(out, part + at, (size_t)k * sizeof *part);
            }
        }
    }
    return ND_OK;
}

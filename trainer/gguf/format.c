// SPDX-License-Identifier: Apache-2.0
#include <float.h>
#include <math.h>
#include <string.h>

#include "runtime/tensor/dtype.h"
#include "trainer/gguf/gguf.h"

enum { BLOCK = 32, BLOCK_BYTES = 2 + BLOCK };

int64_t nd_gguf_bytes(nd_gguf_type type, int64_t count)
{
    switch (type) {
    case ND_GGUF_F32:
        return count * 4;
    case ND_GGUF_Q8_0:
        return count / BLOCK * BLOCK_BYTES;
    default:
        return count * 2;
    }
}

/* The nearest F16, ties to even. A magnitude beyond 65504 becomes infinity. */
static uint16_t f16_from_f32(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return sign | 0x7e00;
    }
    if (magnitude < 0x38800000) { /* below 2^-14: a multiple of 2^-24 */
        return sign | (uint16_t)lrintf(fabsf(f) * 0x1p24f);
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return sign | (rounded >= 0x47800000 ? 0x7c00 : (uint16_t)((rounded >> 13) - (112 << 10)));
}

static bool store_f16(const float *values, int64_t count, uint8_t *out)
{
    bool held = true;
    for (int64_t i = 0; i < count; i++) {
        const uint16_t code = f16_from_f32(values[i]);
        held &= (code & 0x7c00) != 0x7c00;
        memcpy(out + 2 * i, &code, sizeof code);
    }
    return held;
}

static bool store_block(const float *values, uint8_t *out)
{
    float largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        if (!isfinite(values[i])) {
            return false;
        }
        largest = fmaxf(largest, fabsf(values[i]));
    }
    const float scale = largest / 127, factor = scale >= FLT_MIN ? 1 / scale : 0;
    const bool held = store_f16(&scale, 1, out);
    for (int i = 0; i < BLOCK; i++) {
        out[2 + i] = (uint8_t)(int8_t)roundf(values[i] * factor);
    }
    return held;
}

bool nd_gguf_store(nd_gguf_type type, const float *values, int64_t count, void *out)
{
    uint8_t *to = out;
    bool held = true;
    switch (type) {
    case ND_GGUF_F32:
        memcpy(to, values, (size_t)count * sizeof *values);
        break;
    case ND_GGUF_F16:
        return store_f16(values, count, to);
    case ND_GGUF_BF16:
        for (int64_t i = 0; i < count; i++) {
            const nd_bf16 code = nd_bf16_from_f32(values[i]);
            memcpy(to + 2 * i, &code, sizeof code);
        }
        break;
    case ND_GGUF_Q8_0:
        for (int64_t i = 0; i < count / BLOCK; i++) {
            held = store_block(values + i * BLOCK, to + i * BLOCK_BYTES) && held;
        }
        break;
    }
    return held;
}

void nd_gguf_put(nd_gguf *file, uint64_t number, size_t bytes)
{
    fwrite(&number, bytes, 1, file->out);
}

void nd_gguf_put_text(nd_gguf *file, const char *text, size_t size)
{
    nd_gguf_put(file, size, 8);
    fwrite(text, 1, size, file->out);
}

static void begin_key(nd_gguf *file, const char *key, nd_gguf_kind kind)
{
    const char *family = *key == '.' ? file->family : "";
    nd_gguf_put(file, strlen(family) + strlen(key), 8);
    fprintf(file->out, "%s%s", family, key);
    nd_gguf_put(file, kind, 4);
    file->keys++;
}

void nd_gguf_u32(nd_gguf *file, const char *key, uint32_t value)
{
    begin_key(file, key, ND_GGUF_KIND_U32);
    nd_gguf_put(file, value, 4);
}

void nd_gguf_f32(nd_gguf *file, const char *key, double value)
{
    const float f32 = (float)value;
    begin_key(file, key, ND_GGUF_KIND_F32);
    fwrite(&f32, sizeof f32, 1, file->out);
}

void nd_gguf_flag(nd_gguf *file, const char *key, bool value)
{
    begin_key(file, key, ND_GGUF_KIND_FLAG);
    nd_gguf_put(file, value, 1);
}

void nd_gguf_text(nd_gguf *file, const char *key, const char *text)
{
    begin_key(file, key, ND_GGUF_KIND_TEXT);
    nd_gguf_put_text(file, text, strlen(text));
}

void nd_gguf_array(nd_gguf *file, const char *key, nd_gguf_kind kind, size_t count)
{
    begin_key(file, key, ND_GGUF_KIND_ARRAY);
    nd_gguf_put(file, kind, 4);
    nd_gguf_put(file, count, 8);
}

// SPDX-License-Identifier: Apache-2.0
#define ND_AMX_EMULATED
#include "kernels/cpu/amx.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "runtime/tensor/dtype.h"

enum { WORDS = ND_AMX_ROW_BYTES / 4 };

typedef struct tile {
    int rows, row_bytes;
    unsigned char bytes[ND_AMX_ROWS][ND_AMX_ROW_BYTES];
} tile;

static _Thread_local struct {
    bool configured;
    tile tiles[ND_AMX_TILES];
} unit;

static tile *tile_of(int number)
{
    ND_ASSERT(unit.configured && number >= 0 && number < ND_AMX_TILES);
    tile *t = &unit.tiles[number];
    ND_ASSERT(t->rows > 0);
    return t;
}

void nd_amx_configure(const nd_amx_config *config)
{
    static const uint8_t none[sizeof config->reserved] = {0};
    ND_ASSERT(config->palette == 1 && config->start_row == 0);
    ND_ASSERT(memcmp(config->reserved, none, sizeof none) == 0);
    for (int i = 0; i < ND_AMX_ROWS; i++) {
        ND_ASSERT(config->rows[i] <= ND_AMX_ROWS && config->row_bytes[i] <= ND_AMX_ROW_BYTES);
        ND_ASSERT((config->rows[i] == 0) == (config->row_bytes[i] == 0));
        ND_ASSERT(i < ND_AMX_TILES || config->rows[i] == 0);
    }
    memset(&unit, 0, sizeof unit);
    unit.configured = true;
    for (int i = 0; i < ND_AMX_TILES; i++) {
        unit.tiles[i].rows = config->rows[i];
        unit.tiles[i].row_bytes = config->row_bytes[i];
    }
}

void nd_amx_release(void)
{
    memset(&unit, 0, sizeof unit);
}

void nd_amx_zero(int number)
{
    tile *t = tile_of(number);
    memset(t->bytes, 0, sizeof t->bytes);
}

void nd_amx_load(int number, const void *from, int64_t stride)
{
    tile *t = tile_of(number);
    memset(t->bytes, 0, sizeof t->bytes);
    for (int i = 0; i < t->rows; i++) {
        memcpy(t->bytes[i], (const char *)from + i * stride, (size_t)t->row_bytes);
    }
}

void nd_amx_store(int number, void *to, int64_t stride)
{
    const tile *t = tile_of(number);
    for (int i = 0; i < t->rows; i++) {
        memcpy((char *)to + i * stride, t->bytes[i], (size_t)t->row_bytes);
    }
}

/* x rounded to F32 as an unlimited range of exponents would have it, with what is then subnormal
 * taken for zero. */
static inline float round_and_flush(double x)
{
    const double least = 0x1p-126 - 0x1p-151; /* this and what is above rounds to 2^-126 or more */
    return x < least && x > -least ? copysignf(0.0f, (float)x) : (float)x;
}

static inline float flushed(float x)
{
    return x < 0x1p-126f && x > -0x1p-126f ? copysignf(0.0f, x) : x;
}

static inline float half_of(uint32_t word, int odd)
{
    return flushed(nd_bf16_to_f32((nd_bf16)(odd ? word >> 16 : word & 0xffff)));
}

/*
 * One half of the pairs: sums[n] = sum over k of a[k] b[k][n], from zero. An F32 plus a product of
 * two BF16 in F64, then rounded to F32, is the exact sum rounded once: the product has 16
 * significant bits, so either the sum fits the 53 bits of an F64, or the smaller term is below what
 * rounds in F32.
 */
static void add_products(float sums[WORDS], const float a[WORDS], float b[ND_AMX_ROWS][WORDS],
                         int words)
{
    for (int n = 0; n < WORDS; n++) {
        sums[n] = 0.0f;
    }
    for (int k = 0; k < words; k++) {
        for (int n = 0; n < WORDS; n++) {
            sums[n] = round_and_flush((double)a[k] * (double)b[k][n] + (double)sums[n]);
        }
    }
}

void nd_amx_multiply(int c_number, int a_number, int b_number)
{
    tile *c = tile_of(c_number);
    const tile *a = tile_of(a_number), *b = tile_of(b_number);
    const int words = a->row_bytes / 4;
    float halves[2][ND_AMX_ROWS][WORDS] = {0};
    ND_ASSERT(c_number != a_number && c_number != b_number && a_number != b_number);
    ND_ASSERT(a->row_bytes % 4 == 0 && c->row_bytes % 4 == 0);
    ND_ASSERT(c->rows == a->rows && c->row_bytes == b->row_bytes && words == b->rows);
    for (int k = 0; k < b->rows; k++) {
        uint32_t row[WORDS];
        memcpy(row, b->bytes[k], sizeof row);
        for (int n = 0; n < WORDS; n++) {
            halves[0][k][n] = half_of(row[n], 0);
            halves[1][k][n] = half_of(row[n], 1);
        }
    }
    for (int m = 0; m < c->rows; m++) {
        uint32_t row[WORDS];
        float own[2][WORDS], even[WORDS], odd[WORDS], sums[WORDS];
        memcpy(row, a->bytes[m], sizeof row);
        memcpy(sums, c->bytes[m], sizeof sums);
        for (int k = 0; k < WORDS; k++) {
            own[0][k] = half_of(row[k], 0);
            own[1][k] = half_of(row[k], 1);
        }
        add_products(even, own[0], halves[0], words);
        add_products(odd, own[1], halves[1], words);
        for (int n = 0; n < c->row_bytes / 4; n++) {
            const float both = round_and_flush((double)even[n] + (double)odd[n]);
            sums[n] = round_and_flush((double)flushed(sums[n]) + (double)both);
        }
        memcpy(c->bytes[m], sums, (size_t)c->row_bytes);
    }
}

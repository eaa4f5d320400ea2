// SPDX-License-Identifier: Apache-2.0
/* Compiled for CPUs that have AMX, and with ND_AMX_EMULATED: see meson.build. */
#include "tests/bench/peak_loops.h"

#include "kernels/cpu/amx.h"
#include "runtime/tensor/dtype.h"

enum { SUMS = 4, WORDS = ND_AMX_ROW_BYTES / 4, PRODUCTS = 2 * WORDS };

/* Tiles 0 to 3 are sums, 4 and 5 the left operands, 6 and 7 the right ones, as in a product of two
 * by two tiles. */
static void configure(void)
{
    nd_amx_config config = {.palette = 1};
    for (int i = 0; i < ND_AMX_TILES; i++) {
        config.rows[i] = ND_AMX_ROWS;
        config.row_bytes[i] = ND_AMX_ROW_BYTES;
    }
    nd_amx_configure(&config);
}

static void fill(uint32_t tile[ND_AMX_ROWS][WORDS], float x)
{
    const uint32_t half = nd_bf16_from_f32(x);
    for (int i = 0; i < ND_AMX_ROWS * WORDS; i++) {
        tile[i / WORDS][i % WORDS] = half << 16 | half;
    }
}

static bool is_all(float tile[ND_AMX_ROWS][WORDS], float x)
{
    bool right = true;
    for (int i = 0; i < ND_AMX_ROWS * WORDS; i++) {
        right = right && tile[i / WORDS][i % WORDS] == x;
    }
    return right;
}

static bool run(int64_t steps)
{
    const float expected = (float)steps * (float)PRODUCTS * 1.5f * 1.25f;
    uint32_t a[ND_AMX_ROWS][WORDS], b[ND_AMX_ROWS][WORDS];
    float sums[SUMS][ND_AMX_ROWS][WORDS];
    bool right = true;
    fill(a, 1.5f);
    fill(b, 1.25f);
    configure(); /* sums are zero */
    nd_amx_load(4, a, ND_AMX_ROW_BYTES);
    nd_amx_load(5, a, ND_AMX_ROW_BYTES);
    nd_amx_load(6, b, ND_AMX_ROW_BYTES);
    nd_amx_load(7, b, ND_AMX_ROW_BYTES);
    for (int64_t s = 0; s < steps; s++) {
        nd_amx_multiply(0, 4, 6);
        nd_amx_multiply(1, 4, 7);
        nd_amx_multiply(2, 5, 6);
        nd_amx_multiply(3, 5, 7);
    }
    nd_amx_store(0, sums[0], ND_AMX_ROW_BYTES);
    nd_amx_store(1, sums[1], ND_AMX_ROW_BYTES);
    nd_amx_store(2, sums[2], ND_AMX_ROW_BYTES);
    nd_amx_store(3, sums[3], ND_AMX_ROW_BYTES);
    nd_amx_release();
    for (int i = 0; i < SUMS; i++) {
        right = right && is_all(sums[i], expected);
    }
    return right;
}

#ifdef ND_AMX_EMULATED
const nd_peak_products nd_peak_bf16_amx_emulated = {
    .instruction = "TDPBF16PS in C",
#else
const nd_peak_products nd_peak_bf16_amx = {
    .instruction = "TDPBF16PS",
    .cycle_flops = 2.0 * ND_AMX_ROWS * WORDS * PRODUCTS / 16.0,
#endif
    .step_flops = 2.0 * SUMS * ND_AMX_ROWS * WORDS * PRODUCTS,
    .run = run,
};

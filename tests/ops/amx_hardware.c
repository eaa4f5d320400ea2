// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/amx.h"
#include "tests/ops/amx_products.h"

void nd_configure_tiles_in_hardware(void)
{
    nd_amx_configure(&(nd_amx_config){.palette = 1});
}

bool nd_tiles_are_in_use(void)
{
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
    return low >> 17 & 1; /* whether tiles are configured */
}

void nd_multiply_tiles_in_hardware(float c[16][16], const uint32_t a[16][16],
                                   const uint32_t b[16][16], int rows, int columns, int words)
{
    const nd_amx_config config = {
        .palette = 1,
        .row_bytes = {(uint16_t)(4 * columns), (uint16_t)(4 * words), (uint16_t)(4 * columns)},
        .rows = {(uint8_t)rows, (uint8_t)rows, (uint8_t)words}};
    nd_amx_configure(&config);
    nd_amx_load(0, c, 64);
    nd_amx_load(1, a, 64);
    nd_amx_load(2, b, 64);
    nd_amx_multiply(0, 1, 2);
    nd_amx_store(0, c, 64);
    nd_amx_release();
}

// SPDX-License-Identifier: Apache-2.0
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
    nd_multiply_tiles(c, a, b, rows, columns, words);
}

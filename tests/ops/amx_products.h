// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_OPS_AMX_PRODUCTS_H
#define ND_TESTS_OPS_AMX_PRODUCTS_H
#include "kernels/cpu/amx.h"

/* By the tiles of the file that includes this (kernels/cpu/amx.h): c (rows, columns) F32 +=
 * a (rows, words) b (words, columns), words being pairs of BF16; all with rows of 16 words. */
static inline void nd_multiply_tiles(float c[16][16], const uint32_t a[16][16],
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

/* The tiles of the CPU, through its instructions (amx_hardware.c). The CPU has them, and this
 * process may use them. */

void nd_multiply_tiles_in_hardware(float c[16][16], const uint32_t a[16][16],
                                   const uint32_t b[16][16], int rows, int columns, int words);

/* For this thread, without any extents of tiles. */
void nd_configure_tiles_in_hardware(void);

/* Returns whether tiles of this thread are configured and not released, as XGETBV says. */
bool nd_tiles_are_in_use(void);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_OPS_AMX_PRODUCTS_H
#define ND_TESTS_OPS_AMX_PRODUCTS_H
/* The tiles of the CPU, through its instructions (amx_hardware.c). The CPU has them, and this
 * process may use them. */
#include <stdbool.h>
#include <stdint.h>

/* c (rows, columns) F32 += a (rows, words) b (words, columns), words being pairs of BF16; all with
 * rows of 16 words. */
void nd_multiply_tiles_in_hardware(float c[16][16], const uint32_t a[16][16],
                                   const uint32_t b[16][16], int rows, int columns, int words);

/* For this thread, without any extents of tiles. */
void nd_configure_tiles_in_hardware(void);

/* Whether tiles of this thread are configured and not released, as XGETBV says. */
bool nd_tiles_are_in_use(void);

#endif

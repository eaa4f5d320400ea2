// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_OPS_AMX_PRODUCTS_H
#define ND_TESTS_OPS_AMX_PRODUCTS_H
/* One product of tiles, through the instructions of the CPU (amx_hardware.c). */
#include <stdint.h>

/* c (rows, columns) F32 += a (rows, words) b (words, columns), words being pairs of BF16; all with
 * rows of 16 words. The CPU has the instructions, and the process may use them. */
void nd_multiply_tiles_in_hardware(float c[16][16], const uint32_t a[16][16],
                                   const uint32_t b[16][16], int rows, int columns, int words);

#endif

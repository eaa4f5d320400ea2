// SPDX-License-Identifier: Apache-2.0
/* nd_tile_gemm_amx_stand_in and its companions: the products of stand_in_tiles.c. */
#include "tests/bench/stand_in_loops.h"

void nd_tile_begin_amx_stand_in(void);
void nd_tile_end_amx_stand_in(void);
void nd_tile_gemm_amx_stand_in(int m, int n, int words, const uint32_t *a, int64_t lda,
                               const uint32_t *b, int64_t ldb, float *c, int64_t ldc, _Bool add);

#include "kernels/cpu/tile_amx.c"

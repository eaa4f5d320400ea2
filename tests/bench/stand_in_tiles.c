// SPDX-License-Identifier: Apache-2.0
/* nd_tiles_bf16_stand_in: attention on tiles, timed without tiles. */
#include "tests/bench/stand_in_loops.h"

/* With these names tile_kernels.c defines a table of its own and calls stand_in_tile_products.c. */
#define nd_tiles_bf16_amx nd_tiles_bf16_stand_in
#define nd_tile_begin_amx nd_tile_begin_amx_stand_in
#define nd_tile_end_amx   nd_tile_end_amx_stand_in
#define nd_tile_gemm_amx  nd_tile_gemm_amx_stand_in

#include "kernels/cpu/tile_kernels.c"

// SPDX-License-Identifier: Apache-2.0
/* nd_tiles_bf16_stand_in: attention on tiles, timed without tiles. */
#include "tests/bench/stand_in_loops.h"

/* What tile_kernels.c calls by these names is what tile_amx.c defines for this instruction set. */
#define nd_tiles_bf16_amx nd_tiles_bf16_stand_in
#define nd_tile_begin_amx nd_tile_begin_amx_stand_in
#define nd_tile_end_amx   nd_tile_end_amx_stand_in
#define nd_tile_gemm_amx  nd_tile_gemm_amx_stand_in

#include "kernels/cpu/tile_kernels.c"

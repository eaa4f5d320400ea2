// SPDX-License-Identifier: Apache-2.0
/* nd_gemm_amx_stand_in: the products on tiles, timed without tiles. */
#include "tests/bench/stand_in_loops.h"

#include "kernels/cpu/gemm_amx.c"

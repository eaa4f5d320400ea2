// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_ATTENTION_H
#define ND_CPU_ATTENTION_H
/* What attention_fwd.c and attention_bwd.c need of scratch, for attention.c, which chooses. */
#include "kernels/ops.h"

/* Bytes for one call of a pass. */
size_t nd_attention_fwd_scratch(int threads, const nd_attention *a);
size_t nd_attention_bwd_scratch(int threads, const nd_attention *a);

#endif

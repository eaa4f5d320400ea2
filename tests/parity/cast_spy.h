// SPDX-License-Identifier: Apache-2.0
/* Keeps what the ops of a rank cast to FP8 in a run, products among them: each BF16 matrix, its
 * scales and its codes. */
#ifndef TESTS_PARITY_CAST_SPY_H
#define TESTS_PARITY_CAST_SPY_H
#include "trainer/rank.h"

enum { CAST_SPY_MAX = 32 };

typedef struct spied_cast {
    nd_granularity granularity;
    const float *at; /* where the scales lay */
    int64_t rows, columns;
    nd_bf16 *x;     /* (rows, columns) */
    uint8_t *codes; /* (rows, columns) */
    float *scale;   /* (1, rows or columns) */
} spied_cast;

typedef struct cast_spy {
    nd_ops ops; /* the rank's from cast_spy_start on */
    const nd_ops *real;
    int count; /* of the casts since then, the first CAST_SPY_MAX of which are kept */
    spied_cast casts[CAST_SPY_MAX];
} cast_spy;

/* From here on the calling thread's casts of this rank are kept, and no earlier ones. The spy stays
 * where it is until the rank has ended. */
void cast_spy_start(cast_spy *spy, nd_rank *rank);
/* x (rows, columns) as the reference ops cast it to E4M3, with scales of its own. */
spied_cast cast_by_reference(nd_bf16 *x, nd_granularity granularity, int64_t rows, int64_t columns,
                             bool power_of_two);

/* Zeroed memory that stays until the test's process ends, as what is kept does. */
void *cast_spy_memory(size_t bytes);

/* The number of scales of a matrix. */
int64_t cast_spy_scales(nd_granularity granularity, int64_t rows, int64_t columns);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_MATMUL_LT_H
#define ND_CUDA_MATMUL_LT_H
/*
 * Matrix products through cuBLASLt: BF16, F32 and FP8. One plan (descriptor, layouts, algorithm)
 * per form of call, kept once it was made; a step whose forms were prepared asks the library for
 * nothing and allocates nothing.
 *
 * cuBLASLt is column-major: a row-major c (m, n) = op(a) op(b) is its c^T (n, m) = op(b)^T op(a)^T,
 * so its A is our b.
 */
#include "kernels/cuda/lt_choice.h"
#include "kernels/ops.h"

typedef struct nd_lt nd_lt;

enum {
    ND_LT_WORKSPACE = 32 << 20, /* what the library advises for Hopper */
    ND_LT_PRODUCT_BYTES =
        64 << 20, /* most scratch of a product whose scales are applied afterwards */
};

/* Opens cuBLASLt and allocates the workspace. ND_ERR_CONFIG when the library is missing or too
 * old. */
nd_status nd_lt_create(nd_device *device, int capability, nd_lt **out);
void nd_lt_destroy(nd_lt *lt); /* NULL is legal */
/* The version of the library that was opened, 130100 is 13.1.0. */
size_t nd_lt_version(const nd_lt *lt);

nd_status nd_lt_matmul(nd_lt *lt, nd_stream *stream, nd_tensor c, nd_tensor a, bool a_transposed,
                       nd_tensor b, bool b_transposed, float beta);

nd_status nd_lt_matmul_fp8(nd_lt *lt, nd_stream *stream, nd_tensor c, const nd_fp8 *a,
                           bool a_transposed, const nd_fp8 *b, bool b_transposed, float beta,
                           bool fast_accumulation, void *scratch);
/* From begin to end, the two above make the plans of their calls and enqueue nothing; operands need
 * no memory, but addresses that are aligned as those of the calls. Not while tuning. */
void nd_lt_prepare_begin(nd_lt *lt);
void nd_lt_prepare_end(nd_lt *lt);
size_t nd_lt_matmul_fp8_scratch(int64_t m, int64_t n, int64_t k, nd_dtype act);

/*
 * Autotune: until nd_lt_install the first use of a form times the library's best `candidates`
 * algorithms on the operands of the call, whose result is lost, and keeps the fastest; after
 * `deadline` (nd_clock_seconds) the library's first choice. 0 or 1 candidates: off. Marks forms as
 * not yet used.
 */
void nd_lt_tune(nd_lt *lt, int candidates, double deadline);
/* The forms used since nd_lt_tune, in the order of their first uses; returns how many. */
int nd_lt_choices(const nd_lt *lt, nd_lt_choice out[ND_LT_PLANS]);
/* Forgets all forms, then takes these. ND_ERR_CONFIG when the library does not accept one. */
nd_status nd_lt_install(nd_lt *lt, const nd_lt_choice *choices, int count);
/* Forms met since nd_lt_install that were not among its choices. */
int nd_lt_unchosen(const nd_lt *lt);

enum { ND_CUDA_MEDIAN_MAX = 16 };
/* Seconds of what `call` enqueues: the median of `repeats` calls after a first one. Waits. */
nd_status nd_cuda_median(nd_stream *stream, nd_status (*call)(void *context, nd_stream *stream),
                         void *context, int repeats, double *seconds);

/* Seconds of one product of this form, the mean of `repeats` on memory of its own; makes its plan.
 * For tuning and benches. */
typedef struct nd_lt_form {
    int64_t m, n, k;
    bool a_transposed, b_transposed;
    nd_dtype a, b, c;
    float beta;
    bool fast_accumulation; /* FP8 */
} nd_lt_form;
nd_status nd_lt_time(nd_lt *lt, nd_stream *stream, const nd_lt_form *form, int repeats,
                     double *seconds);

/* Forms met so far, for tests. */
int nd_lt_plan_count(const nd_lt *lt);

#endif

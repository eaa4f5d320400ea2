// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_OPS_ATTEND_H
#define ND_TESTS_OPS_ATTEND_H
/* One attention of the CPU backend, forward and backward. */
#include "tests/ops/conformance.h"

enum { ND_ATTEND_FIRST_KEY = 4, ND_ATTEND_INPUTS = 5, ND_ATTEND_RESULTS = 5 };

extern const char *const nd_attend_names[ND_ATTEND_RESULTS]; /* dq, dk, dv, out, lse */

/* Draws q, k, v and dout; first_key is absent. */
void nd_attend_draw(const nd_attention *a, nd_dtype dtype, nd_tensor in[ND_ATTEND_INPUTS]);
void nd_attend_forward(const nd_side *side, const nd_attention *a,
                       const nd_tensor in[ND_ATTEND_INPUTS], nd_tensor out, nd_tensor lse);
/* Both; the backward needs the forward's results. */
void nd_attend(const nd_side *side, const nd_attention *a, const nd_tensor in[ND_ATTEND_INPUTS],
               nd_tensor results[ND_ATTEND_RESULTS]);
/* Some results of a device, `results` having room for 16; returns how many there are. */
typedef int nd_computation(const nd_side *side, const void *arg, nd_tensor *results);

/* Fails the test where results with 2, 3, 5 and 7 threads have other bits than those with one. */
void nd_with_all_threads(const char *what, nd_computation *compute, const void *arg);
/* Like nd_with_all_threads, but for attention with drawn operands; frees all tensors. */
void nd_attend_with_all_threads(const nd_attention *a, nd_dtype dtype, nd_tensor first_key);

#endif

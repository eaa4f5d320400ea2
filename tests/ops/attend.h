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
/* The same with a device of its own, of so many threads. */
void nd_attend_alone(int threads, const nd_attention *a, const nd_tensor in[ND_ATTEND_INPUTS],
                     nd_tensor results[ND_ATTEND_RESULTS]);
/* Fails the test where results with 2, 3 and 7 threads have other bits than those with one. */
void nd_attend_with_all_threads(const char *what, const nd_attention *a,
                                const nd_tensor in[ND_ATTEND_INPUTS]);

#endif

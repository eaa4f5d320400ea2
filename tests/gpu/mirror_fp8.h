// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_GPU_MIRROR_FP8_H
#define ND_TESTS_GPU_MIRROR_FP8_H
/* For mirror.c: the FP8 ops of the table. */
#include "tests/gpu/mirror_memory.h"

nd_status mirror_amax(S s, float *out, T x, nd_granularity g, bool merge);
nd_status mirror_fp8_scale(S s, float *scale, float *inverse, const float *from, int64_t count,
                           nd_dtype format, bool power_of_two);
nd_status mirror_fp8_delayed(S s, const nd_fp8_history *h, nd_amax_algorithm algorithm);
nd_status mirror_fp8_cast(S s, nd_fp8 out, float *largest, T x);
nd_status mirror_fp8_transpose(S s, T out, T codes);
nd_status mirror_fp8_count(S s, int64_t counts[2], T x, nd_fp8 as);
nd_status mirror_matmul_fp8(S s, T c, nd_fp8 a, bool at, nd_fp8 b, bool bt, float beta, bool fast,
                            void *scratch);
size_t mirror_matmul_fp8_scratch(const nd_device *device, int64_t rows, int64_t n, int64_t k,
                                 nd_dtype act);

#endif

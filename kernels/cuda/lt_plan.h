// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_LT_PLAN_H
#define ND_CUDA_LT_PLAN_H
/* One form of a cuBLASLt product in the library's own, column-major terms, and the table of
 * plans. */
#include <stdbool.h>

#include "kernels/cuda/lt_choice.h"
#include "kernels/cuda/lt_library.h"
#include "runtime/device/device.h"
#include "runtime/tensor/dtype.h"

typedef struct nd_lt_plan {
    nd_lt_key key;
    bool used, refused; /* refused: the library has no algorithm for it */
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
    /* Autotune. */
    bool chosen;  /* by autotune, or installed from a record */
    bool touched; /* called since the last nd_lt_tune */
    int number;   /* in the order of first uses */
    int candidates, picked;
    double seconds, first_seconds;
} nd_lt_plan;

/*
 * Descriptor, layouts and up to `wanted` algorithms, best first. *found is at least 1 on success.
 * anywhere: some device memory, aligned to 16 bytes, that stands for scales until a product has
 * its own.
 */
nd_status nd_lt_plan_init(const nd_lt_library *library, cublasLtHandle_t handle, nd_lt_key key,
                          const void *anywhere, int wanted, nd_lt_plan *plan,
                          cublasLtMatmulHeuristicResult_t *results, int *found);
/* A plan with an algorithm that was recorded. ND_ERR_CONFIG when the library does not accept it, or
 * when a setting or its workspace is not what the record says. */
nd_status nd_lt_plan_restore(const nd_lt_library *library, cublasLtHandle_t handle,
                             const nd_lt_choice *choice, const void *anywhere, nd_lt_plan *plan);
/* The settings of an algorithm, for people; -1 where the library does not say. */
nd_lt_traits nd_lt_traits_of(const nd_lt_library *library, const cublasLtMatmulAlgo_t *algorithm);
/* "bf16 (8192, 4096) = bf16 N (ld 8192) x ...": a form, for messages. */
const char *nd_lt_key_format(const nd_lt_key *key, char *buffer, size_t size);
/* Largest power of two, at most 256, that divides the address. */
int32_t nd_lt_alignment(const void *p);

#endif

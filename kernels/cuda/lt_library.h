// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_LT_LIBRARY_H
#define ND_CUDA_LT_LIBRARY_H
/* cuBLASLt, opened at run time: the functions that matmul_lt.c calls. */
#include <cublasLt.h>

#include "runtime/base/status.h"

typedef struct nd_lt_library {
    size_t (*version)(void);
    cublasStatus_t (*create)(cublasLtHandle_t *);
    cublasStatus_t (*destroy)(cublasLtHandle_t);
    cublasStatus_t (*desc_init)(cublasLtMatmulDesc_t, size_t, cublasComputeType_t, cudaDataType_t);
    cublasStatus_t (*desc_set)(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *,
                               size_t);
    cublasStatus_t (*layout_init)(cublasLtMatrixLayout_t, size_t, cudaDataType, uint64_t, uint64_t,
                                  int64_t);
    cublasStatus_t (*preference_init)(cublasLtMatmulPreference_t, size_t);
    cublasStatus_t (*preference_set)(cublasLtMatmulPreference_t,
                                     cublasLtMatmulPreferenceAttributes_t, const void *, size_t);
    cublasStatus_t (*heuristic)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                cublasLtMatmulHeuristicResult_t *, int *);
    cublasStatus_t (*check)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                            cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                            const cublasLtMatmulAlgo_t *, cublasLtMatmulHeuristicResult_t *);
    cublasStatus_t (*matmul)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
                             cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t,
                             const void *, const void *, cublasLtMatrixLayout_t, void *,
                             cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *, size_t,
                             cudaStream_t);
} nd_lt_library;

/* Opens the library of the version that this program was built with, or newer within its major
 * version. */
nd_status nd_lt_library_open(nd_lt_library *out);

/* Turns a status of the library into an error that names the status and `call`. */
nd_status nd_lt_failed(cublasStatus_t status, const char *call);
#define ND_CUBLAS(call_)                                                                           \
    do {                                                                                           \
        cublasStatus_t nd_cublas_status_ = (call_);                                                \
        if (nd_cublas_status_ != CUBLAS_STATUS_SUCCESS) {                                          \
            return nd_lt_failed(nd_cublas_status_, #call_);                                        \
        }                                                                                          \
    } while (0)

#endif

// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/lt_library.h"

#include <stdio.h>

#include "runtime/device/cuda_library.h"

enum { OLDEST = 120300 }; /* FP8 with FP32 accumulation into a given C */

nd_status nd_lt_library_open(nd_lt_library *out)
{
    nd_lt_library library;
    char soname[32];
    snprintf(soname, sizeof soname, "libcublasLt.so.%d", CUBLAS_VER_MAJOR);
    const char *const names[] = {soname, NULL};
    const nd_cuda_symbol symbols[] = {
        {"cublasLtGetVersion", (void **)&library.version},
        {"cublasLtCreate", (void **)&library.create},
        {"cublasLtDestroy", (void **)&library.destroy},
        {"cublasLtMatmulDescInit_internal", (void **)&library.desc_init},
        {"cublasLtMatmulDescSetAttribute", (void **)&library.desc_set},
        {"cublasLtMatrixLayoutInit_internal", (void **)&library.layout_init},
        {"cublasLtMatmulPreferenceInit_internal", (void **)&library.preference_init},
        {"cublasLtMatmulPreferenceSetAttribute", (void **)&library.preference_set},
        {"cublasLtMatmulAlgoGetHeuristic", (void **)&library.heuristic},
        {"cublasLtMatmulAlgoCheck", (void **)&library.check},
        {"cublasLtMatmul", (void **)&library.matmul},
    };
    ND_TRY(nd_cuda_library_open("cuBLASLt", names, symbols, sizeof symbols / sizeof *symbols));
    size_t here = library.version(); /* 120205 is 12.2.5 */
    if (here < OLDEST) {
        return nd_fail(ND_ERR_CONFIG,
                       "cuBLASLt here is version %zu.%zu.%zu and device cuda needs %d.%d.%d or "
                       "newer; install a newer CUDA Toolkit, or use --device cpu",
                       here / 10000, here % 10000 / 100, here % 100, OLDEST / 10000,
                       OLDEST % 10000 / 100, OLDEST % 100);
    }
    *out = library;
    return ND_OK;
}

nd_status nd_lt_failed(cublasStatus_t status, const char *call)
{
    static const struct {
        cublasStatus_t status;
        const char *name;
    } names[] = {
        {CUBLAS_STATUS_NOT_INITIALIZED, "not initialised"},
        {CUBLAS_STATUS_ALLOC_FAILED, "allocation failed"},
        {CUBLAS_STATUS_INVALID_VALUE, "invalid value"},
        {CUBLAS_STATUS_ARCH_MISMATCH, "not for this GPU"},
        {CUBLAS_STATUS_EXECUTION_FAILED, "execution failed"},
        {CUBLAS_STATUS_INTERNAL_ERROR, "internal error"},
        {CUBLAS_STATUS_NOT_SUPPORTED, "not supported"},
    };
    const char *name = "unknown";
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        name = names[i].status == status ? names[i].name : name;
    }
    return nd_fail(ND_ERR_INTERNAL, "cuBLASLt status %d (%s) from %.100s", (int)status, name, call);
}

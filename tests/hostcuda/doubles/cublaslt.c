// SPDX-License-Identifier: Apache-2.0
/*
 * A double of cuBLASLt: the library itself, descriptors, layouts and preferences. What it refuses
 * is in cublaslt_rules.c, products in F32 in cublaslt_product.c. Where the real library would read
 * wrong memory or misbehave instead of refusing, the double aborts with a sentence.
 */
#include <stdlib.h>

#include "tests/hostcuda/doubles/cublaslt_parts.h"

const char *nd_lt_double_refused;

size_t cublasLtGetVersion(void)
{
    const char *text = getenv("ND_DOUBLE_CUBLASLT");
    return text ? strtoul(text, NULL, 10) : CUBLAS_VERSION;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *out)
{
    *out = calloc(1, 64);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t out, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t scale)
{
    REFUSE_IF(size < sizeof(lt_desc), CUBLAS_STATUS_INVALID_VALUE);
    REFUSE_IF(compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F, CUBLAS_STATUS_NOT_SUPPORTED);
    memset(out, 0, size);
    ((lt_desc *)out)->mark = LT_DESC;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t size)
{
    lt_desc *d = (lt_desc *)desc;
    struct {
        cublasLtMatmulDescAttributes_t attribute;
        void *to;
        size_t size;
    } known[] = {
        {CUBLASLT_MATMUL_DESC_TRANSA, &d->op_a, 4},
        {CUBLASLT_MATMUL_DESC_TRANSB, &d->op_b, 4},
        {CUBLASLT_MATMUL_DESC_FAST_ACCUM, &d->fast, 1},
        {CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &d->processors, 4},
        {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &d->mode_a, 4},
        {CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &d->mode_b, 4},
        {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &d->scale_a, sizeof(void *)},
        {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &d->scale_b, sizeof(void *)},
    };
    REFUSE_IF(d->mark != LT_DESC, CUBLAS_STATUS_INVALID_VALUE);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].attribute == attribute) {
            REFUSE_IF(size != known[i].size, CUBLAS_STATUS_INVALID_VALUE);
            memcpy(known[i].to, value, size);
            return CUBLAS_STATUS_SUCCESS;
        }
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t out, size_t size,
                                                 cudaDataType type, uint64_t rows, uint64_t columns,
                                                 int64_t ld)
{
    REFUSE_IF(size < sizeof(lt_layout) || rows == 0 || columns == 0 || ld < (int64_t)rows,
              CUBLAS_STATUS_INVALID_VALUE);
    REFUSE_IF(type != CUDA_R_32F && type != CUDA_R_16BF && !is_fp8(type),
              CUBLAS_STATUS_NOT_SUPPORTED);
    memset(out, 0, size);
    *(lt_layout *)out = (lt_layout){LT_LAYOUT, rows, columns, ld, type};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t out, size_t size)
{
    REFUSE_IF(size < sizeof(lt_preference), CUBLAS_STATUS_INVALID_VALUE);
    memset(out, 0, size);
    *(lt_preference *)out = (lt_preference){.mark = LT_PREFERENCE,
                                            .reductions = CUBLASLT_REDUCTION_SCHEME_MASK,
                                            .align = {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t size)
{
    lt_preference *p = (lt_preference *)preference;
    uint32_t align = 0;
    REFUSE_IF(p->mark != LT_PREFERENCE, CUBLAS_STATUS_INVALID_VALUE);
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        REFUSE_IF(size != 8, CUBLAS_STATUS_INVALID_VALUE);
        memcpy(&p->workspace, value, size);
        return CUBLAS_STATUS_SUCCESS;
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        REFUSE_IF(size != 4, CUBLAS_STATUS_INVALID_VALUE);
        memcpy(&p->reductions, value, size);
        return CUBLAS_STATUS_SUCCESS;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        REFUSE_IF(size != 4, CUBLAS_STATUS_INVALID_VALUE);
        memcpy(&align, value, size);
        REFUSE_IF(align == 0 || align & (align - 1), CUBLAS_STATUS_INVALID_VALUE);
        p->align[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES] = align;
        return CUBLAS_STATUS_SUCCESS;
    default:
        return CUBLAS_STATUS_INVALID_VALUE;
    }
}

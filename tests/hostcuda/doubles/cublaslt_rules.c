// SPDX-License-Identifier: Apache-2.0
/* cuBLASLt's double: what the library refuses, and its algorithms. */
#include <stdlib.h>

#include "tests/hostcuda/doubles/cublaslt_parts.h"
#include "tests/hostcuda/doubles/double.h"

enum { ALGORITHMS = 3, VECTOR_SCALES_SINCE = 120900, PROCESSORS = 132 };

static cublasStatus_t check_layouts(const lt_desc *desc, const lt_layout *a, const lt_layout *b,
                                    const lt_layout *c, const lt_layout *d)
{
    uint64_t m = desc->op_a ? a->columns : a->rows, k = desc->op_a ? a->rows : a->columns;
    uint64_t n = desc->op_b ? b->rows : b->columns;
    REFUSE_IF(desc->mark != LT_DESC || a->mark != LT_LAYOUT || b->mark != LT_LAYOUT ||
                  c->mark != LT_LAYOUT || d->mark != LT_LAYOUT,
              CUBLAS_STATUS_INVALID_VALUE);
    REFUSE_IF(k != (desc->op_b ? b->columns : b->rows), CUBLAS_STATUS_INVALID_VALUE);
    REFUSE_IF(d->rows != m || d->columns != n, CUBLAS_STATUS_INVALID_VALUE);
    REFUSE_IF(c->rows != m || c->columns != n || c->type != d->type || c->ld != d->ld,
              CUBLAS_STATUS_INVALID_VALUE);
    return CUBLAS_STATUS_SUCCESS;
}

/* Scales of whole tensors may be missing, which is 1; vectors may not, and only Hopper's products
 * have them. */
static cublasStatus_t check_scales(const lt_desc *desc, int capability)
{
    const int32_t vectors = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    REFUSE_IF(desc->mode_a != desc->mode_b, CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(desc->mode_a != CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F && desc->mode_a != vectors,
              CUBLAS_STATUS_NOT_SUPPORTED);
    if (desc->mode_a == vectors) {
        REFUSE_IF(capability != 90, CUBLAS_STATUS_NOT_SUPPORTED);
        REFUSE_IF(cublasLtGetVersion() < VECTOR_SCALES_SINCE, CUBLAS_STATUS_INVALID_VALUE);
        REFUSE_IF(!desc->scale_a || !desc->scale_b, CUBLAS_STATUS_INVALID_VALUE);
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* The table of types in cublasLtMatmul's documentation, as far as F32 accumulation goes; FP8 on
 * sm_89 and sm_90. */
static cublasStatus_t check_types(const lt_desc *desc, const lt_layout *a, const lt_layout *b,
                                  const lt_layout *d)
{
    int capability = nd_double_machine_get()->capability;
    REFUSE_IF(is_fp8(d->type), CUBLAS_STATUS_NOT_SUPPORTED);
    if (!is_fp8(a->type) && !is_fp8(b->type)) {
        REFUSE_IF(a->type != b->type, CUBLAS_STATUS_NOT_SUPPORTED);
        REFUSE_IF(a->type == CUDA_R_32F && d->type != CUDA_R_32F, CUBLAS_STATUS_NOT_SUPPORTED);
        REFUSE_IF(desc->fast || desc->mode_a || desc->mode_b, CUBLAS_STATUS_NOT_SUPPORTED);
        REFUSE_IF(desc->scale_a || desc->scale_b, CUBLAS_STATUS_INVALID_VALUE);
        return CUBLAS_STATUS_SUCCESS;
    }
    REFUSE_IF(capability < 89, CUBLAS_STATUS_ARCH_MISMATCH);
    REFUSE_IF(!is_fp8(a->type) || !is_fp8(b->type), CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(a->type == CUDA_R_8F_E5M2 && b->type == CUDA_R_8F_E5M2, CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(capability < 100 && (desc->op_a != CUBLAS_OP_T || desc->op_b != CUBLAS_OP_N),
              CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(a->rows % 16 || d->rows % 16 || d->columns % 16, CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(a->ld % 16 || b->ld % 16, CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF((size_t)d->ld * width(d->type) % 16, CUBLAS_STATUS_NOT_SUPPORTED);
    return check_scales(desc, capability);
}

cublasStatus_t nd_lt_double_check(const lt_desc *desc, const lt_layout *a, const lt_layout *b,
                                  const lt_layout *c, const lt_layout *d)
{
    cublasStatus_t status = check_layouts(desc, a, b, c, d);
    REFUSE_IF(desc->processors < 0 || desc->processors > PROCESSORS, CUBLAS_STATUS_INVALID_VALUE);
    return status == CUBLAS_STATUS_SUCCESS ? check_types(desc, a, b, d) : status;
}

bool nd_lt_double_refuses_vectors(const lt_desc *desc, const lt_layout *d, bool product)
{
    const char *when = getenv("ND_DOUBLE_LT_VECTORS");
    if (!when || desc->mode_a != CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F) {
        return false;
    }
    return product ? strcmp(when, "product") == 0 ||
                         (strcmp(when, "product-f32") == 0 && d->type == CUDA_R_32F)
                   : strcmp(when, "heuristic") == 0;
}

lt_use nd_lt_double_use(const lt_desc *desc, const lt_layout *a, const lt_layout *b,
                        const lt_layout *d)
{
    return (lt_use){
        .m = (uint32_t)d->rows,
        .n = (uint32_t)d->columns,
        .k = (uint32_t)(desc->op_a ? a->rows : a->columns),
        .ld_a = (uint32_t)a->ld,
        .ld_b = (uint32_t)b->ld,
        .ld_d = (uint32_t)d->ld,
        .type_a = (uint8_t)a->type,
        .type_b = (uint8_t)b->type,
        .type_d = (uint8_t)d->type,
        .op_a = (uint8_t)desc->op_a,
        .op_b = (uint8_t)desc->op_b,
        .fast = (uint8_t)desc->fast,
        .mode = (uint8_t)desc->mode_a,
        .processors = (uint8_t)desc->processors,
    };
}

/* Returns true when a variable names this one of the three algorithms, or all.
 * ND_DOUBLE_LT_UNFIT: the heuristic lists it as one that does not fit (state).
 * ND_DOUBLE_LT_REFUSES: it cannot be taken from a record. */
static bool is_named(const char *variable, int index)
{
    const char *text = getenv(variable);
    return text && (strcmp(text, "all") == 0 || atoi(text) == index);
}

static lt_algorithm algorithm_of(int index, const lt_preference *p, lt_use use)
{
    lt_algorithm algorithm = {
        .mark = LT_ALGORITHM,
        .index = (uint16_t)index,
        .workspace = (uint32_t)(index == 1 ? 0 : p->workspace),
        .use = use,
    };
    for (int i = 0; i < 4; i++) {
        algorithm.align[i] = (uint16_t)p->align[i];
    }
    return algorithm;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int *found)
{
    const lt_desc *x = (const lt_desc *)desc;
    const lt_layout *la = (lt_layout *)a, *lb = (lt_layout *)b, *ld = (lt_layout *)d;
    const lt_preference *p = (lt_preference *)preference;
    *found = 0;
    REFUSE_IF(!handle || wanted < 1 || p->mark != LT_PREFERENCE, CUBLAS_STATUS_INVALID_VALUE);
    cublasStatus_t status = nd_lt_double_check(x, la, lb, (lt_layout *)c, ld);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    REFUSE_IF(nd_lt_double_refuses_vectors(x, ld, false), CUBLAS_STATUS_NOT_SUPPORTED);
    for (int i = 0; i < 4; i++) {
        REFUSE_IF(is_fp8(la->type) && p->align[i] < 16, CUBLAS_STATUS_NOT_SUPPORTED);
    }
    if (p->reductions & ~(uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) {
        nd_double_violation("cublasLt: a reduction scheme that rounds partial sums is allowed");
    }
    for (int i = 0; i < wanted && i < ALGORITHMS; i++) {
        lt_algorithm algorithm = algorithm_of(i, p, nd_lt_double_use(x, la, lb, ld));
        memset(&results[i], 0, sizeof results[i]);
        *found = i + 1;
        results[i].state = CUBLAS_STATUS_SUCCESS;
        if (is_named("ND_DOUBLE_LT_UNFIT", i)) {
            results[i].state = CUBLAS_STATUS_NOT_SUPPORTED;
            continue; /* the other fields say nothing */
        }
        memcpy(&results[i].algo, &algorithm, sizeof algorithm);
        results[i].workspaceSize = algorithm.workspace;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t *algo,
                                       cublasLtMatmulHeuristicResult_t *result)
{
    const lt_desc *x = (const lt_desc *)desc;
    const lt_layout *la = (lt_layout *)a, *lb = (lt_layout *)b, *ld = (lt_layout *)d;
    lt_algorithm chosen;
    memcpy(&chosen, algo, sizeof chosen);
    REFUSE_IF(!handle, CUBLAS_STATUS_INVALID_VALUE);
    cublasStatus_t status = nd_lt_double_check(x, la, lb, (lt_layout *)c, ld);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    lt_use use = nd_lt_double_use(x, la, lb, ld);
    REFUSE_IF(chosen.mark != LT_ALGORITHM || chosen.index >= ALGORITHMS,
              CUBLAS_STATUS_INVALID_VALUE);
    REFUSE_IF(is_named("ND_DOUBLE_LT_REFUSES", chosen.index), CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(memcmp(&use, &chosen.use, sizeof use) != 0, CUBLAS_STATUS_INVALID_VALUE);
    memset(result, 0, sizeof *result);
    result->workspaceSize = chosen.workspace;
    result->state = CUBLAS_STATUS_SUCCESS;
    return CUBLAS_STATUS_SUCCESS;
}

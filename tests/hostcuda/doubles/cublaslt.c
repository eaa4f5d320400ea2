// SPDX-License-Identifier: Apache-2.0
/*
 * A double of cuBLASLt: descriptors, a heuristic that refuses what the library refuses, and
 * products in F32. Where the real library would read wrong memory or misbehave instead of refusing,
 * it aborts with a sentence.
 */
#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/tensor/fp8.h"
#include "tests/hostcuda/doubles/double.h"

typedef struct lt_desc {
    uint64_t mark;
    int32_t op_a, op_b, mode_a, mode_b;
    int8_t fast;
    const float *scale_a, *scale_b;
} lt_desc;

typedef struct lt_layout {
    uint64_t mark, rows, columns;
    int64_t ld;
    cudaDataType type;
} lt_layout;

typedef struct lt_preference {
    uint64_t mark, workspace;
    uint32_t reductions, align[4]; /* A, B, C, D */
} lt_preference;

/* What an algorithm was chosen for; matmul must be called with the same. */
typedef struct lt_algorithm {
    uint32_t mark, align[4];
    uint32_t workspace;
    uint32_t m, n, k;
    uint16_t types[3];
    uint16_t index; /* among the three */
} lt_algorithm;

_Static_assert(sizeof(lt_desc) <= sizeof(cublasLtMatmulDescOpaque_t), "fits");
_Static_assert(sizeof(lt_layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "fits");
_Static_assert(sizeof(lt_preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "fits");
_Static_assert(sizeof(lt_algorithm) <= sizeof(cublasLtMatmulAlgo_t), "fits");

enum { DESC = 0x6d01, LAYOUT = 0x6d02, PREFERENCE = 0x6d03, ALGORITHM = 0x6d04 };

static const char *refused; /* why the last call was refused, for a debugger */

#define REFUSE_IF(cond, status)                                                                    \
    do {                                                                                           \
        if (cond) {                                                                                \
            refused = #cond;                                                                       \
            return status;                                                                         \
        }                                                                                          \
    } while (0)

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
    ((lt_desc *)out)->mark = DESC;
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
        {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &d->mode_a, 4},
        {CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &d->mode_b, 4},
        {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &d->scale_a, sizeof(void *)},
        {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &d->scale_b, sizeof(void *)},
    };
    REFUSE_IF(d->mark != DESC, CUBLAS_STATUS_INVALID_VALUE);
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
    REFUSE_IF(size < sizeof(lt_layout), CUBLAS_STATUS_INVALID_VALUE);
    memset(out, 0, size);
    *(lt_layout *)out = (lt_layout){LAYOUT, rows, columns, ld, type};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t out, size_t size)
{
    memset(out, 0, size);
    *(lt_preference *)out = (lt_preference){.mark = PREFERENCE,
                                            .reductions = CUBLASLT_REDUCTION_SCHEME_MASK,
                                            .align = {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t size)
{
    lt_preference *p = (lt_preference *)preference;
    REFUSE_IF(p->mark != PREFERENCE, CUBLAS_STATUS_INVALID_VALUE);
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
        memcpy(&p->align[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, size);
        return CUBLAS_STATUS_SUCCESS;
    default:
        return CUBLAS_STATUS_INVALID_VALUE;
    }
}

static bool is_fp8(cudaDataType type)
{
    return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

static size_t width(cudaDataType type)
{
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 1;
}

static cublasStatus_t check_layouts(const lt_desc *desc, const lt_layout *a, const lt_layout *b,
                                    const lt_layout *c, const lt_layout *d)
{
    uint64_t m = desc->op_a ? a->columns : a->rows, k = desc->op_a ? a->rows : a->columns;
    uint64_t n = desc->op_b ? b->rows : b->columns;
    REFUSE_IF(m == 0 || n == 0 || k == 0, CUBLAS_STATUS_INVALID_VALUE);
    REFUSE_IF(k != (desc->op_b ? b->columns : b->rows), CUBLAS_STATUS_INVALID_VALUE);
    REFUSE_IF(d->rows != m || d->columns != n, CUBLAS_STATUS_INVALID_VALUE);
    REFUSE_IF(c->rows != m || c->columns != n || c->type != d->type || c->ld != d->ld,
              CUBLAS_STATUS_INVALID_VALUE);
    REFUSE_IF(a->ld < (int64_t)a->rows || b->ld < (int64_t)b->rows || d->ld < (int64_t)d->rows,
              CUBLAS_STATUS_INVALID_VALUE);
    return CUBLAS_STATUS_SUCCESS;
}

/* The table of types in cublasLtMatmul's documentation, as far as F32 accumulation goes; FP8 on
 * sm_89 and sm_90. */
static cublasStatus_t check_types(const lt_desc *desc, const lt_layout *a, const lt_layout *b,
                                  const lt_layout *d)
{
    int capability = nd_double_machine_get()->capability;
    if (!is_fp8(a->type) && !is_fp8(b->type)) {
        bool same = a->type == b->type;
        REFUSE_IF(!same, CUBLAS_STATUS_NOT_SUPPORTED);
        REFUSE_IF(a->type == CUDA_R_32F && d->type != CUDA_R_32F, CUBLAS_STATUS_NOT_SUPPORTED);
        REFUSE_IF(desc->fast || desc->mode_a || desc->mode_b, CUBLAS_STATUS_NOT_SUPPORTED);
        return CUBLAS_STATUS_SUCCESS;
    }
    REFUSE_IF(capability < 89, CUBLAS_STATUS_ARCH_MISMATCH);
    REFUSE_IF(!is_fp8(a->type) || !is_fp8(b->type), CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(a->type == CUDA_R_8F_E5M2 && b->type == CUDA_R_8F_E5M2, CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(capability < 100 && (desc->op_a != CUBLAS_OP_T || desc->op_b != CUBLAS_OP_N),
              CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(a->rows % 16 || d->rows % 16, CUBLAS_STATUS_NOT_SUPPORTED); /* k, m */
    REFUSE_IF(a->ld % 16 || b->ld % 16, CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF((size_t)d->ld * width(d->type) % 16, CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(is_fp8(d->type), CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(desc->mode_a != desc->mode_b, CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(desc->mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F && capability < 90,
              CUBLAS_STATUS_NOT_SUPPORTED);
    return CUBLAS_STATUS_SUCCESS;
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
    cublasStatus_t status = check_layouts(x, la, lb, (lt_layout *)c, ld);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = check_types(x, la, lb, ld);
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    REFUSE_IF(is_fp8(la->type) && (p->align[0] < 16 || p->align[1] < 16 || p->align[3] < 16),
              CUBLAS_STATUS_NOT_SUPPORTED);
    if (p->reductions & ~(uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) {
        nd_double_violation("cublasLt: a reduction scheme that rounds partial sums is allowed");
    }
    for (int i = 0; i < wanted && i < 3; i++) {
        lt_algorithm algorithm = {
            .mark = ALGORITHM,
            .workspace = (uint32_t)(i == 1 ? 0 : p->workspace),
            .index = (uint16_t)i,
            .m = (uint32_t)ld->rows,
            .n = (uint32_t)ld->columns,
            .k = (uint32_t)(x->op_a ? la->rows : la->columns),
            .types = {(uint16_t)la->type, (uint16_t)lb->type, (uint16_t)ld->type},
        };
        memcpy(algorithm.align, p->align, sizeof algorithm.align);
        memset(&results[i], 0, sizeof results[i]);
        memcpy(&results[i].algo, &algorithm, sizeof algorithm);
        results[i].workspaceSize = algorithm.workspace;
        results[i].state = CUBLAS_STATUS_SUCCESS;
        *found = i + 1;
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* ND_DOUBLE_LT_REFUSES: all, or the number of one of the three algorithms that cannot be taken from
 * a record. */
static bool refuses(int index)
{
    const char *text = getenv("ND_DOUBLE_LT_REFUSES");
    return text && (strcmp(text, "all") == 0 || atoi(text) == index);
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
    cublasStatus_t status = check_layouts(x, la, lb, (lt_layout *)c, ld);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = check_types(x, la, lb, ld);
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    REFUSE_IF(chosen.mark != ALGORITHM || chosen.index > 2, CUBLAS_STATUS_INVALID_VALUE);
    REFUSE_IF(refuses(chosen.index), CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(chosen.m != ld->rows || chosen.n != ld->columns ||
                  chosen.k != (x->op_a ? la->rows : la->columns),
              CUBLAS_STATUS_INVALID_VALUE);
    memset(result, 0, sizeof *result);
    result->workspaceSize = chosen.workspace;
    result->state = CUBLAS_STATUS_SUCCESS;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void *value, size_t size, size_t *written)
{
    bool narrow = attribute == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID ||
                  attribute == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID;
    lt_algorithm chosen;
    memcpy(&chosen, algo, sizeof chosen);
    REFUSE_IF(chosen.mark != ALGORITHM || size != (narrow ? 2 : 4), CUBLAS_STATUS_INVALID_VALUE);
    uint32_t answer = attribute == CUBLASLT_ALGO_CONFIG_ID ? chosen.index : 0;
    memcpy(value, &answer, size);
    *written = size;
    return CUBLAS_STATUS_SUCCESS;
}

typedef struct lt_call {
    int64_t m, n, k, lda, ldb, ldd;
    cudaDataType type_a, type_b, type_d;
    bool ta, tb, vectors;
    float alpha, beta;
    int index; /* of the algorithm */
    const void *a, *b;
    void *d;
    const float *scale_a, *scale_b;
} lt_call;

static float load(const void *data, cudaDataType type, int64_t at)
{
    switch ((int)type) {
    case CUDA_R_32F:
        return ((const float *)data)[at];
    case CUDA_R_16BF:
        return nd_bf16_to_f32(((const nd_bf16 *)data)[at]);
    default:
        return nd_fp8_to_f32(type == CUDA_R_8F_E4M3 ? ND_DTYPE_F8_E4M3 : ND_DTYPE_F8_E5M2,
                             ((const uint8_t *)data)[at]);
    }
}

/* A copy whose rows run along k: element (i, p) of a column-major op(A) (m, k). */
static float *pack(const void *data, cudaDataType type, int64_t rows, int64_t k, int64_t ld,
                   bool k_is_contiguous)
{
    float *out = malloc((size_t)(rows * k) * sizeof *out);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t p = 0; p < k; p++) {
            out[i * k + p] = load(data, type, k_is_contiguous ? i * ld + p : p * ld + i);
        }
    }
    return out;
}

/* Each algorithm adds in an order of its own, so that another choice shows in the bits. */
static float dot(const float *a, const float *b, int64_t k, int index)
{
    enum { LANES = 16 };
    float lanes[LANES] = {0}, sum = 0.0f;
    int64_t p = 0;
    for (; p + LANES <= k; p += LANES) {
        for (int l = 0; l < LANES; l++) {
            lanes[l] += a[p + l] * b[p + l];
        }
    }
    for (; p < k; p++) {
        lanes[p % LANES] += a[p] * b[p];
    }
    for (int l = 0; l < LANES; l++) {
        sum += lanes[(l * (2 * index + 1) + index) % LANES];
    }
    return sum;
}

/*
 * ND_DOUBLE_LT_TIMES="3,1,2": what a product takes on the double's clock with each algorithm, in
 * seconds; ND_DOUBLE_LT_FP8: times that in FP8 (1). Unset: nothing but the time of this CPU.
 */
static double seconds_of(int index, bool fp8)
{
    const char *times = getenv("ND_DOUBLE_LT_TIMES"), *factor = getenv("ND_DOUBLE_LT_FP8");
    for (int i = 0; times && i < index; i++) {
        times = strchr(times, ',');
        times = times ? times + 1 : NULL;
    }
    return times ? strtod(times, NULL) * (fp8 && factor ? strtod(factor, NULL) : 1.0) : 0.0;
}

static void run_matmul(void *closure)
{
    const lt_call *x = closure;
    float *a = pack(x->a, x->type_a, x->m, x->k, x->lda, x->ta);
    float *b = pack(x->b, x->type_b, x->n, x->k, x->ldb, !x->tb);
    for (int64_t j = 0; j < x->n; j++) {
        for (int64_t i = 0; i < x->m; i++) {
            float scale = (x->scale_a ? x->scale_a[x->vectors ? i : 0] : 1.0f) *
                          (x->scale_b ? x->scale_b[x->vectors ? j : 0] : 1.0f);
            float value = x->alpha * scale * dot(a + i * x->k, b + j * x->k, x->k, x->index);
            int64_t at = j * x->ldd + i;
            value += x->beta != 0.0f ? x->beta * load(x->d, x->type_d, at) : 0.0f;
            if (x->type_d == CUDA_R_32F) {
                ((float *)x->d)[at] = value;
            } else {
                ((nd_bf16 *)x->d)[at] = nd_bf16_from_f32(value);
            }
        }
    }
    free(a);
    free(b);
    nd_double_spend(seconds_of(x->index, is_fp8(x->type_a)));
}

static void need_matrix(const char *what, const void *p, const lt_layout *l, uint32_t align)
{
    size_t bytes = ((size_t)l->ld * (l->columns - 1) + l->rows) * width(l->type);
    nd_double_need_device(what, p, bytes);
    if ((uintptr_t)p % align != 0) {
        nd_double_violation("cublasLtMatmul: %s is not aligned to %u bytes, which its algorithm "
                            "was chosen for",
                            what, align);
    }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a, const void *B,
                              cublasLtMatrixLayout_t b, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream)
{
    const lt_desc *x = (const lt_desc *)desc;
    const lt_layout *la = (lt_layout *)a, *lb = (lt_layout *)b, *ld = (lt_layout *)d;
    lt_algorithm chosen;
    memcpy(&chosen, algo, sizeof chosen);
    cublasStatus_t status = check_layouts(x, la, lb, (lt_layout *)c, ld);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = check_types(x, la, lb, ld);
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    lt_call call = {
        .m = (int64_t)ld->rows,
        .n = (int64_t)ld->columns,
        .k = (int64_t)(x->op_a ? la->rows : la->columns),
        .lda = la->ld,
        .ldb = lb->ld,
        .ldd = ld->ld,
        .type_a = la->type,
        .type_b = lb->type,
        .type_d = ld->type,
        .ta = x->op_a != CUBLAS_OP_N,
        .tb = x->op_b != CUBLAS_OP_N,
        .vectors = x->mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
        .alpha = *(const float *)alpha,
        .beta = *(const float *)beta,
        .index = chosen.index,
        .a = A,
        .b = B,
        .d = D,
        .scale_a = x->scale_a,
        .scale_b = x->scale_b,
    };
    if (chosen.mark != ALGORITHM || chosen.m != call.m || chosen.n != call.n ||
        chosen.k != call.k || chosen.types[0] != la->type || chosen.types[1] != lb->type ||
        chosen.types[2] != ld->type) {
        nd_double_violation("cublasLtMatmul: the algorithm was chosen for another product");
    }
    if (C != D && call.beta != 0.0f) {
        nd_double_violation("cublasLtMatmul: C is not D");
    }
    need_matrix("A", A, la, chosen.align[0]);
    need_matrix("B", B, lb, chosen.align[1]);
    need_matrix("D", D, ld, chosen.align[3]);
    if (workspace_bytes < chosen.workspace || (uintptr_t)workspace % 256 != 0) {
        nd_double_violation("cublasLtMatmul: workspace of %zu bytes, %u needed, 256-byte aligned",
                            workspace_bytes, chosen.workspace);
    }
    if (workspace_bytes > 0) {
        nd_double_need_device("workspace", workspace, workspace_bytes);
    }
    if ((call.scale_a || call.scale_b) && !is_fp8(la->type)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (call.vectors && (!call.scale_a || !call.scale_b)) {
        nd_double_violation("cublasLtMatmul: vectors of scales are missing");
    }
    if (call.scale_a) {
        nd_double_need_device("A's scale", call.scale_a, call.vectors ? (size_t)call.m * 4 : 4);
    }
    if (call.scale_b) {
        nd_double_need_device("B's scale", call.scale_b, call.vectors ? (size_t)call.n * 4 : 4);
    }
    return nd_double_launch(stream, run_matmul, &call, sizeof call) == cudaSuccess
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_EXECUTION_FAILED;
}

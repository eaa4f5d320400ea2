// SPDX-License-Identifier: Apache-2.0
/* cuBLASLt's double: products, in F32. */
#include <stdlib.h>

#include "runtime/tensor/fp8.h"
#include "tests/hostcuda/doubles/cublaslt_parts.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/doubles/machine.h"

typedef struct lt_call {
    lt_desc desc;
    lt_layout a, b, d;
    float alpha, beta;
    int index; /* of the algorithm */
    const void *from_a, *from_b;
    void *to;
} lt_call;

static bool has_vectors(const lt_desc *desc)
{
    return desc->mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
}

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
static float *pack(const void *data, const lt_layout *l, bool k_is_contiguous)
{
    const int64_t rows = (int64_t)(k_is_contiguous ? l->columns : l->rows);
    const int64_t k = (int64_t)(k_is_contiguous ? l->rows : l->columns);
    float *out = malloc((size_t)(rows * k) * sizeof *out);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t p = 0; p < k; p++) {
            out[i * k + p] = load(data, l->type, k_is_contiguous ? i * l->ld + p : p * l->ld + i);
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
    const double share = fp8 && factor ? strtod(factor, NULL) : 1.0;
    return times ? strtod(times, NULL) * share : 0.0;
}

static void count_fp8(const lt_call *x)
{
    int kind = (x->a.type == CUDA_R_8F_E5M2 ? ND_DOUBLE_A_E5M2 : 0) |
               (x->b.type == CUDA_R_8F_E5M2 ? ND_DOUBLE_B_E5M2 : 0) |
               (x->d.type == CUDA_R_32F ? ND_DOUBLE_D_F32 : 0) |
               (x->beta != 0.0f ? ND_DOUBLE_ADDS : 0) | (x->desc.fast ? ND_DOUBLE_FAST : 0);
    machine_current()->counts.fp8_products[kind]++;
}

static void run_matmul(void *closure)
{
    const lt_call *x = closure;
    const int64_t m = (int64_t)x->d.rows, n = (int64_t)x->d.columns;
    const int64_t k = (int64_t)(x->desc.op_a ? x->a.rows : x->a.columns);
    const float *scale_a = x->desc.scale_a, *scale_b = x->desc.scale_b;
    const bool vectors = has_vectors(&x->desc);
    float *a = pack(x->from_a, &x->a, x->desc.op_a != CUBLAS_OP_N);
    float *b = pack(x->from_b, &x->b, x->desc.op_b == CUBLAS_OP_N);
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < m; i++) {
            float scale = (scale_a ? scale_a[vectors ? i : 0] : 1.0f) *
                          (scale_b ? scale_b[vectors ? j : 0] : 1.0f);
            float value = x->alpha * scale * dot(a + i * k, b + j * k, k, x->index);
            int64_t at = j * x->d.ld + i;
            value += x->beta != 0.0f ? x->beta * load(x->to, x->d.type, at) : 0.0f;
            if (x->d.type == CUDA_R_32F) {
                ((float *)x->to)[at] = value;
            } else {
                ((nd_bf16 *)x->to)[at] = nd_bf16_from_f32(value);
            }
        }
    }
    free(a);
    free(b);
    if (is_fp8(x->a.type)) {
        count_fp8(x);
    }
    nd_double_spend(seconds_of(x->index, is_fp8(x->a.type)));
}

static size_t matrix_bytes(const lt_layout *l)
{
    return ((size_t)l->ld * (l->columns - 1) + l->rows) * width(l->type);
}

static void need_matrix(const char *what, const void *p, const lt_layout *l, uint32_t align)
{
    nd_double_need_device(what, p, matrix_bytes(l));
    if ((uintptr_t)p % align != 0) {
        nd_double_violation("cublasLtMatmul: %s is not aligned to %u bytes, which its algorithm "
                            "was chosen for",
                            what, align);
    }
}

static bool overlap(const void *p, const lt_layout *a, const void *q, const lt_layout *b)
{
    const char *x = p, *y = q;
    return x < y + matrix_bytes(b) && y < x + matrix_bytes(a);
}

static void need_scales(const char *what, const float *scales, bool vector, uint64_t count)
{
    if (scales) {
        nd_double_need_device(what, scales, vector ? (size_t)count * 4 : 4);
    }
    if ((uintptr_t)scales % (vector ? 16 : 4) != 0) {
        nd_double_violation("cublasLtMatmul: %s are not aligned to %d bytes", what,
                            vector ? 16 : 4);
    }
}

static void need_workspace(void *workspace, size_t bytes, size_t asked)
{
    if (bytes < asked || (uintptr_t)workspace % 256 != 0) {
        nd_double_violation("cublasLtMatmul: workspace of %zu bytes, %zu needed, 256-byte aligned",
                            bytes, asked);
    }
    if (bytes > 0) {
        nd_double_need_device("workspace", workspace, bytes);
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
    REFUSE_IF(!handle || !alpha || !beta || !algo, CUBLAS_STATUS_INVALID_VALUE);
    cublasStatus_t status = nd_lt_double_check(x, la, lb, (lt_layout *)c, ld);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    REFUSE_IF(nd_lt_double_refuses_vectors(x, ld, true), CUBLAS_STATUS_NOT_SUPPORTED);
    REFUSE_IF(((uintptr_t)x->scale_a | (uintptr_t)x->scale_b) % 16, CUBLAS_STATUS_NOT_SUPPORTED);
    memcpy(&chosen, algo, sizeof chosen);
    lt_use use = nd_lt_double_use(x, la, lb, ld);
    if (chosen.mark != LT_ALGORITHM || memcmp(&use, &chosen.use, sizeof use) != 0) {
        nd_double_violation("cublasLtMatmul: the algorithm was chosen for another product");
    }
    lt_call call = {.desc = *x,
                    .a = *la,
                    .b = *lb,
                    .d = *ld,
                    .alpha = *(const float *)alpha,
                    .beta = *(const float *)beta,
                    .index = chosen.index,
                    .from_a = A,
                    .from_b = B,
                    .to = D};
    if (C != D && call.beta != 0.0f) {
        nd_double_violation("cublasLtMatmul: C is not D");
    }
    need_matrix("A", A, la, chosen.align[0]);
    need_matrix("B", B, lb, chosen.align[1]);
    need_matrix("D", D, ld, chosen.align[3]);
    if (overlap(D, ld, A, la) || overlap(D, ld, B, lb)) {
        nd_double_violation("cublasLtMatmul: D lies over A or B");
    }
    need_workspace(workspace, workspace_bytes, chosen.workspace);
    need_scales("A's scales", x->scale_a, has_vectors(x), ld->rows);
    need_scales("B's scales", x->scale_b, has_vectors(x), ld->columns);
    if (nd_double_load(stream, &chosen, sizeof chosen) != cudaSuccess) {
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    return nd_double_launch(stream, run_matmul, &call, sizeof call) == cudaSuccess
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_EXECUTION_FAILED;
}

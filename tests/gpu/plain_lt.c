// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/plain_lt.h"

#include "runtime/device/cuda_check.h"

nd_status plain_lt_init(plain_lt *plain, nd_device *device)
{
    *plain = (plain_lt){.device = device};
    ND_TRY(nd_lt_library_open(&plain->library));
    ND_CUBLAS(plain->library.create(&plain->handle));
    return nd_device_alloc(device, ND_LT_WORKSPACE, &plain->workspace);
}

static cudaDataType_t type_of(nd_dtype dtype)
{
    return dtype == ND_DTYPE_F32       ? CUDA_R_32F
           : dtype == ND_DTYPE_F8_E4M3 ? CUDA_R_8F_E4M3
           : dtype == ND_DTYPE_F8_E5M2 ? CUDA_R_8F_E5M2
                                       : CUDA_R_16BF;
}

typedef struct problem {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, c; /* the library's A is our b: it is column-major */
    cublasLtMatmulHeuristicResult_t choice;
} problem;

static nd_status describe(const plain_lt *plain, const plain_lt_form *f,
                          const plain_lt_operands *on, problem *out)
{
    const nd_lt_library *l = &plain->library;
    bool fp8 = nd_dtype_size(f->a) == 1, at = !fp8 && f->a_transposed, bt = fp8 || f->b_transposed;
    int32_t op_a = bt ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = at ? CUBLAS_OP_T : CUBLAS_OP_N;
    uint64_t m = (uint64_t)f->n, n = (uint64_t)f->m, k = (uint64_t)f->k;
    ND_CUBLAS(l->desc_init(&out->desc, sizeof out->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    ND_CUBLAS(l->desc_set(&out->desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
    ND_CUBLAS(l->desc_set(&out->desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
    if (fp8) {
        int8_t fast = (int8_t)f->fast_accumulation;
        ND_CUBLAS(l->desc_set(&out->desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
        if (f->vectors) {
            int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
            ND_CUBLAS(
                l->desc_set(&out->desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode, sizeof mode));
            ND_CUBLAS(
                l->desc_set(&out->desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode, sizeof mode));
        }
        ND_CUBLAS(l->desc_set(&out->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &on->scale,
                              sizeof on->scale));
        ND_CUBLAS(l->desc_set(&out->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &on->scale,
                              sizeof on->scale));
    }
    ND_CUBLAS(l->layout_init(&out->a, sizeof out->a, type_of(f->b), bt ? k : m, bt ? m : k,
                             (int64_t)(bt ? k : m)));
    ND_CUBLAS(l->layout_init(&out->b, sizeof out->b, type_of(f->a), at ? n : k, at ? k : n,
                             (int64_t)(at ? n : k)));
    ND_CUBLAS(l->layout_init(&out->c, sizeof out->c, type_of(f->c), m, n, (int64_t)m));
    return ND_OK;
}

/* The library's answer; whether it has an algorithm. */
static cublasStatus_t ask(const plain_lt *plain, problem *p)
{
    const nd_lt_library *l = &plain->library;
    cublasLtMatmulPreferenceOpaque_t preference;
    uint64_t workspace = ND_LT_WORKSPACE;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* partial sums stay F32 */
    int found = 0;
    cublasStatus_t status = l->preference_init(&preference, sizeof preference);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = l->preference_set(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                   &workspace, sizeof workspace);
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = l->preference_set(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                   &reductions, sizeof reductions);
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = l->heuristic(plain->handle, &p->desc, &p->a, &p->b, &p->c, &p->c, &preference, 1,
                              &p->choice, &found);
    }
    return status == CUBLAS_STATUS_SUCCESS && found == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : status;
}

static cublasStatus_t multiply(const plain_lt *plain, nd_stream *stream, const plain_lt_form *f,
                               const plain_lt_operands *on, problem *p)
{
    const float one = 1.0f, beta = f->beta;
    return plain->library.matmul(plain->handle, &p->desc, &one, on->b, &p->a, on->a, &p->b, &beta,
                                 on->c, &p->c, on->c, &p->c, &p->choice.algo, plain->workspace,
                                 ND_LT_WORKSPACE, nd_cuda_stream(stream));
}

/* Seconds of one of `repeats` products that follow one another. */
static nd_status repeat(plain_lt *plain, nd_stream *stream, const plain_lt_form *form,
                        const plain_lt_operands *on, problem *p, int repeats, double *seconds)
{
    cudaEvent_t begin, end;
    float ms = 0.0f;
    ND_CUDA(plain->device, cudaEventCreate(&begin));
    ND_CUDA(plain->device, cudaEventCreate(&end));
    ND_CUDA(plain->device, cudaEventRecord(begin, nd_cuda_stream(stream)));
    for (int i = 0; i < repeats; i++) {
        ND_CUBLAS(multiply(plain, stream, form, on, p));
    }
    ND_CUDA(plain->device, cudaEventRecord(end, nd_cuda_stream(stream)));
    ND_TRY(nd_stream_sync(stream));
    ND_CUDA(plain->device, cudaEventElapsedTime(&ms, begin, end));
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    *seconds = (double)ms * 1e-3 / repeats;
    return ND_OK;
}

nd_status plain_lt_time(plain_lt *plain, nd_stream *stream, const plain_lt_form *form,
                        const plain_lt_operands *on, int repeats, double *seconds)
{
    problem p;
    ND_TRY(describe(plain, form, on, &p));
    ND_CUBLAS(ask(plain, &p));
    ND_CUBLAS(multiply(plain, stream, form, on, &p));
    return repeat(plain, stream, form, on, &p, repeats, seconds);
}

nd_status plain_lt_probe(plain_lt *plain, nd_stream *stream, const plain_lt_form *form,
                         const plain_lt_operands *on, plain_lt_answer *out)
{
    problem p;
    plain_lt_answer answer = {.heuristic = -1, .product = -1, .gpu = -1};
    ND_TRY(describe(plain, form, on, &p));
    answer.heuristic = (int)ask(plain, &p);
    if (answer.heuristic == CUBLAS_STATUS_SUCCESS) {
        answer.product = (int)multiply(plain, stream, form, on, &p);
    }
    if (answer.product == CUBLAS_STATUS_SUCCESS) {
        answer.gpu = (int)cudaStreamSynchronize(nd_cuda_stream(stream));
    }
    if (answer.gpu == cudaSuccess) {
        ND_TRY(repeat(plain, stream, form, on, &p, 1, &answer.seconds));
    }
    *out = answer;
    return ND_OK;
}

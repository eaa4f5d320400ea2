// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/lt.h"

#include <stdio.h>
#include <string.h>

#include "kernels/cuda/kernels.h"
#include "runtime/device/cuda_check.h"

int32_t nd_lt_alignment(const void *p)
{
    uintptr_t low = (uintptr_t)p & -(uintptr_t)p;
    return low == 0 || low > 256 ? 256 : (int32_t)low;
}

static cudaDataType_t type_of(int32_t dtype)
{
    switch ((nd_dtype)dtype) {
    case ND_DTYPE_BF16:
        return CUDA_R_16BF;
    case ND_DTYPE_F8_E4M3:
        return CUDA_R_8F_E4M3;
    case ND_DTYPE_F8_E5M2:
        return CUDA_R_8F_E5M2;
    default:
        ND_ASSERT(dtype == ND_DTYPE_F32);
        return CUDA_R_32F;
    }
}

/* Points the scales at any device memory: the library answers only for descriptors that have such
 * pointers, and reads no scale before the product, which sets its own. */
static nd_status describe_scales(const nd_lt_library *l, const nd_lt_key *key, const void *anywhere,
                                 nd_lt_plan *plan)
{
    int8_t fast = (int8_t)key->fast;
    ND_CUBLAS(l->desc_set(&plan->desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
    if (key->scaling == ND_LT_VECTORS) {
        int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
        ND_CUBLAS(l->desc_set(&plan->desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode, sizeof mode));
        ND_CUBLAS(l->desc_set(&plan->desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode, sizeof mode));
    }
    ND_CUBLAS(
        l->desc_set(&plan->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &anywhere, sizeof anywhere));
    ND_CUBLAS(
        l->desc_set(&plan->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &anywhere, sizeof anywhere));
    return ND_OK;
}

static nd_status describe(const nd_lt_library *l, const nd_lt_key *key, const void *anywhere,
                          nd_lt_plan *plan)
{
    int32_t op_a = key->a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    int32_t op_b = key->b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    ND_CUBLAS(l->desc_init(&plan->desc, sizeof plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    ND_CUBLAS(l->desc_set(&plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
    ND_CUBLAS(l->desc_set(&plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
    if (key->processors > 0) {
        ND_CUBLAS(l->desc_set(&plan->desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &key->processors,
                              sizeof key->processors));
    }
    if (key->scaling != ND_LT_UNSCALED) {
        ND_TRY(describe_scales(l, key, anywhere, plan));
    }
    ND_CUBLAS(l->layout_init(&plan->a, sizeof plan->a, type_of(key->a),
                             (uint64_t)(key->a_transposed ? key->k : key->m),
                             (uint64_t)(key->a_transposed ? key->m : key->k), key->lda));
    ND_CUBLAS(l->layout_init(&plan->b, sizeof plan->b, type_of(key->b),
                             (uint64_t)(key->b_transposed ? key->n : key->k),
                             (uint64_t)(key->b_transposed ? key->k : key->n), key->ldb));
    ND_CUBLAS(l->layout_init(&plan->d, sizeof plan->d, type_of(key->d), (uint64_t)key->m,
                             (uint64_t)key->n, key->ldd));
    return ND_OK;
}

/* Partial sums of a split k are F32, added in a fixed order: no rounding of them to BF16, no
 * atomics. */
static nd_status prefer(const nd_lt_library *l, const nd_lt_key *key,
                        cublasLtMatmulPreferenceOpaque_t *preference)
{
    uint64_t workspace = ND_LT_WORKSPACE;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        uint32_t bytes;
    } alignments[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)key->align_a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)key->align_b},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)key->align_d},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)key->align_d},
    };
    ND_CUBLAS(l->preference_init(preference, sizeof *preference));
    ND_CUBLAS(l->preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                sizeof workspace));
    ND_CUBLAS(l->preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions,
                                sizeof reductions));
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++) {
        ND_CUBLAS(l->preference_set(preference, alignments[i].attribute, &alignments[i].bytes,
                                    sizeof alignments[i].bytes));
    }
    return ND_OK;
}

static const char *key_format(const nd_lt_key *key, char *buffer, size_t size)
{
    char limit[48] = "";
    if (key->processors > 0) {
        snprintf(limit, sizeof limit, ", for %d multiprocessors", (int)key->processors);
    }
    snprintf(buffer, size,
             "%s (%lld, %lld) = %s %s (ld %lld) x %s %s (ld %lld), k %lld, beta %d, aligned to %d, "
             "%d, %d bytes%s",
             nd_dtype_name((nd_dtype)key->d), (long long)key->m, (long long)key->n,
             nd_dtype_name((nd_dtype)key->a), key->a_transposed ? "T" : "N", (long long)key->lda,
             nd_dtype_name((nd_dtype)key->b), key->b_transposed ? "T" : "N", (long long)key->ldb,
             (long long)key->k, (int)key->beta, (int)key->align_a, (int)key->align_b,
             (int)key->align_d, limit);
    return buffer;
}

/* The library fills only the entries whose state is success. */
static int keep_valid(cublasLtMatmulHeuristicResult_t *results, int count)
{
    int valid = 0;
    for (int i = 0; i < count; i++) {
        if (results[i].state == CUBLAS_STATUS_SUCCESS) {
            results[valid++] = results[i];
        }
    }
    return valid;
}

nd_status nd_lt_plan_init(nd_lt *lt, nd_lt_key key, int wanted, nd_lt_plan *plan,
                          cublasLtMatmulHeuristicResult_t *results, int *found)
{
    const nd_lt_library *l = &lt->library;
    cublasLtMatmulPreferenceOpaque_t preference;
    memset(plan, 0, sizeof *plan);
    ND_TRY(describe(l, &key, lt->workspace, plan));
    ND_TRY(prefer(l, &key, &preference));
    *found = 0;
    cublasStatus_t status = l->heuristic(lt->handle, &plan->desc, &plan->a, &plan->b, &plan->d,
                                         &plan->d, &preference, wanted, results, found);
    *found = status == CUBLAS_STATUS_SUCCESS ? keep_valid(results, *found) : 0;
    if (*found == 0) {
        char form[256];
        return nd_fail(ND_ERR_INTERNAL, "cuBLASLt has no algorithm (status %d) for %s", (int)status,
                       key_format(&key, form, sizeof form));
    }
    plan->key = key;
    plan->used = true;
    plan->algorithm = results[0].algo;
    plan->workspace = results[0].workspaceSize;
    return ND_OK;
}

/* Attributes have 2 or 4 bytes. */
static int64_t trait(const nd_lt_library *l, const cublasLtMatmulAlgo_t *algorithm,
                     cublasLtMatmulAlgoConfigAttributes_t attribute, size_t bytes)
{
    uint32_t value = 0;
    size_t written = 0;
    cublasStatus_t status = l->algorithm_get(algorithm, attribute, &value, bytes, &written);
    return status == CUBLAS_STATUS_SUCCESS && written == bytes ? (int64_t)value : -1;
}

nd_lt_traits nd_lt_traits_of(const nd_lt_library *l, const cublasLtMatmulAlgo_t *algorithm)
{
    return (nd_lt_traits){
#define ND_LT_TRAIT(field, attribute, bytes) .field = trait(l, algorithm, attribute, bytes),
        ND_LT_TRAITS(ND_LT_TRAIT)
#undef ND_LT_TRAIT
    };
}

static nd_status refuse(const nd_lt_library *l, const nd_lt_choice *choice, const char *why)
{
    char form[256];
    return nd_fail(ND_ERR_CONFIG,
                   "cuBLASLt %zu does not accept the recorded algorithm %lld (%s) for %s; time "
                   "again with kernels.autotune, without kernels.autotune_from",
                   l->version(), (long long)choice->traits.id, why,
                   key_format(&choice->key, form, sizeof form));
}

/* Compares what the library reads out of the recorded algorithm, and the workspace that it asks
 * for, with the record. */
static nd_status compare(const nd_lt_library *l, const nd_lt_choice *choice, size_t workspace)
{
    cublasLtMatmulAlgo_t algorithm;
    memcpy(&algorithm, choice->algorithm, sizeof algorithm);
    nd_lt_traits here = nd_lt_traits_of(l, &algorithm);
    const struct {
        const char *name;
        int64_t recorded, here;
    } pairs[] = {
#define ND_LT_PAIR(field, attribute, bytes) {#field, choice->traits.field, here.field},
        ND_LT_TRAITS(ND_LT_PAIR)
#undef ND_LT_PAIR
            {"workspace", choice->workspace, (int64_t)workspace},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        if (pairs[i].recorded != pairs[i].here) {
            char why[128];
            snprintf(why, sizeof why, "its %s is %lld here and %lld in the record", pairs[i].name,
                     (long long)pairs[i].here, (long long)pairs[i].recorded);
            return refuse(l, choice, why);
        }
    }
    return ND_OK;
}

nd_status nd_lt_plan_restore(nd_lt *lt, const nd_lt_choice *choice, nd_lt_plan *plan)
{
    const nd_lt_library *l = &lt->library;
    cublasLtMatmulHeuristicResult_t result = {0};
    _Static_assert(sizeof plan->algorithm == sizeof choice->algorithm, "recorded whole");
    memset(plan, 0, sizeof *plan);
    memcpy(&plan->algorithm, choice->algorithm, sizeof plan->algorithm);
    ND_TRY(describe(l, &choice->key, lt->workspace, plan));
    cublasStatus_t status = l->check(lt->handle, &plan->desc, &plan->a, &plan->b, &plan->d,
                                     &plan->d, &plan->algorithm, &result);
    if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > ND_LT_WORKSPACE) {
        char why[128];
        snprintf(why, sizeof why, "status %d, %zu bytes of workspace of at most %d", (int)status,
                 result.workspaceSize, (int)ND_LT_WORKSPACE);
        return refuse(l, choice, why);
    }
    ND_TRY(compare(l, choice, result.workspaceSize));
    plan->key = choice->key;
    plan->used = true;
    plan->workspace = result.workspaceSize;
    plan->chosen = true;
    plan->candidates = (int)choice->candidates;
    plan->picked = (int)choice->picked;
    plan->seconds = choice->seconds;
    plan->first_seconds = choice->first_seconds;
    return ND_OK;
}

static uint32_t hash_of(const nd_lt_key *key)
{
    const unsigned char *bytes = (const unsigned char *)key;
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < sizeof *key; i++) {
        hash = (hash ^ bytes[i]) * 16777619u;
    }
    return hash;
}

nd_lt_plan *nd_lt_slot(nd_lt *lt, const nd_lt_key *key)
{
    uint32_t at = hash_of(key) % ND_LT_PLANS;
    while (lt->plans[at].used && memcmp(&lt->plans[at].key, key, sizeof *key) != 0) {
        at = (at + 1) % ND_LT_PLANS;
    }
    return &lt->plans[at];
}

/* The library refuses products whose scales do not lie at multiples of 16 bytes (cuBLASLt 13.1 on
 * an H200: status 15 from cublasLtMatmul). Such a pair of scales is copied behind the workspace,
 * where the product of the same stream reads it. */
static nd_status set_scales(nd_lt *lt, nd_stream *stream, nd_lt_plan *plan, const nd_lt_operands *x)
{
    enum { ALIGNED = 16, STRIDE = ALIGNED / sizeof(float) };
    const nd_lt_library *l = &lt->library;
    const float *a = x->scale_a, *b = x->scale_b;
    if (plan->key.scaling == ND_LT_SCALARS && a && b &&
        (nd_lt_alignment(a) < ALIGNED || nd_lt_alignment(b) < ALIGNED)) {
        float *to = (float *)(void *)((char *)lt->workspace + ND_LT_WORKSPACE);
        int copied = nd_cuda_copy_scales(nd_cuda_stream(stream), to, STRIDE, a, b);
        ND_TRY(nd_cuda_op_done(stream, "copy_scales", (cudaError_t)copied));
        a = to;
        b = to + STRIDE;
    }
    ND_CUBLAS(l->desc_set(&plan->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a, sizeof a));
    ND_CUBLAS(l->desc_set(&plan->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &b, sizeof b));
    return ND_OK;
}

nd_status nd_lt_run(nd_lt *lt, nd_stream *stream, nd_lt_plan *plan, const nd_lt_operands *x)
{
    const float one = 1.0f, beta = (float)plan->key.beta;
    const nd_lt_library *l = &lt->library;
    if (lt->preparing) {
        return ND_OK;
    }
    if (plan->key.scaling != ND_LT_UNSCALED) {
        ND_TRY(set_scales(lt, stream, plan, x));
    }
    cublasStatus_t made = l->matmul(lt->handle, &plan->desc, &one, x->a, &plan->a, x->b, &plan->b,
                                    &beta, x->d, &plan->d, x->d, &plan->d, &plan->algorithm,
                                    lt->workspace, plan->workspace, nd_cuda_stream(stream));
    return made == CUBLAS_STATUS_SUCCESS ? ND_OK : nd_lt_failed(made, "cublasLtMatmul");
}

// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/lt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/context.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/kernels.h"
#include "kernels/ops_check.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/device/cuda_check.h"

enum {
    VECTOR_SCALES_SINCE = 120900,
    SPARE = 4 /* algorithms to ask for; the first valid one is used */
};

/* Pointers of one call. Scales: NULL for 1. */
typedef struct lt_operands {
    const void *a, *b;
    void *d;
    const float *scale_a, *scale_b;
} lt_operands;

/* Largest power of two, at most 256, that divides the address. */
static int32_t alignment_of(const void *p)
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

/* Makes the descriptor, the layouts and up to `wanted` algorithms, best first, for a plan of the
 * table. *found is at least 1 on success. Until a product sets its scales, their pointers lead into
 * the workspace. */
static nd_status init_plan(nd_lt *lt, nd_lt_key key, int wanted, nd_lt_plan *plan,
                           cublasLtMatmulHeuristicResult_t *results, int *found)
{
    const nd_lt_library *l = &lt->library;
    cublasLtMatmulPreferenceOpaque_t preference;
    int filled = 0;
    memset(plan, 0, sizeof *plan);
    ND_TRY(describe(l, &key, lt->workspace, plan));
    ND_TRY(prefer(l, &key, &preference));
    cublasStatus_t status = l->heuristic(lt->handle, &plan->desc, &plan->a, &plan->b, &plan->d,
                                         &plan->d, &preference, wanted, results, &filled);
    *found = 0;
    for (int i = 0; i < filled && status == CUBLAS_STATUS_SUCCESS; i++) {
        if (results[i].state == CUBLAS_STATUS_SUCCESS) { /* only these entries are filled */
            results[(*found)++] = results[i];
        }
    }
    if (*found == 0) {
        char form[256];
        return nd_fail(ND_ERR_INTERNAL, "cuBLASLt has no algorithm (status %d) for %s", (int)status,
                       key_format(&key, form, sizeof form));
    }
    plan->record.key = key;
    plan->used = true;
    plan->algorithm = results[0].algo;
    plan->record.workspace = (int64_t)results[0].workspaceSize;
    return ND_OK;
}

/* Makes a plan from a recorded algorithm, of this version of the library. ND_ERR_CONFIG when the
 * library does not accept it, or asks for another workspace than is recorded. */
static nd_status restore_plan(nd_lt *lt, const nd_lt_choice *choice, nd_lt_plan *plan)
{
    const nd_lt_library *l = &lt->library;
    cublasLtMatmulHeuristicResult_t result = {0};
    _Static_assert(sizeof plan->algorithm == sizeof choice->algorithm, "recorded whole");
    memset(plan, 0, sizeof *plan);
    memcpy(&plan->algorithm, choice->algorithm, sizeof plan->algorithm);
    ND_TRY(describe(l, &choice->key, lt->workspace, plan));
    cublasStatus_t status = l->check(lt->handle, &plan->desc, &plan->a, &plan->b, &plan->d,
                                     &plan->d, &plan->algorithm, &result);
    if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > ND_LT_WORKSPACE ||
        (int64_t)result.workspaceSize != choice->workspace) {
        char form[256];
        return nd_fail(ND_ERR_CONFIG,
                       "cuBLASLt %zu does not accept the recorded algorithm (status %d, %zu bytes "
                       "of workspace, %lld in the record) for %s; time again with "
                       "kernels.autotune, without kernels.autotune_from",
                       l->version(), (int)status, result.workspaceSize,
                       (long long)choice->workspace, key_format(&choice->key, form, sizeof form));
    }
    plan->record = *choice;
    plan->used = plan->chosen = true;
    return ND_OK;
}

/* The place of a form in the table: its plan, or a free one. */
static nd_lt_plan *slot_of(nd_lt *lt, const nd_lt_key *key)
{
    const unsigned char *bytes = (const unsigned char *)key;
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < sizeof *key; i++) {
        hash = (hash ^ bytes[i]) * 16777619u;
    }
    uint32_t at = hash % ND_LT_PLANS;
    while (lt->plans[at].used && memcmp(&lt->plans[at].record.key, key, sizeof *key) != 0) {
        at = (at + 1) % ND_LT_PLANS;
    }
    return &lt->plans[at];
}

/* The library refuses products whose scales do not lie at multiples of 16 bytes (cuBLASLt 13.1 on
 * an H200: status 15 from cublasLtMatmul). Such a pair of scales is copied behind the workspace,
 * where the product of the same stream reads it. */
static nd_status set_scales(nd_lt *lt, nd_stream *stream, nd_lt_plan *plan, const lt_operands *x)
{
    enum { ALIGNED = 16, STRIDE = ALIGNED / sizeof(float) };
    const nd_lt_library *l = &lt->library;
    const float *a = x->scale_a, *b = x->scale_b;
    if (plan->record.key.scaling == ND_LT_SCALARS && a && b &&
        (alignment_of(a) < ALIGNED || alignment_of(b) < ALIGNED)) {
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

/* Enqueues the product of a plan; nothing while plans are prepared. */
static nd_status run_plan(nd_lt *lt, nd_stream *stream, nd_lt_plan *plan, const lt_operands *x)
{
    const float one = 1.0f, beta = (float)plan->record.key.beta;
    const nd_lt_library *l = &lt->library;
    if (lt->preparing) {
        return ND_OK;
    }
    if (plan->record.key.scaling != ND_LT_UNSCALED) {
        ND_TRY(set_scales(lt, stream, plan, x));
    }
    cublasStatus_t made =
        l->matmul(lt->handle, &plan->desc, &one, x->a, &plan->a, x->b, &plan->b, &beta, x->d,
                  &plan->d, x->d, &plan->d, &plan->algorithm, lt->workspace,
                  (size_t)plan->record.workspace, nd_cuda_stream(stream));
    return made == CUBLAS_STATUS_SUCCESS ? ND_OK : nd_lt_failed(made, "cublasLtMatmul");
}

/* Autotune (cuda_ops.h): the fastest of the library's algorithms for each form, and choices in and
 * out. */

enum { REPEATS = 5, MOST_REPEATS = 16 };

static nd_lt *lt_of(const nd_device *device)
{
    return nd_cuda_context_of(device)->lt;
}

static void tune(nd_device *device, int candidates, double seconds)
{
    nd_lt *lt = lt_of(device);
    lt->candidates = candidates > ND_LT_CANDIDATES ? ND_LT_CANDIDATES : candidates;
    lt->deadline = nd_clock_seconds() + seconds;
    for (int i = 0; i < ND_LT_PLANS; i++) {
        lt->plans[i].touched = false;
    }
}

static nd_status median(nd_stream *stream, nd_status (*call)(void *context, nd_stream *stream),
                        void *context, int repeats, double *seconds)
{
    cudaEvent_t events[2 * MOST_REPEATS] = {0};
    float ms[MOST_REPEATS];
    cudaError_t error = cudaSuccess;
    ND_ASSERT(repeats > 0 && repeats <= MOST_REPEATS);
    nd_status status = call(context, stream); /* warm */
    for (int i = 0; i < 2 * repeats && status == ND_OK && error == cudaSuccess; i++) {
        error = cudaEventCreate(&events[i]);
        error = error == cudaSuccess ? cudaEventRecord(events[i], nd_cuda_stream(stream)) : error;
        if (error == cudaSuccess && i % 2 == 0) {
            status = call(context, stream);
        }
    }
    status = status == ND_OK && error == cudaSuccess ? nd_stream_sync(stream) : status;
    for (int i = 0; i < repeats && status == ND_OK && error == cudaSuccess; i++) {
        error = cudaEventElapsedTime(&ms[i], events[2 * i], events[2 * i + 1]);
        for (int j = i; j > 0 && ms[j] < ms[j - 1]; j--) {
            float swap = ms[j];
            ms[j] = ms[j - 1];
            ms[j - 1] = swap;
        }
    }
    for (int i = 0; i < 2 * repeats && events[i]; i++) {
        cudaEventDestroy(events[i]);
    }
    if (status == ND_OK && error != cudaSuccess) {
        return nd_cuda_failed(stream->device, error, "an event that times");
    }
    ND_TRY(status);
    *seconds = (double)ms[repeats / 2] * 1e-3;
    return ND_OK;
}

typedef struct candidate {
    nd_lt *lt;
    nd_lt_plan *plan;
    const lt_operands *x;
} candidate;

static nd_status run_candidate(void *context, nd_stream *stream)
{
    candidate *c = context;
    return run_plan(c->lt, stream, c->plan, c->x);
}

/* Sets the algorithm, and the workspace that the library asks for when it checks it, which a replay
 * compares. False when a record could not restore it: such a one must not be chosen. */
static bool can_be_replayed(nd_lt *lt, nd_lt_plan *plan,
                            const cublasLtMatmulHeuristicResult_t *proposed)
{
    cublasLtMatmulHeuristicResult_t result = {0};
    cublasStatus_t status = lt->library.check(lt->handle, &plan->desc, &plan->a, &plan->b, &plan->d,
                                              &plan->d, &proposed->algo, &result);
    plan->algorithm = proposed->algo;
    plan->record.workspace = (int64_t)result.workspaceSize;
    return status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= ND_LT_WORKSPACE;
}

/* Times the algorithms that the library proposed on the operands of the call, whose result is lost,
 * and keeps the fastest of those that a record can restore. plan->chosen stays false when there is
 * none; then the first algorithm of the library makes the product. */
static nd_status choose_algorithm(nd_lt *lt, nd_stream *stream, nd_lt_plan *plan,
                                  const lt_operands *x,
                                  const cublasLtMatmulHeuristicResult_t *results, int found)
{
    candidate c = {lt, plan, x};
    nd_lt_choice *record = &plan->record;
    double seconds = 0.0;
    for (int i = 0; i < found && nd_clock_seconds() < lt->deadline; i++) {
        if (!can_be_replayed(lt, plan, &results[i])) {
            continue;
        }
        if (median(stream, run_candidate, &c, REPEATS, &seconds) != ND_OK) {
            nd_error_clear(); /* this GPU cannot run it; a broken device fails again below */
            continue;
        }
        record->first_seconds = i == 0 ? seconds : record->first_seconds;
        if (record->candidates++ == 0 || seconds < record->seconds) {
            record->picked = i;
            record->seconds = seconds;
        }
    }
    plan->chosen = can_be_replayed(lt, plan, &results[record->picked]);
    if (!plan->chosen) {
        record->workspace = (int64_t)results[0].workspaceSize;
    }
    return nd_stream_sync(stream);
}

static int read_choices(const nd_device *device, nd_lt_choice out[ND_LT_PLANS])
{
    const nd_lt *lt = lt_of(device);
    int count = 0;
    for (int number = 0; number < lt->plan_count; number++) {
        for (int i = 0; i < ND_LT_PLANS; i++) {
            const nd_lt_plan *p = &lt->plans[i];
            if (!p->used || !p->chosen || !p->touched || p->number != number) {
                continue;
            }
            out[count] = p->record;
            memcpy(out[count++].algorithm, &p->algorithm, sizeof p->algorithm);
        }
    }
    return count;
}

static nd_status install(nd_device *device, const nd_lt_choice *choices, int count)
{
    nd_lt *lt = lt_of(device);
    memset(lt->plans, 0, sizeof lt->plans);
    lt->plan_count = 0;
    lt->candidates = 1;
    lt->installed = true;
    for (int i = 0; i < count && i < ND_LT_PLANS - 1; i++) {
        nd_lt_plan *plan = slot_of(lt, &choices[i].key);
        if (plan->used) {
            return nd_fail(ND_ERR_DATA, "choice %d of autotune is for the form of an earlier one",
                           i);
        }
        ND_TRY(restore_plan(lt, &choices[i], plan));
        plan->number = lt->plan_count++;
    }
    return ND_OK;
}

static int count_unchosen(const nd_device *device)
{
    const nd_lt *lt = lt_of(device);
    int count = 0;
    for (int i = 0; i < ND_LT_PLANS && lt->installed; i++) {
        count += lt->plans[i].used && !lt->plans[i].refused && !lt->plans[i].chosen;
    }
    return count;
}

const struct nd_tuner nd_lt_tuner = {.tune = tune,
                                     .choices = read_choices,
                                     .install = install,
                                     .unchosen = count_unchosen,
                                     .median = median};

nd_status nd_lt_create(nd_device *device, int capability, nd_lt **out)
{
    nd_lt *lt = NULL;
    ND_TRY(ND_ALLOC(1, &lt));
    nd_status status = ND_OK;
    lt->device = device;
    lt->capability = capability;
    lt->candidates = 1;
    ND_TRY_OUT(nd_lt_library_open(&lt->library));
    ND_TRY_OUT(nd_device_alloc(device, ND_LT_WORKSPACE + ND_LT_SCALES, &lt->workspace));
    cublasStatus_t created = lt->library.create(&lt->handle);
    if (created != CUBLAS_STATUS_SUCCESS) {
        lt->handle = NULL;
        status = nd_lt_failed(created, "cublasLtCreate");
    }
out:
    if (status != ND_OK) {
        nd_lt_destroy(lt);
        return status;
    }
    *out = lt;
    return ND_OK;
}

void nd_lt_destroy(nd_lt *lt)
{
    if (lt) {
        if (lt->handle) {
            lt->library.destroy(lt->handle);
        }
        if (lt->workspace) {
            nd_device_free(lt->device, lt->workspace, ND_LT_WORKSPACE + ND_LT_SCALES);
        }
        free(lt);
    }
}

/* The library has just failed to plan or to make a product with vectors of scales: from now on the
 * caller applies the scales of this form itself. Said once for each kind of form. */
static void refuse_vectors(nd_lt *lt, nd_lt_plan *plan)
{
    const nd_lt_key *key = &plan->record.key;
    bool gradient = key->b == ND_DTYPE_F8_E5M2, wide = key->d == ND_DTYPE_F32;
    uint32_t kind = 1u << (4 * gradient + 2 * wide + (key->beta != 0));
    plan->refused = true;
    plan->chosen = false;
    if (!(lt->told & kind)) {
        lt->told |= kind;
        nd_log_info("cuBLASLt %zu takes no scales of rows and columns for products of %s and %s "
                    "%s %s (%s); a kernel of ndtrain applies them, which takes longer",
                    lt->library.version(), nd_dtype_name((nd_dtype)key->b),
                    nd_dtype_name((nd_dtype)key->a), key->beta ? "added to" : "in",
                    nd_dtype_name((nd_dtype)key->d), nd_error_last()->message);
    }
    nd_error_clear();
}

static nd_status make_plan(nd_lt *lt, nd_stream *stream, const nd_lt_key *key, const lt_operands *x,
                           nd_lt_plan *plan)
{
    cublasLtMatmulHeuristicResult_t results[ND_LT_CANDIDATES];
    int found = 0, wanted = lt->candidates > SPARE ? lt->candidates : SPARE;
    if (lt->plan_count == ND_LT_PLANS - 1) {
        return nd_fail(ND_ERR_INTERNAL, "more than %d forms of matrix products", ND_LT_PLANS - 1);
    }
    nd_status status = init_plan(lt, *key, wanted, plan, results, &found);
    if (status != ND_OK && key->scaling == ND_LT_VECTORS) {
        plan->record.key = *key;
        plan->used = true;
        refuse_vectors(lt, plan);
    } else {
        ND_TRY(status);
    }
    plan->number = lt->plan_count++;
    if (lt->candidates > 1 && !plan->refused) {
        ND_TRY(choose_algorithm(lt, stream, plan, x, results, found));
    }
    return ND_OK;
}

/* Finds or makes the plan of a form. *out is NULL when the library refuses vectors of scales for
 * it; the caller then applies the scales itself. */
static nd_status plan_of(nd_lt *lt, nd_stream *stream, const nd_lt_key *form, const lt_operands *x,
                         nd_lt_plan **out)
{
    nd_lt_key key = *form;
    key.processors = lt->processors;
    nd_lt_plan *plan = slot_of(lt, &key);
    if (!plan->used) {
        ND_TRY(make_plan(lt, stream, &key, x, plan));
    }
    plan->touched = true;
    *out = plan->refused ? NULL : plan;
    return ND_OK;
}

/* c (+)= a b of rows as they are stored. */
static nd_lt_key key_of(nd_tensor c, nd_tensor a, nd_tensor b, bool beta)
{
    return (nd_lt_key){
        .m = c.shape[1],
        .n = c.shape[0],
        .k = a.shape[1],
        .lda = b.stride[0],
        .ldb = a.stride[0],
        .ldd = c.stride[0],
        .a = b.dtype,
        .b = a.dtype,
        .d = c.dtype,
        .beta = beta,
        .align_a = alignment_of(b.data),
        .align_b = alignment_of(a.data),
        .align_d = alignment_of(c.data),
    };
}

static nd_status matmul(nd_lt *lt, nd_stream *stream, const nd_product_args *args)
{
    const nd_tensor c = args->c, a = args->a.stored, b = args->b.stored;
    const int64_t m = c.shape[0], n = c.shape[1], k = a.shape[args->a_transposed ? 0 : 1];
    nd_lt_plan *plan = NULL;
    nd_lt_key key = key_of(c, a, b, args->beta != 0.0f);
    lt_operands x = {.a = b.data, .b = a.data, .d = c.data};
    ND_ASSERT(nd_is_act(a) && nd_is_act(c) && a.dtype == b.dtype && nd_is_2d(c, m, n));
    ND_ASSERT(nd_is_2d(a, args->a_transposed ? k : m, args->a_transposed ? m : k));
    ND_ASSERT(nd_is_2d(b, args->b_transposed ? n : k, args->b_transposed ? k : n));
    key.k = k;
    key.a_transposed = args->b_transposed;
    key.b_transposed = args->a_transposed;
    ND_TRY(plan_of(lt, stream, &key, &x, &plan));
    return run_plan(lt, stream, plan, &x);
}

/* The stored matrix whose rows run along the summed axis: (rows of op(a), k), or (columns of op(b),
 * k). */
static nd_tensor along_k(const nd_matrix *x, bool as_stored)
{
    ND_ASSERT(x->stored.axes == 2 && x->transposed == !as_stored);
    return x->stored;
}

static nd_lt_key fp8_key(nd_tensor c, nd_tensor a, nd_tensor b, bool beta, bool fast,
                         nd_lt_scaling scaling)
{
    nd_lt_key key = key_of(c, a, b, beta);
    key.a_transposed = true;
    key.fast = fast;
    key.scaling = (int32_t)scaling;
    return key;
}

static nd_status check_fp8(nd_tensor c, nd_tensor a, nd_tensor b)
{
    int64_t m = c.shape[0], n = c.shape[1], k = a.shape[1];
    bool sixteen =
        m % 16 == 0 && n % 16 == 0 && k % 16 == 0 && a.stride[0] % 16 == 0 && b.stride[0] % 16 == 0;
    bool aligned = alignment_of(a.data) >= 16 && alignment_of(b.data) >= 16 &&
                   alignment_of(c.data) >= 16 &&
                   c.stride[0] * (int64_t)nd_dtype_size(c.dtype) % 16 == 0;
    if (!sixteen || !aligned) {
        return nd_fail(ND_ERR_INTERNAL,
                       "an FP8 product of (%lld, %lld) with k %lld, rows %lld and %lld apart: all "
                       "must be multiples of 16, and matrices aligned to 16 bytes",
                       (long long)m, (long long)n, (long long)k, (long long)a.stride[0],
                       (long long)b.stride[0]);
    }
    return ND_OK;
}

/* A product of codes alone into `product`, whose scales our kernel then applies. a and b are stored
 * with k as their contiguous axis. */
static nd_status rescaled_rows(nd_lt *lt, nd_stream *stream, nd_tensor a, nd_tensor b, bool fast,
                               const nd_fp8_rescale_args *rescale)
{
    nd_lt_plan *plan = NULL;
    nd_lt_key key = fp8_key(rescale->product, a, b, false, fast, ND_LT_SCALARS);
    lt_operands x = {.a = b.data, .b = a.data, .d = rescale->product.data};
    ND_TRY(plan_of(lt, stream, &key, &x, &plan));
    if (lt->preparing) {
        return ND_OK;
    }
    ND_TRY(run_plan(lt, stream, plan, &x));
    int launched = nd_cuda_fp8_rescale(nd_cuda_stream(stream), rescale);
    return nd_cuda_op_done(stream, "fp8_rescale", (cudaError_t)launched);
}

static nd_status rescaled(nd_lt *lt, nd_stream *stream, const nd_product_args *args, nd_tensor a,
                          nd_tensor b)
{
    const nd_tensor c = args->c;
    int64_t m = c.shape[0], n = c.shape[1];
    bool fast = args->fast_accumulation;
    nd_fp8_rescale_args all = {.c = c,
                               .product = c,
                               .a = args->a.inverse,
                               .b = args->b.inverse,
                               .a_rows = args->a.granularity != ND_PER_TENSOR,
                               .b_columns = args->b.granularity != ND_PER_TENSOR,
                               .beta = args->beta};
    if (c.dtype == ND_DTYPE_F32 && args->beta == 0.0f) {
        return rescaled_rows(lt, stream, a, b, fast, &all);
    }
    int64_t step = ND_LT_PRODUCT_BYTES / (n * 4) / 16 * 16;
    step = step < 16 ? 16 : step;
    for (int64_t begin = 0; begin < m; begin += step) {
        int64_t rows = m - begin < step ? m - begin : step;
        nd_fp8_rescale_args part = all;
        part.c = nd_tensor_rows(c, begin, rows);
        part.product = nd_tensor_2d(args->scratch, ND_DTYPE_F32, rows, n);
        part.a += all.a_rows ? begin : 0;
        ND_TRY(rescaled_rows(lt, stream, nd_tensor_rows(a, begin, rows), b, fast, &part));
    }
    return ND_OK;
}

static nd_status matmul_fp8(nd_lt *lt, nd_stream *stream, const nd_product_args *args)
{
    const nd_matrix *a = &args->a, *b = &args->b;
    const nd_tensor c = args->c;
    nd_tensor rows = along_k(a, !args->a_transposed), columns = along_k(b, args->b_transposed);
    bool a_vector = a->granularity != ND_PER_TENSOR, b_vector = b->granularity != ND_PER_TENSOR;
    nd_lt_plan *plan = NULL;
    lt_operands x = {columns.data, rows.data, c.data, b->inverse, a->inverse};
    ND_TRY(check_fp8(c, rows, columns));
    if (a_vector == b_vector) {
        bool newer = lt->capability >= 90 && lt->library.version() >= VECTOR_SCALES_SINCE;
        nd_lt_key key = fp8_key(c, rows, columns, args->beta != 0.0f, args->fast_accumulation,
                                a_vector ? ND_LT_VECTORS : ND_LT_SCALARS);
        if (!a_vector || newer) {
            ND_TRY(plan_of(lt, stream, &key, &x, &plan));
        }
    }
    if (plan) {
        /* Some forms may be refused only here; a device that has failed fails again. */
        nd_status status = run_plan(lt, stream, plan, &x);
        if (status == ND_OK || !a_vector) {
            return status;
        }
        refuse_vectors(lt, plan);
    }
    return rescaled(lt, stream, args, rows, columns);
}

nd_status nd_lt_product(nd_lt *lt, nd_stream *stream, const nd_product_args *args, bool prepare)
{
    ND_ASSERT(!prepare || lt->candidates <= 1); /* or the first use would time it */
    lt->preparing = prepare;
    if (nd_tensor_count(args->c) == 0) {
        return ND_OK;
    }
    return nd_matrix_is_fp8(&args->a) ? matmul_fp8(lt, stream, args) : matmul(lt, stream, args);
}

// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/lt.h"

#include <stdlib.h>

#include "kernels/cuda/kernels.h"
#include "runtime/base/log.h"
#include "runtime/device/cuda_check.h"

enum {
    VECTOR_SCALES_SINCE = 120900,
    SPARE = 4 /* algorithms to ask for; the first valid one is used */
};

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
    const nd_lt_key *key = &plan->key;
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

static nd_status make_plan(nd_lt *lt, nd_stream *stream, const nd_lt_key *key,
                           const nd_lt_operands *x, nd_lt_plan *plan)
{
    cublasLtMatmulHeuristicResult_t results[ND_LT_CANDIDATES];
    int found = 0, wanted = lt->candidates > SPARE ? lt->candidates : SPARE;
    if (lt->plan_count == ND_LT_PLANS - 1) {
        return nd_fail(ND_ERR_INTERNAL, "more than %d forms of matrix products", ND_LT_PLANS - 1);
    }
    nd_status status = nd_lt_plan_init(lt, *key, wanted, plan, results, &found);
    if (status != ND_OK && key->scaling == ND_LT_VECTORS) {
        plan->key = *key;
        plan->used = true;
        refuse_vectors(lt, plan);
    } else {
        ND_TRY(status);
    }
    plan->number = lt->plan_count++;
    if (lt->candidates > 1 && !plan->refused) {
        ND_TRY(nd_lt_choose(lt, stream, plan, x, results, found));
    }
    return ND_OK;
}

/* Finds or makes the plan of a form. *out is NULL when the library refuses vectors of scales for
 * it; the caller then applies the scales itself. */
static nd_status plan_of(nd_lt *lt, nd_stream *stream, const nd_lt_key *form,
                         const nd_lt_operands *x, nd_lt_plan **out)
{
    nd_lt_key key = *form;
    key.processors = lt->processors;
    nd_lt_plan *plan = nd_lt_slot(lt, &key);
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
        .align_a = nd_lt_alignment(b.data),
        .align_b = nd_lt_alignment(a.data),
        .align_d = nd_lt_alignment(c.data),
    };
}

nd_status nd_lt_matmul(nd_lt *lt, nd_stream *stream, const nd_product_args *args)
{
    const nd_tensor c = args->c, a = args->a.stored, b = args->b.stored;
    nd_lt_plan *plan = NULL;
    nd_lt_key key = key_of(c, a, b, args->beta != 0.0f);
    nd_lt_operands x = {.a = b.data, .b = a.data, .d = c.data};
    key.k = a.shape[args->a_transposed ? 0 : 1];
    key.a_transposed = args->b_transposed;
    key.b_transposed = args->a_transposed;
    ND_TRY(plan_of(lt, stream, &key, &x, &plan));
    return nd_lt_run(lt, stream, plan, &x);
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
    bool aligned = nd_lt_alignment(a.data) >= 16 && nd_lt_alignment(b.data) >= 16 &&
                   nd_lt_alignment(c.data) >= 16 &&
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
    nd_lt_operands x = {.a = b.data, .b = a.data, .d = rescale->product.data};
    ND_TRY(plan_of(lt, stream, &key, &x, &plan));
    if (lt->preparing) {
        return ND_OK;
    }
    ND_TRY(nd_lt_run(lt, stream, plan, &x));
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

nd_status nd_lt_matmul_fp8(nd_lt *lt, nd_stream *stream, const nd_product_args *args)
{
    const nd_matrix *a = &args->a, *b = &args->b;
    const nd_tensor c = args->c;
    nd_tensor rows = along_k(a, !args->a_transposed), columns = along_k(b, args->b_transposed);
    bool a_vector = a->granularity != ND_PER_TENSOR, b_vector = b->granularity != ND_PER_TENSOR;
    nd_lt_plan *plan = NULL;
    nd_lt_operands x = {columns.data, rows.data, c.data, b->inverse, a->inverse};
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
        nd_status status = nd_lt_run(lt, stream, plan, &x);
        if (status == ND_OK || !a_vector) {
            return status;
        }
        refuse_vectors(lt, plan);
    }
    return rescaled(lt, stream, args, rows, columns);
}

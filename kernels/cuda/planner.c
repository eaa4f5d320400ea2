// SPDX-License-Identifier: Apache-2.0
/*
 * What a plan of a job on GPUs needs to know of the CUDA backend: sizes, by formula. Pure
 * arithmetic without headers of CUDA, so that every build can plan such a job.
 */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/documents.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/sdpa.h"
#include "kernels/cuda/sdpa_parts.h"
#include "runtime/base/math.h"
#include "runtime/tensor/fp8.h"

enum { HEAD_DIM_MAX = 128, LEAST_SCRATCH = 256 };

bool nd_cuda_sdpa_is_cudnn(const nd_attention *a, nd_dtype act)
{
    return act == ND_DTYPE_BF16 && a->head_dim % 8 == 0 && a->head_dim <= HEAD_DIM_MAX;
}

bool nd_cuda_sdpa_reads_delta(const nd_attention *a, nd_dtype act)
{
    return !nd_cuda_sdpa_is_cudnn(a, act) || !nd_sdpa_always_fits(a);
}

size_t nd_cuda_sdpa_scratch_by_formula(const nd_attention *a, nd_dtype act, bool backward,
                                       int64_t ordered)
{
    if (!nd_cuda_sdpa_is_cudnn(a, act)) {
        return LEAST_SCRATCH;
    }
    int64_t most = backward ? ordered : 0;
    nd_sdpa_cut cut = nd_sdpa_cut_block(a, most, backward);
    size_t workspace = LEAST_SCRATCH;
    nd_sdpa_walk walk = {0};
    nd_sdpa_piece p;
    while (nd_sdpa_next(&cut, &walk, &p)) {
        size_t bytes = nd_sdpa_workspace_by_formula(a, &p, backward, most > 0);
        workspace = bytes > workspace ? bytes : workspace;
    }
    const size_t bytes = nd_sdpa_layout_of(a, &cut, workspace, backward).end;
    const size_t documents =
        nd_documents_fit(a, ordered > 0) ? nd_documents_scratch_by_formula(a, backward) : 0;
    return nd_max_bytes(bytes, documents);
}

bool nd_ops_cuda_takes_documents(const nd_attention *a, nd_dtype act, bool deterministic)
{
    return nd_cuda_sdpa_is_cudnn(a, act) && nd_documents_fit(a, deterministic);
}

nd_form_rule nd_lt_form(const nd_form_need *need)
{
    const bool along =
        need->role == ND_X_OF_Y || need->role == ND_W_OF_Y || need->role == ND_DY_OF_DX;
    if (!nd_dtype_is_fp8(need->format) || (nd_dtype_is_fp8(need->stored) && along)) {
        return (nd_form_rule){ND_FORM_IS_STORED};
    }
    return (nd_form_rule){ND_FORM_BY_OP, (size_t)(need->rows * need->columns), !along};
}

size_t nd_lt_product_scratch(int64_t m, int64_t n, int64_t k, nd_dtype act)
{
    size_t all = (size_t)(m * n) * 4, sixteen_rows = (size_t)n * 16 * 4;
    size_t most = ND_LT_PRODUCT_BYTES > sixteen_rows ? ND_LT_PRODUCT_BYTES : sixteen_rows;
    return all < most ? all : most;
}

size_t nd_ops_cuda_workspace(void)
{
    return ND_LT_WORKSPACE + ND_LT_SCALES + ND_CUDA_SCRATCH;
}

static size_t attention_scratch(const nd_device *device, const nd_attention *a, nd_dtype act,
                                bool backward)
{
    return nd_cuda_sdpa_scratch_by_formula(a, act, backward, 0);
}

static size_t ordered_attention_scratch(const nd_device *device, const nd_attention *a,
                                        nd_dtype act, bool backward)
{
    return nd_cuda_sdpa_scratch_by_formula(a, act, backward, ND_SDPA_ORDERED_BYTES);
}

static size_t attention_cached_scratch(const nd_device *device, const nd_attention *most,
                                       nd_dtype act)
{
    return 0;
}

static bool attention_uses_delta(const nd_device *device, const nd_attention *a, nd_dtype act)
{
    return nd_cuda_sdpa_reads_delta(a, act);
}

static size_t product_scratch(const nd_device *device, int64_t m, int64_t n, int64_t k,
                              nd_dtype act)
{
    return nd_lt_product_scratch(m, n, k, act);
}

static nd_form_rule form(const nd_device *device, const nd_form_need *need)
{
    return nd_lt_form(need);
}

nd_ops nd_ops_cuda_planner(bool deterministic)
{
    nd_ops ops = {.name = "cuda",
                  .limits = ND_CUDA_LIMITS,
                  .fp8_rows = ND_CUDA_FP8_ROWS,
                  ND_EACH_QUERY(ND_QUERY_ENTRY, )};
    if (deterministic) {
        ops.attention_scratch = ordered_attention_scratch;
    }
    return ops;
}

// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prepare.h"

#include "kernels/cuda/context.h"
#include "kernels/cuda/sdpa.h"

static nd_status prepare_matmul(nd_stream *s, nd_tensor c, nd_tensor a, bool a_transposed,
                                nd_tensor b, bool b_transposed, float beta)
{
    nd_lt *lt = nd_cuda_context_of(s->device)->lt;
    if (c.shape[0] == 0 || c.shape[1] == 0) {
        return ND_OK;
    }
    nd_lt_prepare_begin(lt);
    nd_status status = nd_lt_matmul(lt, s, c, a, a_transposed, b, b_transposed, beta);
    nd_lt_prepare_end(lt);
    return status;
}

static nd_status prepare_matmul_fp8(nd_stream *s, nd_tensor c, nd_fp8 a, bool a_transposed,
                                    nd_fp8 b, bool b_transposed, float beta, bool fast_accumulation,
                                    void *scratch)
{
    nd_lt *lt = nd_cuda_context_of(s->device)->lt;
    if (c.shape[0] == 0 || c.shape[1] == 0) {
        return ND_OK;
    }
    nd_lt_prepare_begin(lt);
    nd_status status = nd_lt_matmul_fp8(lt, s, c, &a, a_transposed, &b, b_transposed, beta,
                                        fast_accumulation, scratch);
    nd_lt_prepare_end(lt);
    return status;
}

static nd_status prepare_attention_fwd(nd_stream *s, const nd_attention *a, nd_tensor out,
                                       nd_tensor lse, nd_tensor q, nd_tensor k, nd_tensor v,
                                       void *scratch)
{
    return nd_cuda_sdpa_prepare_fwd(nd_cuda_context_of(s->device), a, out, lse, q, k, v);
}

static nd_status prepare_attention_bwd(nd_stream *s, const nd_attention *a, nd_tensor dq,
                                       nd_tensor dk, nd_tensor dv, nd_tensor q, nd_tensor k,
                                       nd_tensor v, nd_tensor out, nd_tensor dout, nd_tensor lse,
                                       nd_tensor delta, bool add_q, bool add_kv, void *scratch)
{
    return nd_cuda_sdpa_prepare_bwd(nd_cuda_context_of(s->device), a, dq, dk, dv, q, k, v, out,
                                    dout, lse, delta);
}

const nd_ops nd_cuda_prepare_ops = {
    .name = "cuda",
    .matmul = prepare_matmul,
    .matmul_fp8 = prepare_matmul_fp8,
    .attention_fwd = prepare_attention_fwd,
    .attention_bwd = prepare_attention_bwd,
};

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_SDPA_CALL_H
#define ND_CUDA_SDPA_CALL_H
/*
 * Inside sdpa.c: one op of attention as calls of cuDNN. Where a call's operands lie, what its forms
 * are, and what goes through the scratch.
 */
#include "kernels/cuda/context.h"
#include "kernels/cuda/sdpa_cut.h"

typedef struct nd_sdpa_call {
    nd_cuda_context *context;
    const nd_attention *a;
    bool backward;
    nd_sdpa_cut cut;
    nd_tensor q, k, v, out, lse;
    nd_tensor dout, dq, dk, dv; /* backward */
    bool add_q, add_kv;
    /* What cuDNN writes: the results themselves, or the scratch, which has room for one piece. */
    nd_tensor to_q, to_k, to_v;
    bool through_q, through_kv;
    nd_tensor sum_q;        /* F32: of a piece's rows, where their keys are cut */
    nd_tensor sum_k, sum_v; /* F32: of all keys, where pieces add up */
    nd_sdpa_layout layout;
    char *scratch;
} nd_sdpa_call;

/* At a multiple of 16 bytes, with strides of multiples of 8 elements: what cuDNN's vector accesses
 * need. */
bool nd_sdpa_is_aligned(nd_tensor t);
/* (B, S, heads, D) from a row and head on. */
nd_tensor nd_sdpa_at(nd_tensor t, int64_t row, int64_t head);
/* Rows and heads of a (B, S, heads, D) view. */
nd_tensor nd_sdpa_part(nd_tensor t, int64_t row, int64_t rows, int64_t head, int64_t heads);
/* lse with fewer rows, for the plain kernels. */
nd_tensor nd_sdpa_first_rows(nd_tensor lse, int64_t rows);

/*
 * The cut, and what goes through the scratch, of a call whose operands are set. Makes the plans of
 * all its forms that are not there yet.
 */
nd_status nd_sdpa_plan(nd_sdpa_call *call, nd_cuda_context *context);
/* Places what goes through the scratch there. ND_ERR_INTERNAL where less was planned. */
nd_status nd_sdpa_place(nd_sdpa_call *call, void *scratch);

nd_sdpa_form nd_sdpa_form_of(const nd_sdpa_call *call, const nd_sdpa_piece *p);
/*
 * The statistics of a piece as cuDNN has them: packed (B, H, Sq) at a multiple of 16 bytes. Those
 * of a whole block are lse itself; others lie in the scratch, into which nd_sdpa_move_stats copies
 * lse (backward), or out of which it copies into lse (forward).
 */
float *nd_sdpa_stats(const nd_sdpa_call *call, const nd_sdpa_piece *p);
nd_status nd_sdpa_move_stats(nd_stream *stream, const nd_sdpa_call *call, const nd_sdpa_piece *p);
/* dst (+)= src: (B, S, heads, D) views; matrix by matrix. */
nd_status nd_sdpa_store(nd_stream *stream, nd_tensor dst, nd_tensor src, bool add);

#endif

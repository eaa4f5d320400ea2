// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/documents.h"

#include "runtime/base/math.h"

enum { RATIO = 8, LEAST_MOST = 64 };

nd_document_tiers nd_document_tiers_of(const nd_attention *a)
{
    nd_document_tiers t = {.batch = a->batch, .rows = a->sq};
    for (int64_t most = a->sq; most >= LEAST_MOST && t.count < ND_DOCUMENT_TIERS; most /= RATIO) {
        const int64_t least = most / RATIO + 1;
        t.of[t.count++] = (nd_document_tier){least, most, a->batch * nd_ceil_div(a->sq, least)};
    }
    return t;
}

static size_t take(size_t *at, int64_t elements, size_t width)
{
    const size_t begin = *at;
    *at += nd_round_up_bytes((size_t)elements * width, 256);
    return begin;
}

nd_documents_layout nd_documents_layout_of(const nd_attention *a, size_t workspace, bool backward)
{
    const nd_document_tiers tiers = nd_document_tiers_of(a);
    const int64_t tokens = a->batch * a->sq;
    size_t at = nd_round_up_bytes(workspace, 256);
    nd_documents_layout l = {0};
    l.owners = take(&at, tokens, sizeof(int32_t));
    for (int t = 0; t < tiers.count; t++) {
        const int64_t slots = tiers.of[t].slots;
        l.lengths[t] = take(&at, slots, sizeof(int32_t));
        l.starts[t] = take(&at, ND_RAGGED_KINDS * (slots + 1), sizeof(int64_t));
    }
    l.stats = take(&at, tokens * a->heads, sizeof(float));
    l.rows = take(&at, tokens * a->heads * a->head_dim, sizeof(nd_bf16));
    for (int i = 0; i < 2 && backward; i++) {
        l.keys[i] = take(&at, tokens * a->kv_heads * a->head_dim, sizeof(nd_bf16));
    }
    l.end = at;
    return l;
}

/* Heads that are no multiple of 16 are left out: cuDNN's backward needs a workspace for them as if
 * each slot had the longest document of its tier. */
bool nd_documents_fit(const nd_attention *a, bool ordered)
{
    return a->documents && !ordered && a->head_dim % 16 == 0 && a->window == 0 && a->sq == a->sk &&
           nd_document_tiers_of(a).count > 0;
}

/* cuDNN 9.19 takes on Hopper, with T the tokens, 256 bytes for each slot (at least 64 of them) in
 * the forward, and in the backward T H (12 D + 4) bytes (dq, dk and dv in F32 for each query head,
 * one statistic) and below 512 bytes for each slot. */
size_t nd_documents_scratch_by_formula(const nd_attention *a, bool backward)
{
    const nd_document_tiers tiers = nd_document_tiers_of(a);
    const int64_t row = a->heads * (12 * a->head_dim + 4);
    int64_t slots = 64, bytes = 1 << 16;
    for (int t = 0; t < tiers.count; t++) {
        slots = nd_max(slots, tiers.of[t].slots);
    }
    bytes += slots * 512 + (backward ? a->batch * a->sq * row : 0);
    return nd_documents_layout_of(a, (size_t)bytes, backward).end;
}

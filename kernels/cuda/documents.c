// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/documents.h"

#include "runtime/base/math.h"

enum { RATIO = 8, LEAST_MOST = 128 };

nd_document_tiers nd_document_tiers_of(const nd_attention *a)
{
    const int64_t all = a->sq + a->sk;
    nd_document_tiers t = {.batch = a->batch, .rows = a->sq, .keys = a->sk};
    for (int64_t most = all; most >= LEAST_MOST && t.count < ND_DOCUMENT_TIERS; most /= RATIO) {
        const int64_t least = most / RATIO + 1;
        /* Under a diagonal there are at least as many keys as rows, and in whole documents as many.
         */
        const int64_t rows = a->documents == ND_SEGMENTS_FLAT ? most : most / 2;
        const int64_t keys = a->documents == ND_SEGMENTS_WHOLE ? most / 2 : most;
        t.of[t.count++] = (nd_document_tier){least, most, nd_min(rows, a->sq), nd_min(keys, a->sk),
                                             a->batch * nd_ceil_div(all, least)};
    }
    return t;
}

/* The workspace of a backward has, for each KV head, dq, dk and dv in F32 of each of its query
 * heads, and one statistic. */
static int64_t bytes_of_kv_head(const nd_attention *a)
{
    const int64_t row = 4 * a->head_dim + 4, key = 8 * a->head_dim;
    return a->batch * (a->heads / a->kv_heads) * (a->sq * row + a->sk * key);
}

static int64_t kv_heads_of_call(const nd_attention *a)
{
    const int64_t most = nd_max(ND_DOCUMENTS_BYTES / nd_max(bytes_of_kv_head(a), 1), 1);
    int64_t kvs = nd_min(most, a->kv_heads);
    while (a->kv_heads % kvs != 0) {
        kvs--;
    }
    return kvs;
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
    const int64_t tokens = a->batch * a->sq, keys = a->batch * a->sk;
    nd_documents_layout l = {.kvs = kv_heads_of_call(a)};
    const int64_t heads = l.kvs * (a->heads / a->kv_heads);
    size_t at = nd_round_up_bytes(workspace, 256);
    l.owners = take(&at, 2 * tokens, sizeof(int32_t));
    l.key_owners = take(&at, keys, sizeof(int32_t));
    for (int t = 0; t < tiers.count; t++) {
        const int64_t slots = tiers.of[t].slots;
        l.lengths[t] = take(&at, 2 * slots, sizeof(int32_t));
        l.starts[t] = take(&at, ND_RAGGED_KINDS * (slots + 1), sizeof(int64_t));
    }
    l.stats = take(&at, tokens * heads, sizeof(float));
    l.rows = take(&at, tokens * heads * a->head_dim, sizeof(nd_bf16));
    for (int i = 0; i < 2 && backward; i++) {
        l.keys[i] = take(&at, keys * l.kvs * a->head_dim, sizeof(nd_bf16));
    }
    l.end = at;
    return l;
}

/* Heads that are no multiple of 16 are left out: cuDNN's backward needs a workspace for them as if
 * each slot had the longest segment of its tier. */
bool nd_documents_fit(const nd_attention *a, bool ordered)
{
    return a->documents && !ordered && a->head_dim % 16 == 0 && nd_document_tiers_of(a).count > 0 &&
           (a->documents != ND_SEGMENTS_WHOLE || a->sq == a->sk) &&
           (a->documents != ND_SEGMENTS_FLAT || a->window == 0);
}

/* cuDNN 9.19 takes on Hopper 256 bytes for each slot (at least 64 of them) in the forward, and in
 * the backward those of its KV heads and below 512 bytes for each slot. */
size_t nd_documents_scratch_by_formula(const nd_attention *a, bool backward)
{
    const nd_document_tiers tiers = nd_document_tiers_of(a);
    int64_t slots = 64, bytes = 1 << 16;
    for (int t = 0; t < tiers.count; t++) {
        slots = nd_max(slots, tiers.of[t].slots);
    }
    bytes += slots * 512 + (backward ? kv_heads_of_call(a) * bytes_of_kv_head(a) : 0);
    return nd_documents_layout_of(a, (size_t)bytes, backward).end;
}

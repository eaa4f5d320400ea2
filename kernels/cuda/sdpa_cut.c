// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sdpa_cut.h"

static int64_t clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

static int64_t pieces_of(int64_t extent, int64_t step)
{
    return (extent + step - 1) / step;
}

/* Rows [begin, end), which all see a key; `causal`: under the diagonal, which ends at the last key
 * of the last row. */
static void add_band(const nd_attention *a, int64_t begin, int64_t end, bool causal, bool ordered,
                     nd_sdpa_cut *out)
{
    int64_t group = a->heads / a->kv_heads, most_keys = causal ? end + a->diag : a->sk;
    int64_t kvs = a->kv_heads, step = end - begin;
    if (ordered) {
        int64_t row_bytes = a->batch * group * most_keys * 2; /* of one KV head */
        kvs = clamp(ND_SDPA_ORDERED_BYTES / (row_bytes * step), 1, kvs);
        int64_t fit = ND_SDPA_ORDERED_BYTES / row_bytes / 128 * 128;
        step = fit < step ? clamp(fit, 128, step) : step;
    }
    out->bands[out->band_count++] = (nd_sdpa_band){begin, end, step, kvs, causal};
    out->count += pieces_of(end - begin, step) * pieces_of(a->kv_heads, kvs);
    out->adds_keys |= step < end - begin || (causal && end + a->diag < a->sk);
}

nd_sdpa_cut nd_sdpa_cut_block(const nd_attention *a, bool ordered)
{
    nd_sdpa_cut c = {.blind = clamp(-a->diag, 0, a->sq)};
    int64_t causal_end = clamp(a->sk - a->diag, c.blind, a->sq);
    if (causal_end > c.blind) {
        add_band(a, c.blind, causal_end, true, ordered, &c);
    }
    if (causal_end < a->sq) {
        add_band(a, causal_end, a->sq, false, ordered, &c);
    }
    c.adds_keys |= c.band_count != 1;
    return c;
}

nd_sdpa_piece nd_sdpa_piece_at(const nd_attention *a, const nd_sdpa_cut *c, int64_t index)
{
    const nd_sdpa_band *b = &c->bands[0];
    int64_t rows = pieces_of(b->end - b->begin, b->step);
    if (index >= rows * pieces_of(a->kv_heads, b->kvs)) {
        index -= rows * pieces_of(a->kv_heads, b->kvs);
        b = &c->bands[1];
        rows = pieces_of(b->end - b->begin, b->step);
    }
    nd_sdpa_piece p = {.row = b->begin + index % rows * b->step, .kv = index / rows * b->kvs};
    p.rows = clamp(b->step, 1, b->end - p.row);
    p.kvs = clamp(b->kvs, 1, a->kv_heads - p.kv);
    p.keys = b->causal ? p.row + p.rows + a->diag : a->sk;
    p.mask = !b->causal ? ND_SDPA_ALL : p.rows == p.keys ? ND_SDPA_TOP_LEFT : ND_SDPA_BOTTOM_RIGHT;
    return p;
}

static size_t take(size_t *at, int64_t elements, size_t width)
{
    size_t begin = *at;
    *at += ((size_t)elements * width + 255) / 256 * 256;
    return begin;
}

nd_sdpa_layout nd_sdpa_layout_of(const nd_attention *a, const nd_sdpa_cut *c, size_t workspace)
{
    int64_t queries = a->batch * a->sq * a->heads * a->head_dim;
    int64_t keys = a->batch * a->sk * a->kv_heads * a->head_dim;
    size_t at = (workspace + 255) / 256 * 256;
    nd_sdpa_layout l = {0};
    l.dq = take(&at, queries, 2);
    l.dk = take(&at, keys, 2);
    l.dv = take(&at, keys, 2);
    l.sum_k = take(&at, c->adds_keys ? keys : 0, 4);
    l.sum_v = take(&at, c->adds_keys ? keys : 0, 4);
    l.end = at;
    return l;
}

/* cuDNN 9.19 on Hopper: dq in F32, dk and dv per query head, one statistic; or all scores in BF16
 * where it is ordered. */
size_t nd_sdpa_workspace_by_formula(const nd_attention *a, const nd_sdpa_piece *p, bool backward,
                                    bool ordered)
{
    int64_t rows = a->batch * p->kvs * (a->heads / a->kv_heads);
    if (!backward) {
        return 256;
    }
    int64_t bytes = rows * (4 * p->rows * a->head_dim + 4 * p->keys * a->head_dim + 4 * p->rows);
    bytes += ordered ? rows * p->rows * p->keys * 2 : 0;
    return (size_t)bytes + (1 << 20);
}

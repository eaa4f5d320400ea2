// SPDX-License-Identifier: Apache-2.0
/*
 * A plan of a job on GPUs needs this of the CUDA backend: how attention is cut into calls of cuDNN,
 * and sizes, by formula. Pure arithmetic without headers of CUDA, so that every build can plan such
 * a job.
 */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/documents.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/sdpa.h"
#include "kernels/cuda/sdpa_parts.h"
#include "runtime/base/math.h"
#include "runtime/tensor/fp8.h"

enum { HEAD_DIM_MAX = 128, LEAST_SCRATCH = 256 };

/* Blocks of attention as calls of cuDNN (sdpa_parts.h). */

enum { TILE = 128 }; /* rows and keys of a tile are multiples of this, except in the last tile */

static int64_t clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

static int64_t pieces_of(int64_t extent, int64_t step)
{
    return extent > 0 ? nd_ceil_div(extent, step) : 0;
}

static int64_t whole_tiles(int64_t x)
{
    return nd_max(x / TILE * TILE, TILE);
}

/* Cuts into as few parts of at most `step` (whole tiles) as possible, of about equal length. */
static int64_t even(int64_t extent, int64_t step)
{
    int64_t parts = pieces_of(extent, step);
    return parts <= 1 ? extent : nd_round_up(pieces_of(extent, parts), TILE);
}

static int64_t square_root(int64_t x)
{
    int64_t low = 0, high = (int64_t)1 << 31;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        *(middle * middle <= x ? &low : &high) = middle;
    }
    return low;
}

/* `scores` is the number of scores of one KV head that a call may have. Squares along a diagonal
 * have as many keys as rows, so tiles have about as many rows as keys where both are cut. */
static void cut_tiles(nd_sdpa_band *b, int64_t seen, int64_t scores)
{
    int64_t side = nd_max(square_root(scores), scores / seen);
    b->whole = false;
    b->kvs = 1;
    b->rows = even(b->end - b->begin, whole_tiles(side));
    b->keys = b->prefix > 0 ? even(b->prefix, whole_tiles(scores / b->rows)) : 0;
}

static int64_t row_tiles(const nd_sdpa_band *b)
{
    return pieces_of(b->end - b->begin, b->rows);
}

/* The first key of the last piece of the prefix. */
static int64_t last_key(const nd_sdpa_band *b)
{
    return (pieces_of(b->prefix, b->keys) - 1) * b->keys;
}

static int64_t prefix_tiles(const nd_sdpa_band *b)
{
    return pieces_of(b->prefix, b->keys) + b->halves;
}

static int64_t most_keys(const nd_sdpa_band *b)
{
    bool two_halves = b->halves && b->keys >= b->prefix;
    int64_t keys = two_halves ? b->prefix / 2 : b->keys;
    return b->causal && !b->whole ? nd_max(keys, b->rows) : keys;
}

/* The number of pieces that the keys of a tile of rows are cut into. */
static int64_t key_tiles(const nd_sdpa_band *b, int64_t row_tile)
{
    return b->whole ? 1 : prefix_tiles(b) + (b->causal ? row_tile + 1 : 0);
}

/* Rows [begin, end), which all see a key; `causal`: under the diagonal, which ends at the last key
 * of the last row. */
static void add_band(const nd_attention *a, int64_t begin, int64_t end, bool causal,
                     int64_t ordered, bool no_half_tiles, nd_sdpa_cut *out)
{
    int64_t rows = end - begin, seen = causal ? end + a->diag : a->sk;
    nd_sdpa_band b = {.begin = begin,
                      .end = end,
                      .prefix = causal ? begin + a->diag : a->sk,
                      .rows = rows,
                      .keys = seen,
                      .kvs = a->kv_heads,
                      .causal = causal,
                      .whole = true};
    if (ordered > 0) {
        int64_t scores = ordered / (2 * a->batch * (a->heads / a->kv_heads));
        b.kvs = clamp(scores / (rows * seen), 1, a->kv_heads);
        if (rows * seen > scores) {
            cut_tiles(&b, seen, scores);
        }
    }
    bool all_masked = b.prefix == 0 || (b.causal && b.whole);
    if (no_half_tiles && !all_masked && (b.prefix - last_key(&b)) % TILE == TILE / 2) {
        b.halves = true;
        b.whole = false;
    }
    int64_t tiles = row_tiles(&b);
    out->rows = nd_max(out->rows, b.rows);
    out->keys = nd_max(out->keys, most_keys(&b));
    out->kvs = nd_max(out->kvs, b.kvs);
    out->adds_queries |= key_tiles(&b, tiles - 1) > 1;
    out->adds_keys |= tiles > 1 || seen < a->sk;
    out->bands[out->band_count++] = b;
}

nd_sdpa_cut nd_sdpa_cut_block(const nd_attention *a, int64_t ordered, bool no_half_tiles)
{
    nd_sdpa_cut c = {.blind = clamp(-a->diag, 0, a->sq), .kv_heads = a->kv_heads};
    int64_t causal_end = clamp(a->sk - a->diag, c.blind, a->sq);
    if (causal_end > c.blind) {
        add_band(a, c.blind, causal_end, true, ordered, no_half_tiles, &c);
    }
    if (causal_end < a->sq) {
        add_band(a, causal_end, a->sq, false, ordered, no_half_tiles, &c);
    }
    c.adds_keys |= c.band_count != 1;
    return c;
}

/* True where pieces of so many rows leave one row for the last of them. */
static bool leaves_one_row(const nd_sdpa_band *b, int64_t rows)
{
    const int64_t all = b->end - b->begin;
    return all == 1 || (all > rows && all % rows == 1);
}

bool nd_sdpa_fits(const nd_attention *a, int64_t ordered)
{
    const nd_sdpa_cut c = nd_sdpa_cut_block(a, ordered, false);
    for (int i = 0; i < c.band_count; i++) {
        if (leaves_one_row(&c.bands[i], c.bands[i].rows)) {
            return false;
        }
    }
    return a->window == 0 ||
           (c.blind == 0 && c.band_count == 1 && c.bands[0].causal && c.bands[0].whole);
}

static void find_keys(const nd_sdpa_band *b, int64_t row_tile, int64_t key_tile, nd_sdpa_piece *p)
{
    int64_t before = prefix_tiles(b), square = key_tile - before;
    if (b->whole) {
        p->keys = b->keys;
        p->mask = !b->causal           ? ND_SDPA_ALL
                  : p->rows == p->keys ? ND_SDPA_TOP_LEFT
                                       : ND_SDPA_BOTTOM_RIGHT;
    } else if (square < 0) {
        int64_t last = last_key(b), half = (b->prefix - last) / 2;
        bool is_half = b->halves && square >= -2;
        p->key = is_half ? last + (square + 2) * half : key_tile * b->keys;
        p->keys = is_half ? half : clamp(b->keys, 1, b->prefix - p->key);
        p->mask = ND_SDPA_ALL;
    } else {
        p->key = b->prefix + square * b->rows;
        p->keys = square == row_tile ? p->rows : b->rows;
        p->mask = square == row_tile ? ND_SDPA_TOP_LEFT : ND_SDPA_ALL;
    }
}

bool nd_sdpa_next(const nd_sdpa_cut *c, nd_sdpa_walk *at, nd_sdpa_piece *out)
{
    if (at->band == c->band_count) {
        return false;
    }
    const nd_sdpa_band *b = &c->bands[at->band];
    int64_t tiles = key_tiles(b, at->row_tile);
    nd_sdpa_piece p = {.row = b->begin + at->row_tile * b->rows,
                       .kv = at->kv,
                       .first = at->key_tile == 0,
                       .last = at->key_tile == tiles - 1};
    p.rows = clamp(b->rows, 1, b->end - p.row);
    p.kvs = clamp(b->kvs, 1, c->kv_heads - p.kv);
    /* The last group may have fewer heads than the others. */
    p.shows_form = p.kv == 0 || p.kv + p.kvs == c->kv_heads;
    find_keys(b, at->row_tile, at->key_tile, &p);
    *out = p;
    at->key_tile++;
    if (at->key_tile == tiles) {
        at->key_tile = 0;
        at->row_tile++;
    }
    if (at->row_tile == row_tiles(b)) {
        at->row_tile = 0;
        at->kv += b->kvs;
    }
    if (at->kv >= c->kv_heads) {
        *at = (nd_sdpa_walk){.band = at->band + 1};
    }
    return true;
}

static size_t take_scratch(size_t *at, int64_t elements, size_t width)
{
    size_t begin = *at;
    *at += nd_round_up_bytes((size_t)elements * width, 256);
    return begin;
}

nd_sdpa_layout nd_sdpa_layout_of(const nd_attention *a, const nd_sdpa_cut *c, size_t workspace,
                                 bool backward)
{
    int64_t rows = a->batch * c->rows * c->kvs * (a->heads / a->kv_heads);
    int64_t queries = backward ? rows * a->head_dim : 0;
    int64_t keys = backward ? a->batch * c->keys * c->kvs * a->head_dim : 0;
    int64_t all = backward && c->adds_keys ? a->batch * a->sk * a->kv_heads * a->head_dim : 0;
    size_t at = nd_round_up_bytes(workspace, 256);
    nd_sdpa_layout l = {0};
    l.stats = take_scratch(&at, rows, 4);
    l.dq = take_scratch(&at, queries, 2);
    l.dk = take_scratch(&at, keys, 2);
    l.dv = take_scratch(&at, keys, 2);
    l.sum_q = take_scratch(&at, c->adds_queries ? queries : 0, 4);
    l.sum_k = take_scratch(&at, all, 4);
    l.sum_v = take_scratch(&at, all, 4);
    l.end = at;
    return l;
}

/* The workspace that cuDNN 9.19 takes on Hopper. B is the batch, H the query heads of the piece, D
 * the head size, Sq its rows and Sk its keys. The backward takes B H (4 Sq D + 4 Sk D + 4 Sq) bytes
 * (dq in F32, dk and dv in BF16 for each query head, one statistic) and 1 MiB; where it is ordered,
 * it takes B H Sq Sk 2 more (all scores in BF16). The forward takes 256 bytes. */
static size_t workspace_by_formula(const nd_attention *a, const nd_sdpa_piece *p, bool backward,
                                   bool ordered)
{
    int64_t rows = a->batch * p->kvs * (a->heads / a->kv_heads);
    if (!backward) {
        return LEAST_SCRATCH;
    }
    int64_t bytes = rows * (4 * p->rows * a->head_dim + 4 * p->keys * a->head_dim + 4 * p->rows);
    bytes += ordered ? rows * p->rows * p->keys * 2 : 0;
    return (size_t)bytes + (1 << 20);
}

/* Segments of documents (documents.h). */

enum { RATIO = 8, LEAST_MOST = 128 }; /* of tiers: documents.h */

/* The workspace of a backward has, for each KV head, dq, dk and dv in F32 of each of its query
 * heads, and one statistic. */
static int64_t bytes_of_kv_head(const nd_attention *a)
{
    const int64_t row = 4 * a->head_dim + 4, key = 8 * a->head_dim;
    return a->batch * (a->heads / a->kv_heads) * (a->sq * row + a->sk * key);
}

nd_documents nd_documents_of(const nd_attention *a, size_t workspace, bool backward)
{
    const int64_t all = a->sq + a->sk, tokens = a->batch * a->sq;
    nd_documents d = {.batch = a->batch, .rows = a->sq, .keys = a->sk};
    d.kvs = nd_max(ND_DOCUMENTS_BYTES / nd_max(bytes_of_kv_head(a), 1), 1);
    d.kvs = nd_min(d.kvs, a->kv_heads);
    while (a->kv_heads % d.kvs != 0) { /* each call has the same number */
        d.kvs--;
    }
    const int64_t heads = d.kvs * (a->heads / a->kv_heads);
    const int64_t keys = backward ? a->batch * a->sk * d.kvs * a->head_dim : 0;
    size_t at = nd_round_up_bytes(workspace, 256);
    for (int64_t most = all; most >= LEAST_MOST && d.count < ND_DOCUMENT_TIERS; most /= RATIO) {
        nd_document_tier *t = &d.tiers[d.count++];
        /* Under a diagonal there are at least as many keys as rows, and in whole documents as
         * many. */
        t->rows = nd_min(a->documents == ND_SEGMENTS_FLAT ? most : most / 2, a->sq);
        t->keys = nd_min(a->documents == ND_SEGMENTS_WHOLE ? most / 2 : most, a->sk);
        t->least = most / RATIO + 1;
        t->slots = a->batch * nd_ceil_div(all, t->least);
        t->lengths = take_scratch(&at, 2 * t->slots, sizeof(int32_t));
        t->starts = take_scratch(&at, ND_RAGGED_KINDS * (t->slots + 1), sizeof(int64_t));
    }
    d.owners = take_scratch(&at, 2 * tokens, sizeof(int32_t));
    d.stats = take_scratch(&at, tokens * heads, sizeof(float));
    d.results = take_scratch(&at, tokens * heads * a->head_dim, sizeof(nd_bf16));
    d.dk = take_scratch(&at, keys, sizeof(nd_bf16));
    d.dv = take_scratch(&at, keys, sizeof(nd_bf16));
    d.end = at;
    return d;
}

/* Heads that are no multiple of 16 are left out: cuDNN's backward needs a workspace for them as if
 * each slot had the longest segment of its tier. */
bool nd_documents_fit(const nd_attention *a, bool ordered)
{
    return a->documents && !ordered && a->head_dim % 16 == 0 && a->sq + a->sk >= LEAST_MOST &&
           (a->documents != ND_SEGMENTS_WHOLE || a->sq == a->sk) &&
           (a->documents != ND_SEGMENTS_FLAT || a->window == 0);
}

/* cuDNN 9.19 takes on Hopper 256 bytes for each slot (at least 64 of them) in the forward, and in
 * the backward those of its KV heads and below 512 bytes for each slot. The shortest segments have
 * the most slots. */
size_t nd_documents_scratch_by_formula(const nd_attention *a, bool backward)
{
    const nd_documents d = nd_documents_of(a, 0, backward);
    const int64_t slots = nd_max(64, d.tiers[d.count - 1].slots);
    const int64_t sums = backward ? d.kvs * bytes_of_kv_head(a) : 0;
    return nd_documents_of(a, (size_t)((1 << 16) + slots * 512 + sums), backward).end;
}

/* Sizes, and the queries of the table. */

bool nd_cuda_sdpa_is_cudnn(const nd_attention *a, nd_dtype act)
{
    return act == ND_DTYPE_BF16 && a->head_dim % 8 == 0 && a->head_dim <= HEAD_DIM_MAX;
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
        size_t bytes = workspace_by_formula(a, &p, backward, most > 0);
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

static size_t workspace(const nd_device *device)
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

/* The plain kernels read delta. They may compute a backward that has a window, or of which a
 * deterministic cut of the block leaves one row. */
static bool attention_uses_delta(const nd_device *device, const nd_attention *a, nd_dtype act)
{
    const nd_sdpa_cut c = nd_sdpa_cut_block(a, 0, false);
    bool plain = !nd_cuda_sdpa_is_cudnn(a, act) || a->window > 0;
    for (int i = 0; i < c.band_count; i++) {
        plain |= leaves_one_row(&c.bands[i], TILE);
    }
    return plain;
}

/* Returns the bytes that an FP8 product borrows. */
static size_t product_scratch(const nd_device *device, int64_t m, int64_t n, int64_t k,
                              nd_dtype act)
{
    size_t all = (size_t)(m * n) * 4, sixteen_rows = (size_t)n * 16 * 4;
    size_t most = nd_max_bytes(ND_LT_PRODUCT_BYTES, sixteen_rows);
    return all < most ? all : most;
}

/* The form in which cuBLASLt reads an operand: in FP8 its rows lie along the summed axis. */
static nd_form_rule form(const nd_device *device, const nd_form_need *need)
{
    const bool along =
        need->role == ND_X_OF_Y || need->role == ND_W_OF_Y || need->role == ND_DY_OF_DX;
    if (!nd_dtype_is_fp8(need->format) || (nd_dtype_is_fp8(need->stored) && along)) {
        return (nd_form_rule){ND_FORM_IS_STORED};
    }
    return (nd_form_rule){ND_FORM_BY_OP, (size_t)(need->rows * need->columns), !along};
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

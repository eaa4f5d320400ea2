// SPDX-License-Identifier: Apache-2.0
/*
 * Backward of blocked attention: FlashAttention-2 (Dao, 2023), with the score tiles transposed.
 *
 * A task is one key block of one KV head of one sequence: dK and dV are summed over all queries by
 * one thread, in a fixed order. dQ of a row block is one sum in scratch, to which the key blocks
 * add in ascending order whatever thread has them: a task makes the row block's other products,
 * waits for its turn, adds, and passes the turn on.
 *
 * Row blocks are taken in strips, whose products with score tiles have one long k: each reads and
 * writes all of a tile's dK and dV once.
 *
 * Tasks are taken in ascending order, and all go through the row blocks in the same order, the last
 * queries first, since every key block is seen by those. So a task that follows another one step
 * later waits only where that one is held up, and the first unfinished task never waits.
 */
#include "kernels/cpu/attention.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "kernels/cpu/context.h"
#include "runtime/base/math.h"

/* A strip has as many row blocks as a word has elements: ND_TILE words of queries. */
enum { MOST_BLOCKS = 2 };

typedef struct division {
    int64_t block_keys; /* keys of a key block, a multiple of ND_TILE */
    int64_t blocks;     /* key blocks of a KV head; one where there are no keys */
    int64_t slots;      /* dQ sums that exist at a time: KV head p has that of p % slots */
    int64_t sums;       /* that scratch holds: row blocks of all slots, or more */
} division;

typedef struct call {
    const nd_attention *a;
    const nd_tile_ops *tiles;
    const nd_attention_bwd_args *args;
    nd_sight sight;
    division division;
    const nd_team *team;
    float *dq_sums; /* [slots][row blocks of G heads] (D, ND_TILE) */
    /* [slots][row blocks of G heads]: which task may add to the sum. They count the key blocks of
     * all KV heads that have had the slot. */
    nd_team_count *turns;
    _Atomic int64_t next_task; /* p blocks + key block */
} call;

/* One thread's scratch; Dp = wide_ld(D), all sizes for words of one element.
 * blocks: the row blocks of a strip. */
typedef struct workspace {
    nd_word *k, *v;       /* A (m = block_keys, k = D) */
    nd_word *kt;          /* A (m = D, k = block_keys) */
    float *dk, *dv;       /* (block_keys, Dp) */
    nd_word *qt, *dot;    /* [blocks] B (k = D, n = ND_TILE): queries, dout */
    nd_word *q, *dout;    /* B (k = the strip's queries, n = Dp) */
    float *scores, *dp;   /* (ND_TILE keys, ND_TILE) */
    nd_word *p, *ds_rows; /* A (m = ND_TILE keys, k = the strip's queries) */
    nd_word *ds_columns;  /* [blocks] B (k = block_keys, n = ND_TILE) */
    float *lse, *delta;   /* [blocks] (ND_TILE) */
    void *temporary;      /* ND_TILE x D elements */
} workspace;

/* Key block `block` of KV head `pair`, counted through the batch. */
typedef struct task {
    int64_t pair, block;
    int64_t b, kv, key0;
    int keys;
} task;

typedef struct row_block {
    int64_t head, q0, index; /* index: of the block among the G heads of the KV head */
    int64_t place;           /* of the block in its strip */
    int rows;
    int from, seen;   /* keys of the task that some queries see: [from, seen), from a whole tile */
    bool first, last; /* the task is the first or the last one that adds to its dQ */
} row_block;

static int64_t padded(int64_t d)
{
    return nd_ceil_div(d, ND_TILE_PAD) * ND_TILE_PAD;
}

/* Row stride of what has padded(D) columns: an odd number of cache lines, since the rows of a few
 * columns would share few sets of L1 with a power of two. */
static int64_t wide_ld(int64_t d)
{
    return padded(d) | ND_TILE_PAD;
}

static int64_t group_blocks(const nd_attention *a)
{
    return nd_attention_group(a) * nd_attention_row_blocks(a);
}

/* Results do not depend on this. Key blocks have many keys, since each packs all queries, but not
 * more than L2 has room for, and not so many that there would be too few blocks for all threads. A
 * slot's row blocks are steps that tasks can be apart; a second slot lets a thread go on with
 * another KV head while one waits for its CPU. More queries never take fewer sums. */
static division divide(int threads, const nd_attention *a)
{
    const int64_t pairs = a->batch * a->kv_heads, most = nd_min(pairs, threads);
    const int64_t row_blocks = nd_max(group_blocks(a), 1), steps = 4 * (int64_t)threads;
    division d = {.block_keys = ND_ATTENTION_KEYS / (a->head_dim > 64 ? 2 : 1)};
    while (pairs % threads != 0 && d.block_keys > ND_TILE &&
           pairs * nd_ceil_div(a->sk, d.block_keys) < (int64_t)threads * 2) {
        d.block_keys /= 2;
    }
    d.blocks = nd_max(nd_ceil_div(a->sk, d.block_keys), 1);
    d.slots = nd_min(nd_max(nd_ceil_div(steps, row_blocks), 2), most);
    d.sums = nd_min(nd_max(steps + row_blocks, 2 * row_blocks), most * row_blocks);
    return d;
}

static size_t workspace_init(workspace *w, char *base, const nd_attention *a, int64_t keys)
{
    const int64_t d = a->head_dim, dp = wide_ld(d);
    size_t used = 0;
    w->k = nd_attention_cut(base, &used, keys * d);
    w->v = nd_attention_cut(base, &used, keys * d);
    w->kt = nd_attention_cut(base, &used, keys * d);
    w->dk = nd_attention_cut(base, &used, keys * dp);
    w->dv = nd_attention_cut(base, &used, keys * dp);
    w->qt = nd_attention_cut(base, &used, (d + d % 2) * ND_TILE);
    w->dot = nd_attention_cut(base, &used, (d + d % 2) * ND_TILE);
    w->q = nd_attention_cut(base, &used, ND_TILE * dp);
    w->dout = nd_attention_cut(base, &used, ND_TILE * dp);
    w->scores = nd_attention_cut(base, &used, ND_TILE * ND_TILE);
    w->dp = nd_attention_cut(base, &used, ND_TILE * ND_TILE);
    w->p = nd_attention_cut(base, &used, ND_TILE * ND_TILE);
    w->ds_rows = nd_attention_cut(base, &used, ND_TILE * ND_TILE);
    w->ds_columns = nd_attention_cut(base, &used, keys * ND_TILE);
    w->lse = nd_attention_cut(base, &used, MOST_BLOCKS * ND_TILE);
    w->delta = nd_attention_cut(base, &used, MOST_BLOCKS * ND_TILE);
    w->temporary = nd_attention_cut(base, &used, ND_TILE * d);
    return used;
}

size_t nd_attention_bwd_scratch(int threads, const nd_attention *a)
{
    const division d = divide(threads, a);
    const size_t tile = (size_t)a->head_dim * ND_TILE * sizeof(float);
    workspace unused;
    return (size_t)threads * workspace_init(&unused, NULL, a, d.block_keys) +
           (size_t)d.sums * (tile + sizeof(nd_team_count)) +
           (size_t)nd_attention_sight_words(a) * 4;
}

static int words_of(const call *c, int64_t count)
{
    return (int)nd_ceil_div(count, c->tiles->group);
}

static void load_keys(const call *c, workspace *w, const task *t)
{
    const int d = (int)c->a->head_dim, words = words_of(c, d), group = c->tiles->group;
    const int64_t kt_ld = c->division.block_keys / group;
    c->tiles->pack_a(w->k, words, nd_attention_row(c->args->k, t->b, t->key0, t->kv),
                     c->args->k.dtype, c->args->k.stride[1], t->keys, d);
    c->tiles->pack_a(w->v, words, nd_attention_row(c->args->v, t->b, t->key0, t->kv),
                     c->args->v.dtype, c->args->v.stride[1], t->keys, d);
    for (int first = 0; first < t->keys; first += ND_TILE) {
        const int keys = (int)nd_min(t->keys - first, ND_TILE);
        c->tiles->pack_a_transposed(w->kt + first / group, kt_ld,
                                    nd_attention_row(c->args->k, t->b, t->key0 + first, t->kv),
                                    c->args->k.dtype, c->args->k.stride[1], keys, d, w->temporary);
    }
    memset(w->dk, 0, (size_t)(t->keys * wide_ld(d)) * sizeof(float));
    memset(w->dv, 0, (size_t)(t->keys * wide_ld(d)) * sizeof(float));
}

/* A row block of a strip; what is behind its rows counts as zeros. */
static void load_queries(const call *c, workspace *w, const task *t, const row_block *r)
{
    const nd_tile_ops *tiles = c->tiles;
    const int d = (int)c->a->head_dim;
    const int64_t dp = wide_ld(d), at = (t->b * c->a->heads + r->head) * c->a->sq + r->q0;
    const nd_attention_bwd_args *x = c->args;
    const void *q = nd_attention_row(x->q, t->b, r->q0, r->head);
    const void *dout = nd_attention_row(x->dout, t->b, r->q0, r->head);
    const float *lse = (const float *)x->lse.data + at, *delta = (const float *)x->delta.data + at;
    const int64_t q_stride = x->q.stride[1], dout_stride = x->dout.stride[1];
    const int64_t column = r->place * ND_TILE, row = words_of(c, column);
    const int64_t packed = column * words_of(c, d);
    const int loaded = words_of(c, r->rows), left = words_of(c, ND_TILE) - loaded;
    const size_t zeros = (size_t)(left * dp) * sizeof(nd_word);
    tiles->pack_b_transposed(w->qt + packed, ND_TILE, q, x->q.dtype, q_stride, r->rows, d,
                             w->temporary);
    tiles->pack_b_transposed(w->dot + packed, ND_TILE, dout, x->dout.dtype, dout_stride, r->rows, d,
                             w->temporary);
    tiles->pack_b(w->q + row * dp, dp, q, x->q.dtype, q_stride, r->rows, d);
    tiles->pack_b(w->dout + row * dp, dp, dout, x->dout.dtype, dout_stride, r->rows, d);
    memset(w->q + (row + loaded) * dp, 0, zeros);
    memset(w->dout + (row + loaded) * dp, 0, zeros);
    for (int i = 0; i < ND_TILE; i++) {
        /* Padding and queries that saw nothing get probability 0. */
        bool blind = i >= r->rows || lse[i] == -INFINITY;
        w->lse[column + i] = blind ? INFINITY : lse[i] * (float)M_LOG2E;
        w->delta[column + i] = blind ? 0.0f : delta[i];
    }
}

/* Probabilities and score gradients of `keys` keys from `first` of the task's against a row block
 * that is loaded. */
static void score_gradients(const call *c, workspace *w, const task *t, const row_block *r,
                            int first, int keys)
{
    const nd_tile_ops *tiles = c->tiles;
    const int64_t column = r->place * ND_TILE, at = words_of(c, column);
    const int d = (int)c->a->head_dim, words = words_of(c, d);
    nd_word *ds_columns = w->ds_columns + column * words_of(c, c->division.block_keys) +
                          first / tiles->group * ND_TILE;
    nd_key_limits limits;
    tiles->gemm(keys, ND_TILE, words, w->k + first * words, words, w->qt + column * words, ND_TILE,
                w->scores, ND_TILE, false);
    tiles->gemm(keys, ND_TILE, words, w->v + first * words, words, w->dot + column * words, ND_TILE,
                w->dp, ND_TILE, false);
    tiles->dscore(&(nd_dscore_step){
        .scores = w->scores,
        .dp = w->dp,
        .p = w->p + at,
        /* With F32 words the two forms are one. */
        .ds_rows = tiles->group == 1 ? ds_columns : w->ds_rows + at,
        .ld = ND_TILE,
        .ds_columns = ds_columns,
        .keys = keys,
        .limits = nd_attention_limits(&c->sight, t->b, r->q0, t->key0 + first, keys, &limits),
        .lse = w->lse + column,
        .delta = w->delta + column,
        .scale = c->a->scale});
}

/* The products of one tile but that of dQ: `keys` keys from `first` of the task's against those of
 * the strip's row blocks that see any of them, which are adjacent. */
static void tile_step(const call *c, workspace *w, const task *t, const row_block *strip,
                      int blocks, int first, int keys)
{
    const int64_t dp = wide_ld(c->a->head_dim);
    int begin = blocks, end = 0;
    for (int i = 0; i < blocks; i++) {
        if (strip[i].from <= first && first < strip[i].seen) {
            score_gradients(c, w, t, &strip[i], first, keys);
            begin = (int)nd_min(begin, i);
            end = i + 1;
        }
    }
    if (begin >= end) {
        return;
    }
    const int n = (int)padded(c->a->head_dim), at = words_of(c, begin * ND_TILE);
    const int words = words_of(c, (end - 1) * ND_TILE + strip[end - 1].rows) - at;
    const nd_word *ds_rows =
        c->tiles->group == 1 ? w->ds_columns + first * ND_TILE : w->ds_rows + at;
    c->tiles->gemm(keys, n, words, w->p + at, ND_TILE, w->dout + at * dp, dp, w->dv + first * dp,
                   dp, true);
    c->tiles->gemm(keys, n, words, ds_rows, ND_TILE, w->q + at * dp, dp, w->dk + first * dp, dp,
                   true);
}

static void store_keys(const call *c, nd_tensor y, const float *sums, const task *t)
{
    const int64_t d = c->a->head_dim, dp = wide_ld(d);
    for (int j = 0; j < t->keys; j++) {
        void *row = nd_attention_row(y, t->b, t->key0 + j, t->kv);
        const float *from = sums + j * dp;
        if (y.dtype == ND_DTYPE_F32) {
            float *to = row;
            for (int64_t i = 0; i < d; i++) {
                to[i] = c->args->add_kv ? to[i] + from[i] : from[i];
            }
        } else {
            nd_bf16 *to = row;
            for (int64_t i = 0; i < d; i++) {
                to[i] = nd_bf16_from_f32(from[i]);
            }
        }
    }
}

static void store_queries(const call *c, workspace *w, const task *t, const row_block *r,
                          const float *sum)
{
    c->tiles->store_transposed(nd_attention_row(c->args->dq, t->b, r->q0, r->head),
                               c->args->dq.dtype, c->args->dq.stride[1], sum, (int)c->a->head_dim,
                               r->rows, NULL, c->args->add_q, w->temporary);
}

/* The task's part of the row block's dQ, in its turn. The first key block that is seen overwrites
 * what the slot held, the last one stores the sum and leaves the slot to the next KV head. */
static void add_queries(const call *c, workspace *w, const task *t, const row_block *r)
{
    const nd_attention *a = c->a;
    const int d = (int)a->head_dim;
    const int64_t slots = c->division.slots, before = t->pair / slots * c->division.blocks;
    const int64_t at = t->pair % slots * group_blocks(a) + r->index;
    const int group = c->tiles->group;
    float *sum = c->dq_sums + at * d * ND_TILE;
    /* The thread waited for is at most a step behind, unless it lost its CPU. */
    nd_team_wait(c->team, &c->turns[at], (uint32_t)(before + (r->first ? 0 : t->block)));
    if (r->seen > r->from) {
        c->tiles->gemm(d, ND_TILE, words_of(c, r->seen - r->from), w->kt + r->from / group,
                       c->division.block_keys / group,
                       w->ds_columns + r->place * ND_TILE * words_of(c, c->division.block_keys) +
                           r->from / group * ND_TILE,
                       ND_TILE, sum, ND_TILE, !r->first);
    } else {
        memset(sum, 0, (size_t)(d * ND_TILE) * sizeof(float));
    }
    if (r->last) {
        store_queries(c, w, t, r, sum);
    }
    nd_team_set(&c->turns[at], (uint32_t)(before + (r->last ? c->division.blocks : t->block + 1)));
}

/* The task's keys against a strip's row blocks. The first key block of a KV head also has those
 * that see no keys. */
static void run_strip(const call *c, workspace *w, const task *t, const row_block *strip,
                      int blocks)
{
    int from = t->keys, seen = 0;
    for (int i = 0; i < blocks; i++) {
        if (strip[i].from < strip[i].seen) {
            load_queries(c, w, t, &strip[i]);
            from = (int)nd_min(from, strip[i].from);
            seen = (int)nd_max(seen, strip[i].seen);
        }
    }
    for (int first = from; first < seen; first += ND_TILE) {
        tile_step(c, w, t, strip, blocks, first, (int)nd_min(seen - first, ND_TILE));
    }
    for (int i = 0; i < blocks; i++) {
        if (strip[i].from < strip[i].seen || (strip[i].first && strip[i].last)) {
            add_queries(c, w, t, &strip[i]);
        }
    }
}

static row_block row_block_of(const call *c, const task *t, int64_t index, int64_t place)
{
    const nd_attention *a = c->a;
    const int64_t group = nd_attention_group(a), q0 = index / group * ND_TILE;
    const nd_seen_keys *sees = nd_attention_seen(&c->sight, t->b, q0);
    const int64_t end = t->key0 + t->keys, from = nd_max(sees->begin - t->key0, 0);
    const bool blind = sees->begin == sees->end;
    return (row_block){.head = t->kv * group + index % group,
                       .q0 = q0,
                       .index = index,
                       .place = place,
                       .rows = (int)nd_min(a->sq - q0, ND_TILE),
                       .from = (int)nd_min(from, t->keys) / ND_TILE * ND_TILE,
                       .seen = blind ? 0 : (int)nd_max(nd_min(sees->end - t->key0, t->keys), 0),
                       .first = blind ? t->block == 0 : sees->begin >= t->key0,
                       .last = blind ? t->block == 0 : sees->end <= end};
}

static void run_task(const call *c, workspace *w, int64_t number)
{
    const nd_attention *a = c->a;
    const int64_t pair = number / c->division.blocks, block = number % c->division.blocks;
    const int64_t key0 = block * c->division.block_keys;
    const task t = {.pair = pair,
                    .block = block,
                    .b = pair / a->kv_heads,
                    .kv = pair % a->kv_heads,
                    .key0 = key0,
                    .keys = (int)nd_min(a->sk - key0, c->division.block_keys)};
    load_keys(c, w, &t);
    for (int64_t left = group_blocks(a); left > 0; left -= c->tiles->group) {
        const int blocks = (int)nd_min(left, c->tiles->group);
        row_block strip[MOST_BLOCKS];
        for (int i = 0; i < blocks; i++) {
            strip[i] = row_block_of(c, &t, left - 1 - i, i);
        }
        run_strip(c, w, &t, strip, blocks);
    }
    store_keys(c, c->args->dk, w->dk, &t);
    store_keys(c, c->args->dv, w->dv, &t);
}

typedef struct all_tasks {
    call *c;
    char *scratch;
    size_t bytes; /* of a thread's workspace */
} all_tasks;

/* Takes tasks until none is left: they begin in their order, so that nobody waits for the turn of a
 * task that has not begun. */
static void take_tasks(void *arg, int64_t piece)
{
    const all_tasks *all = arg;
    call *c = all->c;
    const int64_t tasks = c->a->batch * c->a->kv_heads * c->division.blocks;
    workspace w;
    workspace_init(&w, all->scratch + (size_t)nd_team_thread() * all->bytes, c->a,
                   c->division.block_keys);
    nd_tiles_begin(c->tiles);
    for (int64_t t; (t = atomic_fetch_add(&c->next_task, 1)) < tasks;) {
        run_task(c, &w, t);
    }
    nd_tiles_end(c->tiles);
}

nd_status nd_cpu_attention_bwd(nd_stream *stream, const nd_attention_bwd_args *args)
{
    const nd_attention *a = &args->attention;
    const nd_tensor dq = args->dq, dk = args->dk, dv = args->dv, q = args->q, k = args->k,
                    v = args->v, dout = args->dout;
    nd_cpu_context *context = nd_cpu_context_of(stream);
    ND_ASSERT(a->heads % a->kv_heads == 0 && a->scale > 0.0f);
    ND_ASSERT(q.dtype == k.dtype && k.dtype == v.dtype && v.dtype == dout.dtype);
    ND_ASSERT(!args->add_q || dq.dtype == ND_DTYPE_F32);
    ND_ASSERT(nd_are_bounds(args->first_key, args->end_key, a));
    ND_ASSERT(!args->add_kv || (dk.dtype == ND_DTYPE_F32 && dv.dtype == ND_DTYPE_F32));
    const int threads = stream->device->threads;
    const bool bf16 = q.dtype == ND_DTYPE_BF16 && context->tiles_bf16;
    call c = {.a = a,
              .tiles = bf16 ? context->tiles_bf16 : context->tiles_f32,
              .args = args,
              .sight = {a, args->first_key, args->end_key, NULL},
              .team = context->team,
              .division = divide(threads, a)};
    workspace sized;
    const size_t bytes = workspace_init(&sized, NULL, a, c.division.block_keys);
    const int64_t sums = c.division.sums;
    c.dq_sums = (float *)((char *)args->scratch + (size_t)threads * bytes);
    c.turns = (nd_team_count *)(c.dq_sums + sums * a->head_dim * ND_TILE);
    c.sight.blocks = (nd_seen_keys *)(c.turns + sums);
    nd_attention_look(&c.sight);
    for (int64_t i = 0; i < sums; i++) {
        atomic_init(&c.turns[i].value, 0);
        atomic_init(&c.turns[i].sleepers, 0);
    }
    nd_team_run(context->team, threads, take_tasks,
                &(all_tasks){.c = &c, .scratch = args->scratch, .bytes = bytes});
    return ND_OK;
}

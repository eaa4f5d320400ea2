// SPDX-License-Identifier: Apache-2.0
/* Attention through a cache: prompts, single tokens, and both in one call. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/ops/conformance.h"

static const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};

enum { SEGMENTS_MAX = 70 };

/* Heads, slots and segments; a call of several launches is made from `copies` of the first one. */
typedef struct cached_case {
    int64_t heads, kv_heads, head_dim, slots, capacity;
    nd_kv_segment segments[4];
    int64_t count, copies, window;
} cached_case;

static const cached_case cases[] = {
    {1, 1, 2, 1, 1, {{0, 0, 1}}, 1, 0},
    {4, 2, 8, 3, 20, {{2, 0, 7}, {0, 19, 1}, {1, 3, 5}}, 3, 0},
    /* one row of each; queries of several rows in one block; a group that is no power of two */
    {6, 2, 16, 4, 70, {{0, 69, 1}, {3, 0, 1}, {1, 33, 1}, {2, 8, 1}}, 4, 0},
    {3, 1, 64, 2, 150, {{1, 140, 9}, {0, 0, 3}}, 2, 0},
    {8, 1, 128, 2, 90, {{0, 88, 2}, {1, 40, 1}}, 2, 0},
    /* head sizes for which a lane has several packs, or single elements */
    {2, 2, 256, 2, 40, {{1, 36, 4}, {0, 12, 1}}, 2, 0},
    {2, 1, 10, 2, 40, {{1, 36, 4}, {0, 12, 1}}, 2, 0},
    {2, 1, 200, 1, 12, {{0, 5, 6}}, 1, 0},
    /* more keys than a span of a few queries on the CPU */
    {5, 1, 32, 2, 1300, {{0, 1290, 3}, {1, 510, 2}}, 2, 0},
    {2, 1, 8, SEGMENTS_MAX, 6, {{0, 2, 2}}, 1, SEGMENTS_MAX},
};

enum { CASES = sizeof cases / sizeof *cases };

static int64_t segments_of(const cached_case *c, nd_kv_segment out[SEGMENTS_MAX], int64_t *rows)
{
    int64_t count = c->copies > 0 ? c->copies : c->count;
    *rows = 0;
    for (int64_t i = 0; i < count; i++) {
        out[i] = c->segments[c->copies > 0 ? 0 : i];
        out[i].slot += c->copies > 0 ? i : 0;
        out[i].rows -= c->copies > 0 ? i % 2 : 0;
        *rows += out[i].rows;
    }
    return count;
}

static void call(const nd_side *side, const cached_case *c, nd_tensor out, nd_tensor qkv,
                 nd_tensor cache)
{
    nd_kv_segment segments[SEGMENTS_MAX];
    int64_t rows, count = segments_of(c, segments, &rows);
    const nd_attention a = {.sq = rows,
                            .sk = c->capacity,
                            .heads = c->heads,
                            .kv_heads = c->kv_heads,
                            .head_dim = c->head_dim,
                            .scale = 0.3f,
                            .window = c->window};
    const size_t bytes = side->ops->attention_cached_scratch(side->device, &a, qkv.dtype);
    ND_RUN(side, attention_cached, .attention = a, .out = out, .qkv = qkv, .cache = cache,
           .segments = segments, .count = count, .scratch = nd_case_memory(bytes));
}

/* As in test_attention.c. */
static nd_tolerance tolerance_of(const cached_case *c, nd_dtype dtype)
{
    double f32 = 2.0 * (double)(4 * c->head_dim + c->capacity) * nd_eps_f32;
    return (nd_tolerance){.absolute = dtype == ND_DTYPE_BF16 ? f32 + 2.0 * nd_eps_bf16 : f32};
}

static void once(const nd_backend *backend, const cached_case *c, nd_dtype dtype, int64_t gap)
{
    const int64_t width = 2 * c->kv_heads * c->head_dim, q = c->heads * c->head_dim;
    nd_kv_segment segments[SEGMENTS_MAX];
    int64_t rows;
    (void)segments_of(c, segments, &rows);
    nd_tensor qkv = nd_random_2d(dtype, rows, q + width, gap, 1.0f);
    nd_tensor cache = nd_random(dtype, 3, (int64_t[]){c->slots, c->capacity, width}, 0, 1.0f);
    nd_tensor out = nd_random_2d(dtype, rows, q, gap, 1.0f);
    nd_case_poison(out);
    nd_tensor o[2] = {nd_clone(out), nd_clone(out)};
    nd_tensor caches[2] = {nd_clone(cache), nd_clone(cache)};
    call(&backend->ref, c, o[0], qkv, caches[0]);
    call(&backend->side, c, o[1], qkv, caches[1]);
    nd_expect_close(backend->name, "attention_cached out", o[1], o[0], tolerance_of(c, dtype));
    nd_expect_same(backend->name, "attention_cached cache", caches[1], caches[0]);
    nd_case_free();
}

/* A token beside others, and a prompt in pieces, have the bits that they have alone. */
TEST_BEST_BACKEND(attention_cached, rows_do_not_depend_on_those_beside_them)
{
    enum { ROWS = 9, D = 16, WIDTH = 2 * D, Q = 3 * D };
    const cached_case whole = {3, 1, D, 2, 12, {{1, 0, ROWS}}, 1, 0};
    nd_tensor qkv = nd_random_2d(ND_DTYPE_F32, ROWS + 1, Q + WIDTH, 0, 1.0f);
    nd_tensor cache = nd_random(ND_DTYPE_F32, 3, (int64_t[]){2, 12, WIDTH}, 0, 1.0f);
    nd_tensor want = nd_blank_2d(ND_DTYPE_F32, ROWS, Q, 0);
    nd_tensor got = nd_blank_2d(ND_DTYPE_F32, ROWS + 1, Q, 0);
    call(&backend->side, &whole, want, nd_tensor_rows(qkv, 0, ROWS), cache);
    const cached_case begin = {3, 1, D, 2, 12, {{1, 0, 4}}, 1, 0};
    call(&backend->side, &begin, nd_tensor_rows(got, 0, 4), nd_tensor_rows(qkv, 0, 4), cache);
    const cached_case rest = {3, 1, D, 2, 12, {{1, 4, ROWS - 4}, {0, 3, 1}}, 2, 0};
    call(&backend->side, &rest, nd_tensor_rows(got, 4, ROWS - 3), nd_tensor_rows(qkv, 4, ROWS - 3),
         cache);
    cr_expect(memcmp(got.data, want.data, sizeof(float) * ROWS * Q) == 0,
              "%s: rows have other bits in pieces", backend->name);
    nd_case_free();
}

TEST_EACH_DRAW(attention_cached, drawn)
{
    const int64_t kv_heads = draw_range(d, 1, 3), capacity = draw_extent(d, 90) + 4;
    cached_case c = {.heads = kv_heads * draw_range(d, 1, 3),
                     .kv_heads = kv_heads,
                     .head_dim = 2 * draw_extent(d, 70),
                     .slots = 4,
                     .capacity = capacity,
                     .count = draw_range(d, 1, 4)};
    for (int64_t i = 0; i < c.count; i++) { /* no slot twice */
        const int64_t rows = draw_once_in(d, 2) ? 1 : draw_range(d, 1, capacity);
        c.segments[i] = (nd_kv_segment){3 - i, draw_range(d, 0, capacity - rows), rows};
    }
    for (int type = 0; type < 2; type++) {
        cached_case fixed = cases[d->seed % CASES];
        fixed.window = draw_once_in(d, 2) ? fixed.window : fixed.capacity / 3 + 1;
        once(backend, &fixed, dtypes[type], DRAW(d, 0, 3));
        once(backend, &c, dtypes[type], draw_range(d, 0, 12));
    }
}

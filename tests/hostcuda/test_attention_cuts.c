// SPDX-License-Identifier: Apache-2.0
/* How a block of attention is cut into calls of cuDNN: every pair of a row and a key that it sees,
 * for every KV head, in exactly one piece, whatever the lengths; and few forms, however long. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/sdpa_parts.h"
#include "runtime/base/math.h"

enum { MOST_FORMS = 64 };

typedef struct seen_forms {
    struct {
        int64_t rows, keys, kvs, mask;
    } forms[MOST_FORMS];
    int64_t pieces;
    int count;
} seen_forms;

/* How many keys of its own the row i of a piece sees. */
static int64_t visible(const nd_sdpa_piece *p, int64_t i)
{
    return p->mask == ND_SDPA_ALL        ? p->keys
           : p->mask == ND_SDPA_TOP_LEFT ? i + 1
                                         : i + 1 + p->keys - p->rows;
}

static void check_extents(const nd_attention *a, const nd_sdpa_cut *c, const nd_sdpa_piece *p)
{
    cr_assert(p->rows >= 1 && p->keys >= 1 && p->kvs >= 1);
    cr_assert(p->row + p->rows <= a->sq && p->key + p->keys <= a->sk);
    cr_assert(p->kv + p->kvs <= a->kv_heads);
    cr_assert(p->rows <= c->rows && p->keys <= c->keys && p->kvs <= c->kvs);
    cr_assert(p->mask != ND_SDPA_TOP_LEFT || p->rows == p->keys);
    cr_assert(p->mask != ND_SDPA_BOTTOM_RIGHT || p->rows < p->keys);
    cr_assert(c->adds_queries || (p->first && p->last), "one piece for a row and head");
}

static void add_form(const nd_sdpa_piece *p, seen_forms *s)
{
    for (int i = 0; i < s->count; i++) {
        if (s->forms[i].rows == p->rows && s->forms[i].keys == p->keys &&
            s->forms[i].kvs == p->kvs && s->forms[i].mask == (int64_t)p->mask) {
            return;
        }
    }
    cr_assert_lt(s->count, MOST_FORMS);
    s->forms[s->count].rows = p->rows;
    s->forms[s->count].keys = p->keys;
    s->forms[s->count].kvs = p->kvs;
    s->forms[s->count++].mask = (int64_t)p->mask;
}

/* The forms of all pieces, which must be those of the pieces that show theirs. */
static seen_forms walk(const nd_attention *a, int64_t ordered, bool hopper, unsigned char *pairs)
{
    nd_sdpa_cut c = nd_sdpa_cut_block(a, ordered, hopper);
    nd_sdpa_walk at = {0};
    nd_sdpa_piece p;
    seen_forms s = {0}, shown = {0};
    while (nd_sdpa_next(&c, &at, &p)) {
        check_extents(a, &c, &p);
        cr_assert(!hopper || p.mask != ND_SDPA_ALL || p.keys % 128 != 64, "half a tile of keys");
        add_form(&p, &s);
        s.pieces++;
        if (p.shows_form) {
            add_form(&p, &shown);
        }
        int64_t scores = 2 * a->batch * p.kvs * (a->heads / a->kv_heads) * p.rows * p.keys;
        cr_assert(ordered == 0 || scores <= ordered || (p.rows <= 128 && p.keys <= 128));
        for (int64_t h = p.kv; h < p.kv + p.kvs && pairs; h++) {
            for (int64_t i = 0; i < p.rows; i++) {
                unsigned char *row = pairs + (h * a->sq + p.row + i) * a->sk + p.key;
                for (int64_t j = 0; j < visible(&p, i); j++) {
                    row[j]++;
                }
            }
        }
    }
    cr_assert_eq(shown.count, s.count, "%d of %d forms are shown", shown.count, s.count);
    return s;
}

/* Row i sees keys 0 .. i + diag. */
static seen_forms check_on(nd_attention a, int64_t ordered, bool hopper)
{
    unsigned char *pairs = calloc((size_t)(a.kv_heads * a.sq * a.sk), 1);
    seen_forms s = walk(&a, ordered, hopper, pairs);
    for (int64_t r = 0; r < a.kv_heads * a.sq; r++) {
        int64_t sees = nd_min(r % a.sq + 1 + a.diag, a.sk);
        for (int64_t j = 0; j < a.sk; j++) {
            cr_assert_eq(pairs[r * a.sk + j], j < sees, "row %lld of KV head %lld, key %lld",
                         (long long)(r % a.sq), (long long)(r / a.sq), (long long)j);
        }
    }
    free(pairs);
    return s;
}

static seen_forms check(nd_attention a, int64_t ordered)
{
    check_on(a, ordered, false);
    return check_on(a, ordered, true);
}

Test(attention_cuts, every_visible_pair_is_in_one_piece)
{
    static const int64_t diags[] = {0, 1, 7, 64, 1000, -1, -40, -64};
    for (int64_t sq = 1; sq <= 64; sq = sq * 2 + 1) {
        for (int64_t sk = 1; sk <= 200; sk = sk * 3 + 1) {
            for (size_t d = 0; d < sizeof diags / sizeof *diags; d++) {
                nd_attention a = {1, sq, sk, 6, 3, 64, diags[d], 0.125f};
                check(a, 0);
                check(a, ND_SDPA_ORDERED_BYTES);
            }
        }
    }
}

/* 2 query heads to a KV head: a tile of 128 x 128 has 64 KiB of scores. */
Test(attention_cuts, tiles_cover_what_a_call_has_no_room_for)
{
    static const int64_t lengths[][3] = {
        {300, 300, 0},   {300, 300, 300}, {257, 900, 643},  {900, 257, 0},    {640, 640, 0},
        {700, 500, -90}, {129, 2000, 5},  {2000, 129, 129}, {500, 1000, 500}, {500, 1000, 1000},
        {64, 192, 192},  {300, 704, 704}, {320, 704, 384},  {192, 832, 500},  {100, 320, 192},
    };
    static const int64_t budgets[] = {1, 1 << 16, 1 << 17, 200000, 1 << 20};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        for (size_t b = 0; b < sizeof budgets / sizeof *budgets; b++) {
            const int64_t *l = lengths[i];
            nd_attention a = {1, l[0], l[1], 4, 2, 16, l[2], 0.25f};
            seen_forms s = check(a, budgets[b]);
            cr_expect_leq(s.count, 12, "%d forms of %lld pieces", s.count, (long long)s.pieces);
        }
    }
}

/* Returns true when some piece has `kvs` KV heads. */
static bool has_kvs(const seen_forms *s, int64_t kvs)
{
    for (int i = 0; i < s->count; i++) {
        if (s->forms[i].kvs == kvs) {
            return true;
        }
    }
    return false;
}

/* Groups of `kvs`, and a smaller last one: one band under the diagonal, one without, and both. */
Test(attention_cuts, an_uneven_last_group_shows_its_forms)
{
    static const int64_t heads[][2] = {{3, 2}, {5, 2}, {5, 3}, {7, 3}, {7, 4}, {8, 5}};
    static const int64_t lengths[][3] = {{64, 64, 0}, {40, 100, 60}, {64, 64, 64}, {99, 63, 0}};
    for (size_t h = 0; h < sizeof heads / sizeof *heads; h++) {
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
            int64_t kv_heads = heads[h][0], kvs = heads[h][1], sq = lengths[l][0];
            int64_t sk = lengths[l][1], band = sq > sk ? sk : sq;
            nd_attention a = {1, sq, sk, 2 * kv_heads, kv_heads, 16, lengths[l][2], 0.25f};
            seen_forms s = check(a, 2 * 2 * kvs * band * sk);
            cr_expect(has_kvs(&s, kvs) && has_kvs(&s, kv_heads % kvs), "%lld KV heads by %lld",
                      (long long)kv_heads, (long long)kvs);
        }
    }
}

Test(attention_cuts, long_deterministic_blocks_have_few_forms)
{
    const int64_t most = ND_SDPA_ORDERED_BYTES;
    nd_attention a = {1, 8192, 8192, 32, 8, 128, 0, 0.1f};
    cr_expect_eq(walk(&a, 0, true, NULL).pieces, 1);
    cr_expect_eq(walk(&a, most, true, NULL).pieces, 4, "two KV heads at a time");
    for (int64_t S = 16384; S <= 1 << 22; S = S * 2 + 24) {
        a.sq = a.sk = S; /* 4 tiles at least: a square, one below it, and their last ones */
        cr_expect_leq(walk(&a, most, true, NULL).count, 5, "S = %lld", (long long)S);
    }
    /* S = 128000 over cp 8, gathered: the last chunk sees all keys. */
    a = (nd_attention){1, 8000, 128000, 32, 8, 128, 128000 - 8000, 0.1f};
    seen_forms s = walk(&a, most, true, NULL);
    cr_expect_leq(s.count, 3);
    cr_expect_eq(s.pieces, 8 * (9 + 1),
                 "8 tiles before the square, for each KV head; 120000 keys "
                 "end with 64, so the last one is two");
    cr_expect_eq(walk(&a, most, false, NULL).pieces, 8 * (8 + 1));
    a = (nd_attention){2, 131072, 131072, 64, 8, 128, 131072, 0.1f};
    cr_expect_leq(walk(&a, most, true, NULL).count, 4);
}

Test(attention_cuts, sums_over_pieces_are_known)
{
    nd_attention a = {1, 128, 128, 4, 2, 64, 0, 0.125f};
    cr_expect_not(nd_sdpa_cut_block(&a, 0, true).adds_keys, "one piece");
    a.sk = 256;
    cr_expect(nd_sdpa_cut_block(&a, 0, true).adds_keys, "the last keys are seen by none");
    a.sk = 64;
    cr_expect(nd_sdpa_cut_block(&a, 0, true).adds_keys, "two bands");
    a = (nd_attention){1, 16, 16, 4, 2, 64, -16, 0.125f};
    cr_expect(nd_sdpa_cut_block(&a, 0, true).adds_keys, "no piece at all");
    a = (nd_attention){1, 300, 300, 4, 2, 16, 0, 0.25f};
    nd_sdpa_cut c = nd_sdpa_cut_block(&a, 1 << 16, true);
    cr_expect(c.adds_keys && c.adds_queries, "rows and keys are cut");
    a.sq = 128;
    a.diag = 172;
    c = nd_sdpa_cut_block(&a, 1 << 16, true);
    cr_expect(!c.adds_keys && c.adds_queries, "only keys are cut");
}

/* One call without them; with them dq is added up, and each key is in one half. */
Test(attention_cuts, unmasked_half_tiles_go_as_two_halves)
{
    for (int64_t keys = 32; keys <= 1024; keys += 32) {
        nd_attention a = {1, 100, keys, 4, 2, 64, keys, 0.125f};
        nd_sdpa_cut c = nd_sdpa_cut_block(&a, 0, true);
        bool half = keys % 128 == 64;
        cr_expect_eq(walk(&a, 0, true, NULL).pieces, half ? 2 : 1, "%lld keys", (long long)keys);
        cr_expect_eq(walk(&a, 0, true, NULL).count, 1);
        cr_expect_eq(walk(&a, 0, false, NULL).pieces, 1);
        cr_expect_eq(c.adds_queries, half);
        cr_expect_eq(c.keys, half ? keys / 2 : keys);
        cr_expect_not(c.adds_keys);
    }
    /* The diagonal hides what is behind the keys. */
    nd_attention a = {1, 64, 192, 4, 2, 64, 128, 0.125f};
    cr_expect_eq(walk(&a, 0, true, NULL).pieces, 1);
}

Test(attention_cuts, a_window_fits_one_whole_band)
{
    nd_attention a = {1, 300, 300, 4, 2, 16, 0, 0.25f, 70};
    cr_expect(nd_sdpa_fits(&a, 0));
    cr_expect(nd_sdpa_fits(&a, ND_SDPA_ORDERED_BYTES));
    cr_expect_not(nd_sdpa_fits(&a, 1 << 16), "the band is cut into tiles");
    a.sk = 700;
    a.diag = 400;
    cr_expect(nd_sdpa_fits(&a, 0));
    a.diag = 350;
    cr_expect(nd_sdpa_fits(&a, 0), "keys behind the last row's are seen by none");
    a.diag = 401;
    cr_expect_not(nd_sdpa_fits(&a, 0), "the last row sees the last key by no diagonal");
    a.diag = -1;
    cr_expect_not(nd_sdpa_fits(&a, 0), "a row sees nothing");
    a.window = 0;
    cr_expect(nd_sdpa_fits(&a, 0), "there is no window");
}

/* cuDNN takes segments of documents whose tiers begin at 128, and no heads for which its backward
 * would need memory as if each segment were the longest. */
Test(attention_cuts, documents_that_cudnn_takes)
{
    const nd_segments whole = ND_SEGMENTS_WHOLE, flat = ND_SEGMENTS_FLAT;
    const struct {
        nd_attention a;
        bool fit;
    } cases[] = {
        {{1, 64, 64, 4, 2, 16, 0, 0.25f, 0, whole, 1}, true},
        {{1, 64, 64, 4, 2, 128, 0, 0.25f, 9, whole, 1}, true},
        {{1, 64, 64, 4, 2, 24, 0, 0.25f, 0, whole, 1}, false},
        {{1, 64, 64, 4, 2, 144, 0, 0.25f, 0, whole, 1}, false},
        {{1, 63, 63, 4, 2, 16, 0, 0.25f, 0, whole, 1}, false},
        {{1, 64, 128, 4, 2, 16, 0, 0.25f, 0, whole, 1}, false},
        {{1, 43, 85, 4, 2, 16, 0, 0.25f, 9, ND_SEGMENTS_DIAGONAL, 2}, true},
        {{1, 42, 85, 4, 2, 16, 0, 0.25f, 0, ND_SEGMENTS_DIAGONAL, 2}, false},
        {{1, 64, 64, 4, 2, 16, 0, 0.25f, 0, flat, 2}, true},
        {{1, 64, 64, 4, 2, 16, 0, 0.25f, 9, flat, 2}, false},
        {{1, 64, 64, 4, 2, 16, 0, 0.25f}, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const nd_attention *a = &cases[i].a;
        cr_expect_eq(nd_ops_cuda_takes_documents(a, ND_DTYPE_BF16, false), cases[i].fit, "%zu", i);
        cr_expect_not(nd_ops_cuda_takes_documents(a, ND_DTYPE_BF16, true), "%zu", i);
        cr_expect_not(nd_ops_cuda_takes_documents(a, ND_DTYPE_F32, false), "%zu", i);
    }
}

/* However a deterministic backward cuts the block. */
static bool always_fits(const nd_attention *a)
{
    return !nd_ops_cuda_planner(true).attention_uses_delta(NULL, a, ND_DTYPE_BF16);
}

Test(attention_cuts, a_piece_of_one_row_does_not_fit)
{
    nd_attention a = {1, 1, 128, 4, 2, 16, 128, 0.25f};
    cr_expect_not(nd_sdpa_fits(&a, 0), "a block of one row");
    cr_expect_not(always_fits(&a));
    a.sq = 257;
    cr_expect(nd_sdpa_fits(&a, 0));
    cr_expect_not(nd_sdpa_fits(&a, 1 << 16), "128, 128 and one row");
    cr_expect_not(always_fits(&a));
    a.sq = 258;
    cr_expect(nd_sdpa_fits(&a, 1 << 16));
    cr_expect(always_fits(&a));
    a.diag = -1;
    cr_expect(nd_sdpa_fits(&a, 0), "a row sees nothing, 128 have a diagonal, 129 see all");
    cr_expect_not(always_fits(&a));
    a.sq = 130;
    cr_expect_not(nd_sdpa_fits(&a, 0), "one row sees all");
}

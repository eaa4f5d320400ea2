// SPDX-License-Identifier: Apache-2.0
/* How a block of attention is cut into calls of cuDNN: every row that sees a key, and every KV head
 * of it, in exactly one piece, whatever the lengths. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "kernels/cuda/sdpa_cut.h"

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Row i sees keys 0 .. i + diag: as many as its piece gives it. */
static void check_piece(const nd_attention *a, const nd_sdpa_piece *p)
{
    int64_t last = p->row + p->rows - 1, first_sees = least(p->row + 1 + a->diag, a->sk);
    cr_assert(p->rows >= 1 && p->kvs >= 1 && p->kv + p->kvs <= a->kv_heads && last < a->sq);
    cr_assert_eq(p->keys, least(last + 1 + a->diag, a->sk), "keys of the last row");
    switch (p->mask) {
    case ND_SDPA_ALL:
        cr_assert_eq(first_sees, p->keys);
        break;
    case ND_SDPA_TOP_LEFT:
        cr_assert_eq(first_sees, 1);
        cr_assert_eq(p->rows, p->keys);
        break;
    case ND_SDPA_BOTTOM_RIGHT:
        cr_assert_eq(first_sees, p->keys - p->rows + 1);
        break;
    }
}

/* Returns the number of pieces. */
static int64_t check(nd_attention a, bool ordered)
{
    nd_sdpa_cut c = nd_sdpa_cut_block(&a, ordered);
    int64_t rows = a.sq - c.blind;
    char *seen = calloc((size_t)(rows * a.kv_heads) + 1, 1);
    for (int64_t i = 0; i < c.count; i++) {
        nd_sdpa_piece p = nd_sdpa_piece_at(&a, &c, i);
        check_piece(&a, &p);
        for (int64_t h = p.kv; h < p.kv + p.kvs; h++) {
            for (int64_t row = p.row - c.blind; row < p.row + p.rows - c.blind; row++) {
                seen[h * rows + row]++;
            }
        }
        int64_t scores = a.batch * p.kvs * (a.heads / a.kv_heads) * p.rows * p.keys * 2;
        cr_assert(!ordered || scores <= ND_SDPA_ORDERED_BYTES || p.rows <= 128);
    }
    for (int64_t i = 0; i < rows * a.kv_heads; i++) {
        cr_assert_eq(seen[i], 1, "row %lld of KV head %lld", (long long)(i % rows),
                     (long long)(i / rows));
    }
    free(seen);
    return c.count;
}

Test(attention_cuts, every_row_is_in_one_piece)
{
    static const int64_t diags[] = {0, 1, 7, 64, 1000, -1, -40, -64};
    for (int64_t sq = 1; sq <= 64; sq = sq * 2 + 1) {
        for (int64_t sk = 1; sk <= 200; sk = sk * 3 + 1) {
            for (size_t d = 0; d < sizeof diags / sizeof *diags; d++) {
                nd_attention a = {1, sq, sk, 6, 3, 64, diags[d], 0.125f};
                check(a, false);
                check(a, true);
            }
        }
    }
}

Test(attention_cuts, long_deterministic_blocks_have_many_pieces)
{
    nd_attention a = {1, 8192, 8192, 32, 8, 128, 0, 0.1f};
    cr_expect_eq(check(a, false), 1);
    cr_expect_eq(check(a, true), 4, "two KV heads at a time");
    a.sq = a.sk = 65536; /* more than any table of fixed size held */
    cr_expect_eq(check(a, true), 8 * 32);
    a = (nd_attention){1, 16384, 262144, 32, 8, 128, 262144 - 16384, 0.1f};
    cr_expect_eq(check(a, true), 8 * 32);
    a = (nd_attention){2, 131072, 131072, 64, 8, 128, 131072, 0.1f};
    check(a, true);
}

Test(attention_cuts, pieces_that_share_keys_are_known)
{
    nd_attention a = {1, 128, 128, 4, 2, 64, 0, 0.125f};
    cr_expect_not(nd_sdpa_cut_block(&a, false).adds_keys, "one piece");
    a.sk = 256;
    cr_expect(nd_sdpa_cut_block(&a, false).adds_keys, "the last keys are seen by none");
    a.sk = 64;
    cr_expect(nd_sdpa_cut_block(&a, false).adds_keys, "two bands");
    a = (nd_attention){1, 16384, 16384, 32, 8, 128, 0, 0.1f};
    cr_expect_not(nd_sdpa_cut_block(&a, false).adds_keys);
    a.sq = a.sk = 65536;
    cr_expect(nd_sdpa_cut_block(&a, true).adds_keys, "several row pieces");
    a = (nd_attention){1, 16, 16, 4, 2, 64, -16, 0.125f};
    cr_expect(nd_sdpa_cut_block(&a, false).adds_keys, "no piece at all");
}

// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "trainer/checkpoint/pieces.h"

/* Every element of the range lies in exactly one part, at the offset that the part says. */
static void check_range(const nd_rect *block, int64_t begin, int64_t end)
{
    nd_piece parts[3];
    int seen[ND_RECT_KIND_COUNT] = {0};
    int64_t next = begin;
    int count = nd_pieces_of_range(NULL, block, begin, end, 0, parts);
    cr_assert_leq(count, 3);
    for (int i = 0; i < count; i++) {
        const nd_rect *r = &parts[i].rect;
        cr_assert_eq(parts[i].state, next - begin);
        cr_assert_eq(r->axes, block->axes);
        cr_assert_eq(seen[parts[i].kind]++, 0, "two parts of one kind in [%ld, %ld)", (long)begin,
                     (long)end);
        for (int64_t e = 0; e < nd_rect_elements(r); e++, next++) {
            cr_assert_eq(r->row + e / r->cols, block->row + next / block->cols);
            cr_assert_eq(r->col + e % r->cols, block->col + next % block->cols);
        }
    }
    cr_assert_eq(next, end > begin ? end : begin);
}

Test(pieces, every_range_of_a_block_is_at_most_three_rectangles)
{
    for (int64_t rows = 1; rows <= 4; rows++) {
        for (int64_t cols = 1; cols <= 5; cols++) {
            const nd_rect block = {.axes = 2, .row = 7, .col = 10, .rows = rows, .cols = cols};
            for (int64_t begin = 0; begin <= rows * cols; begin++) {
                for (int64_t end = begin; end <= rows * cols; end++) {
                    check_range(&block, begin, end);
                }
            }
        }
    }
}

Test(pieces, kinds_follow_the_rows)
{
    const nd_rect block = {.axes = 2, .row = 4, .col = 8, .rows = 5, .cols = 4};
    nd_piece p[3];
    cr_assert_eq(nd_pieces_of_range(NULL, &block, 3, 14, 0, p), 3);
    cr_assert(p[0].kind == ND_RECT_HEAD && p[0].rect.row == 4 && p[0].rect.col == 11 &&
              p[0].rect.rows == 1 && p[0].rect.cols == 1);
    cr_assert(p[1].kind == ND_RECT_BODY && p[1].rect.row == 5 && p[1].rect.col == 8 &&
              p[1].rect.rows == 2 && p[1].rect.cols == 4 && p[1].state == 1);
    cr_assert(p[2].kind == ND_RECT_TAIL && p[2].rect.row == 7 && p[2].rect.col == 8 &&
              p[2].rect.rows == 1 && p[2].rect.cols == 2 && p[2].state == 9);
    cr_assert_eq(nd_pieces_of_range(NULL, &block, 5, 7, 0, p), 1);
    cr_assert_eq(p[0].kind, ND_RECT_BODY, "a range within a row is one body");
    const nd_rect vector = {.axes = 1, .rows = 9, .cols = 1};
    cr_assert_eq(nd_pieces_of_range(NULL, &vector, 2, 7, 0, p), 1);
    cr_assert(p[0].kind == ND_RECT_BODY && p[0].rect.row == 2 && p[0].rect.rows == 5);
    cr_assert_eq(nd_pieces_of_range(NULL, &block, 6, 6, 0, p), 0);
}

Test(pieces, intersection_is_what_both_hold)
{
    const nd_rect a = {2, 3, 4, 5, 6}, b = {2, 6, 0, 9, 5};
    nd_rect got;
    cr_assert(nd_rect_intersect(&a, &b, &got));
    cr_assert(got.row == 6 && got.col == 4 && got.rows == 2 && got.cols == 1);
    const nd_rect below = {2, 8, 4, 1, 1}, right = {2, 3, 10, 1, 1};
    memset(&got, 9, sizeof got);
    cr_assert_not(nd_rect_intersect(&a, &below, &got));
    cr_assert_not(nd_rect_intersect(&a, &right, &got));
    cr_assert_eq(got.row, 0x0909090909090909);
}

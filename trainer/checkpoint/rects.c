// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/rects.h"

#include "runtime/base/math.h"

int nd_rects_of_range(const nd_local_block *block, int64_t begin, int64_t end, nd_rect_part out[3])
{
    int count = 0;
    int64_t cols = block->cols;
    for (int64_t at = begin; at < end;) {
        int64_t row = at / cols, col = at % cols;
        int64_t rows = col == 0 ? (end - at) / cols : 0; /* full rows from here */
        int64_t size = rows > 0 ? rows * cols : cols - col;
        size = size < end - at ? size : end - at;
        nd_rect_part *part = &out[count++];
        part->rect = (nd_rect){.axes = block->axes,
                               .row = block->row + row,
                               .col = block->col + col,
                               .rows = rows > 0 ? rows : 1,
                               .cols = rows > 0 ? cols : size};
        part->kind = rows > 0 || (at == begin && at + size == end) ? ND_RECT_BODY
                     : col > 0                                     ? ND_RECT_HEAD
                                                                   : ND_RECT_TAIL;
        part->offset = at - begin;
        at += size;
    }
    return count;
}

bool nd_rect_intersect(const nd_rect *a, const nd_rect *b, nd_rect *out)
{
    int64_t row = nd_max(a->row, b->row), col = nd_max(a->col, b->col);
    int64_t rows = nd_min(a->row + a->rows, b->row + b->rows) - row;
    int64_t cols = nd_min(a->col + a->cols, b->col + b->cols) - col;
    if (rows <= 0 || cols <= 0) {
        return false;
    }
    *out = (nd_rect){.axes = a->axes, .row = row, .col = col, .rows = rows, .cols = cols};
    return true;
}

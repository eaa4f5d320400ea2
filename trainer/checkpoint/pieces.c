// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/pieces.h"

#include "runtime/base/math.h"

/* Rectangles. */

int nd_pieces_of_range(const nd_param *param, const nd_rect *block, int64_t begin, int64_t end,
                       int64_t state, nd_piece out[3])
{
    int count = 0;
    int64_t cols = block->cols;
    for (int64_t at = begin; at < end;) {
        int64_t row = at / cols, col = at % cols;
        int64_t rows = col == 0 ? (end - at) / cols : 0; /* full rows from here */
        int64_t size = rows > 0 ? rows * cols : cols - col;
        size = size < end - at ? size : end - at;
        nd_piece *piece = &out[count++];
        piece->param = param;
        piece->rect = (nd_rect){.axes = block->axes,
                                .row = block->row + row,
                                .col = block->col + col,
                                .rows = rows > 0 ? rows : 1,
                                .cols = rows > 0 ? cols : size};
        piece->kind = rows > 0 || (at == begin && at + size == end) ? ND_RECT_BODY
                      : col > 0                                     ? ND_RECT_HEAD
                                                                    : ND_RECT_TAIL;
        piece->state = state + at - begin;
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

/* Who writes them. */

nd_holder nd_holder_of(const nd_mesh *mesh, int rank)
{
    nd_coord coord = nd_mesh_coord_of(mesh, rank);
    return (nd_holder){.shard = nd_mesh_group_index(mesh, ND_GROUP_DP_SHARD_CP, rank),
                       .tp = coord.at[ND_AXIS_TP],
                       .replica = coord.at[ND_AXIS_DP_REPLICATE],
                       .replicas = mesh->size[ND_AXIS_DP_REPLICATE]};
}

int nd_holder_rank(const nd_mesh *mesh, const nd_holder *holder)
{
    nd_coord coord = {0};
    coord.at[ND_AXIS_DP_REPLICATE] = holder->replica;
    coord.at[ND_AXIS_DP_SHARD] = holder->shard / mesh->size[ND_AXIS_CP];
    coord.at[ND_AXIS_CP] = holder->shard % mesh->size[ND_AXIS_CP];
    coord.at[ND_AXIS_TP] = holder->tp;
    return nd_mesh_rank_of(mesh, coord);
}

nd_held nd_held_part(const nd_layout *layout, const nd_param *p, int shard)
{
    const nd_segment *segment = &p->unit->segments[p->segment];
    int64_t rows = p->rows - p->row_begin < p->local_rows ? p->rows - p->row_begin : p->local_rows;
    rows = rows > 0 ? rows : 0; /* the last tp ranks may hold padding of the vocabulary only */
    nd_held held = {.block = {.axes = p->axes,
                              .row = p->row_begin,
                              .col = p->col_begin,
                              .rows = rows,
                              .cols = p->local_cols}};
    int64_t first = segment->shard_count * shard, last = first + segment->shard_count;
    int64_t begin = p->offset > first ? p->offset : first;
    int64_t end = p->offset + rows * p->local_cols;
    end = end < last ? end : last;
    if (begin < end) {
        held.begin = begin - p->offset;
        held.end = end - p->offset;
        held.state = segment->shard_offset + begin - first;
    }
    return held;
}

/* `cut` elements into the held range, moved down to the beginning of a row: both replicas at a cut
 * compute the same place. */
static int64_t row_at(const nd_held *held, int64_t cut)
{
    int64_t count = held->end - held->begin;
    if (cut <= 0) {
        return held->begin;
    }
    if (cut >= count) {
        return held->end;
    }
    int64_t at = (held->begin + cut) / held->block.cols * held->block.cols;
    return at > held->begin ? at : held->begin;
}

int nd_pieces_written(const nd_layout *layout, const nd_holder *holder, nd_piece *out)
{
    int64_t total = 0, before = 0;
    int count = 0;
    for (int i = 0; i < layout->param_count; i++) {
        nd_held held = nd_held_part(layout, &layout->params[i], holder->shard);
        total += layout->params[i].owned ? held.end - held.begin : 0;
    }
    /* This replica's part of all that the holders of this shard write, in elements. */
    int64_t share = total / holder->replicas, rest = total % holder->replicas;
    int64_t r = holder->replica;
    int64_t first = share * r + (r < rest ? r : rest);
    int64_t last = first + share + (r < rest ? 1 : 0);
    for (int i = 0; i < layout->param_count && before < last; i++) {
        const nd_param *p = &layout->params[i];
        if (!p->owned) {
            continue;
        }
        nd_held held = nd_held_part(layout, p, holder->shard);
        int64_t begin = row_at(&held, first - before), end = row_at(&held, last - before);
        before += held.end - held.begin;
        count += nd_pieces_of_range(p, &held.block, begin, end, held.state + begin - held.begin,
                                    out + count);
    }
    return count;
}

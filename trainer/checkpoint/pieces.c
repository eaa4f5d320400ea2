// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/pieces.h"

#include "runtime/base/math.h"

bool nd_span_intersect(const nd_span *a, const nd_span *b, nd_span *out)
{
    int64_t row = nd_max(a->row, b->row), col = nd_max(a->col, b->col);
    int64_t rows = nd_min(a->row + a->rows, b->row + b->rows) - row;
    int64_t cols = nd_min(a->col + a->cols, b->col + b->cols) - col;
    if (rows <= 0 || cols <= 0) {
        return false;
    }
    *out = (nd_span){.param = a->param, .row = row, .col = col, .rows = rows, .cols = cols};
    return true;
}

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

/* What a shard has of a parameter, without padding: elements [begin, end) of the flat state arrays,
 * where all of the local block begins at element block.begin. begin == end: nothing. */
typedef struct held {
    nd_span block;
    int64_t begin, end;
} held;

static held held_part(const nd_layout *layout, const nd_param *p, int shard)
{
    const nd_segment *segment = &p->unit->segments[p->segment];
    held h = {.block = {.param = p,
                        .row = p->row_begin,
                        .col = p->col_begin,
                        /* the last tp ranks may hold padding of the vocabulary only */
                        .rows = nd_max(nd_min(p->rows - p->row_begin, p->local_rows), 0),
                        .cols = p->local_cols,
                        .begin = segment->shard_offset + p->offset - segment->shard_count * shard}};
    const int64_t end = h.block.begin + nd_span_elements(&h.block);
    h.begin = nd_max(h.block.begin, segment->shard_offset);
    h.end = nd_max(nd_min(end, segment->shard_offset + segment->shard_count), h.begin);
    return h;
}

/* `cut` elements into the held range, moved down to the beginning of a row: both replicas at a cut
 * compute the same place. */
static int64_t row_at(const held *h, int64_t cut)
{
    if (cut <= 0) {
        return h->begin;
    }
    if (cut >= h->end - h->begin) {
        return h->end;
    }
    const int64_t within = (h->begin + cut - h->block.begin) / h->block.cols * h->block.cols;
    return nd_max(h->block.begin + within, h->begin);
}

typedef struct cutting {
    nd_piece *out;
    int count;
    int64_t elements; /* of the range that is cut */
} cutting;

static nd_status add_piece(void *context, const nd_span *span)
{
    cutting *c = context;
    const bool whole_rows = span->cols == span->param->local_cols;
    c->out[c->count++] =
        (nd_piece){.span = *span,
                   .kind = whole_rows || nd_span_elements(span) == c->elements ? ND_PIECE_BODY
                           : span->col > span->param->col_begin                ? ND_PIECE_HEAD
                                                                               : ND_PIECE_TAIL};
    return ND_OK;
}

int nd_pieces_written(const nd_layout *layout, const nd_holder *holder, nd_piece *out)
{
    int64_t total = 0, before = 0;
    cutting c = {.out = out};
    for (int i = 0; i < layout->param_count; i++) {
        const held h = held_part(layout, &layout->params[i], holder->shard);
        total += layout->params[i].owned ? h.end - h.begin : 0;
    }
    /* This replica's part of all that the holders of this shard write, in elements. */
    int64_t share = total / holder->replicas, rest = total % holder->replicas;
    int64_t r = holder->replica;
    int64_t first = share * r + nd_min(r, rest), last = first + share + (r < rest);
    for (int i = 0; i < layout->param_count && before < last; i++) {
        if (layout->params[i].owned) {
            const held h = held_part(layout, &layout->params[i], holder->shard);
            const int64_t begin = row_at(&h, first - before), end = row_at(&h, last - before);
            before += h.end - h.begin;
            c.elements = end - begin;
            (void)nd_span_each_part(&h.block, begin, end, add_piece, &c);
        }
    }
    return c.count;
}

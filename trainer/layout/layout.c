// SPDX-License-Identifier: Apache-2.0
#include "trainer/layout/layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHARD_ALIGNMENT = 256, TENSOR_ALIGNMENT = 64 };

typedef enum dim { DIM_1 = 0, DIM_V, DIM_C, DIM_F, DIM_QD, DIM_KD, DIM_COUNT } dim;

static const struct {
    const char *name;
    nd_unit_kind unit;
    dim rows, cols;
    nd_split split;
    nd_init init;
    bool decay, fp8;
} table[ND_PARAM_COUNT] = {
#define ND_PARAM(id, unit_, name_, rows_, cols_, split_, init_, decay_, fp8_)                      \
    [ND_PARAM_##                                                                                   \
        id] = {name_,           ND_UNIT_##unit_, DIM_##rows_, DIM_##cols_, ND_SPLIT_##split_,      \
               ND_INIT_##init_, decay_,          fp8_},
#include "trainer/layout/llama_params.def"
#undef ND_PARAM
};

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static void fill_param(nd_param *p, nd_param_id id, int64_t layer, const nd_llama_shape *shape,
                       int tp, int tp_index)
{
    const int64_t extent[DIM_COUNT] = {
        [DIM_1] = 1,
        [DIM_V] = shape->vocab,
        [DIM_C] = shape->hidden,
        [DIM_F] = shape->ffn,
        [DIM_QD] = shape->heads * shape->head_dim,
        [DIM_KD] = shape->kv_heads * shape->head_dim,
    };
    *p = (nd_param){
        .id = id,
        .layer = layer,
        .axes = table[id].cols == DIM_1 ? 1 : 2,
        .rows = extent[table[id].rows],
        .cols = extent[table[id].cols],
        .split = table[id].split,
        .init = table[id].init,
        .decay = table[id].decay,
        .fp8 = table[id].fp8,
        .stream = (uint64_t)(layer + 1) * 64 + (uint64_t)id,
    };
    if (layer >= 0) {
        snprintf(p->name, sizeof p->name, table[id].name, (long long)layer);
    } else {
        snprintf(p->name, sizeof p->name, "%s", table[id].name);
    }
    p->local_rows = p->split == ND_SPLIT_ROWS ? (p->rows + tp - 1) / tp : p->rows;
    p->local_cols = p->split == ND_SPLIT_COLS ? p->cols / tp : p->cols;
    p->row_begin = p->split == ND_SPLIT_ROWS ? p->local_rows * tp_index : 0;
    p->col_begin = p->split == ND_SPLIT_COLS ? p->local_cols * tp_index : 0;
}

/* q k v and gate up are one matrix each to a product, so only the first of such neighbours is
 * aligned. */
static bool continues_previous(nd_param_id id)
{
    return id == ND_PARAM_K || id == ND_PARAM_V || id == ND_PARAM_UP;
}

static void place_param(nd_layout *layout, nd_unit *unit, nd_param *p)
{
    nd_segment *segment = &unit->segments[p->segment];
    bool joined = continues_previous(p->id) && p[-1].segment == p->segment;
    p->unit = (int)(unit - layout->units);
    p->offset = joined ? segment->used : round_up(segment->used, TENSOR_ALIGNMENT);
    segment->used = p->offset + p->local_rows * p->local_cols;
}

static void close_unit(nd_layout *layout, nd_unit *unit)
{
    for (int s = 0; s < ND_SEGMENT_COUNT; s++) {
        nd_segment *segment = &unit->segments[s];
        int64_t share = (segment->used + layout->shards - 1) / layout->shards;
        segment->shard_count = round_up(share, SHARD_ALIGNMENT);
        segment->count = segment->shard_count * layout->shards;
        segment->shard_offset = layout->shard_total;
        layout->shard_total += segment->shard_count;
    }
}

static bool belongs(nd_param_id id, nd_unit_kind kind, bool tied)
{
    if (tied && id == ND_PARAM_HEAD) {
        return false;
    }
    nd_unit_kind home = tied && id == ND_PARAM_EMBED ? ND_UNIT_TAIL : table[id].unit;
    return home == kind;
}

nd_status nd_layout_create(const nd_llama_shape *shape, const nd_mesh *mesh, nd_coord coord,
                           bool (*converts)(void *context, const nd_param *param), void *context,
                           nd_layout **out)
{
    nd_layout *layout = NULL;
    ND_TRY(ND_ALLOC(1, &layout));
    int tp = mesh->size[ND_AXIS_TP];
    layout->tied = shape->tied;
    layout->shards = nd_mesh_group_size(mesh, ND_GROUP_DP_SHARD_CP);
    layout->shard_index =
        nd_mesh_group_index(mesh, ND_GROUP_DP_SHARD_CP, nd_mesh_rank_of(mesh, coord));
    layout->first_block = shape->tied ? 0 : 1;
    layout->unit_count = (int)shape->layers + layout->first_block + 1;
    layout->tail = layout->unit_count - 1;
    if (ND_ALLOC(layout->unit_count, &layout->units) != ND_OK ||
        ND_ALLOC((int64_t)layout->unit_count * ND_PARAM_COUNT, &layout->params) != ND_OK) {
        nd_layout_destroy(layout);
        return ND_ERR_INTERNAL;
    }
    for (int u = 0; u < layout->unit_count; u++) {
        nd_unit *unit = &layout->units[u];
        unit->kind = u == layout->tail         ? ND_UNIT_TAIL
                     : u < layout->first_block ? ND_UNIT_EMBED
                                               : ND_UNIT_BLOCK;
        unit->layer = unit->kind == ND_UNIT_BLOCK ? u - layout->first_block : -1;
        unit->first_param = layout->param_count;
        for (nd_param_id id = 0; id < ND_PARAM_COUNT; id++) {
            if (!belongs(id, unit->kind, shape->tied)) {
                continue;
            }
            nd_param *p = &layout->params[layout->param_count++];
            fill_param(p, id, unit->layer, shape, tp, coord.at[ND_AXIS_TP]);
            p->segment =
                p->fp8 && converts && converts(context, p) ? ND_SEGMENT_FP8 : ND_SEGMENT_HP;
            place_param(layout, unit, p);
            unit->param_count++;
        }
        close_unit(layout, unit);
    }
    *out = layout;
    return ND_OK;
}

void nd_layout_destroy(nd_layout *layout)
{
    if (layout) {
        free(layout->params);
        free(layout->units);
        free(layout);
    }
}

int nd_layout_find(const nd_layout *layout, nd_param_id id, int64_t layer)
{
    if (layout->tied && id == ND_PARAM_HEAD) {
        id = ND_PARAM_EMBED;
    }
    int u = layer >= 0                              ? layout->first_block + (int)layer
            : id == ND_PARAM_EMBED && !layout->tied ? 0
                                                    : layout->tail;
    const nd_unit *unit = &layout->units[u];
    for (int i = unit->first_param; i < unit->first_param + unit->param_count; i++) {
        if (layout->params[i].id == id) {
            return i;
        }
    }
    ND_ASSERT(!"every parameter is in the table");
    return -1;
}

/* Runs of elements [begin, end) of the local block of p; `state` is the flat state index of element
 * `begin`. */
static nd_status visit_block(const nd_param *p, int64_t begin, int64_t end, int64_t state,
                             nd_status (*visit)(void *, const nd_run *), void *context)
{
    while (begin < end) {
        int64_t row = begin / p->local_cols, col = begin % p->local_cols;
        if (p->row_begin + row >= p->rows) {
            return ND_OK; /* padding rows of the vocabulary */
        }
        int64_t rows_left =
            p->rows - p->row_begin < p->local_rows ? p->rows - p->row_begin : p->local_rows;
        int64_t stop =
            p->split == ND_SPLIT_COLS ? (row + 1) * p->local_cols : rows_left * p->local_cols;
        stop = stop < end ? stop : end;
        nd_run run = {p, (p->row_begin + row) * p->cols + p->col_begin + col, state, stop - begin};
        ND_TRY(visit(context, &run));
        state += stop - begin;
        begin = stop;
    }
    return ND_OK;
}

nd_status nd_layout_each_run(const nd_layout *layout, int unit, int shard_index,
                             nd_status (*visit)(void *context, const nd_run *run), void *context)
{
    const nd_unit *u = &layout->units[unit];
    for (int i = u->first_param; i < u->first_param + u->param_count; i++) {
        const nd_param *p = &layout->params[i];
        const nd_segment *segment = &u->segments[p->segment];
        int64_t shard_begin = segment->shard_count * shard_index,
                shard_end = shard_begin + segment->shard_count;
        int64_t begin = p->offset > shard_begin ? p->offset : shard_begin;
        int64_t end = p->offset + p->local_rows * p->local_cols;
        end = end < shard_end ? end : shard_end;
        if (begin < end) {
            ND_TRY(visit_block(p, begin - p->offset, end - p->offset,
                               segment->shard_offset + begin - shard_begin, visit, context));
        }
    }
    return ND_OK;
}

nd_flat_range nd_layout_shard_range(const nd_layout *layout, const nd_param *p)
{
    const nd_segment *segment = &layout->units[p->unit].segments[p->segment];
    int64_t begin = p->offset - segment->shard_count * layout->shard_index;
    int64_t end = begin + p->local_rows * p->local_cols;
    begin = begin > 0 ? begin : 0;
    end = end < segment->shard_count ? end : segment->shard_count;
    if (begin >= end) {
        return (nd_flat_range){0};
    }
    return (nd_flat_range){segment->shard_offset + begin, segment->shard_offset + end, p->decay};
}

/* Parameter ranges of this rank's state: all with their decay, or those replicated over tp. */
static nd_status collect_ranges(const nd_layout *layout, bool only_replicated, nd_flat_range **out,
                                int *count)
{
    nd_flat_range *ranges = NULL;
    int n = 0;
    ND_TRY(ND_ALLOC(layout->param_count, &ranges));
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[i];
        nd_flat_range range = nd_layout_shard_range(layout, p);
        if (range.begin < range.end && (!only_replicated || p->split == ND_SPLIT_NONE)) {
            ranges[n++] = range;
        }
    }
    *out = ranges;
    *count = n;
    return ND_OK;
}

nd_status nd_layout_decay_ranges(const nd_layout *layout, nd_flat_range **out, int *count)
{
    return collect_ranges(layout, false, out, count);
}

nd_status nd_layout_replicated_ranges(const nd_layout *layout, nd_flat_range **out, int *count)
{
    return collect_ranges(layout, true, out, count);
}

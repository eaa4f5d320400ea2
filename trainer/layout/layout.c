// SPDX-License-Identifier: Apache-2.0
#include "trainer/layout/layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"

enum { SHARD_ALIGNMENT = 256, TENSOR_ALIGNMENT = 64 };

typedef enum dim { DIM_1 = 0, DIM_V, DIM_C, DIM_F, DIM_D, DIM_QD, DIM_KD, DIM_COUNT } dim;
static const struct {
    const char *name;
    nd_unit_kind unit;
    dim rows, cols;
    nd_split split;
    nd_init init;
    bool decay;
} table[ND_PARAM_COUNT] = {
#define ND_PARAM(id, unit_, name_, rows_, cols_, split_, init_, decay_, when_)                     \
    [ND_PARAM_##id] = {name_,       ND_UNIT_##unit_,   DIM_##rows_,                                \
                       DIM_##cols_, ND_SPLIT_##split_, ND_INIT_##init_,                            \
                       decay_},
#include "trainer/layout/params.def"
};

static void write_name(nd_family family, nd_param_id id, int64_t layer, char name[ND_PARAM_NAME])
{
    const char *const *norms = nd_families[family].norms;
    const char *own = id == ND_PARAM_NORM_2   ? norms[0]
                      : id == ND_PARAM_POST_1 ? norms[1]
                      : id == ND_PARAM_POST_2 ? norms[2]
                                              : NULL;
    if (own) {
        snprintf(name, ND_PARAM_NAME, "model.layers.%lld.%s.weight", (long long)layer, own);
    } else {
        snprintf(name, ND_PARAM_NAME, table[id].name, (long long)layer);
    }
}

static void extents_of(const nd_shape *shape, nd_param_id id, int64_t *rows, int64_t *cols)
{
    const int64_t extent[DIM_COUNT] = {
        [DIM_1] = 1,
        [DIM_V] = shape->vocab,
        [DIM_C] = shape->hidden,
        [DIM_F] = shape->ffn,
        [DIM_D] = shape->head_dim,
        [DIM_QD] = shape->heads * shape->head_dim,
        [DIM_KD] = shape->kv_heads * shape->head_dim,
    };
    *rows = extent[table[id].rows];
    *cols = extent[table[id].cols];
}

bool nd_shape_has(const nd_shape *shape, nd_param_id id)
{
#define WHEN_ALWAYS      true
#define WHEN_QKV_BIAS    shape->qkv_bias
#define WHEN_O_BIAS      shape->o_bias
#define WHEN_MLP_BIAS    shape->mlp_bias
#define WHEN_QK_NORM     shape->qk_norm == 1
#define WHEN_QK_NORM_ALL shape->qk_norm == 2
#define WHEN_PRE_NORM    shape->post_norm != 1
#define WHEN_POST_NORM   shape->post_norm
    const bool has[] = {
#define ND_PARAM(id, unit, name, rows, cols, split, init, decay, when)                             \
    [ND_PARAM_##id] = WHEN_##when,
#include "trainer/layout/params.def"
    };
    return has[id] && !(shape->tied && id == ND_PARAM_HEAD);
}

int64_t nd_shape_parameters(const nd_shape *s)
{
    int64_t sum = 0, rows, cols;
    for (nd_param_id id = 0; id < ND_PARAM_COUNT; id++) {
        extents_of(s, id, &rows, &cols);
        sum += !nd_shape_has(s, id)              ? 0
               : table[id].unit == ND_UNIT_BLOCK ? s->layers * rows * cols
                                                 : rows * cols;
    }
    return sum;
}

/* Adjacent ranks of tp that hold the same block. */
static int64_t copies_of(const nd_shape *shape, nd_param_id id, int64_t tp)
{
    return table[id].split == ND_SPLIT_NONE ? tp
           : table[id].rows == DIM_KD       ? nd_shape_kv_copies(shape, tp)
                                            : 1;
}

void nd_linear_sizes(const nd_shape *s, int linear, int64_t tp, int64_t *out, int64_t *in)
{
    const nd_param_id id = nd_linears[linear].param;
    extents_of(s, id, out, in);
    *out /= table[id].split == ND_SPLIT_ROWS ? tp / copies_of(s, id, tp) : 1;
    *in /= table[id].split == ND_SPLIT_COLS ? tp : 1;
}

/* Linears. */

const nd_linear_row nd_linears[ND_LINEAR_COUNT] = {
#define ND_LINEAR(id, module, rows, cols, split, input)                                            \
    [ND_LINEAR_##id] = {ND_PARAM_##id, ND_PARAM_##id##_BIAS, ND_INPUT_##input, module},
#include "trainer/layout/params.def"
};

/* The name of an input's linears as one. */
static const char *input_name(nd_input input)
{
    static const char *const names[] = {[ND_INPUT_QKV] = "self_attn.qkv_proj",
                                        [ND_INPUT_O] = "self_attn.o_proj",
                                        [ND_INPUT_GATE_UP] = "mlp.gate_up_proj",
                                        [ND_INPUT_DOWN] = "mlp.down_proj"};
    return names[input];
}

int nd_input_linears(nd_input input, int *first)
{
    int count = 0;
    for (int i = ND_LINEAR_COUNT - 1; i >= 0; i--) {
        if (nd_linears[i].input == input) {
            *first = i;
            count++;
        }
    }
    return count;
}

int nd_linear_of_param(nd_param_id id)
{
    for (int i = 0; i < ND_LINEAR_COUNT; i++) {
        if (nd_linears[i].param == id) {
            return i;
        }
    }
    return -1;
}

/* Says where a file has the parameter: in a tensor of all linears with its input, in their
 * order. */
static void place_in_file(nd_param *p, const nd_shape *shape)
{
    const nd_family_row *family = &nd_families[shape->family];
    const int linear = nd_linear_of_param(p->id);
    int first = 0;
    memcpy(p->file_name, p->name, sizeof p->file_name);
    p->file_rows = p->rows;
    if (family->interleaved && (p->id == ND_PARAM_Q || p->id == ND_PARAM_Q_BIAS ||
                                p->id == ND_PARAM_K || p->id == ND_PARAM_K_BIAS)) {
        p->paired = nd_shape_rotated(shape);
        p->head_rows = shape->head_dim;
    }
    if (linear < 0 || nd_input_linears(nd_linears[linear].input, &first) == 1 ||
        family->fused < (nd_linears[linear].input == ND_INPUT_QKV ? 2 : 1)) {
        return;
    }
    const int count = nd_input_linears(nd_linears[linear].input, &first);
    p->file_rows = 0;
    for (int l = first; l < first + count; l++) {
        int64_t rows, cols;
        extents_of(shape, nd_linears[l].param, &rows, &cols);
        p->file_row += l < linear ? rows : 0;
        p->file_rows += rows;
    }
    snprintf(p->file_name, sizeof p->file_name, "model.layers.%lld.%s.weight", (long long)p->layer,
             input_name(nd_linears[linear].input));
}

int64_t nd_param_in_file(const nd_param *p, int64_t element)
{
    int64_t row = element / p->cols;
    const int64_t in_head = p->paired > 0 ? row % p->head_rows : 0, half = p->paired / 2;
    if (in_head < p->paired) {
        row += 2 * (in_head % half) + in_head / half - in_head;
    }
    return (p->file_row + row) * p->cols + element % p->cols;
}

int64_t nd_param_adjacent(const nd_param *p, int64_t element)
{
    return p->paired > 0 ? p->cols - element % p->cols : p->rows * p->cols - element;
}

static void fill_param(nd_param *p, nd_param_id id, int64_t layer, const nd_shape *shape, int tp,
                       int tp_index)
{
    *p = (nd_param){
        .id = id,
        .layer = layer,
        .axes = table[id].cols == DIM_1 ? 1 : 2,
        .split = table[id].split,
        .copies = (int)copies_of(shape, id, tp),
        .init = table[id].init == ND_INIT_ONE && nd_families[shape->family].norm_plus > 0
                    ? ND_INIT_ZERO
                    : table[id].init,
        .decay = table[id].decay,
        .fp8 = nd_linear_of_param(id) >= 0,
        .random_stream = (uint64_t)(layer + 1) * 64 + (uint64_t)id,
    };
    write_name(shape->family, id, layer, p->name);
    extents_of(shape, id, &p->rows, &p->cols);
    place_in_file(p, shape);
    const int blocks = tp / p->copies, block = tp_index / p->copies;
    p->owned = tp_index % p->copies == 0;
    p->local_rows = p->split == ND_SPLIT_ROWS ? nd_ceil_div(p->rows, blocks) : p->rows;
    p->local_cols = p->split == ND_SPLIT_COLS ? p->cols / blocks : p->cols;
    p->row_begin = p->split == ND_SPLIT_ROWS ? p->local_rows * block : 0;
    p->col_begin = p->split == ND_SPLIT_COLS ? p->local_cols * block : 0;
}

/* The weights of linears with one input are one matrix to a product, and their biases one vector,
 * so only the first of them is aligned. */
static bool continues_previous(nd_param_id id)
{
    for (int l = 1; l < ND_LINEAR_COUNT; l++) {
        if (id == nd_linears[l].param || id == nd_linears[l].bias) {
            return nd_linears[l].input == nd_linears[l - 1].input;
        }
    }
    return false;
}

static int add_unit(nd_layout *layout, const nd_layout_options *o, nd_unit_kind kind, int64_t layer)
{
    nd_unit *unit = &layout->units[layout->unit_count];
    *unit = (nd_unit){.kind = kind,
                      .layer = layer,
                      .index = layout->unit_count++,
                      .first_param = layout->param_count,
                      .shard_offset = layout->shard_total};
    for (nd_param_id id = 0; id < ND_PARAM_COUNT; id++) {
        const bool table_in_head = layout->tied && id == ND_PARAM_EMBED;
        if ((table_in_head ? ND_UNIT_HEAD : table[id].unit) != kind ||
            !nd_shape_has(o->shape, id)) {
            continue;
        }
        nd_param *p = &layout->params[layout->param_count++];
        fill_param(p, id, layer, o->shape, o->mesh->size[ND_AXIS_TP], o->coord.at[ND_AXIS_TP]);
        bool fp8 = p->fp8 && o->converts && o->converts(o->context, p);
        p->segment = fp8 ? ND_SEGMENT_FP8 : ND_SEGMENT_HP;
        p->unit = unit;
        nd_segment *segment = &unit->segments[p->segment];
        const bool joined = continues_previous(id) && p[-1].segment == p->segment;
        p->offset = joined ? segment->used : nd_round_up(segment->used, TENSOR_ALIGNMENT);
        segment->used = p->offset + p->local_rows * p->local_cols;
        unit->param_count++;
    }
    for (int s = 0; s < ND_SEGMENT_COUNT; s++) {
        nd_segment *segment = &unit->segments[s];
        int64_t share = nd_ceil_div(segment->used, layout->shards);
        segment->shard_count = nd_round_up(share, SHARD_ALIGNMENT);
        segment->count = segment->shard_count * layout->shards;
        segment->shard_offset = layout->shard_total;
        layout->shard_total += segment->shard_count;
    }
    unit->shard_count = layout->shard_total - unit->shard_offset;
    return unit->index;
}

static void add_stage(nd_layout *layout, const nd_layout_options *o, const nd_stage *stage)
{
    if (stage->embeds && !layout->tied) {
        layout->embedding = add_unit(layout, o, ND_UNIT_EMBEDDING, -1);
    }
    for (int64_t l = stage->layers.begin; l < stage->layers.end; l++) {
        layout->unit_of_layer[l] = add_unit(layout, o, ND_UNIT_BLOCK, l);
        layout->block_count++;
    }
    if (stage->has_head) {
        layout->head = add_unit(layout, o, ND_UNIT_HEAD, -1);
    }
}

/* Allocates the tables, and fills in the stages. */
static nd_status allocate(nd_layout *layout, const nd_layout_options *o)
{
    const nd_stage whole = {{0, o->shape->layers}, true, true};
    const nd_stage *stages = o->stage_count ? o->stages : &whole;
    int64_t units = 2;
    layout->stage_count = o->stage_count ? o->stage_count : 1;
    ND_TRY(ND_ALLOC(layout->stage_count, &layout->stages));
    for (int s = 0; s < layout->stage_count; s++) {
        layout->stages[s] = stages[s];
        units += stages[s].layers.end - stages[s].layers.begin;
    }
    ND_TRY(ND_ALLOC(layout->layers, &layout->unit_of_layer));
    for (int64_t l = 0; l < layout->layers; l++) {
        layout->unit_of_layer[l] = -1;
    }
    ND_TRY(ND_ALLOC(units, &layout->units));
    return ND_ALLOC(units * ND_PARAM_COUNT, &layout->params);
}

nd_status nd_layout_create(const nd_layout_options *options, nd_layout **out)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    nd_layout_options o = *options;
    nd_layout *layout = NULL;
    ND_TRY(ND_ALLOC(1, &layout));
    o.mesh = o.mesh ? o.mesh : &one;
    layout->tied = o.shape->tied;
    layout->layers = o.shape->layers;
    layout->shards = nd_mesh_group_size(o.mesh, ND_GROUP_DP_SHARD_CP);
    layout->shard_index =
        nd_mesh_group_index(o.mesh, ND_GROUP_DP_SHARD_CP, nd_mesh_rank_of(o.mesh, o.coord));
    layout->embedding = layout->head = -1;
    nd_status status = allocate(layout, &o);
    if (status != ND_OK) {
        nd_layout_destroy(layout);
        return status;
    }
    for (int s = 0; s < layout->stage_count; s++) {
        add_stage(layout, &o, &layout->stages[s]);
    }
    *out = layout;
    return ND_OK;
}

void nd_layout_destroy(nd_layout *layout)
{
    if (layout) {
        free(layout->stages);
        free(layout->params);
        free(layout->units);
        free(layout->unit_of_layer);
        free(layout);
    }
}

const nd_unit *nd_layout_unit(const nd_layout *layout, nd_unit_kind kind, int64_t layer)
{
    const bool in_model = layer >= 0 && layer < layout->layers;
    const int unit = kind == ND_UNIT_EMBEDDING ? layout->embedding
                     : kind == ND_UNIT_HEAD    ? layout->head
                     : in_model                ? layout->unit_of_layer[layer]
                                               : -1;
    return unit < 0 ? NULL : &layout->units[unit];
}

const nd_param *nd_layout_param(const nd_layout *layout, nd_param_id id, int64_t layer)
{
    id = layout->tied && id == ND_PARAM_HEAD ? ND_PARAM_EMBED : id;
    bool in_head = layout->tied && id == ND_PARAM_EMBED;
    const nd_unit *unit = nd_layout_unit(layout, in_head ? ND_UNIT_HEAD : table[id].unit, layer);
    for (int i = 0; unit && i < unit->param_count; i++) {
        if (layout->params[unit->first_param + i].id == id) {
            return &layout->params[unit->first_param + i];
        }
    }
    return NULL;
}

nd_tensor nd_layout_view(const nd_layout *layout, nd_param_id first, nd_param_id last,
                         int64_t layer, void *base, nd_dtype dtype)
{
    const nd_param *p = nd_layout_param(layout, first, layer);
    int64_t rows = 0;
    for (nd_param_id id = first; id <= last; id++) {
        rows += nd_layout_param(layout, id, layer)->local_rows;
    }
    char *data = (char *)base + (size_t)p->offset * nd_dtype_size(dtype);
    return p->axes == 1 ? nd_tensor_1d(data, dtype, rows)
                        : nd_tensor_2d(data, dtype, rows, p->local_cols);
}

nd_status nd_span_each_part(const nd_span *whole, int64_t begin, int64_t end, nd_span_visit *visit,
                            void *context)
{
    const int64_t cols = whole->cols;
    begin = nd_max(begin - whole->begin, 0);
    end = nd_min(end - whole->begin, whole->rows * cols);
    while (begin < end) {
        int64_t row = begin / cols, col = begin % cols;
        bool whole_rows = col == 0 && end - begin >= cols;
        int64_t left = nd_min(end - begin, cols - col);
        nd_span span = {
            .param = whole->param,
            .row = whole->row + row,
            .col = whole->col + col,
            .rows = whole_rows ? (end - begin) / cols : 1,
            .cols = whole_rows ? cols : left,
            .begin = whole->begin + begin,
        };
        ND_TRY(visit(context, &span));
        begin += span.rows * span.cols;
    }
    return ND_OK;
}

nd_status nd_layout_each_span(const nd_layout *layout, const nd_unit *unit, int shard,
                              nd_span_visit *visit, void *context)
{
    for (int i = unit->first_param; i < unit->first_param + unit->param_count; i++) {
        const nd_param *p = &layout->params[i];
        const nd_segment *segment = &unit->segments[p->segment];
        const nd_span block = {.param = p,
                               .row = p->row_begin,
                               .col = p->col_begin,
                               /* the last tp ranks may hold padding */
                               .rows = nd_min(p->local_rows, p->rows - p->row_begin),
                               .cols = p->local_cols,
                               .begin = segment->shard_offset + p->offset -
                                        segment->shard_count * shard};
        ND_TRY(nd_span_each_part(&block, segment->shard_offset,
                                 segment->shard_offset + segment->shard_count, visit, context));
    }
    return ND_OK;
}

nd_flat_range nd_layout_shard_range(const nd_layout *layout, const nd_param *p)
{
    const nd_segment *segment = &p->unit->segments[p->segment];
    int64_t begin = p->offset - segment->shard_count * layout->shard_index;
    int64_t end = begin + p->local_rows * p->local_cols;
    begin = nd_max(begin, 0);
    end = nd_min(end, segment->shard_count);
    if (begin >= end) {
        return (nd_flat_range){0};
    }
    return (nd_flat_range){segment->shard_offset + begin, segment->shard_offset + end, p->decay};
}

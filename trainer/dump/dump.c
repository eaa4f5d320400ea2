// SPDX-License-Identifier: Apache-2.0
/* The tensors that a dump may hold, and the file of a step of one rank. */
#include "trainer/dump/dump.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/suggest.h"
#include "trainer/context/deal.h"
#include "trainer/weights/safetensors.h"

/* The tensors that there are, and those of them that log.dump_tensors names. */

enum { NAME_MAX_BYTES = 160 };

/* A row of points.def. */
typedef struct dump_row {
    const char *name;
    nd_unit_kind unit; /* BLOCK or HEAD */
    bool gradient;
    enum { ROWS_LOCAL, ROWS_ALL } rows;
    enum { COLUMNS_HIDDEN, COLUMNS_OUT, COLUMNS_IN } columns;
    nd_param_id param;
    enum { WHEN_ALWAYS, WHEN_PRE_NORM, WHEN_POST_NORM, WHEN_ONE_COPY } when;
} dump_row;

static const dump_row dump_rows[ND_DUMP_POINTS] = {
#define ND_POINT(id, unit, name, gradient, rows, columns, param, when)                             \
    {name, ND_UNIT_##unit, gradient, ROWS_##rows, COLUMNS_##columns, ND_PARAM_##param, WHEN_##when},
#include "trainer/dump/points.def"
#undef ND_POINT
};

/* A tensor that can be dumped: of a micro-batch (row), or of the state (param). */
typedef struct subject {
    char name[NAME_MAX_BYTES];
    int64_t order; /* of the computation, the same on every rank and mesh */
    const dump_row *row;
    int64_t layer;
    int micro;
    const nd_param *param; /* NULL: of a micro-batch */
    bool gradient;         /* of param */
} subject;

typedef struct all_subjects {
    const nd_layout *layout;
    const nd_shape *shape;
    int64_t tp;
    int micros;
    nd_status (*visit)(void *context, const subject *subject);
    void *context;
} all_subjects;

/* The next name or pattern of a list, without spaces before it; false: there is none. */
static bool next_word(const char **list, char word[NAME_MAX_BYTES])
{
    const char *begin = *list + strspn(*list, " ,");
    const size_t n = strcspn(begin, ",");
    snprintf(word, NAME_MAX_BYTES, "%.*s", (int)n, begin);
    *list = begin + n;
    return n > 0;
}

/* The points of one unit in one pass. */
static nd_status each_point(const all_subjects *all, subject of, nd_unit_kind unit, bool gradient,
                            int64_t *order)
{
    const bool when[] = {[WHEN_ALWAYS] = true,
                         [WHEN_PRE_NORM] = all->shape->post_norm != 1,
                         [WHEN_POST_NORM] = all->shape->post_norm == 1,
                         [WHEN_ONE_COPY] = nd_shape_kv_copies(all->shape, all->tp) == 1};
    for (int p = 0; p < ND_DUMP_POINTS; p++) {
        const dump_row *row = &dump_rows[p];
        if (row->unit != unit || row->gradient != gradient) {
            continue;
        }
        of.order = (*order)++;
        if (!when[row->when]) {
            continue;
        }
        char block[40] = "";
        if (unit == ND_UNIT_BLOCK) {
            snprintf(block, sizeof block, "model.layers.%lld.", (long long)of.layer);
        }
        snprintf(of.name, sizeof of.name, "%s%s", block, row->name);
        of.row = row;
        ND_TRY(all->visit(all->context, &of));
    }
    return ND_OK;
}

static nd_status each_param(const all_subjects *all, bool gradient, int64_t *order)
{
    const nd_layout *layout = all->layout;
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[gradient ? layout->param_count - 1 - i : i];
        subject of = {.param = p, .gradient = gradient, .order = (*order)++};
        snprintf(of.name, sizeof of.name, "%s%s", p->name, gradient ? ".grad" : "");
        ND_TRY(all->visit(all->context, &of));
    }
    return ND_OK;
}

/* Visits every tensor in the order of the computation. */
static nd_status each_subject(const all_subjects *all)
{
    const int64_t layers = all->layout->layers;
    int64_t order = 0;
    ND_TRY(each_param(all, false, &order));
    for (int micro = 0; micro < all->micros; micro++) {
        subject of = {.micro = micro, .layer = -1};
        for (int64_t l = 0; l < layers; l++) {
            of.layer = l;
            ND_TRY(each_point(all, of, ND_UNIT_BLOCK, false, &order));
        }
        of.layer = -1;
        ND_TRY(each_point(all, of, ND_UNIT_HEAD, false, &order));
        ND_TRY(each_point(all, of, ND_UNIT_HEAD, true, &order));
        for (int64_t l = layers; l-- > 0;) {
            of.layer = l;
            ND_TRY(each_point(all, of, ND_UNIT_BLOCK, true, &order));
        }
    }
    return each_param(all, true, &order);
}

/* A word of the list, looked for among the names. */
typedef struct search {
    char word[NAME_MAX_BYTES];
    bool found;
    nd_suggest suggest;
    char near[NAME_MAX_BYTES];
    char known[1500]; /* those of layer 0, with N in its place */
} search;

static nd_status look(void *context, const subject *of)
{
    search *s = context;
    const int before = s->suggest.distance;
    s->found |= fnmatch(s->word, of->name, 0) == 0;
    nd_suggest_offer(&s->suggest, of->name);
    if (s->suggest.distance < before) {
        snprintf(s->near, sizeof s->near, "%s", of->name);
    }
    const char *last = strrchr(s->known, ' '), *in_layer = strstr(of->name, ".layers.0.");
    const size_t length = strlen(s->known);
    if ((in_layer || !strstr(of->name, ".layers.")) && !(of->param && of->gradient)) {
        snprintf(s->known + length, sizeof s->known - length, "%s%s%s", last || length ? ", " : "",
                 in_layer ? "N." : "", in_layer ? in_layer + sizeof ".layers.0." - 1 : of->name);
    }
    return ND_OK;
}

static nd_status check_word(all_subjects *all, search *s)
{
    nd_suggest_init(&s->suggest, s->word);
    all->context = s;
    ND_TRY(each_subject(all));
    return s->found
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "log.dump_tensors has \"%s\", which is no tensor of this "
                         "model%s%s%s; there are, with N. for model.layers.NUMBER. and also .grad "
                         "of each weight: %s",
                         s->word, s->near[0] ? "; did you mean \"" : "", s->near,
                         s->near[0] ? "\"?" : "", s->known);
}

nd_status nd_dump_check(const nd_config *config, const nd_shape *shape)
{
    const char *list = config->log.dump_tensors;
    nd_layout *layout = NULL;
    nd_status status = ND_OK;
    if (!*list) {
        return ND_OK;
    }
    ND_TRY(nd_layout_create(&(nd_layout_options){.shape = shape}, &layout));
    all_subjects all = {.layout = layout,
                        .shape = shape,
                        .tp = config->resolved_mesh.size[ND_AXIS_TP],
                        .micros = 1,
                        .visit = look};
    search s = {.found = false};
    while (status == ND_OK && next_word(&list, s.word)) {
        status = check_word(&all, &s);
        s = (search){.found = false};
    }
    nd_layout_destroy(layout);
    return status;
}

/* The file of a step. */

enum { BOUNCE_BYTES = 8 << 20 };

typedef struct range {
    int64_t begin, end;
} range;

/* A tensor of the files of this rank. */
typedef struct entry {
    subject of;
    int64_t rows, cols; /* of this rank's part, as the file has it */
    int64_t whole_rows; /* of the whole tensor, as are whole_cols */
    int64_t whole_cols;
    range row_range, col_range; /* of a micro-batch: local rows; else those of the rank's block */
    range elements;             /* of that block; end 0: all */
    nd_dtype dtype;
    int64_t written; /* elements, in this step */
    int64_t at;      /* its first byte in the file of this step */
} entry;

struct nd_dump {
    nd_rank *rank; /* borrowed, as is layout */
    const nd_layout *layout;
    nd_dims dims;
    char *folder;
    int64_t first, last; /* steps */
    int micros;
    entry *entries; /* [count]; owned, as are the arrays below */
    int64_t count;
    int64_t *numbers;  /* (micros, layers + 1, points): the entry; -1: none */
    int32_t *places;   /* (micros, B, s): in the text, of this rank's tokens */
    char *bounce;      /* BOUNCE_BYTES */
    nd_fs_draft draft; /* the file of the step */
};

static int64_t *number_at(const nd_dump *d, int micro, int64_t layer, nd_dump_point point)
{
    return &d->numbers[((int64_t)micro * (d->layout->layers + 1) + layer + 1) * ND_DUMP_POINTS +
                       point];
}

/* Sets the part of a micro-batch's tensor that this rank has; false: another rank has the same. */
static bool place_activation(const nd_dump *d, entry *e)
{
    const nd_dims *m = &d->dims;
    const dump_row *row = e->of.row;
    const nd_param *p = nd_layout_param(d->layout, row->param, e->of.layer);
    const int64_t first = row->rows == ROWS_ALL ? 0 : d->rank->coord.at[ND_AXIS_TP] * m->Tl;
    e->dtype = m->act;
    e->rows = row->rows == ROWS_ALL ? m->T : m->Tl;
    e->row_range = (range){first, first + e->rows};
    e->whole_rows = nd_mesh_group_size(&d->rank->mesh, ND_GROUP_DP) * m->B * m->S;
    e->whole_cols = m->C;
    e->col_range = (range){0, m->C};
    if (row->columns == COLUMNS_OUT) {
        e->whole_cols = p->rows;
        e->col_range = (range){p->row_begin, nd_min(p->row_begin + p->local_rows, p->rows)};
    } else if (row->columns == COLUMNS_IN) {
        e->whole_cols = p->cols;
        e->col_range = (range){p->col_begin, p->col_begin + p->local_cols};
    }
    e->cols = e->col_range.end - e->col_range.begin;
    return row->columns == COLUMNS_HIDDEN || p->owned;
}

/* Sets the part of a weight that this rank has: its whole block, or a row of its elements. */
static bool place_state(const nd_dump *d, entry *e)
{
    const nd_layout *layout = d->layout;
    const nd_param *p = e->of.param;
    const nd_segment *segment = &p->unit->segments[p->segment];
    const nd_flat_range shard = nd_layout_shard_range(layout, p);
    const int64_t rows = nd_min(p->local_rows, p->rows - p->row_begin); /* without padding */
    const int64_t begin = layout->shard_index * segment->shard_count + shard.begin -
                          segment->shard_offset - p->offset;
    e->dtype = ND_DTYPE_F32;
    e->whole_rows = p->rows;
    e->whole_cols = p->cols;
    e->row_range = (range){p->row_begin, p->row_begin + rows};
    e->col_range = (range){p->col_begin, p->col_begin + p->local_cols};
    e->rows = rows;
    e->cols = p->local_cols;
    if (layout->shards > 1) {
        e->elements = (range){begin, nd_min(begin + shard.end - shard.begin, rows * p->local_cols)};
        e->rows = e->elements.end - e->elements.begin;
        e->cols = 1;
    }
    return p->owned && d->rank->coord.at[ND_AXIS_DP_REPLICATE] == 0;
}

static nd_status add_entry(void *context, const subject *of)
{
    nd_dump *d = context;
    entry *e = &d->entries[d->count];
    const char *list = d->rank->config->log.dump_tensors;
    char pattern[NAME_MAX_BYTES];
    bool named = false;
    *e = (entry){.of = *of};
    while (!named && next_word(&list, pattern)) {
        named = fnmatch(pattern, of->name, 0) == 0;
    }
    if (!named || !(of->param ? place_state(d, e) : place_activation(d, e)) || e->rows <= 0 ||
        e->cols <= 0) {
        return ND_OK;
    }
    if (!of->param) {
        *number_at(d, of->micro, of->layer, (nd_dump_point)(of->row - dump_rows)) = d->count;
    }
    d->count++;
    return ND_OK;
}

nd_status nd_dump_create(nd_rank *rank, const nd_layout *layout, const nd_dims *dims,
                         const char *folder, nd_dump **out)
{
    const int micros = (int)rank->config->train.gradient_accumulation_steps;
    const int64_t most = micros * (layout->layers + 1) * ND_DUMP_POINTS;
    nd_dump *d = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &d));
    *d = (nd_dump){.rank = rank, .layout = layout, .dims = *dims, .micros = micros};
    (void)nd_config_steps(rank->config->log.dump_steps, &d->first, &d->last);
    ND_TRY_OUT(nd_fs_format(&d->folder, "%s", folder));
    ND_TRY_OUT(ND_ALLOC(most, &d->numbers));
    ND_TRY_OUT(ND_ALLOC(most + 2 * layout->param_count, &d->entries));
    ND_TRY_OUT(ND_ALLOC(micros * dims->T, &d->places));
    ND_TRY_OUT(ND_ALLOC(BOUNCE_BYTES, &d->bounce));
    memset(d->numbers, -1, (size_t)most * sizeof *d->numbers);
    const all_subjects all = {.layout = layout,
                              .shape = &rank->shape,
                              .tp = rank->mesh.size[ND_AXIS_TP],
                              .micros = micros,
                              .visit = add_entry,
                              .context = d};
    ND_TRY_OUT(each_subject(&all));
    *out = d;
out:
    if (status != ND_OK) {
        nd_dump_destroy(d);
    }
    return status;
}

void nd_dump_destroy(nd_dump *d)
{
    if (d) {
        (void)nd_fs_draft_close(&d->draft, ND_ERR_INTERNAL); /* a step that did not end */
        free(d->folder);
        free(d->entries);
        free(d->numbers);
        free(d->places);
        free(d->bounce);
        free(d);
    }
}

bool nd_dump_wants(const nd_dump *d, int64_t step)
{
    return d && step >= d->first && step <= d->last;
}

/* places: as the loader has dealt the tokens; NULL: in zig-zag. */
static nd_status find_places(nd_dump *d, const int32_t *places)
{
    const nd_dims *m = &d->dims;
    const nd_deal_of deal = nd_deal_of_mesh(&d->rank->shape, &d->rank->mesh, m->S);
    int32_t *row = NULL;
    char *scratch = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(ND_ALLOC(m->S, &row));
    ND_TRY_OUT(ND_ALLOC(nd_deal_bytes(&deal), &scratch));
    (void)nd_deal(&deal, NULL, scratch, row);
    for (int64_t i = 0; i < d->micros * m->B; i++) {
        nd_deal_local(&deal, places ? places + i * m->S : row, d->rank->coord.at[ND_AXIS_CP],
                      d->places + i * m->s);
    }
out:
    free(row);
    free(scratch);
    return status;
}

/* The ranges of whole rows of local rows of a micro-batch: sample, then place in the text. */
static json_t *rows_of(const nd_dump *d, const entry *e)
{
    const nd_dims *m = &d->dims;
    const int64_t dp = nd_mesh_group_index(&d->rank->mesh, ND_GROUP_DP, d->rank->rank);
    json_t *ranges = json_array();
    json_int_t begin = 0, end = 0;
    for (int64_t t = e->row_range.begin; t < e->row_range.end; t++) {
        const int64_t row =
            (dp * m->B + t / m->s) * m->S + d->places[(int64_t)e->of.micro * m->T + t];
        if (row != end && end > begin) {
            nd_json_append(&ranges, json_pack("[I, I]", begin, end));
        }
        begin = row != end ? row : begin;
        end = row + 1;
    }
    nd_json_append(&ranges, json_pack("[I, I]", begin, end));
    return ranges;
}

/* The tensor's place in the whole, as JSON. */
static nd_status describe(const nd_dump *d, const entry *e, char **out)
{
    const range *rows = &e->row_range, *columns = &e->col_range, *elements = &e->elements;
    json_t *note = json_pack(
        "{s:I, s:[I, I], s:o, s:[I, I]}", "order", (json_int_t)e->of.order, "shape",
        (json_int_t)e->whole_rows, (json_int_t)e->whole_cols, "rows",
        e->of.param ? json_pack("[[I, I]]", (json_int_t)rows->begin, (json_int_t)rows->end)
                    : rows_of(d, e),
        "columns", (json_int_t)columns->begin, (json_int_t)columns->end);
    if (elements->end > 0) {
        nd_json_set(&note, "elements",
                    json_pack("[I, I]", (json_int_t)elements->begin, (json_int_t)elements->end));
    }
    *out = nd_json_text(note, 0);
    json_decref(note);
    return *out ? ND_OK : nd_fail_memory("a dump's header");
}

/* The header, and where each tensor's data begin. */
static nd_status lay_out(nd_dump *d, nd_safetensors_list *list, char **head, size_t *bytes)
{
    ND_TRY(ND_ALLOC(d->count, &list->tensors));
    for (; list->count < d->count; list->count++) {
        entry *e = &d->entries[list->count];
        nd_safetensors_tensor *t = &list->tensors[list->count];
        *t = (nd_safetensors_tensor){
            .number = list->count,
            .dtype = e->dtype == ND_DTYPE_F32 ? ND_SAFETENSORS_F32 : ND_SAFETENSORS_BF16,
            .axes = e->of.param && (e->of.param->axes == 1 || e->elements.end > 0) ? 1 : 2,
            .shape = {e->rows, e->cols}};
        ND_TRY(describe(d, e, &t->note));
        ND_TRY(e->of.param ? nd_fs_format(&t->name, "%s", e->of.name)
                           : nd_fs_format(&t->name, "micro-%d/%s", e->of.micro, e->of.name));
        e->written = 0;
    }
    ND_TRY(nd_safetensors_layout(list->tensors, list->count, head, bytes));
    if (*bytes > ND_SAFETENSORS_HEADER_MAX) {
        return nd_fail(ND_ERR_CONFIG,
                       "a dump of %lld tensors has a header of %zu bytes, and readers take at most "
                       "%d; name fewer tensors in log.dump_tensors (--dump-tensors)",
                       (long long)list->count, *bytes, ND_SAFETENSORS_HEADER_MAX);
    }
    for (int64_t i = 0; i < list->count; i++) {
        d->entries[list->tensors[i].number].at = (int64_t)list->tensors[i].begin;
    }
    return ND_OK;
}

nd_status nd_dump_begin(nd_dump *d, int64_t step, const int32_t *places)
{
    nd_safetensors_list list = {0};
    char folder[PATH_MAX], path[PATH_MAX], *head = NULL;
    size_t bytes = 0;
    nd_status status = ND_OK;
    d->first = step + 1; /* a step that is computed again after a rewind is not dumped again */
    if (d->count == 0) {
        return ND_OK; /* other ranks have all of it */
    }
    ND_TRY_OUT(find_places(d, places));
    ND_TRY_OUT(lay_out(d, &list, &head, &bytes));
    ND_TRY_OUT(nd_fs_check_space(d->folder, list.tensors[list.count - 1].end, "a dump of tensors"));
    ND_TRY_OUT(nd_fs_path(folder, "%s/step-%lld", d->folder, (long long)step));
    ND_TRY_OUT(nd_fs_make_own_folder(folder));
    ND_TRY_OUT(nd_fs_path(path, "%s/rank-%d.safetensors", folder, d->rank->rank));
    d->draft.is_new = true;
    ND_TRY_OUT(nd_fs_draft_open(&d->draft, path, 0666));
    ND_TRY_OUT(nd_fs_pwrite(fileno(d->draft.stream), path, head, bytes, 0));
out:
    free(head);
    nd_safetensors_list_fini(&list);
    return status;
}

/* Rows of x, from this row and column of the entry on. */
static nd_status write_rows(nd_dump *d, entry *e, int64_t row, int64_t column, nd_tensor x)
{
    nd_stream *stream = &d->rank->stream;
    const int fd = fileno(d->draft.stream);
    const int64_t cols = x.shape[1], size = (int64_t)nd_dtype_size(x.dtype);
    const int64_t line = cols * size, stride = x.stride[0] * size;
    const int64_t most = (BOUNCE_BYTES - line) / stride + 1;
    ND_ASSERT(x.dtype == e->dtype && line <= BOUNCE_BYTES && column + cols <= e->cols &&
              row + x.shape[0] <= e->rows);
    for (int64_t begin = 0; begin < x.shape[0]; begin += most) {
        const int64_t count = nd_min(most, x.shape[0] - begin);
        const int64_t at = e->at + ((row + begin) * e->cols + column) * size;
        ND_TRY(nd_copy(stream, d->bounce, (char *)x.data + begin * stride,
                       (size_t)((count - 1) * stride + line)));
        ND_TRY(nd_stream_sync(stream));
        if (cols == e->cols) {
            for (int64_t i = 1; stride != line && i < count; i++) {
                memmove(d->bounce + i * line, d->bounce + i * stride, (size_t)line);
            }
            ND_TRY(nd_fs_pwrite(fd, d->draft.path, d->bounce, (size_t)(count * line), at));
            continue;
        }
        for (int64_t i = 0; i < count; i++) {
            ND_TRY(nd_fs_pwrite(fd, d->draft.path, d->bounce + i * stride, (size_t)line,
                                at + i * e->cols * size));
        }
    }
    e->written += x.shape[0] * cols;
    return ND_OK;
}

nd_status nd_dump_show(nd_dump *d, const nd_dump_place *at, nd_tensor x)
{
    int64_t column = 0;
    for (nd_dump_point p = at->point; p < at->point + (nd_dump_point)at->points; p++) {
        const int64_t number = *number_at(d, at->micro, at->layer, p);
        const nd_param *param = nd_layout_param(d->layout, dump_rows[p].param, at->layer);
        const int64_t width = at->points == 1 ? x.shape[1] : param->local_rows;
        if (number >= 0 && dump_rows[p].gradient == at->backward) {
            entry *e = &d->entries[number];
            const int64_t cols = nd_min(width, e->cols - at->column); /* without padding */
            const nd_tensor part = nd_tensor_columns(x, column, nd_max(cols, 0));
            ND_TRY(cols > 0 ? write_rows(d, e, at->row, at->column, part) : ND_OK);
        }
        column += width;
    }
    return ND_OK;
}

nd_status nd_dump_show_state(nd_dump *d, bool gradients, float *state)
{
    for (int64_t i = 0; i < d->count; i++) {
        entry *e = &d->entries[i];
        if (e->of.param && e->of.gradient == gradients) {
            float *data = state + nd_layout_shard_range(d->layout, e->of.param).begin;
            ND_TRY(write_rows(d, e, 0, 0, nd_tensor_2d(data, ND_DTYPE_F32, e->rows, e->cols)));
        }
    }
    return ND_OK;
}

nd_status nd_dump_end(nd_dump *d)
{
    for (int64_t i = 0; d->draft.stream && i < d->count; i++) {
        const entry *e = &d->entries[i];
        if (e->written != e->rows * e->cols) {
            return nd_fail(ND_ERR_INTERNAL, "%lld of %lld elements of %s were shown to the dump",
                           (long long)e->written, (long long)(e->rows * e->cols), e->of.name);
        }
    }
    return nd_fs_draft_close(&d->draft, ND_OK);
}

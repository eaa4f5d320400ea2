// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/export.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"
#include "trainer/dump/dump.h"

enum { BATCH_ELEMENTS = 8 << 20, BATCH_PARTS = 1024 };

typedef struct batch {
    const nd_tensors_walk *walk;
    float *buffers[ND_TENSOR_SOURCES_MAX]; /* (elements) each */
    int64_t elements, used;
    nd_tensor_part parts[BATCH_PARTS];
    int part_count;
} batch;

/* Reads what was added, and visits it. */
static nd_status flush(batch *b)
{
    const nd_tensors_walk *walk = b->walk;
    for (int s = 0; s < walk->source_count; s++) {
        ND_TRY(walk->sources[s] ? nd_source_run(walk->sources[s]) : ND_OK);
    }
    for (int i = 0; i < b->part_count; i++) {
        ND_TRY(walk->visit(walk->context, &b->parts[i]));
    }
    b->part_count = 0;
    b->used = 0;
    return ND_OK;
}

/* Elements [begin, begin + count) of a parameter, which may lie in parts of another tensor. */
static nd_status read_model(const nd_hf_reader *model, const nd_param *p, int64_t begin,
                            int64_t count, float *to)
{
    int64_t n = 0;
    for (int64_t done = 0; done < count; done += n) {
        const int64_t at = begin + done;
        n = nd_min(count - done, nd_param_adjacent(p, at));
        ND_TRY(nd_hf_reader_read(model, p->file_name, nd_param_in_file(p, at), n, to + done));
    }
    return ND_OK;
}

static nd_status add_rows(batch *b, const nd_param *param, nd_state_kind array, int64_t row,
                          int64_t rows)
{
    const nd_span span = {.param = param, .row = row, .rows = rows, .cols = param->cols};
    int64_t count = rows * param->cols;
    if (b->part_count == BATCH_PARTS || b->used + count > b->elements) {
        ND_TRY(flush(b));
    }
    nd_tensor_part *part = &b->parts[b->part_count++];
    *part = (nd_tensor_part){
        .param = param, .array = array, .begin = row * param->cols, .count = count};
    for (int s = 0; s < b->walk->source_count; s++) {
        float *to = b->buffers[s] + b->used;
        part->values[s] = to;
        ND_TRY(b->walk->sources[s] ? nd_source_add(b->walk->sources[s], &span, array, to)
                                   : read_model(b->walk->models[s], param, part->begin, count, to));
    }
    b->used += count;
    return ND_OK;
}

/* No more than the model needs, and at least a row. */
static nd_status make_buffers(batch *b)
{
    const nd_layout *layout = b->walk->layout;
    int64_t most = b->walk->batch_elements > 0 ? b->walk->batch_elements : BATCH_ELEMENTS;
    int64_t all = 0, row = 0;
    for (int i = 0; i < layout->param_count; i++) {
        all += layout->params[i].rows * layout->params[i].cols * b->walk->arrays;
        row = nd_max(row, layout->params[i].cols);
    }
    b->elements = nd_max(nd_min(all, most), row);
    for (int s = 0; s < b->walk->source_count; s++) {
        ND_TRY(ND_ALLOC(b->elements, &b->buffers[s]));
    }
    return ND_OK;
}

static nd_status walk_all(batch *b)
{
    const nd_layout *layout = b->walk->layout;
    ND_TRY(make_buffers(b));
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[i];
        for (int a = 0; a < b->walk->arrays; a++) {
            for (int64_t row = 0, most = nd_max(b->elements / p->cols, 1); row < p->rows;
                 row += most) {
                ND_TRY(add_rows(b, p, (nd_state_kind)a, row, nd_min(most, p->rows - row)));
            }
        }
    }
    return flush(b);
}

nd_status nd_tensors_each(const nd_tensors_walk *walk)
{
    batch *b = NULL;
    ND_TRY(ND_ALLOC(1, &b));
    b->walk = walk;
    nd_status status = walk_all(b);
    for (int s = 0; s < walk->source_count; s++) {
        free(b->buffers[s]);
    }
    free(b);
    return status;
}

/* Export. */

static nd_status write_part(void *context, const nd_tensor_part *part)
{
    const nd_param *p = part->param;
    int64_t n = 0;
    for (int64_t done = 0; done < part->count; done += n) {
        const int64_t at = part->begin + done;
        n = nd_min(part->count - done, nd_param_adjacent(p, at));
        ND_TRY(nd_hf_writer_write(context, p->file_name, nd_param_in_file(p, at), n,
                                  part->values[0] + done));
    }
    return ND_OK;
}

static nd_status open_folder(const char *folder, const nd_manifest *manifest,
                             const nd_export_options *options, nd_hf_writer **out)
{
    const char *said =
        options->model ? NULL : nd_manifest_find(manifest->config, "data.chat_format");
    const nd_chat_choice chat = !said                         ? ND_CHOOSE_CHAT_NONE
                                : strcmp(said, "llama3") == 0 ? ND_CHOOSE_CHAT_LLAMA3
                                : strcmp(said, "chatml") == 0 ? ND_CHOOSE_CHAT_CHATML
                                : strcmp(said, "model") == 0  ? ND_CHOOSE_CHAT_MODEL
                                                              : ND_CHOOSE_CHAT_NONE;
    const nd_hf_writer_options writer = {
        .shape = options->model ? *nd_hf_reader_shape(options->model) : manifest->shape,
        .dtype = options->dtype,
        .byte_tokenizer = options->byte_tokenizer,
        .source = options->source,
        .tokenizer = options->tokenizer,
        .chat = chat,
        .takes_empty = true,
        .inside = !options->out};
    return nd_hf_writer_open(options->out ? options->out : folder, &writer, out);
}

static nd_status write_rows(void *context, const nd_tensor_part *part)
{
    return nd_gguf_write_rows(context, part->param->name, part->begin, part->count,
                              part->values[0]);
}

static nd_status fill_gguf(void *context, nd_gguf_writer *writer)
{
    nd_tensors_walk *walk = context;
    walk->visit = write_rows;
    walk->context = writer;
    return nd_tensors_each(walk);
}

nd_status nd_checkpoint_export(const char *folder, const nd_manifest *manifest,
                               const nd_export_options *options)
{
    nd_layout *layout = NULL;
    nd_source *source = NULL;
    nd_hf_writer *to = NULL;
    nd_status status = ND_OK;
    if (options->model) {
        const nd_layout_options of = {.shape = nd_hf_reader_shape(options->model)};
        ND_TRY_OUT(nd_layout_create(&of, &layout));
    } else {
        ND_TRY_OUT(
            nd_manifest_layout(&manifest->shape, manifest->layout, NULL, (nd_coord){{0}}, &layout));
        ND_TRY_OUT(nd_source_open(folder, manifest, options->verify, &source));
    }
    ND_TRY_OUT(options->gguf ? ND_OK : open_folder(folder, manifest, options, &to));
    nd_tensors_walk walk = {.layout = layout,
                            .arrays = 1,
                            .sources = {source},
                            .models = {options->model},
                            .source_count = 1,
                            .visit = write_part,
                            .context = to};
    ND_TRY_OUT(options->gguf ? nd_gguf_write(options->out, options->gguf, fill_gguf, &walk)
                             : nd_tensors_each(&walk));
    status = to ? nd_hf_writer_commit(to) : ND_OK;
    to = NULL;
out:
    nd_hf_writer_abort(to);
    nd_source_close(source);
    nd_layout_destroy(layout);
    return status;
}

/* Comparison. */

typedef struct comparison {
    const nd_diff_side *sides;
    const nd_diff_options *options;
    nd_source *sources[2];
    nd_hf_reader *models[2];
    nd_layout *layouts[2];
    nd_diff_array array;        /* so far */
    double squares, difference; /* sums of squares of its elements of A, and of A - B */
    nd_status (*visit)(void *context, const nd_diff_array *array);
    void *context;
    nd_diff_totals *totals;
} comparison;

static void compare_values(comparison *c, const float *a, const float *b, int64_t count)
{
    nd_diff_array *array = &c->array;
    array->count += count;
    for (int64_t i = 0; i < count; i++) {
        const float x = c->options->bf16 ? nd_bf16_to_f32(nd_bf16_from_f32(a[i])) : a[i];
        const float y = c->options->bf16 ? nd_bf16_to_f32(nd_bf16_from_f32(b[i])) : b[i];
        c->squares += (double)x * x;
        if (memcmp(&x, &y, sizeof x) == 0) {
            continue;
        }
        double distance = fabs((double)x - (double)y);
        array->differing++;
        c->difference += distance * distance;
        if (!(distance <= array->largest)) { /* larger, or NaN */
            array->largest = isnan(array->largest) ? array->largest : distance;
        }
    }
}

static nd_status end_array(comparison *c)
{
    nd_diff_array *array = &c->array;
    array->relative = c->difference == 0 ? 0.0 : sqrt(c->difference / c->squares);
    array->differing = array->relative <= c->options->tolerance && c->options->tolerance > 0
                           ? 0
                           : array->differing;
    c->squares = c->difference = 0;
    c->totals->arrays++;
    c->totals->differing_arrays += array->differing > 0 || array->presence != ND_DIFF_BOTH;
    c->totals->elements += array->count;
    c->totals->differing += array->differing;
    return c->visit(c->context, array);
}

static nd_status compare_part(void *context, const nd_tensor_part *part)
{
    comparison *c = context;
    char name[ND_STATE_NAME_MAX];
    if (part->begin == 0) {
        c->array = (nd_diff_array){0};
    }
    compare_values(c, part->values[0], part->values[1], part->count);
    if (part->begin + part->count < part->param->rows * part->param->cols) {
        return ND_OK;
    }
    c->array.name = nd_state_name(name, part->array, part->param->name);
    return end_array(c);
}

/* Both models must have the same tensors. */
static nd_status check_tensors(const comparison *c)
{
    const nd_layout *a = c->layouts[0], *b = c->layouts[1];
    for (int i = 0; i < nd_min(a->param_count, b->param_count); i++) {
        const nd_param *p = &a->params[i], *q = &b->params[i];
        if (strcmp(p->name, q->name) != 0 || p->rows != q->rows || p->cols != q->cols) {
            return nd_fail(ND_ERR_DATA,
                           "the models differ: \"%s\" has %s, %lld x %lld; \"%s\" has %s, %lld x "
                           "%lld",
                           c->sides[0].folder, p->name, (long long)p->rows, (long long)p->cols,
                           c->sides[1].folder, q->name, (long long)q->rows, (long long)q->cols);
        }
    }
    return a->param_count == b->param_count
               ? ND_OK
               : nd_fail(ND_ERR_DATA, "the models differ: \"%s\" has %d tensors, \"%s\" has %d",
                         c->sides[0].folder, a->param_count, c->sides[1].folder, b->param_count);
}

static int arrays_of(const nd_diff_side *side)
{
    return side->manifest ? side->manifest->arrays : 1;
}

/* Returns which sides have an array of side `s`. other: both do; sized: in the same size. */
static nd_diff_presence presence_of(int s, bool other, bool sized)
{
    return sized ? ND_DIFF_BOTH : other ? ND_DIFF_SIZES : s == 0 ? ND_DIFF_ONLY_A : ND_DIFF_ONLY_B;
}

static nd_status compare_extra_values(comparison *c, const nd_state_extra *extra)
{
    float *values[2] = {0};
    nd_status status = ND_OK;
    for (int s = 0; s < 2; s++) {
        ND_TRY_OUT(ND_ALLOC(extra->count, &values[s]));
        ND_TRY_OUT(nd_source_add_extra(c->sources[s], extra->name, extra->count, values[s]));
        ND_TRY_OUT(nd_source_run(c->sources[s]));
    }
    compare_values(c, values[0], values[1], extra->count);
out:
    free(values[0]);
    free(values[1]);
    return status;
}

/* Visits the arrays of A, then those that only B has. */
static nd_status compare_extras(comparison *c)
{
    for (int s = 0; s < 2; s++) {
        const nd_manifest *own = c->sides[s].manifest, *others = c->sides[!s].manifest;
        for (int i = 0; i < own->extra_count; i++) {
            const nd_state_extra *extra = &own->extras[i];
            const nd_state_extra *other = NULL;
            for (int k = 0; k < others->extra_count && !other; k++) {
                other =
                    strcmp(others->extras[k].name, extra->name) == 0 ? &others->extras[k] : NULL;
            }
            if (s == 1 && other) {
                continue;
            }
            const bool sized = other && other->count == extra->count;
            c->array =
                (nd_diff_array){.name = extra->name, .presence = presence_of(s, other, sized)};
            ND_TRY(sized ? compare_extra_values(c, extra) : ND_OK);
            ND_TRY(end_array(c));
        }
    }
    return ND_OK;
}

static nd_status compare(comparison *c)
{
    const bool both = c->sides[0].manifest && c->sides[1].manifest;
    const int a = arrays_of(&c->sides[0]), b = arrays_of(&c->sides[1]);
    for (int s = 0; s < 2; s++) {
        const nd_diff_side *side = &c->sides[s];
        ND_TRY(nd_layout_create(&(nd_layout_options){.shape = &side->shape}, &c->layouts[s]));
        ND_TRY(side->manifest ? nd_source_open(side->folder, side->manifest, c->options->verify,
                                               &c->sources[s])
                              : nd_hf_reader_open(side->folder, &c->models[s]));
        ND_TRY(side->manifest ? ND_OK : nd_hf_reader_check(c->models[s]));
    }
    ND_TRY(check_tensors(c));
    const nd_tensors_walk walk = {
        .layout = c->layouts[0],
        .arrays = (int)nd_min(a, b),
        .sources = {c->sources[0], c->sources[1]},
        .models = {c->models[0], c->models[1]},
        .source_count = 2,
        .visit = compare_part,
        .context = c,
    };
    ND_TRY(nd_tensors_each(&walk));
    /* Moments that one of them has. A Hugging Face folder has none. */
    for (int k = (int)nd_min(a, b); both && k < nd_max(a, b); k++) {
        c->array = (nd_diff_array){.name = nd_state_kind_names[k],
                                   .presence = presence_of(k >= a, false, false)};
        ND_TRY(end_array(c));
    }
    return both ? compare_extras(c) : ND_OK;
}

static nd_status compare_dumped(void *context, const nd_dump_pair *pair)
{
    comparison *c = context;
    const int side = pair->in[0] ? 0 : 1;
    c->array = (nd_diff_array){.name = pair->name,
                               .presence = presence_of(side, pair->in[!side], pair->alike)};
    compare_values(c, pair->values[0], pair->values[1], pair->count);
    return end_array(c);
}

nd_status nd_checkpoint_diff(const nd_diff_side sides[2], const nd_diff_options *options,
                             nd_status (*visit)(void *context, const nd_diff_array *array),
                             void *context, nd_diff_totals *totals)
{
    comparison c = {
        .sides = sides, .options = options, .visit = visit, .context = context, .totals = totals};
    const char *const folders[] = {sides[0].folder, sides[1].folder};
    *totals = (nd_diff_totals){0};
    nd_status status =
        sides[0].is_dump ? nd_dump_each_pair(folders, compare_dumped, &c) : compare(&c);
    for (int s = 0; s < 2; s++) {
        nd_source_close(c.sources[s]);
        nd_hf_reader_close(c.models[s]);
        nd_layout_destroy(c.layouts[s]);
    }
    return status;
}

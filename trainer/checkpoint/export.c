// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/export.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"

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
        options->model ? NULL : nd_manifest_pairs_find(&manifest->config, "data.chat_format");
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
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    nd_layout *layout = NULL;
    nd_source *source = NULL;
    nd_hf_writer *to = NULL;
    nd_status status = ND_OK;
    if (options->model) {
        const nd_layout_options of = {.shape = nd_hf_reader_shape(options->model), .mesh = &one};
        ND_TRY_OUT(nd_layout_create(&of, &layout));
    } else {
        ND_TRY_OUT(nd_manifest_layout(manifest, &one, (nd_coord){{0}}, &layout));
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

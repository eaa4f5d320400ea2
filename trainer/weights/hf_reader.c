// SPDX-License-Identifier: Apache-2.0
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/text.h"
#include "trainer/layout/layout.h"
#include "trainer/weights/gguf.h"
#include "trainer/weights/safetensors.h"
#include "trainer/weights/weights.h"

enum { INDEX_BYTES_MAX = 64 << 20 };

typedef struct weight_file {
    char *name; /* in the folder */
    char *path;
    int fd;
    nd_safetensors_list list;
} weight_file;

/* A tensor and the file that holds it; sorted by name. */
typedef struct tensor_place {
    const nd_safetensors_tensor *tensor; /* borrowed from the file's list */
    const weight_file *file;
} tensor_place;

struct nd_hf_reader {
    char *path;   /* as it was named, for messages */
    char *folder; /* that has config.json */
    nd_shape shape;
    bool gguf;          /* the weights are in a file of this kind, else in the folder */
    weight_file *files; /* owned */
    int64_t file_count;
    tensor_place *places; /* owned */
    int64_t place_count;
};

static int by_name(const void *a, const void *b)
{
    return strcmp(((const tensor_place *)a)->tensor->name, ((const tensor_place *)b)->tensor->name);
}

/* NULL if the folder has no such tensor. */
static const tensor_place *find_place(const nd_hf_reader *reader, const char *name)
{
    nd_safetensors_tensor wanted = {.name = (char *)name};
    tensor_place key = {.tensor = &wanted};
    return bsearch(&key, reader->places, (size_t)reader->place_count, sizeof key, by_name);
}

static nd_status open_file(nd_hf_reader *reader, const char *name)
{
    weight_file *file = &reader->files[reader->file_count++];
    file->fd = -1;
    ND_TRY(nd_fs_format(&file->name, "%s", name));
    ND_TRY(nd_fs_format(&file->path, "%s/%s", reader->folder, name));
    ND_TRY(nd_fs_open(file->path, ND_ERR_DATA, &file->fd, NULL));
    return nd_safetensors_read_header(file->fd, file->path, &file->list);
}

/* Sorts all tensors of all files by name; a name in two files is an error. */
static nd_status collect_places(nd_hf_reader *reader)
{
    int64_t total = 0;
    for (int64_t f = 0; f < reader->file_count; f++) {
        total += reader->files[f].list.count;
    }
    ND_TRY(ND_ALLOC(total, &reader->places));
    for (int64_t f = 0; f < reader->file_count; f++) {
        const weight_file *file = &reader->files[f];
        for (int64_t t = 0; t < file->list.count; t++) {
            reader->places[reader->place_count++] = (tensor_place){&file->list.tensors[t], file};
        }
    }
    qsort(reader->places, (size_t)total, sizeof *reader->places, by_name);
    for (int64_t i = 1; i < total; i++) {
        const tensor_place *a = &reader->places[i - 1], *b = &reader->places[i];
        if (strcmp(a->tensor->name, b->tensor->name) == 0) {
            return nd_fail(ND_ERR_DATA,
                           "\"%s\": tensor \"%.200s\" is in two files, \"%s\" and \"%s\"",
                           reader->path, a->tensor->name, a->file->name, b->file->name);
        }
    }
    return ND_OK;
}

/* Sharded sets. */

static nd_status check_file_name(const char *index, const char *tensor, const json_t *value)
{
    const char *name = json_string_value(value);
    if (!name || !*name || strchr(name, '/') || strchr(name, '\\') || strstr(name, "..")) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\": the file of tensor \"%.200s\" is %s%.200s; it must be the name of a "
            "file in the same folder",
            index, tensor, name ? "" : "not a string", name ? name : "");
    }
    return ND_OK;
}

/* The map and the files name the same tensors, each in the file where the map says it is. */
static nd_status check_map(const nd_hf_reader *reader, const char *index, json_t *map)
{
    const char *tensor;
    json_t *value;
    json_object_foreach(map, tensor, value)
    {
        const tensor_place *found = find_place(reader, tensor);
        if (!found || strcmp(found->file->name, json_string_value(value)) != 0) {
            return nd_fail(
                ND_ERR_DATA,
                "\"%s\" places tensor \"%.200s\" in \"%.200s\", but it is %s%s: the files are "
                "not of one model",
                index, tensor, json_string_value(value), found ? "in " : "in none",
                found ? found->file->name : "");
        }
    }
    for (int64_t i = 0; i < reader->place_count; i++) {
        const tensor_place *p = &reader->places[i];
        if (!json_object_get(map, p->tensor->name)) {
            return nd_fail(
                ND_ERR_DATA,
                "tensor \"%.200s\" of \"%s\" is not in \"%s\": the files are not of one model",
                p->tensor->name, p->file->path, index);
        }
    }
    return ND_OK;
}

/* Only a warning, since some published models have the sum of file sizes here. */
static void check_total_size(const nd_hf_reader *reader, const char *index, json_t *root)
{
    const json_t *total = json_object_get(json_object_get(root, "metadata"), "total_size");
    uint64_t bytes = 0;
    for (int64_t i = 0; i < reader->place_count; i++) {
        bytes += reader->places[i].tensor->end - reader->places[i].tensor->begin;
    }
    if (json_is_integer(total) && (uint64_t)json_integer_value(total) != bytes) {
        nd_log_warning("\"%s\" gives a total_size of %lld bytes; its tensors have %llu", index,
                       (long long)json_integer_value(total), (unsigned long long)bytes);
    }
}

static nd_status open_sharded(nd_hf_reader *reader, const char *index, json_t *root)
{
    json_t *map = json_object_get(root, "weight_map");
    const char *tensor;
    json_t *value;
    if (!json_is_object(map) || json_object_size(map) == 0) {
        return nd_fail(ND_ERR_DATA, "\"%s\" has no \"weight_map\"", index);
    }
    ND_TRY(ND_ALLOC(json_object_size(map), &reader->files));
    json_object_foreach(map, tensor, value)
    {
        const char *name = json_string_value(value);
        bool open = false;
        ND_TRY(check_file_name(index, tensor, value));
        for (int64_t f = 0; f < reader->file_count; f++) {
            open |= strcmp(reader->files[f].name, name) == 0;
        }
        ND_TRY(open ? ND_OK : open_file(reader, name));
    }
    ND_TRY(collect_places(reader));
    ND_TRY(check_map(reader, index, map));
    check_total_size(reader, index, root);
    return ND_OK;
}

static nd_status read_index(nd_hf_reader *reader, const char *index)
{
    char *text = NULL;
    size_t size = 0;
    json_t *root;
    ND_TRY(nd_fs_read(index, INDEX_BYTES_MAX, ND_ERR_DATA, &text, &size));
    nd_status status = nd_json_parse(text, size, JSON_REJECT_DUPLICATES, index, &root);
    free(text);
    status = status == ND_OK ? open_sharded(reader, index, root) : status;
    json_decref(root);
    return status;
}

/* Open. */

/* A file with all of a model. */
static nd_status open_gguf(nd_hf_reader *reader)
{
    ND_TRY(ND_ALLOC(1, &reader->files));
    weight_file *file = &reader->files[reader->file_count++];
    file->fd = -1;
    reader->gguf = true;
    ND_TRY(nd_fs_format(&file->name, "%s", reader->path));
    ND_TRY(nd_fs_format(&file->path, "%s", reader->path));
    ND_TRY(nd_fs_open(file->path, ND_ERR_DATA, &file->fd, NULL));
    ND_TRY(nd_gguf_open(file->path, &file->list, &reader->shape, &reader->folder));
    return collect_places(reader);
}

static nd_status open_weights(nd_hf_reader *reader)
{
    char index[PATH_MAX];
    bool one = false, sharded = false;
    ND_TRY(nd_fs_path(index, "%s/model.safetensors.index.json", reader->folder));
    ND_TRY(nd_fs_has(reader->folder, "model.safetensors", &one));
    if (one) {
        ND_TRY(ND_ALLOC(1, &reader->files));
        ND_TRY(open_file(reader, "model.safetensors"));
        return collect_places(reader);
    }
    ND_TRY(nd_fs_exists(index, &sharded));
    return sharded ? read_index(reader, index)
                   : nd_fail(ND_ERR_DATA,
                             "\"%s\" holds neither model.safetensors nor "
                             "model.safetensors.index.json; other weight formats are not read; "
                             "save the model with save_pretrained(safe_serialization=True)",
                             reader->folder);
}

static nd_status fail_no_model(const char *folder)
{
    bool run = false, checkpoint = false;
    ND_TRY(nd_fs_has(folder, "model/config.json", &run));
    ND_TRY(nd_fs_has(folder, "manifest.json", &checkpoint));
    return nd_fail(
        ND_ERR_DATA, "\"%s\" is not a Hugging Face model folder: it has no config.json%s", folder,
        run          ? "; it is the folder of a run, whose model is in its folder model"
        : checkpoint ? "; go on from a checkpoint with --resume-from-checkpoint, or make a model "
                       "of it with ndtrain export"
                     : "");
}

nd_status nd_hf_reader_open(const char *path, nd_hf_reader **out)
{
    nd_status status = ND_OK;
    nd_hf_reader *reader = NULL;
    char config[PATH_MAX];
    nd_fs_kind kind;
    bool there = false;
    ND_TRY_OUT(ND_ALLOC(1, &reader));
    ND_TRY_OUT(nd_fs_format(&reader->path, "%s", path));
    ND_TRY_OUT(nd_fs_look(path, &kind, NULL));
    if (kind == ND_FS_FILE) {
        ND_TRY_OUT(open_gguf(reader));
    } else {
        ND_TRY_OUT(nd_fs_format(&reader->folder, "%s", path));
        ND_TRY_OUT(nd_fs_path(config, "%s/config.json", path));
        ND_TRY_OUT(nd_fs_exists(config, &there));
        ND_TRY_OUT(there ? ND_OK : fail_no_model(path));
        ND_TRY_OUT(nd_shape_read(config, &reader->shape));
        ND_TRY_OUT(open_weights(reader));
    }
    *out = reader;
    reader = NULL;
out:
    nd_hf_reader_close(reader);
    return status;
}

void nd_hf_reader_close(nd_hf_reader *reader)
{
    if (!reader) {
        return;
    }
    for (int64_t f = 0; f < reader->file_count; f++) {
        weight_file *file = &reader->files[f];
        if (file->fd >= 0) {
            close(file->fd);
        }
        nd_safetensors_list_fini(&file->list);
        free(file->path);
        free(file->name);
    }
    free(reader->places);
    free(reader->files);
    free(reader->folder);
    free(reader->path);
    free(reader);
}

const nd_shape *nd_hf_reader_shape(const nd_hf_reader *reader)
{
    return &reader->shape;
}

const char *nd_hf_reader_folder(const nd_hf_reader *reader)
{
    return reader->folder;
}

bool nd_hf_reader_is_bf16(const nd_hf_reader *reader)
{
    bool all = true;
    for (int64_t i = 0; i < reader->place_count; i++) {
        all &= reader->places[i].tensor->dtype == ND_SAFETENSORS_BF16;
    }
    return all;
}

nd_status nd_hf_reader_read(const nd_hf_reader *reader, const char *name, int64_t begin,
                            int64_t count, float *out)
{
    const tensor_place *found = find_place(reader, name);
    if (!found) {
        return nd_fail(ND_ERR_DATA, "\"%s\" lacks tensor \"%s\"", reader->path, name);
    }
    const nd_safetensors_tensor *t = found->tensor;
    ND_ASSERT(begin >= 0 && count >= 0 && begin <= nd_safetensors_tensor_count(t) - count);
    const weight_file *file = found->file;
    if (reader->gguf) {
        return nd_gguf_read(file->fd, file->path, t, reader->shape.head_dim, begin, count, out);
    }
    /* nd_hf_reader_check has passed: the dtype is one of those that are read */
    return nd_safetensors_read(file->fd, file->path, t, begin, count, out);
}

/* Compares the tensors of the folder with those of a model of its config.json. */

static nd_status check_tensor(const nd_hf_reader *reader, const char *name, int axes, int64_t rows,
                              int64_t cols)
{
    const tensor_place *found = find_place(reader, name);
    if (!found && strcmp(name, "lm_head.weight") == 0) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" lacks tensor \"%s\"; where the head shares the embedding's tensor, "
                       "write \"tie_word_embeddings\": true in config.json",
                       reader->path, name);
    }
    if (!found) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" lacks tensor \"%s\", which a model of its config.json has: the folder is "
            "incomplete, or of another kind of model",
            reader->path, name);
    }
    const nd_safetensors_tensor *t = found->tensor;
    if (t->axes != axes || t->shape[0] != rows || (axes == 2 && t->shape[1] != cols)) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": tensor \"%s\" has %d axes of %lld x %lld, but config.json asks for "
                       "%lld x %lld",
                       found->file->path, name, t->axes, (long long)(t->axes > 0 ? t->shape[0] : 1),
                       (long long)(t->axes > 1 ? t->shape[1] : 1), (long long)rows,
                       (long long)cols);
    }
    if (t->dtype != ND_SAFETENSORS_F32 && t->dtype != ND_SAFETENSORS_BF16 &&
        t->dtype != ND_SAFETENSORS_F16) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\": tensor \"%s\" is %s; only F32, BF16 and F16 are read; load the model in "
            "transformers and save it in one of these",
            found->file->path, name, nd_safetensors_dtype_name(t->dtype));
    }
    return ND_OK;
}

/* A tied model has one tensor for both; a file's head of its own must not get lost silently. */
static nd_status check_tied_head(const nd_hf_reader *reader)
{
    enum { PIECE = 1 << 18 };
    const int64_t count = reader->shape.vocab * reader->shape.hidden;
    nd_status status = ND_OK;
    float *both = NULL;
    ND_TRY(check_tensor(reader, "lm_head.weight", 2, reader->shape.vocab, reader->shape.hidden));
    ND_TRY(ND_ALLOC(2 * PIECE, &both));
    for (int64_t begin = 0; begin < count && status == ND_OK; begin += PIECE) {
        const int64_t n = nd_min(PIECE, count - begin);
        ND_TRY_OUT(nd_hf_reader_read(reader, "lm_head.weight", begin, n, both));
        ND_TRY_OUT(nd_hf_reader_read(reader, "model.embed_tokens.weight", begin, n, both + PIECE));
        if (memcmp(both, both + PIECE, (size_t)n * sizeof *both) != 0) {
            status =
                nd_fail(ND_ERR_DATA,
                        "\"%s\": config.json has \"tie_word_embeddings\": true, but the tensors "
                        "lm_head.weight and model.embed_tokens.weight differ; write false there "
                        "to use both, or take lm_head.weight out of the files",
                        reader->path);
        }
    }
out:
    free(both);
    return status;
}

static nd_status check_against(const nd_hf_reader *reader, const nd_layout *layout)
{
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[i];
        ND_TRY(check_tensor(reader, p->file_name, p->axes, p->file_rows, p->cols));
    }
    for (int64_t i = 0; i < reader->place_count; i++) {
        const tensor_place *p = &reader->places[i];
        const char *name = p->tensor->name;
        const bool tied_head = layout->tied && strcmp(name, "lm_head.weight") == 0;
        bool known = tied_head || nd_ends_with(name, "rotary_emb.inv_freq");
        for (int k = 0; k < layout->param_count && !known; k++) {
            known = strcmp(layout->params[k].file_name, name) == 0;
        }
        ND_TRY(tied_head ? check_tied_head(reader) : ND_OK);
        if (!known) {
            return nd_fail(
                ND_ERR_DATA,
                "\"%s\" holds tensor \"%.200s\", which a model of %lld layers does not have: "
                "it is another kind of model, or config.json is of another one",
                p->file->path, name, (long long)reader->shape.layers);
        }
    }
    return ND_OK;
}

nd_status nd_hf_reader_check(const nd_hf_reader *reader)
{
    nd_layout *layout = NULL;
    ND_TRY(nd_layout_create(&(nd_layout_options){.shape = &reader->shape}, &layout));
    nd_status status = check_against(reader, layout);
    nd_layout_destroy(layout);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/shard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/math.h"

/* Names. */

static const char *const array_names[ND_STATE_KINDS] = {"master", "exp_avg", "exp_avg_sq"};

const char *nd_state_kind_name(nd_state_kind array)
{
    return array_names[array];
}

const char *nd_state_name(char name[ND_STATE_NAME_MAX], nd_state_kind array, const char *param)
{
    if (array == ND_STATE_MASTER) {
        snprintf(name, ND_STATE_NAME_MAX, "%s", param);
    } else {
        snprintf(name, ND_STATE_NAME_MAX, "optimizer.state.%s.%s", param, array_names[array]);
    }
    return name;
}

const char *nd_hash_file_name(char name[ND_HASH_FILE_NAME_MAX], int rank)
{
    snprintf(name, ND_HASH_FILE_NAME_MAX, "shard-%05d.hashes", rank + 1);
    return name;
}

/* The head of a safetensors file. */

enum { HEAD_ALIGNMENT = 4096 };

/* "[0,128]", as many numbers as the tensor has axes. */
static void put_numbers(FILE *out, int axes, int64_t first, int64_t second)
{
    fputc('[', out);
    if (axes > 0) {
        fprintf(out, "%lld", (long long)first);
    }
    if (axes > 1) {
        fprintf(out, ",%lld", (long long)second);
    }
    fputc(']', out);
}

/* The sharding string is JSON inside a JSON string: its quotes have a backslash. */
static void put_header(FILE *out, const nd_shard_list *list)
{
    fputs("{\"__metadata__\":{\"format\":\"pt\",\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":\"{",
          out);
    for (int64_t i = 0; i < list->count; i++) {
        const nd_shard_entry *e = &list->entries[i];
        fprintf(out, "%s\\\"%s\\\":{\\\"saved_offsets\\\":", i > 0 ? "," : "", e->name);
        put_numbers(out, e->rect.axes, e->rect.row, e->rect.col);
        fputc('}', out);
    }
    fputs("}\"}", out);
    for (int64_t i = 0; i < list->count; i++) {
        const nd_shard_entry *e = &list->entries[i];
        fprintf(out, ",\"%s\":{\"dtype\":\"F32\",\"shape\":", e->name);
        put_numbers(out, e->rect.axes, e->rect.rows, e->rect.cols);
        fprintf(out, ",\"data_offsets\":[%llu,%llu]}", (unsigned long long)e->begin,
                (unsigned long long)e->end);
    }
    fputc('}', out);
}

/* Length, JSON, and spaces up to a multiple of HEAD_ALIGNMENT, for the entries in their order.
 * Names are printable ASCII without quotes and backslashes. Sets begin and end. */
static nd_status make_head(nd_shard_list *list, char **head, size_t *head_bytes)
{
    uint64_t at = 0;
    for (int64_t i = 0; i < list->count; i++) {
        nd_shard_entry *e = &list->entries[i];
        e->begin = at;
        at += (uint64_t)nd_rect_elements(&e->rect) * sizeof(float);
        e->end = at;
    }
    char *text = NULL, *padded = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    if (out) {
        fputs("........", out); /* the length of what follows */
        put_header(out, list);
    }
    bool written = out && fclose(out) == 0;
    size_t bytes = nd_round_up_bytes(length, HEAD_ALIGNMENT);
    if (!written || nd_alloc(bytes, 1, (void **)&padded) != ND_OK) {
        free(text);
        return nd_fail_memory("the header of %lld entries", (long long)list->count);
    }
    memcpy(padded, text, length);
    free(text);
    memset(padded + length, ' ', bytes - length);
    for (int i = 0; i < 8; i++) {
        padded[i] = (char)((uint64_t)(bytes - 8) >> (8 * i));
    }
    for (int64_t i = 0; i < list->count; i++) {
        list->entries[i].begin += bytes;
        list->entries[i].end += bytes;
    }
    *head = padded;
    *head_bytes = bytes;
    return ND_OK;
}

/* Plan. */

static nd_status add_entry(nd_shard_list *list, const char *name, const nd_rect *rect)
{
    if (list->count == list->capacity) {
        int64_t capacity = list->capacity ? 2 * list->capacity : 64;
        void *entries = realloc(list->entries, (size_t)capacity * sizeof *list->entries);
        if (!entries) {
            return nd_fail_memory("%lld entries of a checkpoint", (long long)capacity);
        }
        list->entries = entries;
        list->capacity = capacity;
    }
    nd_shard_entry entry = {.rect = *rect};
    ND_TRY(nd_fs_format(&entry.name, "%s", name));
    list->entries[list->count++] = entry;
    return ND_OK;
}

/* The writer of a tensor's first element writes its step too. That element is always in a body. */
static nd_status add_steps(nd_shard_plan *plan)
{
    char name[ND_STATE_NAME_MAX];
    const nd_rect scalar = {.axes = 0, .rows = 1, .cols = 1};
    for (int i = 0; i < plan->piece_count && plan->arrays > 1; i++) {
        const nd_piece *piece = &plan->pieces[i];
        if (piece->rect.row == 0 && piece->rect.col == 0) {
            snprintf(name, sizeof name, "optimizer.state.%s.step", piece->param->name);
            ND_TRY(add_entry(&plan->lists[ND_RECT_BODY], name, &scalar));
            plan->step_count++;
        }
    }
    return ND_OK;
}

static nd_status make_heads(nd_shard_plan *plan)
{
    int count = 0, index = 0;
    for (int k = 0; k < ND_RECT_KIND_COUNT; k++) {
        count += plan->lists[k].count > 0;
    }
    for (int k = 0; k < ND_RECT_KIND_COUNT; k++) {
        nd_shard_list *list = &plan->lists[k];
        if (list->count == 0) {
            continue;
        }
        ND_TRY(make_head(list, &plan->heads[k], &plan->head_bytes[k]));
        plan->file_bytes[k] = list->entries[list->count - 1].end;
        plan->bytes += plan->file_bytes[k];
        index++;
        snprintf(plan->names[k], sizeof plan->names[k], "shard-%05d-model-%05d-of-%05d.safetensors",
                 plan->rank + 1, index, count);
    }
    return ND_OK;
}

static nd_status add_extras(nd_shard_plan *plan, const nd_shard_plan_options *options)
{
    for (int i = 0; i < options->extra_count && plan->rank == 0; i++) {
        const nd_state_extra *extra = &options->extras[i];
        const nd_rect rect = {.axes = 1, .rows = extra->count, .cols = 1};
        ND_TRY(add_entry(&plan->lists[ND_RECT_BODY], extra->name, &rect));
        plan->extras[plan->extra_count++] = *extra;
    }
    return ND_OK;
}

nd_status nd_shard_plan_init(nd_shard_plan *plan, const nd_shard_plan_options *options)
{
    nd_status status = ND_OK;
    const nd_layout *layout = options->layout;
    nd_holder holder = nd_holder_of(options->mesh, options->rank);
    ND_ASSERT(options->arrays == 1 || options->arrays == ND_STATE_KINDS);
    ND_ASSERT(options->extra_count <= ND_STATE_EXTRAS_MAX);
    *plan = (nd_shard_plan){.layout = layout, .rank = options->rank, .arrays = options->arrays};
    ND_TRY_OUT(ND_ALLOC(3 * layout->param_count, &plan->pieces));
    ND_TRY_OUT(ND_ALLOC(3 * layout->param_count, &plan->first_entry));
    ND_TRY_OUT(ND_ALLOC(layout->unit_count + 1, &plan->first_piece));
    plan->piece_count = nd_pieces_written(layout, &holder, plan->pieces);
    for (int u = 0, piece = 0; u <= layout->unit_count; u++) {
        while (piece < plan->piece_count && plan->pieces[piece].param->unit->index < u) {
            piece++;
        }
        plan->first_piece[u] = piece;
    }
    for (int i = 0; i < plan->piece_count; i++) {
        const nd_piece *piece = &plan->pieces[i];
        nd_shard_list *list = &plan->lists[piece->kind];
        char name[ND_STATE_NAME_MAX];
        plan->first_entry[i] = list->count;
        for (int a = 0; a < plan->arrays; a++) {
            nd_state_name(name, (nd_state_kind)a, piece->param->name);
            ND_TRY_OUT(add_entry(list, name, &piece->rect));
        }
    }
    ND_TRY_OUT(add_extras(plan, options));
    ND_TRY_OUT(add_steps(plan));
    ND_TRY_OUT(make_heads(plan));
out:
    if (status != ND_OK) {
        nd_shard_plan_fini(plan);
    }
    return status;
}

void nd_shard_plan_fini(nd_shard_plan *plan)
{
    for (int k = 0; k < ND_RECT_KIND_COUNT; k++) {
        for (int64_t i = 0; i < plan->lists[k].count; i++) {
            free(plan->lists[k].entries[i].name);
        }
        free(plan->lists[k].entries);
        free(plan->heads[k]);
    }
    free(plan->first_piece);
    free(plan->first_entry);
    free(plan->pieces);
    *plan = (nd_shard_plan){0};
}

/* Digests. */

enum {
    HASHES_HEAD_BYTES = 24,
    HASHED_FILE_BYTES = ND_SHARD_FILE_NAME_MAX + 16,
    HASHES_VERSION = 1
};

static uint8_t *put_number(uint8_t *out, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(value >> (8 * i));
    }
    return out + bytes;
}

static uint64_t chunks_of(const nd_shard_plan *plan, int kind)
{
    return (uint64_t)nd_ceil_div((int64_t)plan->file_bytes[kind], ND_CHUNK_BYTES);
}

nd_status nd_hashes_init(nd_hashes *hashes, const nd_shard_plan *plan, nd_checksum kind)
{
    const size_t width = (size_t)nd_checksum_chunk_bytes(kind);
    uint64_t files = 0, chunks = 0;
    *hashes = (nd_hashes){0};
    for (int k = 0; k < ND_RECT_KIND_COUNT; k++) {
        files += plan->heads[k] != NULL;
        chunks += chunks_of(plan, k);
    }
    hashes->head_bytes = HASHES_HEAD_BYTES + files * HASHED_FILE_BYTES;
    hashes->bytes = hashes->head_bytes + chunks * width;
    ND_TRY(nd_alloc(hashes->bytes, 1, (void **)&hashes->data));
    uint8_t *at = hashes->data + 8, *digests = hashes->data + hashes->head_bytes;
    memcpy(hashes->data, "NDHASHES", 8);
    at = put_number(at, HASHES_VERSION, 4);
    at = put_number(at, (uint64_t)kind, 4);
    at = put_number(at, width, 4);
    at = put_number(at, files, 4);
    for (int k = 0; k < ND_RECT_KIND_COUNT; k++) {
        if (!plan->heads[k]) {
            continue;
        }
        memcpy(at, plan->names[k], ND_SHARD_FILE_NAME_MAX);
        at = put_number(at + ND_SHARD_FILE_NAME_MAX, plan->file_bytes[k], 8);
        at = put_number(at, chunks_of(plan, k), 8);
        hashes->digests[k] = digests;
        digests += chunks_of(plan, k) * width;
    }
    return ND_OK;
}

void nd_hashes_fini(nd_hashes *hashes)
{
    free(hashes->data);
    *hashes = (nd_hashes){0};
}

/* Writer. */

struct nd_shard_writer {
    const nd_shard_plan *plan;
    char *folder;
    nd_checksum kind;
    float updates;
    int next_unit;
    nd_state_file *files[ND_RECT_KIND_COUNT];
    nd_hashes hashes;
};

void nd_shard_writer_abandon(nd_shard_writer *writer)
{
    if (writer) {
        for (int k = 0; k < ND_RECT_KIND_COUNT; k++) {
            nd_state_file_abandon(writer->files[k]);
        }
        nd_hashes_fini(&writer->hashes);
        free(writer->folder);
        free(writer);
    }
}

nd_status nd_shard_writer_open(const nd_shard_plan *plan, const char *folder, nd_checksum kind,
                               int64_t updates, nd_shard_writer **out)
{
    nd_shard_writer *writer = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &writer));
    writer->plan = plan;
    writer->kind = kind;
    writer->updates = (float)updates;
    ND_TRY_OUT(nd_fs_format(&writer->folder, "%s", folder));
    ND_TRY_OUT(nd_hashes_init(&writer->hashes, plan, kind));
    for (int k = 0; k < ND_RECT_KIND_COUNT; k++) { /* all space is reserved before any is filled */
        if (plan->heads[k]) {
            ND_TRY_OUT(nd_state_file_create(folder, plan->names[k], plan->file_bytes[k], kind,
                                            writer->hashes.digests[k], &writer->files[k]));
        }
    }
    for (int k = 0; k < ND_RECT_KIND_COUNT; k++) {
        if (plan->heads[k]) {
            ND_TRY_OUT(nd_state_file_append(writer->files[k], plan->heads[k], plan->head_bytes[k]));
        }
    }
    *out = writer;
    writer = NULL;
out:
    nd_shard_writer_abandon(writer);
    return status;
}

nd_status nd_shard_writer_unit(nd_shard_writer *writer, int unit, nd_piece_data *data,
                               void *context)
{
    const nd_shard_plan *plan = writer->plan;
    ND_ASSERT(unit == writer->next_unit);
    writer->next_unit++;
    for (int i = plan->first_piece[unit]; i < plan->first_piece[unit + 1]; i++) {
        const nd_piece *piece = &plan->pieces[i];
        size_t bytes = (size_t)nd_rect_elements(&piece->rect) * sizeof(float);
        for (int a = 0; a < plan->arrays; a++) {
            ND_TRY(nd_state_file_append(writer->files[piece->kind],
                                        data(context, i, (nd_state_kind)a), bytes));
        }
    }
    return ND_OK;
}

nd_status nd_shard_writer_extras(nd_shard_writer *writer, const float *const *data)
{
    const nd_shard_plan *plan = writer->plan;
    ND_ASSERT(writer->next_unit == plan->layout->unit_count);
    for (int i = 0; i < plan->extra_count; i++) {
        ND_TRY(nd_state_file_append(writer->files[ND_RECT_BODY], data[i],
                                    (size_t)plan->extras[i].count * sizeof(float)));
    }
    return ND_OK;
}

static nd_status finish_files(nd_shard_writer *writer)
{
    const nd_shard_plan *plan = writer->plan;
    ND_ASSERT(writer->next_unit == plan->layout->unit_count);
    for (int i = 0; i < plan->step_count; i++) {
        ND_TRY(nd_state_file_append(writer->files[ND_RECT_BODY], &writer->updates,
                                    sizeof writer->updates));
    }
    for (int k = 0; k < ND_RECT_KIND_COUNT; k++) {
        nd_state_file *file = writer->files[k];
        writer->files[k] = NULL;
        ND_TRY(file ? nd_state_file_finish(file) : ND_OK);
    }
    return ND_OK;
}

nd_status nd_shard_writer_finish(nd_shard_writer *writer, nd_shard_record *out)
{
    nd_status status = ND_OK;
    const nd_hashes *hashes = &writer->hashes;
    char name[ND_HASH_FILE_NAME_MAX];
    nd_shard_record record = {.bytes = writer->plan->bytes};
    ND_TRY_OUT(finish_files(writer));
    ND_TRY_OUT(nd_digest_text(writer->kind, hashes->data, hashes->bytes, record.digest));
    nd_hash_file_name(name, writer->plan->rank);
    ND_TRY_OUT(nd_state_file_put(writer->folder, name, hashes->data, hashes->bytes));
    ND_TRY_OUT(nd_fs_sync_folder(writer->folder));
    *out = record;
out:
    nd_shard_writer_abandon(writer);
    return status;
}

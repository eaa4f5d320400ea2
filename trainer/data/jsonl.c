// SPDX-License-Identifier: Apache-2.0
/*
 * JSON lines: each row {"text": ...} or {"prompt": ..., "completion": ...}, other keys ignored; ids
 * are the UTF-8 bytes of the strings. Opening parses every row once, to know where its tokens are
 * in the concatenation; a row is parsed again when a block needs it. Empty lines are skipped.
 */
#include "trainer/data/formats.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"

enum { ROW_BYTES_MAX = 1 << 30, ROWS_AT_FIRST = 1024, LONG_FILE_BYTES = 256 << 20 };

/* A parsed row. `root` owns the strings. */
typedef struct row_text {
    json_t *root;
    const char *part[2]; /* prompt (or ""), then text or completion */
    size_t size[2];      /* bytes */
} row_text;

static const char row_mend[] =
    "each line is an object with \"text\", or with \"prompt\" and \"completion\"";

static nd_status string_of(const char *path, uint64_t line, json_t *root, const char *key,
                           const char **text, size_t *size)
{
    json_t *value = json_object_get(root, key);
    if (!json_is_string(value)) {
        return nd_fail(ND_ERR_DATA, "\"%s\" line %llu: \"%s\" %s; %s", path,
                       (unsigned long long)line, key, value ? "is not a string" : "is missing",
                       row_mend);
    }
    *text = json_string_value(value);
    *size = json_string_length(value);
    return ND_OK;
}

static nd_status pick_strings(const char *path, uint64_t line, row_text *row)
{
    json_t *root = row->root;
    if (!json_is_object(root)) {
        return nd_fail(ND_ERR_DATA, "\"%s\" line %llu is not a JSON object; %s", path,
                       (unsigned long long)line, row_mend);
    }
    bool text = json_object_get(root, "text") != NULL;
    bool pair = json_object_get(root, "prompt") || json_object_get(root, "completion");
    if (text && pair) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" line %llu has \"text\" and also \"prompt\" or \"completion\"; %s",
                       path, (unsigned long long)line, row_mend);
    }
    if (!text && !pair) {
        return nd_fail(ND_ERR_DATA, "\"%s\" line %llu has neither \"text\" nor \"prompt\"; %s",
                       path, (unsigned long long)line, row_mend);
    }
    row->part[0] = "";
    row->size[0] = 0;
    if (pair) {
        ND_TRY(string_of(path, line, root, "prompt", &row->part[0], &row->size[0]));
    }
    return string_of(path, line, root, pair ? "completion" : "text", &row->part[1], &row->size[1]);
}

static nd_status row_parse(const char *path, uint64_t line, const uint8_t *data, size_t size,
                           row_text *row)
{
    if (size > ROW_BYTES_MAX) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" line %llu has %zu bytes; at most %d are read: split the document",
                       path, (unsigned long long)line, size, ROW_BYTES_MAX);
    }
    json_error_t error;
    row->root =
        json_loadb((const char *)data, size, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    if (!row->root) {
        return nd_fail(ND_ERR_DATA, "\"%s\" line %llu, column %d: %s; %s", path,
                       (unsigned long long)line, error.column, error.text, row_mend);
    }
    nd_status status = pick_strings(path, line, row);
    if (status != ND_OK) {
        json_decref(row->root);
    }
    return status;
}

static bool is_blank(const uint8_t *data, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        if (!strchr(" \t\r", data[i]) || data[i] == '\0') {
            return false;
        }
    }
    return true;
}

/* Bytes of the line at `offset`, without its newline. */
static size_t line_length(const nd_fs_map *map, size_t offset)
{
    const uint8_t *end = memchr(map->data + offset, '\n', map->size - offset);
    return end ? (size_t)(end - map->data) - offset : map->size - offset;
}

static nd_status append_row(nd_dataset *dataset, int64_t *capacity, uint64_t offset, uint64_t token)
{
    if (dataset->row_count == *capacity) {
        int64_t wanted = *capacity ? 2 * *capacity : ROWS_AT_FIRST;
        nd_jsonl_row *rows = realloc(dataset->rows, (size_t)wanted * sizeof *rows);
        if (!rows) {
            return nd_fail(ND_ERR_INTERNAL,
                           "out of host memory for the index of \"%s\": %lld rows of %zu bytes",
                           dataset->path, (long long)wanted, sizeof *rows);
        }
        dataset->rows = rows;
        *capacity = wanted;
    }
    dataset->rows[dataset->row_count++] = (nd_jsonl_row){offset, token};
    return ND_OK;
}

static nd_status index_rows(nd_dataset *dataset)
{
    const nd_fs_map *map = &dataset->map;
    int64_t capacity = 0;
    uint64_t tokens = 0, line = 0;
    for (size_t at = 0, length; at < map->size; at += length + 1) {
        length = line_length(map, at);
        line++;
        if (is_blank(map->data + at, length)) {
            continue;
        }
        row_text row;
        ND_TRY(row_parse(dataset->path, line, map->data + at, length, &row));
        uint64_t bytes = row.size[0] + row.size[1];
        json_decref(row.root);
        if (bytes > 0) {
            ND_TRY(append_row(dataset, &capacity, at, tokens));
            tokens += bytes;
        }
    }
    ND_TRY(append_row(dataset, &capacity, map->size, tokens));
    dataset->row_count--; /* the sentinel is not a row */
    dataset->tokens = (int64_t)tokens;
    return ND_OK;
}

nd_status nd_jsonl_open(nd_dataset *dataset)
{
    ND_TRY(nd_text_check(dataset));
    if (dataset->map.size > LONG_FILE_BYTES) {
        nd_log_info("indexing the %.1f GB of \"%s\", about ten seconds each; a token file "
                    "(scripts/tokenize.py) opens at once",
                    (double)dataset->map.size * 1e-9, dataset->path);
    }
    return index_rows(dataset);
}

/* The row that holds a token: the last one that begins at or before it. */
static int64_t row_of(const nd_dataset *dataset, uint64_t token)
{
    int64_t low = 0, high = dataset->row_count; /* rows[low].token <= token < rows[high].token */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (dataset->rows[middle].token <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Counts newlines from the start of the file; for messages only. */
static uint64_t line_of(const nd_dataset *dataset, uint64_t offset)
{
    uint64_t line = 1;
    for (uint64_t i = 0; i < offset; i++) {
        line += dataset->map.data[i] == '\n';
    }
    return line;
}

/*
 * Tokens [skip, skip + count) of a row become tokens place, place + 1, ... of the block: token p is
 * input p and the label of position p - 1, unless it belongs to a prompt.
 */
static void put_row(const row_text *row, size_t skip, size_t count, int64_t place, int64_t S,
                    int32_t *inputs, int32_t *labels)
{
    for (size_t i = 0; i < count; i++) {
        size_t at = skip + i;
        bool prompt = at < row->size[0];
        uint8_t byte = (uint8_t)(prompt ? row->part[0][at] : row->part[1][at - row->size[0]]);
        int64_t p = place + (int64_t)i;
        if (p < S) {
            inputs[p] = byte;
        }
        if (p > 0) {
            labels[p - 1] = prompt ? ND_LABEL_IGNORED : byte;
        }
    }
}

nd_status nd_jsonl_block(const nd_dataset *dataset, int64_t first, int64_t count, int32_t *inputs,
                         int32_t *labels)
{
    const nd_jsonl_row *rows = dataset->rows;
    uint64_t at = (uint64_t)first, end = (uint64_t)(first + count);
    for (int64_t r = row_of(dataset, at); at < end; r++) {
        size_t offset = rows[r].offset;
        row_text row;
        nd_status status = row_parse(dataset->path, 0, dataset->map.data + offset,
                                     line_length(&dataset->map, offset), &row);
        if (status != ND_OK || row.size[0] + row.size[1] != rows[r + 1].token - rows[r].token) {
            if (status == ND_OK) {
                json_decref(row.root);
            }
            return nd_fail(ND_ERR_DATA,
                           "\"%s\" line %llu is not what it was when the file was opened: another "
                           "program changed it",
                           dataset->path, (unsigned long long)line_of(dataset, offset));
        }
        uint64_t stop = rows[r + 1].token < end ? rows[r + 1].token : end;
        put_row(&row, (size_t)(at - rows[r].token), (size_t)(stop - at), (int64_t)at - first,
                dataset->sequence, inputs, labels);
        json_decref(row.root);
        at = stop;
    }
    return ND_OK;
}

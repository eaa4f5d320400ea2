// SPDX-License-Identifier: Apache-2.0
/*
 * JSON lines: each row is {"text": ...} or {"prompt": ..., "completion": ...}, other keys are
 * ignored; ids are the UTF-8 bytes of the strings. Empty lines are skipped, and so is a byte order
 * mark.
 *
 * Opening parses every row once and keeps marks: where in the file a string begins, and every
 * 16,384 tokens of a long one. A block is then decoded from the mark before it, in a time that does
 * not depend on how long its rows are.
 */
#include "trainer/data/formats.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "runtime/base/log.h"

enum {
    ROW_BYTES_MAX = 1 << 30,
    MARKS_AT_FIRST = 1024,
    MARK_TOKENS = 16384,
    LONG_FILE_BYTES = 256 << 20
};

/* A parsed row. `root` owns the strings. */
typedef struct row_text {
    json_t *root;
    const char *part[2]; /* prompt (or ""), then text or completion */
    size_t size[2];      /* bytes */
} row_text;

static const char row_advice[] =
    "each line is an object with \"text\", or with \"prompt\" and \"completion\"";

static nd_status string_of(const char *path, uint64_t line, json_t *root, const char *key,
                           const char **text, size_t *size)
{
    json_t *value = json_object_get(root, key);
    if (!json_is_string(value)) {
        return nd_fail(ND_ERR_DATA, "\"%s\" line %llu: \"%s\" %s; %s", path,
                       (unsigned long long)line, key, value ? "is not a string" : "is missing",
                       row_advice);
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
                       (unsigned long long)line, row_advice);
    }
    bool text = json_object_get(root, "text") != NULL;
    bool pair = json_object_get(root, "prompt") || json_object_get(root, "completion");
    if (text && pair) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" line %llu has \"text\" and also \"prompt\" or \"completion\"; %s",
                       path, (unsigned long long)line, row_advice);
    }
    if (!text && !pair) {
        return nd_fail(ND_ERR_DATA, "\"%s\" line %llu has neither \"text\" nor \"prompt\"; %s",
                       path, (unsigned long long)line, row_advice);
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
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" line %llu has %zu bytes, but at most %d are read; split the document", path,
            (unsigned long long)line, size, ROW_BYTES_MAX);
    }
    /* Numbers are not used, so one that is no int64_t is no fault. */
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL;
    json_error_t error;
    row->root = json_loadb((const char *)data, size, flags, &error);
    if (!row->root && nd_json_no_memory(&error)) {
        return nd_fail_memory("a row of \"%s\"", path);
    }
    if (!row->root) {
        return nd_fail(ND_ERR_DATA, "\"%s\" line %llu, column %d: %s; %s", path,
                       (unsigned long long)line, error.column, error.text, row_advice);
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

/* Counts newlines from the start of the file; for messages only. */
static uint64_t line_of(const nd_dataset *dataset, uint64_t offset)
{
    uint64_t line = 1;
    for (uint64_t i = 0; i < offset; i++) {
        line += dataset->map.data[i] == '\n';
    }
    return line;
}

static nd_status fail_changed(const nd_dataset *dataset, uint64_t offset)
{
    return nd_fail(ND_ERR_DATA,
                   "\"%s\" line %llu is not what it was when the file was opened: another "
                   "program changed it",
                   dataset->path, (unsigned long long)line_of(dataset, offset));
}

/* The index. */

static nd_status append_mark(nd_dataset *dataset, uint64_t token, uint64_t offset, bool prompt)
{
    if (dataset->mark_count == dataset->mark_room) {
        int64_t wanted = dataset->mark_room ? 2 * dataset->mark_room : MARKS_AT_FIRST;
        nd_jsonl_mark *marks = realloc(dataset->marks, (size_t)wanted * sizeof *marks);
        if (!marks) {
            return nd_fail_memory("the index of \"%s\": %lld marks of %zu bytes", dataset->path,
                                  (long long)wanted, sizeof *marks);
        }
        dataset->marks = marks;
        dataset->mark_room = wanted;
    }
    dataset->marks[dataset->mark_count++] =
        (nd_jsonl_mark){.token = token, .offset = offset, .prompt = prompt};
    return ND_OK;
}

/* Marks the string of one key of a row, which has `size` tokens, and counts them. */
static nd_status mark_string(nd_dataset *dataset, const uint8_t *row, size_t length,
                             const char *key, size_t size)
{
    const uint8_t *data = dataset->map.data, *end = row + length;
    const uint8_t *p = nd_json_string_find(row, end, key);
    uint64_t token = (uint64_t)dataset->tokens, last = token + size;
    while (p && token < last) {
        uint8_t bytes[4];
        ND_TRY(append_mark(dataset, token, (uint64_t)(p - data), key[0] == 'p'));
        uint64_t next = token + MARK_TOKENS;
        if (next >= last) { /* the last mark: what follows is decoded when it is read */
            token = last;
        }
        while (token < next && token < last) {
            int n = nd_json_string_decode(&p, end, bytes);
            if (n == 0) {
                return fail_changed(dataset, (uint64_t)(row - data));
            }
            token += (uint64_t)n;
        }
    }
    dataset->tokens = (int64_t)last;
    return token == last ? ND_OK : fail_changed(dataset, (uint64_t)(row - data));
}

static nd_status index_row(nd_dataset *dataset, uint64_t line, size_t at, size_t length)
{
    const uint8_t *data = dataset->map.data + at;
    row_text row = {0};
    ND_TRY(row_parse(dataset->path, line, data, length, &row));
    size_t prompt = row.size[0], text = row.size[1];
    bool pair = json_object_get(row.root, "prompt") != NULL;
    json_decref(row.root);
    if (prompt > 0) {
        ND_TRY(mark_string(dataset, data, length, "prompt", prompt));
    }
    return text > 0 ? mark_string(dataset, data, length, pair ? "completion" : "text", text)
                    : ND_OK;
}

int64_t nd_jsonl_ignored(const nd_dataset *dataset)
{
    int64_t tokens = 0;
    for (int64_t i = 0; i + 1 < dataset->mark_count; i++) {
        const nd_jsonl_mark *mark = &dataset->marks[i];
        tokens += mark->prompt ? (int64_t)(mark[1].token - mark->token) : 0;
    }
    return tokens;
}

static nd_status check_completions(const nd_dataset *dataset)
{
    return dataset->tokens == 0 || nd_jsonl_ignored(dataset) < dataset->tokens
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "none of the %lld tokens of \"%s\" counts in the loss; completions are "
                         "missing",
                         (long long)dataset->tokens, dataset->path);
}

nd_status nd_jsonl_open(nd_dataset *dataset)
{
    const nd_fs_map *map = &dataset->map;
    const size_t bom = map->size >= 3 && memcmp(map->data, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    uint64_t line = 0;
    ND_TRY(nd_text_check(dataset));
    if (map->size > LONG_FILE_BYTES) {
        nd_log_info("indexing the %.1f GB of \"%s\", about ten seconds each; a token file "
                    "(scripts/make_tokens.py) opens at once",
                    (double)map->size * 1e-9, dataset->path);
    }
    for (size_t at = bom, length; at < map->size; at += length + 1) {
        length = line_length(map, at);
        line++;
        if (!is_blank(map->data + at, length)) {
            ND_TRY(index_row(dataset, line, at, length));
        }
    }
    ND_TRY(append_mark(dataset, (uint64_t)dataset->tokens, map->size, false));
    return check_completions(dataset);
}

/* Reading. */

/* The last mark at or before a token. */
static int64_t mark_of(const nd_dataset *dataset, uint64_t token)
{
    int64_t low = 0, high = dataset->mark_count - 1; /* marks[low].token <= token < marks[high] */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (dataset->marks[middle].token <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The block that is being read: tokens [first, end) of the file. */
typedef struct block {
    uint64_t first, end;
    int64_t sequence;
    int32_t *inputs, *labels;
} block;

/* Token p of a block is input p and the label of position p - 1, unless it belongs to a prompt. */
static void put_token(const block *b, uint64_t token, uint8_t byte, bool prompt)
{
    if (token < b->first || token >= b->end) {
        return;
    }
    int64_t p = (int64_t)(token - b->first);
    if (p < b->sequence) {
        b->inputs[p] = byte;
    }
    if (p > 0) {
        b->labels[p - 1] = prompt ? ND_LABEL_IGNORED : byte;
    }
}

/* Tokens from a mark to the next one, or to the end of the block. */
static nd_status read_mark(const nd_dataset *dataset, const nd_jsonl_mark *mark, const block *b)
{
    const uint8_t *data = dataset->map.data, *end = data + dataset->map.size;
    const uint8_t *p = data + mark->offset;
    uint64_t token = mark->token, stop = mark[1].token;
    while (token < stop && token < b->end) {
        uint8_t bytes[4];
        uint64_t n = (uint64_t)nd_json_string_decode(&p, end, bytes);
        if (n == 0 || n > stop - token) {
            return fail_changed(dataset, mark->offset);
        }
        for (uint64_t i = 0; i < n; i++, token++) {
            put_token(b, token, bytes[i], mark->prompt);
        }
    }
    bool whole = token < stop || (uint64_t)(p - data) == mark[1].offset || (p < end && *p == '"');
    return whole ? ND_OK : fail_changed(dataset, mark->offset);
}

nd_status nd_jsonl_block(const nd_dataset *dataset, int64_t first, int64_t count, int32_t *inputs,
                         int32_t *labels)
{
    const block b = {.first = (uint64_t)first,
                     .end = (uint64_t)(first + count),
                     .sequence = dataset->sequence,
                     .inputs = inputs,
                     .labels = labels};
    for (const nd_jsonl_mark *mark = &dataset->marks[mark_of(dataset, b.first)];
         mark->token < b.end; mark++) {
        ND_TRY(read_mark(dataset, mark, &b));
    }
    return ND_OK;
}

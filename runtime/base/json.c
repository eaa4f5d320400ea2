// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/json.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/suggest.h"

enum { FILE_BYTES_MAX = 1 << 28 };

nd_status nd_json_parse(const char *text, size_t size, size_t flags, const char *path, json_t **out)
{
    json_error_t error;
    *out = json_loadb(text, size, flags, &error);
    if (!*out && nd_json_no_memory(&error)) {
        return path ? nd_fail_memory("\"%s\"", path) : nd_fail_memory("a row");
    }
    return *out   ? ND_OK
           : path ? nd_fail(ND_ERR_DATA, "\"%s\" line %d: %s", path, error.line, error.text)
                  : nd_fail(ND_ERR_DATA, "column %d: %s", error.column, error.text);
}

nd_status nd_json_read(const char *folder, const char *name, size_t flags, json_t **out)
{
    char path[PATH_MAX], *text = NULL;
    size_t size = 0;
    bool there = false;
    *out = NULL;
    ND_TRY(nd_fs_has(folder, name, &there));
    if (!there) {
        return ND_OK;
    }
    ND_TRY(nd_fs_path(path, "%s/%s", folder, name));
    ND_TRY(nd_fs_read(path, FILE_BYTES_MAX, ND_ERR_DATA, &text, &size));
    nd_status status = nd_json_parse(text, size, JSON_ALLOW_NUL | flags, path, out);
    free(text);
    return status;
}

bool nd_json_lines_next(nd_json_lines *lines)
{
    size_t length = 0; /* without the blanks at the end */
    while (length == 0 && lines->left > 0) {
        const char *feed = memchr(lines->next, '\n', lines->left);
        lines->line = lines->next;
        lines->size = feed ? (size_t)(feed - lines->line) : lines->left;
        lines->next += lines->size + (feed != NULL);
        lines->left -= lines->size + (feed != NULL);
        lines->number++;
        length = lines->size;
        while (length > 0 && memchr(" \t\r", lines->line[length - 1], 3)) {
            length--;
        }
    }
    return length > 0;
}

void nd_json_set(json_t **object, const char *key, json_t *value)
{
    if (json_object_set_new(*object, key, value) != 0) {
        json_decref(*object);
        *object = NULL;
    }
}

void nd_json_append(json_t **array, json_t *value)
{
    if (json_array_append_new(*array, value) != 0) {
        json_decref(*array);
        *array = NULL;
    }
}

static bool is_ascii(const char *text)
{
    while (*text && (unsigned char)*text < 0x80) {
        text++;
    }
    return !*text;
}

json_t *nd_json_string(const char *text)
{
    json_t *value = json_string(text); /* NULL: it is no UTF-8, or there is no memory */
    char *ascii = value || is_ascii(text) ? NULL : strdup(text);
    if (ascii) {
        for (char *c = ascii; *c; c++) {
            *c = (unsigned char)*c < 0x80 ? *c : '?';
        }
        value = json_string(ascii);
        free(ascii);
    }
    return value;
}

char *nd_json_text(const json_t *root, size_t flags)
{
    size_t size = root ? json_dumpb(root, NULL, 0, flags) : 0;
    char *text = size > 0 ? malloc(size + 1) : NULL;
    if (text && json_dumpb(root, text, size, flags) != size) {
        free(text);
        return NULL;
    }
    if (text) {
        text[size] = '\0';
    }
    return text;
}

nd_status nd_json_write(const char *folder, const char *name, json_t *root, size_t flags)
{
    char path[PATH_MAX], *text = nd_json_text(root, flags);
    json_decref(root);
    nd_status status = text ? nd_fs_path(path, "%s/%s", folder, name) : nd_fail_memory("%s", name);
    status = status == ND_OK ? nd_fs_write_atomic(path, text, strlen(text)) : status;
    free(text);
    return status;
}

nd_status nd_json_check_keys(const json_t *object, const char *const *known, const char *otherwise)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        nd_suggest search;
        nd_suggest_init(&search, key);
        bool is_known = false;
        for (int i = 0; known[i] && !is_known; i++) {
            is_known = strcmp(known[i], key) == 0;
            nd_suggest_offer(&search, known[i]);
        }
        if (!is_known && search.best) {
            return nd_fail(ND_ERR_DATA, "unknown key \"%.80s\"; did you mean \"%s\"?", key,
                           search.best);
        }
        if (!is_known) {
            return nd_fail(ND_ERR_DATA, "unknown key \"%.80s\"; %s", key, otherwise);
        }
    }
    return ND_OK;
}

// SPDX-License-Identifier: Apache-2.0
#include "runtime/config/sources.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/config/reader.h"

/* Where messages place a node: a line of the file, or the setting as a whole. */
typedef struct place {
    const char *file; /* NULL: `where` stands for every node */
    const char *where, *key;
} place;

static const char *where_of(const place *at, const nd_yaml_node *node, char *buffer, size_t size)
{
    if (!at->file) {
        return at->where;
    }
    snprintf(buffer, size, "%.500s:%d: ", at->file, node->line);
    return buffer;
}

/* The last part of a path: from *begin, *length characters with what is before it. */
static void last_part(const char *path, size_t *begin, size_t *length)
{
    while (*length > 1 && path[*length - 1] == '/') {
        (*length)--;
    }
    for (*begin = *length; *begin > 0 && path[*begin - 1] != '/';) {
        (*begin)--;
    }
}

/* Leaves what is before the pattern in the last part, or else the part before that one. */
static void leave_pattern(const char *path, size_t *begin, size_t *length)
{
    const size_t n = *length - *begin;
    size_t left = strcspn(path + *begin, "*?[");
    if (left >= n) {
        return;
    }
    while (left > 0 && strchr("-_.", path[*begin + left - 1])) {
        left--;
    }
    if (left > 0) {
        *length = *begin + left;
    } else if (*begin > 0) {
        *length = *begin;
        last_part(path, begin, length);
        leave_pattern(path, begin, length);
    }
}

/* "web" of "data/web.jsonl.zst", of "data/web-*.jsonl", and of a pattern for all in "data/web". */
static void name_of_path(const char *path, char out[ND_DATA_SOURCE_NAME])
{
    static const char *const endings[] = {".gz",  ".zst", ".jsonl", ".ndjson",
                                          ".txt", ".bin", ".idx"};
    size_t length = strlen(path), begin = 0, used = 0;
    last_part(path, &begin, &length);
    leave_pattern(path, &begin, &length);
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        size_t n = strlen(endings[i]);
        length -= length - begin > n && strncmp(path + length - n, endings[i], n) == 0 ? n : 0;
    }
    for (size_t i = begin; i < length && used < ND_DATA_SOURCE_NAME - 8; i++) {
        unsigned char c = (unsigned char)path[i];
        out[used++] = (char)(isalnum(c) || strchr("._-", c) ? c : '_');
    }
    out[used] = '\0';
}

static bool is_taken(const nd_data_sources *s, int before, const char *name)
{
    for (int i = 0; i < before; i++) {
        if (strcmp(s->list[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

/* Names that were not given follow from the paths; one that is taken gets a number. */
static void name_sources(nd_data_sources *s)
{
    for (int i = 0; i < s->count; i++) {
        char name[ND_DATA_SOURCE_NAME];
        if (s->list[i].named) {
            continue;
        }
        name_of_path(s->list[i].path, name);
        size_t length = strlen(name);
        for (int n = 2; is_taken(s, s->count, name); n++) {
            snprintf(name + length, sizeof name - length, "-%d", n);
        }
        memcpy(s->list[i].name, name, sizeof name);
    }
}

static nd_status check_names(const place *at, const char *where, const nd_data_sources *s)
{
    for (int i = 0; i < s->count; i++) {
        const char *name = s->list[i].name;
        if (s->list[i].named && is_taken(s, i, name)) {
            return nd_fail(ND_ERR_CONFIG, "%s%s names two sources %s; give each its own name",
                           where, at->key, name);
        }
    }
    return ND_OK;
}

/* Weights for all sources or for none, and so with epochs where there are no weights. */
static nd_status check_alike(const place *at, const char *where, const nd_data_sources *s)
{
    for (int i = 1; i < s->count; i++) {
        const nd_data_source *a = &s->list[0], *b = &s->list[i];
        const char *what = (a->weight > 0) != (b->weight > 0)                     ? "weight"
                           : a->weight == 0 && (a->epochs > 0) != (b->epochs > 0) ? "epochs"
                                                                                  : NULL;
        if (what) {
            bool first = what[0] == 'w' ? a->weight > 0 : a->epochs > 0;
            return nd_fail(ND_ERR_CONFIG,
                           "%s%s gives \"%.200s\" %s%s, but not \"%.200s\"; give %s to every "
                           "source, or to none",
                           where, at->key, first ? a->path : b->path, what[0] == 'w' ? "a " : "",
                           what, first ? b->path : a->path, what[0] == 'w' ? "a weight" : what);
        }
    }
    return ND_OK;
}

static nd_status room_for_one(const place *at, const char *where, nd_data_sources *s)
{
    if (s->count == ND_DATA_SOURCES_MAX) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s%s has more than %d sources; name files that belong together by a folder "
                       "or a pattern",
                       where, at->key, ND_DATA_SOURCES_MAX);
    }
    nd_data_source *list = realloc(s->list, (size_t)(s->count + 1) * sizeof *list);
    if (!list) {
        return nd_fail_memory("the sources of the data");
    }
    s->list = list;
    s->list[s->count++] = (nd_data_source){0};
    return ND_OK;
}

static nd_status set_path(const place *at, const char *where, nd_data_source *s, const char *path)
{
    if (!*path) {
        return nd_fail(ND_ERR_CONFIG, "%s%s has a source without a path; name its file", where,
                       at->key);
    }
    return nd_text_replace(&s->path, path);
}

static nd_status set_name(const place *at, const char *where, nd_data_source *s, const char *name)
{
    bool good = *name && strlen(name) < sizeof s->name;
    for (const char *c = name; *c && good; c++) {
        good = isalnum((unsigned char)*c) || strchr("._-", *c);
    }
    if (!good) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s%s has a source named '%.80s'; a name is 1 to %d letters, digits, dots, "
                       "hyphens and underscores",
                       where, at->key, name, ND_DATA_SOURCE_NAME - 1);
    }
    s->named = true;
    snprintf(s->name, sizeof s->name, "%s", name);
    return ND_OK;
}

static nd_status set_number(const place *at, const char *where, const char *key, const char *text,
                            double *out)
{
    double value = 0;
    if (!nd_real_parse(text, &value) || value <= 0 || value > 1e12) {
        return nd_fail(ND_ERR_CONFIG, "%s%s: %s is '%.80s'; it must be a number above 0", where,
                       at->key, key, text);
    }
    *out = value;
    return ND_OK;
}

static nd_status set_member(const place *at, const nd_yaml_node *n, nd_data_source *s)
{
    char buffer[600];
    const char *where = where_of(at, n, buffer, sizeof buffer);
    if (n->kind != ND_YAML_SCALAR) {
        return nd_fail(ND_ERR_CONFIG, "%s%s: %.80s is %s; it must be a single value", where,
                       at->key, n->key, nd_yaml_kind_name(n->kind));
    }
    if (strcmp(n->key, "path") == 0) {
        return set_path(at, where, s, n->text);
    }
    if (strcmp(n->key, "name") == 0) {
        return set_name(at, where, s, n->text);
    }
    if (strcmp(n->key, "weight") == 0) {
        return set_number(at, where, n->key, n->text, &s->weight);
    }
    if (strcmp(n->key, "epochs") == 0) {
        return set_number(at, where, n->key, n->text, &s->epochs);
    }
    return nd_fail(ND_ERR_CONFIG,
                   "%s%s has a source with the key '%.80s'; it can have path, weight, epochs and "
                   "name",
                   where, at->key, n->key);
}

/* One source: a path, or a map. */
static nd_status read_source(const place *at, const nd_yaml_node *node, nd_data_sources *out)
{
    char buffer[600];
    const char *where = where_of(at, node, buffer, sizeof buffer);
    ND_TRY(room_for_one(at, where, out));
    nd_data_source *s = &out->list[out->count - 1];
    if (node->kind == ND_YAML_SEQUENCE) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s%s holds a list inside a list; a source is a path, or {path: ..., "
                       "weight: ..., epochs: ...}",
                       where, at->key);
    }
    if (node->kind == ND_YAML_SCALAR) {
        return set_path(at, where, s, nd_yaml_is_null(node) ? "" : node->text);
    }
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        ND_TRY(set_member(at, n, s));
    }
    return s->path ? ND_OK : set_path(at, where, s, "");
}

static nd_status read_node(const place *at, const nd_yaml_node *node, nd_data_sources *out)
{
    char buffer[600];
    const char *where = where_of(at, node, buffer, sizeof buffer);
    if (node->kind == ND_YAML_MAP && nd_yaml_find(node, "path")) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s%s is a single source with keys; write it as a list of one: - path: ...",
                       where, at->key);
    }
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        ND_TRY(read_source(at, n, out));
        if (node->kind == ND_YAML_MAP) {
            char line[600];
            ND_TRY(set_name(at, where_of(at, n, line, sizeof line), &out->list[out->count - 1],
                            n->key));
        }
    }
    if (out->count == 0) {
        return nd_fail(ND_ERR_CONFIG, "%s%s is an empty %s; name at least one file", where, at->key,
                       node->kind == ND_YAML_MAP ? "map" : "list");
    }
    ND_TRY(check_names(at, where, out));
    ND_TRY(check_alike(at, where, out));
    name_sources(out);
    return ND_OK;
}

static nd_status finish(nd_status status, nd_data_sources *sources, nd_data_sources *out)
{
    if (status == ND_OK) {
        *out = *sources;
    } else {
        nd_data_sources_fini(sources);
    }
    return status;
}

nd_status nd_data_sources_of_node(const char *file, const char *key, const nd_yaml_node *node,
                                  nd_data_sources *out)
{
    nd_data_sources sources = {0};
    const place at = {.file = file, .where = "", .key = key};
    return finish(read_node(&at, node, &sources), &sources, out);
}

/* Whether the words of the text are numbers and other words in turn. */
static bool is_weighted_words(const char *text)
{
    int words = 0;
    for (const char *p = text + strspn(text, " "); *p; p += strspn(p, " "), words++) {
        char word[64];
        double value;
        size_t n = strcspn(p, " ");
        snprintf(word, sizeof word, "%.*s", (int)(n < sizeof word ? n : sizeof word), p);
        if (words % 2 == 0 && !nd_real_parse(word, &value)) {
            return false;
        }
        p += n;
    }
    return words >= 2 && words % 2 == 0;
}

static nd_status read_words(const place *at, const char *text, nd_data_sources *out)
{
    nd_status status = ND_OK;
    char *copy = NULL, *state = NULL;
    ND_TRY(nd_text_replace(&copy, text));
    for (char *word = strtok_r(copy, " ", &state); word && status == ND_OK;
         word = strtok_r(NULL, " ", &state)) {
        status = room_for_one(at, at->where, out);
        if (status == ND_OK) {
            nd_data_source *s = &out->list[out->count - 1];
            status = set_number(at, at->where, "a weight", word, &s->weight);
            word = strtok_r(NULL, " ", &state);
            status = status == ND_OK ? set_path(at, at->where, s, word) : status;
        }
    }
    free(copy);
    if (status == ND_OK) {
        name_sources(out);
    }
    return status;
}

static nd_status read_flow(const place *at, const char *text, nd_data_sources *out)
{
    nd_yaml_node *root = NULL;
    ND_TRY(nd_yaml_parse(text, strlen(text), at->key, &root));
    nd_status status = read_node(at, root, out);
    nd_yaml_destroy(root);
    return status;
}

nd_status nd_data_sources_read(const char *where, const char *key, const char *text,
                               nd_data_sources *out)
{
    nd_data_sources sources = {0};
    const place at = {.where = where, .key = key};
    const size_t length = strlen(text);
    const char ends[] = {length > 1 ? text[0] : ' ', length > 1 ? text[length - 1] : ' ', '\0'};
    const bool flow = strcmp(ends, "[]") == 0 || strcmp(ends, "{}") == 0;
    bool named = false; /* a file has this name */
    nd_status status = nd_fs_exists(text, &named);
    ND_TRY(status);
    if (flow && !named) {
        status = read_flow(&at, text, &sources);
    } else if (is_weighted_words(text) && !named) {
        status = read_words(&at, text, &sources);
    } else if (!*text) {
        status = ND_OK;
    } else {
        status = room_for_one(&at, where, &sources);
        status = status == ND_OK ? set_path(&at, where, &sources.list[0], text) : status;
        if (status == ND_OK) {
            name_sources(&sources);
        }
    }
    return finish(status, &sources, out);
}

static void append_number(nd_text *text, const char *key, double value)
{
    char number[40];
    nd_real_format(value, number, sizeof number);
    nd_text_append(text, ", %s: %s", key, number);
}

nd_status nd_data_sources_format(const nd_data_sources *sources, char **out)
{
    nd_text text = {0};
    nd_text_append(&text, "[");
    for (int i = 0; i < sources->count; i++) {
        const nd_data_source *s = &sources->list[i];
        const bool plain = !s->named && s->weight == 0 && s->epochs == 0;
        nd_text_append(&text, "%s%s", i > 0 ? ", " : "", plain ? "" : "{path: ");
        nd_text_append_quoted(&text, s->path);
        if (s->weight > 0) {
            append_number(&text, "weight", s->weight);
        }
        if (s->epochs > 0) {
            append_number(&text, "epochs", s->epochs);
        }
        if (s->named) {
            nd_text_append(&text, ", name: %s", s->name);
        }
        nd_text_append(&text, plain ? "" : "}");
    }
    nd_text_append(&text, "]");
    return nd_text_finish(&text, out);
}

void nd_data_sources_fini(nd_data_sources *sources)
{
    for (int i = 0; i < sources->count; i++) {
        free(sources->list[i].path);
    }
    free(sources->list);
    *sources = (nd_data_sources){0};
}

// SPDX-License-Identifier: Apache-2.0
/* Sources of data as a text or as YAML, and how long it takes to read their files. */
#include "runtime/config/sources.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/text.h"
#include "runtime/config/reader.h"

/* Where messages place a node: a line of the file, or the setting as a whole. */
typedef struct place {
    const char *file; /* NULL: `where` stands for every node */
    const char *where, *key;
} place;

/* ND_ERR_CONFIG with a sentence that begins with the place of the node (NULL: the setting's) and
 * the key. */
__attribute__((format(printf, 3, 4))) static nd_status
fail_at(const place *at, const nd_yaml_node *node, const char *format, ...)
{
    char text[1024], line[600] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (at->file) {
        snprintf(line, sizeof line, "%.500s:%d: ", at->file, node->line);
    }
    return nd_fail(ND_ERR_CONFIG, "%s%s%s", at->file ? line : at->where, at->key, text);
}

/* "web" of "data/web.jsonl.zst", of "data/web-*.jsonl", and of a pattern for all in "data/web". */
static void name_of_path(const char *path, char out[ND_DATA_SOURCE_NAME])
{
    static const char *const endings[] = {".gz",  ".zst", ".jsonl", ".ndjson",
                                          ".txt", ".bin", ".idx"};
    size_t length = strlen(path), begin, used = 0;
    for (bool found = false; !found; length = found ? length : begin) { /* from the last part on */
        while (length > 1 && path[length - 1] == '/') {
            length--;
        }
        for (begin = length; begin > 0 && path[begin - 1] != '/';) {
            begin--;
        }
        size_t left = strcspn(path + begin, "*?[");
        if (left >= length - begin) {
            break;
        }
        while (left > 0 && strchr("-_.", path[begin + left - 1])) {
            left--;
        }
        length = left > 0 ? begin + left : length;
        found = left > 0 || begin == 0;
    }
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

/* Each name is given once. Weights stand with all sources or with none, and so do epochs where
 * there are no weights. */
static nd_status check_alike(const place *at, const nd_yaml_node *node, const nd_data_sources *s)
{
    for (int i = 0; i < s->count; i++) {
        const nd_data_source *a = &s->list[0], *b = &s->list[i];
        const bool weights = (a->weight > 0) != (b->weight > 0);
        const bool epochs = a->weight == 0 && (a->epochs > 0) != (b->epochs > 0);
        if (b->named && is_taken(s, i, b->name)) {
            return fail_at(at, node, " names two sources %s; give each its own name", b->name);
        }
        if (weights || epochs) {
            const bool first = weights ? a->weight > 0 : a->epochs > 0;
            const char *what = weights ? "a weight" : "epochs";
            return fail_at(
                at, node,
                " gives \"%.200s\" %s, but not \"%.200s\"; give %s to every source, or to none",
                first ? a->path : b->path, what, first ? b->path : a->path, what);
        }
    }
    return ND_OK;
}

static nd_status add_source(const place *at, const nd_yaml_node *node, nd_data_sources *s)
{
    if (s->count == ND_DATA_SOURCES_MAX) {
        return fail_at(
            at, node,
            " has more than %d sources; name files that belong together by a folder or a pattern",
            ND_DATA_SOURCES_MAX);
    }
    nd_data_source *list = realloc(s->list, (size_t)(s->count + 1) * sizeof *list);
    if (!list) {
        return nd_fail_memory("the sources of the data");
    }
    s->list = list;
    s->list[s->count++] = (nd_data_source){0};
    return ND_OK;
}

static nd_status set_path(const place *at, const nd_yaml_node *node, nd_data_source *s,
                          const char *path)
{
    return *path ? nd_text_replace(&s->path, path)
                 : fail_at(at, node, " has a source without a path; name its file");
}

static nd_status set_name(const place *at, const nd_yaml_node *node, nd_data_source *s,
                          const char *name)
{
    bool good = *name && strlen(name) < sizeof s->name;
    for (const char *c = name; *c && good; c++) {
        good = isalnum((unsigned char)*c) || strchr("._-", *c);
    }
    if (!good) {
        return fail_at(at, node,
                       " has a source named '%.80s'; a name is 1 to %d letters, digits, dots, "
                       "hyphens and underscores",
                       name, ND_DATA_SOURCE_NAME - 1);
    }
    s->named = true;
    snprintf(s->name, sizeof s->name, "%s", name);
    return ND_OK;
}

static nd_status set_number(const place *at, const nd_yaml_node *node, const char *key,
                            const char *text, double *out)
{
    double value = 0;
    if (!nd_real_parse(text, &value) || value <= 0 || value > 1e12) {
        return fail_at(at, node, ": %s is '%.80s'; it must be a number above 0", key, text);
    }
    *out = value;
    return ND_OK;
}

static nd_status set_member(const place *at, const nd_yaml_node *n, nd_data_source *s)
{
    if (n->kind != ND_YAML_SCALAR) {
        return fail_at(at, n, ": %.80s is %s; it must be a single value", n->key,
                       nd_yaml_kind_name(n->kind));
    }
    if (strcmp(n->key, "path") == 0) {
        return set_path(at, n, s, n->text);
    }
    if (strcmp(n->key, "name") == 0) {
        return set_name(at, n, s, n->text);
    }
    const bool weight = strcmp(n->key, "weight") == 0;
    if (weight || strcmp(n->key, "epochs") == 0) {
        return set_number(at, n, n->key, n->text, weight ? &s->weight : &s->epochs);
    }
    return fail_at(at, n,
                   " has a source with the key '%.80s'; it can have path, weight, epochs and name",
                   n->key);
}

/* One source: a path, or a map. */
static nd_status read_source(const place *at, const nd_yaml_node *node, nd_data_sources *out)
{
    ND_TRY(add_source(at, node, out));
    nd_data_source *s = &out->list[out->count - 1];
    if (node->kind == ND_YAML_SEQUENCE) {
        return fail_at(at, node,
                       " holds a list inside a list; a source is a path, or {path: ..., weight: "
                       "..., epochs: ...}");
    }
    if (node->kind == ND_YAML_SCALAR) {
        return set_path(at, node, s, nd_yaml_is_null(node) ? "" : node->text);
    }
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        ND_TRY(set_member(at, n, s));
    }
    return s->path ? ND_OK : set_path(at, node, s, "");
}

static nd_status read_node(const place *at, const nd_yaml_node *node, nd_data_sources *out)
{
    const bool is_map = node->kind == ND_YAML_MAP;
    if (is_map && nd_yaml_find(node, "path")) {
        return fail_at(at, node,
                       " is a single source with keys; write it as a list of one: - path: ...");
    }
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        ND_TRY(read_source(at, n, out));
        ND_TRY(is_map ? set_name(at, n, &out->list[out->count - 1], n->key) : ND_OK);
    }
    if (out->count == 0) {
        return fail_at(at, node, " is an empty %s; name at least one file",
                       is_map ? "map" : "list");
    }
    return check_alike(at, node, out);
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
    for (char *word = strtok_r(copy, " ", &state); word; word = strtok_r(NULL, " ", &state)) {
        ND_TRY_OUT(add_source(at, NULL, out));
        nd_data_source *s = &out->list[out->count - 1];
        ND_TRY_OUT(set_number(at, NULL, "a weight", word, &s->weight));
        ND_TRY_OUT(set_path(at, NULL, s, strtok_r(NULL, " ", &state)));
    }
out:
    free(copy);
    return status;
}

static nd_status read_text(const place *at, const char *text, nd_data_sources *out)
{
    const size_t length = strlen(text);
    const char ends[] = {length > 1 ? text[0] : ' ', length > 1 ? text[length - 1] : ' ', '\0'};
    bool is_file = false; /* whose name it is */
    ND_TRY(nd_fs_exists(text, &is_file));
    if (!is_file && (strcmp(ends, "[]") == 0 || strcmp(ends, "{}") == 0)) {
        nd_yaml_node *root = NULL;
        ND_TRY(nd_yaml_parse(text, strlen(text), at->key, &root));
        nd_status status = read_node(at, root, out);
        nd_yaml_destroy(root);
        return status;
    }
    if (!is_file && is_weighted_words(text)) {
        return read_words(at, text, out);
    }
    ND_TRY(*text ? add_source(at, NULL, out) : ND_OK);
    return *text ? set_path(at, NULL, &out->list[0], text) : ND_OK;
}

/* Gives names to what was read, or frees it. */
static nd_status finish(nd_status status, nd_data_sources *sources)
{
    if (status == ND_OK) {
        name_sources(sources);
    } else {
        nd_data_sources_fini(sources);
    }
    return status;
}

nd_status nd_data_sources_read(const char *where, const char *key, const char *text,
                               nd_data_sources *out)
{
    *out = (nd_data_sources){0};
    return finish(read_text(&(place){.where = where, .key = key}, text, out), out);
}

void nd_data_sources_fini(nd_data_sources *sources)
{
    for (int i = 0; i < sources->count; i++) {
        free(sources->list[i].path);
    }
    free(sources->list);
    *sources = (nd_data_sources){0};
}

static void append_number(nd_text *text, const char *key, double value)
{
    char number[40];
    nd_real_format(value, number, sizeof number);
    if (value > 0) {
        nd_text_append(text, ", %s: %s", key, number);
    }
}

nd_status nd_data_sources_flatten(const char *file, const char *key, const nd_yaml_node *node,
                                  char **out)
{
    nd_data_sources sources = {0};
    nd_text text = {0};
    ND_TRY(finish(read_node(&(place){.file = file, .key = key}, node, &sources), &sources));
    nd_text_append(&text, "[");
    for (int i = 0; i < sources.count; i++) {
        const nd_data_source *s = &sources.list[i];
        const bool plain = !s->named && s->weight == 0 && s->epochs == 0;
        nd_text_append(&text, "%s%s", i > 0 ? ", " : "", plain ? "" : "{path: ");
        nd_text_append_quoted(&text, s->path);
        append_number(&text, "weight", s->weight);
        append_number(&text, "epochs", s->epochs);
        nd_text_append(&text, s->named ? ", name: %s" : "%s", s->named ? s->name : "");
        nd_text_append(&text, plain ? "" : "}");
    }
    nd_text_append(&text, "]");
    nd_data_sources_fini(&sources);
    return nd_text_finish(&text, out);
}

/* How long a check of the data and of the model may take. */

/* Seconds to encode, or else to read, the files that a path names: one, those of a folder, or of a
 * pattern. They may be links, as in the Hugging Face cache. JSON lines and compressed texts are
 * encoded also where ids are bytes. What cannot be read counts as nothing: its reader says why. */
static double add_up(const nd_config *config, const char *path, bool encode)
{
    nd_fs_names found = {0};
    nd_fs_kind kind = ND_FS_ABSENT;
    struct stat st;
    double sum = 0;
    (void)nd_fs_look(path, &kind, &st);
    if (kind == ND_FS_FILE) {
        const double bytes = (double)st.st_size;
        const bool compressed = nd_ends_with(path, ".gz") || nd_ends_with(path, ".zst");
        const bool rows = config->data.format == ND_DATA_JSONL ||
                          (config->data.format == ND_DATA_AUTO && nd_is_name_of_rows(path));
        const bool encoded = strcmp(config->data.tokenizer, "bytes") == 0
                                 ? rows || compressed
                                 : strcmp(config->data.tokenizer, "file") != 0;
        return !encode ? 10e-9 * bytes : encoded ? 400e-9 * (compressed ? 8.0 : 1.0) * bytes : 0;
    }
    const bool folder = kind == ND_FS_FOLDER;
    (void)(folder ? nd_fs_list(path, &found) : nd_fs_glob(path, &found));
    for (int i = 0; i < found.count; i++) {
        char *file = NULL;
        if (nd_fs_format(&file, "%s%s%s", folder ? path : "", folder ? "/" : "", found.list[i]) ==
                ND_OK &&
            nd_fs_look(file, &kind, NULL) == ND_OK && kind == ND_FS_FILE) {
            sum += add_up(config, file, encode);
        }
        free(file);
    }
    nd_fs_names_fini(&found);
    nd_error_clear();
    return sum;
}

static double seconds_of_sources(const nd_config *config, const char *text)
{
    nd_data_sources sources;
    double seconds = 0;
    if (nd_data_sources_read("", "data.path", text, &sources) != ND_OK) {
        nd_error_clear(); /* said when the text was set, or no memory, which the next call says */
        return 0;
    }
    for (int i = 0; i < sources.count; i++) {
        seconds += add_up(config, sources.list[i].path, true);
    }
    nd_data_sources_fini(&sources);
    return seconds;
}

double nd_config_data_seconds(const nd_config *config)
{
    const char *model = config->model.path;
    bool has = false; /* model.verify reads every file */
    if (config->model.verify && *model && nd_fs_has(model, "SHA256SUMS", &has) != ND_OK) {
        nd_error_clear(); /* the check itself says what is wrong */
    }
    return seconds_of_sources(config, config->data.path) +
           seconds_of_sources(config, config->data.validation_path) +
           (has ? add_up(config, model, false) : 0);
}

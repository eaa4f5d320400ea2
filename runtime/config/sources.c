// SPDX-License-Identifier: Apache-2.0
/* Sources of data as a text or as YAML, and how long it takes to read their files. */
#include "runtime/config/sources.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/text.h"
#include "runtime/config/reader.h"

enum { PLACE_MAX = 600 };

/* Messages place a node by this: a line of the file, or (file NULL) the setting as a whole. */
static const char *place_of(const char *file, const char *where, const nd_yaml_node *node,
                            char line[PLACE_MAX])
{
    if (file) {
        snprintf(line, PLACE_MAX, "%.500s:%d: ", file, node->line);
    }
    return file ? line : where;
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
static nd_status check_alike(const char *where, const char *key, const nd_data_sources *s)
{
    for (int i = 0; i < s->count; i++) {
        const nd_data_source *a = &s->list[0], *b = &s->list[i];
        const bool weights = (a->weight > 0) != (b->weight > 0);
        const bool epochs = a->weight == 0 && (a->epochs > 0) != (b->epochs > 0);
        const bool first = weights ? a->weight > 0 : a->epochs > 0;
        const char *what = weights ? "a weight" : "epochs";
        ND_REFUSE(b->named && is_taken(s, i, b->name),
                  "%s%s names two sources %s; give each its own name", where, key, b->name);
        ND_REFUSE(weights || epochs,
                  "%s%s gives \"%.200s\" %s, but not \"%.200s\"; give %s to every source, or to "
                  "none",
                  where, key, first ? a->path : b->path, what, first ? b->path : a->path, what);
    }
    return ND_OK;
}

/* One more source, which is all zero. */
static nd_status add_source(const char *where, const char *key, nd_data_sources *s)
{
    ND_REFUSE(s->count == ND_DATA_SOURCES_MAX,
              "%s%s has more than %d sources; name files that belong together by a folder or a "
              "pattern",
              where, key, ND_DATA_SOURCES_MAX);
    nd_data_source *list = realloc(s->list, (size_t)(s->count + 1) * sizeof *list);
    if (!list) {
        return nd_fail_memory("the sources of the data");
    }
    s->list = list;
    s->list[s->count++] = (nd_data_source){0};
    return ND_OK;
}

static nd_status set_path(const char *where, const char *key, nd_data_source *s, const char *path)
{
    ND_REFUSE(!*path, "%s%s has a source without a path; name its file", where, key);
    return nd_text_replace(&s->path, path);
}

static nd_status set_name(const char *where, const char *key, nd_data_source *s, const char *name)
{
    bool good = *name && strlen(name) < sizeof s->name;
    for (const char *c = name; *c && good; c++) {
        good = isalnum((unsigned char)*c) || strchr("._-", *c);
    }
    ND_REFUSE(!good,
              "%s%s has a source named '%.80s'; a name is 1 to %d letters, digits, dots, hyphens "
              "and underscores",
              where, key, name, ND_DATA_SOURCE_NAME - 1);
    s->named = true;
    snprintf(s->name, sizeof s->name, "%s", name);
    return ND_OK;
}

static nd_status set_number(const char *where, const char *key, const char *member,
                            const char *text, double *out)
{
    double value = 0;
    ND_REFUSE(!nd_real_parse(text, &value) || value <= 0 || value > 1e12,
              "%s%s: %s is '%.80s'; it must be a number above 0", where, key, member, text);
    *out = value;
    return ND_OK;
}

static nd_status set_member(const char *where, const char *key, const nd_yaml_node *n,
                            nd_data_source *s)
{
    const bool weight = strcmp(n->key, "weight") == 0;
    ND_REFUSE(n->kind != ND_YAML_SCALAR, "%s%s: %.80s is %s; it must be a single value", where, key,
              n->key, nd_yaml_kind_name(n->kind));
    if (strcmp(n->key, "path") == 0) {
        return set_path(where, key, s, n->text);
    }
    if (strcmp(n->key, "name") == 0) {
        return set_name(where, key, s, n->text);
    }
    ND_REFUSE(!weight && strcmp(n->key, "epochs") != 0,
              "%s%s has a source with the key '%.80s'; it can have path, weight, epochs and name",
              where, key, n->key);
    return set_number(where, key, n->key, n->text, weight ? &s->weight : &s->epochs);
}

/* One source: a path, or a map. With a file its lines stand in messages in place of `where`. */
static nd_status read_source(const char *file, const char *where, const char *key,
                             const nd_yaml_node *node, nd_data_sources *out)
{
    char line[PLACE_MAX];
    where = place_of(file, where, node, line);
    ND_TRY(add_source(where, key, out));
    nd_data_source *s = &out->list[out->count - 1];
    ND_REFUSE(node->kind == ND_YAML_SEQUENCE,
              "%s%s holds a list inside a list; a source is a path, or {path: ..., weight: ..., "
              "epochs: ...}",
              where, key);
    if (node->kind == ND_YAML_SCALAR) {
        return set_path(where, key, s, nd_yaml_is_null(node) ? "" : node->text);
    }
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        ND_TRY(set_member(place_of(file, where, n, line), key, n, s));
    }
    return s->path ? ND_OK : set_path(place_of(file, where, node, line), key, s, "");
}

static nd_status read_node(const char *file, const char *where, const char *key,
                           const nd_yaml_node *node, nd_data_sources *out)
{
    char line[PLACE_MAX];
    const bool is_map = node->kind == ND_YAML_MAP;
    ND_REFUSE(is_map && nd_yaml_find(node, "path"),
              "%s%s is a single source with keys; write it as a list of one: - path: ...",
              place_of(file, where, node, line), key);
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        ND_TRY(read_source(file, where, key, n, out));
        ND_TRY(is_map ? set_name(place_of(file, where, n, line), key, &out->list[out->count - 1],
                                 n->key)
                      : ND_OK);
    }
    ND_REFUSE(out->count == 0, "%s%s is an empty %s; name at least one file",
              place_of(file, where, node, line), key, is_map ? "map" : "list");
    return check_alike(place_of(file, where, node, line), key, out);
}

/* Returns whether the words of the text are numbers and other words in turn. */
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

static nd_status read_words(const char *where, const char *key, const char *text,
                            nd_data_sources *out)
{
    nd_status status = ND_OK;
    char *copy = NULL, *state = NULL;
    ND_TRY(nd_text_replace(&copy, text));
    for (char *word = strtok_r(copy, " ", &state); word; word = strtok_r(NULL, " ", &state)) {
        ND_TRY_OUT(add_source(where, key, out));
        nd_data_source *s = &out->list[out->count - 1];
        ND_TRY_OUT(set_number(where, key, "a weight", word, &s->weight));
        ND_TRY_OUT(set_path(where, key, s, strtok_r(NULL, " ", &state)));
    }
out:
    free(copy);
    return status;
}

static nd_status read_text(const char *where, const char *key, const char *text,
                           nd_data_sources *out)
{
    const size_t length = strlen(text);
    const char ends[] = {length > 1 ? text[0] : ' ', length > 1 ? text[length - 1] : ' ', '\0'};
    bool is_file = false; /* whose name it is */
    ND_TRY(nd_fs_exists(text, &is_file));
    if (!is_file && (strcmp(ends, "[]") == 0 || strcmp(ends, "{}") == 0)) {
        nd_yaml_node *root = NULL;
        ND_TRY(nd_yaml_parse(text, strlen(text), key, &root));
        nd_status status = read_node(NULL, where, key, root, out);
        nd_yaml_destroy(root);
        return status;
    }
    if (!is_file && is_weighted_words(text)) {
        return read_words(where, key, text, out);
    }
    ND_TRY(*text ? add_source(where, key, out) : ND_OK);
    return *text ? set_path(where, key, &out->list[0], text) : ND_OK;
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
    return finish(read_text(where, key, text, out), out);
}

void nd_data_sources_fini(nd_data_sources *sources)
{
    for (int i = 0; i < sources->count; i++) {
        free(sources->list[i].path);
    }
    free(sources->list);
    *sources = (nd_data_sources){0};
}

static void print_number(FILE *out, const char *key, double value)
{
    char number[40];
    nd_real_format(value, number, sizeof number);
    if (value > 0) {
        fprintf(out, ", %s: %s", key, number);
    }
}

nd_status nd_data_sources_flatten(const char *file, const char *key, const nd_yaml_node *node,
                                  char **out)
{
    nd_data_sources sources = {0};
    nd_text text;
    nd_status status = finish(read_node(file, "", key, node, &sources), &sources);
    ND_TRY_OUT(status);
    ND_TRY_OUT(nd_text_begin(&text));
    fputs("[", text.out);
    for (int i = 0; i < sources.count; i++) {
        const nd_data_source *s = &sources.list[i];
        const bool plain = !s->named && s->weight == 0 && s->epochs == 0;
        fprintf(text.out, "%s%s", i > 0 ? ", " : "", plain ? "" : "{path: ");
        nd_text_quote(text.out, s->path);
        print_number(text.out, "weight", s->weight);
        print_number(text.out, "epochs", s->epochs);
        fprintf(text.out, "%s%s", s->named ? ", name: " : "", s->named ? s->name : "");
        fputs(plain ? "" : "}", text.out);
    }
    fputs("]", text.out);
    status = nd_text_finish(&text, out);
out:
    nd_data_sources_fini(&sources);
    return status;
}

/* The time that a check of the data and of the model may take. */

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

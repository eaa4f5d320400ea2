// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/text.h"
#include "trainer/corpus/corpus.h"
#include "trainer/corpus/stream.h"

typedef enum text_kind { KIND_OTHER = 0, KIND_TEXT, KIND_ROWS } text_kind;

static bool ends_with(const char *name, size_t size, const char *suffix)
{
    size_t n = strlen(suffix);
    return size > n && strncasecmp(name + size - n, suffix, n) == 0;
}

/* By the ending of the name, without that of a compression. */
static size_t plain_size(const char *name)
{
    size_t size = strlen(name);
    return size - (ends_with(name, size, ".gz") ? 3 : ends_with(name, size, ".zst") ? 4 : 0);
}

static text_kind kind_of(const char *name)
{
    const size_t size = plain_size(name);
    if (nd_is_name_of_rows(name)) {
        return KIND_ROWS;
    }
    return ends_with(name, size, ".txt") ? KIND_TEXT : KIND_OTHER;
}

bool nd_corpus_is_rows(const char *path)
{
    return kind_of(path) == KIND_ROWS;
}

static nd_status is_pattern(const char *path, bool *out)
{
    bool there = false;
    *out = strpbrk(path, "*?[") != NULL;
    ND_TRY(*out ? nd_fs_exists(path, &there) : ND_OK);
    *out = *out && !there;
    return ND_OK;
}

nd_status nd_corpus_is_several(const char *path, bool *out)
{
    ND_TRY(nd_fs_is_folder(path, out));
    return *out ? ND_OK : is_pattern(path, out);
}

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static size_t pass_space(const char *text, size_t size, size_t at)
{
    while (at < size && is_space(text[at])) {
        at++;
    }
    return at;
}

/* The bracket with which a text begins as JSON does, else 0. Without the ending .json, only an
 * object does: in many kinds of text the first line begins with a bracket. */
static char json_bracket(const char *text, size_t size, bool named_json)
{
    size_t at = size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    at = pass_space(text, size, at);
    if (at == size || (text[at] != '{' && !(named_json && text[at] == '['))) {
        return 0;
    }
    const size_t next = pass_space(text, size, at + 1);
    return named_json || (next < size && (text[next] == '"' || text[next] == '}')) ? text[at] : 0;
}

nd_status nd_corpus_check_text(const char *path)
{
    char text[4096];
    size_t got = 0;
    nd_text_stream *stream;
    if (kind_of(path) != KIND_OTHER) {
        return ND_OK;
    }
    ND_TRY(nd_text_stream_open(path, &stream));
    nd_status status = nd_text_stream_read(stream, text, sizeof text, &got);
    nd_text_stream_close(stream);
    ND_TRY(status);
    const char bracket = json_bracket(text, got, ends_with(path, plain_size(path), ".json"));
    if (!bracket) {
        return ND_OK;
    }
    if (bracket == '[') {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" is a JSON array; one object a line is needed (jq -c '.[]' FILE), or "
                       "data.format (--data-format) text takes it as it stands",
                       path);
    }
    return nd_fail(ND_ERR_DATA,
                   "\"%s\" begins as JSON does, but its name does not say whether its lines are "
                   "rows; set data.format (--data-format) to jsonl, or to text to take it as it "
                   "stands",
                   path);
}

static nd_status add_file(nd_corpus_files *files, const char *path, nd_data_format format)
{
    struct stat st;
    nd_fs_kind kind;
    ND_TRY(nd_fs_look(path, &kind, &st));
    if (kind == ND_FS_ABSENT) {
        return nd_fail(ND_ERR_DATA, "\"%s\" cannot be read: %s", path, strerror(ENOENT));
    }
    if (kind != ND_FS_FILE) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is no regular file; name files of text", path);
    }
    void *place = files->list;
    nd_status status =
        nd_array_reserve(&place, &files->room, files->count + 1, sizeof *files->list);
    files->list = place;
    ND_TRY(status);
    nd_corpus_file *file = &files->list[files->count];
    *file = (nd_corpus_file){.bytes = (uint64_t)st.st_size};
    ND_TRY(nd_fs_format(&file->path, "%s", path));
    file->rows = format == ND_DATA_AUTO ? kind_of(path) == KIND_ROWS : format == ND_DATA_JSONL;
    files->count++;
    files->bytes += file->bytes;
    return ND_OK;
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Sorted paths; each and the list are owned by the caller. */
typedef struct paths {
    char **list;
    size_t count, room;
} paths;

static nd_status paths_add(paths *p, const char *folder, const char *name)
{
    void *place = p->list;
    nd_status status = nd_array_reserve(&place, &p->room, p->count + 1, sizeof *p->list);
    p->list = place;
    ND_TRY(status);
    ND_TRY(folder ? nd_fs_format(&p->list[p->count], "%s/%s", folder, name)
                  : nd_fs_format(&p->list[p->count], "%s", name));
    p->count++;
    return ND_OK;
}

static void paths_fini(paths *p)
{
    for (size_t i = 0; i < p->count; i++) {
        free(p->list[i]);
    }
    free(p->list);
}

static bool is_text(const char *name)
{
    return kind_of(name) != KIND_OTHER;
}

static bool holds_tokens(const char *name)
{
    return nd_ends_with(name, ".bin");
}

/* The files whose names are wanted; the others are counted. */
static nd_status list_folder(const char *folder, bool (*is_wanted)(const char *name), paths *out,
                             int64_t *skipped, int64_t *folders)
{
    nd_fs_names names;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_list(folder, &names));
    for (int i = 0; i < names.count; i++) {
        const char *name = names.list[i];
        bool inside = false;
        if (name[0] == '.') {
            continue;
        }
        ND_TRY_OUT(paths_add(out, folder, name));
        if (!is_wanted(name)) {
            ND_TRY_OUT(nd_fs_is_folder(out->list[out->count - 1], &inside));
            *(inside ? folders : skipped) += 1;
            free(out->list[--out->count]);
        }
    }
out:
    nd_fs_names_fini(&names);
    return status;
}

static nd_status list_pattern(const char *pattern, paths *out, int64_t *folders)
{
    nd_fs_names found;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_glob(pattern, &found));
    for (int i = 0; i < found.count; i++) {
        bool folder = false;
        ND_TRY_OUT(nd_fs_is_folder(found.list[i], &folder));
        *folders += folder && !strstr(pattern, "**"); /* which reaches their files too */
        ND_TRY_OUT(folder ? ND_OK : paths_add(out, NULL, found.list[i]));
    }
out:
    nd_fs_names_fini(&found);
    return status;
}

/* Without slashes at the end; owned by the caller. */
static nd_status clean_path(const char *path, char **out)
{
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') {
        length--;
    }
    return nd_fs_format(out, "%.*s", (int)length, path);
}

/* `guess`: what is no text by its name is looked at. */
static nd_status add_sorted(nd_corpus_files *files, paths *found, nd_data_format format, bool guess)
{
    nd_status status = ND_OK;
    if (found->count > 0) {
        qsort(found->list, found->count, sizeof *found->list, by_bytes);
    }
    for (size_t i = 0; status == ND_OK && i < found->count; i++) {
        status = guess ? nd_corpus_check_text(found->list[i]) : ND_OK;
        status = status == ND_OK ? add_file(files, found->list[i], format) : status;
    }
    return status;
}

nd_status nd_corpus_files_add(nd_corpus_files *files, const char *path, nd_data_format format)
{
    paths found = {0};
    char *clean = NULL;
    bool folder = false, pattern = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(clean_path(path, &clean));
    ND_TRY_OUT(nd_fs_is_folder(clean, &folder));
    ND_TRY_OUT(is_pattern(clean, &pattern));
    status = folder    ? list_folder(clean, is_text, &found, &files->skipped, &files->folders)
             : pattern ? list_pattern(clean, &found, &files->folders)
                       : paths_add(&found, NULL, clean);
    if (status == ND_OK && found.count == 0) {
        status = folder ? nd_fail(ND_ERR_DATA,
                                  "the folder \"%s\" has no file that ends in .jsonl, .ndjson or "
                                  ".txt, also with .gz or .zst; name the files, or a pattern",
                                  path)
                        : nd_fail(ND_ERR_DATA, "no file matches \"%s\"", path);
    }
    status = status == ND_OK ? add_sorted(files, &found, format, format == ND_DATA_AUTO) : status;
out:
    paths_fini(&found);
    free(clean);
    return status;
}

nd_status nd_corpus_files_add_tokens(nd_corpus_files *files, const char *path)
{
    paths found = {0};
    char *clean = NULL;
    int64_t others = 0, folders = 0;
    bool folder = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(clean_path(path, &clean));
    ND_TRY_OUT(nd_fs_is_folder(clean, &folder));
    ND_TRY_OUT(folder ? list_folder(clean, holds_tokens, &found, &others, &folders)
                      : list_pattern(clean, &found, &folders));
    size_t kept = 0;
    for (size_t i = 0; i < found.count; i++) {
        char *name = found.list[i];
        bool inside = true;
        ND_TRY_OUT(holds_tokens(name) ? nd_fs_is_folder(name, &inside) : ND_OK);
        if (!inside) {
            found.list[i] = found.list[kept];
            found.list[kept++] = name;
        }
    }
    while (found.count > kept) {
        free(found.list[--found.count]);
    }
    status = add_sorted(files, &found, ND_DATA_AUTO, false);
out:
    paths_fini(&found);
    free(clean);
    return status;
}

static bool is_any(const char *name)
{
    (void)name;
    return true;
}

static bool belongs_to_tokens(const char *name)
{
    return holds_tokens(name) || nd_ends_with(name, ".idx") || nd_ends_with(name, ".mask");
}

/* A pattern names what it means; of a folder only the known endings are text. */
nd_status nd_corpus_files_beside_tokens(const char *path, char **text, int64_t *files,
                                        int64_t *folders)
{
    paths found = {0};
    char *clean = NULL;
    int64_t none = 0;
    *text = NULL;
    *files = *folders = 0;
    bool folder = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(clean_path(path, &clean));
    ND_TRY_OUT(nd_fs_is_folder(clean, &folder));
    ND_TRY_OUT(folder ? list_folder(clean, is_any, &found, &none, &none)
                      : list_pattern(clean, &found, folders));
    for (size_t i = 0; i < found.count && status == ND_OK; i++) {
        const char *name = found.list[i];
        bool inside = false;
        ND_TRY_OUT(nd_fs_is_folder(name, &inside));
        if (inside) {
            (*folders)++;
        } else if (belongs_to_tokens(name)) {
            continue;
        } else if (folder && !is_text(name)) {
            (*files)++;
        } else if (!*text) {
            status = nd_fs_format(text, "%s", name);
        }
    }
out:
    paths_fini(&found);
    free(clean);
    return status;
}

void nd_corpus_files_fini(nd_corpus_files *files)
{
    for (size_t i = 0; i < files->count; i++) {
        free(files->list[i].path);
    }
    free(files->list);
    *files = (nd_corpus_files){0};
}

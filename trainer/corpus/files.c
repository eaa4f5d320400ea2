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

static size_t pass_space(const char *text, size_t size, size_t at)
{
    while (at < size && text[at] && strchr(" \t\r\n", text[at])) {
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
    const char *nul = memchr(text, '\0', got);
    if (nul) {
        ND_TRY(nd_text_check(path, (const uint8_t *)text, got)); /* says more of UTF-16 */
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has a NUL byte at offset %td, as no text has; name a text, or set "
                       "data.format (--data-format) to text to take it as it stands",
                       path, nul - text);
    }
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

static bool is_text(const char *name)
{
    return kind_of(name) != KIND_OTHER;
}

static bool holds_tokens(const char *name)
{
    return nd_ends_with(name, ".bin");
}

/* What lies in a folder, matches a pattern, or has the path itself. */
typedef struct listing {
    bool is_folder;
    nd_fs_names paths; /* in bytewise order, without folders */
    int64_t folders;   /* how many were left out */
} listing;

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static nd_status list_one(const char *path, nd_fs_names *out)
{
    ND_TRY(ND_ALLOC(1, &out->list));
    out->count = 1;
    return nd_fs_format(&out->list[0], "%s", path);
}

static nd_status prepend(const char *folder, char **name)
{
    char *whole;
    ND_TRY(nd_fs_format(&whole, "%s/%s", folder, *name));
    free(*name);
    *name = whole;
    return ND_OK;
}

/* Of the names that were found, those of files. */
static nd_status keep_files(const char *path, listing *l)
{
    const bool counts = !strstr(path, "**"); /* which reaches the files in folders too */
    int kept = 0;
    for (int i = 0; i < l->paths.count; i++) {
        char **name = &l->paths.list[i], *file;
        bool folder = false;
        if (l->is_folder && (*name)[0] == '.') {
            continue;
        }
        ND_TRY(l->is_folder ? prepend(path, name) : ND_OK);
        ND_TRY(nd_fs_is_folder(*name, &folder));
        l->folders += folder && counts;
        if (!folder) {
            file = *name;
            *name = l->paths.list[kept];
            l->paths.list[kept++] = file;
        }
    }
    while (l->paths.count > kept) {
        free(l->paths.list[--l->paths.count]);
    }
    return ND_OK;
}

/* *out: to be freed after a failure too. */
static nd_status list_files(const char *path, listing *out)
{
    char *clean = NULL;
    size_t length = strlen(path);
    bool pattern = false;
    nd_status status = ND_OK;
    *out = (listing){0};
    while (length > 1 && path[length - 1] == '/') {
        length--;
    }
    ND_TRY_OUT(nd_fs_format(&clean, "%.*s", (int)length, path));
    ND_TRY_OUT(nd_fs_is_folder(clean, &out->is_folder));
    ND_TRY_OUT(is_pattern(clean, &pattern));
    ND_TRY_OUT(out->is_folder ? nd_fs_list(clean, &out->paths)
               : pattern      ? nd_fs_glob(clean, &out->paths)
                              : list_one(clean, &out->paths));
    ND_TRY_OUT(keep_files(clean, out));
    if (out->paths.count > 0) {
        qsort(out->paths.list, (size_t)out->paths.count, sizeof *out->paths.list, by_bytes);
    }
out:
    free(clean);
    return status;
}

nd_status nd_corpus_files_add(nd_corpus_files *files, const char *path, nd_data_format format)
{
    const size_t before = files->count;
    listing found;
    nd_status status = ND_OK;
    ND_TRY_OUT(list_files(path, &found));
    files->folders += found.folders;
    for (int i = 0; i < found.paths.count; i++) {
        const char *name = found.paths.list[i];
        if (found.is_folder && !is_text(name)) {
            files->skipped++;
            continue;
        }
        ND_TRY_OUT(format == ND_DATA_AUTO ? nd_corpus_check_text(name) : ND_OK);
        ND_TRY_OUT(add_file(files, name, format));
    }
    if (files->count == before) {
        status = found.is_folder
                     ? nd_fail(ND_ERR_DATA,
                               "the folder \"%s\" has no file that ends in .jsonl, .ndjson or "
                               ".txt, also with .gz or .zst; name the files, or a pattern",
                               path)
                     : nd_fail(ND_ERR_DATA, "no file matches \"%s\"", path);
    }
out:
    nd_fs_names_fini(&found.paths);
    return status;
}

nd_status nd_corpus_files_add_tokens(nd_corpus_files *files, const char *path)
{
    listing found;
    nd_status status = list_files(path, &found);
    for (int i = 0; i < found.paths.count && status == ND_OK; i++) {
        const char *name = found.paths.list[i];
        status = holds_tokens(name) ? add_file(files, name, ND_DATA_AUTO) : ND_OK;
    }
    nd_fs_names_fini(&found.paths);
    return status;
}

/* A pattern names what it means; of a folder only the known endings are text. */
nd_status nd_corpus_files_beside_tokens(const char *path, char **text, int64_t *files,
                                        int64_t *folders)
{
    listing found;
    nd_status status = list_files(path, &found);
    *text = NULL;
    *files = 0;
    *folders = found.folders;
    for (int i = 0; i < found.paths.count && status == ND_OK; i++) {
        const char *name = found.paths.list[i];
        if (holds_tokens(name) || nd_ends_with(name, ".idx") || nd_ends_with(name, ".mask")) {
            continue;
        }
        if (found.is_folder && !is_text(name)) {
            (*files)++;
        } else if (!*text) {
            status = nd_fs_format(text, "%s", name);
        }
    }
    nd_fs_names_fini(&found.paths);
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

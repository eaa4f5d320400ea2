// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/text.h"
#include "trainer/corpus/corpus.h"

typedef enum text_kind { KIND_OTHER = 0, KIND_TEXT, KIND_ROWS } text_kind;

static bool ends_with(const char *name, size_t size, const char *suffix)
{
    size_t n = strlen(suffix);
    return size > n && strncasecmp(name + size - n, suffix, n) == 0;
}

/* Bytes of the name without the ending of a compression. */
static size_t plain_size(const char *name)
{
    size_t size = strlen(name);
    return size - (ends_with(name, size, ".gz") ? 3 : ends_with(name, size, ".zst") ? 4 : 0);
}

static text_kind kind_of(const char *name)
{
    return nd_is_name_of_rows(name)                    ? KIND_ROWS
           : ends_with(name, plain_size(name), ".txt") ? KIND_TEXT
                                                       : KIND_OTHER;
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
    /* The bracket with which it begins as JSON does. Without the ending .json, only an object does:
     * in many kinds of text the first line begins with a bracket. */
    const bool json = ends_with(path, plain_size(path), ".json");
    const size_t mark = got >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    const size_t at = pass_space(text, got, mark), next = pass_space(text, got, at + 1);
    if (json && at < got && text[at] == '[') {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" is a JSON array; one object a line is needed (jq -c '.[]' FILE), "
                       "or data.format (--data-format) text takes it as it stands",
                       path);
    }
    return at < got && text[at] == '{' &&
                   (json || (next < got && (text[next] == '"' || text[next] == '}')))
               ? nd_fail(
                     ND_ERR_DATA,
                     "\"%s\" begins as JSON does, but its name does not say whether its lines "
                     "are rows; set data.format (--data-format) to jsonl, or to text to take it "
                     "as it stands",
                     path)
               : ND_OK;
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
    ND_TRY(ND_ARRAY_RESERVE(&files->list, &files->room, files->count + 1));
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

/* Lists the files of a folder, of a pattern, or the path itself, in bytewise order, without
 * folders. *out: to be freed after a failure too. *folders grows by how many were left out. */
static nd_status list_files(const char *path, nd_fs_names *out, bool *is_folder, int64_t *folders)
{
    const bool deep = strstr(path, "**"); /* which reaches the files in folders too */
    char *clean = NULL;
    size_t length = strlen(path);
    int kept = 0;
    bool pattern = false;
    nd_status status = ND_OK;
    *out = (nd_fs_names){0};
    *is_folder = false;
    while (length > 1 && path[length - 1] == '/') {
        length--;
    }
    ND_TRY_OUT(nd_fs_format(&clean, "%.*s", (int)length, path));
    ND_TRY_OUT(nd_fs_is_folder(clean, is_folder));
    ND_TRY_OUT(is_pattern(clean, &pattern));
    if (*is_folder || pattern) {
        ND_TRY_OUT(*is_folder ? nd_fs_list(clean, out) : nd_fs_glob(clean, out));
    } else {
        ND_TRY_OUT(ND_ALLOC(1, &out->list));
        ND_TRY_OUT(nd_fs_format(&out->list[out->count++], "%s", clean));
    }
    for (int i = 0; i < out->count; i++) {
        char *name = out->list[i], *whole;
        bool left_out = *is_folder && name[0] == '.', folder = false;
        ND_TRY_OUT(
            nd_fs_format(&whole, "%s%s%s", *is_folder ? clean : "", *is_folder ? "/" : "", name));
        free(name);
        out->list[i] = whole;
        ND_TRY_OUT(left_out ? ND_OK : nd_fs_is_folder(whole, &folder));
        *folders += folder && !deep;
        if (!folder && !left_out) { /* changes places with one that is not */
            out->list[i] = out->list[kept];
            out->list[kept++] = whole;
        }
    }
    while (out->count > kept) {
        free(out->list[--out->count]);
    }
    if (kept > 0) {
        qsort(out->list, (size_t)kept, sizeof *out->list, by_bytes);
    }
out:
    free(clean);
    return status;
}

nd_status nd_corpus_files_add(nd_corpus_files *files, const char *path, nd_data_format format)
{
    const size_t before = files->count;
    nd_fs_names found;
    bool is_folder;
    nd_status status = ND_OK;
    ND_TRY_OUT(list_files(path, &found, &is_folder, &files->folders));
    for (int i = 0; i < found.count; i++) {
        const char *name = found.list[i];
        if (is_folder && kind_of(name) == KIND_OTHER) {
            files->skipped++;
            continue;
        }
        ND_TRY_OUT(format == ND_DATA_AUTO ? nd_corpus_check_text(name) : ND_OK);
        ND_TRY_OUT(add_file(files, name, format));
    }
    if (files->count == before) {
        status = is_folder
                     ? nd_fail(ND_ERR_DATA,
                               "the folder \"%s\" has no file that ends in .jsonl, .ndjson or "
                               ".txt, also with .gz or .zst; name the files, or a pattern",
                               path)
                     : nd_fail(ND_ERR_DATA, "no file matches \"%s\"", path);
    }
out:
    nd_fs_names_fini(&found);
    return status;
}

/* A pattern names what it means; of a folder only the known endings are text. */
nd_status nd_corpus_files_add_tokens(nd_corpus_files *files, const char *path)
{
    nd_fs_names found;
    bool is_folder;
    nd_status status = list_files(path, &found, &is_folder, &files->folders);
    for (int i = 0; i < found.count && status == ND_OK; i++) {
        const char *name = found.list[i];
        if (nd_ends_with(name, ".bin")) {
            status = add_file(files, name, ND_DATA_AUTO);
        } else if (nd_ends_with(name, ".idx") || nd_ends_with(name, ".mask")) {
            continue; /* it belongs to a .bin */
        } else if (is_folder && kind_of(name) == KIND_OTHER) {
            files->skipped++;
        } else if (!files->text) {
            status = nd_fs_format(&files->text, "%s", name);
        }
    }
    nd_fs_names_fini(&found);
    return status;
}

void nd_corpus_files_say_left_out(const nd_corpus_files *files, const char *path)
{
    if (files->skipped > 0 || files->folders > 0) {
        nd_log_info("\"%s\": %lld files of other kinds and %lld folders in it are not read", path,
                    (long long)files->skipped, (long long)files->folders);
    }
}

void nd_corpus_files_fini(nd_corpus_files *files)
{
    for (size_t i = 0; i < files->count; i++) {
        free(files->list[i].path);
    }
    free(files->list);
    free(files->text);
    *files = (nd_corpus_files){0};
}

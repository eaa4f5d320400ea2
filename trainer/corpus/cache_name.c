// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/base/hash.h"
#include "trainer/corpus/chat.h"
#include "trainer/corpus/token_cache.h"
#include "trainer/text/unicode.h"

enum {
    SETTLE_MS = 20,         /* more than a step of a file system's clock */
    SETTLE_COARSE_MS = 2000 /* of one that counts whole seconds, or two as FAT does */
};

/* The texts are those that the tokens depend on, each with a name and a size. */
static void describe(FILE *out, const char *name, const char *text)
{
    fprintf(out, "%s %zu %s\n", name, strlen(text), text);
}

static nd_status describe_rules(const nd_token_cache_request *request, FILE *out)
{
    const nd_corpus_rules *r = request->job.rules;
    const nd_chat_template *chat = r->chat.template;
    char hex[65] = "bytes";
    ND_TRY(request->tokenizer ? nd_sha256_file(request->tokenizer, hex) : ND_OK);
    fprintf(out, "tokens %d\ntext %d\ntokenizer %s\nrules %d %d %d %d %d %d %d\nskip %lld\n",
            ND_TOKEN_CACHE_VERSION, ND_TEXT_VERSION, hex, r->special_in_text, r->add_special,
            r->append_eod, r->refuse_invalid, r->drop_unknown, r->pairs,
            chat ? (int)(chat->form - nd_chat_forms) + 1 : 0, (long long)request->job.skip_bad);
    describe(out, "unicode", nd_chars_version());
    describe(out, "key", r->json_key);
    describe(out, "separator", r->separator ? r->separator : "");
    if (chat) {
        describe(out, "template", chat->sha256);
        describe(out, "begin", r->chat.bos);
        describe(out, "end", r->chat.eos);
    }
    return ND_OK;
}

/* The tokenizer_config.json, which names the end of text. */
static nd_status describe_config(const char *tokenizer, FILE *out)
{
    char hex[65], *folder = NULL, *config = NULL;
    bool there = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_parent(tokenizer, &folder));
    ND_TRY_OUT(nd_fs_format(&config, "%s/tokenizer_config.json", folder));
    ND_TRY_OUT(nd_fs_exists(config, &there));
    if (there) {
        ND_TRY_OUT(nd_sha256_file(config, hex));
        describe(out, "config", hex);
    }
out:
    free(config);
    free(folder);
    return status;
}

/* A relative path is that of another file in another folder. Numbers of the device and of the inode
 * may be others on another node, or after a remount.
 * *settled: when all files so far may be read, so that a later change has another time. */
static nd_status describe_file(const nd_corpus_file *file, FILE *out, int64_t *settled)
{
    struct stat st;
    nd_fs_kind kind;
    ND_TRY(nd_fs_look(file->path, &kind, &st));
    char *whole = kind == ND_FS_ABSENT ? NULL : realpath(file->path, NULL);
    if (!whole) {
        const int code = kind == ND_FS_ABSENT ? ENOENT : errno;
        return nd_fail(nd_fs_blame(code, ND_ERR_DATA), "\"%s\" cannot be opened: %s", file->path,
                       strerror(code));
    }
    describe(out, "file", whole);
    free(whole);
    fprintf(out, "%d %llu %lld.%09ld %lld.%09ld\n", file->rows, (unsigned long long)st.st_size,
            (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec, (long long)st.st_ctim.tv_sec,
            st.st_ctim.tv_nsec);
    const int64_t step_ms = st.st_ctim.tv_nsec == 0 ? SETTLE_COARSE_MS : SETTLE_MS;
    const int64_t own = st.st_ctim.tv_sec * 1000000000LL + st.st_ctim.tv_nsec + step_ms * 1000000;
    *settled = own > *settled ? own : *settled;
    return ND_OK;
}

/* Waits at most as long as a text of now would need: the clock of another machine may be ahead. */
static void let_settle(int64_t settled)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const int64_t left = settled - (now.tv_sec * 1000000000LL + now.tv_nsec);
    const int64_t most = SETTLE_COARSE_MS * 1000000LL, wait = left < most ? left : most;
    if (wait > 0) {
        nanosleep(&(struct timespec){.tv_sec = wait / 1000000000, .tv_nsec = wait % 1000000000},
                  NULL);
    }
}

nd_status nd_token_cache_folder(const char *asked, char **out)
{
    const char *base = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (asked[0]) {
        ND_TRY(nd_fs_format(out, "%s", asked));
    } else if (base && base[0] == '/') {
        ND_TRY(nd_fs_format(out, "%s/ndtrain", base));
    } else if (home && home[0] == '/') {
        ND_TRY(nd_fs_format(out, "%s/.cache/ndtrain", home));
    } else {
        return nd_fail(ND_ERR_CONFIG, "there is no home folder for the token cache; set "
                                      "data.cache_dir");
    }
    return nd_fs_make_folders(*out, "the token cache", "set data.cache_dir");
}

nd_status nd_token_cache_path(const nd_token_cache_request *request, char **out)
{
    const nd_corpus_files *files = request->job.files;
    char hex[65], *folder = NULL, *text = NULL;
    size_t size;
    int64_t settled = 0;
    FILE *lines = open_memstream(&text, &size);
    nd_status status = ND_OK;
    ND_TRY_OUT(lines ? ND_OK : nd_fail_memory("the name of a token cache"));
    ND_TRY_OUT(nd_token_cache_folder(request->folder, &folder));
    ND_TRY_OUT(describe_rules(request, lines));
    if (request->tokenizer && request->job.rules->append_eod) {
        ND_TRY_OUT(describe_config(request->tokenizer, lines));
    }
    for (size_t i = 0; i < files->count; i++) {
        ND_TRY_OUT(describe_file(&files->list[i], lines, &settled));
    }
    let_settle(settled);
    ND_TRY_OUT(fflush(lines) == 0 ? ND_OK : nd_fail_memory("the name of a token cache"));
    ND_TRY_OUT(nd_sha256(text, size, hex));
    ND_TRY_OUT(nd_fs_format(out, "%s/%.32s.tokens", folder, hex));
out:
    if (lines) {
        fclose(lines);
    }
    free(text);
    free(folder);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
/* Finds a cache by its name, a digest of what the tokens depend on, or encodes the text. */
#include "trainer/corpus/token_cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <utf8proc.h>

#include "runtime/base/clock.h"
#include "runtime/base/hash.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "trainer/corpus/chat.h"
#include "trainer/corpus/token_file.h"

enum {
    HEADER_BYTES = ND_TOKEN_CACHE_HEADER_BYTES,
    CHUNK_BYTES = ND_TOKEN_CACHE_CHUNK_BYTES,
    SETTLE_MS = 20,          /* more than a step of a file system's clock */
    SETTLE_COARSE_MS = 2000, /* of one that counts whole seconds, or two as FAT does */
    WORD_SECONDS = 10
};

/* Reading. */

static nd_status fail_file(const char *name, const char *why)
{
    return nd_fail(ND_ERR_DATA, "the token cache \"%s\" %s", name, why);
}

nd_status nd_token_cache_parse(const uint8_t *data, size_t size, const char *name,
                               nd_token_view *out)
{
    nd_token_cache_header h;
    if (size < HEADER_BYTES) {
        return fail_file(name, "is shorter than its header");
    }
    memcpy(&h, data, sizeof h);
    if (memcmp(h.magic, ND_TOKEN_CACHE_MAGIC, sizeof h.magic) != 0 ||
        h.version != ND_TOKEN_CACHE_VERSION) {
        return fail_file(name, "is none, or of another version");
    }
    if (h.header_sum != nd_hash_64(&h, offsetof(nd_token_cache_header, header_sum)) ||
        (h.width != 2 && h.width != 4) || h.vocab > INT32_MAX) {
        return fail_file(name, "has a damaged header");
    }
    const uint64_t room = size - HEADER_BYTES;
    const bool fits = /* each part alone: the sums below do not overflow */
        h.tokens <= room / h.width && h.documents <= room / 8 && h.spans <= room / 16;
    const uint64_t ends_at = (HEADER_BYTES + (fits ? h.tokens * h.width : 0) + 7) / 8 * 8;
    const uint64_t sums_at = ends_at + (fits ? h.documents * 8 + h.spans * 16 : 0);
    const uint64_t chunks = (sums_at - HEADER_BYTES + CHUNK_BYTES - 1) / CHUNK_BYTES;
    if (h.file_bytes != size || !fits || sums_at > size || sums_at + chunks * 8 != size) {
        return fail_file(name, "has another size than its header says");
    }
    if (h.sums_sum != nd_hash_64(data + sums_at, chunks * 8)) {
        return fail_file(name, "has damaged checksums");
    }
    *out = (nd_token_view){
        .width = h.width,
        .tokens = h.tokens,
        .documents = h.documents,
        .spans = h.spans,
        .vocab = (int32_t)h.vocab,
        .ids = data + HEADER_BYTES,
        .ends = data + ends_at,
        .span_pairs = data + ends_at + h.documents * 8,
        .sums = data + sums_at,
        .chunks = chunks,
    };
    return ND_OK;
}

static nd_status parse_map(void *context)
{
    nd_token_cache *cache = context;
    return nd_token_cache_parse(cache->map.data, cache->map.size, cache->path, &cache->view);
}

static nd_status open_file(const char *path, nd_token_cache **out)
{
    nd_token_cache *cache;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &cache));
    ND_TRY_OUT(nd_fs_format(&cache->path, "%s", path));
    ND_TRY_OUT(nd_fs_map_open(path, ND_ERR_DATA, &cache->map));
    ND_TRY_OUT(nd_fs_map_guard(&cache->map, path, parse_map, cache));
    ND_TRY_OUT(ND_ALLOC(cache->view.chunks + 1, &cache->checked));
    *out = cache;
    cache = NULL;
out:
    nd_token_cache_close(cache);
    return status;
}

void nd_token_cache_close(nd_token_cache *cache)
{
    if (!cache) {
        return;
    }
    nd_fs_map_close(&cache->map);
    free(cache->checked);
    free(cache->path);
    free(cache);
}

static bool is_checked(const nd_token_cache *cache, uint64_t chunk)
{
    return atomic_load_explicit(&cache->checked[chunk], memory_order_relaxed);
}

/* A chunk that is not checked yet will be read whole. */
void nd_token_cache_prefetch(const nd_token_cache *cache, uint64_t offset, uint64_t bytes)
{
    const uint64_t first = (offset - HEADER_BYTES) / CHUNK_BYTES;
    const uint64_t last = (offset + bytes - 1 - HEADER_BYTES) / CHUNK_BYTES;
    const uint64_t begin = is_checked(cache, first) ? offset : HEADER_BYTES + first * CHUNK_BYTES;
    const uint64_t end =
        is_checked(cache, last) ? offset + bytes : HEADER_BYTES + (last + 1) * CHUNK_BYTES;
    nd_fs_map_prefetch(&cache->map, begin, end - begin);
}

nd_status nd_token_cache_check(const nd_token_cache *cache, uint64_t offset, uint64_t bytes)
{
    const nd_token_view *v = &cache->view;
    const uint64_t all = (uint64_t)(v->sums - v->ids), first = offset - HEADER_BYTES;
    ND_ASSERT(offset >= HEADER_BYTES && bytes <= all && first <= all - bytes);
    for (uint64_t at = first / CHUNK_BYTES * CHUNK_BYTES; at < first + bytes; at += CHUNK_BYTES) {
        const uint64_t chunk = at / CHUNK_BYTES;
        uint64_t sum;
        memcpy(&sum, v->sums + 8 * chunk, sizeof sum);
        if (is_checked(cache, chunk)) {
            continue;
        }
        if (nd_hash_64(v->ids + at, nd_min((int64_t)(all - at), CHUNK_BYTES)) != sum) {
            return nd_fail(
                ND_ERR_DATA,
                "the token cache \"%s\" is damaged at byte %llu; delete it, and the next "
                "run encodes the text again",
                cache->path, (unsigned long long)(HEADER_BYTES + at));
        }
        atomic_store_explicit(&cache->checked[chunk], 1, memory_order_relaxed);
    }
    return ND_OK;
}

/* The name. */

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
    describe(out, "unicode", utf8proc_unicode_version());
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
    ND_TRY_OUT(there ? nd_sha256_file(config, hex) : ND_OK);
    if (there) {
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
                                      "data.cache_dir or XDG_CACHE_HOME");
    }
    return nd_fs_make_folders(*out, "the token cache", "set data.cache_dir or XDG_CACHE_HOME");
}

/* The path of the cache, whose folder exists then; owned by the caller. Waits until the time of
 * change of each file has passed. */
static nd_status find_path(const nd_token_cache_request *request, char **out)
{
    const nd_corpus_files *files = request->job.files;
    char hex[65], *folder = NULL, *text = NULL;
    size_t size;
    int64_t settled = 0;
    struct timespec now;
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
    clock_gettime(CLOCK_REALTIME, &now);
    /* At most as long as a text of now would need: the clock of another machine may be ahead. */
    const int64_t most = SETTLE_COARSE_MS * 1000000LL;
    const int64_t wait = nd_min(settled - (now.tv_sec * 1000000000LL + now.tv_nsec), most);
    if (wait > 0) {
        nanosleep(&(struct timespec){.tv_sec = wait / 1000000000, .tv_nsec = wait % 1000000000},
                  NULL);
    }
    ND_TRY_OUT(fflush(lines) == 0 && !ferror(lines) ? ND_OK
                                                    : nd_fail_memory("the name of a token cache"));
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

/* Encoding. */

typedef struct writer {
    const nd_token_cache_request *request;
    nd_token_files file;
    char what[256]; /* the text, for messages */
    double begin, said;
} writer;

static nd_status write_piece(void *context, const nd_corpus_piece *piece, uint64_t bytes)
{
    writer *w = context;
    const uint64_t all = w->request->job.files->bytes;
    const double now = nd_clock_seconds();
    if (now - w->said >= WORD_SECONDS && all > 0) {
        w->said = now;
        nd_log_info("encoding %s: %.0f %%, %.1f MB/s", w->what, 100.0 * (double)bytes / (double)all,
                    (double)bytes * 1e-6 / (now - w->begin));
    }
    return nd_token_files_write(&w->file, piece);
}

static void say_done(const writer *w, const nd_corpus_counts *counts)
{
    const nd_encode_counts *text = &counts->text;
    double seconds = nd_clock_seconds() - w->begin;
    nd_log_info("encoded %s: %lld document%s, %lld tokens, %.2f bytes a token, %.1f s (%.1f MB/s)",
                w->what, (long long)counts->documents, counts->documents == 1 ? "" : "s",
                (long long)counts->tokens,
                counts->tokens > 0 ? (double)text->bytes / (double)counts->tokens : 0.0, seconds,
                seconds > 0 ? (double)text->bytes * 1e-6 / seconds : 0.0);
    if (counts->ignored > 0) {
        nd_log_info("%lld of these tokens count in the loss (%.1f %%)",
                    (long long)(counts->tokens - counts->ignored),
                    100.0 - 100.0 * (double)counts->ignored / (double)counts->tokens);
    }
    if (counts->bad > 0) {
        nd_log_warning("%lld bad rows were left out, as data.skip_bad permits",
                       (long long)counts->bad);
    }
    if (counts->empty > 0) {
        nd_log_info("%lld documents without text were left out", (long long)counts->empty);
    }
    if (text->special > 0) {
        nd_log_info("the text has the writing of special tokens %lld times",
                    (long long)text->special);
    }
    if (counts->doubled > 0) {
        nd_log_warning(
            "%lld documents begin with the beginning of sequence twice: their text begins "
            "with it, and the tokenizer adds it; take it out of the text, or set "
            "data.special_in_text to text",
            (long long)counts->doubled);
    }
    nd_chat_rules_tell(&w->request->job.rules->chat);
    if (counts->stray[0]) {
        nd_log_warning(
            "messages have the key \"%s\", which nothing reads; of a message role, content "
            "and weight count",
            counts->stray);
    }
    if (text->invalid + counts->lone + text->unknown > 0) {
        nd_log_warning("%lld invalid sequences of bytes and %lld halves of surrogate pairs became "
                       "U+FFFD; %lld unknown tokens were written",
                       (long long)text->invalid, (long long)counts->lone, (long long)text->unknown);
    }
}

/* With the .part locked. */
static nd_status encode(writer *w, const nd_tokenizer *tokenizer)
{
    const nd_token_cache_request *r = w->request;
    nd_corpus_counts counts = {0};
    nd_corpus_job job = r->job;
    const char *slash = strrchr(w->file.tokens.path, '/');
    char *now = NULL;
    job.tokenizer = tokenizer;
    job.eod = -1;
    job.context = w;
    job.write = write_piece;
    nd_log_info("encoding %s (%.1f MB) %s %s into the folder %.*s", w->what,
                (double)job.files->bytes * 1e-6, r->tokenizer ? "with" : "as",
                r->tokenizer ? r->tokenizer : "bytes", (int)(slash - w->file.tokens.path),
                w->file.tokens.path);
    if (job.rules->append_eod && r->tokenizer) {
        ND_TRY(nd_corpus_eod(tokenizer, r->tokenizer, &job.eod));
    }
    ND_TRY(nd_corpus_encode(&job, &counts));
    ND_TRY(find_path(r, &now));
    const bool same = strcmp(now, w->file.tokens.path) == 0;
    free(now);
    if (!same) {
        return nd_fail(ND_ERR_DATA,
                       "%s or the tokenizer changed while it was encoded; start again when they "
                       "are complete",
                       w->what);
    }
    ND_TRY(nd_token_files_commit(&w->file));
    say_done(w, &counts);
    return ND_OK;
}

/* Opening. */

/* *out is NULL when there is nothing, or it is damaged; `told`: which is said. */
static nd_status try_open(const char *path, bool told, nd_token_cache **out)
{
    bool there = false;
    *out = NULL;
    ND_TRY(nd_fs_exists(path, &there));
    nd_status status = there ? open_file(path, out) : ND_OK;
    if (status == ND_ERR_DATA) {
        if (told) {
            nd_log_warning("%s; it is made again", nd_error_last()->message);
        }
        nd_error_clear();
        return ND_OK;
    }
    return status;
}

static nd_status check_vocab(const nd_token_cache_request *request, int32_t vocab)
{
    return request->vocab == 0 || vocab <= request->vocab
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "the tokenizer \"%s\" has ids up to %d, but the model's vocab_size is "
                         "%lld; use the tokenizer of this model, or a model with a larger "
                         "vocabulary",
                         request->tokenizer ? request->tokenizer : "bytes", vocab - 1,
                         (long long)request->vocab);
}

static nd_status make_cache(const nd_token_cache_request *request, const char *path,
                            nd_token_cache **out)
{
    const nd_corpus_files *files = request->job.files;
    nd_tokenizer *tokenizer = NULL;
    const nd_token_sharing sharing = {request->job.stop, request->stall_seconds};
    writer w = {.request = request};
    nd_status status = ND_OK;
    snprintf(w.what, sizeof w.what,
             files->count == 1 ? "\"%.200s\"" : "\"%.200s\" and %zu more files",
             files->list[0].path, files->count - 1);
    ND_TRY_OUT(request->tokenizer ? nd_tokenizer_open(request->tokenizer, &tokenizer)
                                  : nd_byte_tokenizer_create(&tokenizer));
    const int32_t vocab = nd_tokenizer_vocab_size(tokenizer);
    ND_TRY_OUT(check_vocab(request, vocab)); /* before a wait, or hours of work, for nothing */
    ND_TRY_OUT(nd_token_files_open(path, vocab, &sharing, &w.file));
    w.begin = w.said = nd_clock_seconds();
    ND_TRY_OUT(try_open(path, true, out)); /* another process may have made it meanwhile */
    if (!*out) {
        ND_TRY_OUT(encode(&w, tokenizer));
        status = open_file(path, out);
    }
out:
    if (status == ND_ERR_CANTCREATE) {
        const nd_error why = *nd_error_last();
        nd_fail(status, "%s; set data.cache_dir to a folder with locks and room for the tokens",
                why.message);
    }
    nd_token_files_fini(&w.file);
    nd_tokenizer_close(tokenizer);
    return status;
}

nd_status nd_token_cache_open(const nd_token_cache_request *request, nd_token_cache **out)
{
    nd_token_cache *cache = NULL;
    char *path = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(find_path(request, &path));
    ND_TRY_OUT(try_open(path, false, &cache));
    ND_TRY_OUT(cache ? ND_OK : make_cache(request, path, &cache));
    ND_TRY_OUT(check_vocab(request, cache->view.vocab));
    *out = cache;
    cache = NULL;
out:
    nd_token_cache_close(cache);
    free(path);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
/* Finds a cache by its name, or waits for the process that writes it, or encodes the text. */
#include "trainer/corpus/token_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "runtime/base/clock.h"
#include "runtime/base/hash.h"
#include "runtime/base/log.h"
#include "trainer/corpus/chat.h"
#include "trainer/corpus/token_file.h"
#include "trainer/text/unicode.h"

enum {
    HEADER_BYTES = ND_TOKEN_CACHE_HEADER_BYTES,
    CHUNK_BYTES = ND_TOKEN_CACHE_CHUNK_BYTES,
    PROGRESS_AT = sizeof(nd_token_cache_header),
    WRITE_BACK_BYTES = 64 << 20,
    SETTLE_MS = 20,          /* more than a step of a file system's clock */
    SETTLE_COARSE_MS = 2000, /* of one that counts whole seconds, or two as FAT does */
    STALL_SECONDS = 300,
    POLL_MS = 20,
    POLL_MS_MAX = 1000,
    WORD_SECONDS = 10
};

/* The name. */

static nd_status describe_string(nd_bytes *out, const char *name, const char *text, size_t size)
{
    char line[64];
    int n = snprintf(line, sizeof line, "%s %zu ", name, size);
    ND_TRY(nd_bytes_add(out, line, (size_t)n));
    ND_TRY(nd_bytes_add(out, text, size));
    return nd_bytes_add(out, "\n", 1);
}

static nd_status describe_rules(const nd_token_cache_request *request, nd_bytes *out)
{
    const nd_corpus_rules *r = request->rules;
    const nd_chat_template *chat = r->chat.template;
    char hex[65] = "bytes", line[256];
    ND_TRY(request->tokenizer ? nd_sha256_file(request->tokenizer, hex) : ND_OK);
    int n =
        snprintf(line, sizeof line,
                 "tokens %d\ntext %d\ntokenizer %s\nrules %d %d %d %d %d %d %d\nskip %lld\n",
                 ND_TOKEN_CACHE_VERSION, ND_TEXT_VERSION, hex, r->special_in_text, r->add_special,
                 r->append_eod, r->refuse_invalid, r->drop_unknown, r->pairs,
                 chat ? (int)(chat->form - nd_chat_forms) + 1 : 0, (long long)request->skip_bad);
    ND_TRY(nd_bytes_add(out, line, (size_t)n));
    ND_TRY(describe_string(out, "unicode", nd_chars_version(), strlen(nd_chars_version())));
    ND_TRY(describe_string(out, "key", r->json_key, strlen(r->json_key)));
    ND_TRY(describe_string(out, "separator", r->separator ? r->separator : "",
                           r->separator ? r->separator_size : 0));
    if (chat) {
        ND_TRY(describe_string(out, "template", chat->sha256, strlen(chat->sha256)));
        ND_TRY(describe_string(out, "begin", r->chat.bos, strlen(r->chat.bos)));
        ND_TRY(describe_string(out, "end", r->chat.eos, strlen(r->chat.eos)));
    }
    return ND_OK;
}

/* The tokenizer_config.json, which names the end of text. */
static nd_status describe_config(const nd_token_cache_request *request, nd_bytes *out)
{
    char hex[65], *folder = NULL, *config = NULL;
    bool there = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_parent(request->tokenizer, &folder));
    ND_TRY_OUT(nd_fs_format(&config, "%s/tokenizer_config.json", folder));
    ND_TRY_OUT(nd_fs_exists(config, &there));
    if (there) {
        ND_TRY_OUT(nd_sha256_file(config, hex));
        ND_TRY_OUT(describe_string(out, "config", hex, sizeof hex - 1));
    }
out:
    free(config);
    free(folder);
    return status;
}

/* When a text that changed then may be read: a change after that has another time. */
static int64_t settled_ns(struct timespec changed)
{
    const int64_t step_ms = changed.tv_nsec == 0 ? SETTLE_COARSE_MS : SETTLE_MS;
    return changed.tv_sec * 1000000000LL + changed.tv_nsec + step_ms * 1000000;
}

/* A relative path is that of another file in another folder. Numbers of the device and of the inode
 * may be others on another node, or after a remount.
 * *settled: when all files so far may be read. */
static nd_status describe_file(const nd_corpus_file *file, nd_bytes *out, int64_t *settled)
{
    struct stat st;
    nd_fs_kind kind;
    char line[256];
    ND_TRY(nd_fs_look(file->path, &kind, &st));
    char *whole = kind == ND_FS_ABSENT ? NULL : realpath(file->path, NULL);
    if (!whole) {
        const int code = kind == ND_FS_ABSENT ? ENOENT : errno;
        return nd_fail(nd_fs_blame(code, ND_ERR_DATA), "\"%s\" cannot be opened: %s", file->path,
                       strerror(code));
    }
    int n = snprintf(line, sizeof line, "%d %llu %lld.%09ld %lld.%09ld\n", file->rows,
                     (unsigned long long)st.st_size, (long long)st.st_mtim.tv_sec,
                     st.st_mtim.tv_nsec, (long long)st.st_ctim.tv_sec, st.st_ctim.tv_nsec);
    const int64_t own = settled_ns(st.st_ctim);
    *settled = own > *settled ? own : *settled;
    nd_status status = describe_string(out, "file", whole, strlen(whole));
    free(whole);
    return status == ND_OK ? nd_bytes_add(out, line, (size_t)n) : status;
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

/* The folder of caches, which exists then; owned by the caller. */
static nd_status find_folder(const char *asked, char **out)
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

/* The path of the cache; owned by the caller. */
static nd_status find_path(const nd_token_cache_request *request, char **out)
{
    const nd_corpus_files *files = request->files;
    char hex[65], *folder = NULL;
    nd_bytes text = {0};
    int64_t settled = 0;
    nd_status status = ND_OK;
    ND_TRY_OUT(find_folder(request->folder, &folder));
    ND_TRY_OUT(describe_rules(request, &text));
    if (request->tokenizer && request->rules->append_eod) {
        ND_TRY_OUT(describe_config(request, &text));
    }
    for (size_t i = 0; i < files->count; i++) {
        ND_TRY_OUT(describe_file(&files->list[i], &text, &settled));
    }
    let_settle(settled);
    ND_TRY_OUT(nd_sha256(text.data, text.count, hex));
    ND_TRY_OUT(nd_fs_format(out, "%s/%.32s.tokens", folder, hex));
out:
    free(text.data);
    free(folder);
    return status;
}

/* Waiting. */

/* What the .part holds at PROGRESS_AT, where a cache that is complete has zeros. */
typedef struct progress {
    uint64_t bytes, all; /* encoded or made durable, and of all */
} progress;

typedef struct waiting {
    const nd_token_cache_request *request;
    const char *path;
    progress seen;
    long pause_ms;        /* the next one: each is longer, or many ranks would load the folder */
    double changed, said; /* when the progress changed, when this process said so; 0: not yet */
} waiting;

static nd_status wait_for_writer(void *context, int fd)
{
    waiting *w = context;
    const nd_token_cache_request *r = w->request;
    const struct timespec pause = {.tv_sec = w->pause_ms / 1000,
                                   .tv_nsec = w->pause_ms % 1000 * 1000000L};
    const double stall = r->stall_seconds > 0 ? r->stall_seconds : STALL_SECONDS;
    const double now = nd_clock_seconds();
    progress is = {0};
    (void)!pread(fd, &is, sizeof is, PROGRESS_AT);
    if (r->stop && atomic_load(r->stop)) {
        return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal");
    }
    if (w->changed == 0 || is.bytes != w->seen.bytes || is.all != w->seen.all) {
        w->seen = is;
        w->changed = now;
    }
    if (now - w->changed > stall) {
        return nd_fail(ND_ERR_HANG,
                       "another process, which encodes the text into \"%s\", made no progress for "
                       "%.0f s; end it, or set data.cache_dir to another folder",
                       w->path, stall);
    }
    if (w->said == 0 || now - w->said >= WORD_SECONDS) {
        w->said = now;
        nd_log_info("waiting for another process, which encodes the text into %s: %.0f %%", w->path,
                    is.all > 0 ? 100.0 * (double)is.bytes / (double)is.all : 0.0);
    }
    nanosleep(&pause, NULL);
    w->pause_ms = w->pause_ms * 3 / 2 < POLL_MS_MAX ? w->pause_ms * 3 / 2 : POLL_MS_MAX;
    return ND_OK;
}

/* Encoding. */

typedef struct writer {
    const nd_token_cache_request *request;
    nd_token_output file;
    nd_u64s ends, spans, sums;
    XXH3_state_t *hash; /* of the chunk that is being filled */
    size_t hashed;      /* bytes of it */
    char what[256];     /* the text, for messages */
    double begin, said;
} writer;

/* Hashes what was appended to the file. */
static nd_status add_sums(writer *w, const uint8_t *data, size_t size)
{
    while (size > 0) {
        size_t n = CHUNK_BYTES - w->hashed < size ? CHUNK_BYTES - w->hashed : size;
        XXH3_64bits_update(w->hash, data, n);
        w->hashed += n;
        data += n;
        size -= n;
        if (w->hashed == CHUNK_BYTES) {
            ND_TRY(nd_u64s_add(&w->sums, XXH3_64bits_digest(w->hash)));
            XXH3_64bits_reset(w->hash);
            w->hashed = 0;
        }
    }
    return ND_OK;
}

static nd_status append(writer *w, const void *data, size_t size)
{
    ND_TRY(nd_token_output_append(&w->file, data, size));
    return add_sums(w, data, size);
}

static nd_status write_piece(void *context, const nd_corpus_piece *piece)
{
    writer *w = context;
    const uint64_t before = w->file.tokens;
    ND_TRY(nd_token_output_add(&w->file, &piece->ids));
    ND_TRY(add_sums(w, w->file.buffer.data, w->file.buffer.count));
    for (size_t i = 0; i < piece->ends.count; i++) {
        ND_TRY(nd_u64s_add(&w->ends, before + (uint64_t)piece->ends.data[i]));
    }
    for (size_t i = 0; i < piece->spans.count; i++) {
        ND_TRY(nd_u64s_add(&w->spans, before + (uint64_t)piece->spans.data[i]));
    }
    return ND_OK;
}

/* For the processes that wait: less long, where it cannot be written. */
static void show_progress(const writer *w, uint64_t bytes, uint64_t all)
{
    const progress is = {bytes, all};
    (void)!pwrite(w->file.fd, &is, sizeof is, PROGRESS_AT);
}

static void report_progress(void *context, uint64_t bytes)
{
    writer *w = context;
    const uint64_t all = w->request->files->bytes;
    const double now = nd_clock_seconds();
    show_progress(w, bytes, all);
    if (now - w->said >= WORD_SECONDS && all > 0) {
        w->said = now;
        nd_log_info("encoding %s: %.0f %%, %.1f MB/s", w->what, 100.0 * (double)bytes / (double)all,
                    (double)bytes * 1e-6 / (now - w->begin));
    }
}

/* What lies in the page cache goes to the disk in pieces, so that those that wait see that it goes
 * on. Some file systems cannot do that. */
static nd_status write_back(const writer *w)
{
    const unsigned flags =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    const uint64_t all = w->file.bytes;
    for (uint64_t at = 0; at < all; at += WRITE_BACK_BYTES) {
        show_progress(w, at, all);
        if (sync_file_range(w->file.fd, (off_t)at, WRITE_BACK_BYTES, flags) != 0) {
            return errno == EINVAL || errno == ENOSYS || errno == ESPIPE
                       ? ND_OK
                       : nd_fail(ND_ERR_CANTCREATE, "\"%s\" could not be made durable: %s",
                                 w->file.part, strerror(errno));
        }
    }
    show_progress(w, all, all);
    return ND_OK;
}

static nd_status finish(writer *w, int32_t vocab)
{
    static const uint8_t zeros[HEADER_BYTES];
    struct stat st;
    nd_token_cache_header h = {.version = ND_TOKEN_CACHE_VERSION,
                               .width = (uint32_t)w->file.width,
                               .tokens = w->file.tokens,
                               .documents = w->ends.count,
                               .spans = w->spans.count / 2,
                               .vocab = (uint64_t)vocab};
    memcpy(h.magic, ND_TOKEN_CACHE_MAGIC, sizeof h.magic);
    ND_TRY(append(w, zeros, (size_t)(-w->file.bytes & 7)));
    ND_TRY(append(w, w->ends.data, w->ends.count * 8));
    ND_TRY(append(w, w->spans.data, w->spans.count * 8));
    if (w->hashed > 0) {
        ND_TRY(nd_u64s_add(&w->sums, XXH3_64bits_digest(w->hash)));
    }
    ND_TRY(nd_token_output_append(&w->file, w->sums.data, w->sums.count * 8));
    h.sums_sum = XXH3_64bits(w->sums.data, w->sums.count * 8);
    h.file_bytes = w->file.bytes;
    h.header_sum = XXH3_64bits(&h, offsetof(nd_token_cache_header, header_sum));
    ND_TRY(write_back(w));
    ND_TRY(nd_fs_pwrite(w->file.fd, w->file.part, zeros, sizeof zeros, 0));
    ND_TRY(nd_fs_pwrite(w->file.fd, w->file.part, &h, sizeof h, 0));
    if (fstat(w->file.fd, &st) == 0) { /* others may have had to write it, if this process died */
        (void)!fchmod(w->file.fd, st.st_mode & 0755);
    }
    ND_TRY(nd_token_output_sync(&w->file));
    return nd_token_output_rename(&w->file);
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
    nd_chat_rules_tell(&w->request->rules->chat);
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

/* A text whose name is another one when it is encoded has changed meanwhile. */
static nd_status check_unchanged(const writer *w)
{
    char *now = NULL;
    ND_TRY(find_path(w->request, &now));
    const bool same = strcmp(now, w->file.path) == 0;
    free(now);
    return same ? ND_OK
                : nd_fail(ND_ERR_DATA,
                          "%s or the tokenizer changed while it was encoded; start again when they "
                          "are complete",
                          w->what);
}

/* With the .part locked. */
static nd_status encode(writer *w, const nd_tokenizer *tokenizer)
{
    const nd_token_cache_request *r = w->request;
    nd_corpus_counts counts = {0};
    nd_corpus_job job = {.files = r->files,
                         .rules = r->rules,
                         .tokenizer = tokenizer,
                         .eod = -1,
                         .threads = r->threads,
                         .skip_bad = r->skip_bad,
                         .stop = r->stop,
                         .context = w,
                         .write = write_piece,
                         .progress = report_progress};
    const char *slash = strrchr(w->file.path, '/');
    w->hash = XXH3_createState();
    if (!w->hash) {
        return nd_fail_memory("a checksum");
    }
    XXH3_64bits_reset(w->hash);
    nd_log_info("encoding %s (%.1f MB) %s %s into the folder %.*s", w->what,
                (double)r->files->bytes * 1e-6, r->tokenizer ? "with" : "as",
                r->tokenizer ? r->tokenizer : "bytes", (int)(slash - w->file.path), w->file.path);
    if (r->rules->append_eod && r->tokenizer) {
        ND_TRY(nd_corpus_eod(tokenizer, r->tokenizer, &job.eod));
    }
    ND_TRY(nd_corpus_encode(&job, &counts));
    if (counts.tokens > 0 && counts.ignored == counts.tokens) {
        return nd_fail(ND_ERR_DATA,
                       "none of the %lld tokens of %s counts in the loss; completions, or turns of "
                       "the assistant, are missing",
                       (long long)counts.tokens, w->what);
    }
    ND_TRY(check_unchanged(w));
    ND_TRY(finish(w, nd_tokenizer_vocab_size(tokenizer)));
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
    nd_status status = there ? nd_token_cache_open_file(path, out) : ND_OK;
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

/* Alone, with the .part locked; another process may have made the cache meanwhile. */
static nd_status find_or_encode(writer *w, const nd_tokenizer *tokenizer, nd_token_cache **out)
{
    ND_TRY(try_open(w->file.path, true, out));
    if (*out) {
        return ND_OK;
    }
    ND_TRY(encode(w, tokenizer));
    return nd_token_cache_open_file(w->file.path, out);
}

static nd_status make(const nd_token_cache_request *request, const char *path, nd_token_cache **out)
{
    const nd_corpus_files *files = request->files;
    nd_tokenizer *tokenizer = NULL;
    waiting wait = {.request = request, .path = path, .pause_ms = POLL_MS};
    writer w = {.request = request};
    nd_status status = ND_OK;
    snprintf(w.what, sizeof w.what,
             files->count == 1 ? "\"%.200s\"" : "\"%.200s\" and %zu more files",
             files->list[0].path, files->count - 1);
    ND_TRY_OUT(request->tokenizer ? nd_tokenizer_open(request->tokenizer, &tokenizer)
                                  : nd_byte_tokenizer_create(&tokenizer));
    const int32_t vocab = nd_tokenizer_vocab_size(tokenizer);
    ND_TRY_OUT(
        check_vocab(request, vocab)); /* before a wait, or hours of work, that would end so */
    ND_TRY_OUT(nd_token_output_open(path, vocab, HEADER_BYTES,
                                    &(nd_token_sharing){wait_for_writer, &wait}, &w.file));
    w.begin = w.said = nd_clock_seconds();
    ND_TRY_OUT(find_or_encode(&w, tokenizer, out));
out:
    if (status == ND_ERR_CANTCREATE) {
        const nd_error why = *nd_error_last();
        nd_fail(status, "%s; set data.cache_dir to a folder with locks and room for the tokens",
                why.message);
    }
    nd_token_output_fini(&w.file);
    XXH3_freeState(w.hash);
    free(w.ends.data);
    free(w.spans.data);
    free(w.sums.data);
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
    ND_TRY_OUT(cache ? ND_OK : make(request, path, &cache));
    ND_TRY_OUT(check_vocab(request, cache->view.vocab));
    *out = cache;
    cache = NULL;
out:
    nd_token_cache_close(cache);
    free(path);
    return status;
}

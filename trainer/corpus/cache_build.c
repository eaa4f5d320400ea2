// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/cache_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "trainer/corpus/chat.h"
#include "trainer/corpus/token_file.h"

enum {
    HEADER_BYTES = ND_TOKEN_CACHE_HEADER_BYTES,
    CHUNK_BYTES = ND_TOKEN_CACHE_CHUNK_BYTES,
    WORD_SECONDS = 10
};

typedef struct writer {
    nd_token_output file;
    nd_u64s ends, spans, sums;
    XXH3_state_t *hash; /* of the chunk that is being filled */
    size_t hashed;      /* bytes of it */
    const nd_cache_lock *lock;
    const char *what;
    uint64_t all_bytes;
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

static void report_progress(void *context, uint64_t bytes)
{
    writer *w = context;
    double now = nd_clock_seconds();
    nd_cache_lock_progress(w->lock, bytes, w->all_bytes); /* those that wait see that it goes on */
    if (now - w->said >= WORD_SECONDS && w->all_bytes > 0) {
        w->said = now;
        nd_log_info("encoding %s: %.0f %%, %.1f MB/s", w->what,
                    100.0 * (double)bytes / (double)w->all_bytes,
                    (double)bytes * 1e-6 / (now - w->begin));
    }
}

/* What lies in the page cache goes to the disk in pieces, so that those that wait see that it goes
 * on. Some file systems cannot do that. */
static nd_status write_back(const writer *w)
{
    enum { PIECE_BYTES = 64 << 20 };
    const unsigned flags =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    const uint64_t all = w->file.bytes;
    for (uint64_t at = 0; at < all; at += PIECE_BYTES) {
        nd_cache_lock_progress(w->lock, at, all);
        if (sync_file_range(w->file.fd, (off_t)at, PIECE_BYTES, flags) != 0) {
            return errno == EINVAL || errno == ENOSYS || errno == ESPIPE
                       ? ND_OK
                       : nd_fail(ND_ERR_CANTCREATE, "\"%s\" could not be made durable: %s",
                                 w->file.temporary, strerror(errno));
        }
    }
    nd_cache_lock_progress(w->lock, all, all);
    return ND_OK;
}

static nd_status finish(writer *w, int32_t vocab, const char *path)
{
    static const uint8_t zeros[HEADER_BYTES];
    nd_cache_header h = {.version = ND_CACHE_VERSION,
                         .width = (uint32_t)w->file.width,
                         .tokens = w->file.tokens,
                         .documents = w->ends.count,
                         .spans = w->spans.count / 2,
                         .vocab = (uint64_t)vocab};
    memcpy(h.magic, ND_CACHE_MAGIC, sizeof h.magic);
    ND_TRY(append(w, zeros, (size_t)(-w->file.bytes & 7)));
    ND_TRY(append(w, w->ends.data, w->ends.count * 8));
    ND_TRY(append(w, w->spans.data, w->spans.count * 8));
    if (w->hashed > 0) {
        ND_TRY(nd_u64s_add(&w->sums, XXH3_64bits_digest(w->hash)));
    }
    ND_TRY(nd_token_output_append(&w->file, w->sums.data, w->sums.count * 8));
    h.sums_sum = XXH3_64bits(w->sums.data, w->sums.count * 8);
    h.file_bytes = w->file.bytes;
    h.header_sum = XXH3_64bits(&h, offsetof(nd_cache_header, header_sum));
    ND_TRY(nd_fs_pwrite(w->file.fd, w->file.temporary, zeros, sizeof zeros, 0));
    ND_TRY(nd_fs_pwrite(w->file.fd, w->file.temporary, &h, sizeof h, 0));
    ND_TRY(write_back(w));
    ND_TRY(nd_token_output_sync(&w->file));
    ND_TRY(nd_token_output_set_path(&w->file, path));
    return nd_token_output_rename(&w->file);
}

static void say_done(const writer *w, const nd_corpus_rules *rules, const nd_corpus_counts *counts)
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
    nd_chat_rules_tell(&rules->chat);
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

nd_status nd_cache_open_tokenizer(const nd_token_cache_request *request, nd_tokenizer **out)
{
    return request->tokenizer ? nd_tokenizer_open(request->tokenizer, out)
                              : nd_byte_tokenizer_create(out);
}

nd_status nd_cache_check_vocab(const nd_token_cache_request *request, int32_t vocab)
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

/* The path comes from the contents that were encoded. */
static nd_status encode(writer *w, const nd_token_cache_request *request, const nd_cache_key *key,
                        const nd_tokenizer *tokenizer, char **path)
{
    nd_corpus_counts counts = {0};
    nd_corpus_hash *hashes;
    ND_TRY(ND_ALLOC(request->files->count, &hashes));
    nd_corpus_job job = {.files = request->files,
                         .rules = request->rules,
                         .tokenizer = tokenizer,
                         .eod = -1,
                         .threads = request->threads,
                         .skip_bad = request->skip_bad,
                         .stop = request->stop,
                         .hashes = hashes,
                         .context = w,
                         .write = write_piece,
                         .progress = report_progress};
    nd_status status = ND_OK;
    if (request->rules->append_eod && request->tokenizer) {
        ND_TRY_OUT(nd_corpus_eod(tokenizer, request->tokenizer, &job.eod));
    }
    ND_TRY_OUT(nd_corpus_encode(&job, &counts));
    if (counts.tokens > 0 && counts.ignored == counts.tokens) {
        ND_TRY_OUT(nd_fail(ND_ERR_DATA,
                           "none of the %lld tokens of %s counts in the loss; completions, or "
                           "turns of the assistant, are missing",
                           (long long)counts.tokens, w->what));
    }
    ND_TRY_OUT(nd_cache_key_check(key));
    ND_TRY_OUT(nd_cache_key_path(key, hashes, path));
    ND_TRY_OUT(finish(w, nd_tokenizer_vocab_size(tokenizer), *path));
    say_done(w, request->rules, &counts);
out:
    free(hashes);
    return status;
}

nd_status nd_cache_build(const nd_token_cache_request *request, const nd_cache_key *key,
                         const nd_cache_lock *lock, char **path)
{
    nd_tokenizer *tokenizer = NULL;
    char what[256], *made = NULL;
    const nd_corpus_files *files = request->files;
    snprintf(what, sizeof what, files->count == 1 ? "\"%.200s\"" : "\"%.200s\" and %zu more files",
             files->list[0].path, files->count - 1);
    writer w = {.file = {.fd = -1},
                .lock = lock,
                .what = what,
                .all_bytes = files->bytes,
                .begin = nd_clock_seconds()};
    w.said = w.begin;
    nd_status status = nd_cache_open_tokenizer(request, &tokenizer);
    ND_TRY_OUT(status);
    const int32_t vocab = nd_tokenizer_vocab_size(tokenizer);
    ND_TRY_OUT(nd_cache_check_vocab(request, vocab));
    w.hash = XXH3_createState();
    if (!w.hash) {
        ND_TRY_OUT(nd_fail_memory("a checksum"));
    }
    XXH3_64bits_reset(w.hash);
    nd_log_info("encoding %s (%.1f MB) %s %s into the folder %s", what, (double)files->bytes * 1e-6,
                request->tokenizer ? "with" : "as",
                request->tokenizer ? request->tokenizer : "bytes", key->folder);
    nd_token_output_remove_left(key->temporary);
    ND_TRY_OUT(nd_token_output_open(key->temporary, vocab, HEADER_BYTES, &w.file));
    ND_TRY_OUT(encode(&w, request, key, tokenizer, &made));
    *path = made;
    made = NULL;
out:
    if (status == ND_ERR_CANTCREATE) {
        const nd_error why = *nd_error_last();
        nd_fail(status, "%s; set data.cache_dir to a folder with room for the tokens", why.message);
    }
    free(made);
    nd_token_output_fini(&w.file);
    XXH3_freeState(w.hash);
    free(w.ends.data);
    free(w.spans.data);
    free(w.sums.data);
    nd_tokenizer_close(tokenizer);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/token_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "trainer/corpus/token_file.h"

enum {
    VERSION = 1,
    HEADER_BYTES = ND_TOKEN_CACHE_HEADER_BYTES,
    CHUNK_BYTES = ND_TOKEN_CACHE_CHUNK_BYTES,
    STALL_SECONDS = 300,
    POLL_MS = 20,
    WORD_SECONDS = 10
};

static const char magic[8] = "NDTOKENS";

/* The first bytes of a file; zeros follow up to HEADER_BYTES. Then come the ids, zeros up to a
 * multiple of 8 bytes, ends, spans, and the checksums of all that in chunks. */
typedef struct header {
    char magic[8];
    uint32_t version, width;
    uint64_t tokens, documents, spans, vocab, file_bytes;
    uint64_t sums_sum;   /* checksum of the checksums */
    uint64_t header_sum; /* of all above */
} header;

/* Reading. */

static nd_status fail_file(const char *name, const char *why)
{
    return nd_fail(ND_ERR_DATA, "the token cache \"%s\" %s", name, why);
}

/* The sizes that the header gives, without overflow: each part fits into the file alone. */
static bool sizes_fit(const header *h, size_t size, uint64_t *ends_at, uint64_t *sums_at,
                      uint64_t *chunks)
{
    uint64_t room = size - HEADER_BYTES;
    if (h->tokens > room / h->width || h->documents > room / 8 || h->spans > room / 16) {
        return false;
    }
    *ends_at = (HEADER_BYTES + h->tokens * h->width + 7) / 8 * 8;
    *sums_at = *ends_at + h->documents * 8 + h->spans * 16;
    *chunks = (*sums_at - HEADER_BYTES + CHUNK_BYTES - 1) / CHUNK_BYTES;
    return *sums_at <= size && *sums_at + *chunks * 8 == size;
}

nd_status nd_token_cache_parse(const uint8_t *data, size_t size, const char *name,
                               nd_token_view *out)
{
    header h;
    uint64_t ends_at, sums_at, chunks;
    if (size < HEADER_BYTES) {
        return fail_file(name, "is shorter than its header");
    }
    memcpy(&h, data, sizeof h);
    if (memcmp(h.magic, magic, sizeof magic) != 0 || h.version != VERSION) {
        return fail_file(name, "is none, or of another version");
    }
    if (h.header_sum != XXH3_64bits(&h, offsetof(header, header_sum)) ||
        (h.width != 2 && h.width != 4) || h.vocab > INT32_MAX) {
        return fail_file(name, "has a damaged header");
    }
    if (h.file_bytes != size || !sizes_fit(&h, size, &ends_at, &sums_at, &chunks)) {
        return fail_file(name, "has another size than its header says");
    }
    if (h.sums_sum != XXH3_64bits(data + sums_at, chunks * 8)) {
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

static uint64_t u64_at(const uint8_t *p, uint64_t index)
{
    uint64_t x;
    memcpy(&x, p + 8 * index, sizeof x);
    return x;
}

nd_status nd_token_cache_check(const nd_token_cache *cache, uint64_t offset, uint64_t bytes)
{
    const nd_token_view *v = &cache->view;
    const uint64_t end = (uint64_t)(v->sums - cache->map.data);
    ND_ASSERT(offset >= HEADER_BYTES && bytes <= end - HEADER_BYTES && offset <= end - bytes);
    uint64_t first = (offset - HEADER_BYTES) / CHUNK_BYTES;
    for (uint64_t i = first; bytes > 0 && i <= (offset + bytes - 1 - HEADER_BYTES) / CHUNK_BYTES;
         i++) {
        if (atomic_load_explicit(&cache->checked[i], memory_order_relaxed)) {
            continue;
        }
        uint64_t begin = HEADER_BYTES + i * CHUNK_BYTES;
        uint64_t n = end - begin < CHUNK_BYTES ? end - begin : CHUNK_BYTES;
        if (XXH3_64bits(cache->map.data + begin, n) != u64_at(v->sums, i)) {
            return nd_fail(
                ND_ERR_DATA,
                "the token cache \"%s\" is damaged at byte %llu; delete it, and the next "
                "run encodes the text again",
                cache->path, (unsigned long long)begin);
        }
        atomic_store_explicit(&cache->checked[i], 1, memory_order_relaxed);
    }
    return ND_OK;
}

/* Writing. */

typedef struct u64s {
    uint64_t *data;
    size_t count, room;
} u64s;

static nd_status u64s_add(u64s *list, uint64_t value)
{
    void *place = list->data;
    nd_status status = nd_array_reserve(&place, &list->room, list->count + 1, sizeof value);
    list->data = place;
    ND_TRY(status);
    list->data[list->count++] = value;
    return ND_OK;
}

typedef struct writer {
    nd_token_output file;
    u64s ends, spans, sums;
    XXH3_state_t *hash; /* of the chunk that is being filled */
    size_t hashed;      /* bytes of it */
    int lock;           /* descriptor of the lock file, whose first bytes are the progress */
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
            ND_TRY(u64s_add(&w->sums, XXH3_64bits_digest(w->hash)));
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
        ND_TRY(u64s_add(&w->ends, before + (uint64_t)piece->ends.data[i]));
    }
    for (size_t i = 0; i < piece->spans.count; i++) {
        ND_TRY(u64s_add(&w->spans, before + (uint64_t)piece->spans.data[i]));
    }
    return ND_OK;
}

static void report_progress(void *context, uint64_t bytes)
{
    writer *w = context;
    double now = nd_clock_seconds();
    if (w->lock >= 0) { /* those who wait see that it goes on */
        uint64_t progress[2] = {bytes, w->all_bytes};
        (void)!pwrite(w->lock, progress, sizeof progress, 0);
    }
    if (now - w->said >= WORD_SECONDS && w->all_bytes > 0) {
        w->said = now;
        nd_log_info("encoding %s: %.0f %%, %.1f MB/s", w->what,
                    100.0 * (double)bytes / (double)w->all_bytes,
                    (double)bytes * 1e-6 / (now - w->begin));
    }
}

static nd_status finish(writer *w, int32_t vocab)
{
    static const uint8_t zeros[HEADER_BYTES];
    header h = {.version = VERSION,
                .width = (uint32_t)w->file.width,
                .tokens = w->file.tokens,
                .documents = w->ends.count,
                .spans = w->spans.count / 2,
                .vocab = (uint64_t)vocab};
    memcpy(h.magic, magic, sizeof magic);
    ND_TRY(append(w, zeros, (size_t)(-w->file.bytes & 7)));
    ND_TRY(append(w, w->ends.data, w->ends.count * 8));
    ND_TRY(append(w, w->spans.data, w->spans.count * 8));
    if (w->hashed > 0) {
        ND_TRY(u64s_add(&w->sums, XXH3_64bits_digest(w->hash)));
    }
    ND_TRY(nd_token_output_append(&w->file, w->sums.data, w->sums.count * 8));
    h.sums_sum = XXH3_64bits(w->sums.data, w->sums.count * 8);
    h.file_bytes = w->file.bytes;
    h.header_sum = XXH3_64bits(&h, offsetof(header, header_sum));
    ND_TRY(nd_fs_pwrite(w->file.fd, w->file.temporary, zeros, sizeof zeros, 0));
    ND_TRY(nd_fs_pwrite(w->file.fd, w->file.temporary, &h, sizeof h, 0));
    ND_TRY(nd_token_output_sync(&w->file));
    return nd_token_output_rename(&w->file);
}

static void say_done(const writer *w, const nd_corpus_counts *counts)
{
    const nd_encode_counts *text = &counts->text;
    double seconds = nd_clock_seconds() - w->begin;
    nd_log_info("encoded %s: %lld documents, %lld tokens, %.2f bytes a token, %.1f s (%.1f MB/s)",
                w->what, (long long)counts->documents, (long long)counts->tokens,
                counts->tokens > 0 ? (double)text->bytes / (double)counts->tokens : 0.0, seconds,
                seconds > 0 ? (double)text->bytes * 1e-6 / seconds : 0.0);
    if (counts->ignored > 0) {
        nd_log_info("%lld of these tokens count in the loss (%.1f %%)",
                    (long long)(counts->tokens - counts->ignored),
                    100.0 - 100.0 * (double)counts->ignored / (double)counts->tokens);
    }
    if (text->special > 0) {
        nd_log_info("the text has the writing of special tokens %lld times",
                    (long long)text->special);
    }
    if (text->invalid + counts->lone + text->unknown > 0) {
        nd_log_warning("%lld invalid sequences of bytes and %lld halves of surrogate pairs became "
                       "U+FFFD; %lld unknown tokens were written",
                       (long long)text->invalid, (long long)counts->lone, (long long)text->unknown);
    }
}

static nd_status encode(writer *w, const nd_token_cache_request *request,
                        const nd_tokenizer *tokenizer)
{
    nd_corpus_counts counts = {0};
    nd_corpus_job job = {.files = request->files,
                         .rules = request->rules,
                         .tokenizer = tokenizer,
                         .eod = -1,
                         .threads = request->threads,
                         .context = w,
                         .write = write_piece,
                         .progress = report_progress};
    if (request->rules->append_eod) {
        ND_TRY(nd_corpus_eod(tokenizer, request->tokenizer, &job.eod));
    }
    ND_TRY(nd_corpus_encode(&job, &counts));
    if (counts.tokens > 0 && counts.ignored == counts.tokens) {
        return nd_fail(ND_ERR_DATA,
                       "none of the %lld tokens of %s counts in the loss; completions, or turns of "
                       "the assistant, are missing",
                       (long long)counts.tokens, w->what);
    }
    ND_TRY(finish(w, nd_tokenizer_vocab_size(tokenizer)));
    say_done(w, &counts);
    return ND_OK;
}

static nd_status build(const nd_token_cache_request *request, const char *path, int lock)
{
    nd_tokenizer *tokenizer = NULL;
    char what[256];
    const nd_corpus_files *files = request->files;
    snprintf(what, sizeof what, files->count == 1 ? "\"%.200s\"" : "\"%.200s\" and %zu more files",
             files->list[0].path, files->count - 1);
    writer w = {.file = {.fd = -1},
                .lock = lock,
                .what = what,
                .all_bytes = files->bytes,
                .begin = nd_clock_seconds()};
    w.said = w.begin;
    nd_status status = nd_tokenizer_open(request->tokenizer, &tokenizer);
    ND_TRY_OUT(status);
    w.hash = XXH3_createState();
    if (!w.hash) {
        ND_TRY_OUT(nd_fail_memory("a checksum"));
    }
    XXH3_64bits_reset(w.hash);
    nd_log_info("encoding %s (%.1f MB) with %s into %s", what, (double)files->bytes * 1e-6,
                request->tokenizer, path);
    ND_TRY_OUT(
        nd_token_output_open(path, nd_tokenizer_vocab_size(tokenizer), HEADER_BYTES, &w.file));
    ND_TRY_OUT(encode(&w, request, tokenizer));
out:
    nd_token_output_fini(&w.file);
    XXH3_freeState(w.hash);
    free(w.ends.data);
    free(w.spans.data);
    free(w.sums.data);
    nd_tokenizer_close(tokenizer);
    return status;
}

/* Its name. */

enum { SAMPLES = 16, SAMPLE_BYTES = 4096 };

/* Size, time of change and samples of the content of a file. */
static nd_status describe_file(const nd_corpus_file *file, nd_bytes *out)
{
    uint8_t *samples = NULL;
    struct stat st;
    char hex[65], line[256];
    nd_status status = ND_OK;
    int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &st) != 0) {
        ND_TRY_OUT(
            nd_fail(ND_ERR_DATA, "\"%s\" cannot be opened: %s", file->path, strerror(errno)));
    }
    size_t room = (size_t)SAMPLES * SAMPLE_BYTES, size = (size_t)st.st_size;
    size_t used = size < room ? size : room;
    ND_TRY_OUT(nd_alloc(room, 1, (void **)&samples));
    if (size <= room) {
        ND_TRY_OUT(nd_fs_pread(fd, file->path, samples, size, 0));
    }
    for (size_t i = 0; size > room && i < SAMPLES; i++) {
        size_t at = i == SAMPLES - 1 ? size - SAMPLE_BYTES : (size - SAMPLE_BYTES) / SAMPLES * i;
        ND_TRY_OUT(
            nd_fs_pread(fd, file->path, samples + i * SAMPLE_BYTES, SAMPLE_BYTES, (int64_t)at));
    }
    ND_TRY_OUT(nd_fs_sha256(samples, used, hex));
    int n =
        snprintf(line, sizeof line, "file %d %llu %lld.%09ld %s\n", file->rows,
                 (unsigned long long)size, (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec, hex);
    ND_TRY_OUT(nd_bytes_add(out, line, (size_t)n));
out:
    if (fd >= 0) {
        close(fd);
    }
    free(samples);
    return status;
}

static nd_status describe_string(nd_bytes *out, const char *key, const char *text, size_t size)
{
    char line[64];
    int n = snprintf(line, sizeof line, "%s %zu ", key, size);
    ND_TRY(nd_bytes_add(out, line, (size_t)n));
    ND_TRY(nd_bytes_add(out, text, size));
    return nd_bytes_add(out, "\n", 1);
}

/* All that the tokens depend on, as a text. */
static nd_status describe(const nd_token_cache_request *request, nd_bytes *out)
{
    const nd_corpus_rules *r = request->rules;
    char hex[65], line[256];
    char *folder = NULL, *config = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_sha256_file(request->tokenizer, hex));
    int n = snprintf(line, sizeof line, "tokens %d\ntokenizer %s\nrules %d %d %d %d %d %d %d\n",
                     VERSION, hex, r->special_in_text, r->add_special, r->append_eod,
                     r->refuse_invalid, r->drop_unknown, r->pairs, r->chat);
    ND_TRY_OUT(nd_bytes_add(out, line, (size_t)n));
    ND_TRY_OUT(describe_string(out, "key", r->json_key, strlen(r->json_key)));
    ND_TRY_OUT(describe_string(out, "separator", r->separator ? r->separator : "",
                               r->separator ? r->separator_size : 0));
    ND_TRY_OUT(nd_fs_parent(request->tokenizer, &folder));
    ND_TRY_OUT(nd_fs_format(&config, "%s/tokenizer_config.json", folder));
    if (r->append_eod && nd_fs_exists(config)) { /* it names the end of text */
        ND_TRY_OUT(nd_fs_sha256_file(config, hex));
        ND_TRY_OUT(describe_string(out, "config", hex, sizeof hex - 1));
    }
    for (size_t i = 0; i < request->files->count; i++) {
        ND_TRY_OUT(describe_file(&request->files->list[i], out));
    }
out:
    free(config);
    free(folder);
    return status;
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
    nd_status status = nd_fs_make_folders(*out, "the token cache", "set data.cache_dir");
    if (status != ND_OK) {
        free(*out);
        *out = NULL;
    }
    return status;
}

static nd_status find_path(const nd_token_cache_request *request, char **out)
{
    nd_bytes text = {0};
    char hex[65], *folder = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(find_folder(request->folder, &folder));
    ND_TRY_OUT(describe(request, &text));
    ND_TRY_OUT(nd_fs_sha256(text.data, text.count, hex));
    ND_TRY_OUT(nd_fs_format(out, "%s/%.32s.tokens", folder, hex));
out:
    free(text.data);
    free(folder);
    return status;
}

/* One writer. */

/* Opens what is there. *out is NULL when there is nothing, or it is damaged and made again. */
static nd_status try_open(const char *path, nd_token_cache **out)
{
    *out = NULL;
    if (!nd_fs_exists(path)) {
        return ND_OK;
    }
    nd_status status = open_file(path, out);
    if (status == ND_ERR_DATA) {
        nd_log_warning("%s; it is made again", nd_error_last()->message);
        nd_error_clear();
        return ND_OK;
    }
    return status;
}

typedef struct wait {
    const char *path;
    double stall;         /* seconds */
    uint64_t progress[2]; /* bytes encoded, of all */
    double changed, said; /* when the progress changed, when this process said so */
} wait;

/* Another process has the lock: waits a little. ND_ERR_HANG when it makes no progress. */
static nd_status wait_a_little(wait *w, int lock)
{
    const struct timespec pause = {.tv_nsec = POLL_MS * 1000000L};
    uint64_t progress[2] = {0, 0};
    double now = nd_clock_seconds();
    (void)!pread(lock, progress, sizeof progress, 0);
    if (w->changed == 0 || memcmp(progress, w->progress, sizeof progress) != 0) {
        memcpy(w->progress, progress, sizeof progress);
        w->changed = now;
    }
    if (now - w->changed > w->stall) {
        return nd_fail(ND_ERR_HANG,
                       "another process writes the token cache \"%s\" and made no progress for "
                       "%.0f s; end it, or set data.cache_dir to another folder",
                       w->path, w->stall);
    }
    if (w->said == 0 || now - w->said >= WORD_SECONDS) {
        w->said = now;
        nd_log_info("waiting for another process, which encodes the text into %s: %.0f %%", w->path,
                    progress[1] > 0 ? 100.0 * (double)progress[0] / (double)progress[1] : 0.0);
    }
    nanosleep(&pause, NULL);
    return ND_OK;
}

/* Temporary files of processes that were killed. */
static void remove_left_over(const char *path)
{
    char *pattern = NULL;
    glob_t found = {0};
    if (nd_fs_format(&pattern, "%s.tmp-*", path) == ND_OK &&
        glob(pattern, GLOB_NOSORT, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) {
            unlink(found.gl_pathv[i]);
        }
    }
    globfree(&found);
    free(pattern);
}

/* With the lock, or where the file system has no locks. */
static nd_status build_and_open(const nd_token_cache_request *request, const char *path, int lock,
                                nd_token_cache **out)
{
    ND_TRY(try_open(path, out));
    if (*out) {
        return ND_OK;
    }
    remove_left_over(path);
    ND_TRY(build(request, path, lock));
    return open_file(path, out);
}

static nd_status open_locked(const nd_token_cache_request *request, const char *path,
                             const char *lock_path, nd_token_cache **out)
{
    wait w = {.path = path,
              .stall = request->stall_seconds > 0 ? request->stall_seconds : STALL_SECONDS};
    nd_status status = ND_OK;
    int lock = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock < 0) {
        return nd_fail(ND_ERR_CANTCREATE, "\"%s\" cannot be created: %s; set data.cache_dir",
                       lock_path, strerror(errno));
    }
    while (status == ND_OK && !*out) {
        if (flock(lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) {
            status = build_and_open(request, path, lock, out);
            unlink(lock_path); /* those who have it open see the cache when they get the lock */
            break;
        }
        status = wait_a_little(&w, lock);
        if (status == ND_OK && nd_fs_exists(path)) {
            status = try_open(path, out);
        }
    }
    close(lock);
    return status;
}

nd_status nd_token_cache_open(const nd_token_cache_request *request, nd_token_cache **out)
{
    char *path = NULL, *lock_path = NULL;
    nd_token_cache *cache = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(find_path(request, &path));
    ND_TRY_OUT(try_open(path, &cache));
    if (!cache) {
        ND_TRY_OUT(nd_fs_format(&lock_path, "%s.lock", path));
        ND_TRY_OUT(open_locked(request, path, lock_path, &cache));
    }
    *out = cache;
out:
    free(lock_path);
    free(path);
    return status;
}

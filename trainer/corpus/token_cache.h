// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_TOKEN_CACHE_H
#define ND_CORPUS_TOKEN_CACHE_H
/*
 * A corpus that was encoded once, in one memory-mapped file of a cache folder. Its name NAME.tokens
 * is a digest of what the tokens depend on: the tokenizer's files, the rules, the version of this
 * code, and path, size and times of change of each file of text. So an edited text or another
 * tokenizer gives another cache, and a text that was not touched is not read again.
 *
 * One process writes a cache, as NAME.tokens.part, which it has locked; others wait for it, as long
 * as it makes progress. The file gets its own name when it is complete and durable. What a killed
 * process leaves is written anew by the next one. Checksums of pieces of 64 KiB are compared when a
 * piece is read first.
 */
#include "runtime/base/fs.h"
#include "trainer/corpus/corpus.h"

typedef struct nd_token_view {
    size_t width; /* bytes of an id: 2 or 4 */
    uint64_t tokens, documents, spans;
    int32_t vocab;             /* of the tokenizer: one more than the greatest id */
    const uint8_t *ids;        /* [tokens] of width bytes */
    const uint8_t *ends;       /* [documents] u64: tokens before the end of each document */
    const uint8_t *span_pairs; /* [spans] pairs of u64: tokens that do not count in the loss */
    const uint8_t *sums;       /* [chunks] u64 */
    size_t chunks;
} nd_token_view;

enum {
    ND_TOKEN_CACHE_VERSION = 1,
    ND_TOKEN_CACHE_HEADER_BYTES = 4096,
    ND_TOKEN_CACHE_CHUNK_BYTES = 64 << 10
};

/* The first bytes of a file; zeros follow up to ND_TOKEN_CACHE_HEADER_BYTES. Then come the ids,
 * zeros up to a multiple of 8 bytes, ends, spans, and the checksums of all that in chunks. */
#define ND_TOKEN_CACHE_MAGIC "NDTOKENS"
typedef struct nd_token_cache_header {
    char magic[8];
    uint32_t version, width;
    uint64_t tokens, documents, spans, vocab, file_bytes;
    uint64_t sums_sum;   /* checksum of the checksums */
    uint64_t header_sum; /* of all above */
} nd_token_cache_header;

/* Checks the header and the sizes of a cache file; `name` is for messages. Apart from files so that
 * it can be fuzzed. */
nd_status nd_token_cache_parse(const uint8_t *data, size_t size, const char *name,
                               nd_token_view *out);

typedef struct nd_token_cache {
    char *path;
    nd_fs_map map;
    nd_token_view view;
    atomic_uchar *checked; /* [view.chunks]: their checksums were compared */
} nd_token_cache;

typedef struct nd_token_cache_request {
    nd_corpus_job job;     /* without tokenizer, eod, context and functions */
    const char *tokenizer; /* path of a tokenizer.json; NULL: ids are bytes, without an end */
    const char *folder;    /* of caches; it is made when it is missing. "": that of the user */
    int64_t vocab;         /* the model's, at most so many ids; 0: any number */
    double stall_seconds;  /* without progress of the process that writes; 0: 300 */
} nd_token_cache_request;

/* The folder of caches: `asked`, or with "" that of the user; it exists then. Owned by the
 * caller. */
nd_status nd_token_cache_folder(const char *asked, char **out);

/*
 * Opens the cache, which is encoded first when it is not there or damaged. ND_ERR_HANG: another
 * process that encodes it makes no progress. ND_ERR_CONFIG: the tokenizer has more ids than the
 * model, which is found before the text is encoded. ND_ERR_DATA, besides what is wrong with the
 * text: it changed meanwhile. The number of bad rows that are left out is of the name of the cache,
 * so that with fewer the text is refused as if there were no cache.
 */
nd_status nd_token_cache_open(const nd_token_cache_request *request, nd_token_cache **out);
void nd_token_cache_close(nd_token_cache *cache); /* NULL is legal */
/* Compares the checksums of what holds these bytes of the file. ND_ERR_DATA when they differ. Under
 * nd_fs_map_guard; from any thread. */
nd_status nd_token_cache_check(const nd_token_cache *cache, uint64_t offset, uint64_t bytes);
/* Starts reading what nd_token_cache_check of these bytes will read, and the bytes. From any
 * thread. */
void nd_token_cache_prefetch(const nd_token_cache *cache, uint64_t offset, uint64_t bytes);

#endif

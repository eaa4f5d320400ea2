// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_CACHE_PARTS_H
#define ND_CORPUS_CACHE_PARTS_H
/*
 * Private to the token cache. A cache folder holds four kinds of files; GROUP is a digest of the
 * tokenizer, the rules and the sizes of the files of text:
 *
 *   GROUP-CONTENT.tokens   a cache; CONTENT is a digest of the bytes of the files of text
 *   GROUP-STAMPS.seen      the name of a cache; STAMPS is a digest of inode, size and times of the
 *                          files of text, so that they are not read again
 *   GROUP.lock             exists while a process encodes, or compares contents
 *   GROUP.tmp-HOST-PID-N   a cache that is being written
 */
#include "trainer/corpus/token_cache.h"

/* The file. */

#define ND_CACHE_MAGIC "NDTOKENS"
enum { ND_CACHE_VERSION = 1 };

/* The first bytes of a file; zeros follow up to ND_TOKEN_CACHE_HEADER_BYTES. Then come the ids,
 * zeros up to a multiple of 8 bytes, ends, spans, and the checksums of all that in chunks. */
typedef struct nd_cache_header {
    char magic[8];
    uint32_t version, width;
    uint64_t tokens, documents, spans, vocab, file_bytes;
    uint64_t sums_sum;   /* checksum of the checksums */
    uint64_t header_sum; /* of all above */
} nd_cache_header;

/* ND_ERR_DATA for a damaged header or a wrong size. */
nd_status nd_cache_file_open(const char *path, nd_token_cache **out);

/* Names. */

struct nd_cache_lock;

typedef struct nd_cache_key {
    const nd_corpus_files *files;
    char *folder;    /* it exists */
    nd_bytes rules;  /* what the tokens depend on besides the contents, as a text */
    nd_bytes stamps; /* inode, size and times of the files, as a text */
    bool settled;    /* no file of text changed so recently that a change may keep its times */
    char group[17];
    char *lock, *seen, *temporary; /* paths; the last one is the beginning of several */
} nd_cache_key;

nd_status nd_cache_key_make(const nd_token_cache_request *request, nd_cache_key *out);
void nd_cache_key_fini(nd_cache_key *key);
/* The path of the cache of these contents; owned by the caller. */
nd_status nd_cache_key_path(const nd_cache_key *key, const nd_corpus_hash *hashes, char **out);
/*
 * Asks again, before the texts are read, whether they are settled. Large ones are waited for, at
 * most request->settle_seconds: without the file of stamps the next start would read them again.
 * ND_ERR_PREEMPTED: request->stop.
 */
nd_status nd_cache_key_settle(nd_cache_key *key, const nd_token_cache_request *request);
/* Whether a cache of the group is there, so that it is worth to compare contents. */
nd_status nd_cache_key_has_group(const nd_cache_key *key, bool *out);
/* Reads all files of text. ND_ERR_PREEMPTED when `stop`, which may be NULL, is set. The lock, which
 * may be NULL, shows those that wait that it goes on. */
nd_status nd_cache_key_hash(const nd_cache_key *key, const atomic_bool *stop,
                            const struct nd_cache_lock *lock, nd_corpus_hash *hashes);
/* ND_ERR_DATA names a file whose size or times are not those of the key any more. */
nd_status nd_cache_key_check(const nd_cache_key *key);
/* The path that the file of stamps names; NULL when there is none, or a damaged one. Owned by the
 * caller. */
nd_status nd_cache_key_seen(const nd_cache_key *key, char **path);
/* Writes that file, but only a warning when that is impossible: texts are read again then. */
void nd_cache_key_see(const nd_cache_key *key, const char *path);

/* One writer. */

typedef struct nd_cache_lock {
    const char *path;
    int fd; /* -1: not held. The holder's progress is in its first bytes */
} nd_cache_lock;

/*
 * Waits until this process has the lock, as long as the one that has it makes progress, and logs
 * that it waits. A fault of the data that another process found meanwhile is an error here too.
 * ND_ERR_HANG:
 * no progress, ND_ERR_PREEMPTED: request->stop, ND_ERR_CANTCREATE: a folder without locks.
 */
nd_status nd_cache_lock_take(const nd_cache_key *key, const nd_token_cache_request *request,
                             nd_cache_lock *out);
/* So many bytes are read, encoded or made durable, of all. */
void nd_cache_lock_progress(const nd_cache_lock *lock, uint64_t bytes, uint64_t all);
/* With the status of the work: a fault of the data is left to those who wait. Other failures are
 * the process's own, and the next one tries again. */
void nd_cache_lock_release(nd_cache_lock *lock, nd_status status);

/* Encodes the text into a cache; *path is owned by the caller. */
nd_status nd_cache_build(const nd_token_cache_request *request, const nd_cache_key *key,
                         const nd_cache_lock *lock, char **path);
/* That of the request's file, or of bytes. */
nd_status nd_cache_open_tokenizer(const nd_token_cache_request *request, nd_tokenizer **out);
/* ND_ERR_CONFIG when the tokenizer has more ids than the model. */
nd_status nd_cache_check_vocab(const nd_token_cache_request *request, int32_t vocab);

#endif

// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/cache_parts.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"

/* A damaged file of which this process has said that it is made again. */
typedef struct damaged {
    ino_t inode;
    struct timespec changed;
} damaged;

typedef struct finder {
    const nd_token_cache_request *request;
    nd_cache_key key;
    damaged damaged;
} finder;

/* Opens what is there. *out is NULL when there is nothing, or it is damaged and made again. */
static nd_status try_open(finder *f, const char *path, nd_token_cache **out)
{
    struct stat st;
    nd_fs_kind kind;
    *out = NULL;
    ND_TRY(nd_fs_look(path, &kind, &st));
    if (kind == ND_FS_ABSENT ||
        (st.st_ino == f->damaged.inode &&
         memcmp(&st.st_ctim, &f->damaged.changed, sizeof st.st_ctim) == 0)) {
        return ND_OK;
    }
    nd_status status = nd_cache_file_open(path, out);
    if (status == ND_ERR_DATA) {
        nd_log_warning("%s; it is made again", nd_error_last()->message);
        nd_error_clear();
        f->damaged = (damaged){st.st_ino, st.st_ctim};
        return ND_OK;
    }
    return status;
}

/* By the times of the files of text. */
static nd_status find_seen(finder *f, nd_token_cache **out)
{
    char *path;
    ND_TRY(nd_cache_key_seen(&f->key, &path));
    nd_status status = path ? try_open(f, path, out) : ND_OK;
    free(path);
    return status;
}

/* By the bytes of the files of text, which are read only when a cache may be theirs. The lock may
 * be NULL. */
static nd_status find_content(finder *f, const nd_cache_lock *lock, nd_token_cache **out)
{
    nd_corpus_hash *hashes = NULL;
    char *path = NULL;
    bool has = false;
    nd_status status = ND_OK;
    ND_TRY(nd_cache_key_has_group(&f->key, &has));
    if (!has) {
        return ND_OK;
    }
    ND_TRY_OUT(ND_ALLOC(f->key.files->count, &hashes));
    ND_TRY_OUT(nd_cache_key_hash(&f->key, f->request->stop, lock, hashes));
    ND_TRY_OUT(nd_cache_key_path(&f->key, hashes, &path));
    ND_TRY_OUT(nd_cache_key_check(&f->key));
    ND_TRY_OUT(try_open(f, path, out));
    if (*out) {
        nd_cache_key_see(&f->key, path);
    }
out:
    free(path);
    free(hashes);
    return status;
}

static nd_status find_or_build(finder *f, const nd_cache_lock *lock, nd_token_cache **out)
{
    char *path = NULL;
    ND_TRY(find_seen(f, out));
    if (!*out) {
        ND_TRY(nd_cache_key_settle(&f->key, f->request));
        ND_TRY(find_content(f, lock, out));
    }
    if (*out) {
        return ND_OK;
    }
    nd_status status = nd_cache_build(f->request, &f->key, lock, &path);
    if (status == ND_OK) {
        nd_cache_key_see(&f->key, path);
        status = nd_cache_file_open(path, out);
    }
    free(path);
    return status;
}

/* Alone in its group. Without a lock, in a folder that cannot be written, a cache may be there. */
static nd_status find_alone(finder *f, nd_token_cache **out)
{
    nd_cache_lock lock;
    nd_status status = nd_cache_lock_take(&f->key, f->request, &lock);
    if (status == ND_OK) {
        status = find_or_build(f, &lock, out);
        nd_cache_lock_release(&lock, status);
        return status;
    }
    if (status != ND_ERR_CANTCREATE) {
        return status;
    }
    const nd_error why = *nd_error_last();
    ND_TRY(find_content(f, NULL, out));
    return *out ? ND_OK : nd_fail(why.status, "%s", why.message);
}

/* Before a wait, or hours of work, that would end with the same error. */
static nd_status check_vocab(const nd_token_cache_request *request)
{
    nd_tokenizer *tokenizer;
    if (request->vocab == 0) {
        return ND_OK;
    }
    ND_TRY(nd_cache_open_tokenizer(request, &tokenizer));
    nd_status status = nd_cache_check_vocab(request, nd_tokenizer_vocab_size(tokenizer));
    nd_tokenizer_close(tokenizer);
    return status;
}

nd_status nd_token_cache_open(const nd_token_cache_request *request, nd_token_cache **out)
{
    finder f = {.request = request};
    nd_token_cache *cache = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_cache_key_make(request, &f.key));
    ND_TRY_OUT(find_seen(&f, &cache));
    if (!cache) {
        ND_TRY_OUT(check_vocab(request));
        ND_TRY_OUT(find_alone(&f, &cache));
    }
    ND_TRY_OUT(nd_cache_check_vocab(request, cache->view.vocab));
    *out = cache;
    cache = NULL;
out:
    nd_token_cache_close(cache);
    nd_cache_key_fini(&f.key);
    return status;
}

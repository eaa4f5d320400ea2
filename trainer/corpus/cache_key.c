// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/cache_parts.h"

#include <errno.h>
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
#include "trainer/text/tokenizer.h"

enum {
    GROUP_DIGITS = 16,
    READ_BYTES = 1 << 20,
    NAME_BYTES_MAX = 128,
    SETTLE_SECONDS = 2,
    SETTLE_POLL_MS = 20,
    LARGE_BYTES = 256 << 20 /* reading them takes about as long as settling */
};

/* Stamps. */

static double age_of(struct timespec changed)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)(now.tv_sec - changed.tv_sec) + 1e-9 * (double)(now.tv_nsec - changed.tv_nsec);
}

/* *stamp is a line; `age`: seconds since the last change. */
static nd_status stamp_file(const nd_corpus_file *file, char stamp[256], uint64_t *size,
                            double *age)
{
    struct stat st;
    nd_fs_kind kind;
    ND_TRY(nd_fs_look(file->path, &kind, &st));
    if (kind == ND_FS_ABSENT) {
        return nd_fail(ND_ERR_DATA, "\"%s\" cannot be opened: %s", file->path, strerror(ENOENT));
    }
    /* Without the number of the device, which differs between nodes and after a remount. */
    snprintf(stamp, 256, "%llu %llu %lld.%09ld %lld.%09ld\n", (unsigned long long)st.st_ino,
             (unsigned long long)st.st_size, (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec,
             (long long)st.st_ctim.tv_sec, st.st_ctim.tv_nsec);
    *size = (uint64_t)st.st_size;
    *age = age_of(st.st_ctim);
    return ND_OK;
}

nd_status nd_cache_key_check(const nd_cache_key *key)
{
    const char *before = (const char *)key->stamps.data, *end = before + key->stamps.count;
    for (size_t i = 0; i < key->files->count; i++) {
        char stamp[256];
        uint64_t size = 0;
        double age = 0;
        ND_TRY(stamp_file(&key->files->list[i], stamp, &size, &age));
        size_t n = strlen(stamp);
        if ((size_t)(end - before) < n || memcmp(before, stamp, n) != 0) {
            return nd_fail(ND_ERR_DATA,
                           "\"%s\" changed while it was encoded; start again when it is complete",
                           key->files->list[i].path);
        }
        before += n;
    }
    return ND_OK;
}

/* What the tokens depend on. */

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
    char *folder = NULL, *config = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(request->tokenizer ? nd_sha256_file(request->tokenizer, hex) : ND_OK);
    int n = snprintf(line, sizeof line,
                     "tokens %d\ntext %d\ntokenizer %s\nrules %d %d %d %d %d %d %d\n",
                     ND_CACHE_VERSION, ND_TEXT_VERSION, hex, r->special_in_text, r->add_special,
                     r->append_eod, r->refuse_invalid, r->drop_unknown, r->pairs,
                     chat ? (int)(chat->form - nd_chat_forms) + 1 : 0);
    ND_TRY_OUT(nd_bytes_add(out, line, (size_t)n));
    ND_TRY_OUT(describe_string(out, "unicode", nd_chars_version(), strlen(nd_chars_version())));
    ND_TRY_OUT(describe_string(out, "key", r->json_key, strlen(r->json_key)));
    ND_TRY_OUT(describe_string(out, "separator", r->separator ? r->separator : "",
                               r->separator ? r->separator_size : 0));
    if (chat && chat->sha256[0]) { /* without it the key is that of earlier programs, as below */
        ND_TRY_OUT(describe_string(out, "template", chat->sha256, strlen(chat->sha256)));
        ND_TRY_OUT(describe_string(out, "begin", r->chat.bos, strlen(r->chat.bos)));
        ND_TRY_OUT(describe_string(out, "end", r->chat.eos, strlen(r->chat.eos)));
    }
    if (request->skip_bad > 0) {
        n = snprintf(line, sizeof line, "skip %lld\n", (long long)request->skip_bad);
        ND_TRY_OUT(nd_bytes_add(out, line, (size_t)n));
    }
    if (!request->tokenizer) {
        goto out;
    }
    ND_TRY_OUT(nd_fs_parent(request->tokenizer, &folder));
    ND_TRY_OUT(nd_fs_format(&config, "%s/tokenizer_config.json", folder));
    bool there = false;
    ND_TRY_OUT(r->append_eod ? nd_fs_exists(config, &there) : ND_OK);
    if (there) { /* it names the end of text */
        ND_TRY_OUT(nd_sha256_file(config, hex));
        ND_TRY_OUT(describe_string(out, "config", hex, sizeof hex - 1));
    }
out:
    free(config);
    free(folder);
    return status;
}

static double settle_seconds(const nd_token_cache_request *request)
{
    return request->settle_seconds > 0 ? request->settle_seconds : SETTLE_SECONDS;
}

static nd_status describe_files(nd_cache_key *key, double settle)
{
    key->settled = true;
    for (size_t i = 0; i < key->files->count; i++) {
        const nd_corpus_file *file = &key->files->list[i];
        char stamp[256], line[64];
        uint64_t size = 0;
        double age = 0;
        ND_TRY(stamp_file(file, stamp, &size, &age));
        key->settled = key->settled && age >= settle;
        int n = snprintf(line, sizeof line, "file %d %llu\n", file->rows, (unsigned long long)size);
        ND_TRY(nd_bytes_add(&key->rules, line, (size_t)n));
        ND_TRY(nd_bytes_add(&key->stamps, stamp, strlen(stamp)));
    }
    return ND_OK;
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

nd_status nd_cache_key_make(const nd_token_cache_request *request, nd_cache_key *out)
{
    char hex[65];
    nd_cache_key key = {.files = request->files};
    nd_status status = ND_OK;
    ND_TRY_OUT(find_folder(request->folder, &key.folder));
    ND_TRY_OUT(describe_rules(request, &key.rules));
    ND_TRY_OUT(describe_files(&key, settle_seconds(request)));
    ND_TRY_OUT(nd_sha256(key.rules.data, key.rules.count, hex));
    snprintf(key.group, sizeof key.group, "%.*s", GROUP_DIGITS, hex);
    ND_TRY_OUT(nd_sha256(key.stamps.data, key.stamps.count, hex));
    ND_TRY_OUT(nd_fs_format(&key.seen, "%s/%s-%.32s.seen", key.folder, key.group, hex));
    ND_TRY_OUT(nd_fs_format(&key.lock, "%s/%s.lock", key.folder, key.group));
    ND_TRY_OUT(nd_fs_format(&key.temporary, "%s/%s", key.folder, key.group));
    *out = key;
    key = (nd_cache_key){0};
out:
    nd_cache_key_fini(&key);
    return status;
}

void nd_cache_key_fini(nd_cache_key *key)
{
    free(key->folder);
    free(key->rules.data);
    free(key->stamps.data);
    free(key->lock);
    free(key->seen);
    free(key->temporary);
    *key = (nd_cache_key){0};
}

static nd_status are_settled(const nd_cache_key *key, double settle, bool *settled)
{
    *settled = true;
    for (size_t i = 0; i < key->files->count && *settled; i++) {
        char stamp[256];
        uint64_t size = 0;
        double age = 0;
        ND_TRY(stamp_file(&key->files->list[i], stamp, &size, &age));
        *settled = age >= settle;
    }
    return ND_OK;
}

nd_status nd_cache_key_settle(nd_cache_key *key, const nd_token_cache_request *request)
{
    const struct timespec pause = {.tv_nsec = SETTLE_POLL_MS * 1000000L};
    const double settle = settle_seconds(request), end = nd_clock_seconds() + settle;
    while (!key->settled) {
        ND_TRY(are_settled(key, settle, &key->settled));
        if (key->settled || key->files->bytes < LARGE_BYTES || nd_clock_seconds() >= end) {
            break;
        }
        if (request->stop && atomic_load(request->stop)) {
            return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal");
        }
        nanosleep(&pause, NULL);
    }
    return ND_OK;
}

/* Contents. */

typedef struct content_reader {
    const atomic_bool *stop;   /* NULL: nothing stops it */
    const nd_cache_lock *lock; /* NULL: nobody waits */
    uint64_t bytes, all;       /* read, and of all files */
    uint8_t *buffer;           /* (READ_BYTES) */
    XXH3_state_t *state;
} content_reader;

static nd_status hash_file(content_reader *r, const char *path, nd_corpus_hash *out)
{
    ssize_t n = 1;
    int fd = -1;
    ND_TRY(nd_fs_open(path, ND_ERR_DATA, &fd, NULL));
    XXH3_128bits_reset(r->state);
    while (n > 0 && !(r->stop && atomic_load(r->stop))) {
        n = read(fd, r->buffer, READ_BYTES);
        if (n < 0 && errno == EINTR) {
            n = 1;
            continue;
        }
        XXH3_128bits_update(r->state, r->buffer, n > 0 ? (size_t)n : 0);
        r->bytes += n > 0 ? (uint64_t)n : 0;
        if (r->lock) {
            nd_cache_lock_progress(r->lock, r->bytes, r->all);
        }
    }
    nd_status status = n > 0 ? nd_fail(ND_ERR_PREEMPTED, "stopped by a signal")
                       : n < 0
                           ? nd_fail(ND_ERR_IO, "\"%s\" cannot be read: %s", path, strerror(errno))
                           : ND_OK;
    close(fd);
    const XXH128_hash_t hash = XXH3_128bits_digest(r->state);
    *out = (nd_corpus_hash){hash.low64, hash.high64};
    return status;
}

nd_status nd_cache_key_hash(const nd_cache_key *key, const atomic_bool *stop,
                            const nd_cache_lock *lock, nd_corpus_hash *hashes)
{
    content_reader reader = {
        .stop = stop, .lock = lock, .all = key->files->bytes, .state = XXH3_createState()};
    nd_status status = ND_OK;
    if (!reader.state) {
        return nd_fail_memory("a checksum");
    }
    ND_TRY_OUT(nd_alloc(READ_BYTES, 1, (void **)&reader.buffer));
    for (size_t i = 0; i < key->files->count; i++) {
        ND_TRY_OUT(hash_file(&reader, key->files->list[i].path, &hashes[i]));
    }
out:
    free(reader.buffer);
    XXH3_freeState(reader.state);
    return status;
}

nd_status nd_cache_key_path(const nd_cache_key *key, const nd_corpus_hash *hashes, char **out)
{
    nd_bytes text = {0};
    char hex[65];
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_bytes_add(&text, key->rules.data, key->rules.count));
    ND_TRY_OUT(nd_bytes_add(&text, hashes, key->files->count * sizeof *hashes));
    ND_TRY_OUT(nd_sha256(text.data, text.count, hex));
    ND_TRY_OUT(nd_fs_format(out, "%s/%s-%.32s.tokens", key->folder, key->group, hex));
out:
    free(text.data);
    return status;
}

static bool is_cache_name(const nd_cache_key *key, const char *name)
{
    static const char suffix[] = ".tokens";
    const size_t n = strlen(name), tail = sizeof suffix - 1;
    return n > GROUP_DIGITS + tail && !strchr(name, '/') &&
           strncmp(name, key->group, GROUP_DIGITS) == 0 && name[GROUP_DIGITS] == '-' &&
           strcmp(name + n - tail, suffix) == 0;
}

nd_status nd_cache_key_has_group(const nd_cache_key *key, bool *out)
{
    nd_fs_names names;
    ND_TRY(nd_fs_list(key->folder, &names));
    *out = false;
    for (int i = 0; i < names.count; i++) {
        *out = *out || is_cache_name(key, names.list[i]);
    }
    nd_fs_names_fini(&names);
    return ND_OK;
}

/* What was seen before. */

nd_status nd_cache_key_seen(const nd_cache_key *key, char **path)
{
    char *name = NULL;
    size_t size;
    bool there = false;
    *path = NULL;
    ND_TRY(nd_fs_exists(key->seen, &there));
    if (!there) {
        return ND_OK;
    }
    if (nd_fs_read(key->seen, NAME_BYTES_MAX, ND_ERR_DATA, &name, &size) != ND_OK) {
        nd_error_clear(); /* the texts are read instead */
        return ND_OK;
    }
    nd_status status =
        is_cache_name(key, name) ? nd_fs_format(path, "%s/%s", key->folder, name) : ND_OK;
    free(name);
    return status;
}

/* Also removes what a process left that was killed while it wrote the file. */
static nd_status write_seen(const nd_cache_key *key, const char *name)
{
    nd_token_output out;
    nd_token_output_remove_left(key->seen);
    nd_status status = nd_token_output_open(key->seen, 0, 0, &out);
    status = status == ND_OK ? nd_token_output_append(&out, name, strlen(name)) : status;
    status = status == ND_OK ? nd_token_output_sync(&out) : status;
    status = status == ND_OK ? nd_token_output_rename(&out) : status;
    nd_token_output_fini(&out);
    return status;
}

void nd_cache_key_see(const nd_cache_key *key, const char *path)
{
    const char *name = strrchr(path, '/');
    ND_ASSERT(name);
    if (key->settled && write_seen(key, name + 1) != ND_OK) {
        nd_log_warning("%s; each start reads the text to find its token cache",
                       nd_error_last()->message);
        nd_error_clear();
    }
}

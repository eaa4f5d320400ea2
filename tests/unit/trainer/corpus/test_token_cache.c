// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/trainer/corpus/corpus_cases.h"
#include "trainer/corpus/token_cache.h"
#include "trainer/corpus/token_file.h"

static tempdir dir, caches;
static char tokenizer_path[PATH_MAX];
static nd_corpus_files files;
static nd_corpus_rules rules = {.json_key = "text", .pairs = true};

static void write_text(int rows)
{
    nd_bytes all = {0};
    for (int i = 0; i < rows; i++) {
        char row[128];
        int n = i % 2 ? snprintf(row, sizeof row, "{\"text\": \"row %d of the text\"}\n", i)
                      : snprintf(row, sizeof row,
                                 "{\"prompt\": \"what is %d\", \"completion\": \"a number\"}\n", i);
        assert_ok(nd_bytes_add(&all, row, (size_t)n));
    }
    const char *path = tempdir_write(&dir, "a.jsonl", all.data, all.count);
    free(all.data);
    nd_corpus_files_fini(&files);
    assert_ok(nd_corpus_files_add(&files, path, ND_DATA_AUTO));
}

static void setup(void)
{
    tempdir_make(&dir);
    tempdir_make(&caches);
    snprintf(tokenizer_path, sizeof tokenizer_path,
             "%s/tests/unit/trainer/text/goldens/llama3.json", getenv("ND_SOURCE_ROOT"));
    write_text(20000);
}

static void teardown(void)
{
    nd_corpus_files_fini(&files);
    tempdir_remove(&dir);
    tempdir_remove(&caches);
}

TestSuite(token_cache, .init = setup, .fini = teardown);

static nd_token_cache_request request(void)
{
    return (nd_token_cache_request){.files = &files,
                                    .rules = &rules,
                                    .tokenizer = tokenizer_path,
                                    .folder = caches.path,
                                    .threads = 2};
}

static nd_token_cache *open_cache(void)
{
    const nd_token_cache_request asked = request();
    nd_token_cache *cache;
    assert_ok(nd_token_cache_open(&asked, &cache));
    return cache;
}

static ino_t inode(const char *path)
{
    struct stat st;
    cr_assert_eq(stat(path, &st), 0);
    return st.st_ino;
}

/* Files of the cache folder. */
static int count_files(void)
{
    int count = 0;
    DIR *entries = opendir(caches.path);
    for (struct dirent *entry; (entry = readdir(entries));) {
        count += entry->d_name[0] != '.';
    }
    closedir(entries);
    return count;
}

static uint64_t u64_at(const uint8_t *p, uint64_t index)
{
    uint64_t x;
    memcpy(&x, p + 8 * index, sizeof x);
    return x;
}

Test(token_cache, holds_the_ids_the_ends_and_the_spans)
{
    corpus_result whole;
    nd_tokenizer *tokenizer = text_open("llama3");
    nd_token_cache *cache = open_cache();
    const nd_token_view *v = &cache->view;
    assert_ok(corpus_encode(
        (nd_corpus_job){.files = &files, .tokenizer = tokenizer, .rules = &rules}, &whole));
    cr_assert_eq(v->width, 2);
    cr_assert_eq(v->tokens, whole.ids.count);
    cr_assert_eq(v->documents, whole.ends.count);
    cr_assert_eq(2 * v->spans, whole.spans.count);
    cr_expect_eq(v->vocab, nd_tokenizer_vocab_size(tokenizer));
    assert_ok(nd_token_cache_check(cache, ND_TOKEN_CACHE_HEADER_BYTES,
                                   cache->map.size - ND_TOKEN_CACHE_HEADER_BYTES - 8 * v->chunks));
    for (size_t i = 0; i < v->tokens; i++) {
        uint16_t id;
        memcpy(&id, v->ids + 2 * i, 2);
        cr_assert_eq(id, whole.ids.data[i]);
    }
    for (size_t i = 0; i < v->documents; i++) {
        cr_assert_eq(u64_at(v->ends, i), (uint64_t)whole.ends.data[i]);
    }
    for (size_t i = 0; i < 2 * v->spans; i++) {
        cr_assert_eq(u64_at(v->span_pairs, i), (uint64_t)whole.spans.data[i]);
    }
    corpus_free(&whole);
    nd_token_cache_close(cache);
    nd_tokenizer_close(tokenizer);
}

Test(token_cache, is_written_once_for_a_text_a_tokenizer_and_rules)
{
    nd_token_cache *first = open_cache(), *second = open_cache();
    cr_expect_str_eq(first->path, second->path);
    cr_expect_eq(inode(first->path), inode(second->path));
    cr_expect_eq(count_files(), 1); /* neither lock nor temporary file is left */
    nd_token_cache_close(second);
    rules.add_special = true;
    second = open_cache();
    cr_expect_str_neq(first->path, second->path);
    nd_token_cache_close(second);
    rules.add_special = false;
    write_text(20001);
    second = open_cache();
    cr_expect_str_neq(first->path, second->path);
    nd_token_cache_close(second);
    cr_expect_eq(count_files(), 3);
    nd_token_cache_close(first);
}

static void damage(const char *path, off_t at, int whence)
{
    char byte;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    off_t place = lseek(fd, at, whence);
    cr_assert_eq(pread(fd, &byte, 1, place), 1);
    byte ^= 0x40;
    cr_assert_eq(pwrite(fd, &byte, 1, place), 1);
    close(fd);
}

Test(token_cache, a_damaged_header_or_a_cut_file_is_made_again)
{
    nd_token_cache *cache = open_cache();
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", cache->path);
    const uint64_t tokens = cache->view.tokens;
    const off_t size = (off_t)cache->map.size;
    nd_token_cache_close(cache);
    for (int i = 0; i < 5; i++) {
        switch (i) {
        case 0:
            damage(path, 0, SEEK_SET);
            break;
        case 1:
            damage(path, 17, SEEK_SET);
            break;
        case 2:
            damage(path, -3, SEEK_END); /* a checksum */
            break;
        case 3:
            cr_assert_eq(truncate(path, size - 1), 0);
            break;
        case 4:
            cr_assert_eq(truncate(path, 100), 0);
            break;
        }
        cache = open_cache();
        cr_expect_eq(cache->view.tokens, tokens);
        cr_expect_eq((off_t)cache->map.size, size);
        nd_token_cache_close(cache);
    }
    cr_expect_eq(count_files(), 1);
}

Test(token_cache, damage_of_ids_is_found_when_they_are_read)
{
    nd_token_cache *cache = open_cache();
    const uint64_t begin = ND_TOKEN_CACHE_HEADER_BYTES, chunk = ND_TOKEN_CACHE_CHUNK_BYTES;
    cr_assert_gt(cache->view.chunks, 2);
    damage(cache->path, (off_t)(begin + chunk + 7), SEEK_SET);
    assert_ok(nd_token_cache_check(cache, begin, chunk));
    assert_fails(nd_token_cache_check(cache, begin + chunk, 1), ND_ERR_DATA, "is damaged at byte");
    assert_fails(nd_token_cache_check(cache, begin + chunk - 1, 2), ND_ERR_DATA, "delete it");
    assert_ok(nd_token_cache_check(cache, begin + 2 * chunk, 1));
    nd_token_cache_close(cache);
}

static void *open_beside(void *context)
{
    nd_token_cache **cache = context;
    *cache = open_cache();
    return NULL;
}

Test(token_cache, one_writes_while_others_wait)
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    nd_token_cache *opened[THREADS];
    for (int i = 0; i < THREADS; i++) {
        cr_assert_eq(pthread_create(&threads[i], NULL, open_beside, &opened[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    for (int i = 0; i < THREADS; i++) {
        struct stat mapped;
        cr_assert_eq(fstat(opened[i]->map.descriptor - 1, &mapped), 0);
        cr_expect_eq(mapped.st_ino, inode(opened[0]->path));
    }
    for (int i = 0; i < THREADS; i++) {
        nd_token_cache_close(opened[i]);
    }
    cr_expect_eq(count_files(), 1);
}

Test(token_cache, a_writer_without_progress_has_a_deadline)
{
    nd_token_cache *cache = open_cache();
    char path[PATH_MAX], lock_path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s", cache->path);
    snprintf(lock_path, sizeof lock_path, "%s.lock", path);
    nd_token_cache_close(cache);
    cr_assert_eq(unlink(path), 0);
    int lock = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    cr_assert_eq(flock(lock, LOCK_EX), 0);
    nd_token_cache_request asked = request();
    asked.stall_seconds = 0.05;
    assert_fails(nd_token_cache_open(&asked, &cache), ND_ERR_HANG, "made no progress");
    close(lock);
    cache = open_cache(); /* the lock is free */
    nd_token_cache_close(cache);
}

Test(token_cache, what_fails_leaves_no_file)
{
    nd_token_cache_request asked = request();
    nd_token_cache *cache;
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = 100000; /* the disk is full */
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    nd_status status = nd_token_cache_open(&asked, &cache);
    limit.rlim_cur = before;
    setrlimit(RLIMIT_FSIZE, &limit);
    cr_expect_eq(status, ND_ERR_CANTCREATE, "%d", status);
    cr_expect_eq(count_files(), 0);
    asked.folder = "/proc/nowhere";
    assert_fails(nd_token_cache_open(&asked, &cache), ND_ERR_CANTCREATE, "data.cache_dir");
    asked = request();
    rules.append_eod = true;
    assert_fails(nd_token_cache_open(&asked, &cache), ND_ERR_DATA, "names no end of text");
    cr_expect_eq(count_files(), 0);
}

Test(token_cache, a_text_without_a_label_is_refused)
{
    static const char rows[] = "{\"prompt\": \"only a question\", \"completion\": \"\"}\n";
    const nd_token_cache_request asked = request();
    nd_token_cache *cache;
    nd_corpus_files_fini(&files);
    assert_ok(nd_corpus_files_add(&files, tempdir_write(&dir, "b.jsonl", rows, strlen(rows)),
                                  ND_DATA_AUTO));
    assert_fails(nd_token_cache_open(&asked, &cache), ND_ERR_DATA, "counts in the loss");
    cr_expect_eq(count_files(), 0);
}

/* The pair that Megatron-LM reads. */
Test(token_cache, megatron_files)
{
    nd_megatron_output out;
    const nd_corpus_piece first = {.ids = {(int32_t[]){1, 2, 3, 4}, 4, 0},
                                   .ends = {(int32_t[]){3}, 1, 0}};
    const nd_corpus_piece second = {.ids = {(int32_t[]){5, 65499}, 2, 0},
                                    .ends = {(int32_t[]){1, 2}, 2, 0}};
    char prefix[128], *data;
    size_t size;
    snprintf(prefix, sizeof prefix, "%s/out", dir.path);
    assert_ok(nd_megatron_output_open(prefix, 65499, &out));
    assert_ok(nd_megatron_output_write(&out, &first));
    assert_ok(nd_megatron_output_write(&out, &second));
    cr_expect_not(nd_fs_exists(tempdir_file(&dir, "out.bin")));
    assert_ok(nd_megatron_output_commit(&out));
    nd_megatron_output_fini(&out);
    assert_ok(nd_fs_read(tempdir_file(&dir, "out.bin"), 1000, ND_ERR_DATA, &data, &size));
    cr_assert_eq(size, 12);
    cr_expect_eq(memcmp(data, (uint16_t[]){1, 2, 3, 4, 5, 65499}, 12), 0);
    free(data);
    assert_ok(nd_fs_read(tempdir_file(&dir, "out.idx"), 1000, ND_ERR_DATA, &data, &size));
    cr_assert_eq(size, 34 + 3 * 12 + 4 * 8);
    cr_expect_eq(memcmp(data, "MMIDIDX\0\0\1\0\0\0\0\0\0\0\x8\3\0\0\0\0\0\0\0\4\0\0\0\0\0\0\0", 34),
                 0);
    cr_expect_eq(memcmp(data + 34, (int32_t[]){3, 2, 1}, 12), 0);
    cr_expect_eq(memcmp(data + 46, (int64_t[]){0, 6, 10}, 24), 0);
    cr_expect_eq(memcmp(data + 70, (int64_t[]){0, 1, 2, 3}, 32), 0);
    free(data);
    assert_ok(nd_megatron_output_open(prefix, 65500, &out));
    cr_expect_eq(out.bin.width, 4);
    nd_megatron_output_fini(&out);
}

// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/printed.h"
#include "tests/unit/trainer/corpus/corpus_cases.h"
#include "trainer/corpus/chat.h"
#include "trainer/corpus/token_cache.h"
#include "trainer/corpus/token_file.h"

static tempdir dir, caches;
static char tokenizer_path[PATH_MAX];
static char prefix[PATH_MAX]; /* of token files */
static nd_corpus_files files;
static nd_corpus_rules rules = {.json_key = "text", .pairs = true};

static void use_text(const char *path)
{
    nd_corpus_files_fini(&files);
    assert_ok(nd_corpus_files_add(&files, path, ND_DATA_AUTO));
}

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
    use_text(tempdir_write(&dir, "a.jsonl", all.data, all.count));
    free(all.data);
}

/* In place of the C library's: tests see that a lock is waited for, have a file system without
 * locks. */
typedef struct locks {
    atomic_bool none;
    atomic_int refused; /* since somebody else had the lock */
} locks;

static locks *shared_locks; /* by processes too */

int flock(int fd, int operation)
{
    if (shared_locks && atomic_load(&shared_locks->none)) {
        errno = ENOSYS;
        return -1;
    }
    if ((operation & LOCK_EX) && (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY) {
        errno = EBADF; /* as on NFS */
        return -1;
    }
    int code = (int)syscall(SYS_flock, fd, operation);
    if (shared_locks && code != 0 && errno == EWOULDBLOCK) {
        atomic_fetch_add(&shared_locks->refused, 1);
    }
    return code;
}

/* Looks at a lock that fail as on a broken disk, counted down. */
static int failing_looks;

/* A number that is added to the device and inode numbers of a text. */
static ino_t shown_number;

/* The time of day, and of the last change of each text; 0 s: as they are. */
static struct timespec fixed_now, fixed_change;

/* Seconds from one reading of the monotonic clock to the next; -1: those of the true clock. */
static time_t look_seconds = -1;

int clock_gettime(clockid_t clock, struct timespec *now)
{
    const int code = (int)syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME && fixed_now.tv_sec > 0) {
        *now = fixed_now;
    } else if (clock == CLOCK_MONOTONIC && look_seconds >= 0) {
        static atomic_long looks;
        *now = (struct timespec){1000 + look_seconds * atomic_fetch_add(&looks, 1), 0};
    }
    return code;
}

int fstatat(int folder, const char *path, struct stat *st, int flags)
{
    if (failing_looks > 0 && strstr(path, ".part")) {
        failing_looks--;
        errno = EIO;
        return -1;
    }
    const int code = (int)syscall(SYS_newfstatat, folder, path, st, flags);
    if (code == 0 && strstr(path, ".jsonl")) {
        st->st_dev += shown_number;
        st->st_ino += shown_number;
    }
    if (fixed_now.tv_sec > 0 && (strstr(path, ".jsonl") || strstr(path, ".txt"))) {
        st->st_mtim = st->st_ctim = fixed_change;
    }
    return code;
}

/* The pauses of those who wait; each is a millisecond in truth. */
static atomic_long pauses[64];
static atomic_int pause_count;
static void (*in_pause)(int number); /* NULL: nothing is done in them */

int nanosleep(const struct timespec *pause, struct timespec *left)
{
    (void)left;
    const int i = atomic_fetch_add(&pause_count, 1);
    if (i < 64) {
        atomic_store(&pauses[i], pause->tv_sec * 1000 + pause->tv_nsec / 1000000);
    }
    if (in_pause) {
        in_pause(i);
    }
    return usleep(1000);
}

static const char *growing; /* a text that gets one more row when it is read; NULL: none does */

static int read_code; /* of reads that fail; 0: none does */

ssize_t read(int fd, void *buffer, size_t size)
{
    if (read_code != 0 && size == 256 << 10) { /* of a text; the framework reads too */
        errno = read_code;
        return -1;
    }
    if (growing && size == 256 << 10) {
        const int text = open(growing, O_WRONLY | O_APPEND | O_CLOEXEC);
        cr_assert_eq(write(text, "\n", 1), 1); /* a change in size is seen at once */
        close(text);
        growing = NULL;
    }
    return syscall(SYS_read, fd, buffer, size);
}

static int sync_code; /* of ranges that cannot be sent to the disk; 0: as they are */

int sync_file_range(int fd, off_t offset, off_t bytes, unsigned flags)
{
    errno = sync_code;
    return sync_code ? -1 : (int)syscall(SYS_sync_file_range, fd, offset, bytes, flags);
}

static void *map_shared(size_t size)
{
    void *place = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(place, MAP_FAILED);
    return place;
}

static void setup(void)
{
    shared_locks = map_shared(sizeof *shared_locks);
    tempdir_make(&dir);
    tempdir_make(&caches);
    snprintf(tokenizer_path, sizeof tokenizer_path, "%s", text_path("llama3"));
    snprintf(prefix, sizeof prefix, "%s/out", dir.path);
    write_text(20000);
}

static void teardown(void)
{
    nd_corpus_files_fini(&files);
    tempdir_remove(&dir);
    tempdir_remove(&caches);
    munmap(shared_locks, sizeof *shared_locks);
    shared_locks = NULL;
}

TestSuite(token_cache, .init = setup, .fini = teardown);

static nd_token_cache_request request(void)
{
    return (nd_token_cache_request){.job = {.files = &files, .rules = &rules, .threads = 2},
                                    .tokenizer = tokenizer_path,
                                    .folder = caches.path};
}

static nd_token_cache *open_asked(nd_token_cache_request asked)
{
    nd_token_cache *cache;
    assert_ok(nd_token_cache_open(&asked, &cache));
    return cache;
}

static nd_token_cache *open_cache(void)
{
    return open_asked(request());
}

static void open_fails(nd_token_cache_request asked, nd_status status, const char *words)
{
    nd_token_cache *cache;
    assert_fails(nd_token_cache_open(&asked, &cache), status, words);
}

static struct stat state_of(const char *path)
{
    struct stat st;
    cr_assert_eq(stat(path, &st), 0, "%s", path);
    return st;
}

static mode_t mode(const char *path)
{
    return state_of(path).st_mode & 07777;
}

/* How often the log has these words, since tempdir_catch_stderr. */
#define said(words) times_in(tempdir_said(&dir), words)

/* Opens the cache of now, and compares its path with that of another one. */
static void expect_same(const nd_token_cache *before, bool same)
{
    nd_token_cache *now = open_cache();
    cr_expect_eq(strcmp(before->path, now->path) == 0, same, "%s", now->path);
    cr_expect_eq(state_of(before->path).st_ino == state_of(now->path).st_ino, same, "%s",
                 now->path);
    nd_token_cache_close(now);
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
    corpus_result whole = {0};
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

Test(token_cache, is_written_once_for_a_text_and_a_tokenizer)
{
    nd_token_cache *first = open_cache();
    expect_same(first, true);
    cr_expect_eq(count_files(), 1); /* neither lock nor temporary file is left */
    write_text(20001);
    expect_same(first, false);
    cr_expect_eq(count_files(), 2);
    snprintf(tokenizer_path, sizeof tokenizer_path, "%s", text_path("gpt2"));
    expect_same(first, false);
    cr_expect_eq(count_files(), 3);
    nd_token_cache_close(first);
}

/* The request names no folder. */
Test(token_cache, its_folder_is_that_of_the_user)
{
    const char *const bases[] = {NULL, "base", "", dir.path};
    char *folder;
    setenv("HOME", caches.path, 1);
    unsetenv("XDG_CACHE_HOME");
    for (int i = 0; i < 4; i++) {
        cr_assert(!bases[i] || setenv("XDG_CACHE_HOME", bases[i], 1) == 0);
        assert_ok(nd_token_cache_folder("", &folder));
        cr_expect_str_eq(folder, i == 3 ? tempdir_file(&dir, "ndtrain")
                                        : tempdir_file(&caches, ".cache/ndtrain"));
        cr_expect_eq(rmdir(folder), 0, "it is there");
        free(folder);
    }
    unsetenv("HOME");
    setenv("XDG_CACHE_HOME", "base", 1);
    assert_fails(nd_token_cache_folder("", &folder), ND_ERR_CONFIG, "no home folder");
    setenv("HOME", "home", 1);
    unsetenv("XDG_CACHE_HOME");
    assert_fails(nd_token_cache_folder("", &folder), ND_ERR_CONFIG, "no home folder");
}

/* Everybody who may write into the folder may take over what a killed process left; only its writer
 * may write to a complete cache. Token files that a user asks for follow the umask. */
Test(token_cache, a_folder_gives_its_files_their_mode)
{
    static const mode_t folders[] = {0700, 0750, 02770, 01777};
    const nd_token_sharing sharing = {0};
    umask(0027);
    for (int i = 0; i < 4; i++) {
        const char *path = tempdir_file(&caches, "x");
        nd_token_files out;
        cr_assert_eq(chmod(caches.path, folders[i]), 0);
        assert_ok(nd_token_files_open(path, 100, &sharing, &out));
        cr_expect_eq(mode(out.tokens.part), folders[i] & 0666, "%d", i);
        assert_ok(nd_token_files_commit(&out));
        cr_expect_eq(mode(path), folders[i] & 0644, "%d", i);
        nd_token_files_fini(&out);
    }
    assert_ok(corpus_write(prefix, 100, NULL, 0));
    cr_expect_eq(mode(tempdir_file(&dir, "out.bin")), 0640);
}

Test(token_cache, what_became_of_the_text_is_told)
{
    static const char rows[] = "{\"text\": \"<|begin|>a\"}\n{\"text\": \"\"}\n{\"text\": 3}\n"
                               "{\"prompt\": \"p\", \"completion\": \"c\"}\n"
                               "{\"text\": \"\\ud800 \xff\xff\"}\n";
    static const char *const words[] = {"b.jsonl\": 100 %, ",
                                        "1 bad rows were left out",
                                        "1 documents without text were left out",
                                        "special tokens 1 times",
                                        "1 documents begin with the beginning of sequence twice",
                                        "2 invalid sequences of bytes and 1 halves",
                                        "0 unknown tokens",
                                        "plain form of chatml",
                                        "b.jsonl\": 3 documents, 17 tokens, 1.06 bytes a token",
                                        "15 of these tokens count in the loss (88.2 %)"};
    nd_token_cache_request asked = request();
    tempdir_catch_stderr(&dir);
    look_seconds = 0;
    nd_token_cache_close(open_cache());
    cr_expect(said("\n") == 3 && said("jsonl\": 20000 documents, ") == 1);
    asked.job.skip_bad = 1;
    rules.add_special = rules.chat.foreign = true;
    rules.special_in_text = ND_SPECIAL_PARSE;
    look_seconds = 10;
    use_text(tempdir_write(&dir, "b.jsonl", rows, sizeof rows - 1));
    nd_token_cache_close(open_asked(asked));
    cr_expect_eq(said("\n"), 3 + 10);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        cr_expect_eq(said(words[i]), 1, "%s", words[i]);
    }
}

/* Rules of which no two may share a cache. */
Test(token_cache, each_rule_is_part_of_the_name)
{
    static const char row[] = "{\"text\": \"a\", \"b\": \"c\"}\n";
    static const char config[] = "{\"eos_token\": \"a\"}";
    /* Forms that end a turn with the end of text. */
    static const nd_chat_template one = {.sha256 = "1", .form = &nd_chat_forms[3]};
    static const nd_chat_template form = {.sha256 = "1", .form = &nd_chat_forms[4]};
    static const nd_chat_template text = {.sha256 = "2", .form = &nd_chat_forms[4]};
    static const nd_corpus_rules all[] = {
        {.json_key = "text", .pairs = true},
        {.json_key = "b", .pairs = true},
        {.json_key = "text"},
        {.json_key = "text", .pairs = true, .special_in_text = ND_SPECIAL_REFUSE},
        {.json_key = "text", .pairs = true, .add_special = true},
        {.json_key = "text", .pairs = true, .append_eod = true},
        {.json_key = "text", .pairs = true, .refuse_invalid = true},
        {.json_key = "text", .pairs = true, .drop_unknown = true},
        {.json_key = "text", .pairs = true, .separator = "b", .separator_size = 1},
        {.json_key = "text", .pairs = true, .chat = {&one, "", "a", false}},
        {.json_key = "text", .pairs = true, .chat = {&form, "", "a", false}},
        {.json_key = "text", .pairs = true, .chat = {&text, "", "a", false}},
        {.json_key = "text", .pairs = true, .chat = {&one, "a", "a", false}},
        {.json_key = "text", .pairs = true, .chat = {&one, "", "b", false}},
    };
    enum { COUNT = sizeof all / sizeof *all };
    nd_token_cache_request asked;
    json_t *file = text_file("llama2"); /* which has an end of text */
    snprintf(tokenizer_path, sizeof tokenizer_path, "%s", tempdir_file(&dir, "tokenizer.json"));
    cr_assert_eq(json_dump_file(file, tokenizer_path, 0), 0);
    json_decref(file);
    use_text(tempdir_write(&dir, "b.jsonl", row, sizeof row - 1));
    for (int i = 0; i < COUNT + 3; i++) {
        if (i == COUNT) { /* another end of text */
            tempdir_write(&dir, "tokenizer_config.json", config, sizeof config - 1);
        }
        rules = all[i < COUNT ? i : i == COUNT ? 5 : 0];
        files.list[0].rows = i < COUNT + 2; /* by data.format */
        asked = request();
        asked.job.skip_bad = i == COUNT + 1;
        nd_token_cache_close(open_asked(asked));
        cr_expect_eq(count_files(), i + 1, "rule %d", i);
    }
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
    const char *path = printed("%s", cache->path);
    const uint64_t tokens = cache->view.tokens;
    const off_t size = (off_t)cache->map.size;
    nd_token_cache_close(cache);
    for (int i = 0; i < 5; i++) {
        if (i < 3) { /* the magic, the tokens, a checksum */
            damage(path, (off_t[]){0, 17, -3}[i], i < 2 ? SEEK_SET : SEEK_END);
        } else {
            cr_assert_eq(truncate(path, i == 3 ? size - 1 : 100), 0);
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

/* The .part of the cache, which the test has locked, as a process that encodes. */
static struct {
    char path[PATH_MAX];
    int fd;
} part;

static void begin_part(void)
{
    nd_token_cache *cache = open_cache();
    snprintf(part.path, sizeof part.path, "%s.part", cache->path);
    cr_assert_eq(unlink(cache->path), 0);
    nd_token_cache_close(cache);
    part.fd = open(part.path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    cr_assert_geq(part.fd, 0);
    cr_assert_eq(syscall(SYS_flock, part.fd, LOCK_EX | LOCK_NB), 0);
    atomic_store(&shared_locks->refused, 0);
}

/* As a process that fails, or was stopped. */
static void end_part(void)
{
    cr_assert_eq(unlink(part.path), 0);
    close(part.fd);
}

static void wait_until_refused(int count)
{
    for (int i = 0; i < 60000 && atomic_load(&shared_locks->refused) < count; i++) {
        usleep(1000);
    }
    cr_assert_geq(atomic_load(&shared_locks->refused), count);
}

/* The file that each process maps is one: nobody replaced it. */
Test(token_cache, one_process_writes_while_others_wait)
{
    enum { PROCESSES = 3 };
    ino_t *inodes = map_shared(PROCESSES * sizeof *inodes);
    begin_part();
    pid_t children[PROCESSES];
    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            const nd_token_cache_request asked = request();
            nd_token_cache *cache;
            struct stat st;
            close(part.fd); /* or the lock would be this process's too */
            nd_status status = nd_token_cache_open(&asked, &cache);
            if (status == ND_OK && fstat(cache->map.descriptor - 1, &st) == 0) {
                inodes[i] = st.st_ino;
            }
            _exit(0);
        }
        cr_assert_gt(children[i], 0);
        wait_until_refused(i + 1);
    }
    end_part(); /* they make a new one */
    for (int i = 0; i < PROCESSES; i++) {
        cr_assert_eq(waitpid(children[i], NULL, 0), children[i]);
        cr_expect_neq(inodes[i], 0);
        cr_expect_eq(inodes[i], inodes[0]);
    }
    cr_expect_eq(count_files(), 1);
    munmap(inodes, PROCESSES * sizeof *inodes);
}

typedef struct opening {
    pthread_t thread;
    nd_token_cache *cache;
    nd_error error;
} opening;

static void *open_beside(void *context)
{
    opening *o = context;
    const nd_token_cache_request asked = request();
    o->error.status = nd_token_cache_open(&asked, &o->cache);
    if (o->error.status != ND_OK) {
        o->error = *nd_error_last();
    }
    return NULL;
}

/* Each says what is wrong with the text. */
Test(token_cache, all_who_need_it_fail_as_the_text_is_at_fault)
{
    static const char rows[] = "{\"text\": \"good\"}\n{\"text\": 3}\n";
    opening o[4] = {0};
    use_text(tempdir_write(&dir, "b.jsonl", rows, strlen(rows)));
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(pthread_create(&o[i].thread, NULL, open_beside, &o[i]), 0);
    }
    const char *name = printed("\"%s\" line 2: ", files.list[0].path);
    for (int i = 0; i < 4; i++) {
        pthread_join(o[i].thread, NULL);
        cr_expect_eq(o[i].error.status, ND_ERR_DATA);
        cr_expect_eq(strncmp(o[i].error.message, name, strlen(name)), 0, "%s", o[i].error.message);
    }
    cr_expect_eq(count_files(), 0);
}

/* Many ranks that wait must not load the folder with their looks at it. */
Test(token_cache, who_waits_looks_less_and_less_often)
{
    opening o = {0};
    begin_part();
    cr_assert_eq(ftruncate(part.fd, 1500000), 0);
    tempdir_catch_stderr(&dir);
    look_seconds = 0;
    atomic_store(&pause_count, 0);
    cr_assert_eq(pthread_create(&o.thread, NULL, open_beside, &o), 0);
    wait_until_refused(20);
    end_part();
    pthread_join(o.thread, NULL);
    cr_expect_eq(said("waiting for another process"), 1);
    cr_expect_eq(said(".tokens: 1.5 MB so far"), 1);
    cr_assert_eq(o.error.status, ND_OK, "%s", o.error.message);
    cr_expect_leq(atomic_load(&pauses[0]), 20);
    cr_expect_eq(atomic_load(&pauses[18]), 1000);
    for (int i = 1; i < 19; i++) {
        cr_expect_geq(atomic_load(&pauses[i]), atomic_load(&pauses[i - 1]));
    }
    nd_token_cache_close(o.cache);
}

Test(token_cache, a_writer_without_progress_has_a_deadline)
{
    nd_token_cache_request asked = request();
    nd_token_cache *cache;
    begin_part();
    asked.stall_seconds = 0.05;
    open_fails(asked, ND_ERR_HANG, "made no progress");
    cr_assert_eq(pwrite(part.fd, "half a cache", 12, 100000), 12);
    close(part.fd); /* a process that was killed */
    cache = open_cache();
    assert_ok(nd_token_cache_check(cache, ND_TOKEN_CACHE_HEADER_BYTES, 100000));
    nd_token_cache_close(cache);
    cr_expect_eq(count_files(), 1);
}

/* The writer goes on in each pause of the one that waits, and ends after twenty. */
static void go_on(int number)
{
    cr_assert_eq(ftruncate(part.fd, number + 1), 0);
    if (number == 20) {
        in_pause = NULL;
        end_part();
    }
}

Test(token_cache, who_waits_sees_the_writers_progress)
{
    nd_token_cache_request asked = request();
    begin_part();
    atomic_store(&pause_count, 0);
    in_pause = go_on;
    asked.stall_seconds = 1e-9; /* any two looks are further apart */
    nd_token_cache_close(open_asked(asked));
    cr_expect_null(in_pause);
}

Test(token_cache, a_stop_ends_encoding_and_waiting)
{
    const atomic_bool stop = true;
    nd_token_cache_request asked = request();
    asked.job.stop = &stop;
    open_fails(asked, ND_ERR_PREEMPTED, "stopped by a signal");
    cr_expect_eq(count_files(), 0);
    begin_part();
    open_fails(asked, ND_ERR_PREEMPTED, "stopped by a signal");
    end_part();
}

Test(token_cache, a_folder_without_locks_is_refused_unless_it_has_the_cache)
{
    atomic_store(&shared_locks->none, true);
    open_fails(request(), ND_ERR_CANTCREATE, "set data.cache_dir");
    cr_expect_eq(count_files(), 0);
    atomic_store(&shared_locks->none, false);
    nd_token_cache_close(open_cache());
    atomic_store(&shared_locks->none, true);
    nd_token_cache_close(open_cache());
    cr_expect_eq(count_files(), 1);
}

/* Which would say whether another process writes it. */
Test(token_cache, a_new_token_file_that_lies_there_needs_locks)
{
    nd_token_files first, second;
    atomic_store(&shared_locks->none, true);
    assert_ok(nd_token_files_open(prefix, 100, NULL, &first));
    assert_fails(nd_token_files_open(prefix, 100, NULL, &second), ND_ERR_CANTCREATE,
                 "remove it when none does");
    nd_token_files_fini(&second);
    assert_ok(nd_token_files_commit(&first));
    nd_token_files_fini(&first);
    cr_expect(tempdir_has_path(tempdir_file(&dir, "out.bin")));
    cr_expect_not(tempdir_has_path(tempdir_file(&dir, "out.bin.part")));
}

/* Whatever the number of the error is: it says nothing about the text. */
Test(token_cache, a_read_that_fails_is_no_wrong_text)
{
    static const int codes[] = {EIO, EMFILE, ESTALE, EACCES};
    nd_text_stream *stream;
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        read_code = codes[i];
        assert_fails(nd_text_stream_open(tempdir_write(&dir, "x", "text", 4), &stream), ND_ERR_IO,
                     "cannot be read");
    }
    read_code = 0;
}

/* It is not taken again and again until the disk answers. */
Test(token_cache, a_lock_that_cannot_be_examined_is_an_error)
{
    failing_looks = 1000;
    open_fails(request(), ND_ERR_IO, "cannot examine");
    cr_expect_gt(failing_looks, 900);
    failing_looks = 0;
    nd_token_cache_close(open_cache());
}

/* Facts that the name of a cache depends on. */

/* A byte of the text is another one; size and time of change are as before. */
static void change_a_byte(const char *path, off_t at)
{
    const struct stat st = state_of(path);
    corpus_set_byte(path, at, 'z');
    const struct timespec times[2] = {st.st_atim, st.st_mtim};
    cr_assert_eq(utimensat(AT_FDCWD, path, times, 0), 0);
}

Test(token_cache, a_change_of_a_byte_is_found)
{
    nd_token_cache *first = open_cache();
    usleep(20000); /* longer than the step of a file system's clock */
    change_a_byte(files.list[0].path, (off_t)files.bytes - 5);
    expect_same(first, false);
    nd_token_cache_close(first);
}

/* Two files of one size that were written within one step of the file system's clock. */
Test(token_cache, another_file_has_another_cache)
{
    static const char *const names[] = {"b.txt", "c.txt"};
    struct stat st[2];
    int tries = 0;
    do {
        for (int i = 0; i < 2; i++) { /* a file that was looked at may have a finer clock */
            const char *path = tempdir_file(&dir, names[i]);
            unlink(path);
            const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
            cr_assert_eq(write(fd, names[i], 5), 5);
            close(fd);
        }
        for (int i = 0; i < 2; i++) {
            st[i] = state_of(tempdir_file(&dir, names[i]));
        }
    } while (memcmp(&st[0].st_ctim, &st[1].st_ctim, sizeof st[0].st_ctim) != 0 && ++tries < 100);
    use_text(tempdir_file(&dir, names[0]));
    nd_token_cache *first = open_cache();
    use_text(tempdir_file(&dir, names[1]));
    expect_same(first, false);
    nd_token_cache_close(first);
}

/* Numbers of the device and of the file are others on another node, and after a remount. */
Test(token_cache, other_numbers_of_a_file_are_no_other_text)
{
    nd_token_cache *first = open_cache();
    shown_number = 1;
    expect_same(first, true);
    nd_token_cache_close(first);
}

/* The two texts have one name in two folders, and the same size and time. */
Test(token_cache, a_relative_path_is_that_of_its_folder)
{
    nd_token_cache *first = NULL;
    fixed_now = (struct timespec){1000100, 0};
    fixed_change = (struct timespec){1000000, 1};
    for (int i = 0; i < 2; i++) {
        const char *name = i == 0 ? "a" : "b";
        cr_assert_eq(mkdir(tempdir_file(&dir, name), 0700), 0);
        cr_assert_eq(chdir(tempdir_file(&dir, name)), 0);
        FILE *text = fopen("t.txt", "w");
        cr_assert_not_null(text);
        cr_assert_eq(fputs(name, text) < 0 || fclose(text) != 0, 0);
        use_text("t.txt");
        first = i == 0 ? open_cache() : first;
    }
    expect_same(first, false);
    nd_token_cache_close(first);
}

/* Until a further change would have another time; some file systems count seconds, or two. */
Test(token_cache, a_text_that_has_just_changed_is_let_settle)
{
    static const struct {
        struct timespec change, now;
        long pause_ms; /* 0: none */
    } cases[] = {{{1000, 500000000}, {1000, 505000000}, 15},
                 {{1000, 500000000}, {1000, 520000000}, 0},
                 {{1000, 0}, {1000, 700000000}, 1300},
                 {{1000, 0}, {1002, 0}, 0},
                 {{9000, 0}, {1000, 0}, 2000}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_token_cache_close(open_cache()); /* so that nothing else pauses */
        fixed_change = cases[i].change;
        fixed_now = cases[i].now;
        nd_token_cache_close(open_cache());
        atomic_store(&pause_count, 0);
        nd_token_cache_close(open_cache());
        cr_expect_eq(atomic_load(&pause_count), cases[i].pause_ms > 0, "case %zu", i);
        cr_expect(cases[i].pause_ms == 0 || atomic_load(&pauses[0]) == cases[i].pause_ms,
                  "case %zu: %ld", i, atomic_load(&pauses[0]));
    }
}

Test(token_cache, a_text_that_changes_meanwhile_is_refused)
{
    growing = files.list[0].path;
    open_fails(request(), ND_ERR_DATA, "changed while it was encoded");
    cr_expect_null(growing);
    cr_expect_eq(count_files(), 0);
}

/* Before the text is encoded, which would fail with another error. The size is this run's own, so
 * it is checked without the lock that another run has. */
Test(token_cache, a_vocabulary_that_is_too_large_is_refused_first)
{
    nd_token_cache_request asked = request();
    nd_token_cache_close(open_cache());
    asked.vocab = 10;
    open_fails(asked, ND_ERR_CONFIG, "vocab_size is 10;");
    begin_part();
    asked.stall_seconds = 0.05;
    open_fails(asked, ND_ERR_CONFIG, "vocab_size is 10;");
    end_part();
    change_a_byte(files.list[0].path, 0); /* no JSON any more */
    open_fails(asked, ND_ERR_CONFIG, "vocab_size is 10;");
    asked.vocab = 0;
    open_fails(asked, ND_ERR_DATA, "line 1");
}

Test(token_cache, what_fails_leaves_no_file)
{
    nd_token_cache_request asked = request();
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    const struct rlimit full = {100000, limit.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &full), 0); /* the disk is full */
    open_fails(asked, ND_ERR_CANTCREATE, "set data.cache_dir");
    setrlimit(RLIMIT_FSIZE, &limit);
    cr_expect_eq(count_files(), 0);
    asked.folder = "/proc/nowhere";
    open_fails(asked, ND_ERR_CANTCREATE, "data.cache_dir");
    asked = request();
    rules.append_eod = true;
    open_fails(asked, ND_ERR_DATA, "names no end of text");
    cr_expect_eq(count_files(), 0);
}

/* The kernel tells an error of the disk once, and not to fsync. Ends of documents are sent too. */
Test(token_cache, bytes_that_are_lost_on_their_way_to_the_disk_are_an_error)
{
    enum { IDS = 16 << 20 }; /* so many bytes that they are sent before the end */
    int32_t *zeros = calloc(IDS, sizeof *zeros);
    const nd_corpus_piece ids = {.ids = {zeros, IDS, 0}}, ends = {.ends = {zeros, IDS / 2, 0}};
    const nd_token_sharing sharing = {0};
    nd_token_files out;
    assert_ok(nd_token_files_open(prefix, 65500, NULL, &out));
    sync_code = EINVAL; /* the file system cannot do it */
    assert_ok(nd_token_files_write(&out, &ids));
    sync_code = EIO;
    assert_fails(nd_token_files_write(&out, &ids), ND_ERR_CANTCREATE, "out.bin.part\" could not");
    nd_token_files_fini(&out);
    assert_ok(nd_token_files_open(prefix, 65500, &sharing, &out));
    assert_ok(nd_token_files_write(&out, &ends));
    assert_fails(nd_token_files_commit(&out), ND_ERR_CANTCREATE, "out.part\" could not");
    nd_token_files_fini(&out);
    free(zeros);
}

/* An index of more bytes than are written at once. */
Test(token_cache, the_index_of_many_documents)
{
    enum { DOCUMENTS = 10000 };
    static int32_t ids[2 * DOCUMENTS], ends[DOCUMENTS];
    char *data;
    size_t size;
    int32_t tokens = 0;
    for (int i = 0; i < DOCUMENTS; i++) {
        tokens += 1 + i % 2;
        ends[i] = tokens;
    }
    const nd_corpus_piece piece = {.ids = {ids, (size_t)tokens, 0}, .ends = {ends, DOCUMENTS, 0}};
    assert_ok(corpus_write(prefix, 65500, &piece, 1));
    assert_ok(nd_fs_read(tempdir_file(&dir, "out.idx"), 1 << 20, ND_ERR_DATA, &data, &size));
    cr_assert_eq(size, 34 + 12 * DOCUMENTS + 8 * (DOCUMENTS + 1));
    const uint8_t *lengths = (const uint8_t *)data + 34, *places = lengths + 4 * DOCUMENTS;
    for (int i = 0; i < DOCUMENTS; i++) {
        int32_t length;
        memcpy(&length, lengths + 4 * i, sizeof length);
        cr_assert_eq(length, 1 + i % 2);
        cr_assert_eq(u64_at(places, (uint64_t)i), i == 0 ? 0 : 4 * (uint64_t)ends[i - 1]);
    }
    for (uint64_t i = 0; i <= DOCUMENTS; i++) {
        cr_assert_eq(u64_at(places + 8 * DOCUMENTS, i), i);
    }
    free(data);
}

/* Its lengths have 32 bits with a sign, and what follows a longer document is not encoded. */
Test(token_cache, a_document_that_is_too_long_for_an_index_is_refused)
{
    const nd_corpus_piece piece = {.ends = {(int32_t[]){0}, 1, 0}};
    nd_token_files out;
    assert_ok(nd_token_files_open(prefix, 100, NULL, &out));
    out.count = INT32_MAX;
    assert_ok(nd_token_files_write(&out, &piece));
    out.count += INT32_MAX + 1u;
    assert_fails(nd_token_files_write(&out, &piece), ND_ERR_DATA, "has 2147483648 tokens");
    nd_token_files_fini(&out);
}

/* The file of the pair has these bytes. */
static void expect_file(const char *name, const void *bytes, size_t size)
{
    char *data;
    size_t got;
    assert_ok(nd_fs_read(tempdir_file(&dir, name), 1000, ND_ERR_DATA, &data, &got));
    cr_assert_eq(got, size, "%s has %zu bytes", name, got);
    cr_expect_eq(memcmp(data, bytes, size), 0, "%s", name);
    free(data);
}

/* The pair that Megatron-LM reads. */
Test(token_cache, megatron_files)
{
    static const struct __attribute__((packed)) {
        char head[34];
        int32_t lengths[3];
        int64_t places[3], numbers[4];
    } index = {"MMIDIDX\0\0\1\0\0\0\0\0\0\0\x8\3\0\0\0\0\0\0\0\4\0\0\0\0\0\0",
               {3, 2, 1},
               {0, 6, 10},
               {0, 1, 2, 3}};
    const nd_corpus_piece pieces[] = {
        {.ids = {(int32_t[]){1, 2, 3, 4}, 4, 0}, .ends = {(int32_t[]){3}, 1, 0}},
        {.ids = {(int32_t[]){5, 65499}, 2, 0}, .ends = {(int32_t[]){1, 2}, 2, 0}}};
    static const char what_was_left[200];
    nd_token_files out, beside;
    assert_ok(nd_token_files_open(prefix, 65500, NULL, &out));
    cr_expect_eq(out.width, 4);
    nd_token_files_fini(&out);
    assert_ok(nd_token_files_open(prefix, 65499, NULL, &out));
    assert_ok(nd_token_files_write(&out, &pieces[1]));
    cr_expect_not(tempdir_has_path(tempdir_file(&dir, "out.bin")));
    assert_ok(nd_token_files_commit(&out));
    nd_token_files_fini(&out);
    expect_file("out.bin", (uint16_t[]){5, 65499}, 4);
    /* A new pair, and what a killed process left. */
    tempdir_write(&dir, "out.idx.part", what_was_left, sizeof what_was_left);
    assert_ok(nd_token_files_open(prefix, 65499, NULL, &out));
    assert_fails(nd_token_files_open(prefix, 65499, NULL, &beside), ND_ERR_CANTCREATE,
                 "another process writes");
    nd_token_files_fini(&beside);
    cr_expect(tempdir_has_path(tempdir_file(&dir, "out.bin.part")));
    nd_token_files_fini(&out);
    tempdir_write(&dir, "out.idx.part", what_was_left, sizeof what_was_left);
    assert_ok(corpus_write(prefix, 65499, pieces, 2));
    expect_file("out.bin", (uint16_t[]){1, 2, 3, 4, 5, 65499}, 12);
    expect_file("out.idx", &index, sizeof index);
    /* An index that cannot be replaced: the old .bin stays with it. */
    cr_assert_eq(unlink(tempdir_file(&dir, "out.idx")), 0);
    cr_assert_eq(mkdir(tempdir_file(&dir, "out.idx"), 0700), 0);
    assert_fails(corpus_write(prefix, 65499, pieces, 1), ND_ERR_CANTCREATE, "cannot be replaced");
    expect_file("out.bin", (uint16_t[]){1, 2, 3, 4, 5, 65499}, 12);
    cr_assert_eq(rmdir(tempdir_file(&dir, "out.idx")), 0);
}

// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/fsio.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "runtime/base/clock.h"

enum { SHA_BLOCK_BYTES = 1 << 20 };

static _Thread_local atomic_llong *thread_beat;

void nd_fs_set_beat(atomic_llong *beat)
{
    thread_beat = beat;
}

void nd_fs_beat(void)
{
    if (thread_beat) {
        atomic_store(thread_beat, nd_clock_ns());
    }
}

nd_status nd_fs_blame(int code, nd_status blame)
{
    switch (code) {
    case ENOENT:
    case ENOTDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case ENXIO: /* a socket */
        return blame;
    default:
        return ND_ERR_IO;
    }
}

static nd_status open_regular(const char *path, nd_status blame, int *fd_out, size_t *size)
{
    /* O_NONBLOCK: opening a FIFO by mistake must not wait for a writer. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        int code = errno;
        return nd_fail(nd_fs_blame(code, blame), "cannot open \"%s\": %s", path, strerror(code));
    }
    struct stat st;
    if (fstat(fd, &st) != 0) {
        int code = errno;
        close(fd);
        return nd_fail(ND_ERR_IO, "cannot examine \"%s\": %s", path, strerror(code));
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return nd_fail(blame, "\"%s\" is %s, not a file", path,
                       S_ISDIR(st.st_mode) ? "a folder" : "a device, pipe or socket");
    }
    *fd_out = fd;
    *size = (size_t)st.st_size;
    return ND_OK;
}

nd_status nd_fs_read(const char *path, size_t max_bytes, nd_status blame, char **out, size_t *size)
{
    int fd = -1;
    size_t bytes = 0;
    char *data = NULL;
    ND_TRY(open_regular(path, blame, &fd, &bytes));
    nd_status status = ND_OK;
    if (bytes > max_bytes) {
        status = nd_fail(
            blame,
            "\"%s\" has %zu bytes, and at most %zu are read; check that it is the right file", path,
            bytes, max_bytes);
        goto out;
    }
    ND_TRY_OUT(nd_alloc(bytes + 1, 1, (void **)&data));
    ND_TRY_OUT(nd_fs_pread(fd, path, data, bytes, 0));
    *out = data;
    *size = bytes;
    data = NULL;
out:
    free(data);
    close(fd);
    return status;
}

nd_status nd_fs_map_open(const char *path, nd_status blame, nd_fs_map *out)
{
    int fd = -1;
    nd_fs_map map = {0};
    ND_TRY(open_regular(path, blame, &fd, &map.size));
    if (map.size > 0) {
        void *data = mmap(NULL, map.size, PROT_READ, MAP_PRIVATE, fd, 0);
        int code = errno;
        if (data == MAP_FAILED) {
            close(fd);
            if (code == ENOMEM) {
                return nd_fail_memory("a map of \"%s\" (%zu bytes)", path, map.size);
            }
            return nd_fail(ND_ERR_IO, "cannot map \"%s\" (%zu bytes): %s", path, map.size,
                           strerror(code));
        }
        map.data = data;
    }
    map.descriptor = fd + 1;
    *out = map;
    return ND_OK;
}

void nd_fs_map_close(nd_fs_map *map)
{
    if (map->descriptor > 0) {
        close(map->descriptor - 1);
    }
    if (map->data) {
        munmap((void *)map->data, map->size);
    }
    *map = (nd_fs_map){0};
}

/* Where this thread continues after a fault of its reading; NULL: a fault is a crash. */
static _Thread_local sigjmp_buf *landing;

static void on_fault(int signal_number, siginfo_t *info, void *context)
{
    if (landing && info->si_code > 0) { /* the kernel's, not sent by a process */
        siglongjmp(*landing, 1);
    }
    signal(signal_number, SIG_DFL);
    raise(signal_number); /* ends the process when this handler returns */
}

static void install(void)
{
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}

static bool is_whole(const nd_fs_map *map)
{
    struct stat st;
    return map->descriptor <= 0 || fstat(map->descriptor - 1, &st) != 0 ||
           (uint64_t)st.st_size >= map->size;
}

/* Helper threads block all signals; a fault while SIGBUS is blocked would end the process. */
static nd_status run(nd_status (*read)(void *context), void *context, bool *faulted)
{
    sigjmp_buf here, *volatile outer = landing;
    sigset_t fault, before;
    sigemptyset(&fault);
    sigaddset(&fault, SIGBUS);
    pthread_sigmask(SIG_UNBLOCK, &fault, &before);
    if (sigsetjmp(here, 1) != 0) {
        landing = outer;
        *faulted = true;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return ND_OK;
    }
    landing = &here;
    nd_status status = read(context);
    landing = outer;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

nd_status nd_fs_map_guard(const nd_fs_map *map, const char *path, nd_status (*read)(void *context),
                          void *context)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install);
    bool faulted = false;
    nd_status status = run(read, context, &faulted);
    if (!is_whole(map)) {
        return nd_fail(ND_ERR_IO,
                       "\"%s\" became shorter while it was read: it had %zu bytes when the run "
                       "began; leave the file alone during a run",
                       path, map->size);
    }
    return faulted ? nd_fail(ND_ERR_IO, "reading \"%s\" failed: its device reports an error", path)
                   : status;
}

void nd_fs_map_prefetch(const nd_fs_map *map, size_t offset, size_t bytes)
{
    if (offset >= map->size) {
        return;
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t begin = offset / page * page;
    size_t end = bytes > map->size - offset ? map->size : offset + bytes;
    madvise((void *)(map->data + begin), end - begin, MADV_WILLNEED); /* a hint: no error matters */
}

nd_status nd_fs_pread(int fd, const char *path, void *out, size_t size, int64_t offset)
{
    size_t done = 0;
    while (done < size) {
        ssize_t n = pread(fd, (char *)out + done, size - done, (off_t)offset + (off_t)done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return nd_fail(ND_ERR_IO, "reading \"%s\" failed at byte %lld: %s", path,
                           (long long)offset + (long long)done, strerror(errno));
        }
        if (n == 0) {
            return nd_fail(ND_ERR_IO,
                           "\"%s\" ended at byte %lld while it was read; another program shortened "
                           "it",
                           path, (long long)offset + (long long)done);
        }
        done += (size_t)n;
        nd_fs_beat();
    }
    return ND_OK;
}

nd_status nd_fs_pwrite(int fd, const char *path, const void *data, size_t size, int64_t offset)
{
    size_t done = 0;
    while (done < size) {
        ssize_t n = pwrite(fd, (const char *)data + done, size - done, (off_t)offset + (off_t)done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return nd_fail(ND_ERR_CANTCREATE, "writing \"%s\" failed at byte %lld: %s", path,
                           (long long)offset + (long long)done,
                           n < 0 ? strerror(errno) : "the device takes no more bytes");
        }
        done += (size_t)n;
        nd_fs_beat();
    }
    return ND_OK;
}

nd_status nd_fs_sync_close(int fd, const char *path)
{
    int sync_code = fsync(fd) == 0 ? 0 : errno;
    int close_code = close(fd) == 0 ? 0 : errno;
    nd_fs_beat();
    if (sync_code || close_code) {
        return nd_fail(ND_ERR_CANTCREATE, "\"%s\" could not be made durable: %s", path,
                       strerror(sync_code ? sync_code : close_code));
    }
    return ND_OK;
}

nd_status nd_fs_sync_file(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd >= 0 ? nd_fs_sync_close(fd, path)
                   : nd_fail(ND_ERR_CANTCREATE, "cannot open \"%s\" to make it durable: %s", path,
                             strerror(errno));
}

nd_status nd_fs_sync_folder(const char *folder)
{
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        return nd_fail(ND_ERR_CANTCREATE, "cannot open folder \"%s\": %s", folder, strerror(errno));
    }
    /* Some file systems have no fsync of folders and say EINVAL. */
    int code = fsync(fd) == 0 || errno == EINVAL ? 0 : errno;
    close(fd);
    nd_fs_beat();
    if (code) {
        return nd_fail(ND_ERR_CANTCREATE, "folder \"%s\" could not be made durable: %s", folder,
                       strerror(code));
    }
    return ND_OK;
}

static nd_status write_and_rename(const char *path, const char *temporary, const void *data,
                                  size_t size)
{
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) {
        return nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", path, strerror(errno));
    }
    nd_status status = nd_fs_pwrite(fd, path, data, size, 0);
    if (status == ND_OK) {
        status = nd_fs_sync_close(fd, path);
    } else {
        close(fd);
    }
    if (status == ND_OK && rename(temporary, path) != 0) {
        status = nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", path, strerror(errno));
    }
    if (status != ND_OK) {
        unlink(temporary);
    }
    return status;
}

nd_status nd_fs_write_atomic(const char *path, const void *data, size_t size)
{
    nd_status status = ND_OK;
    char *temporary = NULL, *folder = NULL;
    ND_TRY_OUT(nd_fs_format(&temporary, "%s.tmp-%d-%llx", path, (int)getpid(),
                            (unsigned long long)nd_clock_ns()));
    ND_TRY_OUT(nd_fs_parent(path, &folder));
    ND_TRY_OUT(write_and_rename(path, temporary, data, size));
    ND_TRY_OUT(nd_fs_sync_folder(folder));
out:
    free(folder);
    free(temporary);
    return status;
}

/* What the plain files of a folder occupy. */
static uint64_t occupied_bytes(const char *folder)
{
    uint64_t bytes = 0;
    struct stat st;
    DIR *dir = opendir(folder);
    if (!dir) {
        return 0;
    }
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        if (fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISREG(st.st_mode)) {
            bytes += (uint64_t)st.st_blocks * 512;
        }
    }
    closedir(dir);
    return bytes;
}

/* The free space is measured first: what is written meanwhile is then counted twice, not lost. */
nd_status nd_fs_check_space_left(const char *folder, const char *begun, uint64_t bytes,
                                 const char *purpose)
{
    struct statvfs fs;
    if (statvfs(folder, &fs) != 0) {
        if (errno == ENOENT) {
            return nd_fail(ND_ERR_CANTCREATE,
                           "%s needs room in \"%s\", but there is no such folder; make it, or "
                           "write elsewhere",
                           purpose, folder);
        }
        return nd_fail(ND_ERR_CANTCREATE,
                       "%s needs room in \"%s\", but that folder cannot be examined: %s", purpose,
                       folder, strerror(errno));
    }
    uint64_t available = (uint64_t)fs.f_bavail * fs.f_frsize;
    available += begun ? occupied_bytes(begun) : 0;
    if (available < bytes) {
        const bool small = available < 1000000;
        return nd_fail(
            ND_ERR_CANTCREATE,
            "%s needs %.1f MB in \"%s\", but only %.1f %s are free there; free space, or "
            "write elsewhere",
            purpose, (double)bytes * 1e-6, folder, (double)available * (small ? 1e-3 : 1e-6),
            small ? "kB" : "MB");
    }
    return ND_OK;
}

nd_status nd_fs_check_space(const char *folder, uint64_t bytes, const char *purpose)
{
    return nd_fs_check_space_left(folder, NULL, bytes, purpose);
}

void nd_fs_remove_flat_folder(const char *folder)
{
    DIR *dir = opendir(folder);
    if (!dir) {
        return;
    }
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            unlinkat(dirfd(dir), entry->d_name, 0);
        }
    }
    closedir(dir);
    rmdir(folder);
}

static nd_status sync_parent(const char *path)
{
    char *parent = NULL;
    ND_TRY(nd_fs_parent(path, &parent));
    nd_status status = nd_fs_sync_folder(parent);
    free(parent);
    return status;
}

nd_status nd_fs_make_folders(const char *path, const char *what, const char *advice)
{
    char part[4096];
    size_t length = strlen(path);
    if (length >= sizeof part) {
        return nd_fail(ND_ERR_CANTCREATE,
                       "the path of %s has %zu characters; at most %zu are possible. %s", what,
                       length, sizeof part - 1, advice);
    }
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != '\0') {
            continue;
        }
        memcpy(part, path, i);
        part[i] = '\0';
        /* A parent may exist in a place where nothing can be made: only the last one's answer
         * counts. */
        if (mkdir(part, 0777) == 0) {
            ND_TRY(sync_parent(part));
        } else if (errno != EEXIST && i == length) {
            return nd_fail(ND_ERR_CANTCREATE, "%s %s cannot be created: %s; %s", what, path,
                           strerror(errno), advice);
        }
    }
    return ND_OK;
}

nd_status nd_fs_parent(const char *path, char **out)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') {
        n--;
    }
    while (n > 0 && path[n - 1] != '/') {
        n--;
    }
    while (n > 1 && path[n - 1] == '/') {
        n--;
    }
    return n == 0 ? nd_fs_format(out, ".") : nd_fs_format(out, "%.*s", (int)n, path);
}

nd_status nd_fs_format(char **out, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    char *text = NULL;
    int n = vasprintf(&text, format, args);
    va_end(args);
    if (n < 0) {
        return nd_fail_memory("a file name");
    }
    *out = text;
    return ND_OK;
}

bool nd_fs_exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

static void put_hex(const unsigned char digest[32], char hex[65])
{
    for (int i = 0; i < 32; i++) {
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    }
}

/* *state is the caller's, also where this fails. */
static nd_status begin_sha256(EVP_MD_CTX **state)
{
    *state = EVP_MD_CTX_new();
    return !*state ? nd_fail_memory("a SHA-256")
           : EVP_DigestInit_ex(*state, EVP_sha256(), NULL) == 1
               ? ND_OK
               : nd_fail(ND_ERR_INTERNAL, "OpenSSL has no SHA-256");
}

static bool end_sha256(EVP_MD_CTX *state, char hex[65])
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned length = 0;
    if (EVP_DigestFinal_ex(state, digest, &length) != 1 || length != 32) {
        return false;
    }
    put_hex(digest, hex);
    return true;
}

nd_status nd_fs_sha256(const void *data, size_t size, char hex[65])
{
    EVP_MD_CTX *state;
    nd_status status = begin_sha256(&state);
    if (status == ND_OK && (EVP_DigestUpdate(state, data, size) != 1 || !end_sha256(state, hex))) {
        status = nd_fail(ND_ERR_INTERNAL, "OpenSSL could not compute a SHA-256 of %zu bytes", size);
    }
    EVP_MD_CTX_free(state);
    return status;
}

static nd_status digest_file(int fd, const char *path, EVP_MD_CTX *state, uint8_t *block)
{
    ssize_t n;
    while ((n = read(fd, block, SHA_BLOCK_BYTES)) != 0) {
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return nd_fail(ND_ERR_IO, "cannot read \"%s\": %s", path, strerror(errno));
        }
        if (EVP_DigestUpdate(state, block, (size_t)n) != 1) {
            return nd_fail(ND_ERR_INTERNAL, "OpenSSL could not compute the SHA-256 of \"%s\"",
                           path);
        }
        nd_fs_beat();
    }
    return ND_OK;
}

nd_status nd_fs_sha256_file(const char *path, char hex[65])
{
    size_t size;
    int fd = -1;
    uint8_t *block = NULL;
    EVP_MD_CTX *state = NULL;
    nd_status status = ND_OK;
    ND_TRY(open_regular(path, ND_ERR_DATA, &fd, &size));
    ND_TRY_OUT(begin_sha256(&state));
    ND_TRY_OUT(nd_alloc(SHA_BLOCK_BYTES, 1, (void **)&block));
    ND_TRY_OUT(digest_file(fd, path, state, block));
    if (!end_sha256(state, hex)) {
        status = nd_fail(ND_ERR_INTERNAL, "OpenSSL could not compute the SHA-256 of \"%s\"", path);
    }
out:
    EVP_MD_CTX_free(state);
    free(block);
    close(fd);
    return status;
}

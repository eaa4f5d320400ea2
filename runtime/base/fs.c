// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/fs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "runtime/base/clock.h"

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

/* Looking. */

static bool is_absent(int code)
{
    return code == ENOENT || code == ENOTDIR || code == ENAMETOOLONG;
}

static nd_status look(const char *path, int flags, nd_fs_kind *kind, struct stat *out)
{
    struct stat st;
    *kind = ND_FS_ABSENT;
    if (fstatat(AT_FDCWD, path, &st, flags) != 0) {
        return is_absent(errno)
                   ? ND_OK
                   : nd_fail_local(ND_ERR_IO, "cannot examine \"%s\": %s", path, strerror(errno));
    }
    *kind = S_ISREG(st.st_mode)   ? ND_FS_FILE
            : S_ISDIR(st.st_mode) ? ND_FS_FOLDER
            : S_ISLNK(st.st_mode) ? ND_FS_LINK
                                  : ND_FS_OTHER;
    if (out) {
        *out = st;
    }
    return ND_OK;
}

nd_status nd_fs_look(const char *path, nd_fs_kind *kind, struct stat *st)
{
    return look(path, 0, kind, st);
}

nd_status nd_fs_look_at_link(const char *path, nd_fs_kind *kind, struct stat *st)
{
    return look(path, AT_SYMLINK_NOFOLLOW, kind, st);
}

nd_status nd_fs_exists(const char *path, bool *out)
{
    nd_fs_kind kind;
    ND_TRY(nd_fs_look_at_link(path, &kind, NULL));
    *out = kind != ND_FS_ABSENT;
    return ND_OK;
}

nd_status nd_fs_has(const char *folder, const char *name, bool *out)
{
    char *path = NULL;
    ND_TRY(nd_fs_format(&path, "%s/%s", folder, name));
    nd_status status = nd_fs_exists(path, out);
    free(path);
    return status;
}

nd_status nd_fs_is_folder(const char *path, bool *out)
{
    nd_fs_kind kind;
    ND_TRY(nd_fs_look(path, &kind, NULL));
    *out = kind == ND_FS_FOLDER;
    return ND_OK;
}

static nd_status fail_list(const char *folder, int code)
{
    return nd_fail_local(ND_ERR_IO, "the folder \"%s\" cannot be read: %s", folder, strerror(code));
}

static nd_status add_name(nd_fs_names *names, const char *name)
{
    if ((names->count & (names->count - 1)) == 0) { /* full: the room doubles */
        void *more = realloc(names->list, (size_t)(2 * names->count + 1) * sizeof *names->list);
        if (!more) {
            return nd_fail_memory("a list of files");
        }
        names->list = more;
    }
    ND_TRY(nd_fs_format(&names->list[names->count], "%s", name));
    names->count++;
    return ND_OK;
}

static int by_version(const void *a, const void *b)
{
    return strverscmp(*(char *const *)a, *(char *const *)b);
}

static nd_status read_names(DIR *dir, const char *folder, nd_fs_names *out)
{
    for (;;) {
        errno = 0;
        const struct dirent *entry = readdir(dir);
        if (!entry) {
            return errno == 0 ? ND_OK : fail_list(folder, errno);
        }
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            ND_TRY(add_name(out, entry->d_name));
        }
    }
}

nd_status nd_fs_list(const char *folder, nd_fs_names *out)
{
    *out = (nd_fs_names){0};
    DIR *dir = opendir(folder);
    if (!dir) {
        return is_absent(errno) ? ND_OK : fail_list(folder, errno);
    }
    nd_status status = read_names(dir, folder, out);
    closedir(dir);
    if (status != ND_OK) {
        nd_fs_names_fini(out);
        return status;
    }
    out->there = true;
    if (out->count > 0) {
        qsort(out->list, (size_t)out->count, sizeof *out->list, by_version);
    }
    return ND_OK;
}

void nd_fs_names_fini(nd_fs_names *names)
{
    for (int i = 0; i < names->count; i++) {
        free(names->list[i]);
    }
    free(names->list);
    *names = (nd_fs_names){0};
}

/* glob takes the end of a folder's names and an error of reading it for the same, and passes over a
 * folder that cannot be opened. These note the first failure of the calling thread in its error
 * record. */
static _Thread_local bool glob_failed;

static void note(const char *path, int code)
{
    if (!glob_failed) {
        glob_failed = true;
        (void)nd_fail_local(ND_ERR_IO, "\"%s\", which the pattern names, cannot be read: %s", path,
                            strerror(code));
    }
}

static void *glob_opendir(const char *path)
{
    struct stat st;
    DIR *dir = opendir(path);
    const int code = dir ? 0 : errno;
    /* A link to nowhere is there, and its files are missing. */
    if (!dir && (!is_absent(code) ||
                 (fstatat(AT_FDCWD, path, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(st.st_mode)))) {
        note(path, code);
    }
    return dir;
}

static struct dirent *glob_readdir(void *dir)
{
    errno = 0;
    struct dirent *entry = readdir(dir);
    if (!entry && errno != 0) {
        note("a folder", errno);
    }
    return entry;
}

static void glob_closedir(void *dir)
{
    closedir(dir);
}

static int glob_look(const char *path, struct stat *st, int flags)
{
    const int result = fstatat(AT_FDCWD, path, st, flags);
    if (result != 0 && !is_absent(errno)) {
        note(path, errno);
    }
    return result;
}

static int glob_stat(const char *path, struct stat *st)
{
    return glob_look(path, st, 0);
}

static int glob_lstat(const char *path, struct stat *st)
{
    return glob_look(path, st, AT_SYMLINK_NOFOLLOW);
}

/* Adds the paths of a pattern without "**". */
static nd_status add_matches(const char *pattern, nd_fs_names *out)
{
    glob_t found = {.gl_opendir = glob_opendir,
                    .gl_readdir = glob_readdir,
                    .gl_closedir = glob_closedir,
                    .gl_stat = glob_stat,
                    .gl_lstat = glob_lstat};
    glob_failed = false;
    const int code = glob(pattern, GLOB_NOSORT | GLOB_ALTDIRFUNC, NULL, &found);
    nd_status status = glob_failed ? nd_fail_context(ND_ERR_IO, "looking for %s", pattern)
                       : code == GLOB_NOSPACE ? nd_fail_memory("the files of \"%s\"", pattern)
                                              : ND_OK;
    for (size_t i = 0; status == ND_OK && code == 0 && i < found.gl_pathc; i++) {
        status = add_name(out, found.gl_pathv[i]);
    }
    globfree(&found);
    return status;
}

/* A pattern that matches this text alone. Owned by the caller. */
static nd_status escape(const char *text, char **out)
{
    size_t n = 0;
    ND_TRY(ND_ALLOC(2 * strlen(text) + 1, out));
    for (; *text; text++) {
        if (strchr("*?[\\", *text)) {
            (*out)[n++] = '\\';
        }
        (*out)[n++] = *text;
    }
    return ND_OK;
}

/* Adds what `rest` names in the folder ("": the working directory) and in all below it, but for
 * hidden ones and links. */
static nd_status add_below(const char *folder, const char *rest, int depth, nd_fs_names *out)
{
    nd_fs_names names = {0};
    char *path = NULL, *before = NULL;
    const char *slash = *folder ? "/" : "";
    nd_status status = ND_OK;
    if (depth == 0) {
        return nd_fail(ND_ERR_CONFIG, "\"%s\" lies too deep for **; name a folder further down",
                       folder);
    }
    ND_TRY_OUT(escape(folder, &before));
    ND_TRY_OUT(nd_fs_format(&path, "%s%s%s", before, slash, rest));
    ND_TRY_OUT(add_matches(path, out));
    ND_TRY_OUT(nd_fs_list(*folder ? folder : ".", &names));
    for (int i = 0; i < names.count; i++) {
        nd_fs_kind kind = ND_FS_ABSENT;
        free(path);
        path = NULL;
        ND_TRY_OUT(nd_fs_format(&path, "%s%s%s", folder, slash, names.list[i]));
        ND_TRY_OUT(nd_fs_look_at_link(path, &kind, NULL));
        if (kind == ND_FS_FOLDER && names.list[i][0] != '.') {
            ND_TRY_OUT(add_below(path, rest, depth - 1, out));
        }
    }
out:
    free(path);
    free(before);
    nd_fs_names_fini(&names);
    return status;
}

/* The part "**" between slashes or at an end of a pattern; NULL: there is none. */
static const char *find_deep(const char *pattern)
{
    const char *at = pattern;
    while ((at = strstr(at, "**"))) {
        if ((at == pattern || at[-1] == '/') && (at[2] == '/' || !at[2])) {
            return at;
        }
        at += 2;
    }
    return NULL;
}

static nd_status add_deep(const char *pattern, const char *deep, nd_fs_names *out)
{
    enum { DEPTH_MAX = 32 };
    nd_fs_names folders = {0};
    char *before = NULL;
    const char *rest = deep[2] ? deep + 3 : "*";
    nd_status status = ND_OK;
    if (find_deep(rest)) {
        return nd_fail(ND_ERR_CONFIG, "\"%s\" has ** twice; leave one out", pattern);
    }
    if (deep == pattern) {
        return add_below("", rest, DEPTH_MAX, out);
    }
    ND_TRY_OUT(nd_fs_format(&before, "%.*s", (int)(deep - pattern), pattern));
    ND_TRY_OUT(add_matches(before, &folders)); /* which end with a slash, as the pattern does */
    for (int i = 0; i < folders.count; i++) {
        char *folder = folders.list[i];
        const size_t size = strlen(folder);
        folder[size > 1 ? size - 1 : size] = '\0';
        ND_TRY_OUT(add_below(folder, rest, DEPTH_MAX, out));
    }
out:
    free(before);
    nd_fs_names_fini(&folders);
    return status;
}

nd_status nd_fs_glob(const char *pattern, nd_fs_names *out)
{
    const char *deep = find_deep(pattern);
    *out = (nd_fs_names){0};
    nd_status status = deep ? add_deep(pattern, deep, out) : add_matches(pattern, out);
    if (status != ND_OK) {
        nd_fs_names_fini(out);
    }
    return status;
}

nd_status nd_fs_blame(int code, nd_status blame)
{
    /* ENXIO: a socket */
    return is_absent(code) || code == ELOOP || code == ENXIO ? blame : ND_ERR_IO;
}

nd_status nd_fs_blame_write(int code)
{
    return code == EIO || code == ESTALE || code == EMFILE || code == ENFILE ? ND_ERR_IO
                                                                             : ND_ERR_CANTCREATE;
}

/* Opening. */

static nd_status open_regular(const char *path, int flags, nd_status blame, int *out,
                              struct stat *out_st)
{
    struct stat st;
    /* O_NONBLOCK: opening a FIFO by mistake must not wait for a writer. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | flags);
    if (fd < 0) {
        const int code = errno;
        return nd_fail(nd_fs_blame(code, blame), "cannot open \"%s\": %s", path,
                       flags ? nd_fs_reason(code) : strerror(code));
    }
    nd_status status = ND_OK;
    if (fstat(fd, &st) != 0) {
        status = nd_fail_local(ND_ERR_IO, "cannot examine \"%s\": %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        status = nd_fail(blame, "\"%s\" is %s, not a file", path,
                         S_ISDIR(st.st_mode) ? "a folder" : "a device, pipe or socket");
    }
    if (status != ND_OK) {
        close(fd);
        return status;
    }
    *out = fd;
    if (out_st) {
        *out_st = st;
    }
    return ND_OK;
}

/* A clone without git-lfs has a few lines in the place of a large file: the first one names a
 * version by an address (there are several), and one gives the file's digest. */
static bool is_lfs_pointer(int fd, off_t bytes)
{
    enum { POINTER_MAX = 1024 };
    char text[POINTER_MAX];
    const ssize_t got = bytes < POINTER_MAX ? pread(fd, text, sizeof text - 1, 0) : -1;
    if (got <= 0) {
        return false;
    }
    text[got] = '\0';
    const char *begin = text + (strncmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0);
    return strncmp(begin, "version http", 12) == 0 && strstr(begin, "\noid sha256:");
}

nd_status nd_fs_open(const char *path, nd_status blame, int *fd, struct stat *st)
{
    struct stat own;
    ND_TRY(open_regular(path, 0, blame, fd, &own));
    if (is_lfs_pointer(*fd, own.st_size)) {
        close(*fd);
        *fd = -1;
        return nd_fail(blame,
                       "\"%s\" is a Git LFS pointer and not the file; fetch the file with git lfs "
                       "pull",
                       path);
    }
    if (st) {
        *st = own;
    }
    return ND_OK;
}

nd_status nd_fs_open_own(const char *path, nd_status blame, int *fd, struct stat *st)
{
    return open_regular(path, O_NOFOLLOW, blame, fd, st);
}

/* Takes the descriptor over. */
static FILE *stream_of(int fd, const char *mode)
{
    FILE *stream = fd >= 0 ? fdopen(fd, mode) : NULL;
    if (fd >= 0 && !stream) {
        close(fd);
        errno = ENOMEM;
    }
    return stream;
}

nd_status nd_fs_stream_own(const char *path, nd_status blame, FILE **out)
{
    int fd = -1;
    ND_TRY(nd_fs_open_own(path, blame, &fd, NULL));
    *out = stream_of(fd, "r");
    return *out ? ND_OK : nd_fail_memory("reading \"%s\"", path);
}

int nd_fs_create(const char *path, mode_t mode)
{
    return open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode);
}

FILE *nd_fs_stream_new(const char *path, mode_t mode)
{
    const int fd = nd_fs_create(path, mode);
    FILE *stream = stream_of(fd, "w");
    if (fd >= 0 && !stream) {
        unlink(path);
        errno = ENOMEM;
    }
    return stream;
}

int nd_fs_update(const char *path, int flags)
{
    struct stat st;
    const int fd =
        open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | flags, 0666);
    if (fd < 0) {
        return -1;
    }
    const int code = fstat(fd, &st) != 0    ? errno
                     : !S_ISREG(st.st_mode) ? ENXIO
                     : st.st_nlink > 1      ? EMLINK /* 0: another process has just removed it */
                                            : 0;
    if (code != 0) {
        close(fd);
        errno = code;
        return -1;
    }
    return fd;
}

const char *nd_fs_reason(int code)
{
    return code == ELOOP    ? "it is a link"
           : code == ENXIO  ? "it is a device, pipe or socket"
           : code == EMLINK ? "it is another name of a file elsewhere"
                            : strerror(code);
}

int nd_fs_open_folder(const char *path)
{
    return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

int nd_fs_open_kernel(const char *path)
{
    return open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
}

FILE *nd_fs_stream_kernel(const char *path)
{
    return fopen(path, "re");
}

void nd_fs_read_kernel(const char *path, char *text, size_t size)
{
    int fd = nd_fs_open_kernel(path);
    ssize_t n = fd < 0 ? 0 : read(fd, text, size - 1);
    text[n > 0 ? n : 0] = '\0';
    if (fd >= 0) {
        close(fd);
    }
}

/* Locking. */

nd_status nd_fs_lock(int fd, const char *path, nd_fs_locked *out)
{
    int code;
    do {
        code = flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    } while (code == EINTR);
    if (code == 0) {
        *out = ND_FS_LOCKED;
    } else if (code == EWOULDBLOCK) {
        *out = ND_FS_LOCKED_BY_ANOTHER;
    } else if (code == ENOLCK || code == ENOSYS || code == EOPNOTSUPP) {
        *out = ND_FS_NO_LOCKS;
    } else {
        return nd_fail_local(ND_ERR_IO, "cannot lock \"%s\": %s", path, strerror(code));
    }
    return ND_OK;
}

/* Reading. */

nd_status nd_fs_read(const char *path, size_t max_bytes, nd_status blame, char **out, size_t *size)
{
    mode_t mode;
    return nd_fs_read_mode(path, max_bytes, blame, out, size, &mode);
}

nd_status nd_fs_read_mode(const char *path, size_t max_bytes, nd_status blame, char **out,
                          size_t *size, mode_t *mode)
{
    int fd = -1;
    struct stat st;
    char *data = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_open(path, blame, &fd, &st));
    const size_t bytes = (size_t)st.st_size;
    if (bytes > max_bytes) {
        status = nd_fail(
            blame,
            "\"%s\" has %zu bytes, and at most %zu are read; check that it is the right file", path,
            bytes, max_bytes);
        goto out;
    }
    ND_TRY_OUT(nd_alloc(bytes + 1, 1, (void **)&data));
    ND_TRY_OUT(nd_fs_pread(fd, path, data, bytes, 0));
    *size = bytes;
    if (bytes >= 3 && memcmp(data, "\xef\xbb\xbf", 3) == 0) { /* a byte order mark is not text */
        *size -= 3;
        memmove(data, data + 3, *size + 1);
    }
    *mode = st.st_mode;
    *out = data;
    data = NULL;
out:
    free(data);
    close(fd);
    return status;
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
            return nd_fail_local(ND_ERR_IO, "reading \"%s\" failed at byte %lld: %s", path,
                                 (long long)offset + (long long)done, strerror(errno));
        }
        if (n == 0) {
            return nd_fail_local(
                ND_ERR_IO,
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

/* Paths. */

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

nd_status nd_fs_path(char out[PATH_MAX], const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(out, PATH_MAX, format, args);
    va_end(args);
    return n < PATH_MAX ? ND_OK : nd_fail(ND_ERR_DATA, "the path \"%.200s...\" is too long", out);
}

// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fs.h"

nd_status nd_fs_map_open(const char *path, nd_status blame, nd_fs_map *out)
{
    int fd = -1;
    nd_fs_map map = {0};
    struct stat st;
    ND_TRY(nd_fs_open(path, blame, &fd, &st));
    map.size = (size_t)st.st_size;
    if (map.size > 0) {
        void *data = mmap(NULL, map.size, PROT_READ, MAP_PRIVATE, fd, 0);
        int code = errno;
        if (data == MAP_FAILED) {
            close(fd);
            if (code == ENOMEM) {
                return nd_fail_memory("a map of \"%s\" (%zu bytes)", path, map.size);
            }
            return nd_fail_local(ND_ERR_IO, "cannot map \"%s\" (%zu bytes): %s", path, map.size,
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

/* This thread continues here after a fault of its reading; NULL: a fault is a crash. */
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

/* Helper threads block all signals; a fault while SIGBUS is blocked would end the process. */
static nd_status read_guarded(nd_status (*read)(void *context), void *context, bool *faulted)
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
    struct stat st;
    bool faulted = false;
    nd_status status = read_guarded(read, context, &faulted);
    if (map->descriptor > 0 && fstat(map->descriptor - 1, &st) == 0 &&
        (uint64_t)st.st_size < map->size) {
        return nd_fail_local(
            ND_ERR_IO,
            "\"%s\" became shorter while it was read: it had %zu bytes when the run "
            "began; leave the file alone during a run",
            path, map->size);
    }
    return faulted ? nd_fail_local(ND_ERR_IO, "reading \"%s\" failed: its device reports an error",
                                   path)
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

// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/base/fsio.h"

/* Where a fault of this thread's reading continues; NULL: a fault is a crash like any other. */
static _Thread_local sigjmp_buf *landing;

static void on_fault(int signal_number)
{
    if (landing) {
        siglongjmp(*landing, 1);
    }
    signal(signal_number, SIG_DFL); /* the instruction runs again, and ends the process */
}

static void install(void)
{
    struct sigaction action = {.sa_handler = on_fault};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}

static bool is_whole(const nd_fs_map *map)
{
    struct stat st;
    return map->descriptor <= 0 || fstat(map->descriptor - 1, &st) != 0 ||
           (uint64_t)st.st_size >= map->size;
}

static nd_status run(nd_status (*read)(void *context), void *context, bool *faulted)
{
    sigjmp_buf here;
    if (sigsetjmp(here, 1) != 0) {
        landing = NULL;
        *faulted = true;
        return ND_OK;
    }
    landing = &here;
    nd_status status = read(context);
    landing = NULL;
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

// SPDX-License-Identifier: Apache-2.0
/*
 * Preloaded into workers: a server for files that goes away. Call number ND_HANG_CALL of write for
 * a file with ND_HANG_FILE in its path, counted from 1 in each process, never comes back; with
 * ND_HANG_HALF it has written half of its bytes.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

ssize_t write(int fd, const void *bytes, size_t count)
{
    static atomic_long calls;
    const char *file = getenv("ND_HANG_FILE"), *call = getenv("ND_HANG_CALL");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = '\0';
    if (file && call && strstr(path, file) && atomic_fetch_add(&calls, 1) + 1 == atol(call)) {
        if (getenv("ND_HANG_HALF")) {
            syscall(SYS_write, fd, bytes, count / 2);
        }
        for (;;) {
            pause();
        }
    }
    return syscall(SYS_write, fd, bytes, count);
}

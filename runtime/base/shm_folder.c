// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/shm_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/base/fs.h"

static const char root[] = "/dev/shm";
#define NAME "ndtrain-%lu-%lu-%ld-%llu"

/* Clock ticks from the start of the system to that of the process; 0: there is no such process,
 * or it has ended and its parent has not asked for its code. */
static unsigned long long start_of(long pid)
{
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    nd_fs_read_kernel(path, line, sizeof line);
    /* The second field, a name in parentheses, may hold blanks; the 22nd is the start. */
    char *field = strrchr(line, ')');
    if (field && (strncmp(field, ") Z", 3) == 0 || strncmp(field, ") X", 3) == 0)) {
        return 0;
    }
    for (int i = 2; field && i < 22; i++) {
        field = strchr(field + 1, ' ');
    }
    return field ? strtoull(field, NULL, 10) : 0;
}

/* Number of the pid namespace, in which pids mean the same; 0: unknown. */
static unsigned long namespace_of_self(void)
{
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 ? (unsigned long)st.st_ino : 0;
}

static bool own_path(char path[ND_SHM_FOLDER_MAX])
{
    long pid = (long)getpid();
    unsigned long long start = start_of(pid);
    unsigned long space = namespace_of_self();
    snprintf(path, ND_SHM_FOLDER_MAX, "%s/" NAME, root, (unsigned long)getuid(), space, pid, start);
    return start != 0 && space != 0;
}

/* Others may write to /dev/shm, too; what belongs to this user, they cannot replace. */
static bool is_ours(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == getuid();
}

void nd_shm_folder_make(char path[ND_SHM_FOLDER_MAX])
{
    if (!own_path(path) || (mkdir(path, 0700) != 0 && errno != EEXIST) || !is_ours(path)) {
        path[0] = '\0';
    }
}

void nd_shm_folder_remove(void)
{
    char path[ND_SHM_FOLDER_MAX];
    if (own_path(path)) {
        rmdir(path);
    }
}

/* A folder without folders. How many others left must not show in the number of this process's
 * allocations, so opendir, which allocates, is not used. */
static void remove_folder(const char *path)
{
    _Alignas(struct dirent) char entries[4096];
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        return;
    }
    for (long bytes = 1; (bytes = syscall(SYS_getdents64, fd, entries, sizeof entries)) > 0;) {
        for (long at = 0; at < bytes;) {
            const struct dirent *entry = (const struct dirent *)(entries + at);
            if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
                unlinkat(fd, entry->d_name, 0);
            }
            at += entry->d_reclen;
        }
    }
    close(fd);
    rmdir(path);
}

void nd_shm_folders_clean(void)
{
    DIR *dir = opendir(root);
    if (!dir) {
        return;
    }
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        char path[ND_SHM_FOLDER_MAX];
        unsigned long user, space;
        unsigned long long start;
        long pid;
        int end = 0;
        if (strlen(entry->d_name) + sizeof root >= sizeof path ||
            sscanf(entry->d_name, NAME "%n", &user, &space, &pid, &start, &end) != 4 ||
            entry->d_name[end] != '\0' || user != (unsigned long)getuid() ||
            space != namespace_of_self() || start_of(pid) == start) {
            continue;
        }
        snprintf(path, sizeof path, "%s/%s", root, entry->d_name);
        if (is_ours(path)) {
            remove_folder(path);
        }
    }
    closedir(dir);
}

// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/host_memory.h"

#include <stdio.h>
#include <string.h>

#include "runtime/base/fs.h"

enum { PATH_BYTES = 4096 };

/* The number behind `key` at the beginning of a line; 0 when there is none. */
static uint64_t number_in(const char *path, const char *key)
{
    char line[512];
    unsigned long long value = 0;
    size_t length = strlen(key);
    FILE *f = nd_fs_stream_kernel(path);
    while (f && value == 0 && fgets(line, sizeof line, f)) {
        if (strncmp(line, key, length) == 0) {
            (void)sscanf(line + length, "%llu", &value); /* "max" is no number */
        }
    }
    if (f) {
        fclose(f);
    }
    return value;
}

/* "0::/a/b" of this process -> "/a/b"; "" when it is in no group of version 2. */
static void own_group(const char *root, char group[PATH_BYTES])
{
    char path[PATH_BYTES], line[PATH_BYTES];
    group[0] = '\0';
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = nd_fs_stream_kernel(path);
    while (f && fgets(line, sizeof line, f)) {
        if (strncmp(line, "0::/", 4) == 0) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(group, PATH_BYTES, "%s", line + 3);
        }
    }
    if (f) {
        fclose(f);
    }
}

/* A limit of one group narrows what is there; its page cache can be given back. */
static void apply_group(const char *root, const char *group, nd_host_memory *m)
{
    char path[2 * PATH_BYTES];
    snprintf(path, sizeof path, "%s/sys/fs/cgroup%s/memory.max", root, group);
    uint64_t limit = number_in(path, "");
    if (limit == 0) {
        return;
    }
    snprintf(path, sizeof path, "%s/sys/fs/cgroup%s/memory.stat", root, group);
    uint64_t used = number_in(path, "anon ");
    uint64_t left = limit > used ? limit - used : 0;
    m->physical = limit < m->physical ? limit : m->physical;
    m->available = left < m->available ? left : m->available;
}

nd_host_memory nd_host_memory_read(const char *root)
{
    char path[PATH_BYTES], group[PATH_BYTES];
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    nd_host_memory m = {.physical = number_in(path, "MemTotal:") * 1024,
                        .available = number_in(path, "MemAvailable:") * 1024};
    own_group(root, group);
    for (;;) { /* from this process's own group up to the root's */
        apply_group(root, group, &m);
        char *slash = strrchr(group, '/');
        if (!slash) {
            return m;
        }
        *slash = '\0';
    }
}

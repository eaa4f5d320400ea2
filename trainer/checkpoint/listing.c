// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/listing.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/fsio.h"
#include "trainer/checkpoint/source.h"

static const char *const state_names[] = {
    [ND_SAVED_GOOD] = "good",
    [ND_SAVED_INCOMPLETE] = "incomplete",
    [ND_SAVED_DAMAGED_MANIFEST] = "damaged manifest",
    [ND_SAVED_NEWER_VERSION] = "newer version",
    [ND_SAVED_NO_MANIFEST] = "no manifest",
    [ND_SAVED_BAD] = ".bad",
    [ND_SAVED_OLD] = ".old",
    [ND_SAVED_TEMPORARY] = "temporary",
    [ND_SAVED_DELETED] = "half deleted",
    [ND_SAVED_LINK] = "link",
};

const char *nd_saved_state_name(nd_saved_state state)
{
    return state_names[state];
}

/* Names. */

/* The digits at `text`; -1: none, or too many. *rest stands behind them. */
static int64_t number_at(const char *text, const char **rest)
{
    size_t length = strspn(text, "0123456789");
    *rest = text + length;
    return length == 0 || length > 18 ? -1 : strtoll(text, NULL, 10);
}

/* False: the name is none of ours. */
static bool parse_name(const char *name, int64_t *step, nd_saved_state *state)
{
    static const struct {
        const char *prefix;
        nd_saved_state state;
    } kinds[] = {
        {"checkpoint-", ND_SAVED_GOOD},
        {".tmp-checkpoint-", ND_SAVED_TEMPORARY},
        {".del-checkpoint-", ND_SAVED_DELETED},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const char *rest = "";
        size_t length = strlen(kinds[i].prefix);
        if (strncmp(name, kinds[i].prefix, length) != 0 ||
            (*step = number_at(name + length, &rest)) < 0) {
            continue;
        }
        *state = kinds[i].state;
        if (*state == ND_SAVED_GOOD && rest[0] != '\0') {
            *state = strncmp(rest, ".bad", 4) == 0 ? ND_SAVED_BAD : ND_SAVED_OLD;
            return *state == ND_SAVED_BAD || strncmp(rest, ".old", 4) == 0;
        }
        return true;
    }
    return false;
}

/* Sizes. */

static uint64_t bytes_inside(int parent, const char *name, int depth)
{
    uint64_t bytes = 0;
    struct stat st;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (!dir) {
        if (fd >= 0) {
            close(fd);
        }
        return 0;
    }
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 ||
            fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
            continue;
        }
        if (S_ISREG(st.st_mode)) {
            bytes += (uint64_t)st.st_size;
        } else if (S_ISDIR(st.st_mode) && depth > 0) {
            bytes += bytes_inside(dirfd(dir), entry->d_name, depth - 1);
        }
    }
    closedir(dir);
    return bytes;
}

uint64_t nd_folder_bytes(const char *path)
{
    enum { DEPTH = 3 };
    return bytes_inside(AT_FDCWD, path, DEPTH);
}

/* One folder. */

static bool has_file(const char *folder, const char *name)
{
    char *path = NULL;
    bool has = nd_fs_format(&path, "%s/%s", folder, name) == ND_OK && nd_fs_exists(path);
    free(path);
    return has;
}

static void take_manifest(nd_saved *saved, const nd_manifest *m)
{
    struct tm utc = {0};
    const char *end = strptime(m->time, "%Y-%m-%dT%H:%M:%SZ", &utc);
    saved->time = end && *end == '\0' ? timegm(&utc) : saved->time;
    saved->has_manifest = true;
    saved->step = m->position.step;
    saved->mesh = m->mesh;
    saved->position = m->position;
    saved->samples_seen = m->samples_seen;
    memcpy(saved->reason, m->reason, sizeof saved->reason);
}

static void keep_reason(nd_saved *saved, nd_saved_state state)
{
    saved->state = saved->state == ND_SAVED_GOOD ? state : saved->state;
    snprintf(saved->why, sizeof saved->why, "%.500s", nd_error_last()->message);
    nd_error_clear();
}

/* A state that the name tells is kept. */
static void examine_contents(const char *folder, nd_saved *saved)
{
    nd_manifest m = {0};
    int64_t bytes = 0;
    if (!has_file(folder, ND_MANIFEST_NAME)) {
        saved->state = saved->state == ND_SAVED_GOOD ? ND_SAVED_NO_MANIFEST : saved->state;
        return;
    }
    if (nd_manifest_read(folder, &m) != ND_OK) {
        keep_reason(saved, ND_SAVED_DAMAGED_MANIFEST);
        if (saved->state == ND_SAVED_DAMAGED_MANIFEST && nd_manifest_is_newer(folder)) {
            saved->state = ND_SAVED_NEWER_VERSION;
        }
        return;
    }
    take_manifest(saved, &m);
    if (nd_source_check_files(folder, &m, &bytes) != ND_OK) {
        keep_reason(saved, ND_SAVED_INCOMPLETE);
    }
    nd_manifest_fini(&m);
}

nd_status nd_saved_examine(const char *folder, nd_saved *out)
{
    struct stat st;
    const char *slash = strrchr(folder, '/');
    bool found = lstat(folder, &st) == 0, link = found && S_ISLNK(st.st_mode);
    if (!found || (!link && !S_ISDIR(st.st_mode))) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is no folder", folder);
    }
    *out = (nd_saved){.step = -1, .time = st.st_mtime};
    snprintf(out->name, sizeof out->name, "%s", slash && slash[1] ? slash + 1 : folder);
    if (!parse_name(out->name, &out->step, &out->state)) {
        out->step = -1;
        out->state = ND_SAVED_GOOD;
    }
    if (link) {
        out->state = ND_SAVED_LINK;
        snprintf(out->why, sizeof out->why, "links are not followed; move the folder here");
        return ND_OK;
    }
    out->has_model = has_file(folder, "config.json");
    out->bytes = nd_folder_bytes(folder);
    examine_contents(folder, out);
    return ND_OK;
}

/* A run folder. */

static int by_step(const void *a, const void *b)
{
    const nd_saved *x = a, *y = b;
    return x->step != y->step ? (x->step < y->step ? -1 : 1) : strcmp(x->name, y->name);
}

static nd_status grow(nd_saved **list, int count, int *capacity)
{
    if (count < *capacity) {
        return ND_OK;
    }
    int more = *capacity ? 2 * *capacity : 16;
    void *memory = realloc(*list, (size_t)more * sizeof **list);
    if (!memory) {
        return nd_fail_memory("a list of checkpoints");
    }
    *list = memory;
    *capacity = more;
    return ND_OK;
}

static nd_status add_entry(const char *run, const char *name, nd_saved **list, int *count,
                           int *capacity)
{
    char *path = NULL;
    ND_TRY(nd_fs_format(&path, "%s/%s", run, name));
    nd_status status = grow(list, *count, capacity);
    if (status == ND_OK && nd_saved_examine(path, &(*list)[*count]) == ND_OK) { /* no file */
        ++*count;
    }
    free(path);
    return status;
}

nd_status nd_saved_list(const char *run, nd_saved **out, int *count)
{
    nd_saved *list = NULL;
    int n = 0, capacity = 0;
    nd_status status = ND_OK;
    DIR *dir = opendir(run);
    if (!dir) {
        return nd_fail(ND_ERR_DATA, "cannot read folder \"%s\": %s", run, strerror(errno));
    }
    for (struct dirent *entry = readdir(dir); entry && status == ND_OK; entry = readdir(dir)) {
        int64_t step = 0;
        nd_saved_state state;
        if (parse_name(entry->d_name, &step, &state)) {
            status = add_entry(run, entry->d_name, &list, &n, &capacity);
        }
    }
    closedir(dir);
    if (status != ND_OK) {
        free(list);
        return status;
    }
    if (n > 0) {
        qsort(list, (size_t)n, sizeof *list, by_step);
    }
    *out = list;
    *count = n;
    return ND_OK;
}

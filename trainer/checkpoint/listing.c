// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/listing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "runtime/base/fs.h"
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

/* One folder. */

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

/* Keeps the reason of a fault of the checkpoint; other errors are returned. A state that the name
 * tells is kept. */
static nd_status keep_reason(nd_saved *saved, nd_status status, nd_saved_state state)
{
    if (status != ND_ERR_DATA) {
        return status;
    }
    saved->state = saved->state == ND_SAVED_GOOD ? state : saved->state;
    snprintf(saved->why, sizeof saved->why, "%.500s", nd_error_last()->message);
    nd_error_clear();
    return ND_OK;
}

static nd_status examine_contents(const char *folder, nd_saved *saved)
{
    nd_manifest m = {0};
    int64_t bytes = 0;
    bool there = false, newer = false;
    ND_TRY(nd_fs_has(folder, ND_MANIFEST_NAME, &there));
    if (!there) {
        saved->state = saved->state == ND_SAVED_GOOD ? ND_SAVED_NO_MANIFEST : saved->state;
        return ND_OK;
    }
    nd_status status = nd_manifest_read(folder, &m);
    if (status != ND_OK) {
        ND_TRY(keep_reason(saved, status, ND_SAVED_DAMAGED_MANIFEST));
        status = nd_manifest_is_newer(folder, &newer);
        if (saved->state == ND_SAVED_DAMAGED_MANIFEST && newer) {
            saved->state = ND_SAVED_NEWER_VERSION;
        }
        return status;
    }
    take_manifest(saved, &m);
    status = keep_reason(saved, nd_source_check_files(folder, &m, &bytes), ND_SAVED_INCOMPLETE);
    nd_manifest_fini(&m);
    return status;
}

nd_status nd_saved_examine(const char *folder, nd_saved *out)
{
    struct stat st;
    nd_fs_kind kind;
    const char *slash = strrchr(folder, '/');
    ND_TRY(nd_fs_look_at_link(folder, &kind, &st));
    if (kind != ND_FS_LINK && kind != ND_FS_FOLDER) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is no folder", folder);
    }
    *out = (nd_saved){.step = -1, .time = st.st_mtime};
    snprintf(out->name, sizeof out->name, "%s", slash && slash[1] ? slash + 1 : folder);
    if (!parse_name(out->name, &out->step, &out->state)) {
        out->step = -1;
        out->state = ND_SAVED_GOOD;
    }
    if (kind == ND_FS_LINK) {
        out->state = ND_SAVED_LINK;
        snprintf(out->why, sizeof out->why, "links are not followed; move the folder here");
        return ND_OK;
    }
    ND_TRY(nd_fs_has(folder, "config.json", &out->has_model));
    ND_TRY(nd_fs_tree_bytes(folder, false, &out->bytes));
    return examine_contents(folder, out);
}

/* A run folder. */

static int by_step(const void *a, const void *b)
{
    const nd_saved *x = a, *y = b;
    return x->step != y->step ? (x->step < y->step ? -1 : 1) : strcmp(x->name, y->name);
}

/* *count grows by one where the name is that of a folder or a link; it may be gone by now. */
static nd_status add_entry(const char *run, const char *name, nd_saved *list, int *count)
{
    char *path = NULL;
    ND_TRY(nd_fs_format(&path, "%s/%s", run, name));
    nd_status status = nd_saved_examine(path, &list[*count]);
    *count += status == ND_OK;
    free(path);
    return status == ND_ERR_DATA ? ND_OK : status;
}

nd_status nd_saved_list(const char *run, nd_saved **out, int *count)
{
    nd_fs_names names;
    nd_saved *list = NULL;
    int n = 0, ours = 0;
    int64_t step;
    nd_saved_state state;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_list(run, &names));
    if (!names.there) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is no folder", run);
    }
    for (int i = 0; i < names.count; i++) {
        ours += parse_name(names.list[i], &step, &state);
    }
    ND_TRY_OUT(ND_ALLOC(ours + 1, &list));
    for (int i = 0; i < names.count; i++) {
        if (parse_name(names.list[i], &step, &state)) {
            ND_TRY_OUT(add_entry(run, names.list[i], list, &n));
        }
    }
    qsort(list, (size_t)n, sizeof *list, by_step);
    *out = list;
    *count = n;
    list = NULL;
out:
    free(list);
    nd_fs_names_fini(&names);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"

static const size_t json_max_bytes = 64 << 20;

/* Files. */

/* DIR/NAME.json, or the one with the largest number of NAME-2.json, NAME-3.json, ... NULL: none. */
static nd_status newest_file(const char *dir, const char *name, char **out)
{
    char *path = NULL;
    *out = NULL;
    for (int n = 1; n < 1000000; n++) {
        ND_TRY(n == 1 ? nd_fs_format(&path, "%s/%s.json", dir, name)
                      : nd_fs_format(&path, "%s/%s-%d.json", dir, name, n));
        bool there = false;
        nd_status status = nd_fs_exists(path, &there);
        if (status != ND_OK || !there) {
            free(path);
            ND_TRY(status);
            break;
        }
        free(*out);
        *out = path;
    }
    return ND_OK;
}

/* *out stays NULL where no such file is. */
static nd_status read_newest(const char *dir, const char *name, json_t **out)
{
    char *path = NULL, *text = NULL;
    size_t size = 0;
    json_error_t error;
    nd_status status = newest_file(dir, name, &path);
    if (status != ND_OK || !path) {
        free(path);
        return status;
    }
    status = nd_fs_read(path, json_max_bytes, ND_ERR_DATA, &text, &size);
    if (status == ND_OK) {
        *out = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
        if (!*out && nd_json_no_memory(&error)) {
            status = nd_fail_memory("%s", path);
        } else if (!json_is_object(*out)) {
            status = nd_fail(ND_ERR_DATA,
                             "%s is no JSON object; the file is damaged: remove it, and the report "
                             "leaves out what it holds",
                             path);
        }
    }
    free(text);
    free(path);
    return status;
}

static nd_status read_metrics(nd_run_view *v)
{
    char *path = NULL;
    struct stat st = {0};
    nd_fs_kind kind = ND_FS_FILE;
    ND_TRY(nd_fs_format(&path, "%s/metrics.jsonl", v->folder));
    nd_status status = nd_fs_look(path, &kind, &st);
    if (status == ND_OK && kind == ND_FS_ABSENT) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" has no metrics.jsonl, so it holds no run; give the folder of a "
                         "run, as ndlaunch prints it",
                         v->folder);
    }
    v->changed = (int64_t)st.st_mtime;
    status = status == ND_OK ? nd_metrics_read(path, &v->metrics) : status;
    if (status == ND_OK && nd_metrics_column(&v->metrics, "step_ms")->count == 0) {
        status = nd_fail(ND_ERR_DATA,
                         "%s has no step yet; wait for the first step of the run, or give another "
                         "run",
                         path);
    }
    free(path);
    return status;
}

/* The path without slashes at its end; "." and ".." get their full name. */
static nd_status take_folder(nd_run_view *v, const char *folder)
{
    bool there = false;
    size_t length = strlen(folder);
    while (length > 1 && folder[length - 1] == '/') {
        length--;
    }
    ND_TRY(nd_fs_format(&v->folder, "%.*s", (int)length, folder));
    ND_TRY(nd_fs_is_folder(v->folder, &there));
    if (!there) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is no folder; give the folder of a run", v->folder);
    }
    const char *slash = strrchr(v->folder, '/');
    v->name = slash ? slash + 1 : v->folder;
    if (strcmp(v->name, ".") == 0 || strcmp(v->name, "..") == 0) {
        char *full = realpath(v->folder, NULL);
        if (full) {
            free(v->folder);
            v->folder = full;
            v->name = strrchr(full, '/') + 1;
        }
    }
    return ND_OK;
}

static double number_in(const json_t *object, const char *part, const char *key)
{
    const json_t *value = json_object_get(json_object_get(object, part), key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static nd_status open_view(const char *folder, int64_t now, nd_run_view *v)
{
    ND_TRY(take_folder(v, folder));
    ND_TRY(read_metrics(v));
    ND_TRY(read_newest(v->folder, "run", &v->record));
    ND_TRY(read_newest(v->folder, "trace", &v->trace));
    ND_TRY(newest_file(v->folder, "profile", &v->profile));
    ND_TRY(nd_saved_list(v->folder, &v->saved, &v->saved_count));
    double steps = number_in(v->record, "config", "train.steps");
    v->steps_wanted = steps > 0 && steps < 1e15 ? (int64_t)steps : 0;
    nd_run_view_find_end(v, now);
    return ND_OK;
}

nd_status nd_run_view_open(const char *folder, int64_t now, nd_run_view *out)
{
    nd_run_view view = {0};
    nd_status status = open_view(folder, now, &view);
    if (status != ND_OK) {
        nd_run_view_close(&view);
        return status;
    }
    *out = view;
    return ND_OK;
}

void nd_run_view_close(nd_run_view *view)
{
    nd_metrics_fini(&view->metrics);
    json_decref(view->record);
    json_decref(view->trace);
    free(view->profile);
    free(view->saved);
    free(view->folder);
    *view = (nd_run_view){0};
}

/* Ranks of a group that is a part of an axis; 1: run.json does not say it. */
static int part_of_axis(const nd_run_view *view, const char *key, int axis_size)
{
    const double size = number_in(view->record, "mesh", key);
    return size >= 1 && size <= axis_size && axis_size % (int)size == 0 ? (int)size : 1;
}

bool nd_run_view_mesh(const nd_run_view *view, nd_mesh *out)
{
    const int64_t most = 1 << 24; /* ranks */
    int64_t ranks = 1;
    for (int axis = 0; axis < ND_AXIS_COUNT; axis++) {
        double size = number_in(view->record, "mesh", nd_axis_name((nd_axis)axis));
        if (!(size >= 1 && size <= (double)most)) {
            return false;
        }
        out->size[axis] = (int)size;
        ranks *= out->size[axis];
        if (ranks > most) {
            return false;
        }
    }
    out->ulysses = part_of_axis(view, "ulysses", out->size[ND_AXIS_CP]);
    out->kv_copies = part_of_axis(view, "kv_copies", out->size[ND_AXIS_TP]);
    return true;
}

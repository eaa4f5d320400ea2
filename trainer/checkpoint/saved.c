// SPDX-License-Identifier: Apache-2.0
/* Lists what lies in a run folder, and deletes the checkpoints that need not stay. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "runtime/base/fs.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/source.h"

/* What a name says of what it holds. */
static const char *const kind_states[] = {[ND_FOLDER_BAD] = ".bad",
                                          [ND_FOLDER_OLD] = ".old",
                                          [ND_FOLDER_BEGUN] = "temporary",
                                          [ND_FOLDER_DOOMED] = "half deleted"};

/* One folder. */

/* Keeps the reason of a fault of the checkpoint; other errors are returned. A state that the name
 * tells is kept. */
static nd_status keep_reason(nd_saved *saved, nd_status status, const char *state)
{
    if (status != ND_ERR_DATA) {
        return status;
    }
    saved->state = saved->state ? saved->state : state;
    snprintf(saved->why, sizeof saved->why, "%.500s", nd_error_last()->message);
    nd_error_clear();
    return ND_OK;
}

static nd_status examine_contents(const char *folder, nd_saved *saved)
{
    nd_manifest m = {0};
    struct tm utc = {0};
    int64_t bytes = 0;
    bool there = false;
    ND_TRY(nd_fs_has(folder, ND_MANIFEST_NAME, &there));
    if (!there) {
        saved->state = saved->state ? saved->state : "no manifest";
        return ND_OK;
    }
    nd_status status = nd_manifest_read(folder, &m);
    if (status != ND_OK) {
        return keep_reason(saved, status, m.is_newer ? "newer version" : "damaged manifest");
    }
    const char *end = strptime(m.time, "%Y-%m-%dT%H:%M:%SZ", &utc);
    saved->time = end && *end == '\0' ? timegm(&utc) : saved->time;
    saved->has_manifest = true;
    saved->step = m.position.step;
    saved->mesh = m.mesh;
    saved->position = m.position;
    saved->samples_seen = m.samples_seen;
    memcpy(saved->reason, m.reason, sizeof saved->reason);
    status = keep_reason(saved, nd_source_verify(folder, &m, -1, false, &bytes), "incomplete");
    nd_manifest_fini(&m);
    return status;
}

nd_status nd_saved_examine(const char *folder, nd_saved *out)
{
    struct stat st = {0};
    nd_fs_kind kind, name_kind;
    const char *slash = strrchr(folder, '/');
    ND_TRY(nd_fs_look_at_link(folder, &name_kind, &st));
    ND_TRY(nd_fs_look(folder, &kind, &st));
    const bool nowhere = kind == ND_FS_ABSENT && name_kind == ND_FS_LINK;
    if (kind != ND_FS_FOLDER && !nowhere) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is no folder", folder);
    }
    const nd_folder name = nd_folder_parse(slash && slash[1] ? slash + 1 : folder);
    *out = (nd_saved){
        .step = name.kind ? name.step : -1, .time = st.st_mtime, .state = kind_states[name.kind]};
    memcpy(out->name, name.name, sizeof out->name);
    if (nowhere) {
        out->state = "link to nowhere";
        snprintf(out->why, sizeof out->why, "it is a link that leads nowhere; mount its disk");
        return ND_OK;
    }
    ND_TRY(nd_fs_has(folder, "config.json", &out->has_model));
    ND_TRY(nd_fs_tree_bytes(folder, false, &out->bytes));
    ND_TRY(examine_contents(folder, out));
    out->state = out->state ? out->state : "good";
    return ND_OK;
}

/* A run folder. */

nd_status nd_saved_list(const char *run, nd_saved **out, int *count)
{
    nd_folder *folders = NULL;
    nd_saved *list = NULL;
    int n = 0, all = 0;
    bool there = false;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_is_folder(run, &there));
    if (!there) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is no folder", run);
    }
    ND_TRY(nd_folder_list(run, ND_FOLDER_ALL, &folders, &all));
    ND_TRY_OUT(ND_ALLOC(all + 1, &list));
    for (int i = 0; i < all; i++) {
        char *path = NULL;
        if (folders[i].step < 0) {
            continue;
        }
        ND_TRY_OUT(nd_fs_format(&path, "%s/%s", run, folders[i].name));
        status = nd_saved_examine(path, &list[n]);
        free(path);
        n += status == ND_OK;
        ND_TRY_OUT(status == ND_ERR_DATA ? ND_OK : status); /* it may be gone by now */
    }
    *out = list;
    *count = n;
    list = NULL;
out:
    free(list);
    free(folders);
    return status;
}

/* Which stay. */

nd_status nd_folder_delete(const char *run, const nd_folder *folder)
{
    char *path = NULL, *doomed = NULL;
    nd_manifest manifest = {0};
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&path, "%s/%s", run, folder->name));
    ND_TRY_OUT(nd_fs_format(&doomed, "%s/.del-%s", run, folder->name));
    if (folder->kind == ND_FOLDER_WHOLE) {
        ND_TRY_OUT(nd_manifest_read(path, &manifest)); /* else it is not ours, or damaged */
    }
    nd_fs_remove_tree(doomed);
    /* A process that dies behind the rename leaves what nd_checkpoint_sweep removes. */
    ND_TRY_OUT(nd_fs_rename(path, doomed));
    nd_fs_remove_tree(doomed);
out:
    nd_manifest_fini(&manifest);
    free(doomed);
    free(path);
    return status;
}

/* Its manifest can be read and is that of its step. What cannot be read because of an I/O error is
 * an error, and neither good nor bad. A link is not good: what it leads to may be deleted. */
static nd_status is_good(const char *run, const nd_folder *folder, bool checks_files, bool *good)
{
    char *path = NULL;
    nd_manifest manifest = {0};
    nd_fs_kind kind = ND_FS_ABSENT;
    int64_t bytes = 0;
    ND_TRY(nd_fs_format(&path, "%s/%s", run, folder->name));
    nd_status status = nd_fs_look_at_link(path, &kind, NULL);
    status = status == ND_OK ? nd_manifest_read(path, &manifest) : status;
    if (status == ND_OK && checks_files) {
        status = nd_source_verify(path, &manifest, -1, false, &bytes);
    }
    *good = status == ND_OK && kind == ND_FS_FOLDER && manifest.position.step == folder->step;
    nd_manifest_fini(&manifest);
    free(path);
    return status == ND_ERR_DATA ? ND_OK : status;
}

nd_status nd_checkpoint_reached(const char *run, int64_t count, bool checks_files, int64_t *step)
{
    nd_folder *list = NULL;
    int64_t newer = 0;
    int all = 0;
    nd_status status = ND_OK;
    *step = -1;
    ND_TRY(nd_folder_list(run, ND_FOLDER_WHOLE, &list, &all));
    for (int i = all - 1; i >= 0 && newer < count && status == ND_OK; i--) {
        bool good = false;
        status = is_good(run, &list[i], checks_files, &good);
        newer += good;
        *step = newer == count ? list[i].step : -1;
    }
    if (status == ND_OK) {
        nd_error_clear(); /* why one is not good */
    }
    free(list);
    return status;
}

nd_status nd_checkpoint_prune_plan(const char *run, const nd_prune_options *options,
                                   bool checks_files, nd_folder **out, int *count)
{
    int64_t reached = -1;
    int all = 0;
    nd_status status = ND_OK;
    *out = NULL;
    *count = 0;
    if (options->keep_last <= 0) {
        return ND_OK;
    }
    ND_TRY(nd_checkpoint_reached(run, options->keep_last, checks_files, &reached));
    ND_TRY(nd_folder_list(run, ND_FOLDER_WHOLE, out, &all));
    for (int i = 0; i < all && (*out)[i].step < reached && status == ND_OK; i++) {
        const nd_folder folder = (*out)[i];
        const bool kept = folder.step == options->keep ||
                          (options->best > 0 && folder.step == options->best) ||
                          (options->keep_every > 0 && folder.step % options->keep_every == 0);
        bool good = false;
        status = kept ? ND_OK : is_good(run, &folder, checks_files, &good);
        (*out)[*count] = folder;
        *count += good;
    }
    if (status != ND_OK) {
        free(*out);
        *out = NULL;
        *count = 0;
    }
    return status;
}

/* The last in the list is the newest, and stays. */
static nd_status prune_old(const char *run, int64_t keep_last, int *deleted)
{
    nd_folder *list = NULL;
    int count = 0;
    int64_t reached = -1;
    nd_status status = ND_OK;
    ND_TRY(nd_folder_list(run, ND_FOLDER_OLD | ND_FOLDER_OURS, &list, &count));
    if (count > 1) {
        ND_TRY_OUT(nd_checkpoint_reached(run, keep_last, false, &reached));
    }
    for (int i = 0; i < count - 1 && list[i].step <= reached; i++) {
        bool good = false;
        ND_TRY_OUT(is_good(run, &list[i], false, &good));
        if (good) {
            ND_TRY_OUT(nd_folder_delete(run, &list[i]));
            ++*deleted;
        }
    }
out:
    free(list);
    return status;
}

nd_status nd_checkpoint_prune(const char *run, const nd_prune_options *options, int *deleted)
{
    nd_folder *list = NULL;
    int count = 0;
    *deleted = 0;
    nd_status status = nd_checkpoint_prune_plan(run, options, false, &list, &count);
    for (int i = 0; i < count; i++) { /* one that cannot be deleted keeps no other */
        const nd_status one = nd_folder_delete(run, &list[i]);
        *deleted += one == ND_OK;
        status = one == ND_OK ? status : one;
    }
    free(list);
    return status == ND_OK && options->keep_last > 0 ? prune_old(run, options->keep_last, deleted)
                                                     : status;
}

// SPDX-License-Identifier: Apache-2.0
/* Which checkpoints of a run folder stay, and the deletion of the others. */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/source.h"

/* Behind the rename a process that dies leaves what nd_checkpoint_sweep removes. */
static nd_status delete_folder(const char *run, const char *name)
{
    char *path = NULL, *doomed = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&path, "%s/%s", run, name));
    ND_TRY_OUT(nd_fs_format(&doomed, "%s/.del-%s", run, name));
    nd_fs_remove_tree(doomed);
    ND_TRY_OUT(nd_fs_rename(path, doomed));
    nd_fs_remove_tree(doomed);
out:
    free(doomed);
    free(path);
    return status;
}

nd_status nd_folder_delete(const char *run, const nd_folder *folder)
{
    char *path = NULL;
    nd_manifest manifest = {0};
    nd_status status = ND_OK;
    if (folder->kind == ND_FOLDER_WHOLE) {
        ND_TRY(nd_fs_format(&path, "%s/%s", run, folder->name));
        status = nd_manifest_read(path, &manifest); /* else it is not ours, or damaged */
        nd_manifest_fini(&manifest);
        free(path);
    }
    return status == ND_OK ? delete_folder(run, folder->name) : status;
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
    status =
        status == ND_OK && checks_files ? nd_source_check_files(path, &manifest, &bytes) : status;
    *good = status == ND_OK && kind == ND_FS_FOLDER && manifest.position.step == folder->step;
    nd_manifest_fini(&manifest);
    free(path);
    return status == ND_ERR_DATA ? ND_OK : status;
}

nd_status nd_checkpoint_prune_plan(const char *run, const nd_prune_options *options,
                                   bool checks_files, nd_folder **out, int *count)
{
    nd_folder *list = NULL;
    int64_t newer = 0; /* good checkpoints that are */
    int all = 0, doomed = 0;
    nd_status status = ND_OK;
    *out = NULL;
    *count = 0;
    if (options->keep_last <= 0) {
        return ND_OK;
    }
    ND_TRY(nd_folder_list(run, ND_FOLDER_WHOLE, &list, &all));
    nd_folder *found = NULL;
    ND_TRY_OUT(ND_ALLOC(all + 1, &found));
    for (int i = all - 1; i >= 0; i--) {
        const int64_t step = list[i].step;
        bool good = false, kept = newer < options->keep_last || step == options->keep ||
                                  (options->best > 0 && step == options->best) ||
                                  (options->keep_every > 0 && step % options->keep_every == 0);
        if (kept && newer >= options->keep_last) {
            continue;
        }
        ND_TRY_OUT(is_good(run, &list[i], checks_files, &good));
        newer += good;
        if (good && !kept) {
            found[doomed++] = list[i];
        }
    }
    *out = found;
    *count = doomed;
    found = NULL;
out:
    free(found);
    free(list);
    return status;
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

/* Checkpoints that were set aside. */

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
    for (int i = 0; i < count && status == ND_OK; i++) {
        status = nd_folder_delete(run, &list[i]);
        *deleted += status == ND_OK;
    }
    free(list);
    return status == ND_OK && options->keep_last > 0 ? prune_old(run, options->keep_last, deleted)
                                                     : status;
}

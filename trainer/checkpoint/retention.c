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

nd_status nd_checkpoint_delete(const char *run, int64_t step)
{
    char *path = NULL;
    nd_manifest manifest = {0};
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_checkpoint_path(run, step, &path));
    ND_TRY_OUT(nd_manifest_read(path, &manifest)); /* else it is not ours, or damaged */
    ND_TRY_OUT(delete_folder(run, strrchr(path, '/') + 1));
out:
    nd_manifest_fini(&manifest);
    free(path);
    return status;
}

/* What cannot be read because of an I/O error is an error, and neither good nor bad. */
static nd_status is_good(const char *run, int64_t step, bool checks_files, bool *good)
{
    char *path = NULL;
    nd_manifest manifest = {0};
    int64_t bytes = 0;
    ND_TRY(nd_checkpoint_path(run, step, &path));
    nd_status status = nd_manifest_read(path, &manifest);
    status =
        status == ND_OK && checks_files ? nd_source_check_files(path, &manifest, &bytes) : status;
    *good = status == ND_OK;
    nd_manifest_fini(&manifest);
    free(path);
    return status == ND_ERR_DATA ? ND_OK : status;
}

nd_status nd_checkpoint_prune_plan(const char *run, const nd_prune_options *options,
                                   bool checks_files, int64_t **steps, int *count)
{
    int64_t *list = NULL, newer = 0; /* newer: good checkpoints that are */
    int all = 0, doomed = 0;
    nd_status status = ND_OK;
    *steps = NULL;
    *count = 0;
    if (options->keep_last <= 0) {
        return ND_OK;
    }
    ND_TRY(nd_checkpoint_list(run, &list, &all));
    int64_t *found = NULL;
    ND_TRY_OUT(ND_ALLOC(all + 1, &found));
    for (int i = all - 1; i >= 0; i--) {
        bool good = false, kept = newer < options->keep_last || list[i] == options->keep ||
                                  (options->best > 0 && list[i] == options->best) ||
                                  (options->keep_every > 0 && list[i] % options->keep_every == 0);
        if (kept && newer >= options->keep_last) {
            continue;
        }
        ND_TRY_OUT(is_good(run, list[i], checks_files, &good));
        newer += good;
        if (good && !kept) {
            found[doomed++] = list[i];
        }
    }
    *steps = found;
    *count = doomed;
    found = NULL;
out:
    free(found);
    free(list);
    return status;
}

nd_status nd_checkpoint_reached(const char *run, int64_t count, bool checks_files, int64_t *step)
{
    int64_t *list = NULL, newer = 0;
    int all = 0;
    nd_status status = ND_OK;
    *step = -1;
    ND_TRY(nd_checkpoint_list(run, &list, &all));
    for (int i = all - 1; i >= 0 && newer < count && status == ND_OK; i--) {
        bool good = false;
        status = is_good(run, list[i], checks_files, &good);
        newer += good;
        *step = newer == count ? list[i] : -1;
    }
    if (status == ND_OK) {
        nd_error_clear(); /* why one is not good */
    }
    free(list);
    return status;
}

/* Checkpoints that were set aside. */

/* checkpoint-STEP.old, checkpoint-STEP.bad-2, ... */
static bool parse_aside(const char *name, nd_aside *out)
{
    static const char prefix[] = "checkpoint-", numbers[] = "0123456789";
    if (strncmp(name, prefix, sizeof prefix - 1) != 0 || strlen(name) >= sizeof out->name) {
        return false;
    }
    const char *digits = name + sizeof prefix - 1;
    size_t length = strspn(digits, numbers);
    const char *suffix = digits + length;
    bool bad = strncmp(suffix, ".bad", 4) == 0;
    if (length == 0 || length > 18 || (!bad && strncmp(suffix, ".old", 4) != 0)) {
        return false;
    }
    const char *more = suffix + 4; /* "", "-2", "-3", ... */
    if (more[0] && (more[0] != '-' || !more[1] || more[1 + strspn(more + 1, numbers)])) {
        return false;
    }
    *out = (nd_aside){.step = strtoll(digits, NULL, 10),
                      .number = more[0] ? strtoll(more + 1, NULL, 10) : 1,
                      .bad = bad};
    memcpy(out->name, name, strlen(name) + 1);
    return true;
}

/* .bad before .old, and the newest last. */
static int by_age(const void *a, const void *b)
{
    const nd_aside *x = a, *y = b;
    if (x->bad != y->bad) {
        return x->bad ? -1 : 1;
    }
    return x->step != y->step ? (x->step < y->step ? -1 : 1)
                              : (x->number > y->number) - (x->number < y->number);
}

static nd_status is_ours(const char *run, const char *name, bool *out)
{
    char *path = NULL;
    nd_fs_kind kind;
    *out = false;
    ND_TRY(nd_fs_format(&path, "%s/%s", run, name));
    nd_status status = nd_fs_look_at_link(path, &kind, NULL);
    status = status == ND_OK && kind == ND_FS_FOLDER ? nd_checkpoint_is_ours(path, out) : status;
    free(path);
    return status;
}

nd_status nd_asides_list(const char *run, nd_aside **out, int *count)
{
    nd_fs_names names;
    nd_aside *list = NULL;
    int n = 0;
    nd_status status = ND_OK;
    *out = NULL;
    *count = 0;
    ND_TRY(nd_fs_list(run, &names));
    ND_TRY_OUT(ND_ALLOC(names.count + 1, &list));
    for (int i = 0; i < names.count; i++) {
        bool ours = false;
        ND_TRY_OUT(parse_aside(names.list[i], &list[n]) ? is_ours(run, names.list[i], &ours)
                                                        : ND_OK);
        n += ours;
    }
    qsort(list, (size_t)n, sizeof *list, by_age);
    *out = list;
    *count = n;
    list = NULL;
out:
    free(list);
    nd_fs_names_fini(&names);
    return status;
}

nd_status nd_aside_delete(const char *run, const nd_aside *aside)
{
    return delete_folder(run, aside->name);
}

/* Whether its manifest can be read and is that of its step: certainly a checkpoint of ours. */
static nd_status has_manifest(const char *run, const nd_aside *aside, bool *out)
{
    char *path = NULL;
    nd_manifest manifest = {0};
    ND_TRY(nd_fs_format(&path, "%s/%s", run, aside->name));
    nd_status status = nd_manifest_read(path, &manifest);
    *out = status == ND_OK && manifest.position.step == aside->step;
    nd_manifest_fini(&manifest);
    free(path);
    return status == ND_ERR_DATA ? ND_OK : status;
}

/* The last in the list is the newest. */
static nd_status prune_old(const char *run, int64_t keep_last, int *deleted)
{
    nd_aside *list = NULL;
    int count = 0;
    int64_t reached = -1;
    nd_status status = ND_OK;
    ND_TRY(nd_asides_list(run, &list, &count));
    if (count > 0) {
        ND_TRY_OUT(nd_checkpoint_reached(run, keep_last, false, &reached));
    }
    for (int i = 0; i + 1 < count; i++) {
        bool ours = false;
        if (list[i].bad || list[i].step > reached) {
            continue;
        }
        ND_TRY_OUT(has_manifest(run, &list[i], &ours));
        if (ours) {
            ND_TRY_OUT(nd_aside_delete(run, &list[i]));
            ++*deleted;
        }
    }
out:
    free(list);
    return status;
}

nd_status nd_checkpoint_prune(const char *run, const nd_prune_options *options, int *deleted)
{
    int64_t *steps = NULL;
    int count = 0;
    *deleted = 0;
    nd_status status = nd_checkpoint_prune_plan(run, options, false, &steps, &count);
    for (int i = 0; i < count && status == ND_OK; i++) {
        status = nd_checkpoint_delete(run, steps[i]);
        *deleted += status == ND_OK;
    }
    free(steps);
    return status == ND_OK && options->keep_last > 0 ? prune_old(run, options->keep_last, deleted)
                                                     : status;
}

// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/commands/ckpt.h"

static nd_status read_options(const nd_command_flags *line, nd_prune_options *out)
{
    const nd_flag_value *last = &line->values[ND_CKPT_PRUNE_KEEP_LAST];
    const nd_flag_value *every = &line->values[ND_CKPT_PRUNE_KEEP_EVERY];
    if (!last->given && (every->given || !line->values[ND_CKPT_PRUNE_SET_ASIDE].given)) {
        return nd_fail(ND_ERR_CONFIG,
                       "--keep-last K is missing; K is the number of newest checkpoints to keep");
    }
    *out = (nd_prune_options){.keep = -1, .keep_last = last->whole, .keep_every = every->whole};
    return ND_OK;
}

typedef struct pruning {
    const char *run;
    bool dry_run;
    int deleted;
    uint64_t bytes;
} pruning;

static void say_deleted(const pruning *p, const char *path, uint64_t size)
{
    char text[ND_CKPT_TEXT_MAX];
    printf("%s %s (%s)\n", p->dry_run ? "would delete" : "deleted", path,
           nd_file_bytes_format(text, sizeof text, (double)size));
}

static nd_status delete_one(pruning *p, const nd_folder *folder)
{
    char *path = NULL;
    uint64_t size = 0;
    ND_TRY(nd_fs_format(&path, "%s/%s", p->run, folder->name));
    nd_status status = nd_fs_tree_bytes(path, false, &size);
    if (status == ND_OK && !p->dry_run) {
        status = nd_folder_delete(p->run, folder);
    }
    if (status == ND_OK) {
        p->bytes += size;
        p->deleted++;
        say_deleted(p, path, size);
    }
    free(path);
    return status;
}

static nd_status delete_older(pruning *p, const nd_prune_options *options)
{
    nd_folder *list = NULL;
    int count = 0;
    ND_TRY(nd_checkpoint_prune_plan(p->run, options, true, &list, &count));
    nd_status status = ND_OK;
    for (int i = count - 1; i >= 0 && status == ND_OK; i--) { /* the oldest first */
        status = delete_one(p, &list[i]);
    }
    free(list);
    return status;
}

/* All of them, or, without `deletes`, says that they are there. */
static nd_status delete_aside(pruning *p, bool deletes)
{
    nd_folder *list = NULL;
    int count = 0;
    int64_t reached = -1;
    nd_status status = ND_OK;
    ND_TRY(nd_folder_list(p->run, ND_FOLDER_OLD | ND_FOLDER_BAD | ND_FOLDER_OURS, &list, &count));
    if (count > 0 && !deletes) {
        printf("%d that %s set aside (.old, .bad) stay%s; --set-aside deletes %s\n", count,
               count == 1 ? "was" : "were", count == 1 ? "s" : "", count == 1 ? "it" : "them");
        count = 0;
    }
    if (count > 0) {
        ND_TRY_OUT(nd_checkpoint_reached(p->run, 1, true, &reached));
    }
    if (count > 0 && reached < 0) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" has no good checkpoint, so those that were set aside may be all "
                         "that is left; nothing is deleted",
                         p->run);
        goto out;
    }
    for (int i = 0; i < count; i++) {
        ND_TRY_OUT(delete_one(p, &list[i]));
    }
out:
    free(list);
    return status;
}

/* The model of an earlier end: model.old, model.old-2, ... */
static bool is_old_model(const char *name)
{
    static const char old[] = "model.old";
    const char *rest = name + sizeof old - 1;
    return strncmp(name, old, sizeof old - 1) == 0 &&
           (!*rest || (rest[0] == '-' && rest[1] && !rest[1 + strspn(rest + 1, "0123456789")]));
}

static nd_status delete_model(const pruning *p, const char *name)
{
    char *path = NULL;
    uint64_t size = 0;
    bool there = false;
    ND_TRY(nd_fs_format(&path, "%s/%s", p->run, name));
    nd_status status = nd_fs_tree_bytes(path, false, &size);
    if (status == ND_OK && !p->dry_run) {
        nd_fs_remove_tree(path);
        status = nd_fs_exists(path, &there);
        status = there ? nd_fail(ND_ERR_CANTCREATE, "cannot delete all of \"%s\"", path) : status;
    }
    if (status == ND_OK) {
        say_deleted(p, path, size);
    }
    free(path);
    return status;
}

/* Only beside the model of a later end: else one of them is the only one that the run has. */
static nd_status delete_old_models(const pruning *p)
{
    nd_fs_names names;
    bool has_model = false;
    ND_TRY(nd_fs_has(p->run, "model/config.json", &has_model));
    ND_TRY(nd_fs_list(p->run, &names));
    nd_status status = ND_OK;
    for (int i = 0; i < names.count && status == ND_OK; i++) {
        if (is_old_model(names.list[i]) && has_model) {
            status = delete_model(p, names.list[i]);
        } else if (is_old_model(names.list[i])) {
            printf("%s/%s stays, since there is no %s/model\n", p->run, names.list[i], p->run);
        }
    }
    nd_fs_names_fini(&names);
    return status;
}

/* The run's lock is held, or nothing is deleted. */
static nd_status prune(pruning *p, const nd_prune_options *options, bool set_aside)
{
    char text[ND_CKPT_TEXT_MAX];
    nd_status status = delete_aside(p, set_aside);
    status = status == ND_OK && set_aside ? delete_old_models(p) : status;
    status = status == ND_OK ? delete_older(p, options) : status;
    if (status == ND_OK || p->deleted > 0) {
        printf("%s %d checkpoint%s, %s\n", p->dry_run ? "would delete" : "deleted", p->deleted,
               p->deleted == 1 ? "" : "s",
               nd_file_bytes_format(text, sizeof text, (double)p->bytes));
    }
    return status;
}

/* Without a lock nobody knows whether a process trains there. */
static nd_status lock_run(const char *run, nd_run_lock *lock)
{
    ND_TRY(nd_run_lock_acquire(run, lock));
    return lock->held ? ND_OK
                      : nd_fail(ND_ERR_CANTCREATE,
                                "the file system of \"%s\" has no locks, so a process may train "
                                "there; delete checkpoints yourself when none does",
                                run);
}

nd_status nd_ckpt_prune(const nd_command_flags *line, int *code)
{
    nd_prune_options options;
    nd_run_lock lock = {.fd = -1};
    char *run = NULL;
    nd_folder *list = NULL;
    int count = 0;
    const bool dry_run = line->values[ND_CKPT_PRUNE_DRY_RUN].given;
    nd_status status = ND_OK;
    (void)code;
    ND_TRY(read_options(line, &options));
    ND_TRY_OUT(nd_ckpt_folder(nd_ckpt_place(line, 0), &run));
    ND_TRY_OUT(nd_ckpt_checkpoints(run, &list, &count));
    ND_TRY_OUT(dry_run ? ND_OK : lock_run(run, &lock));
    ND_TRY_OUT(dry_run ? ND_OK : nd_checkpoint_sweep(run));
    pruning p = {.run = run, .dry_run = dry_run};
    status = prune(&p, &options, line->values[ND_CKPT_PRUNE_SET_ASIDE].given);
out:
    nd_run_lock_release(&lock);
    free(list);
    free(run);
    return status;
}

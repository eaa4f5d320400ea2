// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "trainer/commands/ckpt.h"

typedef struct pruning {
    char *run; /* owned */
    bool dry_run;
    int deleted; /* checkpoints, with their bytes */
    uint64_t bytes;
} pruning;

/* Deletes a checkpoint, or (folder NULL) the model of that name, and says so. */
static nd_status delete_one(pruning *p, const nd_folder *folder, const char *name)
{
    char *path = NULL, text[ND_CKPT_TEXT_MAX];
    uint64_t size = 0;
    bool there = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&path, "%s/%s", p->run, name));
    ND_TRY_OUT(nd_fs_tree_bytes(path, false, &size));
    if (!p->dry_run && folder) {
        ND_TRY_OUT(nd_folder_delete(p->run, folder));
    } else if (!p->dry_run) {
        nd_fs_remove_tree(path);
        ND_TRY_OUT(nd_fs_exists(path, &there));
        ND_TRY_OUT(there ? nd_fail(ND_ERR_CANTCREATE, "cannot delete all of \"%s\"", path) : ND_OK);
    }
    p->bytes += folder ? size : 0;
    p->deleted += folder != NULL;
    printf("%s %s (%s)\n", p->dry_run ? "would delete" : "deleted", path,
           nd_file_bytes_format(text, sizeof text, (double)size));
out:
    free(path);
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
    ND_TRY_OUT(count > 0 ? nd_checkpoint_reached(p->run, 1, true, &reached) : ND_OK);
    if (count > 0 && reached < 0) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" has no good checkpoint, so those that were set aside may be all "
                         "that is left; nothing is deleted",
                         p->run);
        goto out;
    }
    for (int i = 0; i < count; i++) {
        ND_TRY_OUT(delete_one(p, &list[i], list[i].name));
    }
out:
    free(list);
    return status;
}

/* Deletes the models of earlier ends, model.old, model.old-2, ..., but only beside the model of a
 * later end: else one of them is the only one that the run has. */
static nd_status delete_old_models(pruning *p)
{
    static const char old[] = "model.old";
    nd_fs_names names;
    bool has_model = false;
    ND_TRY(nd_fs_has(p->run, "model/config.json", &has_model));
    ND_TRY(nd_fs_list(p->run, &names));
    nd_status status = ND_OK;
    for (int i = 0; i < names.count && status == ND_OK; i++) {
        const char *name = names.list[i], *rest = name + sizeof old - 1;
        if (strncmp(name, old, sizeof old - 1) != 0 ||
            (*rest && (rest[0] != '-' || !rest[1] || rest[1 + strspn(rest + 1, "0123456789")]))) {
            continue;
        }
        if (has_model) {
            status = delete_one(p, NULL, name);
        } else {
            printf("%s/%s stays, since there is no %s/model\n", p->run, name, p->run);
        }
    }
    nd_fs_names_fini(&names);
    return status;
}

/* The run's lock is held, or nothing is deleted. */
static nd_status prune(pruning *p, const nd_prune_options *options, bool set_aside)
{
    char text[ND_CKPT_TEXT_MAX];
    nd_folder *list = NULL;
    int count = 0;
    nd_status status = delete_aside(p, set_aside);
    status = status == ND_OK && set_aside ? delete_old_models(p) : status;
    status =
        status == ND_OK ? nd_checkpoint_prune_plan(p->run, options, true, &list, &count) : status;
    for (int i = 0; i < count && status == ND_OK; i++) { /* the oldest first */
        status = delete_one(p, &list[i], list[i].name);
    }
    free(list);
    if (status == ND_OK || p->deleted > 0) {
        printf("%s %d checkpoint%s, %s\n", p->dry_run ? "would delete" : "deleted", p->deleted,
               p->deleted == 1 ? "" : "s",
               nd_file_bytes_format(text, sizeof text, (double)p->bytes));
    }
    return status;
}

nd_status nd_ckpt_prune(const nd_command_flags *line, int *code)
{
    const nd_flag_value *last = &line->values[ND_CKPT_PRUNE_KEEP_LAST];
    const nd_flag_value *every = &line->values[ND_CKPT_PRUNE_KEEP_EVERY];
    const bool set_aside = line->values[ND_CKPT_PRUNE_SET_ASIDE].given;
    const nd_prune_options options = {
        .keep = -1, .keep_last = last->whole, .keep_every = every->whole};
    pruning p = {.dry_run = line->values[ND_CKPT_PRUNE_DRY_RUN].given};
    nd_run_lock lock = {.fd = -1};
    nd_folder *list = NULL;
    int count = 0;
    nd_status status = ND_OK;
    (void)code;
    if (!last->given && (every->given || !set_aside)) {
        return nd_fail(ND_ERR_CONFIG,
                       "--keep-last K is missing; K is the number of newest checkpoints to keep");
    }
    ND_TRY_OUT(nd_ckpt_folder(nd_ckpt_place(line, 0), &p.run));
    ND_TRY_OUT(nd_ckpt_checkpoints(p.run, &list, &count));
    if (!p.dry_run) {
        ND_TRY_OUT(nd_run_lock_acquire(p.run, &lock));
        if (!lock.held) { /* nobody knows whether a process trains there */
            status = nd_fail(ND_ERR_CANTCREATE,
                             "the file system of \"%s\" has no locks, so a process may train "
                             "there; delete checkpoints yourself when none does",
                             p.run);
            goto out;
        }
        ND_TRY_OUT(nd_checkpoint_sweep(p.run));
    }
    status = prune(&p, &options, set_aside);
out:
    nd_run_lock_release(&lock);
    free(list);
    free(p.run);
    return status;
}

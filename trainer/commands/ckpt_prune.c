// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/fs.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/listing.h"
#include "trainer/commands/ckpt.h"

enum { FLAG_KEEP_LAST, FLAG_KEEP_EVERY, FLAG_SET_ASIDE, FLAG_DRY_RUN };

static nd_status read_options(const nd_ckpt_call *call, nd_prune_options *out)
{
    const nd_ckpt_flag *flags = nd_ckpt_prune.flags;
    const char *last = call->values[FLAG_KEEP_LAST], *every = call->values[FLAG_KEEP_EVERY];
    *out = (nd_prune_options){.keep = -1};
    if (!last && (every || !call->values[FLAG_SET_ASIDE])) {
        return nd_fail(ND_ERR_CONFIG,
                       "--keep-last K is missing; K is the number of newest checkpoints to keep");
    }
    ND_TRY(last ? nd_ckpt_number(&flags[FLAG_KEEP_LAST], last, 1, &out->keep_last) : ND_OK);
    return every ? nd_ckpt_number(&flags[FLAG_KEEP_EVERY], every, 1, &out->keep_every) : ND_OK;
}

typedef struct pruning {
    const char *run;
    bool dry_run;
    int deleted;
    uint64_t bytes;
} pruning;

/* `aside` is one that was set aside, or NULL for checkpoint-STEP. */
static nd_status delete_one(pruning *p, int64_t step, const nd_aside *aside)
{
    char *path = NULL, text[ND_CKPT_TEXT_MAX];
    ND_TRY(aside ? nd_fs_format(&path, "%s/%s", p->run, aside->name)
                 : nd_checkpoint_path(p->run, step, &path));
    uint64_t size = 0;
    nd_status status = nd_fs_tree_bytes(path, false, &size);
    if (status == ND_OK && !p->dry_run) {
        status = aside ? nd_aside_delete(p->run, aside) : nd_checkpoint_delete(p->run, step);
    }
    if (status == ND_OK) {
        p->bytes += size;
        p->deleted++;
        printf("%s %s (%s)\n", p->dry_run ? "would delete" : "deleted", path,
               nd_ckpt_bytes(text, (double)size));
    }
    free(path);
    return status;
}

static nd_status delete_older(pruning *p, const nd_prune_options *options)
{
    int64_t *steps = NULL;
    int count = 0;
    ND_TRY(nd_checkpoint_prune_plan(p->run, options, true, &steps, &count));
    nd_status status = ND_OK;
    for (int i = count - 1; i >= 0 && status == ND_OK; i--) { /* the oldest first */
        status = delete_one(p, steps[i], NULL);
    }
    free(steps);
    return status;
}

/* All of them, or, without `deletes`, says that they are there. */
static nd_status delete_aside(pruning *p, bool deletes)
{
    nd_aside *list = NULL;
    int count = 0;
    int64_t reached = -1;
    nd_status status = ND_OK;
    ND_TRY(nd_asides_list(p->run, &list, &count));
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
        ND_TRY_OUT(delete_one(p, list[i].step, &list[i]));
    }
out:
    free(list);
    return status;
}

/* The run's lock is held, or nothing is deleted. */
static nd_status prune(pruning *p, const nd_prune_options *options, bool set_aside)
{
    char text[ND_CKPT_TEXT_MAX];
    nd_status status = delete_aside(p, set_aside);
    status = status == ND_OK ? delete_older(p, options) : status;
    if (status == ND_OK || p->deleted > 0) {
        printf("%s %d checkpoint%s, %s\n", p->dry_run ? "would delete" : "deleted", p->deleted,
               p->deleted == 1 ? "" : "s", nd_ckpt_bytes(text, (double)p->bytes));
    }
    return status;
}

static nd_status check_run(const char *run)
{
    int64_t *steps = NULL;
    int count = 0;
    ND_TRY(nd_checkpoint_list(run, &steps, &count));
    free(steps);
    return count > 0 ? ND_OK
                     : nd_fail(ND_ERR_DATA,
                               "\"%s\" is no run folder: it holds no folders "
                               "checkpoint-STEP",
                               run);
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

static nd_status run_prune(const nd_ckpt_call *call, int *code)
{
    nd_prune_options options;
    nd_run_lock lock = {.fd = -1};
    char *run = NULL;
    bool dry_run = call->values[FLAG_DRY_RUN];
    nd_status status = ND_OK;
    (void)code;
    ND_TRY(read_options(call, &options));
    ND_TRY_OUT(nd_ckpt_folder(call->places[0], &run));
    ND_TRY_OUT(check_run(run));
    ND_TRY_OUT(dry_run ? ND_OK : lock_run(run, &lock));
    ND_TRY_OUT(dry_run ? ND_OK : nd_checkpoint_sweep(run));
    pruning p = {.run = run, .dry_run = dry_run};
    status = prune(&p, &options, call->values[FLAG_SET_ASIDE]);
out:
    nd_run_lock_release(&lock);
    free(run);
    return status;
}

const nd_ckpt_verb nd_ckpt_prune = {
    .name = "prune",
    .usage = "RUN --keep-last K [--keep-every E] [--set-aside] [--dry-run]",
    .help =
        "Deletes the older checkpoints of a run. Only good ones count and are deleted: whole "
        "manifest, all\nfiles with their sizes. So the newest good one always stays. Damaged ones "
        "and folders of other\nprograms are not touched, nor are those that were set aside (.old, "
        ".bad) without --set-aside. Ends\nwith 73 where RUN cannot be locked, as in training.\n",
    .least = 1,
    .most = 1,
    .flags = {{"--keep-last", "K", "Keeps the K newest good checkpoints."},
              {"--keep-every", "E", "Also keeps those whose step is a multiple of E."},
              {"--set-aside", NULL,
               "Also deletes all .old and .bad, while a good checkpoint is there. Needs no\n"
               "                         --keep-last."},
              {"--dry-run", NULL, "Says what would be deleted, and deletes nothing."}},
    .run = run_prune,
};

// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>

#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/listing.h"
#include "trainer/commands/ckpt.h"

enum { FLAG_KEEP_LAST, FLAG_KEEP_EVERY, FLAG_DRY_RUN };

static nd_status read_options(const nd_ckpt_call *call, nd_prune_options *out)
{
    const nd_ckpt_flag *flags = nd_ckpt_prune.flags;
    const char *last = call->values[FLAG_KEEP_LAST], *every = call->values[FLAG_KEEP_EVERY];
    *out = (nd_prune_options){.keep = -1};
    if (!last) {
        return nd_fail(ND_ERR_CONFIG,
                       "--keep-last K is missing: it says how many of the newest checkpoints stay");
    }
    ND_TRY(nd_ckpt_number(&flags[FLAG_KEEP_LAST], last, 1, &out->keep_last));
    return every ? nd_ckpt_number(&flags[FLAG_KEEP_EVERY], every, 1, &out->keep_every) : ND_OK;
}

static nd_status delete_one(const char *run, int64_t step, bool dry_run, uint64_t *bytes)
{
    char *path = NULL, text[ND_CKPT_TEXT_MAX];
    ND_TRY(nd_checkpoint_path(run, step, &path));
    uint64_t size = nd_folder_bytes(path);
    nd_status status = dry_run ? ND_OK : nd_checkpoint_delete(run, step);
    if (status == ND_OK) {
        *bytes += size;
        printf("%s %s (%s)\n", dry_run ? "would delete" : "deleted", path,
               nd_ckpt_bytes(text, (double)size));
    }
    free(path);
    return status;
}

/* The run's lock is held, or nothing is deleted. */
static nd_status prune(const char *run, const nd_prune_options *options, bool dry_run)
{
    int64_t *steps = NULL;
    int count = 0, deleted = 0;
    uint64_t bytes = 0;
    char text[ND_CKPT_TEXT_MAX];
    ND_TRY(nd_checkpoint_prune_plan(run, options, true, &steps, &count));
    nd_status status = ND_OK;
    for (int i = count - 1; i >= 0 && status == ND_OK; i--) { /* the oldest first */
        status = delete_one(run, steps[i], dry_run, &bytes);
        deleted += status == ND_OK;
    }
    free(steps);
    printf("%s %d checkpoint%s, %s\n", dry_run ? "would delete" : "deleted", deleted,
           deleted == 1 ? "" : "s", nd_ckpt_bytes(text, (double)bytes));
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

static nd_status run_prune(const nd_ckpt_call *call, int *code)
{
    nd_prune_options options;
    nd_run_lock lock = {-1};
    char *run = NULL;
    bool dry_run = call->values[FLAG_DRY_RUN];
    nd_status status = ND_OK;
    (void)code;
    ND_TRY(read_options(call, &options));
    ND_TRY_OUT(nd_ckpt_folder(call->places[0], &run));
    ND_TRY_OUT(check_run(run));
    ND_TRY_OUT(dry_run ? ND_OK : nd_run_lock_acquire(run, &lock));
    status = prune(run, &options, dry_run);
out:
    nd_run_lock_release(&lock);
    free(run);
    return status;
}

const nd_ckpt_verb nd_ckpt_prune = {
    .name = "prune",
    .usage = "RUN --keep-last K [--keep-every E] [--dry-run]",
    .help = "Deletes the older checkpoints of a run. Only good ones count and are deleted: whole "
            "manifest, all\nfiles with their sizes. So the newest good one always stays, and "
            "damaged ones, those that were set\naside and folders of other programs are not "
            "touched. Ends with 73 while a process trains in RUN.\n",
    .least = 1,
    .most = 1,
    .flags = {{"--keep-last", "K", "Keeps the K newest good checkpoints."},
              {"--keep-every", "E", "Also keeps those whose step is a multiple of E."},
              {"--dry-run", NULL, "Says what would be deleted, and deletes nothing."}},
    .run = run_prune,
};

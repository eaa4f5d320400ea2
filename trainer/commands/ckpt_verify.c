// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/source.h"
#include "trainer/commands/ckpt.h"
#include "trainer/weights/weights.h"

/* *state_is_good: a fault is one of the model beside the state. */
static nd_status verify(const char *folder, int64_t *bytes, int *model_files, bool *state_is_good)
{
    nd_manifest manifest = {0};
    ND_TRY(nd_ckpt_read_manifest(folder, &manifest));
    nd_status status = nd_source_verify_all(folder, &manifest, bytes);
    *state_is_good = status == ND_OK;
    status = status == ND_OK ? nd_checksums_verify(folder, model_files) : status;
    nd_manifest_fini(&manifest);
    return status;
}

/* A fault is printed, not returned; *code becomes that of the first. */
static void verify_one(const char *folder, int *code)
{
    int64_t bytes = 0;
    int model_files = 0;
    bool state_is_good = false;
    double begin = nd_clock_seconds();
    nd_status status = verify(folder, &bytes, &model_files, &state_is_good);
    double seconds = nd_clock_seconds() - begin;
    const nd_error error = *nd_error_last();
    bool there = true;
    if (status != ND_OK && nd_fs_exists(folder, &there) == ND_OK && !there) {
        printf("%s: deleted meanwhile\n", folder);
        return;
    }
    if (status != ND_OK) {
        const char *bad =
            state_is_good ? "its state is good, but the model beside it is bad" : "bad";
        printf("%s: %s: %s\n", folder, status == ND_ERR_DATA ? bad : "not verified", error.message);
        *code = *code == 0 ? (int)status : *code;
        return;
    }
    char size[ND_CKPT_TEXT_MAX];
    printf("%s: good, %s in %.1f s (%.2f GB/s)%s\n", folder, nd_ckpt_bytes(size, (double)bytes),
           seconds, seconds > 0 ? (double)bytes / seconds * 1e-9 : 0.0,
           model_files > 0 ? ", with the model beside it" : "");
    fflush(stdout);
}

static nd_status verify_run(const char *run, int *code)
{
    nd_folder *list = NULL;
    int count = 0;
    ND_TRY(nd_folder_list(run, ND_FOLDER_WHOLE, &list, &count));
    nd_status status = ND_OK;
    for (int i = 0; i < count && status == ND_OK; i++) {
        char *path = NULL;
        status = nd_checkpoint_path(run, list[i].step, &path);
        if (status == ND_OK) {
            verify_one(path, code);
        }
        free(path);
    }
    free(list);
    return count > 0 ? status
                     : nd_fail(ND_ERR_DATA,
                               "\"%s\" is neither a checkpoint nor a run folder with folders "
                               "checkpoint-STEP",
                               run);
}

nd_status nd_ckpt_verify(const nd_command_flags *line, int *code)
{
    char *folder = NULL;
    bool is_checkpoint = false;
    ND_TRY(nd_ckpt_folder(nd_ckpt_place(line, 0), &folder));
    nd_status status = nd_checkpoint_is_ours(folder, &is_checkpoint);
    if (status == ND_OK && is_checkpoint) {
        verify_one(folder, code);
    } else if (status == ND_OK) {
        status = verify_run(folder, code);
    }
    free(folder);
    return status;
}

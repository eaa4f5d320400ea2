// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands/ckpt.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/source.h"
#include "trainer/weights/weights.h"

const char *nd_ckpt_place(const nd_command_flags *line, int number)
{
    return nd_command_flags_next(line, ND_NO_FLAG, &number);
}

/* Folders. */

nd_status nd_ckpt_folder(const char *argument, char **out)
{
    nd_fs_kind kind = ND_FS_ABSENT;
    size_t length = strlen(argument);
    while (length > 1 && argument[length - 1] == '/') {
        length--;
    }
    ND_TRY(nd_fs_format(out, "%.*s", (int)length, argument));
    nd_status status = nd_fs_look(*out, &kind, NULL);
    if (kind == ND_FS_FOLDER) {
        return ND_OK;
    }
    status = status != ND_OK ? status
                             : nd_fail(ND_ERR_DATA, "cannot open folder \"%.1000s\": %s", argument,
                                       strerror(kind == ND_FS_ABSENT ? ENOENT : ENOTDIR));
    free(*out);
    *out = NULL;
    return status;
}

static nd_status read_manifest(const char *folder, nd_manifest *manifest)
{
    char *path = NULL;
    nd_fs_kind kind;
    ND_TRY(nd_fs_format(&path, "%s/" ND_MANIFEST_NAME, folder));
    nd_status status = nd_fs_look_at_link(path, &kind, NULL);
    free(path);
    ND_TRY(status);
    if (kind == ND_FS_ABSENT) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has no " ND_MANIFEST_NAME ": the save did not end, or another "
                       "program wrote the folder",
                       folder);
    }
    return kind == ND_FS_FILE
               ? nd_manifest_read(folder, manifest)
               : nd_fail(ND_ERR_DATA, "\"%s/" ND_MANIFEST_NAME "\" is a link or no file", folder);
}

nd_status nd_ckpt_checkpoints(const char *run, nd_folder **list, int *count)
{
    bool model = false;
    ND_TRY(nd_folder_list(run, ND_FOLDER_WHOLE, list, count));
    if (*count > 0) {
        return ND_OK;
    }
    ND_TRY(nd_fs_has(run, "model/config.json", &model));
    return model ? nd_fail(ND_ERR_DATA, "\"%s\" has no checkpoint; its model is %s/model", run, run)
                 : nd_fail(ND_ERR_DATA,
                           "\"%s\" is no run folder: it holds no folders checkpoint-STEP", run);
}

nd_status nd_ckpt_open(const char *argument, char **folder, nd_manifest *manifest)
{
    char *given = NULL;
    nd_folder *list = NULL;
    int count = 0;
    bool is_checkpoint = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_ckpt_folder(argument, &given));
    ND_TRY_OUT(nd_checkpoint_is_ours(given, &is_checkpoint));
    if (!is_checkpoint) {
        char *newest = NULL;
        ND_TRY_OUT(nd_ckpt_checkpoints(given, &list, &count));
        ND_TRY_OUT(nd_checkpoint_path(given, list[count - 1].step, &newest));
        free(given);
        given = newest;
    }
    ND_TRY_OUT(read_manifest(given, manifest));
    *folder = given;
    given = NULL;
out:
    free(list);
    free(given);
    return status;
}

/* Text. */

const char *nd_ckpt_mesh(char text[ND_CKPT_TEXT_MAX], const nd_mesh *mesh)
{
    size_t at = 0;
    text[0] = '\0';
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        if (mesh->size[a] > 1) {
            at += (size_t)snprintf(text + at, ND_CKPT_TEXT_MAX - at, "%s%s %d", at ? ", " : "",
                                   nd_axis_name((nd_axis)a), mesh->size[a]);
        }
    }
    return at ? text : strcpy(text, "1 rank");
}

/* verify */

/* *state_is_good: a fault is one of the model beside the state. */
static nd_status verify(const char *folder, int64_t *bytes, int *model_files, bool *state_is_good)
{
    nd_manifest manifest = {0};
    ND_TRY(read_manifest(folder, &manifest));
    nd_status status = nd_source_verify(folder, &manifest, -1, bytes);
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
    printf("%s: good, %s in %.1f s (%.2f GB/s)%s\n", folder,
           nd_file_bytes_format(size, sizeof size, (double)bytes), seconds,
           seconds > 0 ? (double)bytes / seconds * 1e-9 : 0.0,
           model_files > 0 ? ", with the model beside it" : "");
    fflush(stdout);
}

nd_status nd_ckpt_verify(const nd_command_flags *line, int *code)
{
    char *folder = NULL;
    nd_folder *list = NULL;
    int count = 0;
    bool is_checkpoint = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_ckpt_folder(nd_ckpt_place(line, 0), &folder));
    ND_TRY_OUT(nd_checkpoint_is_ours(folder, &is_checkpoint));
    if (is_checkpoint) {
        verify_one(folder, code);
        goto out;
    }
    ND_TRY_OUT(nd_ckpt_checkpoints(folder, &list, &count));
    for (int i = 0; i < count; i++) {
        char *path = NULL;
        ND_TRY_OUT(nd_checkpoint_path(folder, list[i].step, &path));
        verify_one(path, code);
        free(path);
    }
out:
    free(list);
    free(folder);
    return status;
}

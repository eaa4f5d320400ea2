// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands/ckpt.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/printable.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/report/report.h"

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

nd_status nd_ckpt_read_manifest(const char *folder, nd_manifest *manifest)
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

static nd_status newest_of_run(const char *run, char **folder)
{
    nd_folder *list = NULL;
    int count = 0;
    ND_TRY(nd_folder_list(run, ND_FOLDER_WHOLE, &list, &count));
    nd_status status = count > 0 ? nd_checkpoint_path(run, list[count - 1].step, folder)
                                 : nd_fail(ND_ERR_DATA,
                                           "\"%s\" is neither a checkpoint nor a run folder with "
                                           "folders checkpoint-STEP",
                                           run);
    free(list);
    return status;
}

nd_status nd_ckpt_open(const char *argument, char **folder, nd_manifest *manifest)
{
    char *given = NULL, *found = NULL;
    bool is_checkpoint = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_ckpt_folder(argument, &given));
    ND_TRY_OUT(nd_checkpoint_is_ours(given, &is_checkpoint));
    if (is_checkpoint) {
        found = given;
        given = NULL;
    } else {
        ND_TRY_OUT(newest_of_run(given, &found));
    }
    ND_TRY_OUT(nd_ckpt_read_manifest(found, manifest));
    *folder = found;
    found = NULL;
out:
    free(found);
    free(given);
    return status;
}

/* Text. */

const char *nd_ckpt_bytes(char text[ND_CKPT_TEXT_MAX], double bytes)
{
    return nd_file_bytes_format(text, ND_CKPT_TEXT_MAX, bytes);
}

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

const char *nd_ckpt_printable(char text[ND_CKPT_TEXT_MAX], const char *raw)
{
    nd_escape(text, ND_CKPT_TEXT_MAX, raw, "");
    return text;
}

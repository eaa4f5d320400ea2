// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands/ckpt.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/printable.h"
#include "runtime/base/suggest.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/report/report.h"

/* Command line. */

static nd_status fail_flag(const nd_ckpt_verb *verb, const char *argument)
{
    nd_suggest search;
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(argument, "="), argument);
    nd_suggest_init(&search, name);
    nd_suggest_offer(&search, "--help");
    for (const nd_ckpt_flag *flag = verb->flags; flag->name; flag++) {
        nd_suggest_offer(&search, flag->name);
    }
    return nd_fail(ND_ERR_CONFIG, "ndtrain ckpt %s has no flag %s; %s%s%s", verb->name, name,
                   search.best ? "did you mean " : "ndtrain ckpt ",
                   search.best ? search.best : verb->name,
                   search.best ? "?" : " --help lists them");
}

/* Index of the flag that begins the argument; -1: none. */
static int find_flag(const nd_ckpt_verb *verb, const char *argument)
{
    size_t length = strcspn(argument, "=");
    for (int i = 0; verb->flags[i].name; i++) {
        if (strlen(verb->flags[i].name) == length &&
            strncmp(verb->flags[i].name, argument, length) == 0) {
            return i;
        }
    }
    return -1;
}

/* *used: how many arguments the flag took. */
static nd_status parse_flag(const nd_ckpt_verb *verb, int argc, char **argv, nd_ckpt_call *call,
                            int *used)
{
    int i = find_flag(verb, argv[0]);
    const char *equals = strchr(argv[0], '=');
    if (i < 0) {
        return fail_flag(verb, argv[0]);
    }
    const nd_ckpt_flag *flag = &verb->flags[i];
    if (call->values[i]) {
        return nd_fail(ND_ERR_CONFIG, "%s is given twice; give it once", flag->name);
    }
    *used = 1;
    if (!flag->value) {
        call->values[i] = "";
        return equals ? nd_fail(ND_ERR_CONFIG, "%s takes no value", flag->name) : ND_OK;
    }
    if (!equals && argc < 2) {
        return nd_fail(ND_ERR_CONFIG, "%s needs a value: %s %s", flag->name, flag->name,
                       flag->value);
    }
    *used = equals ? 1 : 2;
    call->values[i] = equals ? equals + 1 : argv[1];
    return ND_OK;
}

nd_status nd_ckpt_parse(const nd_ckpt_verb *verb, int argc, char **argv, nd_ckpt_call *out)
{
    nd_ckpt_call call = {0};
    int places = 0;
    for (int i = 1, used = 1; i < argc; i += used) {
        used = 1;
        if (argv[i][0] == '-' && argv[i][1] != '\0') {
            ND_TRY(parse_flag(verb, argc - i, argv + i, &call, &used));
        } else if (places < verb->most) {
            call.places[places++] = argv[i];
        } else {
            return nd_fail(ND_ERR_CONFIG,
                           "\"%.200s\" is one argument too many; usage: ndtrain "
                           "ckpt %s %s",
                           argv[i], verb->name, verb->usage);
        }
    }
    if (places < verb->least) {
        return nd_fail(ND_ERR_CONFIG, "a folder is missing; usage: ndtrain ckpt %s %s", verb->name,
                       verb->usage);
    }
    *out = call;
    return ND_OK;
}

nd_status nd_ckpt_number(const nd_ckpt_flag *flag, const char *text, int64_t least, int64_t *out)
{
    size_t length = strlen(text);
    if (length == 0 || length > 18 || strspn(text, "0123456789") != length ||
        strtoll(text, NULL, 10) < least) {
        return nd_fail(ND_ERR_CONFIG, "%s is \"%.60s\"; it must be a whole number from %lld on",
                       flag->name, text, (long long)least);
    }
    *out = strtoll(text, NULL, 10);
    return ND_OK;
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

nd_status nd_ckpt_is_checkpoint(const char *folder, bool *out)
{
    nd_fs_kind kind;
    ND_TRY(nd_checkpoint_is_ours(folder, out));
    ND_TRY(nd_fs_look_at_link(folder, &kind, NULL));
    return *out && kind == ND_FS_LINK
               ? nd_fail(ND_ERR_DATA, "\"%s\" is a link; give the folder that it points to", folder)
               : ND_OK;
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

nd_status nd_ckpt_check_links(const char *run, int64_t newest)
{
    int64_t link = -1;
    ND_TRY(nd_checkpoint_newest_link(run, &link));
    if (link > newest && newest < 0) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s/checkpoint-%lld\" is a link; give the folder that it points to", run,
                       (long long)link);
    }
    if (link > newest) {
        nd_log_warning("%s/checkpoint-%lld is a link, which is not followed; give the folder that "
                       "it points to",
                       run, (long long)link);
    }
    return ND_OK;
}

static nd_status newest_of_run(const char *run, char **folder)
{
    int64_t *steps = NULL;
    int count = 0;
    ND_TRY(nd_checkpoint_list(run, &steps, &count));
    nd_status linked = nd_ckpt_check_links(run, count > 0 ? steps[count - 1] : -1);
    if (linked != ND_OK) {
        free(steps);
        return linked;
    }
    nd_status status = count > 0 ? nd_checkpoint_path(run, steps[count - 1], folder)
                                 : nd_fail(ND_ERR_DATA,
                                           "\"%s\" is neither a checkpoint nor a run folder with "
                                           "folders checkpoint-STEP",
                                           run);
    free(steps);
    return status;
}

nd_status nd_ckpt_open(const char *argument, char **folder, nd_manifest *manifest)
{
    char *given = NULL, *found = NULL;
    bool is_checkpoint = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_ckpt_folder(argument, &given));
    ND_TRY_OUT(nd_ckpt_is_checkpoint(given, &is_checkpoint));
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

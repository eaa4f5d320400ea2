// SPDX-License-Identifier: Apache-2.0
/* SHA256SUMS of a model folder, in the format of the program sha256sum. */
#include "trainer/weights/weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"

enum { LIST_BYTES_MAX = 4 << 20, HEX = 64 };

static const char list_name[] = "SHA256SUMS";

/* Adds the line of one file; what is not a regular file is left out. */
static nd_status add_line(FILE *out, const char *folder, const char *name)
{
    char *path = NULL, hex[HEX + 1];
    nd_fs_kind kind;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_format(&path, "%s/%s", folder, name));
    ND_TRY_OUT(nd_fs_look(path, &kind, NULL));
    if (kind == ND_FS_FILE) {
        ND_TRY_OUT(nd_sha256_file(path, hex));
        fprintf(out, "%s  %s\n", hex, name);
    }
out:
    free(path);
    return status;
}

static nd_status write_list(const char *folder, const nd_fs_names *names)
{
    char *text = NULL, *path = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    nd_status status = out ? ND_OK : nd_fail_memory("SHA256SUMS");
    for (int i = 0; i < names->count && status == ND_OK; i++) {
        const char *name = names->list[i];
        const bool listed = name[0] != '.' && strcmp(name, list_name) != 0;
        status = listed ? add_line(out, folder, name) : ND_OK;
    }
    if (out && fclose(out) != 0 && status == ND_OK) {
        status = nd_fail_memory("SHA256SUMS");
    }
    ND_TRY_OUT(status);
    ND_TRY_OUT(nd_fs_format(&path, "%s/%s", folder, list_name));
    ND_TRY_OUT(nd_fs_write_atomic(path, text, size));
out:
    free(path);
    free(text);
    return status;
}

nd_status nd_checksums_write(const char *folder)
{
    nd_fs_names names;
    ND_TRY(nd_fs_list(folder, &names));
    nd_status status = write_list(folder, &names);
    nd_fs_names_fini(&names);
    return status;
}

/* "<hex>  <name>", or "<hex> *<name>"; the name must lie in the folder. */
static bool split_line(char *line, const char **hex, const char **name)
{
    *hex = line;
    *name = line + HEX + 2;
    if (strlen(line) <= HEX + 2 || strspn(line, "0123456789abcdefABCDEF") != HEX ||
        line[HEX] != ' ' || (line[HEX + 1] != ' ' && line[HEX + 1] != '*') || strchr(*name, '/') ||
        strcmp(*name, "..") == 0) {
        return false;
    }
    line[HEX] = '\0';
    return true;
}

static nd_status verify_file(const char *folder, const char *name, const char *wanted)
{
    char *path = NULL, hex[HEX + 1];
    nd_status status = ND_OK;
    ND_TRY(nd_fs_format(&path, "%s/%s", folder, name));
    bool there = false;
    ND_TRY_OUT(nd_fs_exists(path, &there));
    if (!there) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" is missing, but SHA256SUMS of its folder lists it; copy the whole "
                         "folder again, or set model.verify: false (--model-verify false)",
                         path);
        goto out;
    }
    ND_TRY_OUT(nd_sha256_file(path, hex));
    if (strcasecmp(hex, wanted) != 0) {
        status = nd_fail(
            ND_ERR_DATA,
            "\"%s\" is not the file that SHA256SUMS of its folder lists: it was "
            "damaged or changed after it was saved; copy it again, or, if the change "
            "is wanted, remove SHA256SUMS or set model.verify: false (--model-verify false)",
            path);
    }
out:
    free(path);
    return status;
}

static nd_status verify_list(const char *folder, const char *path, char *text, int *files)
{
    char *rest = text;
    int64_t number = 0;
    for (char *line; (line = strsep(&rest, "\n"));) {
        const char *hex, *name;
        number++;
        if (!*line) {
            continue;
        }
        if (!split_line(line, &hex, &name)) {
            return nd_fail(ND_ERR_DATA,
                           "\"%s\" line %lld is not a SHA-256 and the name of a file of the "
                           "folder; make it again with sha256sum, or set model.verify: false",
                           path, (long long)number);
        }
        ND_TRY(verify_file(folder, name, hex));
        (*files)++;
    }
    return ND_OK;
}

nd_status nd_checksums_verify(const char *folder, int *files)
{
    char *path = NULL, *text = NULL;
    size_t size = 0;
    nd_status status = ND_OK;
    *files = 0;
    bool there = false;
    ND_TRY(nd_fs_format(&path, "%s/%s", folder, list_name));
    ND_TRY_OUT(nd_fs_exists(path, &there));
    if (there) {
        ND_TRY_OUT(nd_fs_read(path, LIST_BYTES_MAX, ND_ERR_DATA, &text, &size));
        ND_TRY_OUT(verify_list(folder, path, text, files));
    }
out:
    free(text);
    free(path);
    return status;
}

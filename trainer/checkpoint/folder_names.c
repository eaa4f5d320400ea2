// SPDX-License-Identifier: Apache-2.0
/* The names of a run's folders (folder.h): the only file that reads and writes them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/state_file.h"

static const char digits[] = "0123456789";

/* A name is `prefix`, the step, `suffix` and, behind .old and .bad, nothing or -NUMBER. */
static const struct {
    const char *prefix, *suffix; /* suffix NULL: anything follows, and the step may be missing */
    nd_folder_kind kind;
} forms[] = {
    {"checkpoint-", "", ND_FOLDER_WHOLE},         {"checkpoint-", ".old", ND_FOLDER_OLD},
    {"checkpoint-", ".bad", ND_FOLDER_BAD},       {".tmp-checkpoint-", NULL, ND_FOLDER_BEGUN},
    {".del-checkpoint-", NULL, ND_FOLDER_DOOMED},
};

/* The number at *text, without leading zeros; *text then stands behind it. -1: there is none. */
static int64_t read_number(const char **text)
{
    const char *at = *text;
    const size_t length = strspn(at, digits);
    *text += length;
    return length == 0 || length > 18 || (at[0] == '0' && length > 1) ? -1 : strtoll(at, NULL, 10);
}

nd_folder nd_folder_parse(const char *name)
{
    nd_folder folder = {.kind = ND_FOLDER_NONE};
    snprintf(folder.name, sizeof folder.name, "%s", name);
    for (size_t i = 0; i < sizeof forms / sizeof *forms && !folder.kind; i++) {
        const size_t length = strlen(forms[i].prefix);
        const char *suffix = forms[i].suffix, *rest = name + length;
        if (strncmp(name, forms[i].prefix, length) != 0) {
            continue;
        }
        folder.step = read_number(&rest);
        folder.number = 1;
        bool fits = !suffix;
        if (suffix && folder.step >= 0 && strncmp(rest, suffix, strlen(suffix)) == 0) {
            rest += strlen(suffix);
            if (suffix[0] && rest[0] == '-') {
                rest++;
                folder.number = read_number(&rest);
            }
            fits = *rest == '\0' && folder.number > 0;
        }
        folder.kind = fits ? forms[i].kind : ND_FOLDER_NONE;
    }
    return folder;
}

const char *nd_checkpoint_name(int64_t step, char out[ND_CHECKPOINT_NAME_MAX])
{
    snprintf(out, ND_CHECKPOINT_NAME_MAX, "%s%lld", forms[0].prefix, (long long)step);
    return out;
}

nd_status nd_checkpoint_path(const char *run, int64_t step, char **out)
{
    char name[ND_CHECKPOINT_NAME_MAX];
    return nd_fs_format(out, "%s/%s", run, nd_checkpoint_name(step, name));
}

nd_status nd_checkpoint_temporary(const char *run, int64_t step, const char *run_id, char **out)
{
    char name[ND_CHECKPOINT_NAME_MAX];
    return nd_fs_format(out, "%s/.tmp-%s-%s", run, nd_checkpoint_name(step, name), run_id);
}

static int by_step(const void *a, const void *b)
{
    const nd_folder *x = a, *y = b;
    if (x->step != y->step) {
        return x->step < y->step ? -1 : 1;
    }
    return x->kind != y->kind ? (int)x->kind - (int)y->kind
                              : (x->number > y->number) - (x->number < y->number);
}

nd_status nd_folder_list(const char *run, int kinds, nd_folder **out, int *count)
{
    nd_fs_names names;
    nd_folder *list = NULL;
    int n = 0;
    nd_status status = ND_OK;
    *out = NULL;
    *count = 0;
    ND_TRY(nd_fs_list(run, &names));
    ND_TRY_OUT(ND_ALLOC(names.count + 1, &list));
    for (int i = 0; i < names.count; i++) {
        char *path = NULL;
        nd_fs_kind kind;
        list[n] = nd_folder_parse(names.list[i]);
        if ((list[n].kind & kinds) == 0) {
            continue;
        }
        status = nd_fs_format(&path, "%s/%s", run, names.list[i]);
        status = status == ND_OK ? nd_fs_look(path, &kind, NULL) : status;
        free(path);
        ND_TRY_OUT(status);
        bool there = kind == ND_FS_FOLDER || kind == ND_FS_ABSENT; /* absent: a link to nowhere */
        if (there && (kinds & ND_FOLDER_OURS)) {
            ND_TRY_OUT(nd_folder_is_ours(run, &list[n], &there));
        }
        n += there;
    }
    qsort(list, (size_t)n, sizeof *list, by_step);
    *out = list;
    *count = n;
    list = NULL;
out:
    free(list);
    nd_fs_names_fini(&names);
    return status;
}

nd_status nd_checkpoint_is_ours(const char *path, bool *out)
{
    char *state = NULL;
    nd_fs_kind kind = ND_FS_ABSENT;
    ND_TRY(nd_fs_has(path, ND_MANIFEST_NAME, out));
    if (!*out) {
        ND_TRY(nd_fs_format(&state, "%s/" ND_STATE_FOLDER, path));
        ND_TRY(nd_fs_look_at_link(state, &kind, NULL));
        *out = kind == ND_FS_FOLDER;
        free(state);
    }
    return ND_OK;
}

nd_status nd_folder_is_ours(const char *run, const nd_folder *folder, bool *out)
{
    char *path = NULL;
    nd_fs_kind kind;
    ND_TRY(nd_fs_format(&path, "%s/%s", run, folder->name));
    nd_status status = nd_fs_look(path, &kind, NULL);
    *out = true;
    status = status == ND_OK && kind != ND_FS_ABSENT ? nd_checkpoint_is_ours(path, out) : status;
    free(path);
    return status;
}

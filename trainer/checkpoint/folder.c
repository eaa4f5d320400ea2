// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/folder.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/text.h"
#include "trainer/checkpoint/source.h"

/* Names. This file is the only one that reads and writes them. */

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

static nd_folder parse_name(const char *name)
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

nd_status nd_checkpoint_is_ours(const char *path, bool *out)
{
    char state[PATH_MAX];
    nd_fs_kind kind = ND_FS_ABSENT;
    ND_TRY(nd_fs_has(path, ND_MANIFEST_NAME, out));
    if (!*out) {
        ND_TRY(nd_fs_path(state, "%s/" ND_STATE_FOLDER, path));
        ND_TRY(nd_fs_look_at_link(state, &kind, NULL));
        *out = kind == ND_FS_FOLDER;
    }
    return ND_OK;
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
        char path[PATH_MAX];
        nd_fs_kind kind = ND_FS_ABSENT;
        list[n] = parse_name(names.list[i]);
        if ((list[n].kind & kinds) == 0) {
            continue;
        }
        ND_TRY_OUT(nd_fs_path(path, "%s/%s", run, names.list[i]));
        ND_TRY_OUT(nd_fs_look(path, &kind, NULL));
        bool there = kind == ND_FS_FOLDER || kind == ND_FS_ABSENT; /* absent: a link to nowhere */
        if (kind == ND_FS_FOLDER && (kinds & ND_FOLDER_OURS)) {
            ND_TRY_OUT(nd_checkpoint_is_ours(path, &there));
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

/* Lock. */

nd_status nd_run_lock_acquire(const char *run, nd_run_lock *out)
{
    char path[PATH_MAX];
    nd_status status = ND_OK;
    ND_TRY(nd_fs_path(path, "%s/.lock", run));
    nd_fs_locked locked = ND_FS_LOCKED;
    int fd = nd_fs_update(path, 0), code = errno;
    status = fd < 0 ? nd_fail(nd_fs_blame_write(code), "cannot write \"%s\": %s", path,
                              nd_fs_reason(code))
                    : nd_fs_lock(fd, path, &locked);
    if (status == ND_OK && locked == ND_FS_LOCKED_BY_ANOTHER) {
        status = nd_fail(ND_ERR_CANTCREATE,
                         "another process trains in \"%s\" at this moment, or deletes checkpoints "
                         "there; wait until it has ended",
                         run);
    }
    if (status != ND_OK && fd >= 0) {
        close(fd);
        fd = -1;
    }
    *out = (nd_run_lock){.fd = fd, .held = status == ND_OK && locked == ND_FS_LOCKED};
    return status;
}

void nd_run_lock_release(nd_run_lock *lock)
{
    if (lock->fd >= 0) {
        close(lock->fd);
        *lock = (nd_run_lock){.fd = -1};
    }
}

/* These functions remove what dead processes left. */

/* WHAT.json or WHAT-NUMBER.json. */
static bool is_numbered(const char *name, size_t length, const char *what)
{
    static const char end[] = ".json";
    size_t at = strlen(what);
    if (strncmp(name, what, at) != 0) {
        return false;
    }
    at += name[at] == '-' ? 1 + strspn(name + at + 1, "0123456789") : 0;
    return length == at + sizeof end - 1 && memcmp(name + at, end, sizeof end - 1) == 0;
}

/* A save or a deletion that did not end, or a temporary name of what a run writes itself while it
 * holds the lock. Other commands, which take no lock, may write into the folder at this moment
 * under other names. */
static bool is_left(const char *name)
{
    const nd_folder_kind kind = parse_name(name).kind;
    const size_t length = nd_fs_temporary_of(name);
    return kind == ND_FOLDER_BEGUN || kind == ND_FOLDER_DOOMED ||
           (length == strlen("model") && memcmp(name, "model", length) == 0) ||
           (length > 0 && (is_numbered(name, length, "run") || is_numbered(name, length, "trace") ||
                           is_numbered(name, length, "profile")));
}

nd_status nd_checkpoint_sweep(const char *run)
{
    return nd_fs_remove_left(run, is_left);
}

/* Save. */

/* Writes the manifest durably, and reads it again before anything depends on it. */
static nd_status write_manifest(const char *temporary, const nd_manifest *manifest)
{
    char *text = NULL;
    size_t bytes = 0;
    nd_manifest again = {0};
    ND_TRY(nd_manifest_format(manifest, &text, &bytes));
    nd_status status = nd_shard_put(temporary, ND_MANIFEST_NAME, text, bytes);
    free(text);
    status = status == ND_OK ? nd_manifest_read(temporary, &again) : status;
    nd_manifest_fini(&again);
    return status;
}

nd_status nd_checkpoint_set_aside(const char *run, int64_t step, const char *suffix, char **out)
{
    char *path = NULL;
    ND_TRY(nd_checkpoint_path(run, step, &path));
    nd_status status = nd_fs_set_aside(path, path, suffix, out);
    free(path);
    return status;
}

/* This host sees what each rank has written: a hash file of each, and their data. It would not
 * where the folder of some rank is that of another disk. */
static nd_status check_parts(const char *state, const nd_manifest *manifest)
{
    uint64_t wanted = 0, found = 0;
    nd_fs_names names;
    ND_TRY(nd_fs_list(state, &names));
    nd_status status = ND_OK;
    for (int rank = 0; rank < manifest->writer_count && status == ND_OK; rank++) {
        char name[ND_HASH_FILE_NAME_MAX];
        bool there = true;
        nd_hash_file_name(name, rank);
        wanted += manifest->writers[rank].bytes;
        status = nd_fs_has(state, name, &there);
        if (status == ND_OK && !there) {
            status = nd_fail(ND_ERR_CANTCREATE,
                             "rank %d has written its part, but \"%s/%s\" is not there; all hosts "
                             "must see the run folder",
                             rank, state, name);
        }
        nd_fs_beat();
    }
    for (int i = 0; i < names.count && status == ND_OK; i++) {
        char path[PATH_MAX];
        struct stat st;
        nd_fs_kind kind = ND_FS_ABSENT;
        if (nd_ends_with(names.list[i], ".safetensors")) {
            status = nd_fs_path(path, "%s/%s", state, names.list[i]);
            status = status == ND_OK ? nd_fs_look_at_link(path, &kind, &st) : status;
        }
        found += kind == ND_FS_FILE ? (uint64_t)st.st_size : 0;
        nd_fs_beat();
    }
    nd_fs_names_fini(&names);
    if (status == ND_OK && found != wanted) {
        status = nd_fail(ND_ERR_DATA, "\"%s\" has %llu bytes of tensors; the ranks wrote %llu",
                         state, (unsigned long long)found, (unsigned long long)wanted);
    }
    return status;
}

/* The new checkpoint takes the name of an older one at once, so that a process that dies in between
 * leaves one of them under it. *taken: the file system can do that. */
static nd_status exchange_names(const char *temporary, const char *path, bool *taken)
{
    int code = nd_fs_exchange(temporary, path);
    *taken = code == 0;
    if (code != 0) {
        return code == EINVAL || code == ENOSYS || code == EOPNOTSUPP
                   ? ND_OK
                   : nd_fail(ND_ERR_CANTCREATE, "cannot exchange \"%s\" and \"%s\": %s", temporary,
                             path, strerror(code));
    }
    nd_status status = nd_fs_set_aside(temporary, path, "old", NULL);
    if (status != ND_OK) {
        (void)nd_fs_exchange(temporary, path);
    }
    return status;
}

/* A failure leaves the names as they were. */
static nd_status take_name(const char *run, const char *temporary, int64_t step)
{
    char *path = NULL, *aside = NULL;
    nd_status status = ND_OK;
    bool there = false, taken = false;
    nd_fs_kind kind;
    ND_TRY_OUT(nd_fs_look_at_link(temporary, &kind, NULL));
    if (kind != ND_FS_FOLDER) {
        status =
            nd_fail(ND_ERR_CANTCREATE, "\"%s\" is no longer the folder that was made", temporary);
        goto out;
    }
    ND_TRY_OUT(nd_checkpoint_path(run, step, &path));
    ND_TRY_OUT(nd_fs_exists(path, &there));
    if (there) {
        ND_TRY_OUT(exchange_names(temporary, path, &taken));
        if (taken) {
            goto out;
        }
        ND_TRY_OUT(nd_fs_set_aside(path, path, "old", &aside));
    }
    status = nd_fs_rename(temporary, path);
    if (status != ND_OK && aside) {
        (void)rename(aside, path);
    }
out:
    free(aside);
    free(path);
    return status;
}

nd_status nd_checkpoint_commit(const char *run, const char *temporary, const nd_manifest *manifest,
                               nd_status (*gate)(void *context), void *context)
{
    char state[PATH_MAX];
    ND_TRY(nd_fs_path(state, "%s/" ND_STATE_FOLDER, temporary));
    ND_TRY(nd_fs_sync_folder(state));
    ND_TRY(check_parts(state, manifest));
    ND_TRY(write_manifest(temporary, manifest));
    ND_TRY(nd_fs_sync_folder(temporary));
    ND_TRY(gate ? gate(context) : ND_OK);
    return take_name(run, temporary, manifest->position.step);
}

/* The contents of a run folder. */

/* The states that names of folders tell, by kind; NULL: the name tells none. */
static const char *const kind_states[] = {[ND_FOLDER_BAD] = ".bad",
                                          [ND_FOLDER_OLD] = ".old",
                                          [ND_FOLDER_BEGUN] = "temporary",
                                          [ND_FOLDER_DOOMED] = "half deleted"};

/* Keeps the reason of a fault of the checkpoint; other errors are returned. A state that the name
 * tells is kept. */
static nd_status keep_reason(nd_saved *saved, nd_status status, const char *state)
{
    if (status != ND_ERR_DATA) {
        return status;
    }
    saved->state = saved->state ? saved->state : state;
    snprintf(saved->why, sizeof saved->why, "%.500s", nd_error_last()->message);
    nd_error_clear();
    return ND_OK;
}

static nd_status examine_contents(const char *folder, nd_saved *saved)
{
    nd_manifest m = {0};
    struct tm utc = {0};
    int64_t bytes = 0;
    bool there = false;
    ND_TRY(nd_fs_has(folder, ND_MANIFEST_NAME, &there));
    if (!there) {
        saved->state = saved->state ? saved->state : "no manifest";
        return ND_OK;
    }
    nd_status status = nd_manifest_read(folder, &m);
    if (status != ND_OK) {
        return keep_reason(saved, status, m.is_newer ? "newer version" : "damaged manifest");
    }
    const char *end = strptime(m.time, "%Y-%m-%dT%H:%M:%SZ", &utc);
    saved->time = end && *end == '\0' ? timegm(&utc) : saved->time;
    saved->has_manifest = true;
    saved->step = m.position.step;
    saved->mesh = m.mesh;
    saved->position = m.position;
    saved->samples_seen = m.samples_seen;
    memcpy(saved->reason, m.reason, sizeof saved->reason);
    status = keep_reason(saved, nd_source_verify(folder, &m, -1, false, &bytes), "incomplete");
    nd_manifest_fini(&m);
    return status;
}

nd_status nd_saved_examine(const char *folder, nd_saved *out)
{
    struct stat st = {0};
    nd_fs_kind kind, name_kind;
    const char *slash = strrchr(folder, '/');
    ND_TRY(nd_fs_look_at_link(folder, &name_kind, &st));
    ND_TRY(nd_fs_look(folder, &kind, &st));
    const bool nowhere = kind == ND_FS_ABSENT && name_kind == ND_FS_LINK;
    if (kind != ND_FS_FOLDER && !nowhere) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is no folder", folder);
    }
    const nd_folder name = parse_name(slash && slash[1] ? slash + 1 : folder);
    *out = (nd_saved){
        .step = name.kind ? name.step : -1, .time = st.st_mtime, .state = kind_states[name.kind]};
    memcpy(out->name, name.name, sizeof out->name);
    if (nowhere) {
        out->state = "link to nowhere";
        snprintf(out->why, sizeof out->why, "it is a link that leads nowhere; mount its disk");
        return ND_OK;
    }
    ND_TRY(nd_fs_has(folder, "config.json", &out->has_model));
    ND_TRY(nd_fs_tree_bytes(folder, false, &out->bytes));
    ND_TRY(examine_contents(folder, out));
    out->state = out->state ? out->state : "good";
    return ND_OK;
}

nd_status nd_saved_list(const char *run, nd_saved **out, int *count)
{
    nd_folder *folders = NULL;
    nd_saved *list = NULL;
    int n = 0, all = 0;
    bool there = false;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_is_folder(run, &there));
    if (!there) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is no folder", run);
    }
    ND_TRY(nd_folder_list(run, ND_FOLDER_ALL, &folders, &all));
    ND_TRY_OUT(ND_ALLOC(all + 1, &list));
    for (int i = 0; i < all; i++) {
        char path[PATH_MAX];
        if (folders[i].step < 0) {
            continue;
        }
        ND_TRY_OUT(nd_fs_path(path, "%s/%s", run, folders[i].name));
        status = nd_saved_examine(path, &list[n]);
        n += status == ND_OK;
        ND_TRY_OUT(status == ND_ERR_DATA ? ND_OK : status); /* it may be gone by now */
    }
    *out = list;
    *count = n;
    list = NULL;
out:
    free(list);
    free(folders);
    return status;
}

/* Checkpoints that stay, and the deletion of others. */

nd_status nd_folder_delete(const char *run, const nd_folder *folder)
{
    char path[PATH_MAX], doomed[PATH_MAX];
    nd_manifest manifest = {0};
    ND_TRY(nd_fs_path(path, "%s/%s", run, folder->name));
    ND_TRY(nd_fs_path(doomed, "%s/.del-%s", run, folder->name));
    if (folder->kind == ND_FOLDER_WHOLE) {
        ND_TRY(nd_manifest_read(path, &manifest)); /* else it is not ours, or damaged */
        nd_manifest_fini(&manifest);
    }
    nd_fs_remove_tree(doomed);
    /* A process that dies behind the rename leaves what nd_checkpoint_sweep removes. */
    ND_TRY(nd_fs_rename(path, doomed));
    nd_fs_remove_tree(doomed);
    return ND_OK;
}

/* Its manifest can be read and is that of its step. What cannot be read because of an I/O error is
 * an error, and neither good nor bad. A link is not good: what it leads to may be deleted. */
static nd_status is_good(const char *run, const nd_folder *folder, bool checks_files, bool *good)
{
    char path[PATH_MAX];
    nd_manifest manifest = {0};
    nd_fs_kind kind = ND_FS_ABSENT;
    int64_t bytes = 0;
    ND_TRY(nd_fs_path(path, "%s/%s", run, folder->name));
    nd_status status = nd_fs_look_at_link(path, &kind, NULL);
    status = status == ND_OK ? nd_manifest_read(path, &manifest) : status;
    if (status == ND_OK && checks_files) {
        status = nd_source_verify(path, &manifest, -1, false, &bytes);
    }
    *good = status == ND_OK && kind == ND_FS_FOLDER && manifest.position.step == folder->step;
    nd_manifest_fini(&manifest);
    return status == ND_ERR_DATA ? ND_OK : status;
}

nd_status nd_checkpoint_reached(const char *run, int64_t count, bool checks_files, int64_t *step)
{
    nd_folder *list = NULL;
    int64_t newer = 0;
    int all = 0;
    nd_status status = ND_OK;
    *step = -1;
    ND_TRY(nd_folder_list(run, ND_FOLDER_WHOLE, &list, &all));
    for (int i = all - 1; i >= 0 && newer < count && status == ND_OK; i--) {
        bool good = false;
        status = is_good(run, &list[i], checks_files, &good);
        newer += good;
        *step = newer == count ? list[i].step : -1;
    }
    if (status == ND_OK) {
        nd_error_clear(); /* why one is not good */
    }
    free(list);
    return status;
}

nd_status nd_checkpoint_prune_plan(const char *run, const nd_prune_options *options,
                                   bool checks_files, nd_folder **out, int *count)
{
    int64_t reached = -1;
    int all = 0;
    nd_status status = ND_OK;
    *out = NULL;
    *count = 0;
    if (options->keep_last <= 0) {
        return ND_OK;
    }
    ND_TRY(nd_checkpoint_reached(run, options->keep_last, checks_files, &reached));
    ND_TRY(nd_folder_list(run, ND_FOLDER_WHOLE, out, &all));
    for (int i = 0; i < all && (*out)[i].step < reached && status == ND_OK; i++) {
        const nd_folder folder = (*out)[i];
        const bool kept = folder.step == options->keep ||
                          (options->best > 0 && folder.step == options->best) ||
                          (options->keep_every > 0 && folder.step % options->keep_every == 0);
        bool good = false;
        status = kept ? ND_OK : is_good(run, &folder, checks_files, &good);
        (*out)[*count] = folder;
        *count += good;
    }
    if (status != ND_OK) {
        free(*out);
        *out = NULL;
        *count = 0;
    }
    return status;
}

/* The last in the list is the newest, and stays. */
static nd_status prune_old(const char *run, int64_t keep_last, int *deleted)
{
    nd_folder *list = NULL;
    int count = 0;
    int64_t reached = -1;
    nd_status status = ND_OK;
    ND_TRY(nd_folder_list(run, ND_FOLDER_OLD | ND_FOLDER_OURS, &list, &count));
    if (count > 1) {
        ND_TRY_OUT(nd_checkpoint_reached(run, keep_last, false, &reached));
    }
    for (int i = 0; i < count - 1 && list[i].step <= reached; i++) {
        bool good = false;
        ND_TRY_OUT(is_good(run, &list[i], false, &good));
        if (good) {
            ND_TRY_OUT(nd_folder_delete(run, &list[i]));
            ++*deleted;
        }
    }
out:
    free(list);
    return status;
}

nd_status nd_checkpoint_prune(const char *run, const nd_prune_options *options, int *deleted)
{
    nd_folder *list = NULL;
    int count = 0;
    *deleted = 0;
    nd_status status = nd_checkpoint_prune_plan(run, options, false, &list, &count);
    for (int i = 0; i < count; i++) { /* one that cannot be deleted keeps no other */
        const nd_status one = nd_folder_delete(run, &list[i]);
        *deleted += one == ND_OK;
        status = one == ND_OK ? status : one;
    }
    free(list);
    return status == ND_OK && options->keep_last > 0 ? prune_old(run, options->keep_last, deleted)
                                                     : status;
}

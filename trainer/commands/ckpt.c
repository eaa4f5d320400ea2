// SPDX-License-Identifier: Apache-2.0
/*
 * `ndtrain ckpt VERB`: tools for checkpoints on disk. They need no configuration, start nothing,
 * and use memory that does not grow with the model.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/printable.h"
#include "trainer/checkpoint/export.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/manifest.h"
#include "trainer/checkpoint/source.h"
#include "trainer/commands/command.h"
#include "trainer/weights/weights.h"

enum { TEXT_MAX = 160 };

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

/* The checkpoints of a run folder, at least one, in the order of their steps; owned by the
 * caller. */
static nd_status list_checkpoints(const char *run, nd_folder **list, int *count)
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

/* The paths of the checkpoints that a folder stands for, in the order of their steps: its own, or
 * those of a run. The caller's, after a failure too. */
static nd_status find_checkpoints(const char *argument, nd_fs_names *out)
{
    char *folder = NULL;
    nd_folder *list = NULL;
    int count = 1;
    bool is_one = false;
    nd_status status = ND_OK;
    *out = (nd_fs_names){0};
    ND_TRY_OUT(nd_ckpt_folder(argument, &folder));
    ND_TRY_OUT(nd_checkpoint_is_ours(folder, &is_one));
    ND_TRY_OUT(is_one ? ND_OK : list_checkpoints(folder, &list, &count));
    ND_TRY_OUT(ND_ALLOC(count, &out->list));
    for (int i = 0; i < count; i++) {
        ND_TRY_OUT(is_one ? nd_fs_format(&out->list[i], "%s", folder)
                          : nd_checkpoint_path(folder, list[i].step, &out->list[i]));
        out->count++;
    }
out:
    free(list);
    free(folder);
    return status;
}

/* A checkpoint: the folder itself, or the newest of a run folder. Reads its manifest. The results
 * are the caller's. */
static nd_status open_checkpoint(const char *argument, char **folder, nd_manifest *manifest)
{
    nd_fs_names found;
    nd_status status = ND_OK;
    ND_TRY_OUT(find_checkpoints(argument, &found));
    ND_TRY_OUT(read_manifest(found.list[found.count - 1], manifest));
    status = nd_fs_format(folder, "%s", found.list[found.count - 1]);
out:
    nd_fs_names_fini(&found);
    return status;
}

/* Prints how the checkpoint is, also a fault, which is returned. */
static nd_status verify(const char *folder)
{
    nd_manifest manifest = {0};
    char size[TEXT_MAX];
    int64_t bytes = 0;
    int model_files = 0;
    bool there = true;
    const double begin = nd_clock_seconds();
    nd_status status = read_manifest(folder, &manifest);
    status = status == ND_OK ? nd_source_verify(folder, &manifest, -1, true, &bytes) : status;
    const bool state_is_good = status == ND_OK; /* a fault is one of the model beside it */
    status = status == ND_OK ? nd_checksums_verify(folder, &model_files) : status;
    nd_manifest_fini(&manifest);
    const double seconds = nd_clock_seconds() - begin;
    const nd_error error = *nd_error_last();
    if (status == ND_OK) {
        printf("%s: good, %s in %.1f s (%.2f GB/s)%s\n", folder,
               nd_file_bytes_format(size, sizeof size, (double)bytes), seconds,
               seconds > 0 ? (double)bytes / seconds * 1e-9 : 0.0,
               model_files > 0 ? ", with the model beside it" : "");
        fflush(stdout);
    } else if (nd_fs_exists(folder, &there) == ND_OK && !there) {
        printf("%s: deleted meanwhile\n", folder);
        status = ND_OK;
    } else {
        printf("%s: %s: %s\n", folder,
               status != ND_ERR_DATA ? "not verified"
               : state_is_good       ? "its state is good, but the model beside it is bad"
                                     : "bad",
               error.message);
    }
    return status;
}

nd_status nd_ckpt_verify(const nd_command_flags *line)
{
    nd_fs_names found;
    nd_status status = ND_OK, worst = ND_OK;
    ND_TRY_OUT(find_checkpoints(line->word[0], &found));
    for (int i = 0; i < found.count; i++) {
        const nd_status one = verify(found.list[i]);
        worst = worst == ND_OK ? one : worst;
    }
    nd_error_clear(); /* all is said */
    status = worst;
out:
    nd_fs_names_fini(&found);
    return status;
}

enum { NAME_WIDTH_LEAST = 18, NAME_WIDTH_MOST = 64 };

/* "dp_shard 2, tp 2", or "1 rank"; returns `text`. */
static const char *format_mesh(char text[TEXT_MAX], const nd_mesh *mesh)
{
    size_t at = 0;
    text[0] = '\0';
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        if (mesh->size[a] > 1) {
            at += (size_t)snprintf(text + at, TEXT_MAX - at, "%s%s %d", at ? ", " : "",
                                   nd_axis_name((nd_axis)a), mesh->size[a]);
        }
    }
    return at ? text : strcpy(text, "1 rank");
}

/* Text from a file or a folder's name, without characters that move the cursor. */
static const char *printable(char text[TEXT_MAX], const char *raw)
{
    nd_escape(text, TEXT_MAX, raw, "");
    return text;
}

static const char *age_text(char text[TEXT_MAX], int64_t seconds)
{
    static const struct {
        int64_t seconds;
        const char *unit;
    } units[] = {{86400, "d"}, {3600, "h"}, {60, "min"}};
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (seconds >= 2 * units[i].seconds) {
            snprintf(text, TEXT_MAX, "%lld %s", (long long)(seconds / units[i].seconds),
                     units[i].unit);
            return text;
        }
    }
    snprintf(text, TEXT_MAX, "%lld s", (long long)(seconds > 0 ? seconds : 0));
    return text;
}

/* The columns of a line, or their heads. */
static void print_columns(int width, const char *const columns[9])
{
    printf("%8s  %-*s %-16s %8s  %-20s %7s  %-24s %-9s %15s", columns[0], width, columns[1],
           columns[2], columns[3], columns[4], columns[5], columns[6], columns[7], columns[8]);
}

static void print_line(const nd_saved *s, int width)
{
    char name[TEXT_MAX], saved[ND_CLOCK_UTC_MAX], age[TEXT_MAX];
    char bytes[TEXT_MAX], mesh[TEXT_MAX], reason[TEXT_MAX];
    char step[24], tokens[24];
    snprintf(step, sizeof step, "%lld", (long long)s->step);
    snprintf(tokens, sizeof tokens, "%lld", (long long)s->position.tokens_seen);
    const char *const columns[] = {s->step >= 0 ? step : "-",
                                   printable(name, s->name),
                                   s->state,
                                   nd_file_bytes_format(bytes, sizeof bytes, (double)s->bytes),
                                   nd_clock_utc(s->time, saved),
                                   age_text(age, time(NULL) - s->time),
                                   s->has_manifest ? format_mesh(mesh, &s->mesh) : "-",
                                   s->has_manifest ? printable(reason, s->reason) : "-",
                                   s->has_manifest ? tokens : "-"};
    print_columns(width, columns);
    printf("%s\n", s->has_model ? "  with model" : "");
    if (s->why[0]) {
        printf("          %s\n", s->why);
    }
}

/* One object a line. Members that need a manifest are null without one. */
static nd_status print_json(const char *run, const nd_saved *s)
{
    char saved[ND_CLOCK_UTC_MAX];
    const bool known = s->has_manifest;
    json_t *o = json_object(), *mesh = known ? json_object() : json_null();
    for (int a = 0; a < ND_AXIS_COUNT && known; a++) {
        nd_json_set(&mesh, nd_axis_name((nd_axis)a), json_integer(s->mesh.size[a]));
    }
    nd_json_set(&o, "run", nd_json_string(run));
    nd_json_set(&o, "folder", nd_json_string(s->name));
    nd_json_set(&o, "step", s->step >= 0 ? json_integer(s->step) : json_null());
    nd_json_set(&o, "state", json_string(s->state));
    nd_json_set(&o, "why", s->why[0] ? nd_json_string(s->why) : json_null());
    nd_json_set(&o, "bytes", json_integer((json_int_t)s->bytes));
    nd_json_set(&o, "time", json_string(nd_clock_utc(s->time, saved)));
    nd_json_set(&o, "age_seconds", json_integer(time(NULL) - s->time));
    nd_json_set(&o, "mesh", mesh);
    nd_json_set(&o, "reason", known ? nd_json_string(s->reason) : json_null());
    nd_json_set(&o, "tokens_seen", known ? json_integer(s->position.tokens_seen) : json_null());
    nd_json_set(&o, "samples_seen", known ? json_integer(s->samples_seen) : json_null());
    nd_json_set(&o, "has_model", json_boolean(s->has_model));
    return nd_print_row(o);
}

static nd_status print_run(const char *run, const nd_saved *list, int count, bool json)
{
    static const char *const heads[] = {"step", "folder", "state",  "size",       "saved",
                                        "age",  "mesh",   "reason", "labels seen"};
    char name[TEXT_MAX];
    int width = NAME_WIDTH_LEAST;
    for (int i = 0; i < count && json; i++) {
        ND_TRY(print_json(run, &list[i]));
    }
    if (json) {
        return ND_OK;
    }
    for (int i = 0; i < count; i++) {
        const int length = (int)strlen(printable(name, list[i].name));
        width = length > width ? length : width;
    }
    width = width < NAME_WIDTH_MOST ? width : NAME_WIDTH_MOST;
    printf("%s:%s\n", run, count == 0 ? " no checkpoints" : "");
    if (count > 0) {
        print_columns(width, heads);
        putchar('\n');
    }
    for (int i = 0; i < count; i++) {
        print_line(&list[i], width);
    }
    return ND_OK;
}

/* *found grows by the number of entries; with `only_full` a run without any is left out. */
static nd_status list_run(const char *run, bool json, bool only_full, int *found)
{
    nd_saved *list = NULL;
    int count = 0;
    ND_TRY(nd_saved_list(run, &list, &count));
    nd_status status = count > 0 || !only_full ? print_run(run, list, count, json) : ND_OK;
    *found += count;
    free(list);
    return status;
}

static nd_status list_folder(const char *argument, bool json)
{
    char *folder = NULL, *parent = NULL;
    bool is_checkpoint = false;
    int found = 0;
    nd_saved one;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_ckpt_folder(argument, &folder));
    ND_TRY_OUT(nd_checkpoint_is_ours(folder, &is_checkpoint));
    if (!is_checkpoint) {
        status = list_run(folder, json, false, &found);
        goto out;
    }
    ND_TRY_OUT(nd_saved_examine(folder, &one));
    ND_TRY_OUT(nd_fs_parent(folder, &parent));
    status = print_run(parent, &one, 1, json);
out:
    free(parent);
    free(folder);
    return status;
}

/* Without an argument `ls` lists this folder, and every run in runs/, where runs without output.dir
 * lie. */
static nd_status list_here(bool json)
{
    nd_fs_names names;
    int found = 0;
    ND_TRY(nd_fs_list("runs", &names));
    nd_status status = list_run(".", json, true, &found);
    for (int i = 0; i < names.count && status == ND_OK; i++) {
        char *run = NULL;
        if (names.list[i][0] != '.') {
            status = nd_fs_format(&run, "runs/%s", names.list[i]);
            status = status == ND_OK ? list_run(run, json, true, &found) : status;
            status = status == ND_ERR_DATA ? ND_OK : status; /* no folder */
        }
        free(run);
    }
    nd_fs_names_fini(&names);
    if (status == ND_OK && found == 0) {
        return nd_fail(ND_ERR_DATA, "there are no checkpoints in this folder and in the runs in "
                                    "runs/; give a run folder");
    }
    return status;
}

nd_status nd_ckpt_ls(const nd_command_flags *line)
{
    const char *folder = line->word[0];
    const bool json = line->values[ND_CKPT_LS_JSON].given;
    return folder ? list_folder(folder, json) : list_here(json);
}

typedef struct pruning {
    char *run; /* owned */
    bool dry_run;
    int deleted; /* checkpoints, with their bytes */
    uint64_t bytes;
} pruning;

/* Deletes a checkpoint, or (folder NULL) the model of that name, and says so. */
static nd_status delete_one(pruning *p, const nd_folder *folder, const char *name)
{
    char *path = NULL, text[TEXT_MAX];
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
    char text[TEXT_MAX];
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

nd_status nd_ckpt_prune(const nd_command_flags *line)
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
    if (!last->given && (every->given || !set_aside)) {
        return nd_fail(ND_ERR_CONFIG,
                       "--keep-last K is missing; K is the number of newest checkpoints to keep");
    }
    ND_TRY_OUT(nd_ckpt_folder(line->word[0], &p.run));
    ND_TRY_OUT(list_checkpoints(p.run, &list, &count));
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

enum { FIRST_NAME = 256 };

/* A folder with a config.json that is no checkpoint and holds none is a Hugging Face folder. */
static nd_status open_side(const char *argument, char **folder, nd_manifest *manifest,
                           nd_diff_side *out)
{
    char *config = NULL;
    nd_folder *list = NULL;
    int count = 0;
    bool ours = false, model = false;
    nd_status status = ND_OK;
    ND_TRY(nd_ckpt_folder(argument, folder));
    ND_TRY_OUT(nd_fs_format(&config, "%s/config.json", *folder));
    ND_TRY_OUT(nd_folder_list(*folder, ND_FOLDER_WHOLE, &list, &count));
    ND_TRY_OUT(nd_checkpoint_is_ours(*folder, &ours));
    ND_TRY_OUT(nd_fs_exists(config, &model));
    if (ours || count > 0 || !model) {
        free(*folder);
        *folder = NULL;
        ND_TRY_OUT(open_checkpoint(argument, folder, manifest));
        *out = (nd_diff_side){.manifest = manifest, .shape = manifest->shape};
    } else {
        ND_TRY_OUT(nd_shape_read(config, &out->shape));
    }
    out->folder = *folder;
out:
    free(list);
    free(config);
    return status;
}

/* context: the name of the first array that differs, so far; NULL: it is not asked for. */
static nd_status print_array(void *context, const nd_diff_array *array)
{
    char *first = context;
    if (first && !*first && (array->differing > 0 || array->presence != ND_DIFF_BOTH)) {
        snprintf(first, FIRST_NAME, "%s", array->name);
    }
    if (array->presence == ND_DIFF_ONLY_A || array->presence == ND_DIFF_ONLY_B) {
        printf("%s: only in %s\n", array->name, array->presence == ND_DIFF_ONLY_A ? "A" : "B");
    } else if (array->presence == ND_DIFF_SIZES) {
        printf("%s: has another number of elements\n", array->name);
    } else if (array->differing > 0) {
        printf("%s: %lld of %lld elements differ, at most by %g (relative L2 norm %.2g)\n",
               array->name, (long long)array->differing, (long long)array->count, array->largest,
               array->relative);
    }
    return ND_OK;
}

/* Prints the numbers of the position that differ, and returns how many do. */
static int print_position(const nd_manifest *a, const nd_manifest *b)
{
    const struct {
        const char *name;
        int64_t a, b;
    } numbers[] = {
        {"step", a->position.step, b->position.step},
        {"steps skipped", a->position.skipped, b->position.skipped},
        {"labels seen", a->position.tokens_seen, b->position.tokens_seen},
        {"samples seen", a->samples_seen, b->samples_seen},
    };
    int differing = 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (numbers[i].a != numbers[i].b) {
            printf("%s: %lld in A, %lld in B\n", numbers[i].name, (long long)numbers[i].a,
                   (long long)numbers[i].b);
            differing++;
        }
    }
    return differing;
}

static nd_status diff(const char *const folders[2], const nd_diff_options *options,
                      const char *same)
{
    nd_diff_totals totals;
    nd_diff_side sides[2] = {0};
    char *paths[2] = {NULL};
    nd_manifest manifests[2] = {0};
    nd_status status = ND_OK;
    int positions = 0;
    for (int i = 0; i < 2; i++) {
        ND_TRY_OUT(open_side(folders[i], &paths[i], &manifests[i], &sides[i]));
    }
    for (int i = 0; i < 2; i++) {
        const nd_manifest *m = sides[i].manifest;
        char mesh[TEXT_MAX];
        printf("%c: %s (", "AB"[i], paths[i]);
        if (m) {
            printf("step %lld, %s)\n", (long long)m->position.step, format_mesh(mesh, &m->mesh));
        } else {
            printf("a Hugging Face model: weights only)\n");
        }
    }
    ND_TRY_OUT(nd_checkpoint_diff(sides, options, print_array, NULL, &totals));
    if (sides[0].manifest && sides[1].manifest) {
        positions = print_position(sides[0].manifest, sides[1].manifest);
    }
    if (totals.differing_arrays == 0) {
        printf("%s: all %lld elements of %lld arrays %s%s\n", positions ? "different" : "equal",
               (long long)totals.elements, (long long)totals.arrays, same,
               positions ? ", but the position differs" : "");
    } else {
        printf("different: %lld of %lld arrays, %lld of %lld elements\n",
               (long long)totals.differing_arrays, (long long)totals.arrays,
               (long long)totals.differing, (long long)totals.elements);
    }
    nd_error_clear(); /* all is said */
    status = totals.differing_arrays > 0 || positions > 0 ? ND_ANSWER_NO : ND_OK;
out:
    for (int i = 0; i < 2; i++) {
        nd_manifest_fini(&manifests[i]);
        free(paths[i]);
    }
    return status;
}

/* Two steps that were dumped. */
static nd_status diff_dumps(const char *const folders[2], const nd_diff_options *options,
                            const char *same)
{
    const nd_diff_side sides[2] = {{.folder = folders[0], .is_dump = true},
                                   {.folder = folders[1], .is_dump = true}};
    nd_diff_totals totals;
    char first[FIRST_NAME] = "";
    printf("A: %s (a dump)\nB: %s (a dump)\n", folders[0], folders[1]);
    ND_TRY(nd_checkpoint_diff(sides, options, print_array, first, &totals));
    if (*first) {
        printf("different: %lld of %lld tensors; the first one in the order of the computation is "
               "%s\n",
               (long long)totals.differing_arrays, (long long)totals.arrays, first);
        nd_error_clear(); /* all is said */
        return ND_ANSWER_NO;
    }
    printf("equal: %lld elements of %lld tensors %s\n", (long long)totals.elements,
           (long long)totals.arrays, same);
    return ND_OK;
}

nd_status nd_ckpt_diff(const nd_command_flags *line)
{
    const char *dtype = line->values[ND_CKPT_DIFF_DTYPE].text;
    const nd_diff_options options = {.verify = !line->values[ND_CKPT_DIFF_NO_VERIFY].given,
                                     .bf16 = dtype && strcmp(dtype, "bf16") == 0,
                                     .tolerance = line->values[ND_CKPT_DIFF_TOLERANCE].real};
    const char *const *folders = line->word;
    const char *same = options.tolerance > 0 ? "are within the tolerance" : "have the same bits";
    bool dumps[2];
    for (int i = 0; i < 2; i++) {
        ND_TRY(nd_dump_is(folders[i], &dumps[i]));
    }
    if (dumps[0] != dumps[1]) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" is a dump of tensors, and \"%s\" is none; give the folder of a step "
                       "of two dumps, such as RUN/dumps/step-1",
                       folders[!dumps[0]], folders[dumps[0]]);
    }
    return dumps[0] ? diff_dumps(folders, &options, same) : diff(folders, &options, same);
}

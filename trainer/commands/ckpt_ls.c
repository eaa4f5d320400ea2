// SPDX-License-Identifier: Apache-2.0
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/printable.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/commands/ckpt.h"

/* Text from a file or a folder's name, without characters that move the cursor. */
static const char *printable(char text[ND_CKPT_TEXT_MAX], const char *raw)
{
    nd_escape(text, ND_CKPT_TEXT_MAX, raw, "");
    return text;
}

static const char *age_text(char text[ND_CKPT_TEXT_MAX], int64_t seconds)
{
    static const struct {
        int64_t seconds;
        const char *unit;
    } units[] = {{86400, "d"}, {3600, "h"}, {60, "min"}};
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (seconds >= 2 * units[i].seconds) {
            snprintf(text, ND_CKPT_TEXT_MAX, "%lld %s", (long long)(seconds / units[i].seconds),
                     units[i].unit);
            return text;
        }
    }
    snprintf(text, ND_CKPT_TEXT_MAX, "%lld s", (long long)(seconds > 0 ? seconds : 0));
    return text;
}

enum { NAME_WIDTH_LEAST = 18, NAME_WIDTH_MOST = 64 };

/* Of the column with the folders' names. */
static int name_width(const nd_saved *list, int count)
{
    int width = NAME_WIDTH_LEAST;
    for (int i = 0; i < count; i++) {
        char name[ND_CKPT_TEXT_MAX];
        int length = (int)strlen(printable(name, list[i].name));
        width = length > width ? length : width;
    }
    return width < NAME_WIDTH_MOST ? width : NAME_WIDTH_MOST;
}

static void print_line(const nd_saved *s, int width)
{
    char name[ND_CKPT_TEXT_MAX], saved[ND_CLOCK_UTC_MAX], age[ND_CKPT_TEXT_MAX];
    char bytes[ND_CKPT_TEXT_MAX], mesh[ND_CKPT_TEXT_MAX], reason[ND_CKPT_TEXT_MAX];
    char step[24] = "-", tokens[24] = "-";
    if (s->step >= 0) {
        snprintf(step, sizeof step, "%lld", (long long)s->step);
    }
    if (s->has_manifest) {
        snprintf(tokens, sizeof tokens, "%lld", (long long)s->position.tokens_seen);
    }
    printf("%8s  %-*s %-16s %8s  %-20s %7s  %-24s %-9s %15s%s\n", step, width,
           printable(name, s->name), nd_saved_state_name(s->state),
           nd_file_bytes_format(bytes, sizeof bytes, (double)s->bytes),
           nd_clock_utc(s->time, saved), age_text(age, time(NULL) - s->time),
           s->has_manifest ? nd_ckpt_mesh(mesh, &s->mesh) : "-",
           s->has_manifest ? printable(reason, s->reason) : "-", tokens,
           s->has_model ? "  with model" : "");
    if (s->why[0]) {
        printf("          %s\n", s->why);
    }
}

static void print_head(int width)
{
    printf("%8s  %-*s %-16s %8s  %-20s %7s  %-24s %-9s %15s\n", "step", width, "folder", "state",
           "size", "saved", "age", "mesh", "reason", "labels seen");
}

static json_t *mesh_json(const nd_mesh *mesh)
{
    json_t *object = json_object();
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        nd_json_set(&object, nd_axis_name((nd_axis)a), json_integer(mesh->size[a]));
    }
    return object;
}

/* One object a line. Members that need a manifest are null without one. */
static nd_status print_json(const char *run, const nd_saved *s)
{
    char saved[ND_CLOCK_UTC_MAX];
    bool known = s->has_manifest;
    json_t *o = json_object();
    nd_json_set(&o, "run", nd_json_string(run));
    nd_json_set(&o, "folder", nd_json_string(s->name));
    nd_json_set(&o, "step", s->step >= 0 ? json_integer(s->step) : json_null());
    nd_json_set(&o, "state", json_string(nd_saved_state_name(s->state)));
    nd_json_set(&o, "why", s->why[0] ? nd_json_string(s->why) : json_null());
    nd_json_set(&o, "bytes", json_integer((json_int_t)s->bytes));
    nd_json_set(&o, "time", json_string(nd_clock_utc(s->time, saved)));
    nd_json_set(&o, "age_seconds", json_integer(time(NULL) - s->time));
    nd_json_set(&o, "mesh", known ? mesh_json(&s->mesh) : json_null());
    nd_json_set(&o, "reason", known ? nd_json_string(s->reason) : json_null());
    nd_json_set(&o, "tokens_seen", known ? json_integer(s->position.tokens_seen) : json_null());
    nd_json_set(&o, "samples_seen", known ? json_integer(s->samples_seen) : json_null());
    nd_json_set(&o, "has_model", json_boolean(s->has_model));
    return nd_print_row(o);
}

static nd_status print_run(const char *run, const nd_saved *list, int count, bool json)
{
    int width = name_width(list, count);
    if (!json) {
        printf("%s:%s\n", run, count == 0 ? " no checkpoints" : "");
        if (count > 0) {
            print_head(width);
        }
    }
    for (int i = 0; i < count; i++) {
        if (json) {
            ND_TRY(print_json(run, &list[i]));
        } else {
            print_line(&list[i], width);
        }
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
    char *folder = NULL;
    bool is_checkpoint = false;
    int found = 0;
    ND_TRY(nd_ckpt_folder(argument, &folder));
    nd_status status = nd_checkpoint_is_ours(folder, &is_checkpoint);
    if (status == ND_OK && is_checkpoint) {
        nd_saved one;
        char *parent = NULL;
        status = nd_saved_examine(folder, &one);
        status = status == ND_OK ? nd_fs_parent(folder, &parent) : status;
        status = status == ND_OK ? print_run(parent, &one, 1, json) : status;
        free(parent);
    } else if (status == ND_OK) {
        status = list_run(folder, json, false, &found);
    }
    free(folder);
    return status;
}

/* What `ls` without an argument lists: this folder, and every run in runs/, where runs without
 * output.dir lie. */
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

nd_status nd_ckpt_ls(const nd_command_flags *line, int *code)
{
    const char *folder = nd_ckpt_place(line, 0);
    const bool json = line->values[ND_CKPT_LS_JSON].given;
    (void)code;
    return folder ? list_folder(folder, json) : list_here(json);
}

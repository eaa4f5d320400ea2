// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"

enum { WARM_UP_STEPS = 2, END_STEPS_MAX = 50 };
static const size_t json_max_bytes = 64 << 20;

/* Files. */

/* DIR/NAME.json, or the one with the largest number of NAME-2.json, NAME-3.json, ... NULL: none. */
static nd_status newest_file(const char *dir, const char *name, char **out)
{
    char *path = NULL;
    *out = NULL;
    for (int n = 1; n < 1000000; n++) {
        ND_TRY(n == 1 ? nd_fs_format(&path, "%s/%s.json", dir, name)
                      : nd_fs_format(&path, "%s/%s-%d.json", dir, name, n));
        bool there = false;
        nd_status status = nd_fs_exists(path, &there);
        if (status != ND_OK || !there) {
            free(path);
            ND_TRY(status);
            break;
        }
        free(*out);
        *out = path;
    }
    return ND_OK;
}

/* *out stays NULL where no such file is. */
static nd_status read_newest(const char *dir, const char *name, json_t **out)
{
    char *path = NULL, *text = NULL;
    size_t size = 0;
    json_error_t error;
    nd_status status = newest_file(dir, name, &path);
    if (status != ND_OK || !path) {
        free(path);
        return status;
    }
    status = nd_fs_read(path, json_max_bytes, ND_ERR_DATA, &text, &size);
    if (status == ND_OK) {
        *out = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
        if (!*out && nd_json_no_memory(&error)) {
            status = nd_fail_memory("%s", path);
        } else if (!json_is_object(*out)) {
            status = nd_fail(ND_ERR_DATA,
                             "%s is no JSON object; the file is damaged: remove it, and the report "
                             "leaves out what it holds",
                             path);
        }
    }
    free(text);
    free(path);
    return status;
}

static nd_status read_metrics(nd_run_view *v)
{
    char *path = NULL;
    struct stat st = {0};
    nd_fs_kind kind = ND_FS_FILE;
    ND_TRY(nd_fs_format(&path, "%s/metrics.jsonl", v->folder));
    nd_status status = nd_fs_look(path, &kind, &st);
    if (status == ND_OK && kind == ND_FS_ABSENT) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" has no metrics.jsonl, so it holds no run; give the folder of a "
                         "run, as ndlaunch prints it",
                         v->folder);
    }
    v->changed = (int64_t)st.st_mtime;
    status = status == ND_OK ? nd_metrics_read(path, &v->metrics) : status;
    if (status == ND_OK && v->metrics.steps.rows == 0) {
        status = nd_fail(ND_ERR_DATA,
                         "%s has no step yet; wait for the first step of the run, or give another "
                         "run",
                         path);
    }
    free(path);
    return status;
}

/* The path without slashes at its end; "." and ".." get their full name. */
static nd_status take_folder(nd_run_view *v, const char *folder)
{
    bool there = false;
    size_t length = strlen(folder);
    while (length > 1 && folder[length - 1] == '/') {
        length--;
    }
    ND_TRY(nd_fs_format(&v->folder, "%.*s", (int)length, folder));
    ND_TRY(nd_fs_is_folder(v->folder, &there));
    if (!there) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is no folder; give the folder of a run", v->folder);
    }
    const char *slash = strrchr(v->folder, '/');
    v->name = slash ? slash + 1 : v->folder;
    if (strcmp(v->name, ".") == 0 || strcmp(v->name, "..") == 0) {
        char *full = realpath(v->folder, NULL);
        if (full) {
            free(v->folder);
            v->folder = full;
            v->name = strrchr(full, '/') + 1;
        }
    }
    return ND_OK;
}

/* Figures. */

static double number_in(const json_t *object, const char *part, const char *key)
{
    const json_t *value = json_object_get(json_object_get(object, part), key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static void swap(double *a, double *b)
{
    double t = *a;
    *a = *b;
    *b = t;
}

/* Hoare's selection: afterwards values[k] is what a sort would put there, none before it is larger
 * and none behind it smaller. */
static double select_at(double *values, size_t count, size_t k)
{
    size_t low = 0, high = count - 1;
    while (low < high) {
        double pivot = values[low + (high - low) / 2];
        size_t i = low, j = high;
        for (;;) {
            while (values[i] < pivot) {
                i++;
            }
            while (values[j] > pivot) {
                j--;
            }
            if (i >= j) {
                break;
            }
            swap(&values[i++], &values[j--]);
        }
        /* Now [low, j] <= pivot <= [j + 1, high]. */
        if (k <= j) {
            high = j;
        } else {
            low = j + 1;
        }
    }
    return values[k];
}

double nd_median(double *values, size_t count)
{
    if (count == 0) {
        return NAN;
    }
    double upper = select_at(values, count, count / 2);
    if (count % 2 == 1) {
        return upper;
    }
    double lower = values[0]; /* the largest of the lower half */
    for (size_t i = 1; i < count / 2; i++) {
        lower = values[i] > lower ? values[i] : lower;
    }
    return (lower + upper) / 2;
}

static nd_column_facts facts_of_steps(const nd_metrics *m, const char *name)
{
    return nd_column_sum_up(nd_metrics_column(m, &m->steps, name), 0, m->steps.rows);
}

/* Median over the steps behind the warm-up; `room` has a place for each row. */
static double median_of(const nd_metrics *m, const char *name, double *room)
{
    const double *column = nd_metrics_column(m, &m->steps, name);
    size_t count = 0;
    for (size_t i = m->steps.rows > WARM_UP_STEPS ? WARM_UP_STEPS : 0; i < m->steps.rows; i++) {
        if (isfinite(column[i])) {
            room[count++] = column[i];
        }
    }
    return nd_median(room, count);
}

static void sum_steps(const nd_metrics *m, nd_run_figures *f)
{
    const size_t rows = m->steps.rows;
    size_t tail = rows / 10;
    tail = tail < 1 ? 1 : tail > END_STEPS_MAX ? END_STEPS_MAX : tail;
    const double *step = nd_metrics_column(m, &m->steps, "step");
    const nd_column_facts loss = facts_of_steps(m, "loss"), ms = facts_of_steps(m, "step_ms");
    const nd_column_facts end =
        nd_column_sum_up(nd_metrics_column(m, &m->steps, "loss"), rows - tail, rows);
    f->first_loss = loss.first;
    f->last_loss = loss.last;
    f->not_finite = (int64_t)rows - loss.count;
    f->end_from = (int64_t)step[rows - tail];
    f->end_loss = end.count > 0 ? end.sum / (double)end.count : NAN;
    f->training_seconds = ms.sum / 1e3;
    f->data_wait_share = ms.sum > 0 ? facts_of_steps(m, "data_wait_ms").sum / ms.sum : NAN;
    f->skipped = (int64_t)facts_of_steps(m, "skipped").sum;
    f->peak_bytes = facts_of_steps(m, "peak_memory_bytes").largest;
    f->tokens_seen = facts_of_steps(m, "tokens_seen").last;
}

/* The best is one of those with documents as the last one has them: others do not compare. */
static void sum_validations(const nd_metrics *m, nd_run_figures *f)
{
    const nd_metric_table *t = &m->validations;
    const double *loss = nd_metrics_column(m, t, "validation_loss");
    const double *length = nd_metrics_column(m, t, "separate_length"); /* NaN: joined */
    size_t from = t->rows;
    while (from > 0 && fmax(length[from - 1], 0) == fmax(length[t->rows - 1], 0)) {
        from--;
    }
    const nd_column_facts facts = nd_column_sum_up(loss, from, t->rows);
    f->last_validation = t->rows > 0 ? loss[t->rows - 1] : NAN;
    f->best_validation = facts.least;
    if (facts.count > 0) {
        f->best_validation_step = (int64_t)nd_metrics_column(m, t, "step")[facts.least_at];
    }
}

static void sum_events(const nd_metrics *m, nd_run_figures *f)
{
    const json_t *event;
    size_t i;
    json_array_foreach(m->events, i, event)
    {
        const bool resumed = nd_event_is(event, "resumed");
        const bool rewound = nd_json_number(event, "rewound_from") > 0;
        f->rewinds += resumed && rewound;
        f->restarts += resumed && !rewound;
        f->failed_saves += nd_event_is(event, "checkpoint_failed");
        if (nd_event_is(event, "records_lost")) {
            const bool lines = strcmp(nd_json_words(event, "sink"), "metrics.jsonl") == 0;
            *(lines ? &f->lost_lines : &f->lost_tracked) += nd_json_whole(event, "records");
        }
    }
}

static nd_status make_figures(nd_run_view *v)
{
    nd_run_figures *f = &v->figures;
    double *room = NULL;
    ND_TRY(ND_ALLOC(v->metrics.steps.rows, &room));
    sum_steps(&v->metrics, f);
    sum_validations(&v->metrics, f);
    sum_events(&v->metrics, f);
    f->step_ms = median_of(&v->metrics, "step_ms", room);
    f->tokens_per_second = median_of(&v->metrics, "tokens_per_second", room);
    f->tflops = median_of(&v->metrics, "tflops_per_worker_causal", room);
    f->wire_bytes = median_of(&v->metrics, "wire_bytes", room);
    f->planned_bytes = number_in(v->record, "model", "planned_bytes");
    f->parameters = number_in(v->record, "model", "parameters");
    free(room);
    return ND_OK;
}

static nd_status open_view(const char *folder, int64_t now, nd_run_view *v)
{
    ND_TRY(take_folder(v, folder));
    ND_TRY(read_metrics(v));
    ND_TRY(read_newest(v->folder, "run", &v->record));
    ND_TRY(read_newest(v->folder, "trace", &v->trace));
    ND_TRY(newest_file(v->folder, "profile", &v->profile));
    ND_TRY(nd_saved_list(v->folder, &v->saved, &v->saved_count));
    double steps = number_in(v->record, "config", "train.steps");
    v->steps_wanted = steps > 0 && steps < 1e15 ? (int64_t)steps : 0;
    ND_TRY(make_figures(v));
    nd_run_view_find_end(v, now);
    return ND_OK;
}

nd_status nd_run_view_open(const char *folder, int64_t now, nd_run_view *out)
{
    nd_run_view view = {0};
    nd_status status = open_view(folder, now, &view);
    if (status != ND_OK) {
        nd_run_view_close(&view);
        return status;
    }
    *out = view;
    return ND_OK;
}

void nd_run_view_close(nd_run_view *view)
{
    nd_metrics_fini(&view->metrics);
    json_decref(view->record);
    json_decref(view->trace);
    free(view->profile);
    free(view->saved);
    free(view->folder);
    *view = (nd_run_view){0};
}

/* Ranks of a group that is a part of an axis; 1: run.json does not say it. */
static int part_of_axis(const nd_run_view *view, const char *key, int axis_size)
{
    const double size = number_in(view->record, "mesh", key);
    return size >= 1 && size <= axis_size && axis_size % (int)size == 0 ? (int)size : 1;
}

bool nd_run_view_mesh(const nd_run_view *view, nd_mesh *out)
{
    const int64_t most = 1 << 24; /* ranks */
    int64_t ranks = 1;
    for (int axis = 0; axis < ND_AXIS_COUNT; axis++) {
        double size = number_in(view->record, "mesh", nd_axis_name((nd_axis)axis));
        if (!(size >= 1 && size <= (double)most)) {
            return false;
        }
        out->size[axis] = (int)size;
        ranks *= out->size[axis];
        if (ranks > most) {
            return false;
        }
    }
    out->ulysses = part_of_axis(view, "ulysses", out->size[ND_AXIS_CP]);
    out->kv_copies = part_of_axis(view, "kv_copies", out->size[ND_AXIS_TP]);
    return true;
}

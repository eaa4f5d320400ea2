// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/run_view.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/config/config.h"
#include "trainer/view/curve.h"

enum { WARM_UP_STEPS = 2, END_STEPS_MAX = 50, RECENT_SECONDS = 60, RECENT_STEPS = 10 };
static const size_t json_max_bytes = 64 << 20;

/* Files. */

/* DIR/NAME.json, or the one with the largest number of NAME-2.json, NAME-3.json, ... *count: how
 * many there are. */
static nd_status newest_file(const char *dir, const char *name, char **out, int *count)
{
    char *path = NULL;
    *out = NULL;
    *count = 0;
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
        *count = n;
    }
    return ND_OK;
}

/* *out stays NULL where no such file is. */
static nd_status read_newest(const char *dir, const char *name, json_t **out, int *count)
{
    char *path = NULL, *text = NULL;
    size_t size = 0;
    json_error_t error;
    nd_status status = newest_file(dir, name, &path, count);
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
    status = status == ND_OK ? nd_metrics_read(path, 0, &v->metrics) : status;
    if (status == ND_OK && v->metrics.row_count == 0) {
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

/* Median over the steps behind the warm-up; `room` has a place for each row. */
static double median_of(const nd_metrics *m, nd_metric metric, float *room)
{
    size_t from = m->row_count > WARM_UP_STEPS ? WARM_UP_STEPS : 0, count = 0;
    for (size_t i = from; i < m->row_count; i++) {
        float value = m->rows[i].value[metric];
        if (isfinite(value)) {
            room[count++] = value;
        }
    }
    return nd_median(room, count);
}

static void sum_rows(const nd_metrics *m, nd_run_figures *f)
{
    double all = 0, waited = 0, end_sum = 0;
    size_t tail = m->row_count / 10, end_count = 0;
    tail = tail < 1 ? 1 : tail > END_STEPS_MAX ? END_STEPS_MAX : tail;
    f->first_loss = f->last_loss = f->peak_bytes = NAN;
    for (size_t i = 0; i < m->row_count; i++) {
        const nd_metric_row *row = &m->rows[i];
        double loss = (double)row->value[ND_METRIC_LOSS];
        double ms = (double)row->value[ND_METRIC_STEP_MS];
        double wait = (double)row->value[ND_METRIC_DATA_WAIT_MS];
        double peak = (double)row->value[ND_METRIC_PEAK_MEMORY];
        all += isfinite(ms) ? ms : 0;
        waited += isfinite(wait) ? wait : 0;
        f->peak_bytes = isnan(f->peak_bytes) || peak > f->peak_bytes ? peak : f->peak_bytes;
        f->skipped += row->skipped;
        f->not_finite += !isfinite(loss);
        if (isfinite(loss)) {
            f->first_loss = isnan(f->first_loss) ? loss : f->first_loss;
            f->last_loss = loss;
            end_sum += i + tail >= m->row_count ? loss : 0;
            end_count += i + tail >= m->row_count;
        }
    }
    f->end_from = m->rows[m->row_count - tail].step;
    f->end_loss = end_count > 0 ? end_sum / (double)end_count : NAN;
    f->training_seconds = all / 1e3;
    f->data_wait_share = all > 0 ? waited / all : NAN;
    f->tokens_seen = m->rows[m->row_count - 1].tokens_seen;
}

static void sum_validations(const nd_metrics *m, nd_run_figures *f)
{
    f->last_validation = f->best_validation = NAN;
    for (size_t i = 0; i < m->validation_count; i++) {
        double loss = m->validations[i].loss;
        f->last_validation = loss;
        if (isfinite(loss) && !(f->best_validation <= loss)) {
            f->best_validation = loss;
            f->best_validation_step = m->validations[i].step;
        }
    }
}

static void sum_events(const nd_metrics *m, nd_run_figures *f)
{
    for (size_t i = 0; i < m->event_count; i++) {
        const nd_metric_event *e = &m->events[i];
        bool resumed = e->kind == ND_METRIC_EVENT_RESUMED;
        f->rewinds += resumed && e->rewound_from > 0;
        f->restarts += resumed && e->rewound_from == 0;
        f->failed_saves += e->kind == ND_METRIC_EVENT_CHECKPOINT_FAILED;
        if (e->kind == ND_METRIC_EVENT_RECORDS_LOST) {
            *(strcmp(e->sink, "metrics.jsonl") == 0 ? &f->lost_lines : &f->lost_tracked) +=
                e->records;
        }
    }
}

static nd_status make_figures(nd_run_view *v)
{
    nd_run_figures *f = &v->figures;
    float *room = NULL;
    ND_TRY(ND_ALLOC(v->metrics.row_count, &room));
    sum_rows(&v->metrics, f);
    sum_validations(&v->metrics, f);
    sum_events(&v->metrics, f);
    f->step_ms = median_of(&v->metrics, ND_METRIC_STEP_MS, room);
    f->tokens_per_second = median_of(&v->metrics, ND_METRIC_TOKENS_PER_SECOND, room);
    f->tflops = median_of(&v->metrics, ND_METRIC_TFLOPS, room);
    f->wire_bytes = median_of(&v->metrics, ND_METRIC_WIRE, room);
    f->planned_bytes = number_in(v->record, "model", "planned_bytes");
    f->parameters = number_in(v->record, "model", "parameters");
    free(room);
    return ND_OK;
}

/* The end. */

static int64_t last_row_step(const nd_run_view *v)
{
    return v->metrics.rows[v->metrics.row_count - 1].step;
}

/* A checkpoint that a disk took behind the last line. One with a later step may also be left of
 * steps that a resumed run has taken back; such a run wrote a line since. */
static bool is_behind_lines(const nd_run_view *v, const nd_saved *s)
{
    return s->has_manifest && s->state == ND_SAVED_GOOD && s->time >= v->changed;
}

/* The lines of the last steps, and the line that says so, may be lost on a full disk. An event and
 * a checkpoint then show that the run came further. */
static int64_t steps_reached(const nd_run_view *v)
{
    int64_t step = last_row_step(v);
    for (size_t i = 0; i < v->metrics.event_count; i++) {
        const nd_metric_event *e = &v->metrics.events[i];
        step = e->kind != ND_METRIC_EVENT_OTHER && e->step > step ? e->step : step;
    }
    for (int i = 0; i < v->saved_count; i++) {
        const nd_saved *s = &v->saved[i];
        step = is_behind_lines(v, s) && s->step > step ? s->step : step;
    }
    return step;
}

/* Whether the newest checkpoint was made because of a signal, behind the last step. The line of a
 * checkpoint may be lost too. */
static bool was_stopped(const nd_run_view *v)
{
    const nd_metrics *m = &v->metrics;
    for (int i = 0; i < v->saved_count; i++) {
        const nd_saved *s = &v->saved[i];
        if (is_behind_lines(v, s) && s->step > last_row_step(v) && s->step == v->reached &&
            strcmp(s->reason, "signal") == 0) {
            return true;
        }
    }
    for (size_t i = m->event_count; i > 0; i--) {
        const nd_metric_event *e = &m->events[i - 1];
        if (e->kind == ND_METRIC_EVENT_CHECKPOINT) {
            return strcmp(e->text, "signal") == 0 && e->step >= v->reached;
        }
    }
    return false;
}

/* The early stop behind the last step; NULL: there is none. */
static const nd_metric_event *early_stop(const nd_run_view *v)
{
    const nd_metrics *m = &v->metrics;
    for (size_t i = m->event_count; i > 0; i--) {
        const nd_metric_event *e = &m->events[i - 1];
        if (e->kind == ND_METRIC_EVENT_EARLY_STOPPED) {
            return e->step == v->reached ? e : NULL;
        }
    }
    return NULL;
}

/* Why the run ended, as its last line says. NULL: it does not, since a later start followed, or the
 * process was killed. */
static const nd_metric_event *said_end(const nd_run_view *v)
{
    const nd_metrics *m = &v->metrics;
    size_t count = m->event_count;
    while (count > 0 && m->events[count - 1].kind == ND_METRIC_EVENT_RECORDS_LOST) {
        count--;
    }
    const nd_metric_event *e = count > 0 ? &m->events[count - 1] : NULL;
    return e && e->kind == ND_METRIC_EVENT_ENDED && e->step >= last_row_step(v) ? e : NULL;
}

static nd_run_end find_end(const nd_run_view *v, int64_t now)
{
    double patience = v->figures.step_ms / 1e3 * RECENT_STEPS;
    patience = patience > RECENT_SECONDS ? patience : RECENT_SECONDS;
    const nd_metric_event *end = said_end(v);
    if (end && (end->code != ND_ERR_PREEMPTED || !was_stopped(v))) {
        return ND_RUN_FAILED;
    }
    if (v->steps_wanted > 0 && v->reached >= v->steps_wanted) {
        return ND_RUN_FINISHED;
    }
    if (early_stop(v)) {
        return ND_RUN_STOPPED_EARLY;
    }
    if (was_stopped(v)) {
        return ND_RUN_STOPPED;
    }
    if ((double)(now - v->changed) < patience) {
        return ND_RUN_RECENT;
    }
    return v->steps_wanted > 0 ? ND_RUN_ENDED_EARLY : ND_RUN_UNKNOWN;
}

static void add_lost(const nd_run_view *view, char text[ND_VERDICT_MAX])
{
    static const char why[] = "as the disk was full or failed";
    const long long lines = view->figures.lost_lines, last = last_row_step(view);
    const size_t used = strlen(text);
    if (lines > 0) {
        snprintf(text + used, ND_VERDICT_MAX - used, "; %lld line%s of metrics.jsonl %s lost, %s",
                 lines, lines == 1 ? "" : "s", lines == 1 ? "was" : "were", why);
    } else if (view->lost_lines) {
        snprintf(text + used, ND_VERDICT_MAX - used,
                 "; the lines of metrics.jsonl after step %lld were lost, %s", last, why);
    }
}

/* "342 of 1000"; "342" when nobody knows how many were wanted. */
static const char *reached(const nd_run_view *view, char text[64])
{
    const int n = snprintf(text, 64, "%lld", (long long)view->reached);
    if (view->steps_wanted > 0) {
        snprintf(text + n, 64 - (size_t)n, " of %lld", (long long)view->steps_wanted);
    }
    return text;
}

/* Of a run that did not make all its steps, and has no line that says so. */
static void say_why(const nd_run_view *view, char text[ND_VERDICT_MAX])
{
    static const char unknown[] = "this folder does not say why, the run's log does";
    const long long step = view->reached, wanted = view->steps_wanted;
    if (view->lost_lines) {
        snprintf(text, ND_VERDICT_MAX,
                 "no line after step %lld of %lld: the disk took no more, or the run ended early; "
                 "%s",
                 step, wanted, unknown);
    } else {
        snprintf(text, ND_VERDICT_MAX,
                 "ended early, after step %lld of %lld, or its disk took no more lines; %s", step,
                 wanted, unknown);
    }
}

/* The words of a signal name the step themselves. Rank 0 writes the line, and may do so because it
 * waited for a rank that failed before it. */
static void say_failure(const nd_run_view *view, const nd_metric_event *end,
                        char text[ND_VERDICT_MAX])
{
    char done[64];
    if (end->code == ND_ERR_PREEMPTED) {
        snprintf(text, ND_VERDICT_MAX, "%s", end->text);
    } else {
        const bool elsewhere = end->code == ND_ERR_IO || end->code == ND_ERR_HANG;
        snprintf(text, ND_VERDICT_MAX, "failed after step %s; rank 0 ended with code %d: %s%s",
                 reached(view, done), (int)end->code, end->text,
                 elsewhere ? "; where another rank failed first, the run's log has its reason"
                           : "");
    }
}

char *nd_run_verdict(const nd_run_view *view, char text[ND_VERDICT_MAX])
{
    const long long step = view->reached, wanted = view->steps_wanted;
    char done[64];
    switch (view->end) {
    case ND_RUN_FINISHED:
        snprintf(text, ND_VERDICT_MAX, "finished: all %lld steps", wanted);
        break;
    case ND_RUN_STOPPED_EARLY:
        snprintf(text, ND_VERDICT_MAX, "finished early, after step %s: %s", reached(view, done),
                 early_stop(view)->text);
        break;
    case ND_RUN_STOPPED:
        snprintf(text, ND_VERDICT_MAX,
                 "stopped by a signal after step %s; --resume-from-checkpoint latest goes "
                 "on with it",
                 reached(view, done));
        break;
    case ND_RUN_FAILED:
        say_failure(view, said_end(view), text);
        break;
    case ND_RUN_RECENT:
        snprintf(text, ND_VERDICT_MAX,
                 "at step %s a moment before this report: it runs, or has just ended",
                 reached(view, done));
        break;
    case ND_RUN_ENDED_EARLY:
        say_why(view, text);
        break;
    case ND_RUN_UNKNOWN:
        snprintf(text, ND_VERDICT_MAX,
                 "%lld steps; without run.json nobody knows how many were wanted", step);
        break;
    }
    add_lost(view, text);
    return text;
}

static nd_status open_view(const char *folder, int64_t now, nd_run_view *v)
{
    int traces = 0, profiles = 0;
    ND_TRY(take_folder(v, folder));
    ND_TRY(read_metrics(v));
    ND_TRY(read_newest(v->folder, "run", &v->record, &v->starts));
    ND_TRY(read_newest(v->folder, "trace", &v->trace, &traces));
    ND_TRY(newest_file(v->folder, "profile", &v->profile, &profiles));
    ND_TRY(nd_saved_list(v->folder, &v->saved, &v->saved_count));
    double steps = number_in(v->record, "config", "train.steps");
    v->steps_wanted = steps > 0 && steps < 1e15 ? (int64_t)steps : 0;
    ND_TRY(make_figures(v));
    v->reached = steps_reached(v);
    v->lost_lines = v->figures.lost_lines > 0 || v->reached > last_row_step(v);
    v->end = find_end(v, now);
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
    return true;
}

/* Settings. */

nd_status nd_run_view_text(const json_t *value, char **out)
{
    if (json_is_string(value)) {
        return nd_fs_format(out, "%s", json_string_value(value));
    }
    if (!value || json_is_null(value)) {
        return nd_fs_format(out, "%s", "");
    }
    if (json_is_real(value)) {
        return nd_fs_format(out, "%.10g", json_real_value(value));
    }
    *out = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(10));
    return *out ? ND_OK : nd_fail_memory("a setting");
}

/* Whether a setting of run.json is what the text of the default means. */
static bool is_default(const json_t *value, const char *was)
{
    json_error_t error;
    if (json_is_string(value)) {
        return strcmp(json_string_value(value), was) == 0;
    }
    json_t *other = json_loads(was, JSON_DECODE_ANY, &error);
    bool same = json_is_number(value) && json_is_number(other)
                    ? json_number_value(value) == json_number_value(other)
                    : json_equal(value, other);
    json_decref(other);
    return same;
}

typedef struct settings {
    const json_t *config;
    const nd_config *defaults;
    nd_status (*visit)(void *context, const char *key, const char *value, const char *was,
                       bool differs);
    void *context;
} settings;

static nd_status visit_setting(const settings *s, const char *key, const json_t *value,
                               bool differing)
{
    char *was = NULL, *text = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_config_get(s->defaults, key, &was));
    bool differs = !is_default(value, was);
    if (differs == differing) {
        ND_TRY_OUT(nd_run_view_text(value, &text));
        ND_TRY_OUT(s->visit(s->context, key, text, was, differs));
    }
out:
    free(text);
    free(was);
    return status;
}

nd_status nd_run_view_each_setting(const nd_run_view *view,
                                   nd_status (*visit)(void *context, const char *key,
                                                      const char *value, const char *was,
                                                      bool differs),
                                   void *context)
{
    nd_config defaults = {0};
    settings s = {json_object_get(view->record, "config"), &defaults, visit, context};
    nd_status status = nd_config_init(&defaults);
    for (int pass = 0; pass < 2 && status == ND_OK; pass++) {
        const char *key;
        json_t *value;
        json_object_foreach((json_t *)s.config, key, value)
        {
            status = status == ND_OK ? visit_setting(&s, key, value, pass == 0) : status;
        }
    }
    nd_config_fini(&defaults);
    return status;
}

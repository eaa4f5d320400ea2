// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/printable.h"

/* Finds how a run ended, from its last lines. */

enum { RECENT_SECONDS = 60, RECENT_STEPS = 10 };

/* True for an event of this kind. */
static bool is_event(const json_t *event, const char *kind)
{
    return strcmp(nd_json_words(event, "event"), kind) == 0;
}

/* The last event of this kind; NULL: there is none. */
static const json_t *last_event(const nd_run_view *v, const char *kind)
{
    const json_t *event = NULL;
    for (size_t i = json_array_size(v->metrics.events); i > 0 && !event; i--) {
        const json_t *one = json_array_get(v->metrics.events, i - 1);
        event = is_event(one, kind) ? one : NULL;
    }
    return event;
}

static int64_t last_step(const nd_run_view *v)
{
    const nd_column *ms = nd_metrics_column(&v->metrics, "step_ms");
    return (int64_t)ms->points[ms->count - 1].step;
}

/* The early stop behind the last step; NULL: there is none. */
static const json_t *early_stop(const nd_run_view *v)
{
    const json_t *event = last_event(v, "early_stopped");
    return event && nd_json_whole(event, "step") == v->reached ? event : NULL;
}

/* The end of the run, as its last line says. NULL: it says none, since a later start followed, or
 * the process was killed. */
static const json_t *said_end(const nd_run_view *v)
{
    size_t count = json_array_size(v->metrics.events);
    while (count > 0 && is_event(json_array_get(v->metrics.events, count - 1), "records_lost")) {
        count--;
    }
    const json_t *last = count > 0 ? json_array_get(v->metrics.events, count - 1) : NULL;
    return is_event(last, "ended") && nd_json_whole(last, "step") >= last_step(v) ? last : NULL;
}

static void find_end(nd_run_view *v, int64_t now)
{
    const nd_column *ms = nd_metrics_column(&v->metrics, "step_ms");
    const double patience = ms->points[ms->count - 1].value / 1e3 * RECENT_STEPS;
    /* A run that wrote its last line less than a minute, or ten steps, ago may go on. */
    const bool recent = (double)(now - v->changed) < fmax(patience, RECENT_SECONDS);
    const json_t *end = said_end(v), *saved = last_event(v, "checkpoint");
    /* On a full disk the lines of the last steps may be lost. A later event shows that the run came
     * further. */
    v->reached = last_step(v);
    for (size_t i = 0; i < json_array_size(v->metrics.events); i++) {
        const int64_t step = nd_json_whole(json_array_get(v->metrics.events, i), "step");
        v->reached = step > v->reached ? step : v->reached;
    }
    /* The newest checkpoint was made because of a signal, behind the last step. */
    const bool stopped = strcmp(nd_json_words(saved, "reason"), "signal") == 0 &&
                         nd_json_whole(saved, "step") >= v->reached;
    v->end = end && (nd_json_whole(end, "code") != ND_ERR_PREEMPTED || !stopped) ? ND_RUN_FAILED
             : v->steps_wanted > 0 && v->reached >= v->steps_wanted              ? ND_RUN_FINISHED
             : early_stop(v)       ? ND_RUN_STOPPED_EARLY
             : stopped             ? ND_RUN_STOPPED
             : recent              ? ND_RUN_RECENT
             : v->steps_wanted > 0 ? ND_RUN_ENDED_EARLY
                                   : ND_RUN_UNKNOWN;
}

/* For a run whose last line says why it ended. A signal's words name the step. Rank 0 writes the
 * line, and may do so because it waited for a rank that failed before it. */
static void write_failure(char text[ND_VERDICT_MAX], const json_t *end, const char *reached)
{
    const int code = (int)nd_json_whole(end, "code");
    char begin[128] = "";
    if (code != ND_ERR_PREEMPTED) {
        snprintf(begin, sizeof begin, "failed after step %s; rank 0 ended with code %d: ", reached,
                 code);
    }
    snprintf(text, ND_VERDICT_MAX, "%s%s%s", begin, nd_json_words(end, "why"),
             code == ND_ERR_IO || code == ND_ERR_HANG
                 ? "; where another rank failed first, the run's log has its reason"
                 : "");
}

/* Writes the verdict of a finished run, with what the run has left out. */
static void write_finished(char text[ND_VERDICT_MAX], const nd_run_view *v)
{
    int64_t failed = 0;
    for (size_t i = 0; i < json_array_size(v->metrics.events); i++) {
        failed += is_event(json_array_get(v->metrics.events, i), "checkpoint_failed");
    }
    const struct {
        int64_t count;
        const char *thing, *what;
    } left_out[] = {
        {(int64_t)nd_metrics_column(&v->metrics, "skipped")->count, "step", "skipped"},
        {(int64_t)nd_metrics_column(&v->metrics, "without_labels")->count, "step",
         "without labels"},
        {failed, "checkpoint", "not written"},
    };
    int used =
        snprintf(text, ND_VERDICT_MAX, "finished: all %lld steps", (long long)v->steps_wanted);
    for (size_t i = 0; i < sizeof left_out / sizeof *left_out; i++) {
        if (left_out[i].count > 0) {
            used += snprintf(text + used, ND_VERDICT_MAX - (size_t)used, ", %lld %s%s %s",
                             (long long)left_out[i].count, left_out[i].thing,
                             left_out[i].count == 1 ? "" : "s", left_out[i].what);
        }
    }
}

char *nd_run_verdict(const nd_run_view *view, char text[ND_VERDICT_MAX])
{
    char reached[64] = "", raw[ND_VERDICT_MAX] = "";
    const long long step = view->reached, wanted = view->steps_wanted;
    snprintf(reached, sizeof reached, wanted > 0 ? "%lld of %lld" : "%lld", step, wanted);
    switch (view->end) {
    case ND_RUN_FINISHED:
        write_finished(raw, view);
        break;
    case ND_RUN_STOPPED_EARLY:
        snprintf(raw, sizeof raw, "finished early, after step %s: %s", reached,
                 nd_json_words(early_stop(view), "why"));
        break;
    case ND_RUN_STOPPED:
        snprintf(raw, sizeof raw,
                 "stopped by a signal after step %s; --resume-from-checkpoint latest goes on with "
                 "it",
                 reached);
        break;
    case ND_RUN_FAILED:
        write_failure(raw, said_end(view), reached);
        break;
    case ND_RUN_RECENT:
        snprintf(raw, sizeof raw,
                 "at step %s a moment before this report: it runs, or has just ended", reached);
        break;
    case ND_RUN_ENDED_EARLY:
        snprintf(raw, sizeof raw,
                 "ended early, after step %s, or its disk took no more lines; this folder does not "
                 "say why, the run's log does",
                 reached);
        break;
    case ND_RUN_UNKNOWN:
        snprintf(raw, sizeof raw, "%lld steps; without run.json nobody knows how many were wanted",
                 step);
        break;
    }
    nd_escape(text, ND_VERDICT_MAX, raw, "");
    return text;
}

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
    if (status == ND_OK && nd_metrics_column(&v->metrics, "step_ms")->count == 0) {
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

static nd_status open_view(const char *folder, int64_t now, nd_run_view *v)
{
    ND_TRY(take_folder(v, folder));
    ND_TRY(read_metrics(v));
    ND_TRY(read_newest(v->folder, "run", &v->record));
    ND_TRY(read_newest(v->folder, "trace", &v->trace));
    ND_TRY(newest_file(v->folder, "profile", &v->profile));
    ND_TRY(nd_saved_list(v->folder, &v->saved, &v->saved_count));
    double steps = nd_json_number(json_object_get(v->record, "config"), "train.steps");
    v->steps_wanted = steps > 0 && steps < 1e15 ? (int64_t)steps : 0;
    find_end(v, now);
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

// SPDX-License-Identifier: Apache-2.0
/* Finds how a run ended: from its last line, or where that is lost, from the rest of its folder. */
#include <stdio.h>
#include <string.h>

#include "trainer/view/parts.h"

enum { RECENT_SECONDS = 60, RECENT_STEPS = 10 };

int64_t nd_run_view_last_step(const nd_run_view *v)
{
    const nd_metric_table *steps = &v->metrics.steps;
    return (int64_t)nd_metrics_column(&v->metrics, steps, "step")[steps->rows - 1];
}

/* The last event of this kind; NULL: there is none. */
static const json_t *last_event(const nd_run_view *v, const char *kind)
{
    const json_t *event = NULL;
    for (size_t i = json_array_size(v->metrics.events); i > 0 && !event; i--) {
        const json_t *one = json_array_get(v->metrics.events, i - 1);
        event = nd_event_is(one, kind) ? one : NULL;
    }
    return event;
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
    int64_t reached = nd_run_view_last_step(v);
    for (size_t i = 0; i < json_array_size(v->metrics.events); i++) {
        const int64_t step = nd_json_whole(json_array_get(v->metrics.events, i), "step");
        reached = step > reached ? step : reached;
    }
    for (int i = 0; i < v->saved_count; i++) {
        const nd_saved *s = &v->saved[i];
        reached = is_behind_lines(v, s) && s->step > reached ? s->step : reached;
    }
    return reached;
}

/* True when the newest checkpoint was made because of a signal, behind the last step. The line of a
 * checkpoint may be lost too. */
static bool was_stopped(const nd_run_view *v)
{
    const json_t *saved = last_event(v, "checkpoint");
    for (int i = 0; i < v->saved_count; i++) {
        const nd_saved *s = &v->saved[i];
        if (is_behind_lines(v, s) && s->step > nd_run_view_last_step(v) && s->step == v->reached &&
            strcmp(s->reason, "signal") == 0) {
            return true;
        }
    }
    return strcmp(nd_json_words(saved, "reason"), "signal") == 0 &&
           nd_json_whole(saved, "step") >= v->reached;
}

/* The early stop behind the last step; NULL: there is none. */
static const json_t *early_stop(const nd_run_view *v)
{
    const json_t *event = last_event(v, "early_stopped");
    return event && nd_json_whole(event, "step") == v->reached ? event : NULL;
}

/* Why the run ended, as its last line says. NULL: it does not, since a later start followed, or the
 * process was killed. */
static const json_t *said_end(const nd_run_view *v)
{
    size_t count = json_array_size(v->metrics.events);
    while (count > 0 && nd_event_is(json_array_get(v->metrics.events, count - 1), "records_lost")) {
        count--;
    }
    const json_t *last = count > 0 ? json_array_get(v->metrics.events, count - 1) : NULL;
    return nd_event_is(last, "ended") && nd_json_whole(last, "step") >= nd_run_view_last_step(v)
               ? last
               : NULL;
}

static nd_run_end find_end(const nd_run_view *v, int64_t now)
{
    double patience = v->figures.step_ms / 1e3 * RECENT_STEPS;
    patience = patience > RECENT_SECONDS ? patience : RECENT_SECONDS;
    const json_t *end = said_end(v);
    if (end && (nd_json_whole(end, "code") != ND_ERR_PREEMPTED || !was_stopped(v))) {
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

void nd_run_view_find_end(nd_run_view *v, int64_t now)
{
    v->reached = steps_reached(v);
    v->lost_lines = v->figures.lost_lines > 0 || v->reached > nd_run_view_last_step(v);
    v->end = find_end(v, now);
}

static void add_lost(const nd_run_view *view, char text[ND_VERDICT_MAX])
{
    static const char why[] = "as the disk was full or failed";
    const long long lines = view->figures.lost_lines, last = nd_run_view_last_step(view);
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

/* The words for a run that did not make all its steps, and has no line that says why. */
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

/* The words for a run whose last line says why it ended. Those of a signal name the step. Rank 0
 * writes the line, and may do so because it waited for a rank that failed before it. */
static void say_failure(const nd_run_view *view, const json_t *end, char text[ND_VERDICT_MAX])
{
    const int code = (int)nd_json_whole(end, "code");
    char done[64];
    if (code == ND_ERR_PREEMPTED) {
        snprintf(text, ND_VERDICT_MAX, "%s", nd_json_words(end, "why"));
    } else {
        const bool elsewhere = code == ND_ERR_IO || code == ND_ERR_HANG;
        snprintf(text, ND_VERDICT_MAX, "failed after step %s; rank 0 ended with code %d: %s%s",
                 reached(view, done), code, nd_json_words(end, "why"),
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
                 nd_json_words(early_stop(view), "why"));
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

// SPDX-License-Identifier: Apache-2.0
/* Finds how a run ended: from its last line, or where that is lost, from the rest of its folder. */
#include <stdarg.h>
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

static void add(char text[ND_VERDICT_MAX], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void add(char text[ND_VERDICT_MAX], const char *format, ...)
{
    const size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, ND_VERDICT_MAX - used, format, args);
    va_end(args);
}

/* For a run whose last line says why it ended. A signal's words name the step. Rank 0 writes the
 * line, and may do so because it waited for a rank that failed before it. */
static void add_failure(char text[ND_VERDICT_MAX], const json_t *end, const char *reached)
{
    const int code = (int)nd_json_whole(end, "code");
    if (code != ND_ERR_PREEMPTED) {
        add(text, "failed after step %s; rank 0 ended with code %d: ", reached, code);
    }
    add(text, "%s", nd_json_words(end, "why"));
    if (code == ND_ERR_IO || code == ND_ERR_HANG) {
        add(text, "; where another rank failed first, the run's log has its reason");
    }
}

static void add_end(char text[ND_VERDICT_MAX], const nd_run_view *view)
{
    char reached[64] = "";
    const long long step = view->reached, wanted = view->steps_wanted;
    snprintf(reached, sizeof reached, wanted > 0 ? "%lld of %lld" : "%lld", step, wanted);
    switch (view->end) {
    case ND_RUN_FINISHED:
        add(text, "finished: all %lld steps", wanted);
        break;
    case ND_RUN_STOPPED_EARLY:
        add(text, "finished early, after step %s: %s", reached,
            nd_json_words(early_stop(view), "why"));
        break;
    case ND_RUN_STOPPED:
        add(text,
            "stopped by a signal after step %s; --resume-from-checkpoint latest goes on with it",
            reached);
        break;
    case ND_RUN_FAILED:
        add_failure(text, said_end(view), reached);
        break;
    case ND_RUN_RECENT:
        add(text, "at step %s a moment before this report: it runs, or has just ended", reached);
        break;
    case ND_RUN_ENDED_EARLY:
        add(text,
            view->lost_lines
                ? "no line after step %s: the disk took no more, or the run ended early"
                : "ended early, after step %s, or its disk took no more lines",
            reached);
        add(text, "; this folder does not say why, the run's log does");
        break;
    case ND_RUN_UNKNOWN:
        add(text, "%lld steps; without run.json nobody knows how many were wanted", step);
        break;
    }
}

char *nd_run_verdict(const nd_run_view *view, char text[ND_VERDICT_MAX])
{
    const long long lines = view->figures.lost_lines, last = nd_run_view_last_step(view);
    text[0] = '\0';
    add_end(text, view);
    if (lines > 0) {
        add(text, "; %lld line%s of metrics.jsonl %s lost", lines, lines == 1 ? "" : "s",
            lines == 1 ? "was" : "were");
    } else if (view->lost_lines) {
        add(text, "; the lines of metrics.jsonl after step %lld were lost", last);
    }
    if (view->lost_lines) {
        add(text, ", as the disk was full or failed");
    }
    return text;
}

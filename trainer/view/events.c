// SPDX-License-Identifier: Apache-2.0
/* Events of a run, in a table and as marks in its charts, and the checkpoints in its folder. */
#include <stdio.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "trainer/report/report.h"
#include "trainer/view/parts.h"

enum { EVENTS_MAX = 200, EVENTS_OF_ALL = 400, EVENTS_OPEN = 20, MARKS_MAX = 100 };

/* "" where it has neither. */
static const char *reason_of(const json_t *event)
{
    return nd_json_words(event, json_object_get(event, "why") ? "why" : "reason");
}

/* ndlaunch counts its own restarts; without one the job was started anew. */
static json_t *resumed_cell(const json_t *event)
{
    const long long restart = nd_json_whole(event, "restart");
    const char *from = nd_json_words(event, "from"), *slash = strrchr(from, '/');
    const char *was = nd_json_words(event, "mesh_was");
    char by[ND_SHORT] = "the job was started anew";
    if (nd_json_number(event, "rewound_from") > 0) {
        return nd_cell("went back from step %.0f: %s; %.0f samples are passed over",
                       nd_json_number(event, "rewound_from"), reason_of(event),
                       nd_json_number(event, "passed_over_samples"));
    }
    if (restart > 0) {
        snprintf(by, sizeof by, "restart %lld by ndlaunch", restart);
    }
    from = slash && slash[1] ? slash + 1 : from;
    return nd_cell("%s; from %s, loaded in %.2f s%s%s%s%s", by, from[0] ? from : "a checkpoint",
                   nd_json_number(event, "load_ms") / 1e3, was[0] ? "; the mesh was " : "", was,
                   was[0] ? " and is " : "", was[0] ? nd_json_words(event, "mesh") : "");
}

static json_t *event_cell(const json_t *event)
{
    char bytes[ND_SHORT];
    if (nd_event_is(event, "resumed")) {
        return resumed_cell(event);
    }
    if (!nd_event_is(event, "checkpoint")) {
        return nd_cell("%s", reason_of(event));
    }
    return nd_cell("%s; %s, durable after %.2f s, steps waited %.0f ms", reason_of(event),
                   nd_file_bytes_format(bytes, sizeof bytes, nd_json_number(event, "bytes")),
                   nd_json_number(event, "save_ms") / 1e3, nd_json_number(event, "blocked_ms"));
}

/* The newest sample texts, or all other events, in a table, which is folded where it is long. */
static void write_last(nd_doc *doc, const json_t *events, bool samples, size_t most)
{
    size_t count = 0, from = json_array_size(events), found = 0;
    for (size_t i = from; i > 0; i--) {
        if (nd_event_is(json_array_get(events, i - 1), "sample") == samples && ++count <= most) {
            from = i - 1;
            found = count;
        }
    }
    if (count == 0) {
        return;
    }
    nd_doc_add(doc, "heading", samples ? "Sample texts" : "Events");
    if (count > most) {
        nd_doc_say(doc, "The last %zu of %zu.", most, count);
    }
    if (found > EVENTS_OPEN) {
        nd_doc_add(doc, "fold", "Show them");
    }
    nd_doc_table(doc, true, samples ? "after step|prompt|goes on" : "after step|event|");
    for (size_t i = from; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i);
        if (nd_event_is(event, "sample") == samples) {
            const char *words = nd_json_words(event, samples ? "prompt" : "event");
            ND_DOC_ROW(doc, nd_cell("%.0f", nd_json_number(event, "step")), nd_cell("%s", words),
                       samples ? nd_cell("%s", nd_json_words(event, "text")) : event_cell(event));
        }
    }
    if (found > EVENTS_OPEN) {
        nd_doc_add(doc, "unfold", "");
    }
}

void nd_section_events(nd_doc *doc, const nd_run_view *run, int runs)
{
    const size_t share = EVENTS_OF_ALL / (size_t)runs;
    const size_t most = share < EVENTS_MAX ? share : EVENTS_MAX;
    write_last(doc, run->metrics.events, true, most);
    write_last(doc, run->metrics.events, false, most);
}

void nd_section_checkpoints(nd_doc *doc, const nd_run_view *run)
{
    if (run->saved_count == 0) {
        return;
    }
    nd_doc_add(doc, "heading", "Checkpoints in the folder");
    nd_doc_table(doc, true, "folder|state|size|saved");
    for (int i = 0; i < run->saved_count; i++) {
        const nd_saved *s = &run->saved[i];
        char bytes[ND_SHORT], time[ND_CLOCK_UTC_MAX];
        ND_DOC_ROW(doc, nd_cell("%s", s->name),
                   nd_cell("%s%s%s", nd_saved_state_name(s->state), s->why[0] ? ": " : "", s->why),
                   nd_cell("%s", nd_file_bytes_format(bytes, sizeof bytes, (double)s->bytes)),
                   nd_cell("%s", nd_clock_utc(s->time, time)));
    }
}

/* Marks. */

/* The words of an event that a mark shows; NULL: it has none. Checkpoints are many and harmless. */
static const char *mark_words(const json_t *event)
{
    if (nd_event_is(event, "resumed")) {
        return nd_json_number(event, "rewound_from") > 0 ? "went back to here" : "resumed";
    }
    if (nd_event_is(event, "checkpoint_failed")) {
        return "checkpoint failed";
    }
    const bool lines = strcmp(nd_json_words(event, "sink"), "metrics.jsonl") == 0;
    return nd_event_is(event, "records_lost") && lines ? "lines were lost before" : NULL;
}

static void add_mark(json_t **marks, double step, const char *words, const char *why)
{
    if (json_array_size(*marks) < MARKS_MAX) {
        json_t *mark = json_object();
        nd_json_set(&mark, "step", json_real(step));
        nd_json_set(&mark, "text",
                    nd_cell("step %.0f: %s%s%s", step, words, why[0] ? ": " : "", why));
        nd_json_append(marks, mark);
    }
}

json_t *nd_chart_marks(const nd_run_view *run)
{
    const nd_metrics *m = &run->metrics;
    const double *step = nd_metrics_column(m, &m->steps, "step");
    const double *skipped = nd_metrics_column(m, &m->steps, "skipped");
    json_t *marks = json_array(), *event;
    size_t i;
    json_array_foreach(m->events, i, event)
    {
        const double at = nd_json_number(event, "step"), last = step[m->steps.rows - 1];
        const char *words = mark_words(event);
        if (words) {
            add_mark(&marks, at < last ? at : last, words, reason_of(event));
        }
    }
    for (i = 0; i < m->steps.rows; i++) {
        if (skipped[i] > 0) {
            add_mark(&marks, step[i], "skipped", "");
        }
    }
    return marks;
}

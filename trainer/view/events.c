// SPDX-License-Identifier: Apache-2.0
/* Events of a run, and the checkpoints in its folder. */
#include <stdio.h>

#include "runtime/base/clock.h"
#include "trainer/report/report.h"
#include "trainer/view/sections.h"

enum { EVENTS_MAX = 200, EVENTS_OF_ALL = 400, EVENTS_OPEN = 20 };

/* Cell of an event "resumed". ndlaunch counts its own restarts; without one the job was started
 * anew. */
static void write_resumed(nd_doc *doc, const nd_metric_event *e)
{
    char by[ND_SHORT] = "the job was started anew", mesh[256] = "";
    if (e->rewound_from > 0) {
        nd_doc_cellf(doc, "went back from step %lld: %s; %lld samples are passed over",
                     (long long)e->rewound_from, e->text, (long long)e->passed_over_samples);
        return;
    }
    if (e->restart > 0) {
        snprintf(by, sizeof by, "restart %lld by ndlaunch", (long long)e->restart);
    }
    if (e->mesh_was[0]) {
        snprintf(mesh, sizeof mesh, "; the mesh was %s and is %s", e->mesh_was, e->mesh);
    }
    nd_doc_cellf(doc, "%s; from %s, loaded in %.2f s%s", by, e->from[0] ? e->from : "a checkpoint",
                 e->load_ms / 1e3, mesh);
}

static void write_event(nd_doc *doc, const nd_metric_event *e)
{
    char bytes[ND_SHORT];
    nd_doc_row_begin(doc);
    nd_doc_cellf(doc, "%lld", (long long)e->step);
    nd_doc_cell(doc, e->name);
    switch (e->kind) {
    case ND_METRIC_EVENT_CHECKPOINT:
        nd_doc_cellf(doc, "%s; %s, durable after %.2f s, steps waited %.0f ms", e->text,
                     nd_file_bytes_format(bytes, sizeof bytes, e->bytes), e->save_ms / 1e3,
                     e->blocked_ms);
        break;
    case ND_METRIC_EVENT_RESUMED:
        write_resumed(doc, e);
        break;
    case ND_METRIC_EVENT_CHECKPOINT_FAILED:
    case ND_METRIC_EVENT_EARLY_STOPPED:
    case ND_METRIC_EVENT_RECORDS_LOST:
    case ND_METRIC_EVENT_ENDED:
    case ND_METRIC_EVENT_SAMPLE: /* in a table of their own */
    case ND_METRIC_EVENT_OTHER:
        nd_doc_cell(doc, e->text);
        break;
    }
    nd_doc_row_end(doc);
}

/* Where the last `most` of the samples, or of all other events, begin; *count: of all of them. */
static size_t find_last(const nd_metrics *m, bool samples, size_t most, size_t *count)
{
    size_t from = m->event_count;
    *count = 0;
    for (size_t i = m->event_count; i > 0; i--) {
        if ((m->events[i - 1].kind == ND_METRIC_EVENT_SAMPLE) == samples && ++*count <= most) {
            from = i - 1;
        }
    }
    return from;
}

static void write_sample(nd_doc *doc, const nd_metric_event *e)
{
    nd_doc_row_begin(doc);
    nd_doc_cellf(doc, "%lld", (long long)e->step);
    nd_doc_cell(doc, e->from);
    nd_doc_cell(doc, e->text);
    nd_doc_row_end(doc);
}

/* The newest events in a table, which is folded where it is long. */
static void write_last(nd_doc *doc, const nd_run_view *run, bool samples, size_t most)
{
    static const char *const heads[][3] = {{"after step", "event", ""},
                                           {"after step", "prompt", "goes on"}};
    const nd_metrics *m = &run->metrics;
    size_t count;
    const size_t from = find_last(m, samples, most, &count);
    const bool folded = (count < most ? count : most) > EVENTS_OPEN;
    if (count == 0) {
        return;
    }
    nd_doc_heading(doc, 2, samples ? "Sample texts" : "Events");
    if (count > most) {
        nd_doc_say(doc, "The last %zu of %zu.", most, count);
    }
    if (folded) {
        nd_doc_fold_begin(doc, "Show them");
    }
    nd_doc_table_begin(doc, true, 3, heads[samples]);
    for (size_t i = from; i < m->event_count; i++) {
        if ((m->events[i].kind == ND_METRIC_EVENT_SAMPLE) == samples) {
            samples ? write_sample(doc, &m->events[i]) : write_event(doc, &m->events[i]);
        }
    }
    nd_doc_table_end(doc);
    if (folded) {
        nd_doc_fold_end(doc);
    }
}

void nd_section_events(nd_doc *doc, const nd_run_view *run, int runs)
{
    const size_t share = EVENTS_OF_ALL / (size_t)runs;
    const size_t most = share < EVENTS_MAX ? share : EVENTS_MAX;
    write_last(doc, run, true, most);
    write_last(doc, run, false, most);
}

void nd_section_checkpoints(nd_doc *doc, const nd_run_view *run)
{
    static const char *const heads[] = {"folder", "state", "size", "saved"};
    if (run->saved_count == 0) {
        return;
    }
    nd_doc_heading(doc, 2, "Checkpoints in the folder");
    nd_doc_table_begin(doc, true, 4, heads);
    for (int i = 0; i < run->saved_count; i++) {
        const nd_saved *s = &run->saved[i];
        char bytes[ND_SHORT], time[ND_CLOCK_UTC_MAX];
        nd_doc_row_begin(doc);
        nd_doc_cell(doc, s->name);
        nd_doc_cellf(doc, "%s%s%s", nd_saved_state_name(s->state), s->why[0] ? ": " : "", s->why);
        nd_doc_cell(doc, nd_file_bytes_format(bytes, sizeof bytes, (double)s->bytes));
        nd_doc_cell(doc, nd_clock_utc(s->time, time));
        nd_doc_row_end(doc);
    }
    nd_doc_table_end(doc);
}

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_SECTIONS_H
#define ND_VIEW_SECTIONS_H
/*
 * The sections of a report. Each writes a heading with its tables, or nothing where the run's files
 * do not have what it shows. Private to trainer/view.
 */
#include "trainer/view/doc.h"
#include "trainer/view/run_view.h"

enum { ND_SHORT = 64 }; /* a number, or a few words, in a cell */

/* Figures of several runs side by side, and settings that differ (figures.c). */
void nd_section_compare(nd_doc *doc, const nd_run_view *runs, int count);
void nd_section_notes(nd_doc *doc, const nd_run_view *run);
void nd_section_times(nd_doc *doc, const nd_run_view *run); /* of trace.json (shares.c) */
void nd_section_wire(nd_doc *doc, const nd_run_view *run);
nd_status nd_section_memory(nd_doc *doc, const nd_run_view *run);
nd_status nd_section_slowest(nd_doc *doc, const nd_run_view *run); /* of each step (ranks.c) */
nd_status nd_section_waits(nd_doc *doc, const nd_run_view *run);   /* of profile.json */
void nd_section_fp8(nd_doc *doc, const nd_run_view *run);          /* health.c */
nd_status nd_section_data(nd_doc *doc, const nd_run_view *run);    /* sources.c */
/* The more runs a page has, the fewer events of each (events.c). */
void nd_section_events(nd_doc *doc, const nd_run_view *run, int runs);
void nd_section_checkpoints(nd_doc *doc, const nd_run_view *run);
nd_status nd_section_settings(nd_doc *doc, const nd_run_view *run); /* settings.c */
/* A value of run.json; "" where there is none. */
json_t *nd_section_value(const json_t *value);

/* A source of the training over all steps, or a set over all validations. Losses are NaN where they
 * are not known. */
typedef struct nd_named {
    const char *column, *name; /* "source_loss.web", "web" */
    const double *losses;      /* the column */
    double tokens;             /* labels that counted */
    double end;                /* mean from step end_from on */
    double last, best, best_step;
} nd_named;

/* All of a kind, "source" or "validation_set", in the order of the file. The caller frees them
 * (sources.c). */
nd_status nd_named_list(const nd_metrics *metrics, const nd_metric_table *table, const char *kind,
                        int64_t end_from, nd_named **out, int *count);

/* One of `runs` runs on a page, whose steps go from `first` to `last`, with its curves, as JSON for
 * the script (charts.c). *out is NULL where memory ran out while it was made. */
nd_status nd_chart_run(const nd_run_view *run, int64_t first, int64_t last, int runs, json_t **out);
/* [{"step": n, "text": t}, ...]: what happened to a run, for its charts (events.c). */
json_t *nd_chart_marks(const nd_run_view *run);

#endif

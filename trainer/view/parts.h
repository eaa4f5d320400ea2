// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_PARTS_H
#define ND_VIEW_PARTS_H
/*
 * Parts of a report, private to trainer/view: blocks of text and tables, curves, and sections. A
 * section writes a heading with its tables, or nothing where the run's files do not have what it
 * shows.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "runtime/base/json.h"
#include "trainer/view/view.h"

/* Finds how a run ended, from its files and figures (verdict.c). */
void nd_run_view_find_end(nd_run_view *view, int64_t now);
/* The last step in metrics.jsonl. */
int64_t nd_run_view_last_step(const nd_run_view *view);

/*
 * Headings, paragraphs and tables of a report, as an array of JSON that the script of a page draws
 * (page.js) and that is written as Markdown here:
 *
 *   {"heading": text}  {"say": text}  {"code": text}  {"fold": title}  {"unfold": ""}
 *   {"heads": [text, ...], "words": bool, "rows": [[cell, ...], ...]}
 *
 * Blocks between a fold and its end are hidden until the reader opens it. A code is a text in which
 * line ends and blanks count. A cell is a text, or a number from 0 to 1: a share, with a bar. Bytes
 * of a text that are no UTF-8, control characters and marks that reverse the direction of writing
 * become \xNN or \uNNNN. Where memory runs out the array becomes NULL, so only the end is checked.
 */
typedef struct nd_doc {
    json_t *blocks; /* owned; NULL: no memory */
} nd_doc;

/* A block of one text. */
void nd_doc_add(nd_doc *doc, const char *kind, const char *text);
/* A paragraph. */
void nd_doc_say(nd_doc *doc, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A table, whose rows follow. Its first column has words, the others numbers, unless all have
 * words. `heads`: "work|ms of a step|share". */
void nd_doc_table(nd_doc *doc, bool words, const char *heads);
/* A further head. */
void nd_doc_head(nd_doc *doc, const char *head);
#define ND_DOC_ROW(doc, ...)                                                                       \
    nd_doc_row(doc, (json_t *[]){__VA_ARGS__}, sizeof((json_t *[]){__VA_ARGS__}) / sizeof(json_t *))
/* Steals the cells; one that is NULL is a lack of memory. */
void nd_doc_row(nd_doc *doc, json_t **cells, size_t count);

/* Text made printable; NULL: no memory. Line ends and tabs that `keep` has stay. */
json_t *nd_doc_text(const char *text, const char *keep);
/* Cells. */
json_t *nd_cell(const char *format, ...) __attribute__((format(printf, 1, 2)));
json_t *nd_cell_figure(double value, int digits); /* nd_figure */
json_t *nd_cell_share(double share);

void nd_doc_write_markdown(const json_t *blocks, FILE *out);
/* The text alone, escaped. */
void nd_doc_write_markdown_text(const char *text, FILE *out);

/*
 * A curve of any number of values over steps, reduced to at most ND_CURVE_MAX intervals of steps.
 * Each has its least, largest and mean value, so that the spike of a single step is kept.
 */
enum { ND_CURVE_MAX = 400 };

typedef struct nd_curve_part {
    double step; /* mean of the steps whose values it has */
    double low, high, mean;
    int64_t count;
} nd_curve_part;

typedef struct nd_curve {
    int64_t first, last; /* steps */
    int parts;
    double parts_per_step; /* while values are added */
    int64_t not_finite;    /* values that are not drawn */
    nd_curve_part part[ND_CURVE_MAX];
} nd_curve;

/* Steps `first` to `last` in at most `parts` intervals of equal length. Add values in any order,
 * then end, which removes intervals without a value. */
void nd_curve_begin(nd_curve *curve, int parts, int64_t first, int64_t last);
void nd_curve_add(nd_curve *curve, int64_t step, double value);
void nd_curve_end(nd_curve *curve);

/* The median of the values, which are put into another order; the mean of the middle two of an even
 * number. NaN of none. */
double nd_median(double *values, size_t count);

/* A number for a person, with `digits` significant digits, at least 4, and 5 from 1000 to 9999:
 * "0.00031", "12.3 k", "1.25 M", "3.1e-07"; "-" when it is not finite. Returns text. */
char *nd_figure(char *text, size_t size, double value, int digits);

/* Sections. */

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

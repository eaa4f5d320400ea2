// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/charts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/view/chart.h"

/* An interval takes about 80 bytes of each of nine charts, so that a page of several runs stays
 * below 1 MB. The sections of a run take as much as PARTS_OF_RUN intervals in each chart. */
enum {
    PARTS_OF_ALL = 1200, /* of the curves of a chart together */
    PARTS_OF_RUN = 16,
    MARKS_MAX = 100,
    MARK_TEXT = 720,
    LINES_MAX = ND_PAGE_RUNS_MAX + 1,
    NAMED_MAX = 12 /* sources in a chart: those with the most labels */
};

typedef struct chart_row {
    const char *id, *title, *unit;
    nd_metric metric;
    double scale; /* of the values, to the unit */
    bool from_zero;
} chart_row;

static const chart_row charts[] = {
    {"loss", "Loss", "nats per token", ND_METRIC_LOSS, 1, false},
    {"grad-norm", "Gradient norm", "before clipping", ND_METRIC_GRAD_NORM, 1, false},
    {"lr", "Learning rate", "", ND_METRIC_LR, 1, true},
    {"tokens", "Speed", "tokens a second", ND_METRIC_TOKENS_PER_SECOND, 1, true},
    {"step-ms", "Time of a step", "ms", ND_METRIC_STEP_MS, 1, true},
    {"data-wait", "Waiting for data", "ms of a step", ND_METRIC_DATA_WAIT_MS, 1, true},
    {"memory", "Peak memory of rank 0", "GiB", ND_METRIC_PEAK_MEMORY, 1.0 / 1073741824, true},
    {"wire", "Bytes on the wire", "MiB of a step, sent by rank 0", ND_METRIC_WIRE, 1.0 / 1048576,
     true},
};

/* What the charts of a page share. */
typedef struct drawing {
    const nd_page *page;
    nd_doc *doc;
    int64_t first, last; /* steps of all runs */
    int parts;           /* of a curve */
    nd_curve *curves;    /* [LINES_MAX] */
    nd_chart_mark marks[MARKS_MAX];
    char mark_text[MARKS_MAX][MARK_TEXT];
    int mark_count;
} drawing;

_Static_assert(PARTS_OF_ALL / ND_PAGE_RUNS_MAX > PARTS_OF_RUN, "curves of many runs have parts");

static int parts_for(int lines)
{
    return PARTS_OF_ALL / lines;
}

static void fill_curve(const drawing *d, const nd_metrics *m, const chart_row *row, nd_curve *out)
{
    nd_curve_begin(out, d->parts, d->first, d->last);
    for (size_t i = 0; i < m->row_count; i++) {
        nd_curve_add(out, m->rows[i].step, (double)m->rows[i].value[row->metric] * row->scale);
    }
    nd_curve_end(out);
}

static void fill_validations(const drawing *d, const nd_metrics *m, nd_curve *out)
{
    nd_curve_begin(out, d->parts, d->first, d->last);
    for (size_t i = 0; i < m->validation_count; i++) {
        nd_curve_add(out, m->validations[i].step, m->validations[i].loss);
    }
    nd_curve_end(out);
}

static void add_mark(drawing *d, int64_t step, const char *what, const char *text)
{
    if (d->mark_count == MARKS_MAX) {
        return;
    }
    char *out = d->mark_text[d->mark_count];
    snprintf(out, MARK_TEXT, "step %lld: %s%s%s", (long long)step, what, text[0] ? ": " : "", text);
    d->marks[d->mark_count++] = (nd_chart_mark){(double)step, out};
}

/* Checkpoints are many and harmless; they are in a table. */
static void find_marks(drawing *d, const nd_metrics *m)
{
    for (size_t i = 0; i < m->event_count; i++) {
        const nd_metric_event *e = &m->events[i];
        if (e->kind == ND_METRIC_EVENT_RESUMED) {
            add_mark(d, e->step, e->rewound_from > 0 ? "went back to here" : "resumed", e->text);
        } else if (e->kind == ND_METRIC_EVENT_CHECKPOINT_FAILED) {
            add_mark(d, e->step, "checkpoint failed", e->text);
        } else if (e->kind == ND_METRIC_EVENT_RECORDS_LOST &&
                   strcmp(e->sink, "metrics.jsonl") == 0) {
            add_mark(d, e->step < d->last ? e->step : d->last, "lines were lost before", e->text);
        }
    }
    for (size_t i = 0; i < m->row_count; i++) {
        if (m->rows[i].skipped) {
            add_mark(d, m->rows[i].step, "skipped", "");
        }
    }
}

static void write_chart(drawing *d, const chart_row *row, const nd_chart_line *lines, int count)
{
    bool all_zero = true;
    for (int i = 0; i < count; i++) {
        all_zero = all_zero && (lines[i].curve->parts == 0 || lines[i].curve->high == 0);
    }
    if (all_zero && row->from_zero) { /* nothing was sent, or there was nothing to wait for */
        return;
    }
    bool marked = row->metric == ND_METRIC_LOSS && d->page->count == 1;
    nd_chart_write(d->doc, &(nd_chart){.id = row->id,
                                       .title = row->title,
                                       .unit = row->unit,
                                       .lines = lines,
                                       .line_count = count,
                                       .marks = d->marks,
                                       .mark_count = marked ? d->mark_count : 0,
                                       .first = d->first,
                                       .last = d->last,
                                       .from_zero = row->from_zero});
}

static void write_metric(drawing *d, const chart_row *row)
{
    const nd_page *page = d->page;
    nd_chart_line lines[LINES_MAX];
    int count = 0;
    for (int i = 0; i < page->count; i++) {
        fill_curve(d, &page->runs[i].metrics, row, &d->curves[i]);
        const char *name = page->count > 1 ? page->runs[i].name : row->title;
        lines[count++] = (nd_chart_line){.curve = &d->curves[i], .name = name, .colour = i};
    }
    if (row->metric == ND_METRIC_LOSS && page->count == 1) {
        nd_curve *validations = &d->curves[count];
        fill_validations(d, &page->runs[0].metrics, validations);
        if (validations->parts > 0) {
            lines[count++] = (nd_chart_line){validations, "Validation", 1, true};
        }
    }
    write_chart(d, row, lines, count);
}

static void write_validations_of_all(drawing *d)
{
    static const chart_row row = {
        "validation", "Validation loss", "nats per token", ND_METRIC_COUNT, 1, false};
    nd_chart_line lines[ND_PAGE_RUNS_MAX];
    for (int i = 0; i < d->page->count; i++) {
        fill_validations(d, &d->page->runs[i].metrics, &d->curves[i]);
        lines[i] = (nd_chart_line){&d->curves[i], d->page->runs[i].name, i, true};
    }
    write_chart(d, &row, lines, d->page->count);
}

/* Of one run: sources and sets. */

typedef struct named {
    int source; /* in the names */
    double tokens;
} named;

static int by_tokens(const void *a, const void *b)
{
    const named *x = a, *y = b;
    int order = (y->tokens > x->tokens) - (y->tokens < x->tokens);
    return order ? order : (x->source > y->source) - (x->source < y->source);
}

typedef struct named_rows {
    const nd_source_row *rows;
    size_t count;
    const nd_metric_names *names;
    bool points;
} named_rows;

static void draw_named(drawing *d, const chart_row *row, const named_rows *from, const named *list,
                       int count)
{
    nd_chart_line lines[NAMED_MAX];
    for (int i = 0; i < count; i++) {
        nd_curve *curve = &d->curves[i];
        nd_curve_begin(curve, parts_for(count), d->first, d->last);
        for (size_t k = 0; k < from->count; k++) {
            if (from->rows[k].source == list[i].source && from->rows[k].tokens > 0) {
                nd_curve_add(curve, from->rows[k].step, (double)from->rows[k].loss);
            }
        }
        nd_curve_end(curve);
        lines[i] = (nd_chart_line){curve, from->names->name[list[i].source], i, from->points};
    }
    write_chart(d, row, lines, count);
}

/* The curves of the sources with the most labels, that with the most first. */
static nd_status write_named(drawing *d, const chart_row *row, const named_rows *from)
{
    named *list = NULL;
    int count = from->names->count;
    if (count == 0) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(count, &list));
    for (int i = 0; i < count; i++) {
        list[i].source = i;
    }
    for (size_t k = 0; k < from->count; k++) {
        double tokens = from->rows[k].tokens;
        list[from->rows[k].source].tokens += isfinite(tokens) ? tokens : 0;
    }
    qsort(list, (size_t)count, sizeof *list, by_tokens);
    draw_named(d, row, from, list, count < NAMED_MAX ? count : NAMED_MAX);
    free(list);
    return ND_OK;
}

/* Behind the chart of the loss. */
static nd_status write_losses(drawing *d)
{
    static const chart_row by_source = {
        "source-loss", "Loss by source", "nats per token", ND_METRIC_COUNT, 1, false};
    static const chart_row by_set = {
        "set-loss", "Validation loss by set", "nats per token", ND_METRIC_COUNT, 1, false};
    const nd_metrics *m = &d->page->runs[0].metrics;
    if (d->page->count > 1) {
        write_validations_of_all(d);
        return ND_OK;
    }
    ND_TRY(write_named(d, &by_source,
                       &(named_rows){m->sources, m->source_count, &m->source_names, false}));
    return write_named(d, &by_set, &(named_rows){m->sets, m->set_count, &m->set_names, true});
}

/* Of the steps whose records name a slowest rank. */
static void fill_work(const drawing *d, const nd_metrics *m, nd_metric metric, nd_curve *out)
{
    nd_curve_begin(out, d->parts, d->first, d->last);
    for (size_t i = 0; i < m->row_count; i++) {
        const float ms = m->rows[i].value[metric];
        if (isfinite(ms)) {
            nd_curve_add(out, m->rows[i].step, (double)ms);
        }
    }
    nd_curve_end(out);
}

static void write_ranks(drawing *d, const nd_metrics *m)
{
    static const chart_row row = {
        "ranks", "Work of the slowest and the fastest rank", "ms of a step", ND_METRIC_COUNT, 1,
        true};
    const nd_chart_line lines[] = {{.curve = &d->curves[0], .name = "Slowest", .colour = 3},
                                   {.curve = &d->curves[1], .name = "Fastest", .colour = 2}};
    fill_work(d, m, ND_METRIC_SLOWEST_MS, &d->curves[0]);
    fill_work(d, m, ND_METRIC_FASTEST_MS, &d->curves[1]);
    if (d->curves[0].parts > 0) {
        write_chart(d, &row, lines, 2);
    }
}

/* A band from the least to the largest of all linears, and their mean. */
static void draw_health(drawing *d, const nd_metrics *m, const chart_row *row, bool saturation)
{
    nd_chart_line lines[ND_OPERAND_KINDS];
    int count = 0;
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        nd_curve_begin(&d->curves[kind], parts_for(2 * ND_OPERAND_KINDS), d->first, d->last);
    }
    for (size_t i = 0; i < m->health_count; i++) {
        const nd_health_row *h = &m->health[i];
        const double share = saturation ? h->worst.saturation : h->worst.underflow;
        nd_curve_add(&d->curves[h->operand], h->step, share * row->scale);
    }
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        nd_curve_end(&d->curves[kind]);
        if (d->curves[kind].parts > 0) {
            lines[count++] = (nd_chart_line){.curve = &d->curves[kind],
                                             .name = nd_operand_name((nd_operand_kind)kind),
                                             .colour = kind};
        }
    }
    write_chart(d, row, lines, count);
}

static void write_health(drawing *d, const nd_metrics *m)
{
    static const chart_row underflow = {"fp8-underflow",
                                        "FP8: underflow of the linears",
                                        "% of the elements",
                                        ND_METRIC_COUNT,
                                        100,
                                        true};
    static const chart_row saturation = {"fp8-saturation",
                                         "FP8: saturation of the linears",
                                         "% of the elements",
                                         ND_METRIC_COUNT,
                                         100,
                                         true};
    if (m->health_count > 0) {
        draw_health(d, m, &underflow, false);
        draw_health(d, m, &saturation, true);
    }
}

nd_status nd_charts_write(const nd_page *page, nd_doc *doc)
{
    drawing *d = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &d));
    ND_TRY_OUT(ND_ALLOC(LINES_MAX, &d->curves));
    d->page = page;
    d->doc = doc;
    d->parts = parts_for(page->count) - PARTS_OF_RUN;
    d->first = INT64_MAX;
    for (int i = 0; i < page->count; i++) {
        const nd_metrics *m = &page->runs[i].metrics;
        int64_t last = m->rows[m->row_count - 1].step;
        d->first = m->rows[0].step < d->first ? m->rows[0].step : d->first;
        d->last = last > d->last ? last : d->last;
    }
    find_marks(d, &page->runs[0].metrics);
    fputs("<div class=\"charts\">\n", doc->out);
    for (size_t i = 0; i < sizeof charts / sizeof *charts; i++) {
        write_metric(d, &charts[i]);
        if (i == 0) {
            ND_TRY_OUT(write_losses(d));
        }
    }
    if (page->count == 1) {
        write_ranks(d, &page->runs[0].metrics);
        write_health(d, &page->runs[0].metrics);
    }
    fputs("</div>\n", doc->out);
out:
    if (d) {
        free(d->curves);
    }
    free(d);
    return status;
}

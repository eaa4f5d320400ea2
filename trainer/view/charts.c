// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/charts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/view/curve.h"

/* An interval takes about 30 bytes of each of nine charts, so that a page of several runs stays
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

typedef struct chart_line {
    const nd_curve *curve; /* borrowed */
    const char *name;
    int run, colour;
    bool points; /* few values, each drawn as a dot: validations */
} chart_line;

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
    int charts;          /* written so far */
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

/* JSON. */

static void write_string(const drawing *d, const char *text)
{
    fputc('"', d->doc->out);
    nd_doc_json_text(d->doc->out, text);
    fputc('"', d->doc->out);
}

typedef enum curve_value { OF_STEP, OF_MEAN, OF_LOW, OF_HIGH } curve_value;

static void write_list(const drawing *d, const char *name, const nd_curve *c, curve_value which)
{
    fprintf(d->doc->out, ",\"%s\":[", name);
    for (int i = 0; i < c->parts; i++) {
        const nd_curve_part *part = &c->part[i];
        const double value = which == OF_STEP   ? part->step
                             : which == OF_MEAN ? part->mean
                             : which == OF_LOW  ? part->low
                                                : part->high;
        fprintf(d->doc->out, which == OF_STEP ? "%s%.10g" : "%s%.5g", i == 0 ? "" : ",", value);
    }
    fputc(']', d->doc->out);
}

static void write_mark(const drawing *d, int *count, int64_t step, const char *what,
                       const char *text)
{
    char all[MARK_TEXT];
    if (*count == MARKS_MAX) {
        return;
    }
    snprintf(all, sizeof all, "step %lld: %s%s%s", (long long)step, what, text[0] ? ": " : "",
             text);
    fprintf(d->doc->out, "%s{\"step\":%lld,\"text\":", (*count)++ > 0 ? "," : "", (long long)step);
    write_string(d, all);
    fputc('}', d->doc->out);
}

/* Checkpoints are many and harmless; they are in a table. */
static void write_marks(const drawing *d, const nd_metrics *m)
{
    int count = 0;
    for (size_t i = 0; i < m->event_count; i++) {
        const nd_metric_event *e = &m->events[i];
        if (e->kind == ND_METRIC_EVENT_RESUMED) {
            write_mark(d, &count, e->step, e->rewound_from > 0 ? "went back to here" : "resumed",
                       e->text);
        } else if (e->kind == ND_METRIC_EVENT_CHECKPOINT_FAILED) {
            write_mark(d, &count, e->step, "checkpoint failed", e->text);
        } else if (e->kind == ND_METRIC_EVENT_RECORDS_LOST &&
                   strcmp(e->sink, "metrics.jsonl") == 0) {
            write_mark(d, &count, e->step < d->last ? e->step : d->last, "lines were lost before",
                       e->text);
        }
    }
    for (size_t i = 0; i < m->row_count; i++) {
        if (m->rows[i].skipped) {
            write_mark(d, &count, m->rows[i].step, "skipped", "");
        }
    }
}

/* Nothing when no line has a value, or when all are zero on an axis that begins there: nothing was
 * sent, or there was nothing to wait for. */
static void write_chart(drawing *d, const chart_row *row, const chart_line *lines, int count)
{
    FILE *out = d->doc->out;
    bool empty = true, all_zero = true;
    for (int i = 0; i < count; i++) {
        empty = empty && lines[i].curve->parts == 0;
        all_zero = all_zero && (lines[i].curve->parts == 0 || lines[i].curve->high == 0);
    }
    if (empty || (all_zero && row->from_zero)) {
        return;
    }
    fprintf(out, "%s\n{\"id\":\"%s\",\"title\":\"%s\",\"unit\":\"%s\",\"zero\":%s,\"marks\":[",
            d->charts++ > 0 ? "," : "", row->id, row->title, row->unit,
            row->from_zero ? "true" : "false");
    if (row->metric == ND_METRIC_LOSS && d->page->count == 1) {
        write_marks(d, &d->page->runs[0].metrics);
    }
    fputs("],\"lines\":[", out);
    for (int i = 0; i < count; i++) {
        const chart_line *line = &lines[i];
        fprintf(out, "%s{\"name\":", i > 0 ? "," : "");
        write_string(d, line->name);
        fprintf(out, ",\"run\":%d,\"colour\":%d,\"points\":%s,\"lost\":%lld", line->run,
                line->colour, line->points ? "true" : "false", (long long)line->curve->not_finite);
        write_list(d, "step", line->curve, OF_STEP);
        write_list(d, "mean", line->curve, OF_MEAN);
        write_list(d, "low", line->curve, OF_LOW);
        write_list(d, "high", line->curve, OF_HIGH);
        fputs("}", out);
    }
    fputs("]}", out);
}

/* Tokens and seconds of training at the steps of a run, for the other x axes. */
static void write_run(drawing *d, int index)
{
    const nd_run_view *run = &d->page->runs[index];
    const nd_metrics *m = &run->metrics;
    nd_curve *tokens = &d->curves[0], *seconds = &d->curves[1];
    double sum = 0;
    nd_curve_begin(tokens, d->parts, d->first, d->last);
    nd_curve_begin(seconds, d->parts, d->first, d->last);
    for (size_t i = 0; i < m->row_count; i++) {
        const double ms = (double)m->rows[i].value[ND_METRIC_STEP_MS];
        sum += isfinite(ms) ? ms / 1e3 : 0;
        nd_curve_add(tokens, m->rows[i].step, m->rows[i].tokens_seen);
        nd_curve_add(seconds, m->rows[i].step, sum);
    }
    nd_curve_end(tokens);
    nd_curve_end(seconds);
    fprintf(d->doc->out, "%s\n{\"name\":", index > 0 ? "," : "");
    write_string(d, run->name);
    fprintf(d->doc->out, ",\"first\":%lld,\"last\":%lld", (long long)m->rows[0].step,
            (long long)m->rows[m->row_count - 1].step);
    write_list(d, "step", seconds, OF_STEP);
    write_list(d, "tokens", tokens, OF_MEAN);
    write_list(d, "seconds", seconds, OF_MEAN);
    fputc('}', d->doc->out);
}

/* Curves. */

static void write_metric(drawing *d, const chart_row *row)
{
    const nd_page *page = d->page;
    chart_line lines[LINES_MAX];
    int count = 0;
    for (int i = 0; i < page->count; i++) {
        fill_curve(d, &page->runs[i].metrics, row, &d->curves[i]);
        const char *name = page->count > 1 ? page->runs[i].name : row->title;
        lines[count++] = (chart_line){.curve = &d->curves[i], .name = name, .run = i, .colour = i};
    }
    if (row->metric == ND_METRIC_LOSS && page->count == 1) {
        nd_curve *validations = &d->curves[count];
        fill_validations(d, &page->runs[0].metrics, validations);
        if (validations->parts > 0) {
            lines[count++] = (chart_line){validations, "Validation", 0, 1, true};
        }
    }
    write_chart(d, row, lines, count);
}

static void write_validations_of_all(drawing *d)
{
    static const chart_row row = {
        "validation", "Validation loss", "nats per token", ND_METRIC_COUNT, 1, false};
    chart_line lines[ND_PAGE_RUNS_MAX];
    for (int i = 0; i < d->page->count; i++) {
        fill_validations(d, &d->page->runs[i].metrics, &d->curves[i]);
        lines[i] = (chart_line){&d->curves[i], d->page->runs[i].name, i, i, true};
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
    chart_line lines[NAMED_MAX];
    for (int i = 0; i < count; i++) {
        nd_curve *curve = &d->curves[i];
        nd_curve_begin(curve, parts_for(count), d->first, d->last);
        for (size_t k = 0; k < from->count; k++) {
            if (from->rows[k].source == list[i].source && from->rows[k].tokens > 0) {
                nd_curve_add(curve, from->rows[k].step, (double)from->rows[k].loss);
            }
        }
        nd_curve_end(curve);
        lines[i] = (chart_line){curve, from->names->name[list[i].source], 0, i, from->points};
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
    const chart_line lines[] = {{.curve = &d->curves[0], .name = "Slowest", .colour = 3},
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
    chart_line lines[ND_OPERAND_KINDS];
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
            lines[count++] = (chart_line){.curve = &d->curves[kind],
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
    fputs("<div id=\"controls\"></div><div class=\"charts\" id=\"charts\"></div><div hidden><svg "
          "id=\"svg\"></svg></div>\n<noscript><p>The "
          "curves are drawn by the script of this page, which is not run here.</p></noscript>\n"
          "<script type=\"application/json\" id=\"data\">{\"runs\":[",
          doc->out);
    for (int i = 0; i < page->count; i++) {
        write_run(d, i);
    }
    fputs("],\"charts\":[", doc->out);
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
    fputs("]}</script>\n", doc->out);
out:
    if (d) {
        free(d->curves);
    }
    free(d);
    return status;
}

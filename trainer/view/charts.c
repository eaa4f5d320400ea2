// SPDX-License-Identifier: Apache-2.0
/* The curves of a run, for the script of a page, which knows what each is and draws it. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/precision/precision.h"
#include "trainer/view/parts.h"

/* Reducing. */

void nd_curve_begin(nd_curve *curve, int parts, int64_t first, int64_t last)
{
    int64_t steps = last >= first ? last - first + 1 : 1;
    parts = parts < 1 ? 1 : parts > ND_CURVE_MAX ? ND_CURVE_MAX : parts;
    curve->first = first;
    curve->last = last;
    curve->parts = steps < parts ? (int)steps : parts;
    curve->parts_per_step = (double)curve->parts / (double)steps;
    curve->not_finite = 0;
    for (int i = 0; i < curve->parts; i++) {
        curve->part[i] = (nd_curve_part){0, INFINITY, -INFINITY, 0, 0};
    }
}

/* While values are added, step and mean hold sums. */
void nd_curve_add(nd_curve *curve, int64_t step, double value)
{
    if (step < curve->first || step > curve->last) {
        return;
    }
    if (!isfinite(value)) {
        curve->not_finite++;
        return;
    }
    int i = (int)((double)(step - curve->first) * curve->parts_per_step);
    nd_curve_part *part = &curve->part[i < curve->parts ? i : curve->parts - 1];
    part->step += (double)step;
    part->mean += value;
    part->low = value < part->low ? value : part->low;
    part->high = value > part->high ? value : part->high;
    part->count++;
}

void nd_curve_end(nd_curve *curve)
{
    int kept = 0;
    for (int i = 0; i < curve->parts; i++) {
        nd_curve_part part = curve->part[i];
        if (part.count == 0) {
            continue;
        }
        part.step /= (double)part.count;
        part.mean /= (double)part.count;
        curve->part[kept++] = part;
    }
    curve->parts = kept;
}

/* Drawing. */

/* An interval takes about 30 bytes of each of nine charts, so that a page of several runs stays
 * below 1 MB. The sections of a run take as much as PARTS_OF_RUN intervals in each chart. */
enum {
    PARTS_OF_ALL = 1200, /* of the curves of a chart together */
    PARTS_OF_RUN = 16,
    NAMED_MAX = 12 /* sources in a chart: those with the most labels */
};

_Static_assert(PARTS_OF_ALL / ND_PAGE_RUNS_MAX > PARTS_OF_RUN, "curves of many runs have parts");

/* The columns that have a curve of their own. */
static const struct {
    const char *name;
    bool sparse, validation;
} columns[] = {
    {"loss", false, false},
    {"validation_loss", false, true},
    {"grad_norm", false, false},
    {"lr", false, false},
    {"tokens_per_second", false, false},
    {"step_ms", false, false},
    {"data_wait_ms", false, false},
    {"peak_memory_bytes", false, false},
    {"wire_bytes", false, false},
    {"slowest_ms", true, false}, /* of a run with several workers on CPUs */
    {"fastest_ms", true, false},
};

typedef struct drawing {
    const nd_metrics *metrics;
    int64_t first, last; /* steps of all runs of the page */
    int parts;           /* of a curve */
    nd_curve curve;      /* that is made now */
    json_t *curves;      /* owned; NULL: no memory */
} drawing;

/* With five significant digits. */
static json_t *short_number(double value)
{
    char text[32];
    if (value == floor(value) && fabs(value) < 1e15) {
        return json_integer((json_int_t)value);
    }
    snprintf(text, sizeof text, "%.5g", value);
    return json_real(strtod(text, NULL));
}

/* A list of one member of all parts, for the key. */
static void set_list(json_t **object, const char *key, const nd_curve *c, size_t member)
{
    json_t *list = json_array();
    for (int i = 0; i < c->parts; i++) {
        double value;
        memcpy(&value, (const char *)&c->part[i] + member, sizeof value);
        nd_json_append(&list, member == offsetof(nd_curve_part, step) ? json_real(value)
                                                                      : short_number(value));
    }
    nd_json_set(object, key, list);
}

/* sparse: lines may lack the value; else one that is not finite is counted. */
static void add_column(drawing *d, const nd_metric_table *table, const double *values, bool sparse)
{
    const double *step = nd_metrics_column(d->metrics, table, "step");
    for (size_t i = 0; i < table->rows; i++) {
        if (!sparse || isfinite(values[i])) {
            nd_curve_add(&d->curve, (int64_t)step[i], values[i]);
        }
    }
}

static void end_curve(drawing *d, const char *name)
{
    nd_curve_end(&d->curve);
    if (d->curve.parts > 0) {
        json_t *curve = json_pack("{s:I}", "lost", (json_int_t)d->curve.not_finite);
        set_list(&curve, "step", &d->curve, offsetof(nd_curve_part, step));
        set_list(&curve, "mean", &d->curve, offsetof(nd_curve_part, mean));
        set_list(&curve, "low", &d->curve, offsetof(nd_curve_part, low));
        set_list(&curve, "high", &d->curve, offsetof(nd_curve_part, high));
        nd_json_set(&d->curves, name, curve);
    }
}

static void draw_column(drawing *d, int parts, const nd_metric_table *table, const char *name,
                        bool sparse)
{
    const double *values = nd_metrics_column(d->metrics, table, name);
    if (values != d->metrics->none) {
        nd_curve_begin(&d->curve, parts, d->first, d->last);
        add_column(d, table, values, sparse);
        end_curve(d, name);
    }
}

/* Sources and sets. */

static int by_tokens(const void *a, const void *b)
{
    const nd_named *x = a, *y = b;
    const int order = (y->tokens > x->tokens) - (y->tokens < x->tokens);
    return order ? order : (x->column > y->column) - (x->column < y->column);
}

/* The sources with the most labels, that with the most first. */
static nd_status draw_named(drawing *d, const nd_metric_table *table, const char *kind)
{
    nd_named *list = NULL;
    int count = 0;
    ND_TRY(nd_named_list(d->metrics, table, kind, 0, &list, &count));
    qsort(list, (size_t)count, sizeof *list, by_tokens);
    count = count < NAMED_MAX ? count : NAMED_MAX;
    for (int i = 0; i < count; i++) {
        draw_column(d, PARTS_OF_ALL / count, table, list[i].column, true);
    }
    free(list);
    return ND_OK;
}

/* A curve "fp8_underflow.input" for each kind of operand, of all linears. */
static void draw_health(drawing *d, const char *measure)
{
    const nd_metrics *m = d->metrics;
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        const char *operand = nd_operand_name((nd_operand_kind)kind);
        char name[ND_COLUMN_NAME];
        nd_curve_begin(&d->curve, PARTS_OF_ALL / (2 * ND_OPERAND_KINDS), d->first, d->last);
        for (int linear = 0; linear < ND_LINEAR_COUNT; linear++) {
            snprintf(name, sizeof name, "fp8_health.%s.%s.%s", operand, nd_linear_name(linear),
                     measure);
            add_column(d, &m->health, nd_metrics_column(m, &m->health, name), true);
        }
        snprintf(name, sizeof name, "fp8_%s.%s", measure, operand);
        end_curve(d, name);
    }
}

/* Tokens and seconds of training at the steps of the run, for the other x axes. */
static void add_axes(drawing *d, json_t **run)
{
    const nd_metrics *m = d->metrics;
    const double *step = nd_metrics_column(m, &m->steps, "step");
    const double *ms = nd_metrics_column(m, &m->steps, "step_ms");
    double seconds = 0;
    nd_curve_begin(&d->curve, d->parts, d->first, d->last);
    for (size_t i = 0; i < m->steps.rows; i++) {
        seconds += isfinite(ms[i]) ? ms[i] / 1e3 : 0;
        nd_curve_add(&d->curve, (int64_t)step[i], seconds);
    }
    nd_curve_end(&d->curve);
    set_list(run, "step", &d->curve, offsetof(nd_curve_part, step));
    set_list(run, "seconds", &d->curve, offsetof(nd_curve_part, mean));
    nd_curve_begin(&d->curve, d->parts, d->first, d->last);
    add_column(d, &m->steps, nd_metrics_column(m, &m->steps, "tokens_seen"), false);
    nd_curve_end(&d->curve);
    set_list(run, "tokens", &d->curve, offsetof(nd_curve_part, mean));
}

nd_status nd_chart_run(const nd_run_view *view, int64_t first, int64_t last, int runs, json_t **out)
{
    const nd_metrics *m = &view->metrics;
    drawing d = {.metrics = m,
                 .first = first,
                 .last = last,
                 .parts = PARTS_OF_ALL / runs - PARTS_OF_RUN,
                 .curves = json_object()};
    nd_status status = ND_OK;
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
        draw_column(&d, d.parts, columns[i].validation ? &m->validations : &m->steps,
                    columns[i].name, columns[i].sparse);
    }
    if (runs == 1) {
        ND_TRY_OUT(draw_named(&d, &m->steps, "source"));
        ND_TRY_OUT(draw_named(&d, &m->validations, "validation_set"));
        draw_health(&d, "underflow");
        draw_health(&d, "saturation");
    }
    *out = json_pack("{s:o, s:I, s:I, s:o}", "name", nd_doc_text(view->name, ""), "first",
                     (json_int_t)nd_metrics_column(m, &m->steps, "step")[0], "last",
                     (json_int_t)nd_run_view_last_step(view), "marks", nd_chart_marks(view));
    add_axes(&d, out);
    nd_json_set(out, "curves", d.curves);
    d.curves = NULL;
out:
    json_decref(d.curves);
    return status;
}

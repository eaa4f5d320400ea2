// SPDX-License-Identifier: Apache-2.0
/* The columns of a run as curves, for the charts of a page, and as a few numbers, for its tables;
 * and the page around all that is known of its runs. The script knows what each is. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/version.h"
#include "runtime/config/config.h"
#include "trainer/precision/precision.h"
#include "trainer/view/page_text.h"
#include "trainer/view/parts.h"

const char nd_page_mark[] = "<!-- ndtrain report -->\n";

/* Reducing. */

void nd_curve_begin(nd_curve *curve, int parts, int64_t first, int64_t last)
{
    int64_t steps = last >= first ? last - first + 1 : 1;
    parts = parts < 1 ? 1 : parts > ND_CURVE_MAX ? ND_CURVE_MAX : parts;
    curve->first = first;
    curve->last = last;
    curve->parts = steps < parts ? (int)steps : parts;
    curve->parts_per_step = (double)curve->parts / (double)steps;
    for (int i = 0; i < curve->parts; i++) {
        curve->part[i] = (nd_curve_part){0, INFINITY, -INFINITY, 0, 0};
    }
}

/* While values are added, step and mean hold sums. */
void nd_curve_add(nd_curve *curve, int64_t step, double value)
{
    if (step < curve->first || step > curve->last || !isfinite(value)) {
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

/* Curves. */

/* An interval takes about 30 bytes of each of nine charts, so that a page of several runs stays
 * below 1 MB. The tables of a run take as much as PARTS_OF_RUN intervals in each chart. */
enum {
    PARTS_OF_ALL = 1200, /* of the curves of a chart together */
    PARTS_OF_RUN = 16,
    MARKS_MAX = 100
};

_Static_assert(PARTS_OF_ALL / ND_PAGE_RUNS_MAX > PARTS_OF_RUN, "curves of many runs have parts");

/* The columns that have a curve of their own. */
static const char *const curve_names[] = {
    "loss",         "validation_loss",   "grad_norm",  "lr",         "tokens_per_second", "step_ms",
    "data_wait_ms", "peak_memory_bytes", "wire_bytes", "slowest_ms", "fastest_ms"};

typedef struct drawing {
    const nd_metrics *metrics;
    int64_t first, last; /* steps of all runs of the page */
    int parts;           /* of a curve */
    nd_curve curve;      /* that is made now */
    json_t *curves;      /* owned; NULL: no memory */
} drawing;

/* A list of one member of all parts, for the key; values with five significant digits. */
static void set_list(json_t **object, const char *key, const nd_curve *c, size_t member)
{
    json_t *list = json_array();
    for (int i = 0; i < c->parts; i++) {
        char text[32];
        double value;
        memcpy(&value, (const char *)&c->part[i] + member, sizeof value);
        snprintf(text, sizeof text, "%.5g", value);
        const double shown = value == floor(value) ? value : strtod(text, NULL);
        nd_json_append(&list, member == offsetof(nd_curve_part, step) ? json_real(value)
                                                                      : nd_number(shown));
    }
    nd_json_set(object, key, list);
}

static void add_column(drawing *d, const nd_column *column)
{
    for (size_t i = 0; i < column->count; i++) {
        nd_curve_add(&d->curve, (int64_t)column->points[i].step, column->points[i].value);
    }
}

static void end_curve(drawing *d, const char *name)
{
    nd_curve_end(&d->curve);
    if (d->curve.parts > 0) {
        json_t *curve = json_object();
        set_list(&curve, "step", &d->curve, offsetof(nd_curve_part, step));
        set_list(&curve, "mean", &d->curve, offsetof(nd_curve_part, mean));
        set_list(&curve, "low", &d->curve, offsetof(nd_curve_part, low));
        set_list(&curve, "high", &d->curve, offsetof(nd_curve_part, high));
        nd_json_set(&d->curves, name, curve);
    }
}

static bool begins_with(const nd_column *column, const char *words)
{
    return strncmp(column->name, words, strlen(words)) == 0;
}

/* All columns of a family; the more there are, the fewer parts has each. */
static void draw_family(drawing *d, const char *family)
{
    const nd_metrics *m = d->metrics;
    int count = 0;
    for (int k = 0; k < m->count; k++) {
        count += begins_with(&m->columns[k], family);
    }
    for (int k = 0; k < m->count; k++) {
        if (begins_with(&m->columns[k], family)) {
            nd_curve_begin(&d->curve, PARTS_OF_ALL / count, d->first, d->last);
            add_column(d, &m->columns[k]);
            end_curve(d, m->columns[k].name);
        }
    }
}

/* A curve "fp8_underflow.input" for each kind of operand, of all linears. */
static void draw_health(drawing *d, const char *measure)
{
    const nd_metrics *m = d->metrics;
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        const char *operand = nd_operand_name((nd_operand_kind)kind);
        char name[ND_COLUMN_NAME];
        snprintf(name, sizeof name, "fp8_health.%s.", operand);
        nd_curve_begin(&d->curve, PARTS_OF_ALL / (2 * ND_OPERAND_KINDS), d->first, d->last);
        for (int k = 0; k < m->count; k++) {
            const char *dot = strrchr(m->columns[k].name, '.');
            if (begins_with(&m->columns[k], name) && strcmp(dot + 1, measure) == 0) {
                add_column(d, &m->columns[k]);
            }
        }
        snprintf(name, sizeof name, "fp8_%s.%s", measure, operand);
        end_curve(d, name);
    }
}

/* Tokens and seconds of training at the steps of the run, for the other x axes. */
static void add_axes(drawing *d, json_t **run)
{
    const nd_column *ms = nd_metrics_column(d->metrics, "step_ms");
    double seconds = 0;
    nd_curve_begin(&d->curve, d->parts, d->first, d->last);
    for (size_t i = 0; i < ms->count; i++) {
        seconds += isfinite(ms->points[i].value) ? ms->points[i].value / 1e3 : 0;
        nd_curve_add(&d->curve, (int64_t)ms->points[i].step, seconds);
    }
    nd_curve_end(&d->curve);
    set_list(run, "step", &d->curve, offsetof(nd_curve_part, step));
    set_list(run, "seconds", &d->curve, offsetof(nd_curve_part, mean));
    nd_curve_begin(&d->curve, d->parts, d->first, d->last);
    add_column(d, nd_metrics_column(d->metrics, "tokens_seen"));
    nd_curve_end(&d->curve);
    set_list(run, "tokens", &d->curve, offsetof(nd_curve_part, mean));
}

/* Adds the curves of one of `runs` runs on a page, whose steps go from `first` to `last`, to the
 * run: {name: {"step", "mean", "low", "high"}, ...} as "curves", "step", "seconds" and "tokens" of
 * the other x axes, and as "skipped" the first 100 skipped steps, for the marks of a chart. */
static void add_curves(const nd_metrics *metrics, int64_t first, int64_t last, int runs,
                       json_t **run)
{
    drawing d = {.metrics = metrics,
                 .first = first,
                 .last = last,
                 .parts = PARTS_OF_ALL / runs - PARTS_OF_RUN,
                 .curves = json_object()};
    for (size_t i = 0; i < sizeof curve_names / sizeof *curve_names; i++) {
        nd_curve_begin(&d.curve, d.parts, first, last);
        add_column(&d, nd_metrics_column(metrics, curve_names[i]));
        end_curve(&d, curve_names[i]);
    }
    if (runs == 1) {
        draw_family(&d, "source_loss.");
        draw_family(&d, "validation_set_loss.");
        draw_health(&d, "underflow");
        draw_health(&d, "saturation");
    }
    add_axes(&d, run);
    nd_json_set(run, "curves", d.curves);
    const nd_column *column = nd_metrics_column(metrics, "skipped");
    json_t *skipped = json_array();
    for (size_t i = 0; i < column->count && i < MARKS_MAX; i++) {
        nd_json_append(&skipped, nd_number(column->points[i].step));
    }
    nd_json_set(run, "skipped", skipped);
}

/* Columns as a few numbers, for its tables. */

enum { WARM_UP = 2, END_MAX = 50, SAMPLE_MAX = 8192 };

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Returns the median of at most SAMPLE_MAX values, which lie evenly among all. */
static double median_of(const nd_column *column)
{
    const size_t from = column->count > WARM_UP ? WARM_UP : 0;
    const size_t every = (column->count - from + SAMPLE_MAX - 1) / SAMPLE_MAX;
    double sample[SAMPLE_MAX];
    size_t count = 0;
    for (size_t i = from; i < column->count; i += every) {
        if (isfinite(column->points[i].value)) {
            sample[count++] = column->points[i].value;
        }
    }
    qsort(sample, count, sizeof *sample, by_value);
    return count > 0 ? (sample[(count - 1) / 2] + sample[count / 2]) / 2 : NAN;
}

/* Losses of joined and of separate documents do not compare: those of validations count from the
 * last change on. */
static size_t first_comparable(const nd_metrics *m, const nd_column *column)
{
    const nd_column *lengths = nd_metrics_column(m, "separate_length");
    size_t from = column->count;
    if (strcmp(column->name, "validation_loss") != 0 &&
        !begins_with(column, "validation_set_loss.")) {
        return 0;
    }
    const double last = nd_column_at(lengths, column->points[from - 1].step);
    while (from > 0) {
        const double length = nd_column_at(lengths, column->points[from - 1].step);
        if (length != last && !(isnan(length) && isnan(last))) {
            break;
        }
        from--;
    }
    return from;
}

/* The layer of the largest value, of a column with such a companion; NaN. */
static double layer_at(const nd_metrics *m, const nd_column *column, double step)
{
    char name[ND_COLUMN_NAME + 8];
    snprintf(name, sizeof name, "%s_layer", column->name);
    return begins_with(column, "fp8_health.") ? nd_column_at(nd_metrics_column(m, name), step)
                                              : NAN;
}

static json_t *sum_up(const nd_metrics *m, const nd_column *column)
{
    const size_t tenth = column->count / 10, all = column->count;
    const size_t from = first_comparable(m, column);
    const size_t tail = tenth < 1 ? 1 : tenth > END_MAX ? END_MAX : tenth;
    nd_point first = {NAN, NAN}, last = first, least = first, largest = first;
    double sum = 0, end_sum = 0;
    int64_t count = 0, end_count = 0;
    for (size_t i = from; i < all; i++) {
        const nd_point p = column->points[i];
        if (!isfinite(p.value)) {
            continue;
        }
        first = isnan(first.value) ? p : first;
        last = p;
        least = p.value >= least.value ? least : p;
        largest = p.value <= largest.value ? largest : p;
        sum += p.value;
        count++;
        end_sum += i + tail >= all ? p.value : 0;
        end_count += i + tail >= all;
    }
    const struct {
        const char *key;
        double value;
    } numbers[] = {{"count", (double)count},
                   {"lost", (double)((int64_t)(all - from) - count)},
                   {"sum", sum},
                   {"mean", sum / (double)count},
                   {"first", first.value},
                   {"last", last.value},
                   {"least", least.value},
                   {"least_step", least.step},
                   {"largest", largest.value},
                   {"largest_step", largest.step},
                   {"median", median_of(column)},
                   {"end", end_sum / (double)end_count},
                   {"layer", layer_at(m, column, largest.step)}};
    json_t *object = json_object();
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (isfinite(numbers[i].value)) {
            nd_json_set(&object, numbers[i].key, nd_number(numbers[i].value));
        }
    }
    return object;
}

json_t *nd_columns_sum_up(const nd_metrics *m)
{
    json_t *columns = json_object();
    for (int k = 0; k < m->count; k++) {
        const nd_column *column = &m->columns[k];
        const char *end = column->name + strlen(column->name);
        const bool layer = begins_with(column, "fp8_health.") && end - column->name > 6 &&
                           strcmp(end - 6, "_layer") == 0;
        if (column->count > 0 && !layer) {
            nd_json_set(&columns, column->name, sum_up(m, column));
        }
    }
    return columns;
}

/* A run. */

enum { EVENTS_MAX = 200, EVENTS_OF_ALL = 400 }; /* of a kind, in one run and in all */

/* The last events of each kind, the newest first, and under "event_counts" how many there are. */
static void add_events(const nd_run_view *run, int runs, json_t **out)
{
    const json_int_t share = EVENTS_OF_ALL / runs, most = share < EVENTS_MAX ? share : EVENTS_MAX;
    json_t *counts = json_object(), *events = json_array();
    for (size_t i = json_array_size(run->metrics.events); i > 0; i--) {
        json_t *event = json_array_get(run->metrics.events, i - 1);
        const char *kind = nd_json_words(event, "event");
        const json_int_t count = nd_json_whole(counts, kind) + 1;
        nd_json_set(&counts, kind, json_integer(count));
        if (count <= most) {
            nd_json_append(&events, json_incref(event));
        }
    }
    nd_json_set(out, "events", events);
    nd_json_set(out, "event_counts", counts);
}

/* A copy in which whole numbers that a script would round are texts. NULL: no memory. */
static json_t *exact(json_t *value)
{
    const json_int_t most = (json_int_t)1 << 53, number = json_integer_value(value);
    const char *key;
    char text[32];
    size_t i;
    if (!json_is_object(value) && !json_is_array(value)) {
        snprintf(text, sizeof text, "%lld", (long long)number);
        return number > most || number < -most ? json_string(text) : json_incref(value);
    }
    json_t *copy = json_is_array(value) ? json_array() : json_object(), *member;
    json_object_foreach(value, key, member)
    {
        nd_json_set(&copy, key, exact(member));
    }
    json_array_foreach(value, i, member)
    {
        nd_json_append(&copy, exact(member));
    }
    return copy;
}

static json_t *saved_json(const nd_run_view *run)
{
    json_t *list = json_array();
    for (int i = 0; i < run->saved_count; i++) {
        const nd_saved *s = &run->saved[i];
        char time[ND_CLOCK_UTC_MAX];
        nd_json_append(&list,
                       json_pack("{s:o, s:s, s:o, s:I, s:I, s:s}", "name", nd_json_string(s->name),
                                 "state", s->state, "why", nd_json_string(s->why), "step",
                                 (json_int_t)s->step, "bytes", (json_int_t)s->bytes, "time",
                                 nd_clock_utc(s->time, time)));
    }
    return list;
}

static nd_status make_run(const nd_run_view *run, int64_t first, int64_t last, int runs,
                          json_t **out)
{
    static const char *const moods[] = {[ND_RUN_FINISHED] = "good", [ND_RUN_STOPPED_EARLY] = "good",
                                        [ND_RUN_STOPPED] = "",      [ND_RUN_FAILED] = "bad",
                                        [ND_RUN_RECENT] = "",       [ND_RUN_ENDED_EARLY] = "bad",
                                        [ND_RUN_UNKNOWN] = ""};
    const nd_column *ms = nd_metrics_column(&run->metrics, "step_ms");
    const double from = nd_json_number(run->trace, "first_step");
    const double behind = from + nd_json_number(run->trace, "steps");
    char verdict[ND_VERDICT_MAX];
    double traced = 0; /* the time of the steps that the trace covers */
    for (size_t i = 0; i < ms->count; i++) {
        traced +=
            ms->points[i].step >= from && ms->points[i].step < behind ? ms->points[i].value : 0;
    }
    *out = json_pack(
        "{s:o, s:o, s:s, s:s, s:o, s:o, s:I, s:o, s:O?}", "name", nd_json_string(run->name),
        "folder", nd_json_string(run->folder), "verdict", nd_run_verdict(run, verdict), "mood",
        moods[run->end], "first", nd_number(ms->points[0].step), "last",
        nd_number(ms->points[ms->count - 1].step), "wanted", (json_int_t)run->steps_wanted,
        "traced_ms", nd_number(traced), "trace", run->trace);
    nd_json_set(out, "record", run->record ? exact(run->record) : json_null());
    ND_TRY(nd_ranks_add(run, out));
    nd_json_set(out, "saved", saved_json(run));
    nd_json_set(out, "columns", nd_columns_sum_up(&run->metrics));
    add_events(run, runs, out);
    add_curves(&run->metrics, first, last, runs, out);
    return ND_OK;
}

static nd_status make_runs(const nd_run_view *runs, int count, json_t **out)
{
    double first = INFINITY, last = 0;
    *out = json_array();
    for (int i = 0; i < count; i++) {
        const nd_column *ms = nd_metrics_column(&runs[i].metrics, "step_ms");
        first = fmin(first, ms->points[0].step);
        last = fmax(last, ms->points[ms->count - 1].step);
    }
    for (int i = 0; i < count; i++) {
        json_t *run = NULL;
        const nd_status status = make_run(&runs[i], (int64_t)first, (int64_t)last, count, &run);
        nd_json_append(out, run);
        ND_TRY(status);
    }
    return ND_OK;
}

static void add_default(void *context, const char *key, const char *value, bool job_scoped)
{
    json_t *typed = json_loads(value, JSON_DECODE_ANY, NULL); /* as run.json has it */
    (void)job_scoped;
    nd_json_set(context, key, typed ? typed : nd_json_string(value));
}

/* Writes "<" as \u003c, since it could end the element script; JSON has it in texts only. */
static nd_status write_json(const json_t *data, FILE *out)
{
    char *text = nd_json_text(data, JSON_COMPACT | JSON_REAL_PRECISION(10));
    if (!text) {
        return nd_fail_memory("the report");
    }
    for (const char *c = text; *c; c++) {
        fputs(*c == '<' ? "\\u003c" : (char[]){*c, '\0'}, out);
    }
    free(text);
    return ND_OK;
}

nd_status nd_page_write(const nd_run_view *runs, int count, int64_t now, FILE *out)
{
    char time[ND_CLOCK_UTC_MAX];
    json_t *data = json_pack("{s:s, s:s}", "version", ND_VERSION, "time", nd_clock_utc(now, time));
    json_t *list = NULL, *defaults = json_object(); /* {"train.steps": value, ...} */
    nd_config config = {0};
    nd_status status = ND_OK;
    ND_ASSERT(count >= 1 && count <= ND_PAGE_RUNS_MAX);
    ND_TRY_OUT(make_runs(runs, count, &list));
    ND_TRY_OUT(nd_config_init(&config));
    ND_TRY_OUT(nd_config_each(&config, add_default, &defaults));
    nd_json_set(&data, "runs", json_incref(list));
    nd_json_set(&data, "defaults", json_incref(defaults));
    fputs(nd_page_mark, out);
    fputs(page_before, out);
    status = write_json(data, out);
    fputs(page_after, out);
out:
    nd_config_fini(&config);
    json_decref(list);
    json_decref(defaults);
    json_decref(data);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/page.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/fsio.h"
#include "runtime/device/trace.h"
#include "trainer/report/report.h"
#include "trainer/view/curve.h"
#include "trainer/view/waits.h"

enum { EVENTS_MAX = 200, EVENTS_OPEN = 20, BUFFERS_MAX = 16, RANKS_MAX = 64, SHORT = 64 };

/* Figures of one run or several. */

typedef enum figure_kind { FIGURE_NUMBER, FIGURE_BYTES, FIGURE_SECONDS, FIGURE_SHARE } figure_kind;

typedef struct figure {
    const char *name;
    size_t offset; /* of a double in nd_run_figures */
    figure_kind kind;
    bool compares; /* a difference to the first run says something */
} figure;

#define FIGURE(name, member, kind, compares)                                                       \
    {                                                                                              \
        name, offsetof(nd_run_figures, member), kind, compares                                     \
    }
static const figure figures[] = {
    FIGURE("loss of the first step", first_loss, FIGURE_NUMBER, false),
    FIGURE("loss at the end, mean of the last steps", end_loss, FIGURE_NUMBER, true),
    FIGURE("validation loss, last", last_validation, FIGURE_NUMBER, true),
    FIGURE("validation loss, best", best_validation, FIGURE_NUMBER, true),
    FIGURE("tokens a second, median", tokens_per_second, FIGURE_NUMBER, true),
    FIGURE("milliseconds of a step, median", step_ms, FIGURE_NUMBER, true),
    FIGURE("TFLOP/s of a worker, median", tflops, FIGURE_NUMBER, true),
    FIGURE("share of the time spent waiting for data", data_wait_share, FIGURE_SHARE, false),
    FIGURE("bytes that rank 0 sent in a step, median", wire_bytes, FIGURE_BYTES, true),
    FIGURE("peak memory of rank 0", peak_bytes, FIGURE_BYTES, true),
    FIGURE("planned memory of rank 0", planned_bytes, FIGURE_BYTES, true),
    FIGURE("parameters", parameters, FIGURE_NUMBER, false),
    FIGURE("tokens seen", tokens_seen, FIGURE_NUMBER, false),
    FIGURE("time in steps", training_seconds, FIGURE_SECONDS, false),
};

static double figure_of(const nd_run_view *run, const figure *f)
{
    double value;
    memcpy(&value, (const char *)&run->figures + f->offset, sizeof value);
    return value;
}

static const char *format_figure(char text[SHORT], const figure *f, double value)
{
    if (!isfinite(value)) {
        return "-";
    }
    switch (f->kind) {
    case FIGURE_NUMBER:
        return nd_figure(text, SHORT, value, 5);
    case FIGURE_BYTES:
        return nd_bytes_format(text, SHORT, value);
    case FIGURE_SECONDS:
        return nd_duration_format(text, SHORT, value);
    case FIGURE_SHARE:
        snprintf(text, SHORT, "%.1f %%", value * 100);
        return text;
    }
    return "-";
}

static void write_figure(nd_doc *doc, const figure *f, const nd_run_view *runs, int count)
{
    double first = figure_of(&runs[0], f);
    char text[SHORT];
    nd_doc_row_begin(doc);
    nd_doc_cell(doc, f->name);
    for (int i = 0; i < count; i++) {
        double value = figure_of(&runs[i], f);
        const char *shown = format_figure(text, f, value);
        if (i > 0 && f->compares && isfinite(value) && isfinite(first) && first != 0) {
            nd_doc_cellf(doc, "%s (%+.2f %%)", shown, (value / first - 1) * 100);
        } else {
            nd_doc_cell(doc, shown);
        }
    }
    nd_doc_row_end(doc);
}

static void write_figures(nd_doc *doc, const nd_run_view *runs, int count)
{
    const char *heads[ND_PAGE_RUNS_MAX + 1] = {""};
    for (int i = 0; i < count; i++) {
        heads[i + 1] = runs[i].name;
    }
    nd_doc_heading(doc, 2, count > 1 ? "Figures; in brackets against the first run" : "Figures");
    nd_doc_table_begin(doc, false, count + 1, heads);
    for (size_t k = 0; k < sizeof figures / sizeof *figures; k++) {
        bool known = false;
        for (int i = 0; i < count; i++) {
            known |= isfinite(figure_of(&runs[i], &figures[k]));
        }
        if (known) {
            write_figure(doc, &figures[k], runs, count);
        }
    }
    nd_doc_table_end(doc);
}

static const json_t *setting_of(const nd_run_view *run, const char *key)
{
    return json_object_get(json_object_get(run->record, "config"), key);
}

static bool differs(const char *key, const nd_run_view *runs, int count)
{
    for (int i = 1; i < count; i++) {
        if (runs[i].record && !json_equal(setting_of(&runs[0], key), setting_of(&runs[i], key))) {
            return true;
        }
    }
    return false;
}

static nd_status write_difference(nd_doc *doc, const char *key, const nd_run_view *runs, int count)
{
    nd_doc_row_begin(doc);
    nd_doc_cell(doc, key);
    for (int i = 0; i < count; i++) {
        char *text = NULL;
        ND_TRY(nd_run_view_text(setting_of(&runs[i], key), &text));
        nd_doc_cell(doc, text);
        free(text);
    }
    nd_doc_row_end(doc);
    return ND_OK;
}

/* Settings of the first run with another value in some other one. */
static nd_status write_differences(nd_doc *doc, const nd_run_view *runs, int count)
{
    const char *heads[ND_PAGE_RUNS_MAX + 1] = {"setting"}, *key;
    json_t *config = json_object_get(runs[0].record, "config"), *value;
    for (int i = 0; i < count; i++) {
        heads[i + 1] = runs[i].name;
    }
    nd_doc_heading(doc, 2, "Settings that differ between the runs");
    nd_doc_table_begin(doc, true, count + 1, heads);
    json_object_foreach(config, key, value)
    {
        if (differs(key, runs, count)) {
            ND_TRY(write_difference(doc, key, runs, count));
        }
    }
    nd_doc_table_end(doc);
    return ND_OK;
}

nd_status nd_sections_compare(nd_doc *doc, const nd_run_view *runs, int count)
{
    write_figures(doc, runs, count);
    return count > 1 && runs[0].record ? write_differences(doc, runs, count) : ND_OK;
}

/* What deserves attention. */
static void write_notes(nd_doc *doc, const nd_run_view *run)
{
    const nd_run_figures *f = &run->figures;
    const struct {
        int64_t count;
        const char *text;
    } notes[] = {
        {f->not_finite, "steps whose loss was not finite"},
        {f->skipped, "steps that were skipped, as train.nonfinite asks"},
        {f->rewinds, "returns to a checkpoint because a step was not finite or a spike"},
        {f->restarts, "times that the run was resumed"},
        {f->failed_saves, "checkpoints that could not be written"},
    };
    for (size_t i = 0; i < sizeof notes / sizeof *notes; i++) {
        if (notes[i].count > 0) {
            nd_doc_say(doc, "%s: %lld", notes[i].text, (long long)notes[i].count);
        }
    }
    if (f->data_wait_share > 0.05) {
        nd_doc_say(doc,
                   "%.1f %% of the time was spent waiting for data: the file system, or the "
                   "encoding of text, is slower than the steps.",
                   f->data_wait_share * 100);
    }
    if (f->last_validation > f->best_validation * 1.01) {
        nd_doc_say(doc,
                   "The validation loss was lowest after step %lld (%.4f) and has risen since "
                   "(%.4f).",
                   (long long)f->best_validation_step, f->best_validation, f->last_validation);
    }
    if (run->metrics.half_line) {
        nd_doc_say(doc, "The last line of metrics.jsonl is incomplete and was left out.");
    }
}

/* Where the time went. */

static double trace_number(const json_t *trace, const char *kind, const char *unit)
{
    char key[SHORT];
    snprintf(key, sizeof key, "%s_%s", kind, unit);
    return json_number_value(json_object_get(trace, key));
}

/* A step, or a number of them; 0 for what is none. */
static int64_t trace_count(const json_t *trace, const char *key)
{
    double value = json_number_value(json_object_get(trace, key));
    return value > 0 && value < 1e12 ? (int64_t)value : 0;
}

/* Milliseconds of the steps that the trace covers, and of the validations after them. */
static double traced_ms(const nd_metrics *m, int64_t first, int64_t steps)
{
    double sum = 0;
    for (size_t i = 0; i < m->row_count; i++) {
        double ms = (double)m->rows[i].value[ND_METRIC_STEP_MS];
        bool inside = m->rows[i].step >= first && m->rows[i].step < first + steps;
        sum += inside && isfinite(ms) ? ms : 0;
    }
    for (size_t i = 0; i < m->validation_count; i++) {
        const nd_validation_row *v = &m->validations[i];
        /* The trace begins anew behind the step before, ahead of the validation that follows it. */
        bool inside = v->step >= first - 1 && v->step < first + steps;
        sum += inside && isfinite(v->ms) ? v->ms : 0;
    }
    return sum;
}

static void write_time_row(nd_doc *doc, const char *name, double ms, double steps, double all)
{
    char text[SHORT];
    nd_doc_row_begin(doc);
    nd_doc_cell(doc, name);
    nd_doc_cell(doc, nd_figure(text, sizeof text, ms / steps, 4));
    nd_doc_cell_share(doc, ms / all);
    nd_doc_row_end(doc);
}

static void write_time(nd_doc *doc, const nd_run_view *run)
{
    static const char *const heads[] = {"work", "ms of a step", "share"};
    int64_t first = trace_count(run->trace, "first_step");
    int64_t steps = trace_count(run->trace, "steps");
    double counted = 0, all = traced_ms(&run->metrics, first, steps);
    for (nd_trace_kind k = 0; k < ND_TRACE_COUNT; k++) {
        counted += trace_number(run->trace, nd_trace_name(k), "ms");
    }
    all = all > counted ? all : counted;
    if (steps <= 0 || !(all > 0)) {
        return;
    }
    nd_doc_heading(doc, 2, "Where the time of rank 0 went");
    nd_doc_say(doc,
               "Steps %lld to %lld, validations included. Communication is the time in calls: "
               "on a CPU also the wait for slower ranks.",
               (long long)first, (long long)(first + steps - 1));
    nd_doc_table_begin(doc, false, 3, heads);
    for (nd_trace_kind k = 0; k < ND_TRACE_COUNT; k++) {
        double ms = trace_number(run->trace, nd_trace_name(k), "ms");
        if (ms > 0) {
            write_time_row(doc, nd_trace_name(k), ms, (double)steps, all);
        }
    }
    write_time_row(doc, "everything else", all - counted, (double)steps, all);
    nd_doc_table_end(doc);
}

static void write_wait_row(nd_doc *doc, int rank, const nd_rank_waits *w, double steps)
{
    nd_doc_row_begin(doc);
    nd_doc_cellf(doc, "rank %d", rank);
    nd_doc_cellf(doc, "%.3f", w->communication_ms / steps);
    nd_doc_cellf(doc, "%.3f", w->waited_ms / steps);
    nd_doc_cellf(doc, "%.3f", w->caused_ms / steps);
    nd_doc_cellf(doc, "%lld", (long long)w->last);
    nd_doc_row_end(doc);
}

/* The rank that others waited for longest. */
static int slowest_rank(const nd_waits *waits)
{
    int slowest = 0;
    for (int i = 1; i < waits->count; i++) {
        slowest = waits->ranks[i].caused_ms > waits->ranks[slowest].caused_ms ? i : slowest;
    }
    return slowest;
}

static void write_wait_table(nd_doc *doc, const nd_waits *waits)
{
    static const char *const heads[] = {"", "communication, ms of a step",
                                        "of it waiting for others", "others waiting for it",
                                        "collectives it entered last"};
    int slowest = slowest_rank(waits), count = waits->count < RANKS_MAX ? waits->count : RANKS_MAX;
    double steps = waits->steps > 0 ? (double)waits->steps : 1;
    nd_doc_heading(doc, 2, "Who waited for whom");
    nd_doc_say(doc,
               "From profile.json: %lld steps, %lld collectives. Others waited longest for rank "
               "%d: %.3f ms of a step.",
               (long long)waits->steps, (long long)waits->collectives, slowest,
               waits->ranks[slowest].caused_ms / steps);
    nd_doc_table_begin(doc, false, 5, heads);
    for (int i = 0; i < count; i++) {
        write_wait_row(doc, i, &waits->ranks[i], steps);
    }
    if (slowest >= count) {
        write_wait_row(doc, slowest, &waits->ranks[slowest], steps);
    }
    nd_doc_table_end(doc);
    if (waits->count > count) {
        nd_doc_say(doc, "The first %d of %d ranks, and the slowest.", count, waits->count);
    }
}

static nd_status write_waits(nd_doc *doc, const nd_run_view *run)
{
    nd_mesh mesh;
    nd_waits waits = {0};
    if (!run->profile || !nd_run_view_mesh(run, &mesh)) {
        return ND_OK;
    }
    ND_TRY(nd_waits_read(run->profile, &mesh, &waits));
    if (waits.collectives > 0) {
        write_wait_table(doc, &waits);
    }
    nd_waits_fini(&waits);
    return ND_OK;
}

static void write_wire(nd_doc *doc, const nd_run_view *run)
{
    static const char *const heads[] = {"kind", "of a step, mean", "share"};
    const nd_metrics *m = &run->metrics;
    double sums[ND_TRAFFIC_COUNT] = {0}, all = 0;
    for (size_t i = 0; i < m->row_count; i++) {
        for (int k = 0; k < ND_TRAFFIC_COUNT; k++) {
            double bytes = (double)m->rows[i].value[ND_METRIC_WIRE_KINDS + k];
            sums[k] += isfinite(bytes) ? bytes : 0;
            all += isfinite(bytes) ? bytes : 0;
        }
    }
    if (!(all > 0)) {
        return;
    }
    nd_doc_heading(doc, 2, "Bytes on the wire, sent by rank 0");
    nd_doc_table_begin(doc, false, 3, heads);
    for (nd_traffic_kind k = 0; k < ND_TRAFFIC_COUNT; k++) {
        char text[SHORT];
        nd_doc_row_begin(doc);
        nd_doc_cell(doc, nd_traffic_name(k));
        nd_doc_cell(doc, nd_bytes_format(text, sizeof text, sums[k] / (double)m->row_count));
        nd_doc_cell_share(doc, sums[k] / all);
        nd_doc_row_end(doc);
    }
    nd_doc_table_end(doc);
}

/* Memory. */

typedef struct buffer {
    const char *name;
    double bytes;
} buffer;

static int by_bytes(const void *a, const void *b)
{
    const buffer *x = a, *y = b;
    return x->bytes < y->bytes ? 1 : x->bytes > y->bytes ? -1 : strcmp(x->name, y->name);
}

static nd_status write_memory(nd_doc *doc, const nd_run_view *run)
{
    static const char *const heads[] = {"buffer", "bytes", "share"};
    json_t *plan = json_object_get(run->record, "memory_plan_bytes"), *value;
    const char *key;
    buffer *list = NULL;
    int count = 0;
    double all = 0;
    if (json_object_size(plan) == 0) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(json_object_size(plan), &list));
    json_object_foreach(plan, key, value)
    {
        list[count++] = (buffer){key, json_number_value(value)};
        all += json_number_value(value);
    }
    qsort(list, (size_t)count, sizeof *list, by_bytes);
    nd_doc_heading(doc, 2, "Planned memory of rank 0, largest buffers");
    nd_doc_table_begin(doc, false, 3, heads);
    for (int i = 0; i < count && i < BUFFERS_MAX; i++) {
        char text[SHORT];
        nd_doc_row_begin(doc);
        nd_doc_cell(doc, list[i].name);
        nd_doc_cell(doc, nd_bytes_format(text, sizeof text, list[i].bytes));
        nd_doc_cell_share(doc, all > 0 ? list[i].bytes / all : 0);
        nd_doc_row_end(doc);
    }
    nd_doc_table_end(doc);
    free(list);
    return ND_OK;
}

/* Events and checkpoints. */

static void write_event(nd_doc *doc, const nd_metric_event *e)
{
    char bytes[SHORT];
    nd_doc_row_begin(doc);
    nd_doc_cellf(doc, "%lld", (long long)e->step);
    nd_doc_cell(doc, e->name);
    switch (e->kind) {
    case ND_METRIC_EVENT_CHECKPOINT:
        nd_doc_cellf(doc, "%s; %s, durable after %.2f s, steps waited %.0f ms", e->text,
                     nd_bytes_format(bytes, sizeof bytes, e->bytes), e->save_ms / 1e3,
                     e->blocked_ms);
        break;
    case ND_METRIC_EVENT_RESUMED:
        if (e->rewound_from > 0) {
            nd_doc_cellf(doc, "went back from step %lld: %s; %lld samples are passed over",
                         (long long)e->rewound_from, e->text, (long long)e->passed_over_samples);
        } else {
            nd_doc_cellf(doc, "loaded in %.2f s, restart %lld", e->load_ms / 1e3,
                         (long long)e->restart);
        }
        break;
    case ND_METRIC_EVENT_CHECKPOINT_FAILED:
    case ND_METRIC_EVENT_EARLY_STOPPED:
    case ND_METRIC_EVENT_OTHER:
        nd_doc_cell(doc, e->text);
        break;
    }
    nd_doc_row_end(doc);
}

static void write_events(nd_doc *doc, const nd_metrics *m)
{
    static const char *const heads[] = {"after step", "event", ""};
    size_t from = m->event_count > EVENTS_MAX ? m->event_count - EVENTS_MAX : 0;
    bool folded = m->event_count > EVENTS_OPEN;
    if (m->event_count == 0) {
        return;
    }
    nd_doc_heading(doc, 2, "Events");
    if (from > 0) {
        nd_doc_say(doc, "The last %d of %zu.", EVENTS_MAX, m->event_count);
    }
    if (folded) {
        nd_doc_fold_begin(doc, "Show them");
    }
    nd_doc_table_begin(doc, true, 3, heads);
    for (size_t i = from; i < m->event_count; i++) {
        write_event(doc, &m->events[i]);
    }
    nd_doc_table_end(doc);
    if (folded) {
        nd_doc_fold_end(doc);
    }
}

static void write_saved(nd_doc *doc, const nd_run_view *run)
{
    static const char *const heads[] = {"folder", "state", "size", "saved"};
    if (run->saved_count == 0) {
        return;
    }
    nd_doc_heading(doc, 2, "Checkpoints in the folder");
    nd_doc_table_begin(doc, true, 4, heads);
    for (int i = 0; i < run->saved_count; i++) {
        const nd_saved *s = &run->saved[i];
        char bytes[SHORT], time[ND_CLOCK_UTC_MAX];
        nd_doc_row_begin(doc);
        nd_doc_cell(doc, s->name);
        nd_doc_cellf(doc, "%s%s%s", nd_saved_state_name(s->state), s->why[0] ? ": " : "", s->why);
        nd_doc_cell(doc, nd_bytes_format(bytes, sizeof bytes, (double)s->bytes));
        nd_doc_cell(doc, nd_clock_utc(s->time, time));
        nd_doc_row_end(doc);
    }
    nd_doc_table_end(doc);
}

/* Settings and surroundings. */

typedef struct setting_table {
    nd_doc *doc;
    bool differing; /* the table of those that do */
    int count;
} setting_table;

static nd_status write_setting(void *context, const char *key, const char *value, const char *was,
                               bool is_other)
{
    setting_table *t = context;
    if (is_other != t->differing) {
        return ND_OK;
    }
    t->count++;
    nd_doc_row_begin(t->doc);
    nd_doc_cell(t->doc, key);
    nd_doc_cell(t->doc, value);
    if (t->differing) {
        nd_doc_cell(t->doc, was);
    }
    nd_doc_row_end(t->doc);
    return ND_OK;
}

static nd_status write_settings(nd_doc *doc, const nd_run_view *run)
{
    static const char *const heads[] = {"setting", "value", "default"};
    setting_table changed = {doc, true, 0}, others = {doc, false, 0};
    nd_doc_heading(doc, 2, "Settings that differ from their defaults");
    nd_doc_table_begin(doc, true, 3, heads);
    ND_TRY(nd_run_view_each_setting(run, write_setting, &changed));
    nd_doc_table_end(doc);
    nd_doc_fold_begin(doc, "Settings with their defaults");
    nd_doc_table_begin(doc, true, 2, heads);
    ND_TRY(nd_run_view_each_setting(run, write_setting, &others));
    nd_doc_table_end(doc);
    nd_doc_fold_end(doc);
    return ND_OK;
}

static nd_status write_command(nd_doc *doc, const json_t *command)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (!out) {
        return nd_fail_memory("the command of a run");
    }
    for (size_t i = 0; i < json_array_size(command); i++) {
        const char *word = json_string_value(json_array_get(command, i));
        fprintf(out, "%s%s", i > 0 ? " " : "", word ? word : "");
    }
    if (fclose(out) != 0) {
        free(text);
        return nd_fail_memory("the command of a run");
    }
    nd_doc_code(doc, text);
    free(text);
    return ND_OK;
}

static nd_status write_surroundings(nd_doc *doc, const nd_run_view *run)
{
    static const char *const parts[] = {"mesh", "job", "machine", "libraries"};
    static const char *const heads[] = {"", "value"};
    const char *key;
    json_t *value;
    nd_doc_heading(doc, 2, "Surroundings");
    nd_doc_table_begin(doc, true, 2, heads);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        json_object_foreach(json_object_get(run->record, parts[i]), key, value)
        {
            char *text = NULL;
            ND_TRY(nd_run_view_text(value, &text));
            nd_doc_row_begin(doc);
            nd_doc_cellf(doc, "%s %s", parts[i], key);
            nd_doc_cell(doc, text);
            nd_doc_row_end(doc);
            free(text);
        }
    }
    nd_doc_table_end(doc);
    const json_t *command = json_object_get(run->record, "command");
    return json_array_size(command) > 0 ? write_command(doc, command) : ND_OK;
}

nd_status nd_sections_run(nd_doc *doc, const nd_run_view *run)
{
    write_notes(doc, run);
    if (run->trace) {
        write_time(doc, run);
    }
    ND_TRY(write_waits(doc, run));
    write_wire(doc, run);
    ND_TRY(write_memory(doc, run));
    write_events(doc, &run->metrics);
    write_saved(doc, run);
    if (!run->record) {
        nd_doc_say(doc, "The folder has no run.json, so nothing is known of the settings.");
        return ND_OK;
    }
    ND_TRY(write_settings(doc, run));
    return write_surroundings(doc, run);
}

// SPDX-License-Identifier: Apache-2.0
/* Figures of one run or of several side by side, and the settings in which they differ. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/report/report.h"
#include "trainer/view/parts.h"

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
    FIGURE("labels seen", tokens_seen, FIGURE_NUMBER, false),
    FIGURE("time in steps", training_seconds, FIGURE_SECONDS, false),
};

static double figure_of(const nd_run_view *run, const figure *f)
{
    double value;
    memcpy(&value, (const char *)&run->figures + f->offset, sizeof value);
    return value;
}

static void format_figure(char text[ND_SHORT], const figure *f, double value)
{
    if (f->kind == FIGURE_NUMBER || !isfinite(value)) {
        nd_figure(text, ND_SHORT, value, 5);
    } else if (f->kind == FIGURE_BYTES) {
        nd_bytes_format(text, ND_SHORT, value);
    } else if (f->kind == FIGURE_SECONDS) {
        nd_duration_format(text, ND_SHORT, value);
    } else {
        snprintf(text, ND_SHORT, "%.1f %%", value * 100);
    }
}

/* The table has a column for each run. */
static void begin_table(nd_doc *doc, bool words, const char *first, const nd_run_view *runs,
                        int count)
{
    nd_doc_table(doc, words, first);
    for (int i = 0; i < count; i++) {
        nd_doc_head(doc, runs[i].name);
    }
}

static void write_figure(nd_doc *doc, const figure *f, const nd_run_view *runs, int count)
{
    const double first = figure_of(&runs[0], f);
    json_t *cells[ND_PAGE_RUNS_MAX + 1] = {nd_cell("%s", f->name)};
    for (int i = 0; i < count; i++) {
        const double value = figure_of(&runs[i], f);
        char text[ND_SHORT];
        format_figure(text, f, value);
        cells[i + 1] = i > 0 && f->compares && isfinite(value / first)
                           ? nd_cell("%s (%+.2f %%)", text, (value / first - 1) * 100)
                           : nd_cell("%s", text);
    }
    nd_doc_row(doc, cells, (size_t)count + 1);
}

static void write_figures(nd_doc *doc, const nd_run_view *runs, int count)
{
    nd_doc_add(doc, "heading",
               count > 1 ? "Figures; in brackets against the first run" : "Figures");
    begin_table(doc, false, "", runs, count);
    for (size_t k = 0; k < sizeof figures / sizeof *figures; k++) {
        bool known = false;
        for (int i = 0; i < count; i++) {
            known |= isfinite(figure_of(&runs[i], &figures[k]));
        }
        if (known) {
            write_figure(doc, &figures[k], runs, count);
        }
    }
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

/* Settings of the first run with another value in some other one. */
static void write_differences(nd_doc *doc, const nd_run_view *runs, int count)
{
    const char *key;
    json_t *value;
    nd_doc_add(doc, "heading", "Settings that differ between the runs");
    begin_table(doc, true, "setting", runs, count);
    json_object_foreach(json_object_get(runs[0].record, "config"), key, value)
    {
        json_t *cells[ND_PAGE_RUNS_MAX + 1] = {nd_cell("%s", key)};
        if (!differs(key, runs, count)) {
            json_decref(cells[0]);
            continue;
        }
        for (int i = 0; i < count; i++) {
            cells[i + 1] = nd_section_value(setting_of(&runs[i], key));
        }
        nd_doc_row(doc, cells, (size_t)count + 1);
    }
}

void nd_section_compare(nd_doc *doc, const nd_run_view *runs, int count)
{
    write_figures(doc, runs, count);
    if (count > 1 && runs[0].record) {
        write_differences(doc, runs, count);
    }
}

/* Paragraphs about what deserves attention. */
void nd_section_notes(nd_doc *doc, const nd_run_view *run)
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
        {f->lost_lines,
         "lines of metrics.jsonl that were lost, as the disk was full or failed; curves are "
         "straight there, and tables do without them"},
        {f->lost_tracked, "records that TensorBoard or another tracker did not take"},
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

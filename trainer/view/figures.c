// SPDX-License-Identifier: Apache-2.0
/* Figures of one run or of several side by side, and the settings in which they differ. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/report/report.h"
#include "trainer/view/curve.h"
#include "trainer/view/page.h"
#include "trainer/view/sections.h"

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

static const char *format_figure(char text[ND_SHORT], const figure *f, double value)
{
    if (!isfinite(value)) {
        return "-";
    }
    switch (f->kind) {
    case FIGURE_NUMBER:
        return nd_figure(text, ND_SHORT, value, 5);
    case FIGURE_BYTES:
        return nd_bytes_format(text, ND_SHORT, value);
    case FIGURE_SECONDS:
        return nd_duration_format(text, ND_SHORT, value);
    case FIGURE_SHARE:
        snprintf(text, ND_SHORT, "%.1f %%", value * 100);
        return text;
    }
    return "-";
}

static void write_figure(nd_doc *doc, const figure *f, const nd_run_view *runs, int count)
{
    double first = figure_of(&runs[0], f);
    char text[ND_SHORT];
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

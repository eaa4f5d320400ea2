// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/page.h"

#include <math.h>
#include <openssl/evp.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/version.h"
#include "trainer/view/chart.h"
#include "trainer/view/page_assets.h"

const char nd_page_mark[] = "<!-- ndtrain report -->\n";

/* PARTS_OF_ALL: intervals of the curves of a chart together, so that a page stays below 1 MB. */
enum { PARTS_OF_ALL = 1200, PARTS_LEAST = 37, MARKS_MAX = 100, MARK_TEXT = 320 };

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
    nd_curve *curves;    /* [runs + 1] */
    nd_chart_mark marks[MARKS_MAX];
    char mark_text[MARKS_MAX][MARK_TEXT];
    int mark_count;
} drawing;

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
    nd_chart_line lines[ND_PAGE_RUNS_MAX + 1];
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

static nd_status write_charts(const nd_page *page, nd_doc *doc)
{
    drawing *d = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &d));
    ND_TRY_OUT(ND_ALLOC(page->count + 1, &d->curves));
    d->page = page;
    d->doc = doc;
    d->parts = PARTS_OF_ALL / page->count > PARTS_LEAST ? PARTS_OF_ALL / page->count : PARTS_LEAST;
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
        if (i == 0 && page->count > 1) {
            write_validations_of_all(d);
        }
    }
    fputs("</div>\n", doc->out);
out:
    if (d) {
        free(d->curves);
    }
    free(d);
    return status;
}

/* "sha256-<base64>": what the page's rules let run, and nothing else. */
static void write_hash(FILE *out, const char *text)
{
    unsigned char digest[SHA256_DIGEST_LENGTH], base64[4 * ((SHA256_DIGEST_LENGTH + 2) / 3) + 1];
    SHA256((const unsigned char *)text, strlen(text), digest);
    EVP_EncodeBlock(base64, digest, sizeof digest);
    fprintf(out, "'sha256-%s'", (const char *)base64);
}

static void write_title(const nd_page *page, nd_doc *doc)
{
    nd_doc_text(doc, page->runs[0].name);
    if (page->count > 1) {
        char more[64];
        snprintf(more, sizeof more, " and %d more", page->count - 1);
        nd_doc_text(doc, more);
    }
}

static void begin_html(const nd_page *page, nd_doc *doc)
{
    FILE *out = doc->out;
    fputs("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
          "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src ",
          out);
    write_hash(out, page_css);
    fputs("; script-src ", out);
    write_hash(out, page_js);
    fputs("\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>",
          out);
    write_title(page, doc);
    fprintf(out, "</title>\n<style>%s</style></head><body>\n", page_css);
    fputs("<button id=\"theme\" type=\"button\">light or dark</button>\n<h1>", out);
    write_title(page, doc);
    fputs("</h1>\n", out);
}

static void write_verdict(const nd_page *page, nd_doc *doc, const nd_run_view *run)
{
    char text[ND_VERDICT_MAX];
    nd_run_verdict(run, text);
    if (doc->kind == ND_DOC_HTML) {
        bool ended = run->end == ND_RUN_FINISHED || run->end == ND_RUN_STOPPED_EARLY;
        bool good = ended && isfinite(run->figures.end_loss);
        bool bad = run->end == ND_RUN_ENDED_EARLY || !isfinite(run->figures.end_loss);
        fprintf(doc->out, "<p class=\"verdict%s\">", good ? " good" : bad ? " bad" : "");
    }
    if (page->count > 1) {
        nd_doc_text(doc, run->name);
        fputs(": ", doc->out);
    }
    nd_doc_text(doc, text);
    fputs(doc->kind == ND_DOC_HTML ? "</p>\n" : "\n\n", doc->out);
}

static nd_status write_runs(const nd_page *page, nd_doc *doc)
{
    for (int i = 0; i < page->count; i++) {
        const nd_run_view *run = &page->runs[i];
        if (page->count > 1) {
            nd_doc_fold_begin(doc, run->folder);
        }
        ND_TRY(nd_sections_run(doc, run));
        if (page->count > 1) {
            nd_doc_fold_end(doc);
        }
    }
    return ND_OK;
}

nd_status nd_page_write(const nd_page *page, FILE *out)
{
    nd_doc doc = {.out = out, .kind = page->kind};
    char time[ND_CLOCK_UTC_MAX];
    bool html = page->kind == ND_DOC_HTML;
    ND_ASSERT(page->count >= 1 && page->count <= ND_PAGE_RUNS_MAX);
    fputs(nd_page_mark, out);
    if (html) {
        begin_html(page, &doc);
    } else {
        fputs("\n# ", out);
        write_title(page, &doc);
        fputs("\n\n", out);
    }
    for (int i = 0; i < page->count; i++) {
        write_verdict(page, &doc, &page->runs[i]);
    }
    if (html) {
        ND_TRY(write_charts(page, &doc));
    }
    ND_TRY(nd_sections_compare(&doc, page->runs, page->count));
    ND_TRY(write_runs(page, &doc));
    nd_doc_say(&doc, "Written by ndtrain %s at %s.", ND_VERSION, nd_clock_utc(page->now, time));
    if (html) {
        fprintf(out, "<script>%s</script>\n</body></html>\n", page_js);
    }
    return ND_OK;
}

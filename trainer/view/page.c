// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/parts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/version.h"
#include "trainer/view/page_text.h"

const char nd_page_mark[] = "<!-- ndtrain report -->\n";

static json_t *title_of(const nd_page *page)
{
    return page->count == 1 ? nd_cell("%s", page->runs[0].name)
                            : nd_cell("%s and %d more", page->runs[0].name, page->count - 1);
}

/* {"text": sentence, "mood": "good", "bad" or ""} */
static json_t *verdict_of(const nd_page *page, const nd_run_view *run)
{
    const bool ended = run->end == ND_RUN_FINISHED || run->end == ND_RUN_STOPPED_EARLY;
    const bool early = run->end == ND_RUN_ENDED_EARLY, failed = run->end == ND_RUN_FAILED;
    const bool finite = isfinite(run->figures.end_loss);
    const bool bad = failed || (early && !run->lost_lines) || !finite;
    const bool several = page->count > 1;
    char text[ND_VERDICT_MAX];
    json_t *verdict = json_object();
    nd_run_verdict(run, text);
    nd_json_set(&verdict, "text",
                nd_cell("%s%s%s", several ? run->name : "", several ? ": " : "", text));
    nd_json_set(&verdict, "mood",
                json_string(bad                         ? "bad"
                            : ended && !run->lost_lines ? "good"
                                                        : ""));
    return verdict;
}

static nd_status write_run(nd_doc *doc, const nd_run_view *run, int runs)
{
    nd_section_notes(doc, run);
    nd_section_times(doc, run);
    ND_TRY(nd_section_slowest(doc, run));
    ND_TRY(nd_section_waits(doc, run));
    nd_section_wire(doc, run);
    ND_TRY(nd_section_memory(doc, run));
    nd_section_fp8(doc, run);
    ND_TRY(nd_section_data(doc, run));
    nd_section_events(doc, run, runs);
    nd_section_checkpoints(doc, run);
    return nd_section_settings(doc, run);
}

static nd_status write_blocks(const nd_page *page, nd_doc *doc)
{
    char time[ND_CLOCK_UTC_MAX];
    nd_section_compare(doc, page->runs, page->count);
    for (int i = 0; i < page->count; i++) {
        if (page->count > 1) {
            nd_doc_add(doc, "fold", page->runs[i].folder);
        }
        ND_TRY(write_run(doc, &page->runs[i], page->count));
        if (page->count > 1) {
            nd_doc_add(doc, "unfold", "");
        }
    }
    nd_doc_say(doc, "Written by ndtrain %s at %s.", ND_VERSION, nd_clock_utc(page->now, time));
    return ND_OK;
}

static nd_status add_runs(const nd_page *page, json_t **root)
{
    json_t *runs = json_array();
    int64_t first = INT64_MAX, last = 0;
    nd_status status = ND_OK;
    for (int i = 0; i < page->count; i++) {
        const nd_metrics *m = &page->runs[i].metrics;
        const int64_t begin = (int64_t)nd_metrics_column(m, &m->steps, "step")[0];
        const int64_t end = nd_run_view_last_step(&page->runs[i]);
        first = begin < first ? begin : first;
        last = end > last ? end : last;
    }
    for (int i = 0; i < page->count && status == ND_OK; i++) {
        json_t *run = NULL;
        status = nd_chart_run(&page->runs[i], first, last, page->count, &run);
        nd_json_append(&runs, run);
    }
    nd_json_set(root, "runs", runs);
    return status;
}

static nd_status make_data(const nd_page *page, json_t **out)
{
    json_t *root = json_object(), *verdicts = json_array();
    nd_doc doc = {json_array()};
    nd_status status = write_blocks(page, &doc);
    for (int i = 0; i < page->count; i++) {
        nd_json_append(&verdicts, verdict_of(page, &page->runs[i]));
    }
    nd_json_set(&root, "title", title_of(page));
    nd_json_set(&root, "verdicts", verdicts);
    status = status == ND_OK ? add_runs(page, &root) : status;
    nd_json_set(&root, "blocks", doc.blocks);
    if (status == ND_OK && !root) {
        status = nd_fail_memory("the report");
    }
    if (status != ND_OK) {
        json_decref(root);
        root = NULL;
    }
    *out = root;
    return status;
}

static void write_markdown(const json_t *data, FILE *out)
{
    const json_t *verdict;
    size_t i;
    fputs("\n# ", out);
    nd_doc_write_markdown_text(nd_json_words(data, "title"), out);
    fputs("\n\n", out);
    json_array_foreach(json_object_get(data, "verdicts"), i, verdict)
    {
        nd_doc_write_markdown_text(nd_json_words(verdict, "text"), out);
        fputs("\n\n", out);
    }
    nd_doc_write_markdown(json_object_get(data, "blocks"), out);
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

nd_status nd_page_write(const nd_page *page, FILE *out)
{
    json_t *data = NULL;
    nd_status status = ND_OK;
    ND_ASSERT(page->count >= 1 && page->count <= ND_PAGE_RUNS_MAX);
    ND_TRY(make_data(page, &data));
    fputs(nd_page_mark, out);
    if (page->markdown) {
        write_markdown(data, out);
    } else {
        fputs(page_before, out);
        status = write_json(data, out);
        fputs(page_after, out);
    }
    json_decref(data);
    return status;
}

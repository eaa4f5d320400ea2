// SPDX-License-Identifier: Apache-2.0
/* The data of a run: sources of the training, sets of the validation, tokenizer. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/view/parts.h"

static void sum_up(nd_named *n, const double *step, const double *tokens, size_t rows,
                   int64_t end_from)
{
    const nd_column_facts loss = nd_column_sum_up(n->losses, 0, rows);
    double end_sum = 0, end_tokens = 0;
    for (size_t i = 0; i < rows; i++) {
        if (step[i] >= (double)end_from && isfinite(n->losses[i]) && isfinite(tokens[i])) {
            end_sum += n->losses[i] * tokens[i];
            end_tokens += tokens[i];
        }
    }
    n->tokens = nd_column_sum_up(tokens, 0, rows).sum;
    n->last = loss.last;
    n->best = loss.least;
    n->best_step = loss.count > 0 ? step[loss.least_at] : 0;
    n->end = end_tokens > 0 ? end_sum / end_tokens : NAN;
}

nd_status nd_named_list(const nd_metrics *m, const nd_metric_table *table, const char *kind,
                        int64_t end_from, nd_named **out, int *count)
{
    const double *step = nd_metrics_column(m, table, "step");
    char name[2 * ND_COLUMN_NAME];
    const size_t length = (size_t)snprintf(name, sizeof name, "%s_loss.", kind);
    ND_TRY(ND_ALLOC(m->name_count, out));
    *count = 0;
    for (int k = 0; k < m->name_count; k++) {
        if (table->columns[k] && strncmp(m->names[k], name, length) == 0) {
            char tokens[2 * ND_COLUMN_NAME];
            nd_named *n = &(*out)[(*count)++];
            *n = (nd_named){
                .column = m->names[k], .name = m->names[k] + length, .losses = table->columns[k]};
            snprintf(tokens, sizeof tokens, "%s_tokens.%s", kind, n->name);
            sum_up(n, step, nd_metrics_column(m, table, tokens), table->rows, end_from);
        }
    }
    return ND_OK;
}

static const char *words_or(const json_t *object, const char *key, const char *otherwise)
{
    const char *text = nd_json_words(object, key);
    return text[0] ? text : otherwise;
}

static json_t *count_cell(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return nd_cell_figure(json_is_number(value) ? json_number_value(value) : NAN, 5);
}

static nd_named find_named(const nd_named *list, int count, const char *name)
{
    for (int i = 0; i < count; i++) {
        if (strcmp(list[i].name, name) == 0) {
            return list[i];
        }
    }
    return (nd_named){.tokens = NAN, .end = NAN};
}

static void write_sources(nd_doc *doc, const nd_run_view *run, const json_t *data,
                          const nd_named *list, int count)
{
    const double last = (double)nd_run_view_last_step(run);
    const double progress = run->steps_wanted > 0 ? last / (double)run->steps_wanted : NAN;
    const json_t *source;
    size_t i;
    nd_doc_table(doc, false, "source|tokens|documents|epochs|labels counted|loss at the end");
    json_array_foreach(json_object_get(data, "sources"), i, source)
    {
        const char *name = nd_json_words(source, "name");
        const double samples = nd_json_number(source, "samples") * progress;
        nd_named n = {.tokens = run->figures.tokens_seen, .end = run->figures.end_loss};
        if (name[0]) {
            n = find_named(list, count, name);
        }
        ND_DOC_ROW(doc, nd_cell("%s", name[0] ? name : nd_json_words(source, "path")),
                   count_cell(source, "tokens"), count_cell(source, "documents"),
                   nd_cell_figure(samples / nd_json_number(source, "blocks"), 4),
                   nd_cell_figure(n.tokens, 5), nd_cell_figure(n.end, 5));
    }
}

static void write_sets(nd_doc *doc, const nd_named *list, int count)
{
    nd_doc_table(doc, false, "validation set|loss, last|best|after step");
    for (int i = 0; i < count; i++) {
        ND_DOC_ROW(doc, nd_cell("%s", list[i].name), nd_cell_figure(list[i].last, 5),
                   nd_cell_figure(list[i].best, 5), nd_cell("%.0f", list[i].best_step));
    }
}

/* Lists the files of all data. */
static void write_files(nd_doc *doc, const json_t *data)
{
    static const char *const lists[][2] = {{"sources", "training"}, {"validation", "validation"}};
    nd_doc_table(doc, true, "data|path|format|cache of tokens");
    for (int k = 0; k < 2; k++) {
        const json_t *source;
        size_t i;
        json_array_foreach(json_object_get(data, lists[k][0]), i, source)
        {
            const char *name = nd_json_words(source, "name");
            ND_DOC_ROW(doc, nd_cell("%s%s%s", lists[k][1], name[0] ? " " : "", name),
                       nd_cell("%s", nd_json_words(source, "path")),
                       nd_cell("%s", nd_json_words(source, "format")),
                       nd_cell("%s", words_or(source, "cache", "none")));
        }
    }
}

/* A step has as many positions as tokens a second times its time; only counted labels add to the
 * loss. */
static void write_labels(nd_doc *doc, const nd_run_view *run)
{
    const nd_metrics *m = &run->metrics;
    const size_t last = m->steps.rows - 1;
    const double speed = nd_metrics_column(m, &m->steps, "tokens_per_second")[last];
    const double ms = nd_metrics_column(m, &m->steps, "step_ms")[last];
    const double positions = speed * ms / 1e3 * (double)nd_run_view_last_step(run);
    char text[ND_SHORT];
    if (positions > 0 && isfinite(run->figures.tokens_seen)) {
        nd_doc_say(doc, "%s labels counted, %.1f %% of all positions.",
                   nd_figure(text, sizeof text, run->figures.tokens_seen, 5),
                   100 * run->figures.tokens_seen / positions);
    }
}

nd_status nd_section_data(nd_doc *doc, const nd_run_view *run)
{
    const nd_metrics *m = &run->metrics;
    const json_t *data = json_object_get(run->record, "data");
    nd_named *sources = NULL, *sets = NULL;
    int source_count = 0, set_count = 0;
    nd_status status = ND_OK;
    ND_TRY_OUT(
        nd_named_list(m, &m->steps, "source", run->figures.end_from, &sources, &source_count));
    ND_TRY_OUT(nd_named_list(m, &m->validations, "validation_set", 0, &sets, &set_count));
    if (!data && set_count == 0) {
        goto out;
    }
    nd_doc_add(doc, "heading", "Data");
    if (data) {
        nd_doc_say(doc, "Tokenizer: %s", words_or(data, "tokenizer", "not known"));
    }
    write_labels(doc, run);
    if (json_array_size(json_object_get(data, "sources")) > 0) {
        write_sources(doc, run, data, sources, source_count);
    }
    if (set_count > 0) {
        write_sets(doc, sets, set_count);
    }
    if (data) {
        write_files(doc, data);
    }
out:
    free(sources);
    free(sets);
    return status;
}

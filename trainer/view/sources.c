// SPDX-License-Identifier: Apache-2.0
/* The data of a run: sources of the training, sets of the validation, tokenizer. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/view/curve.h"
#include "trainer/view/sections.h"

/* A source or a set, by its number in the names of its list. */
typedef struct losses {
    double tokens;              /* labels that counted */
    double end_sum, end_tokens; /* of the last steps */
    double last, best;          /* NaN: none */
    int64_t best_step;
} losses;

static void add_loss(losses *l, const nd_source_row *row, int64_t end_from)
{
    double loss = (double)row->loss, tokens = isfinite(row->tokens) ? row->tokens : 0;
    l->tokens += tokens;
    if (!isfinite(loss)) {
        return;
    }
    l->last = loss;
    if (!(l->best <= loss)) {
        l->best = loss;
        l->best_step = row->step;
    }
    if (row->step >= end_from) {
        l->end_sum += loss * tokens;
        l->end_tokens += tokens;
    }
}

static nd_status losses_of(const nd_source_row *rows, size_t count, const nd_metric_names *names,
                           int64_t end_from, losses **out)
{
    ND_TRY(ND_ALLOC(names->count + 1, out));
    for (int i = 0; i <= names->count; i++) {
        (*out)[i].last = (*out)[i].best = NAN;
    }
    for (size_t i = 0; i < count; i++) {
        add_loss(&(*out)[rows[i].source], &rows[i], end_from);
    }
    return ND_OK;
}

static const losses *find(const losses *all, const nd_metric_names *names, const char *name)
{
    for (int i = 0; i < names->count; i++) {
        if (strcmp(names->name[i], name) == 0) {
            return &all[i];
        }
    }
    return NULL;
}

static void write_count(nd_doc *doc, double count)
{
    char text[ND_SHORT];
    nd_doc_cell(doc, nd_figure(text, sizeof text, count, 5));
}

static double member(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : (double)NAN;
}

static const char *words(const json_t *object, const char *key, const char *otherwise)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text && text[0] ? text : otherwise;
}

/* Sources. */

static void write_source(nd_doc *doc, const json_t *source, const losses *l, double progress)
{
    double samples = member(source, "samples") * progress;
    char epochs[ND_SHORT];
    nd_doc_row_begin(doc);
    nd_doc_cell(doc, words(source, "name", words(source, "path", "")));
    write_count(doc, member(source, "tokens"));
    write_count(doc, member(source, "documents"));
    nd_doc_cell(doc, nd_figure(epochs, sizeof epochs, samples / member(source, "blocks"), 3));
    write_count(doc, l ? l->tokens : (double)NAN);
    write_count(doc, l && l->end_tokens > 0 ? l->end_sum / l->end_tokens : (double)NAN);
    nd_doc_row_end(doc);
}

/* Of a run that recorded no list of its data: what its steps say. */
static void write_names(nd_doc *doc, const nd_metric_names *names, const losses *all)
{
    static const char *const heads[] = {"source", "labels counted", "loss at the end"};
    nd_doc_table_begin(doc, false, 3, heads);
    for (int i = 0; i < names->count; i++) {
        nd_doc_row_begin(doc);
        nd_doc_cell(doc, names->name[i]);
        write_count(doc, all[i].tokens);
        write_count(doc, all[i].end_tokens > 0 ? all[i].end_sum / all[i].end_tokens : (double)NAN);
        nd_doc_row_end(doc);
    }
    nd_doc_table_end(doc);
}

static void write_sources(nd_doc *doc, const nd_run_view *run, const json_t *list,
                          const losses *all)
{
    static const char *const heads[] = {"source", "tokens",         "documents",
                                        "epochs", "labels counted", "loss at the end"};
    const nd_metrics *m = &run->metrics;
    const losses whole = {
        .tokens = run->figures.tokens_seen, .end_sum = run->figures.end_loss, .end_tokens = 1};
    double last = (double)m->rows[m->row_count - 1].step;
    double progress = run->steps_wanted > 0 ? last / (double)run->steps_wanted : (double)NAN;
    const json_t *source;
    size_t i;
    nd_doc_table_begin(doc, false, 6, heads);
    json_array_foreach(list, i, source)
    {
        bool named = words(source, "name", "")[0];
        const losses *l = named ? find(all, &m->source_names, words(source, "name", "")) : &whole;
        write_source(doc, source, l, progress);
    }
    nd_doc_table_end(doc);
}

/* Sets. */

static void write_sets(nd_doc *doc, const nd_metrics *m, const losses *all)
{
    static const char *const heads[] = {"validation set", "loss, last", "best", "after step"};
    if (m->set_names.count == 0) {
        return;
    }
    nd_doc_table_begin(doc, false, 4, heads);
    for (int i = 0; i < m->set_names.count; i++) {
        nd_doc_row_begin(doc);
        nd_doc_cell(doc, m->set_names.name[i]);
        write_count(doc, all[i].last);
        write_count(doc, all[i].best);
        nd_doc_cellf(doc, "%lld", (long long)all[i].best_step);
        nd_doc_row_end(doc);
    }
    nd_doc_table_end(doc);
}

/* Where the data lie. */
static void write_files(nd_doc *doc, const json_t *data)
{
    static const char *const heads[] = {"data", "path", "format", "cache of tokens"};
    static const char *const lists[][2] = {{"sources", "training"}, {"validation", "validation"}};
    nd_doc_table_begin(doc, true, 4, heads);
    for (int k = 0; k < 2; k++) {
        const json_t *list = json_object_get(data, lists[k][0]), *source;
        size_t i;
        json_array_foreach(list, i, source)
        {
            const char *name = words(source, "name", "");
            nd_doc_row_begin(doc);
            nd_doc_cellf(doc, "%s%s%s", lists[k][1], name[0] ? " " : "", name);
            nd_doc_cell(doc, words(source, "path", ""));
            nd_doc_cell(doc, words(source, "format", ""));
            nd_doc_cell(doc, words(source, "cache", "none"));
            nd_doc_row_end(doc);
        }
    }
    nd_doc_table_end(doc);
}

/* Labels of a step, counted or not: tokens a second times the time of a step. */
static double positions_of(const nd_metric_row *row)
{
    return (double)row->value[ND_METRIC_TOKENS_PER_SECOND] * (double)row->value[ND_METRIC_STEP_MS] /
           1e3;
}

static void write_labels(nd_doc *doc, const nd_run_view *run)
{
    const nd_metrics *m = &run->metrics;
    const nd_metric_row *last = &m->rows[m->row_count - 1];
    double positions = positions_of(last) * (double)last->step;
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
    const json_t *list = json_object_get(data, "sources");
    const int64_t last = m->rows[m->row_count - 1].step;
    losses *sources = NULL, *sets = NULL;
    nd_status status = ND_OK;
    if (!data && m->source_names.count == 0 && m->set_names.count == 0) {
        return ND_OK;
    }
    ND_TRY_OUT(
        losses_of(m->sources, m->source_count, &m->source_names, run->figures.end_from, &sources));
    ND_TRY_OUT(losses_of(m->sets, m->set_count, &m->set_names, last, &sets));
    nd_doc_heading(doc, 2, "Data");
    if (data) {
        nd_doc_say(doc, "Tokenizer: %s", words(data, "tokenizer", "not known"));
    }
    write_labels(doc, run);
    if (json_array_size(list) > 0) {
        write_sources(doc, run, list, sources);
    } else if (m->source_names.count > 0) {
        write_names(doc, &m->source_names, sources);
    }
    write_sets(doc, m, sets);
    if (data) {
        write_files(doc, data);
    }
out:
    free(sources);
    free(sets);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
/* The data of a run: sources of the training, sets of the validation, tokenizer. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "trainer/view/curve.h"
#include "trainer/view/sections.h"

static const char source_prefix[] = "source_loss.", set_prefix[] = "validation_set_loss.";

/* Of a source over all steps, or of a set over all validations. NaN: not known. */
typedef struct losses {
    double tokens;     /* labels that counted */
    double end;        /* mean of the last steps */
    double last, best; /* of a validation */
    double best_step;
} losses;

static losses losses_of(const nd_metrics *m, const nd_metric_table *table, const char *kind,
                        const char *name, int64_t end_from)
{
    char column[2 * ND_COLUMN_NAME];
    losses l = {.last = NAN, .best = NAN, .best_step = NAN};
    double end_sum = 0, end_tokens = 0;
    snprintf(column, sizeof column, "%s_loss.%.90s", kind, name);
    const double *loss = nd_metrics_column(m, table, column);
    snprintf(column, sizeof column, "%s_tokens.%.90s", kind, name);
    const double *tokens = nd_metrics_column(m, table, column);
    const double *step = nd_metrics_column(m, table, "step");
    for (size_t i = 0; i < table->rows; i++) {
        const double labels = isfinite(tokens[i]) ? tokens[i] : 0;
        l.tokens += labels;
        if (!isfinite(loss[i])) {
            continue;
        }
        l.last = loss[i];
        if (!(l.best <= loss[i])) {
            l.best = loss[i];
            l.best_step = step[i];
        }
        if (step[i] >= (double)end_from) {
            end_sum += loss[i] * labels;
            end_tokens += labels;
        }
    }
    l.end = end_tokens > 0 ? end_sum / end_tokens : NAN;
    return l;
}

/* The name of source or set number k behind the prefix; NULL: the column is another one's. */
static const char *name_at(const nd_metrics *m, const nd_metric_table *table, int k,
                           const char *prefix)
{
    const size_t length = strlen(prefix);
    const bool is_one = table->columns[k] && strncmp(m->names[k], prefix, length) == 0;
    return is_one ? m->names[k] + length : NULL;
}

static bool has_names(const nd_metrics *m, const nd_metric_table *table, const char *prefix)
{
    for (int k = 0; k < m->name_count; k++) {
        if (name_at(m, table, k, prefix)) {
            return true;
        }
    }
    return false;
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

static void write_sources(nd_doc *doc, const nd_run_view *run, const json_t *list)
{
    const nd_metrics *m = &run->metrics;
    const double last = (double)nd_run_view_last_step(run);
    const double progress = run->steps_wanted > 0 ? last / (double)run->steps_wanted : NAN;
    const json_t *source;
    size_t i;
    nd_doc_table(doc, false, "source|tokens|documents|epochs|labels counted|loss at the end");
    json_array_foreach(list, i, source)
    {
        const char *name = nd_json_words(source, "name");
        const double samples = nd_json_number(source, "samples") * progress;
        losses l = {.tokens = run->figures.tokens_seen, .end = run->figures.end_loss};
        if (name[0]) {
            l = losses_of(m, &m->steps, "source", name, run->figures.end_from);
        }
        ND_DOC_ROW(doc, nd_cell("%s", name[0] ? name : nd_json_words(source, "path")),
                   count_cell(source, "tokens"), count_cell(source, "documents"),
                   nd_cell_figure(samples / nd_json_number(source, "blocks"), 3),
                   nd_cell_figure(l.tokens, 5), nd_cell_figure(l.end, 5));
    }
}

/* Of a run that recorded no list of its data: what its steps say. */
static void write_names(nd_doc *doc, const nd_run_view *run)
{
    const nd_metrics *m = &run->metrics;
    nd_doc_table(doc, false, "source|labels counted|loss at the end");
    for (int k = 0; k < m->name_count; k++) {
        const char *name = name_at(m, &m->steps, k, source_prefix);
        if (name) {
            const losses l = losses_of(m, &m->steps, "source", name, run->figures.end_from);
            ND_DOC_ROW(doc, nd_cell("%s", name), nd_cell_figure(l.tokens, 5),
                       nd_cell_figure(l.end, 5));
        }
    }
}

static void write_sets(nd_doc *doc, const nd_metrics *m)
{
    nd_doc_table(doc, false, "validation set|loss, last|best|after step");
    for (int k = 0; k < m->name_count; k++) {
        const char *name = name_at(m, &m->validations, k, set_prefix);
        if (name) {
            const losses l = losses_of(m, &m->validations, "validation_set", name, 0);
            ND_DOC_ROW(doc, nd_cell("%s", name), nd_cell_figure(l.last, 5),
                       nd_cell_figure(l.best, 5), nd_cell("%.0f", l.best_step));
        }
    }
}

/* Where the data lie. */
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

/* Labels of a step, counted or not, are tokens a second times the time of a step. */
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

void nd_section_data(nd_doc *doc, const nd_run_view *run)
{
    const nd_metrics *m = &run->metrics;
    const json_t *data = json_object_get(run->record, "data");
    const json_t *list = json_object_get(data, "sources");
    const bool sources = has_names(m, &m->steps, source_prefix);
    const bool sets = has_names(m, &m->validations, set_prefix);
    if (!data && !sources && !sets) {
        return;
    }
    nd_doc_heading(doc, "Data");
    if (data) {
        nd_doc_say(doc, "Tokenizer: %s", words_or(data, "tokenizer", "not known"));
    }
    write_labels(doc, run);
    if (json_array_size(list) > 0) {
        write_sources(doc, run, list);
    } else if (sources) {
        write_names(doc, run);
    }
    if (sets) {
        write_sets(doc, m);
    }
    if (data) {
        write_files(doc, data);
    }
}

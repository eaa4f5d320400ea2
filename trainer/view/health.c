// SPDX-License-Identifier: Apache-2.0
/* The section on what casts to FP8 lost, in the steps that fp8.health_interval counted. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "trainer/precision/precision.h"
#include "trainer/view/parts.h"

/* A number of the health of an operand of a linear, over all counted steps. */
typedef struct extreme {
    double last, worst;
    double step, layer; /* of the worst; layer NaN: not known */
    bool seen;
} extreme;

/* A value that is not finite is worse than any other. */
static extreme find_extreme(const nd_metrics *m, const char *operand, const char *linear,
                            const char *measure)
{
    char name[ND_COLUMN_NAME], layer_name[ND_COLUMN_NAME];
    snprintf(name, sizeof name, "fp8_health.%s.%s.%s", operand, linear, measure);
    snprintf(layer_name, sizeof layer_name, "%.*s_layer", (int)sizeof name - 8, name);
    const double *values = nd_metrics_column(m, &m->health, name);
    const double *layers = nd_metrics_column(m, &m->health, layer_name);
    const double *steps = nd_metrics_column(m, &m->health, "step");
    extreme e = {.last = NAN, .worst = NAN, .step = NAN, .layer = NAN};
    for (size_t i = 0; i < m->health.rows; i++) {
        if (isnan(values[i]) && isnan(layers[i])) {
            continue; /* the line has nothing about this operand */
        }
        e.last = values[i];
        if (!e.seen || (isfinite(e.worst) && !(values[i] <= e.worst))) {
            e = (extreme){values[i], values[i], steps[i], layers[i], true};
        }
    }
    return e;
}

static json_t *place_cell(const extreme *e)
{
    return e->layer >= 0 && e->layer <= 1e6 ? nd_cell("layer %.0f, step %.0f", e->layer, e->step)
                                            : nd_cell("step %.0f", e->step);
}

static void write_operands(nd_doc *doc, const nd_metrics *m)
{
    nd_doc_table(doc, false,
                 "operand|underflow, last|worst|where|saturation, last|worst|where|largest "
                 "value|where");
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        const char *operand = nd_operand_name((nd_operand_kind)kind);
        for (int linear = 0; linear < ND_LINEAR_COUNT; linear++) {
            const char *name = nd_linear_name(linear);
            const extreme underflow = find_extreme(m, operand, name, "underflow");
            const extreme saturation = find_extreme(m, operand, name, "saturation");
            const extreme amax = find_extreme(m, operand, name, "amax");
            if (underflow.seen || saturation.seen || amax.seen) {
                ND_DOC_ROW(doc, nd_cell("%s of %s", operand, name),
                           nd_cell("%.3f %%", underflow.last * 100),
                           nd_cell("%.3f %%", underflow.worst * 100), place_cell(&underflow),
                           nd_cell("%.3f %%", saturation.last * 100),
                           nd_cell("%.3f %%", saturation.worst * 100), place_cell(&saturation),
                           nd_cell_figure(amax.worst, 4), place_cell(&amax));
            }
        }
    }
}

static void write_recipe(nd_doc *doc, const nd_run_view *run)
{
    const json_t *model = json_object_get(run->record, "model");
    const char *recipe = nd_json_words(json_object_get(run->record, "config"), "fp8.recipe");
    if (recipe[0] && json_object_get(model, "fp8_linears")) {
        nd_doc_say(doc, "Recipe %s; %.0f of the %.0f linears of all blocks run in FP8.", recipe,
                   nd_json_number(model, "fp8_linears"), nd_json_number(model, "linears"));
    }
}

void nd_section_fp8(nd_doc *doc, const nd_run_view *run)
{
    const nd_metrics *m = &run->metrics;
    const json_t *config = json_object_get(run->record, "config");
    const size_t counted = m->health.rows;
    if (counted == 0 && strcmp(nd_json_words(config, "train.precision"), "fp8") != 0) {
        return;
    }
    nd_doc_add(doc, "heading", "FP8 health");
    write_recipe(doc, run);
    if (counted == 0) {
        nd_doc_say(doc, "No step was counted; fp8.health_interval (--fp8-health-interval N) counts "
                        "every N steps what casts lose.");
        return;
    }
    const double *step = nd_metrics_column(m, &m->health, "step");
    nd_doc_say(doc,
               "%zu steps were counted, the first is %.0f, the last %.0f. Each number is that of "
               "the worst layer: underflow is the share of elements that became 0, saturation the "
               "share beyond the format.",
               counted, step[0], step[counted - 1]);
    write_operands(doc, m);
}

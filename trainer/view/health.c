// SPDX-License-Identifier: Apache-2.0
/* What casts to FP8 lost, from the steps that fp8.health_interval counted. */
#include <math.h>
#include <string.h>

#include "trainer/view/curve.h"
#include "trainer/view/sections.h"

/* A number of the health of an operand, over all counted steps. */
typedef struct extreme {
    double last, worst;
    int64_t step; /* of the worst */
    int layer;
} extreme;

typedef struct operand {
    bool seen;
    extreme underflow, saturation, amax;
} operand;

typedef struct health {
    operand of[ND_OPERAND_KINDS][ND_LINEAR_COUNT];
    int64_t steps, first, last;
} health;

/* A value that is not finite is worse than any other. */
static void take(extreme *e, bool first, double value, int64_t step, int layer)
{
    e->last = value;
    if (first || (isfinite(e->worst) && !(value <= e->worst))) {
        *e = (extreme){value, value, step, layer};
    }
}

static void sum_up(const nd_metrics *m, health *out)
{
    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < m->health_count; i++) {
        const nd_health_row *row = &m->health[i];
        const nd_health_worst *w = &row->worst;
        operand *o = &out->of[row->operand][row->linear];
        take(&o->underflow, !o->seen, w->underflow, row->step, w->underflow_layer);
        take(&o->saturation, !o->seen, w->saturation, row->step, w->saturation_layer);
        take(&o->amax, !o->seen, w->amax, row->step, w->amax_layer);
        o->seen = true;
        out->first = out->steps == 0 ? row->step : out->first;
        out->steps += out->steps == 0 || row->step != out->last;
        out->last = row->step;
    }
}

static void write_place(nd_doc *doc, const extreme *e)
{
    if (e->layer >= 0) {
        nd_doc_cellf(doc, "layer %d, step %lld", e->layer, (long long)e->step);
    } else {
        nd_doc_cellf(doc, "step %lld", (long long)e->step);
    }
}

static void write_shares(nd_doc *doc, const extreme *e)
{
    nd_doc_cellf(doc, "%.3f %%", e->last * 100);
    nd_doc_cellf(doc, "%.3f %%", e->worst * 100);
    write_place(doc, e);
}

static void write_operands(nd_doc *doc, const health *h)
{
    static const char *const heads[] = {"operand", "underflow, last",  "worst",
                                        "where",   "saturation, last", "worst",
                                        "where",   "largest value",    "where"};
    char text[ND_SHORT];
    nd_doc_table_begin(doc, false, 9, heads);
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        for (int linear = 0; linear < ND_LINEAR_COUNT; linear++) {
            const operand *o = &h->of[kind][linear];
            if (o->seen) {
                nd_doc_row_begin(doc);
                nd_doc_cellf(doc, "%s of %s", nd_operand_name((nd_operand_kind)kind),
                             nd_linear_name(linear));
                write_shares(doc, &o->underflow);
                write_shares(doc, &o->saturation);
                nd_doc_cell(doc, nd_figure(text, sizeof text, o->amax.worst, 4));
                write_place(doc, &o->amax);
                nd_doc_row_end(doc);
            }
        }
    }
    nd_doc_table_end(doc);
}

static void write_recipe(nd_doc *doc, const nd_run_view *run)
{
    const json_t *config = json_object_get(run->record, "config");
    const json_t *model = json_object_get(run->record, "model");
    const char *recipe = json_string_value(json_object_get(config, "fp8.recipe"));
    const json_t *converted = json_object_get(model, "fp8_linears");
    if (recipe && json_is_integer(converted)) {
        nd_doc_say(doc, "Recipe %s; %lld of the %lld linears of all blocks run in FP8.", recipe,
                   (long long)json_integer_value(converted),
                   (long long)json_integer_value(json_object_get(model, "linears")));
    } else if (recipe) {
        nd_doc_say(doc, "Recipe %s.", recipe);
    }
}

void nd_section_fp8(nd_doc *doc, const nd_run_view *run)
{
    const json_t *config = json_object_get(run->record, "config");
    const char *precision = json_string_value(json_object_get(config, "train.precision"));
    bool fp8 = precision && strcmp(precision, "fp8") == 0;
    health h;
    sum_up(&run->metrics, &h);
    if (!fp8 && h.steps == 0) {
        return;
    }
    nd_doc_heading(doc, 2, "FP8 health");
    write_recipe(doc, run);
    if (h.steps == 0) {
        nd_doc_say(doc, "No step was counted; fp8.health_interval (--fp8-health-interval N) counts "
                        "every N steps what casts lose.");
        return;
    }
    nd_doc_say(doc,
               "%lld steps were counted, the first is %lld, the last %lld. Each number is that of "
               "the worst layer: underflow is the share of elements that became 0, saturation the "
               "share beyond the format.",
               (long long)h.steps, (long long)h.first, (long long)h.last);
    write_operands(doc, &h);
}

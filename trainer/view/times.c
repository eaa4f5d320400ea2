// SPDX-License-Identifier: Apache-2.0
/* Where the time of rank 0 went, from trace.json. */
#include <math.h>
#include <stdio.h>

#include "runtime/device/trace.h"
#include "trainer/view/curve.h"
#include "trainer/view/sections.h"

static double trace_number(const json_t *trace, const char *kind, const char *unit)
{
    char key[ND_SHORT];
    snprintf(key, sizeof key, "%s_%s", kind, unit);
    return json_number_value(json_object_get(trace, key));
}

/* A step, or a number of them; 0 for what is none. */
static int64_t trace_count(const json_t *trace, const char *key)
{
    double value = json_number_value(json_object_get(trace, key));
    return value > 0 && value < 1e12 ? (int64_t)value : 0;
}

/* Milliseconds of the steps that the trace covers. */
static double steps_ms(const nd_metrics *m, int64_t first, int64_t steps)
{
    double sum = 0;
    for (size_t i = 0; i < m->row_count; i++) {
        double ms = (double)m->rows[i].value[ND_METRIC_STEP_MS];
        bool inside = m->rows[i].step >= first && m->rows[i].step < first + steps;
        sum += inside && isfinite(ms) ? ms : 0;
    }
    return sum;
}

/* Of the validations behind them. The trace begins anew behind the step before, ahead of the
 * validation that follows it. */
static double validations_ms(const nd_metrics *m, int64_t first, int64_t steps)
{
    double sum = 0;
    for (size_t i = 0; i < m->validation_count; i++) {
        const nd_validation_row *v = &m->validations[i];
        bool inside = v->step >= first - 1 && v->step < first + steps;
        sum += inside && isfinite(v->ms) ? v->ms : 0;
    }
    return sum;
}

static void write_time_row(nd_doc *doc, const char *name, double ms, double steps, double all)
{
    char text[ND_SHORT];
    nd_doc_row_begin(doc);
    nd_doc_cell(doc, name);
    nd_doc_cell(doc, nd_figure(text, sizeof text, ms / steps, 4));
    nd_doc_cell_share(doc, ms / all);
    nd_doc_row_end(doc);
}

void nd_section_times(nd_doc *doc, const nd_run_view *run)
{
    static const char *const heads[] = {"work", "ms of a step", "share"};
    int64_t first = trace_count(run->trace, "first_step");
    int64_t steps = trace_count(run->trace, "steps");
    const json_t *validation = json_object_get(run->trace, "validation_ms");
    double counted = 0, all = steps_ms(&run->metrics, first, steps);
    if (!validation) { /* of an earlier version, whose calls have those of validations */
        all += validations_ms(&run->metrics, first, steps);
    }
    for (nd_trace_kind k = 0; k < ND_TRACE_COUNT; k++) {
        counted += trace_number(run->trace, nd_trace_name(k), "ms");
    }
    all = all > counted ? all : counted;
    if (steps <= 0 || !(all > 0)) {
        return;
    }
    nd_doc_heading(doc, 2, "Where the time of rank 0 went");
    nd_doc_say(doc,
               "Steps %lld to %lld, %s. Communication is the time in calls: on a CPU also the wait "
               "for slower ranks.",
               (long long)first, (long long)(first + steps - 1),
               validation ? "without validations" : "validations included");
    nd_doc_table_begin(doc, false, 3, heads);
    for (nd_trace_kind k = 0; k < ND_TRACE_COUNT; k++) {
        double ms = trace_number(run->trace, nd_trace_name(k), "ms");
        if (ms > 0) {
            write_time_row(doc, nd_trace_name(k), ms, (double)steps, all);
        }
    }
    write_time_row(doc, "everything else", all - counted, (double)steps, all);
    nd_doc_table_end(doc);
    if (json_number_value(validation) > 0) {
        nd_doc_say(doc, "Validations between and after these steps took %.2f s.",
                   json_number_value(validation) / 1e3);
    }
}

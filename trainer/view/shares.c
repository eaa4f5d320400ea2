// SPDX-License-Identifier: Apache-2.0
/* The sections that divide the time of rank 0, the bytes that it sent, and its planned memory. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/trace.h"
#include "trainer/report/report.h"
#include "trainer/view/parts.h"

enum { BUFFERS_MAX = 16 };

static json_t *bytes_cell(double bytes)
{
    char text[ND_SHORT];
    return nd_cell("%s", nd_bytes_format(text, sizeof text, bytes));
}

static double trace_ms(const json_t *trace, nd_trace_kind kind)
{
    char key[ND_SHORT];
    snprintf(key, sizeof key, "%s_ms", nd_trace_name(kind));
    return nd_json_number(trace, key);
}

static void write_time(nd_doc *doc, const char *name, double ms, double steps, double all)
{
    ND_DOC_ROW(doc, nd_cell("%s", name), nd_cell_figure(ms / steps, 4), nd_cell_share(ms / all));
}

/* The time of the steps that the trace covers. */
static double ms_of_steps(const nd_metrics *m, double first, double steps)
{
    const double *step = nd_metrics_column(m, &m->steps, "step");
    size_t from = 0, to;
    while (from < m->steps.rows && step[from] < first) {
        from++;
    }
    for (to = from; to < m->steps.rows && step[to] < first + steps;) {
        to++;
    }
    return nd_column_sum_up(nd_metrics_column(m, &m->steps, "step_ms"), from, to).sum;
}

void nd_section_times(nd_doc *doc, const nd_run_view *run)
{
    const double first = nd_json_number(run->trace, "first_step");
    const double steps = nd_json_number(run->trace, "steps");
    const double validations = nd_json_number(run->trace, "validation_ms");
    double counted = 0, all = ms_of_steps(&run->metrics, first, steps);
    for (nd_trace_kind k = 0; k < ND_TRACE_COUNT; k++) {
        counted += trace_ms(run->trace, k);
    }
    all = all > counted ? all : counted;
    if (!(steps > 0) || !(all > 0)) {
        return;
    }
    nd_doc_add(doc, "heading", "Where the time of rank 0 went");
    nd_doc_say(doc,
               "Steps %.0f to %.0f, without validations. Communication is the time in calls: on a "
               "CPU also the wait for slower ranks.",
               first, first + steps - 1);
    nd_doc_table(doc, false, "work|ms of a step|share");
    for (nd_trace_kind k = 0; k < ND_TRACE_COUNT; k++) {
        if (trace_ms(run->trace, k) > 0) {
            write_time(doc, nd_trace_name(k), trace_ms(run->trace, k), steps, all);
        }
    }
    write_time(doc, "everything else", all - counted, steps, all);
    if (validations > 0) {
        nd_doc_say(doc, "Validations between and after these steps took %.2f s.",
                   validations / 1e3);
    }
}

void nd_section_wire(nd_doc *doc, const nd_run_view *run)
{
    const nd_metrics *m = &run->metrics;
    double sums[ND_TRAFFIC_COUNT], all = 0;
    for (nd_traffic_kind k = 0; k < ND_TRAFFIC_COUNT; k++) {
        char name[ND_SHORT];
        snprintf(name, sizeof name, "wire.%s", nd_traffic_name(k));
        sums[k] = nd_column_sum_up(nd_metrics_column(m, &m->steps, name), 0, m->steps.rows).sum;
        all += sums[k];
    }
    if (!(all > 0)) {
        return;
    }
    nd_doc_add(doc, "heading", "Bytes on the wire, sent by rank 0");
    nd_doc_table(doc, false, "kind|of a step, mean|share");
    for (nd_traffic_kind k = 0; k < ND_TRAFFIC_COUNT; k++) {
        ND_DOC_ROW(doc, nd_cell("%s", nd_traffic_name(k)),
                   bytes_cell(sums[k] / (double)m->steps.rows), nd_cell_share(sums[k] / all));
    }
}

typedef struct buffer {
    const char *name;
    double bytes;
} buffer;

static int by_bytes(const void *a, const void *b)
{
    const buffer *x = a, *y = b;
    return x->bytes < y->bytes ? 1 : x->bytes > y->bytes ? -1 : strcmp(x->name, y->name);
}

nd_status nd_section_memory(nd_doc *doc, const nd_run_view *run)
{
    json_t *plan = json_object_get(run->record, "memory_plan_bytes"), *value;
    const char *key;
    buffer *list = NULL;
    int count = 0;
    double all = 0;
    if (json_object_size(plan) == 0) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(json_object_size(plan), &list));
    json_object_foreach(plan, key, value)
    {
        list[count++] = (buffer){key, json_number_value(value)};
        all += json_number_value(value);
    }
    qsort(list, (size_t)count, sizeof *list, by_bytes);
    nd_doc_add(doc, "heading", "Planned memory of rank 0, largest buffers");
    nd_doc_table(doc, false, "buffer|bytes|share");
    for (int i = 0; i < count && i < BUFFERS_MAX; i++) {
        ND_DOC_ROW(doc, nd_cell("%s", list[i].name), bytes_cell(list[i].bytes),
                   nd_cell_share(list[i].bytes / all));
    }
    free(list);
    return ND_OK;
}

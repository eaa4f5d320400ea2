// SPDX-License-Identifier: Apache-2.0
/* Bytes on the wire, and the planned memory of rank 0. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/report/report.h"
#include "trainer/view/sections.h"

enum { BUFFERS_MAX = 16 };

void nd_section_wire(nd_doc *doc, const nd_run_view *run)
{
    static const char *const heads[] = {"kind", "of a step, mean", "share"};
    const nd_metrics *m = &run->metrics;
    double sums[ND_TRAFFIC_COUNT] = {0}, all = 0;
    for (size_t i = 0; i < m->row_count; i++) {
        for (int k = 0; k < ND_TRAFFIC_COUNT; k++) {
            double bytes = (double)m->rows[i].value[ND_METRIC_WIRE_KINDS + k];
            sums[k] += isfinite(bytes) ? bytes : 0;
            all += isfinite(bytes) ? bytes : 0;
        }
    }
    if (!(all > 0)) {
        return;
    }
    nd_doc_heading(doc, 2, "Bytes on the wire, sent by rank 0");
    nd_doc_table_begin(doc, false, 3, heads);
    for (nd_traffic_kind k = 0; k < ND_TRAFFIC_COUNT; k++) {
        char text[ND_SHORT];
        nd_doc_row_begin(doc);
        nd_doc_cell(doc, nd_traffic_name(k));
        nd_doc_cell(doc, nd_bytes_format(text, sizeof text, sums[k] / (double)m->row_count));
        nd_doc_cell_share(doc, sums[k] / all);
        nd_doc_row_end(doc);
    }
    nd_doc_table_end(doc);
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
    static const char *const heads[] = {"buffer", "bytes", "share"};
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
    nd_doc_heading(doc, 2, "Planned memory of rank 0, largest buffers");
    nd_doc_table_begin(doc, false, 3, heads);
    for (int i = 0; i < count && i < BUFFERS_MAX; i++) {
        char text[ND_SHORT];
        nd_doc_row_begin(doc);
        nd_doc_cell(doc, list[i].name);
        nd_doc_cell(doc, nd_bytes_format(text, sizeof text, list[i].bytes));
        nd_doc_cell_share(doc, all > 0 ? list[i].bytes / all : 0);
        nd_doc_row_end(doc);
    }
    nd_doc_table_end(doc);
    free(list);
    return ND_OK;
}

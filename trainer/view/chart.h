// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_CHART_H
#define ND_VIEW_CHART_H
/*
 * A chart as SVG inside an HTML page: curves over steps, each a band from least to largest value
 * with the mean as a line. Colours are classes of the page's style sheet (c0 to c7), so that they
 * suit light and dark. Behind it lie the values for the page's script, which shows those under the
 * pointer; without a script the chart is the same.
 */
#include "trainer/view/curve.h"
#include "trainer/view/doc.h"

enum { ND_CHART_COLOURS = 8 };

typedef struct nd_chart_line {
    const nd_curve *curve; /* borrowed */
    const char *name;
    int colour;  /* from 0; those from ND_CHART_COLOURS on repeat, dashed */
    bool points; /* few values, each drawn as a dot: validations */
} nd_chart_line;

typedef struct nd_chart_mark {
    double step;
    const char *text; /* shown under the pointer */
} nd_chart_mark;

typedef struct nd_chart {
    const char *id, *title, *unit; /* id: letters and '-' */
    const nd_chart_line *lines;
    int line_count;
    const nd_chart_mark *marks; /* vertical lines */
    int mark_count;
    int64_t first, last; /* steps */
    bool from_zero;      /* the axis of values begins at 0 */
} nd_chart;

/* Nothing when no line has a value. */
void nd_chart_write(nd_doc *doc, const nd_chart *chart);

#endif

// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/chart.h"

#include <math.h>
#include <string.h>

/* In units of the drawing, which the page scales to its width. */
enum { WIDTH = 640, HEIGHT = 260, LEFT = 64, RIGHT = 12, TOP = 10, BOTTOM = 30 };

static const double log_from = 20; /* largest over least value that makes an axis logarithmic */

typedef struct plot {
    const nd_chart *chart;
    FILE *out;
    double low, high; /* of the axis of values; logarithms when it is logarithmic */
    bool log;
} plot;

static double x_of(const plot *p, double step)
{
    double span = (double)(p->chart->last - p->chart->first);
    double part = span > 0 ? (step - (double)p->chart->first) / span : 0.5;
    return LEFT + part * (WIDTH - LEFT - RIGHT);
}

static double y_of(const plot *p, double value)
{
    double v = p->log ? log10(value) : value;
    return TOP + (p->high - v) / (p->high - p->low) * (HEIGHT - TOP - BOTTOM);
}

/* False: there is nothing to draw. */
static bool find_range(plot *p)
{
    double low = INFINITY, high = -INFINITY;
    for (int i = 0; i < p->chart->line_count; i++) {
        const nd_curve *curve = p->chart->lines[i].curve;
        low = curve->low < low ? curve->low : low;
        high = curve->high > high ? curve->high : high;
    }
    if (low > high) {
        return false;
    }
    p->log = !p->chart->from_zero && low > 0 && high / low > log_from;
    if (p->log) {
        low = log10(low);
        high = log10(high);
    }
    low = p->chart->from_zero && low > 0 ? 0 : low;
    double pad = high > low ? (high - low) * 0.04 : fabs(high) > 0 ? fabs(high) * 0.05 : 1;
    p->low = p->chart->from_zero && low == 0 ? 0 : low - pad;
    p->high = high + pad;
    return true;
}

static void write_value_axis(const plot *p)
{
    double ticks[ND_TICKS_MAX], low = p->low, high = p->high;
    char text[64];
    if (p->log) {
        low = pow(10, low);
        high = pow(10, high);
    }
    int count = nd_ticks(low, high, 5, p->log, ticks);
    fputs("<path class=\"grid\" d=\"", p->out);
    for (int i = 0; i < count; i++) {
        fprintf(p->out, "M%d,%.1fH%d", LEFT, y_of(p, ticks[i]), WIDTH - RIGHT);
    }
    fputs("\"/>\n", p->out);
    for (int i = 0; i < count; i++) {
        fprintf(p->out, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", LEFT - 6,
                y_of(p, ticks[i]) + 4, nd_figure(text, sizeof text, ticks[i], 4));
    }
}

static void write_step_axis(const plot *p)
{
    double ticks[ND_TICKS_MAX];
    char text[64];
    int count = nd_ticks((double)p->chart->first, (double)p->chart->last, 6, 0, ticks);
    if (count == 0) {
        ticks[count++] = (double)p->chart->first;
    }
    for (int i = 0; i < count; i++) {
        if (ticks[i] == floor(ticks[i])) { /* there is no half step */
            fprintf(p->out, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
                    x_of(p, ticks[i]), HEIGHT - BOTTOM + 18,
                    nd_figure(text, sizeof text, ticks[i], 6));
        }
    }
    fprintf(p->out, "<path class=\"axis\" d=\"M%d,%dV%dH%d\"/>\n", LEFT, TOP, HEIGHT - BOTTOM,
            WIDTH - RIGHT);
}

static void write_marks(const plot *p, nd_doc *doc)
{
    for (int i = 0; i < p->chart->mark_count; i++) {
        const nd_chart_mark *mark = &p->chart->marks[i];
        double x = x_of(p, mark->step);
        fprintf(p->out, "<path class=\"mark\" d=\"M%.1f,%dV%d\"><title>", x, TOP, HEIGHT - BOTTOM);
        nd_doc_text(doc, mark->text);
        fputs("</title></path>\n", p->out);
    }
}

/* The classes of a line: its colour, and dashes where colours repeat. */
static void write_class(FILE *out, const char *kind, const nd_chart_line *line)
{
    fprintf(out, "class=\"%s c%d%s\"", kind, line->colour % ND_CHART_COLOURS,
            line->colour >= ND_CHART_COLOURS ? " dash" : "");
}

static void write_band(const plot *p, const nd_chart_line *line)
{
    const nd_curve *c = line->curve;
    bool wide = false;
    for (int i = 0; i < c->parts; i++) {
        wide |= c->part[i].low < c->part[i].high;
    }
    if (!wide) {
        return;
    }
    fputs("<path ", p->out);
    write_class(p->out, "band", line);
    fputs(" d=\"", p->out);
    for (int i = 0; i < c->parts; i++) {
        fprintf(p->out, "%s%.1f,%.1f", i == 0 ? "M" : "L", x_of(p, c->part[i].step),
                y_of(p, c->part[i].high));
    }
    for (int i = c->parts - 1; i >= 0; i--) {
        fprintf(p->out, "L%.1f,%.1f", x_of(p, c->part[i].step), y_of(p, c->part[i].low));
    }
    fputs("Z\"/>\n", p->out);
}

static void write_curve(const plot *p, const nd_chart_line *line)
{
    const nd_curve *c = line->curve;
    if (c->parts > 1) {
        fputs("<polyline ", p->out);
        write_class(p->out, "line", line);
        fputs(" points=\"", p->out);
        for (int i = 0; i < c->parts; i++) {
            fprintf(p->out, "%s%.1f,%.1f", i == 0 ? "" : " ", x_of(p, c->part[i].step),
                    y_of(p, c->part[i].mean));
        }
        fputs("\"/>\n", p->out);
    }
    for (int i = 0; i < c->parts && (line->points || c->parts == 1); i++) {
        fputs("<circle ", p->out);
        write_class(p->out, "dot", line);
        fprintf(p->out, " cx=\"%.1f\" cy=\"%.1f\" r=\"3\"/>\n", x_of(p, c->part[i].step),
                y_of(p, c->part[i].mean));
    }
}

static void write_legend(const nd_chart *chart, nd_doc *doc)
{
    for (int i = 0; i < chart->line_count && chart->line_count > 1; i++) {
        fputs(" <span ", doc->out);
        write_class(doc->out, "key", &chart->lines[i]);
        fputs(">", doc->out);
        nd_doc_text(doc, chart->lines[i].name);
        fputs("</span>", doc->out);
    }
}

typedef enum which { OF_STEP, OF_MEAN, OF_LOW, OF_HIGH } which;

static void write_list(FILE *out, const char *name, const nd_curve *c, which w)
{
    fprintf(out, ",\"%s\":[", name);
    for (int i = 0; i < c->parts; i++) {
        const nd_curve_part *part = &c->part[i];
        double value = w == OF_STEP   ? part->step
                       : w == OF_MEAN ? part->mean
                       : w == OF_LOW  ? part->low
                                      : part->high;
        fprintf(out, w == OF_STEP ? "%s%.10g" : "%s%.5g", i == 0 ? "" : ",", value);
    }
    fputs("]", out);
}

/* For the script of the page: where the axes lie, and each line's steps and values. */
static void write_values(const plot *p)
{
    const nd_chart *chart = p->chart;
    fprintf(p->out,
            "<script type=\"application/json\">{\"x\":[%d,%d],\"y\":[%d,%d],\"steps\":[%lld,%lld],"
            "\"unit\":\"",
            LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM, (long long)chart->first,
            (long long)chart->last);
    nd_doc_json_text(p->out, chart->unit);
    fputs("\",\"lines\":[", p->out);
    for (int i = 0; i < chart->line_count; i++) {
        fprintf(p->out, "%s{\"name\":\"", i == 0 ? "" : ",");
        nd_doc_json_text(p->out, chart->lines[i].name);
        fputs("\"", p->out);
        write_list(p->out, "step", chart->lines[i].curve, OF_STEP);
        write_list(p->out, "mean", chart->lines[i].curve, OF_MEAN);
        write_list(p->out, "low", chart->lines[i].curve, OF_LOW);
        write_list(p->out, "high", chart->lines[i].curve, OF_HIGH);
        fputs("}", p->out);
    }
    fputs("]}</script>\n", p->out);
}

static void write_not_finite(const nd_chart *chart, nd_doc *doc)
{
    for (int i = 0; i < chart->line_count; i++) {
        long long count = chart->lines[i].curve->not_finite;
        if (count > 0) {
            nd_doc_say(doc, "%s: %lld value%s not finite, and not drawn", chart->lines[i].name,
                       count, count == 1 ? " is" : "s are");
        }
    }
}

void nd_chart_write(nd_doc *doc, const nd_chart *chart)
{
    plot p = {.chart = chart, .out = doc->out};
    if (!find_range(&p)) {
        return;
    }
    fprintf(doc->out, "<figure class=\"chart\" id=\"%s\"><figcaption><b>", chart->id);
    nd_doc_text(doc, chart->title);
    fputs("</b> ", doc->out);
    nd_doc_text(doc, chart->unit);
    fputs(p.log ? ", logarithmic" : "", doc->out);
    write_legend(chart, doc);
    fprintf(doc->out, "</figcaption>\n<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH,
            HEIGHT);
    nd_doc_text(doc, chart->title);
    fputs(" over steps\">\n", doc->out);
    write_value_axis(&p);
    write_step_axis(&p);
    write_marks(&p, doc);
    for (int i = 0; i < chart->line_count; i++) {
        write_band(&p, &chart->lines[i]);
    }
    for (int i = 0; i < chart->line_count; i++) {
        write_curve(&p, &chart->lines[i]);
    }
    fputs("</svg>\n", doc->out);
    write_values(&p);
    write_not_finite(chart, doc);
    fputs("</figure>\n", doc->out);
}

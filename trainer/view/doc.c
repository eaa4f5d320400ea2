// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/parts.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/printable.h"

/* Cells and blocks. */

char *nd_figure(char *text, size_t size, double value, int digits)
{
    static const struct {
        double from, factor;
        const char *unit;
    } units[] = {{1e12, 1e12, " T"}, {1e9, 1e9, " G"}, {1e6, 1e6, " M"}, {1e4, 1e3, " k"}};
    size_t i = 0;
    while (i < 4 && fabs(value) < units[i].from) {
        i++;
    }
    if (!isfinite(value)) {
        snprintf(text, size, "-");
    } else if (i < 4) {
        snprintf(text, size, "%.*g%s", digits, value / units[i].factor, units[i].unit);
    } else {
        snprintf(text, size, "%.*g", fabs(value) >= 1000 ? 5 : digits, value);
    }
    return text;
}

json_t *nd_doc_text(const char *text, const char *keep)
{
    const size_t size = 6 * strlen(text) + 1; /* of \u202e for one byte; a character has more */
    char *shown = malloc(size);
    if (!shown) {
        return NULL;
    }
    nd_escape(shown, size, text, keep);
    json_t *value = json_string(shown);
    free(shown);
    return value;
}

static json_t *format_text(const char *format, va_list args)
{
    char *text = NULL;
    if (vasprintf(&text, format, args) < 0) {
        return NULL;
    }
    json_t *value = nd_doc_text(text, "");
    free(text);
    return value;
}

json_t *nd_cell(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    json_t *cell = format_text(format, args);
    va_end(args);
    return cell;
}

json_t *nd_cell_figure(double value, int digits)
{
    char text[64];
    return json_string(nd_figure(text, sizeof text, value, digits));
}

json_t *nd_cell_share(double share)
{
    return json_real(!(share > 0) ? 0 : share > 1 ? 1 : round(share * 1e4) / 1e4);
}

/* Steals the value. */
static void add_block(nd_doc *doc, const char *kind, json_t *value)
{
    json_t *block = json_object();
    nd_json_set(&block, kind, value);
    nd_json_append(&doc->blocks, block);
}

void nd_doc_add(nd_doc *doc, const char *kind, const char *text)
{
    add_block(doc, kind, nd_doc_text(text, strcmp(kind, "code") == 0 ? "\n\t" : ""));
}

void nd_doc_say(nd_doc *doc, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    add_block(doc, "say", format_text(format, args));
    va_end(args);
}

/* Adds to an array of the table that is the last block. */
static void add_to_table(nd_doc *doc, const char *list, json_t *value)
{
    const size_t count = json_array_size(doc->blocks);
    json_t *table = count > 0 ? json_array_get(doc->blocks, count - 1) : NULL;
    if (json_array_append_new(json_object_get(table, list), value) != 0) {
        json_decref(doc->blocks);
        doc->blocks = NULL;
    }
}

void nd_doc_table(nd_doc *doc, bool words, const char *heads)
{
    nd_json_append(&doc->blocks, json_pack("{s:[], s:b, s:[]}", "heads", "words", words, "rows"));
    for (const char *head = heads; head;) {
        const size_t length = strcspn(head, "|");
        add_to_table(doc, "heads", json_stringn(head, length));
        head = head[length] ? head + length + 1 : NULL;
    }
}

void nd_doc_head(nd_doc *doc, const char *head)
{
    add_to_table(doc, "heads", nd_doc_text(head, ""));
}

void nd_doc_row(nd_doc *doc, json_t **cells, size_t count)
{
    json_t *row = json_array();
    for (size_t i = 0; i < count; i++) {
        nd_json_append(&row, cells[i]);
    }
    add_to_table(doc, "rows", row);
}

/* Markdown. */

/* These mean something anywhere in a line; those that do so at its beginning only cannot stand
 * there, since every text follows other text or a blank. Markdown may hold HTML. */
void nd_doc_write_markdown_text(const char *text, FILE *out)
{
    for (; *text; text++) {
        const char *entity = *text == '&'   ? "&amp;"
                             : *text == '<' ? "&lt;"
                             : *text == '>' ? "&gt;"
                                            : NULL;
        if (entity) {
            fputs(entity, out);
        } else {
            fputs(strchr("\\`*_{}[]|#~$!", *text) ? "\\" : "", out);
            fputc(*text, out);
        }
    }
}

static void write_paragraph(const char *before, const char *text, const char *after, FILE *out)
{
    fputs(before, out);
    nd_doc_write_markdown_text(text, out);
    fputs(after, out);
}

/* Each line is indented, which keeps it from ending the block. */
static void write_code(const char *text, FILE *out)
{
    fputs("\n", out);
    while (*text) {
        const size_t length = strcspn(text, "\n");
        fprintf(out, "    %.*s\n", (int)length, text);
        text += length + (text[length] == '\n');
    }
    fputs("\n", out);
}

static void write_row(const json_t *cells, FILE *out)
{
    const json_t *cell;
    size_t i;
    fputs("|", out);
    json_array_foreach(cells, i, cell)
    {
        if (json_is_number(cell)) {
            fprintf(out, " %.1f %% |", 100 * json_number_value(cell));
        } else {
            write_paragraph(" ", json_string_value(cell), " |", out);
        }
    }
    fputs("\n", out);
}

static void write_table(const json_t *table, FILE *out)
{
    const json_t *heads = json_object_get(table, "heads"), *row;
    const bool words = json_is_true(json_object_get(table, "words"));
    size_t i;
    write_row(heads, out);
    fputs("|", out);
    for (i = 0; i < json_array_size(heads); i++) {
        fputs(i > 0 && !words ? "---:|" : "---|", out);
    }
    fputs("\n", out);
    json_array_foreach(json_object_get(table, "rows"), i, row)
    {
        write_row(row, out);
    }
    fputs("\n", out);
}

void nd_doc_write_markdown(const json_t *blocks, FILE *out)
{
    const json_t *block;
    size_t i;
    json_array_foreach(blocks, i, block)
    {
        const char *heading = json_string_value(json_object_get(block, "heading"));
        const char *fold = json_string_value(json_object_get(block, "fold"));
        const char *say = json_string_value(json_object_get(block, "say"));
        const char *code = json_string_value(json_object_get(block, "code"));
        if (heading || fold) {
            write_paragraph(heading ? "\n## " : "\n### ", heading ? heading : fold, "\n\n", out);
        } else if (say) {
            write_paragraph("", say, "\n\n", out);
        } else if (code) {
            write_code(code, out);
        } else if (json_object_get(block, "heads")) {
            write_table(block, out);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/doc.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "runtime/base/printable.h"

enum { SAY_MAX_BYTES = 4096 };

/* Characters that mean something in Markdown anywhere in a line; those that do so at its beginning
 * only cannot stand there, since every text follows other text or a blank. */
static const char markdown_specials[] = "\\`*_{}[]<>|&#~$!";

/* One printable character of one byte. */
static void put_plain(nd_doc *doc, char c)
{
    const char *entity = c == '&'    ? "&amp;"
                         : c == '<'  ? "&lt;"
                         : c == '>'  ? "&gt;"
                         : c == '"'  ? "&quot;"
                         : c == '\'' ? "&#39;"
                                     : NULL;
    bool html = doc->kind == ND_DOC_HTML;
    bool angle = c == '<' || c == '>' || c == '&'; /* Markdown may hold HTML */
    if (entity && (html || angle)) {
        fputs(entity, doc->out);
        return;
    }
    if (!html && strchr(markdown_specials, c)) {
        fputc('\\', doc->out);
    }
    fputc(c, doc->out);
}

void nd_doc_text(nd_doc *doc, const char *text)
{
    size_t left = strlen(text);
    while (left > 0) {
        unsigned code = 0;
        int length = nd_utf8_decode(text, left, &code);
        if (length == 1 && nd_is_printable_code(code)) {
            put_plain(doc, *text);
        } else if (length > 1 && nd_is_printable_code(code)) {
            fwrite(text, 1, (size_t)length, doc->out);
        } else {
            const char *slash = doc->kind == ND_DOC_MARKDOWN ? "\\\\" : "\\";
            bool byte = length <= 1;
            fprintf(doc->out, byte ? "%sx%02x" : "%su%04x", slash,
                    byte ? (unsigned)(unsigned char)*text : code);
        }
        length = length > 0 ? length : 1;
        text += length;
        left -= (size_t)length;
    }
}

void nd_doc_heading(nd_doc *doc, int level, const char *text)
{
    if (doc->kind == ND_DOC_HTML) {
        fprintf(doc->out, "<h%d>", level);
        nd_doc_text(doc, text);
        fprintf(doc->out, "</h%d>\n", level);
        return;
    }
    fprintf(doc->out, "\n%.*s ", level, "######");
    nd_doc_text(doc, text);
    fputs("\n\n", doc->out);
}

void nd_doc_say(nd_doc *doc, const char *format, ...)
{
    char text[SAY_MAX_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fputs(doc->kind == ND_DOC_HTML ? "<p>" : "", doc->out);
    nd_doc_text(doc, text);
    fputs(doc->kind == ND_DOC_HTML ? "</p>\n" : "\n\n", doc->out);
}

/* In Markdown each line is indented, which keeps it from ending the block. */
void nd_doc_code(nd_doc *doc, const char *text)
{
    bool html = doc->kind == ND_DOC_HTML;
    fputs(html ? "<pre>" : "\n", doc->out);
    while (*text) {
        char line[1024];
        size_t length = strcspn(text, "\n");
        size_t taken = length < sizeof line ? length : sizeof line - 1;
        while (taken < length && taken > 1 && ((unsigned char)text[taken] & 0xc0) == 0x80) {
            taken--; /* a character is not cut */
        }
        memcpy(line, text, taken);
        line[taken] = '\0';
        if (html) {
            nd_doc_text(doc, line);
            fputs(taken == length ? "\n" : "", doc->out);
        } else {
            char shown[sizeof line * 4];
            nd_escape(shown, sizeof shown, line, "");
            fprintf(doc->out, "    %s\n", shown);
        }
        text += taken + (taken == length && text[taken] == '\n');
    }
    fputs(html ? "</pre>\n" : "\n", doc->out);
}

void nd_doc_table_begin(nd_doc *doc, bool words, int columns, const char *const *heads)
{
    if (doc->kind == ND_DOC_HTML) {
        fprintf(doc->out, "<div class=\"scroll\"><table%s>\n<thead><tr>",
                words ? " class=\"words\"" : "");
        for (int i = 0; i < columns; i++) {
            fputs("<th>", doc->out);
            nd_doc_text(doc, heads[i]);
            fputs("</th>", doc->out);
        }
        fputs("</tr></thead>\n<tbody>\n", doc->out);
        return;
    }
    fputs("|", doc->out);
    for (int i = 0; i < columns; i++) {
        fputs(" ", doc->out);
        nd_doc_text(doc, heads[i]);
        fputs(" |", doc->out);
    }
    fputs("\n|", doc->out);
    for (int i = 0; i < columns; i++) {
        fputs(i > 0 && !words ? "---:|" : "---|", doc->out);
    }
    fputs("\n", doc->out);
}

void nd_doc_row_begin(nd_doc *doc)
{
    doc->column = 0;
    fputs(doc->kind == ND_DOC_HTML ? "<tr>" : "|", doc->out);
}

static void open_cell(nd_doc *doc)
{
    bool html = doc->kind == ND_DOC_HTML;
    fputs(!html ? " " : doc->column == 0 ? "<th scope=\"row\">" : "<td>", doc->out);
}

static void close_cell(nd_doc *doc)
{
    bool html = doc->kind == ND_DOC_HTML;
    fputs(!html ? " |" : doc->column == 0 ? "</th>" : "</td>", doc->out);
    doc->column++;
}

void nd_doc_cell(nd_doc *doc, const char *text)
{
    open_cell(doc);
    nd_doc_text(doc, text);
    close_cell(doc);
}

void nd_doc_cellf(nd_doc *doc, const char *format, ...)
{
    char text[SAY_MAX_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    nd_doc_cell(doc, text);
}

void nd_doc_cell_share(nd_doc *doc, double share)
{
    double percent = isfinite(share) ? share * 100 : 0;
    percent = percent < 0 ? 0 : percent > 100 ? 100 : percent;
    open_cell(doc);
    if (doc->kind ==
        ND_DOC_HTML) { /* SVG needs no style of its own, which the page's rules forbid */
        fprintf(doc->out,
                "<svg class=\"bar\" viewBox=\"0 0 100 8\" preserveAspectRatio=\"none\">"
                "<rect width=\"%.2f\" height=\"8\"/></svg> ",
                percent);
    }
    fprintf(doc->out, "%.1f %%", percent);
    close_cell(doc);
}

void nd_doc_row_end(nd_doc *doc)
{
    fputs(doc->kind == ND_DOC_HTML ? "</tr>\n" : "\n", doc->out);
}

void nd_doc_table_end(nd_doc *doc)
{
    fputs(doc->kind == ND_DOC_HTML ? "</tbody></table></div>\n" : "\n", doc->out);
}

void nd_doc_fold_begin(nd_doc *doc, const char *title)
{
    if (doc->kind == ND_DOC_HTML) {
        fputs("<details><summary>", doc->out);
        nd_doc_text(doc, title);
        fputs("</summary>\n", doc->out);
        return;
    }
    nd_doc_heading(doc, 3, title);
}

void nd_doc_fold_end(nd_doc *doc)
{
    fputs(doc->kind == ND_DOC_HTML ? "</details>\n" : "", doc->out);
}

void nd_doc_json_text(FILE *out, const char *text)
{
    size_t left = strlen(text);
    while (left > 0) {
        unsigned code = 0;
        int length = nd_utf8_decode(text, left, &code);
        bool plain = length > 0 && nd_is_printable_code(code) && !strchr("<>&\"'\\", *text);
        if (plain) {
            fwrite(text, 1, (size_t)length, out);
        } else if (length > 0 && code < 0x10000) {
            fprintf(out, "\\u%04x", code);
        } else {
            fputs("\\ufffd", out);
        }
        length = length > 0 ? length : 1;
        text += length;
        left -= (size_t)length;
    }
}

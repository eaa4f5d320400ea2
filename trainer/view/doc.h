// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_DOC_H
#define ND_VIEW_DOC_H
/*
 * Headings, paragraphs and tables of a report, as HTML or as Markdown. Whatever a caller gives as
 * text is escaped here: no text from a run can become markup, and bytes that are no UTF-8, control
 * characters and marks that reverse the direction of writing are written as \xNN or \uNNNN.
 */
#include <stdbool.h>
#include <stdio.h>

typedef enum nd_doc_kind { ND_DOC_HTML = 0, ND_DOC_MARKDOWN } nd_doc_kind;

typedef struct nd_doc {
    FILE *out; /* borrowed; errors are found by its owner with ferror */
    nd_doc_kind kind;
    int column; /* of the row that is begun */
} nd_doc;

/* Escaped, as it stands: in an element of HTML or a value in double quotes, or in Markdown. */
void nd_doc_text(nd_doc *doc, const char *text);
void nd_doc_heading(nd_doc *doc, int level, const char *text);
/* A paragraph; what the format gives is escaped. Cut after 4,095 bytes. */
void nd_doc_say(nd_doc *doc, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A text in which line ends and blanks count. */
void nd_doc_code(nd_doc *doc, const char *text);

/* A table: its head, then rows of cells. The first column has words, the others numbers, unless the
 * table is one of words. */
void nd_doc_table_begin(nd_doc *doc, bool words, int columns, const char *const *heads);
void nd_doc_row_begin(nd_doc *doc);
void nd_doc_cell(nd_doc *doc, const char *text);
void nd_doc_cellf(nd_doc *doc, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A cell with a bar of `share` (0 to 1) of its width, and the share in percent. */
void nd_doc_cell_share(nd_doc *doc, double share);
void nd_doc_row_end(nd_doc *doc);
void nd_doc_table_end(nd_doc *doc);

/* What lies between is folded away in HTML until the reader opens it. */
void nd_doc_fold_begin(nd_doc *doc, const char *title);
void nd_doc_fold_end(nd_doc *doc);

/* Text within a string of JSON in an element script: '<', '>', '&', quotes and control characters
 * become \u00NN. Without the quotes around it. */
void nd_doc_json_text(FILE *out, const char *text);

#endif

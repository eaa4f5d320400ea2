// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_DOC_H
#define ND_VIEW_DOC_H
/*
 * Headings, paragraphs and tables of a report, as an array of JSON that the script of a page draws
 * (page.js) and that is written as Markdown here:
 *
 *   {"heading": text}  {"say": text}  {"code": text}  {"fold": title}  {"unfold": true}
 *   {"heads": [text, ...], "words": bool, "rows": [[cell, ...], ...]}
 *
 * A cell is a text, or a number from 0 to 1: a share, with a bar. Bytes of a text that are no
 * UTF-8, control characters and marks that reverse the direction of writing become \xNN or \uNNNN.
 * Where memory runs out the array becomes NULL, so only the end is checked.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "runtime/base/json.h"

typedef struct nd_doc {
    json_t *blocks; /* owned; NULL: no memory */
    json_t *table;  /* the table that is begun; owned; NULL: none */
} nd_doc;

void nd_doc_init(nd_doc *doc);
void nd_doc_fini(nd_doc *doc);
/* The array, which is the caller's; NULL: no memory. */
json_t *nd_doc_end(nd_doc *doc);

void nd_doc_heading(nd_doc *doc, const char *text);
/* A paragraph. */
void nd_doc_say(nd_doc *doc, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A text in which line ends and blanks count. */
void nd_doc_code(nd_doc *doc, const char *text);
/* Begins a fold: blocks up to its end are hidden until the reader opens it. */
void nd_doc_fold(nd_doc *doc, const char *title);
void nd_doc_fold_end(nd_doc *doc);

/* A table, whose rows follow. Its first column has words, the others numbers, unless all have
 * words. `heads`: "work|ms of a step|share". */
void nd_doc_table(nd_doc *doc, bool words, const char *heads);
/* A further head. */
void nd_doc_head(nd_doc *doc, const char *head);
#define ND_DOC_ROW(doc, ...)                                                                       \
    nd_doc_row(doc, (json_t *[]){__VA_ARGS__}, sizeof((json_t *[]){__VA_ARGS__}) / sizeof(json_t *))
/* Steals the cells; one that is NULL is a lack of memory. */
void nd_doc_row(nd_doc *doc, json_t **cells, size_t count);

/* Text made printable; NULL: no memory. Line ends and tabs that `keep` has stay. */
json_t *nd_doc_text(const char *text, const char *keep);
/* Cells. */
json_t *nd_cell(const char *format, ...) __attribute__((format(printf, 1, 2)));
json_t *nd_cell_figure(double value, int digits); /* nd_figure */
json_t *nd_cell_share(double share);

void nd_doc_write_markdown(const json_t *blocks, FILE *out);
/* The text alone, escaped. */
void nd_doc_write_markdown_text(const char *text, FILE *out);

#endif

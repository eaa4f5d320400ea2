// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_PAGE_H
#define ND_VIEW_PAGE_H
/*
 * The report of one run or of several (docs/report.md): one file of HTML, or Markdown. What it says
 * is one block of JSON. A page is a text that is the same for all reports, page.html with page.css
 * and page.js, around that block, and its script draws it.
 */
#include <stdio.h>

#include "trainer/view/run_view.h"

enum { ND_PAGE_RUNS_MAX = 32 };

/* The first line of a report in both forms: a file that begins with it may be replaced. */
extern const char nd_page_mark[];

typedef struct nd_page {
    const nd_run_view *runs; /* borrowed */
    int count;               /* 1 to ND_PAGE_RUNS_MAX */
    bool markdown;
    int64_t now; /* UNIX time */
} nd_page;

/* Errors of `out` are its owner's to find. */
nd_status nd_page_write(const nd_page *page, FILE *out);

#endif

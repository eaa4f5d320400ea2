// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_PAGE_H
#define ND_VIEW_PAGE_H
/* The report of one run or of several: one file of HTML, or Markdown (docs/report.md). */
#include "trainer/view/doc.h"
#include "trainer/view/run_view.h"

enum { ND_PAGE_RUNS_MAX = 32 };

/* The first line of a report in both forms: a file that begins with it may be replaced. */
extern const char nd_page_mark[];

typedef struct nd_page {
    const nd_run_view *runs; /* borrowed */
    int count;               /* 1 to ND_PAGE_RUNS_MAX */
    nd_doc_kind kind;
    int64_t now; /* UNIX time */
} nd_page;

/* Errors of `out` are its owner's to find. */
nd_status nd_page_write(const nd_page *page, FILE *out);

#endif

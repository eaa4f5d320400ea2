// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_VIEW_H
#define ND_VIEW_VIEW_H
/*
 * A run folder as a report shows it: its files, and how the run ended. Reading needs no lock, and
 * may look at a run that still writes.
 *
 * The report of one run or of several (docs/report.md) is one file of HTML: a page that is the same
 * for all reports, page.html with page.css and page.js, around one block of JSON, which its script
 * draws. What the run's own files say goes there as it is; this code adds what needs all lines of
 * metrics.jsonl.
 */
#include <jansson.h>
#include <stdio.h>

#include "runtime/mesh/mesh.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/view/metrics.h"

typedef enum nd_run_end {
    ND_RUN_FINISHED = 0,
    ND_RUN_STOPPED_EARLY, /* as train.early_stopping_patience asks */
    ND_RUN_STOPPED,       /* by a signal, behind a checkpoint */
    ND_RUN_FAILED,        /* or stopped by a signal without a checkpoint: its last line says why */
    ND_RUN_RECENT,        /* wrote its last line less than a minute, or ten steps, ago */
    ND_RUN_ENDED_EARLY,   /* as a process does that is killed */
    ND_RUN_UNKNOWN        /* without run.json nobody knows how many steps were wanted */
} nd_run_end;

typedef struct nd_run_view {
    char *folder;     /* owned; as given, without slashes at its end */
    const char *name; /* its last part */
    nd_metrics metrics;
    json_t *record; /* the newest run.json; NULL: there is none */
    json_t *trace;  /* the newest trace.json; NULL */
    char *profile;  /* path of the newest profile.json, owned; NULL */
    nd_saved *saved;
    int saved_count;
    int64_t steps_wanted; /* train.steps; 0: not known */
    int64_t changed;      /* UNIX time of the last line */
    int64_t reached;      /* steps done, as far as the lines say it */
    nd_run_end end;
} nd_run_view;

/* `now`: UNIX time, for the verdict. ND_ERR_DATA: no folder, no metrics.jsonl, not one step in it,
 * or a damaged file. */
nd_status nd_run_view_open(const char *folder, int64_t now, nd_run_view *out);
void nd_run_view_close(nd_run_view *view);

enum { ND_VERDICT_MAX = 1024 };
/* "finished: all 1000 steps, 2 steps skipped", printable; returns text. */
char *nd_run_verdict(const nd_run_view *view, char text[ND_VERDICT_MAX]);

enum { ND_PAGE_RUNS_MAX = 32 };

/* The first line of a report: a file that begins with it may be replaced. */
extern const char nd_page_mark[];

/* Writes the report of 1 to ND_PAGE_RUNS_MAX runs; `now`: UNIX time. Errors of `out` are its
 * owner's to find. */
nd_status nd_page_write(const nd_run_view *runs, int count, int64_t now, FILE *out);

#endif

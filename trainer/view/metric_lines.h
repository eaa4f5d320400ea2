// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_METRIC_LINES_H
#define ND_VIEW_METRIC_LINES_H
/*
 * Lines of metrics.jsonl to entries of lists, in the order of the lines. Lines of steps and
 * validations, of which there may be a million, need no tree of JSON; others do. Private to
 * metrics.c: a part of the file has its own lists, which are then put behind one another.
 */
#include "trainer/view/metrics.h"
#include "trainer/view/scan.h"

typedef enum nd_metric_list {
    ND_METRIC_ROWS = 0,    /* nd_metric_row */
    ND_METRIC_VALIDATIONS, /* nd_validation_row */
    ND_METRIC_SOURCES,     /* nd_source_row */
    ND_METRIC_SETS,        /* nd_source_row */
    ND_METRIC_HEALTH,      /* nd_health_row */
    ND_METRIC_EVENTS,      /* nd_metric_event */
    ND_METRIC_LISTS
} nd_metric_list;

/* Bytes of an entry, which begins with its step as an int64_t. */
size_t nd_metric_entry_bytes(nd_metric_list list);

typedef struct nd_metric_entries {
    void *data; /* (count) of nd_metric_entry_bytes; owned */
    size_t count, room;
} nd_metric_entries;

typedef struct nd_names_found {
    char name[ND_DATA_SOURCES_MAX][ND_DATA_SOURCE_NAME];
    int count;
} nd_names_found;

/* The number of a name, which is added when it is new; -1: there is no room for it. A name that is
 * too long is cut. */
int nd_names_index(nd_names_found *names, const char *name, size_t length);

/* Losses or tokens by name, of one line. */
typedef struct nd_line_sources {
    nd_source_row of[ND_DATA_SOURCES_MAX]; /* without their step */
    int count;
} nd_line_sources;

typedef struct nd_metric_lines {
    nd_metric_entries lists[ND_METRIC_LISTS];
    size_t (*above)[ND_METRIC_EVENTS]; /* (events) entries of the other lists above each; owned */
    size_t above_room;
    nd_names_found sources, sets;
    nd_line_sources of_sources, of_sets; /* scratch: of one line */
    nd_scan_key wire[ND_TRAFFIC_COUNT];  /* names NULL until a line asks for them */
    bool damaged;                        /* the last line is not what ndtrain writes */
} nd_metric_lines;                       /* all zero: no line yet */

/* One line, without its end. ND_OK also when it is damaged. */
nd_status nd_metric_lines_add(nd_metric_lines *lines, const char *text, const char *end);
void nd_metric_lines_fini(nd_metric_lines *lines);

#endif

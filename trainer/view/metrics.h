// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_METRICS_H
#define ND_VIEW_METRICS_H
/*
 * metrics.jsonl of a run, read back (docs/formats.md): every number of its lines as a column of a
 * table, and its events as JSON, in their order. A line "resumed" takes back the lines above it
 * that have later steps.
 *
 * The file may have a million lines and hundreds of megabytes: it is mapped, and lines of numbers
 * are read without a tree of JSON.
 */
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

enum {
    ND_COLUMN_NAME = 96,  /* bytes of a name with its NUL; a longer one is cut */
    ND_COLUMNS_MAX = 1024 /* names in a file; further ones are left out */
};

/* The lines of one kind. A value that a line lacks, and null, is NaN; true is 1, false is 0. */
typedef struct nd_metric_table {
    double *columns[ND_COLUMNS_MAX]; /* [rows] each, owned; NULL: no line has it */
    size_t rows, room;
} nd_metric_table;

typedef struct nd_metrics {
    /* Paths of numbers, "loss" or "wire.weights", in the order in which the file has them first. */
    char (*names)[ND_COLUMN_NAME]; /* [ND_COLUMNS_MAX] owned */
    int name_count;
    nd_metric_table steps, validations, health; /* a line may belong to several */
    json_t *events; /* array of objects with "event" and "step"; owned */
    double *none;   /* a column of NaN, as long as the longest table; owned */
    bool half_line; /* the last line has no end and does not count */
} nd_metrics;

/* ND_ERR_DATA: no such file, or a damaged line, with its number; ND_ERR_IO. */
nd_status nd_metrics_read(const char *path, nd_metrics *out);
void nd_metrics_fini(nd_metrics *metrics);

/* The column with this name; one of NaN where no line has it. A table has "step" and, with it, all
 * its rows. */
const double *nd_metrics_column(const nd_metrics *metrics, const nd_metric_table *table,
                                const char *name);

/* The finite values of some rows of a column. */
typedef struct nd_column_facts {
    double sum, first, last, least, largest; /* NaN, and 0 as the sum, where there is none */
    size_t least_at;                         /* row; the first of equal ones */
    int64_t count;
} nd_column_facts;

/* The rows [from, to). */
nd_column_facts nd_column_sum_up(const double *column, size_t from, size_t to);

/* A number of an event, or another JSON object; 0 where it has none. */
double nd_json_number(const json_t *object, const char *key);
/* A whole number of up to 15 digits; 0 for any other value. */
int64_t nd_json_whole(const json_t *object, const char *key);
/* A text of it; "" where it has none. Borrowed. */
const char *nd_json_words(const json_t *object, const char *key);
/* True for an event of this kind. */
bool nd_event_is(const json_t *event, const char *kind);

#endif

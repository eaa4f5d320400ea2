// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_METRICS_H
#define ND_VIEW_METRICS_H
/*
 * metrics.jsonl of a run, read back (docs/formats.md): every number of its lines in a column, and
 * its events as JSON, in their order. A line "resumed" takes back the lines above it that have
 * later steps. A step without labels has the column "without_labels" in place of "loss",
 * "grad_norm" and "skipped".
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

typedef struct nd_point {
    double step, value; /* null is NaN, true is 1, false is 0 */
} nd_point;

/* The values of one number, by the lines that have it. */
typedef struct nd_column {
    char name[ND_COLUMN_NAME]; /* its path: "loss", "wire.weights"; printable */
    nd_point *points;          /* [count] owned */
    size_t count, room;
} nd_column;

typedef struct nd_metrics {
    nd_column *columns; /* [count] owned; some with fixed names, then as the file has them first */
    int count;
    json_t *events; /* array of objects with "event" and "step"; owned */
} nd_metrics;

/* A last line without an end does not count. ND_ERR_DATA: no such file, or a damaged line, with its
 * number; ND_ERR_IO. */
nd_status nd_metrics_read(const char *path, nd_metrics *out);
void nd_metrics_fini(nd_metrics *metrics);

/* The column with this name; an empty one where no line has it. */
const nd_column *nd_metrics_column(const nd_metrics *metrics, const char *name);
/* Its value at a step, in a file whose steps rise; NaN where it has none. */
double nd_column_at(const nd_column *column, double step);

/* A number of an event, or another JSON object; 0 where it has none. */
double nd_json_number(const json_t *object, const char *key);
/* A number of JSON; null where it is not finite. */
json_t *nd_number(double value);
/* A whole number of up to 15 digits; 0 for any other value. */
int64_t nd_json_whole(const json_t *object, const char *key);
/* A text of it; "" where it has none. Borrowed. */
const char *nd_json_words(const json_t *object, const char *key);

#endif

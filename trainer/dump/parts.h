// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DUMP_PARTS_H
#define ND_DUMP_PARTS_H
/* The names of tensors, for the files of this folder. */
#include "trainer/dump/dump.h"

enum { ND_DUMP_NAME = 160 };

/* A row of points.def. */
typedef struct nd_dump_row {
    const char *name;
    nd_unit_kind unit; /* BLOCK or HEAD */
    bool gradient;
    enum { ND_DUMP_ROWS_LOCAL, ND_DUMP_ROWS_ALL } rows;
    enum { ND_DUMP_COLUMNS_HIDDEN, ND_DUMP_COLUMNS_OUT, ND_DUMP_COLUMNS_IN } columns;
    nd_param_id param;
    enum {
        ND_DUMP_WHEN_ALWAYS,
        ND_DUMP_WHEN_PRE_NORM,
        ND_DUMP_WHEN_POST_NORM,
        ND_DUMP_WHEN_ONE_COPY
    } when;
} nd_dump_row;

extern const nd_dump_row nd_dump_rows[ND_DUMP_POINTS];

/* A tensor that can be dumped: of a micro-batch (row), or of the state (param). */
typedef struct nd_dump_subject {
    char name[ND_DUMP_NAME];
    int64_t order; /* of the computation, the same on every rank and mesh */
    const nd_dump_row *row;
    int64_t layer;
    int micro;
    const nd_param *param; /* NULL: of a micro-batch */
    bool gradient;         /* of param */
} nd_dump_subject;

typedef struct nd_dump_all {
    const nd_layout *layout;
    const nd_shape *shape;
    int64_t tp;
    int micros;
    nd_status (*visit)(void *context, const nd_dump_subject *subject);
    void *context;
} nd_dump_all;

/* Visits every tensor in the order of the computation. */
nd_status nd_dump_each(const nd_dump_all *all);
/* Whether the list of names and patterns, separated by commas, has the name. */
bool nd_dump_names(const char *list, const char *name);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_LAUNCH_TINY_JOB_H
#define ND_TESTS_LAUNCH_TINY_JOB_H
/*
 * A job that trains in seconds: its model and text, the flags that make it, and what it has left in
 * its output folder, dir/run-<name>.
 */
#include "tests/launch/launched.h"

enum { TINY_ARGUMENTS_MAX = 80 };

/* An argument list that grows; all pointers are borrowed. */
typedef struct tiny_arguments {
    const char *list[TINY_ARGUMENTS_MAX]; /* NULL behind the last */
    int count;
} tiny_arguments;
void tiny_add(tiny_arguments *arguments, const char *const *further); /* to NULL; NULL is legal */

/* Files of the model and its text: dir/model.json, dir/text.txt. */
void tiny_write_inputs(tempdir *dir);
/*
 * The flags: those two files, output in dir/run-<name>, F32, one thread, no validation, no saved
 * model. No mesh and no number of steps. Valid until the next call.
 */
const char *const *tiny_flags(const tempdir *dir, const char *name);

/* ndlaunch with `workers` as one sharding group, each step in the log, and further arguments. */
void tiny_ndlaunch(launched *l, const tempdir *dir, const char *name, int workers,
                   const char *const *further);

/* Like tiny_ndlaunch, but without an end (--num-steps); returns once its second step is done. */
void tiny_train(launched *l, const tempdir *dir, const char *name, int workers,
                const char *const *further);

/* Nodes of one job, which meet on loopback. */
typedef struct tiny_nodes {
    const tempdir *dir;
    char endpoint[32], key_file[128];
    int nodes, workers;       /* of the job */
    const char *const *flags; /* of every node, to NULL; or NULL */
} tiny_nodes;

/* Fills dir, endpoint and key_file: a free port, and a new key. */
void tiny_nodes_meet(tiny_nodes *job, const tempdir *dir);
/* ndlaunch of a node; `times`: how often it was started before. Its name is node<node>, later
 * node<node>-<times>. */
void tiny_nodes_start(launched *l, const tiny_nodes *job, int node, int times,
                      const char *const *further);

/* Each of its nodes, for the first time. */
void tiny_nodes_start_all(launched *nodes, const tiny_nodes *job, const char *const *further);

/* Waits until all workers of both nodes wait in this start of the job. */
void tiny_nodes_wait(launched *one, launched *other, int epoch);

/* The runs have the same numbers of each step up to the last, `steps`, as far as they are in the
 * log: loss, norm and learning rate with 17 digits. What was done twice counts as it was done last.
 */
void tiny_expect_same(const tempdir *dir, const char *name, const char *other, int steps);
/* Content of run.json; valid until the next call. */
const char *tiny_record(const tempdir *dir, const char *name);

#endif

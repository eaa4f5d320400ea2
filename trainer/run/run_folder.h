// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_RUN_FOLDER_H
#define ND_RUN_RUN_FOLDER_H
/*
 * What a run leaves behind and shows at its start, on rank 0: the run folder with run.json,
 * metrics.jsonl and trace.json, and the banner on the terminal.
 *
 * run.json holds everything that is needed to say later what a run was. It is written once, before
 * step 1, to a temporary file that is synced and then renamed, so it is whole or absent. A run that
 * is resumed in its folder leaves run-2.json, run-3.json, ..., and appends to metrics.jsonl.
 * docs/formats.md lists its keys.
 */
#include <jansson.h>

#include "trainer/checkpoint/folder.h"
#include "trainer/report/report.h"
#include "trainer/run/run.h"
#include "trainer/step/step.h"

/* Chooses or checks the run folder, output.dir or runs/<config>-<n>, and creates it.
 * ND_ERR_CANTCREATE when it holds a run already or cannot be written. Owned by the caller. */
nd_status nd_run_folder_create(const nd_config *config, char **out);

/* The newest runs/<config>-<n> that has a checkpoint, whole or damaged (.bad); NULL without
 * one. What is no folder, or may not be read, is passed over. Owned by the caller. */
nd_status nd_run_folder_newest(const nd_config *config, char **out);

/* All pointers but those of JSON are borrowed for the call. */
typedef struct nd_run_record {
    const nd_config *config; /* resolved */
    const nd_mesh *mesh;     /* that of rank 0 */
    int argc;                /* the command line as it was given */
    char *const *argv;
    const nd_identity *identity; /* of rank 0 */
    const char *const *hosts;    /* one name per node */
    int host_count;
    json_t *sections; /* the members that say what ran: libraries, machine, data, ...; NULL: memory
                         ran out */
} nd_run_record;

/* Takes the sections over. ND_ERR_CANTCREATE with a sentence when dir/run.json exists or cannot be
 * written. A run that `continues` writes run-2.json, run-3.json, ... beside it. */
nd_status nd_run_record_write(const char *dir, bool continues, nd_run_record *record);

typedef struct nd_run_files nd_run_files;
/* Writes run.json of this run. The command is the one that the user typed: that of ndlaunch, if it
 * started this worker. */
nd_status nd_run_record_make(const nd_run_files *files, const nd_run_context *run,
                             const nd_trainer *trainer);

/* RUN/<name>.json, or, where that exists, RUN/<name>-2.json, ... Owned by the caller. */
nd_status nd_run_file_next(const char *dir, const char *name, char **out);

/* About what one checkpoint takes, its model included. */
uint64_t nd_run_checkpoint_bytes(const nd_config *config, const nd_inputs *inputs);

enum { ND_LIBRARY_COUNT = 5 };

typedef struct nd_run_text {
    const char *key, *value;
} nd_run_text;

/* Fills name and version of the libraries that a run's bits may depend on; returns their number.
 * Strings are static. `open`: also that of UCX where it is not in use, which is opened for it. */
int nd_library_versions(bool open, nd_run_text out[ND_LIBRARY_COUNT]);

/* Rank 0, after its inputs are open and its memory is planned; `dir` is the run folder. ND_ERR_DATA
 * when the spans that do not count in the loss are damaged, of which it prints how many do. */
nd_status nd_banner_print(const nd_run_context *run, const nd_trainer *trainer, const char *dir);

struct nd_run_files {
    char *dir;        /* NULL except on rank 0 */
    bool continues;   /* the folder held this run before */
    bool recorded;    /* this start has made run.json */
    bool made;        /* this start has made the folder */
    nd_run_lock lock; /* rank 0: of the folder */
    nd_sinks sinks;   /* none except on rank 0 */
};

/* `continued`: the folder of a run that goes on in it; "": a fresh one. */
nd_status nd_run_files_open(nd_run_files *files, const nd_run_context *run,
                            const nd_trainer *trainer, const char *continued);
/* Where the time of steps went. */
typedef struct nd_run_trace {
    const nd_trace *trace;     /* without validations */
    int64_t first_step, steps; /* steps count from 1 */
    double validation_seconds; /* of the validations between and after them */
} nd_run_trace;
/* Writes <dir>/trace.json, or trace-2.json, ... */
nd_status nd_run_files_trace(const nd_run_files *files, const nd_run_trace *trace);
/* Rank 0 of a run that continues: renames RUN/<name> of an earlier start to <name>.old, where it
 * exists. */
nd_status nd_run_files_set_aside(const nd_run_files *files, const char *name);
/* Rank 0 of a fresh run that ends before step 1: removes what it has written, so that the folder
 * can be used again, and the folder too where this start made it and nobody has put anything there.
 * Without run.json of its own it has written nothing: what lies there is another start's, which
 * trains or has ended.
 */
void nd_run_files_forget(const nd_run_files *files);
void nd_run_files_close(nd_run_files *files);

#endif

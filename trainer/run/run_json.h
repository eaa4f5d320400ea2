// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_RUN_JSON_H
#define ND_RUN_RUN_JSON_H
/*
 * run.json in the run folder: everything needed to say later what a run was. Written once by rank 0
 * before step 1, to a temporary file that is synced and then renamed, so it is whole or absent.
 * docs/formats.md lists its keys.
 */
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/config/config.h"
#include "runtime/rdzv/identity.h"

typedef struct nd_run_text {
    const char *key, *value;
} nd_run_text;

typedef struct nd_run_amount {
    const char *key;
    int64_t value;
} nd_run_amount;

/* All pointers are borrowed for the call; a list may be NULL when its count is 0. */
typedef struct nd_run_record {
    const nd_config *config;     /* resolved */
    const char *program_version; /* of ndtrain */
    int argc;                    /* the command line as it was given */
    char *const *argv;
    const nd_identity *identity; /* of rank 0 */
    const char *const *hosts;    /* one name per node */
    int host_count;
    const nd_run_text *libraries; /* {"oneDNN", "2.6.3"}, ... */
    int library_count;
    const nd_run_text
        *machine; /* what bits may depend on: {"device", "cpu, 2 threads"}, {"isa", "avx512_amx"} */
    int machine_count;
    const nd_run_amount *model; /* {"parameters", ...}, {"tokens_per_step", ...}, ... */
    int model_count;
    const nd_run_amount *memory; /* memory plan of rank 0: bytes per segment */
    int memory_count;
    const char *autotune; /* JSON text (tune/record.h), or NULL */
} nd_run_record;

/* ND_ERR_CANTCREATE with a sentence when dir/run.json exists or cannot be written. */
nd_status nd_run_record_write(const char *dir, const nd_run_record *record);

#endif

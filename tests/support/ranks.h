// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_RANKS_H
#define TESTS_SUPPORT_RANKS_H
/*
 * Runs one function on N ranks, each with its own transport: as threads of this process (local) or
 * as forked processes (ucx). The function reports by its status and nd_fail; Criterion's assertions
 * belong outside, in the test.
 */
#include <stdbool.h>

#include "runtime/comm/comm.h"

enum { ND_RANKS_MAX = 32 };

typedef struct nd_rank_result {
    bool finished; /* false: the process was killed, or is still running at the end */
    nd_status status;
    double seconds; /* that the function took */
    char message[ND_ERROR_MESSAGE_MAX];
} nd_rank_result;

typedef struct nd_ranks {
    int size;               /* 1 to ND_RANKS_MAX */
    double timeout_seconds; /* of every operation; 0: 20 s */
    nd_status (*body)(nd_transport *transport, void *context);
    void *context;
    bool apart;       /* processes: as if every rank had a host of its own */
    bool no_network;  /* and apart: no rank has an address */
    nd_progress page; /* while running: slot r is rank r's */
    nd_rank_result results[ND_RANKS_MAX];
} nd_ranks;

/* Both return ND_OK when every rank did, else the first failure as "rank 3: ...". They always
 * end. */
nd_status nd_ranks_run_threads(nd_ranks *ranks);
nd_status nd_ranks_run_processes(nd_ranks *ranks);

/* For bodies: returns ND_ERR_INTERNAL with a sentence from the calling function when `cond` is
 * false. */
#define ND_CHECK(cond, ...)                                                                        \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            return nd_fail(ND_ERR_INTERNAL, __VA_ARGS__);                                          \
        }                                                                                          \
    } while (0)

#endif

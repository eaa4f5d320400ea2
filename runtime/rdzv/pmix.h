// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_PMIX_H
#define ND_RDZV_PMIX_H
/*
 * The PMIx server that started this worker (srun --mpi=pmix, mpirun): the identity of the worker,
 * where the job's store is, and the end of the whole job.
 *
 * libpmix is opened at run time, when PMIx started the worker and not before: a machine without it
 * runs everything else. Calls block, and all of them have deadlines. A server that does not answer
 * at a deadline leaves libpmix waiting, which cannot be stopped: then this process logs that and
 * ends with the exit code that each function names. nd_pmix_abort may be called from any thread,
 * the others from one.
 */
#include <stddef.h>

#include "runtime/rdzv/identity.h"

typedef struct nd_pmix nd_pmix;

/*
 * Connects to the server and fills rank, size, local rank and size, nodes and run id. ND_ERR_CONFIG
 * where libpmix is missing or this program was built without PMIx. Limit: SLURM_PMIX_TIMEOUT, else
 * 300 s; exit code ND_ERR_HANG.
 */
nd_status nd_pmix_open(nd_identity *identity, nd_pmix **out);
/* PMIx_Finalize; NULL is legal. Limit: 30 s; the exit code is the caller's own. */
void nd_pmix_close(nd_pmix *pmix, int exit_code);

/* Waits for the other ranks at the end of a run. The run is complete whether they come or not. */
void nd_pmix_end(nd_pmix *pmix, double timeout_seconds, int exit_code);

/*
 * Ends all processes of the job; srun and mpirun give `code`. Returns when the server has the
 * request; the server kills this process, too. Limit: 10 s, then exit code `code`.
 */
void nd_pmix_abort(nd_pmix *pmix, int code, const char *message);

/*
 * Every rank calls it: bytes that rank 0 gives reach the others over PMIx (Put, Commit, Fence,
 * Get), and are in no file, argument or environment. ND_ERR_HANG at the deadline, or this process
 * ends with that code 3 s later: some servers know only a deadline of their own (Slurm:
 * SLURM_PMIX_TIMEOUT, 300 s).
 */
nd_status nd_pmix_share(nd_pmix *pmix, const char *name, bool gives, void *bytes, size_t count,
                        double timeout_seconds);

#endif

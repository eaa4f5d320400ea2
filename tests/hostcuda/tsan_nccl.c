// SPDX-License-Identifier: Apache-2.0
/* The NCCL transport and its watching thread under the thread sanitizer: a plain program, as
 * Criterion does not run there. */
#include <stdio.h>
#include <unistd.h>

#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/doubles/nccl_double.h"
#include "tests/hostcuda/nccl_job.h"

static int failures;

/* Operations of both kinds on two communicators, while the other threads look. */
static nd_status collectives(job *j)
{
    nd_comm *weights = j->groups.by_kind[ND_GROUP_DP_SHARD_CP],
            *gradients = j->groups.second[ND_GROUP_DP_SHARD_CP];
    nd_event gathered = {0}, reduced = {0};
    for (int i = 0; i < 40; i++) {
        ND_TRY(nd_comm_all_gather(weights, &j->stream, FLOATS(j->memory, j->memory + 8 * N),
                                  &gathered));
        ND_TRY(nd_comm_reduce_scatter(gradients, &j->stream, FLOATS(j->memory, j->memory + 32 * N),
                                      &reduced));
        ND_TRY(nd_stream_wait(&j->stream, &gathered));
        ND_TRY(nd_stream_wait(&j->stream, &reduced));
        ND_TRY(nd_comm_all_reduce(weights, &j->stream, j->memory, N, ND_DTYPE_F32, ND_REDOP_MAX,
                                  NULL));
        usleep(10000); /* so that the thread looks at every stage */
        ND_TRY(nd_comm_barrier(weights));
    }
    return nd_stream_sync(&j->stream);
}

static nd_status one_is_missing(job *j)
{
    if (j->transport->rank == 1) {
        sleep(3);
        return nd_fail(ND_ERR_DATA, "rank 1 has its own reasons");
    }
    ND_TRY(nd_comm_barrier(j->groups.by_kind[ND_GROUP_WORLD]));
    return ND_OK;
}

static void run(const char *name, job_body *body, double timeout_seconds, nd_status expected)
{
    nd_ranks ranks = nccl_job_ranks(body, (nd_mesh){{1, 1, 3, 1, 1}}, timeout_seconds);
    nd_ranks_run_threads(&ranks);
    bool passed = ranks.results[0].status == expected;
    printf("%s: %s\n", name, passed ? "passed" : ranks.results[0].message);
    failures += !passed;
}

int main(void)
{
    run("collectives", collectives, 60, ND_OK);
    nd_double_machine_get()->order = ND_DOUBLE_EAGER;
    run("collectives, eager", collectives, 60, ND_OK);
    run("a rank that is missing", one_is_missing, 1, ND_ERR_HANG);
    nd_double_nccl_flaw(1, ND_DOUBLE_LATE_FOR_SPLITS); /* the other threads look meanwhile */
    run("communicators that are made late", collectives, 60, ND_OK);
    nd_double_nccl_flaw(1, ND_DOUBLE_ABSENT_FROM_SPLITS);
    run("a communicator that is not made", collectives, 1, ND_ERR_HANG);
    return failures > 0;
}

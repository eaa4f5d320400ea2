// SPDX-License-Identifier: Apache-2.0
#include "tests/hostcuda/nccl_job.h"

#include "runtime/device/memplan.h"
#include "tests/hostcuda/cuda_ranks.h"

typedef struct job_context {
    job_body *body;
    nd_mesh mesh;
    double timeout_seconds;
} job_context;

static nd_status run_job(nd_transport *local, void *context)
{
    const job_context *c = context;
    job j = {.mesh = c->mesh};
    nd_status status = ND_OK;
    ND_TRY(cuda_rank_open(local, c->timeout_seconds, &j.device, &j.transport));
    ND_TRY_OUT(j.device->table->stream_init(j.device, &j.stream));
    ND_TRY_OUT(nd_groups_create(j.transport, &c->mesh, &j.groups));
    ND_TRY_OUT(nd_device_alloc(j.device, 64 * N * 4, (void **)&j.memory));
    ND_TRY_OUT(nd_host_alloc(j.device, 64 * N * 4, (void **)&j.host));
    status = c->body(&j);
    if (status != ND_OK) {
        nd_transport_abandon(j.transport);
    }
    nd_groups_destroy(&j.groups);
    nd_device_free(j.device, j.memory, 64 * N * 4);
    nd_host_free(j.device, j.host);
    j.device->table->stream_fini(&j.stream);
out:
    nd_transport_close(j.transport);
    nd_device_close(j.device);
    return status;
}

nd_ranks nccl_job_ranks(job_body *body, nd_mesh mesh, double timeout_seconds)
{
    static job_context context;
    context = (job_context){body, mesh, timeout_seconds};
    return (nd_ranks){.size = nd_mesh_world_size(&mesh),
                      .timeout_seconds = 60,
                      .body = run_job,
                      .context = &context};
}

nd_ranks nccl_job_run(job_body *body, nd_mesh mesh, double timeout_seconds)
{
    nd_ranks ranks = nccl_job_ranks(body, mesh, timeout_seconds);
    nd_ranks_run_threads(&ranks);
    return ranks;
}

nd_status sum_over(job *j, nd_group_kind kind)
{
    return nd_comm_all_reduce(j->groups.by_kind[kind], &j->stream, j->memory, N, ND_DTYPE_F32,
                              ND_REDOP_SUM, NULL);
}

// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands/command.h"

#include <signal.h>
#include <sys/resource.h>

#include "runtime/rdzv/failure_page.h"

static void on_stop_signal(int signal_number)
{
    nd_train_request_stop(signal_number);
}

/* Workers of a host exchange data through shared memory, which is made of files. */
static nd_status check_file_limit(const nd_identity *id)
{
    const rlim_t needed = (rlim_t)8 << 20;
    struct rlimit limit;
    if (id->world_size == 1 || getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur >= needed) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_CANTCREATE,
                   "shared memory between workers needs files of up to %llu bytes, but files of at "
                   "most %llu may be written (ulimit -f); raise this limit",
                   (unsigned long long)needed, (unsigned long long)limit.rlim_cur);
}

static nd_status check_world(const nd_config *config, const nd_identity *id)
{
    int world = nd_mesh_world_size(&config->resolved_mesh);
    if (world == id->world_size) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_CONFIG,
                   "the configuration needs %d workers, but this job has %d (%s); start it with "
                   "ndlaunch, or with as many "
                   "tasks as launch.workers",
                   world, id->world_size, nd_identity_source_name(id->source));
}

/* Signals come before the job is joined, which may take long. */
static nd_status begin(nd_worker *worker)
{
    nd_status status = nd_identity_read(&worker->identity);
    nd_process_install_signals(&worker->identity, on_stop_signal);
    nd_failure_set_ready(&worker->identity);
    return status == ND_OK ? nd_identity_join(&worker->identity) : status;
}

static nd_status train(const nd_command_call *call)
{
    const nd_config *config = call->config;
    nd_worker *worker = call->worker;
    nd_inputs inputs = {0};
    nd_run_context context = {
        .worker = worker, .inputs = &inputs, .argc = call->argc, .argv = call->argv};
    nd_status status = ND_OK;
    ND_TRY_OUT(check_world(config, &worker->identity));
    ND_TRY_OUT(check_file_limit(&worker->identity));
    ND_TRY_OUT(nd_worker_meet(worker, config));
    ND_TRY_OUT(nd_inputs_open(config, &inputs));
    if (worker->identity.source != ND_IDENTITY_NDLAUNCH && worker->identity.local_rank == 0) {
        ND_TRY_OUT(nd_inputs_verify_model(config)); /* ndlaunch's check has done it */
    }
    ND_TRY_OUT(nd_settings_compare(worker, config, &inputs));
    ND_TRY_OUT(nd_worker_join(worker, config, &inputs.shape));
    ND_TRY_OUT(nd_train(&context));
out:
    nd_inputs_close(&inputs);
    return status;
}

const nd_command nd_command_train = {"train", true, begin, train};

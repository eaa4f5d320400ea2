// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands/command.h"

static void on_stop_signal(int signal_number)
{
    nd_train_request_stop(signal_number);
}

static nd_status begin(nd_worker *worker)
{
    return nd_job_begin(worker, on_stop_signal);
}

static nd_status train(const nd_command_call *call)
{
    nd_config *config = call->config;
    nd_worker *worker = call->worker;
    nd_inputs inputs = {.stop = nd_train_stop_flag()};
    nd_run_context context = {
        .worker = worker, .inputs = &inputs, .argc = call->argc, .argv = call->argv};
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_job_check(config, &worker->identity));
    ND_TRY_OUT(nd_worker_meet(worker, config));
    ND_TRY_OUT(nd_inputs_open(config, &inputs));
    if (worker->identity.source != ND_IDENTITY_NDLAUNCH && worker->identity.local_rank == 0) {
        /* ndlaunch has done it in its check. */
        ND_TRY_OUT(nd_inputs_verify_folder(config, config->model.path));
    }
    ND_TRY_OUT(nd_settings_compare(worker, config, &inputs));
    ND_TRY_OUT(nd_worker_join(worker, config, &inputs.shape));
    ND_TRY_OUT(nd_train(&context));
out:
    nd_inputs_close(&inputs);
    return status;
}

const nd_command nd_command_train = {
    .id = ND_COMMAND_TRAIN, .trains = true, .begin = begin, .run = train};

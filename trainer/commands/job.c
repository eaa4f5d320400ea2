// SPDX-License-Identifier: Apache-2.0
/* The common part of the commands that are workers of a job: how they begin, and what they need.
 * The commands train and check are here too. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/log.h"
#include "runtime/base/version.h"
#include "trainer/commands/command.h"
#include "trainer/step/step.h"
#include "trainer/tune/tune.h"

nd_status nd_job_check(const nd_config *config, const nd_identity *id)
{
    /* Workers of a host exchange data through shared memory, which is made of files. */
    const rlim_t needed = (rlim_t)8 << 20;
    const int world = nd_mesh_world_size(&config->resolved_mesh);
    struct rlimit limit;
    ND_REFUSE(world != id->world_size,
              "the configuration needs %d workers, but this job has %d (%s); start it with "
              "ndlaunch, or with as many tasks as launch.workers",
              world, id->world_size, nd_identity_source_name(id->source));
    if (world == 1 || getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur >= needed) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_CANTCREATE,
                   "shared memory between workers needs files of up to %llu bytes, but files of at "
                   "most %llu may be written (ulimit -f); raise this limit",
                   (unsigned long long)needed, (unsigned long long)limit.rlim_cur);
}

nd_status nd_job_check_room(const nd_command_call *call)
{
    const nd_config *config = call->config;
    bool gpu = false;
    ND_TRY(nd_worker_check_device(config, &gpu));
    if (gpu) { /* each worker checks its own device's memory */
        return ND_OK;
    }
    ND_TRY(nd_worker_open_planner(config, call->worker));
    return nd_worker_check_room(call->worker, 0, config->launch.workers,
                                config->launch.nproc_per_node);
}

static nd_status begin_train(nd_worker *worker)
{
    return nd_worker_begin(worker, nd_train_request_stop);
}

static nd_status train(const nd_command_call *call)
{
    nd_config *config = call->config;
    nd_worker *worker = call->worker;
    nd_inputs inputs = {.stop = nd_train_stop_flag()};
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
    ND_TRY_OUT(nd_train(worker, &inputs, call->argc, call->argv));
out:
    nd_inputs_close(&inputs);
    return status;
}

const nd_command nd_command_train = {
    .id = ND_COMMAND_TRAIN, .trains = true, .begin = begin_train, .run = train};

/* ndlaunch checks with this command what it is about to start. */
static bool called_by_ndlaunch(void)
{
    return getenv("ND_CONFIG_FD");
}

/* ndlaunch compares the version with its own, so it is printed before anything can fail. */
static nd_status begin_check(nd_worker *worker)
{
    if (called_by_ndlaunch()) {
        printf("ndtrain %s\n", ND_VERSION);
        fflush(stdout);
    }
    return nd_identity_read(&worker->identity);
}

static void print_good(const nd_config *config, const nd_inputs *inputs)
{
    char mesh[128];
    const nd_mesh *m = &config->resolved_mesh;
    printf("configuration, model and data are good: mesh %s; %.2f M parameters; %lld training "
           "tokens",
           nd_mesh_format(m, mesh, sizeof mesh), (double)nd_shape_parameters(&inputs->shape) * 1e-6,
           (long long)nd_dataset_tokens(inputs->data));
    if (inputs->validation) {
        printf(", %lld for validation", (long long)nd_dataset_tokens(inputs->validation));
    }
    printf("\n");
}

/*
 * Finds whether the job is for GPUs. Without GPUs here ndlaunch cannot start such a job; a user may
 * check its configuration all the same, for instance on a login node, and gets a warning.
 */
static nd_status check_device(const nd_config *config, bool *gpu)
{
    nd_status status = nd_worker_check_device(config, gpu);
    if (status != ND_OK && config->launch.device == ND_CHOOSE_CUDA && !called_by_ndlaunch()) {
        nd_log_warning("this machine cannot run the job: %s", nd_error_last()->message);
        nd_error_clear();
        *gpu = true;
        return ND_OK;
    }
    return status;
}

static nd_status run_check(const nd_command_call *call)
{
    nd_config *config = call->config;
    nd_inputs inputs = {0};
    nd_run_samples *samples = NULL;
    nd_tuning *tuning = NULL;
    nd_status status = ND_OK;
    bool gpu = false;
    if (call->use) {
        nd_command_call checking = *call;
        checking.checks = true;
        ND_TRY(call->use->run(&checking));
        printf("flags and files are good\n");
        return ND_OK;
    }
    ND_TRY_OUT(nd_inputs_open(config, &inputs));
    ND_TRY_OUT(nd_inputs_verify_folder(config, config->model.path));
    ND_TRY_OUT(nd_trainer_check_precision(config, &inputs.shape));
    ND_TRY_OUT(nd_dump_check(config, &inputs.shape));
    ND_TRY_OUT(nd_run_samples_open(config, &inputs, NULL, &samples));
    ND_TRY_OUT(check_device(config, &gpu));
    ND_TRY_OUT(nd_tuning_check(config, &inputs.shape, gpu, &tuning)); /* can it be replayed? */
    if (gpu) { /* each worker checks its own device's memory */
        nd_ops ops = nd_ops_cuda_planner(config->train.deterministic);
        ND_TRY_OUT(nd_trainer_check_limits(&ops, config, &config->resolved_mesh, &inputs.shape));
    } else {
        ND_TRY_OUT(nd_worker_open_planner(config, call->worker));
        ND_TRY_OUT(nd_plan_check_memory(config, &inputs, call->worker));
    }
    ND_TRY_OUT(nd_resume_preflight(config, &inputs));
    if (config->launch.nnodes > 1) {
        /* For the comparison between nodes, where paths may differ. */
        ND_TRY_OUT(nd_inputs_print_digests(&inputs, "digest ", ' ', stdout));
    }
    if (!called_by_ndlaunch()) { /* else rank 0 says it */
        nd_banner_warn_of_documents(config, &inputs.shape, gpu, NULL);
        ND_TRY_OUT(nd_inputs_warn_of_labels(config, &inputs, 0, 0));
    }
    print_good(config, &inputs);
out:
    nd_tuning_destroy(tuning);
    nd_run_samples_close(samples);
    nd_inputs_close(&inputs);
    return status;
}

const nd_command nd_command_check = {
    .id = ND_COMMAND_CHECK, .begin = begin_check, .run = run_check};

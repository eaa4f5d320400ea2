// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/log.h"
#include "runtime/base/version.h"
#include "trainer/run/run.h"
#include "trainer/step/step.h"
#include "trainer/tune/tune.h"
#include "trainer/worker/worker.h"

/* ndlaunch checks with this command what it is about to start. */
static bool called_by_ndlaunch(void)
{
    return getenv("ND_CONFIG_FD");
}

/* ndlaunch compares the version with its own, so it is printed before anything can fail. */
static nd_status begin(nd_worker *worker)
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
 * Whether the job is for GPUs. Without GPUs here ndlaunch cannot start such a job; a user may check
 * its configuration all the same, for instance on a login node, and gets a warning.
 */
static nd_status check_device(const nd_config *config, bool *gpu)
{
    nd_status status = nd_worker_check_device(config);
    if (status != ND_OK && config->launch.device == ND_CHOOSE_CUDA && !called_by_ndlaunch()) {
        nd_log_warning("this machine cannot run the job: %s", nd_error_last()->message);
        nd_error_clear();
        *gpu = true;
        return ND_OK;
    }
    ND_TRY(status);
    return nd_gpu_is_wanted(config, gpu);
}

static nd_status check(const nd_command_call *call)
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
        ND_TRY_OUT(nd_plan_check_memory(&(nd_planner){config, &inputs, call->worker, 0}));
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

const nd_command nd_command_check = {.id = ND_COMMAND_CHECK, .begin = begin, .run = check};

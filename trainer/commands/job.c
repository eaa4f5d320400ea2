// SPDX-License-Identifier: Apache-2.0
/* What commands that are workers of a job have in common: how they begin, what they need, and where
 * their configuration comes from. The commands train and check are here too. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/version.h"
#include "runtime/device/host_memory.h"
#include "trainer/commands/plan.h"
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
    ND_TRY(nd_worker_check_device(config));
    ND_TRY(nd_gpu_is_wanted(config, &gpu));
    if (gpu) { /* each worker checks its own device's memory */
        return ND_OK;
    }
    ND_TRY(nd_worker_open_planner(config, call->worker));
    return nd_worker_check_room(call->worker, 0, config->launch.workers,
                                config->launch.nproc_per_node);
}

/* Signals come before the job is joined, which may take long. */
nd_status nd_job_begin(nd_worker *worker, void (*stop)(int signal_number))
{
    nd_status status = nd_identity_read(&worker->identity);
    nd_process_install_signals(&worker->identity, stop);
    nd_failure_slot *record = nd_identity_record(&worker->identity);
    if (record) {
        atomic_store(&record->ready, 1);
    }
    return status == ND_OK ? nd_identity_join(&worker->identity) : status;
}

/* The resolved configuration that ndlaunch hands down as an inherited memory file. */
static nd_status read_inherited(nd_config *config, int fd)
{
    struct stat st;
    if (fstat(fd, &st) != 0 || st.st_size <= 0) {
        return nd_fail(ND_ERR_INTERNAL,
                       "the inherited configuration (descriptor %d) cannot be read", fd);
    }
    char *text = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (text == MAP_FAILED) {
        return nd_fail_system(errno, "the map of the inherited configuration");
    }
    const char *name = getenv("ND_CONFIG_NAME"); /* the file that ndlaunch read */
    nd_status status = nd_config_read_text(config, text, (size_t)st.st_size,
                                           name && name[0] ? name : "configuration from ndlaunch");
    munmap(text, (size_t)st.st_size);
    if (status == ND_OK && !(name && name[0])) {
        config->source[0] = '\0'; /* ndlaunch read flags only */
    }
    return status;
}

/* The environment of ranks that no ndlaunch started says how many they are, and launch.* about
 * nodes does not apply to them. */
static nd_status adopt_world_size(nd_config *config, const nd_identity *id)
{
    if (id->source != ND_IDENTITY_PMIX && id->source != ND_IDENTITY_ENVIRONMENT) {
        return ND_OK;
    }
    ND_REFUSE(config->launch.nnodes > 1 && config->launch.nnodes != id->nnodes,
              "launch.nnodes is %lld, but this job has %d nodes (%s)",
              (long long)config->launch.nnodes, id->nnodes, nd_identity_source_name(id->source));
    if (config->launch.workers == 0) {
        config->launch.workers = config->launch.nproc_per_node > 0
                                     ? config->launch.nproc_per_node * id->nnodes
                                     : id->world_size;
    }
    config->launch.nnodes = 1;
    config->launch.node_rank = 0;
    config->launch.nproc_per_node = 0;
    config->launch.spare_nodes = 0;
    return ND_OK;
}

nd_status nd_settings_read(nd_config *config, nd_cli *cli, const nd_identity *id, int argc,
                           char **argv)
{
    ND_TRY(nd_config_init(config));
    if (id->config_fd >= 0) {
        ND_TRY(read_inherited(config, id->config_fd));
    } else {
        ND_TRY(nd_config_parse(config, cli, argc, argv));
    }
    if (cli->help || cli->version) {
        return ND_OK;
    }
    ND_TRY(adopt_world_size(config, id));
    return nd_config_resolve(config);
}

static nd_status begin_train(nd_worker *worker)
{
    return nd_job_begin(worker, nd_train_request_stop);
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

/* Compares the plans of this host's CPU workers together with its memory: ND_ERR_RESOURCE with the
 * numbers when there is not that much, a warning when it is not free now. */
static nd_status check_memory(const nd_planner *p)
{
    const nd_config *config = p->config;
    nd_trainer *trainer = NULL;
    const double local = (double)config->launch.nproc_per_node;
    ND_TRY(nd_plan_make(p, config, NULL, &trainer));
    const double planned = nd_plan_bytes(trainer), each = planned / nd_gib, all = each * local;
    nd_trainer_destroy(trainer);
    /* The workers will have the limits of this process. */
    ND_TRY(nd_worker_check_room(p->worker, planned, config->launch.workers,
                                config->launch.nproc_per_node));
    const nd_host_memory host = nd_host_memory_read("");
    const double physical = (double)host.physical / nd_gib;
    const double available = (double)host.available / nd_gib;
    if (host.physical > 0 && all > physical) {
        return nd_fail(ND_ERR_RESOURCE,
                       "%.0f workers with a plan of %.2f GiB each need %.1f GiB, but this host has "
                       "%.1f GiB of memory; use a smaller model, a shorter sequence, a smaller "
                       "micro-batch, parallel.recompute, more shards or more hosts (ndtrain plan "
                       "shows what each needs)",
                       local, each, all, physical);
    }
    if (host.physical > 0 && all > available) {
        nd_log_warning(
            "%.0f workers with a plan of %.2f GiB each need %.1f GiB, but of this host's "
            "%.1f GiB only %.1f are free now",
            local, each, all, physical, available);
    }
    return ND_OK;
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
        ND_TRY_OUT(check_memory(&(nd_planner){config, &inputs, call->worker, 0}));
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

const nd_command nd_command_check = {.id = ND_COMMAND_CHECK, .begin = begin_check, .run = check};

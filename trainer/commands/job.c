// SPDX-License-Identifier: Apache-2.0
/* What commands that are workers of a job have in common: how they begin, what they need, and where
 * their configuration comes from. The command train is here too. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "trainer/commands/command.h"

nd_status nd_job_check(const nd_config *config, const nd_identity *id)
{
    /* Workers of a host exchange data through shared memory, which is made of files. */
    const rlim_t needed = (rlim_t)8 << 20;
    const int world = nd_mesh_world_size(&config->resolved_mesh);
    struct rlimit limit;
    if (world != id->world_size) {
        return nd_fail(ND_ERR_CONFIG,
                       "the configuration needs %d workers, but this job has %d (%s); start it "
                       "with ndlaunch, or with as many tasks as launch.workers",
                       world, id->world_size, nd_identity_source_name(id->source));
    }
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
    if (config->launch.nnodes > 1 && config->launch.nnodes != id->nnodes) {
        return nd_fail(ND_ERR_CONFIG, "launch.nnodes is %lld, but this job has %d nodes (%s)",
                       (long long)config->launch.nnodes, id->nnodes,
                       nd_identity_source_name(id->source));
    }
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

/* The command train. */

static nd_status begin(nd_worker *worker)
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
    .id = ND_COMMAND_TRAIN, .trains = true, .begin = begin, .run = train};

// SPDX-License-Identifier: Apache-2.0
/*
 * ndtrain: the worker.
 *   ndtrain train [flags]   one worker of a job, started by ndlaunch, srun, or alone
 *   ndtrain check [flags]   reads and checks configuration, model and data; starts nothing
 *   ndtrain plan  [flags] prints mesh, groups, memory plan and estimated step time; starts nothing
 *   ndtrain version
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fsio.h"
#include "runtime/base/limits.h"
#include "runtime/base/log.h"
#include "runtime/base/signals.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/identity.h"
#include "trainer/run/agreement.h"
#include "trainer/worker/devices.h"
#include "trainer/report/metrics.h"
#include "trainer/commands/plan.h"
#include "trainer/worker/thread_wait.h"
#include "trainer/run/run.h"
#include "trainer/step/trainer.h"
#include "trainer/tune/tuning.h"

static void init_log(const nd_config *config, const nd_identity *id)
{
    static const char *const names[] = {"error", "warning", "info", "debug"};
    char prefix[200];
    nd_log_level level = ND_LOG_INFO;
    for (nd_log_level l = ND_LOG_ERROR; l <= ND_LOG_DEBUG; l++) {
        level = strcmp(config->log.level, names[l]) == 0 ? l : level;
    }
    if (id->rank > 0 && level == ND_LOG_INFO) {
        level = ND_LOG_WARNING;
    }
    snprintf(prefix, sizeof prefix, "%s:%d", id->host, id->rank); /* as ndlaunch does */
    nd_log_init(level, id->rank > 0 && id->source != ND_IDENTITY_NDLAUNCH ? prefix : "");
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
        return nd_fail(ND_ERR_INTERNAL, "the inherited configuration cannot be mapped: %s",
                       strerror(errno));
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

/* Ranks that no ndlaunch started: how many there are is said, and all of launch.* about nodes is
 * somebody else's. */
static nd_status take_world(nd_config *config, const nd_identity *id)
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
    return ND_OK;
}

static nd_status read_config(nd_config *config, nd_cli *cli, const nd_identity *id, int argc,
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
    if (cli->plan_rank >= 0 && strcmp(argv[0], "plan") != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "--rank %d: it says which rank's groups `ndtrain plan` prints; a worker's "
                       "rank comes from ndlaunch, or from RANK in the environment",
                       cli->plan_rank);
    }
    ND_TRY(take_world(config, id));
    return nd_config_resolve(config);
}

static void on_stop_signal(int signal_number)
{
    nd_train_request_stop(signal_number);
}

/*
 * TERM, HUP and USR1 end the run at the next step boundary; INT too, a second INT at once. QUIT
 * keeps the system's meaning: it ends a process that does not come to a boundary, with a core dump
 * where these are on. Under ndlaunch an INT may come twice, from it and from a resource manager
 * that signals every process: there the second one is ndlaunch's.
 */
static void install_signals(const nd_identity *id)
{
    struct sigaction action = {.sa_handler = on_stop_signal, .sa_flags = SA_RESTART}, hangup;
    nd_signals_unblock();
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN) {
        sigaction(SIGHUP, &action, NULL); /* not under nohup */
    }
    signal(SIGUSR2, SIG_IGN); /* has no meaning here, and its default would end the run */
    if (id->source != ND_IDENTITY_NDLAUNCH) {
        action.sa_flags |= (int)SA_RESETHAND;
    }
    sigaction(SIGINT, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error of write, with a sentence */
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

static nd_status command_train(const nd_config *config, nd_worker *worker, int argc, char **argv)
{
    nd_inputs inputs = {0};
    nd_run_context context = {.worker = worker, .inputs = &inputs, .argc = argc, .argv = argv};
    nd_status status = check_world(config, &worker->identity);
    status = status == ND_OK ? nd_worker_meet(worker, config) : status;
    status = status == ND_OK ? nd_inputs_open(config, &inputs) : status;
    status = status == ND_OK ? nd_agree(worker, config, &inputs) : status;
    status = status == ND_OK ? nd_worker_join(worker, config, &inputs.shape) : status;
    status = status == ND_OK ? nd_train(&context) : status;
    nd_inputs_close(&inputs);
    return status;
}

/* Content of the input files for the comparison between nodes, where paths may differ. */
static void print_digest(void *context, const char *key, const char *hex)
{
    printf("digest %s %s\n", key, hex);
}

static void print_good(const nd_config *config, const nd_inputs *inputs)
{
    char mesh[128];
    const nd_mesh *m = &config->resolved_mesh;
    printf("configuration, model and data are good: mesh %s; %.2f M parameters; %lld training "
           "tokens",
           nd_mesh_format(m, mesh, sizeof mesh),
           (double)nd_llama_shape_parameters(&inputs->shape) * 1e-6,
           (long long)nd_dataset_tokens(inputs->data));
    if (inputs->validation) {
        printf(", %lld for validation", (long long)nd_dataset_tokens(inputs->validation));
    }
    printf("\n");
}

/* A record of autotune that cannot be replayed is said before workers start. */
static nd_status check_autotune(const nd_config *config, const nd_llama_shape *shape)
{
    nd_tuning *tuning = NULL;
    bool gpu = false;
    ND_TRY(nd_gpu_is_wanted(config, &gpu));
    ND_TRY(nd_tuning_check(config, shape, gpu, &tuning));
    nd_tuning_destroy(tuning);
    return ND_OK;
}

static nd_status command_check(const nd_config *config, nd_worker *worker)
{
    nd_inputs inputs = {0};
    nd_status status = nd_inputs_open(config, &inputs);
    status = status == ND_OK ? nd_trainer_check_precision(config, &inputs.shape) : status;
    status = status == ND_OK ? nd_worker_check_device(config) : status;
    status = status == ND_OK ? check_autotune(config, &inputs.shape) : status;
    status = status == ND_OK ? nd_worker_open_planner(config, worker) : status;
    status = status == ND_OK ? nd_plan_check_memory(config, &inputs, worker) : status;
    status = status == ND_OK ? nd_run_folder_check(config) : status;
    if (status == ND_OK && config->launch.nnodes > 1) {
        status = nd_inputs_each_digest(&inputs, print_digest, NULL);
    }
    if (status == ND_OK) {
        print_good(config, &inputs);
    }
    nd_inputs_close(&inputs);
    return status;
}

static nd_status command_plan(const nd_config *config, nd_worker *worker, int rank)
{
    nd_inputs inputs = {0};
    int world = nd_mesh_world_size(&config->resolved_mesh);
    rank = rank < 0 ? 0 : rank;
    if (rank >= world) {
        return nd_fail(ND_ERR_CONFIG, "--rank %d: the mesh has ranks 0 to %d", rank, world - 1);
    }
    nd_tuning *tuning = NULL;
    bool cuda = config->launch.device == ND_CHOOSE_CUDA;
    nd_status status = nd_inputs_open_model(config, &inputs);
    status = status == ND_OK ? nd_tuning_check(config, &inputs.shape, cuda, &tuning) : status;
    status = status == ND_OK ? nd_worker_open_planner(config, worker) : status;
    if (tuning) {
        worker->rank.linears = &tuning->linear_choice;
        worker->rank.tuning = tuning;
    }
    status = status == ND_OK ? nd_plan_print(stdout, config, &inputs, worker, rank) : status;
    nd_tuning_destroy(tuning);
    nd_inputs_close(&inputs);
    return status;
}

static int usage(FILE *out)
{
    fprintf(out,
            "usage: ndtrain train|check|plan [--config-file FILE] [flags]\n"
            "       ndtrain train --help lists all flags; ndtrain version prints the version\n");
    return out == stdout ? 0 : (int)ND_ERR_CONFIG;
}

static void print_version(void)
{
    printf("ndtrain %s\n", ND_VERSION);
}

static nd_status run_command(const char *command, const nd_config *config, const nd_cli *cli,
                             nd_worker *worker, int argc, char **argv)
{
    if (cli->help) {
        nd_config_help(
            stdout, "ndtrain train|check|plan",
            "  train\n      one worker of a job: ndlaunch, srun or torchrun starts it\n"
            "  check\n      reads configuration, model and data; starts nothing\n"
            "  plan\n      prints mesh, groups, memory and estimated time; starts nothing\n"
            "  --rank R\n      of plan: whose groups and memory are printed, else rank "
            "0's\n");
        return ND_OK;
    }
    if (cli->version) {
        print_version();
        return ND_OK;
    }
    init_log(config, &worker->identity);
    if (strcmp(command, "plan") == 0) {
        return command_plan(config, worker, cli->plan_rank);
    }
    if (strcmp(command, "check") == 0) {
        return command_check(config, worker);
    }
    return command_train(config, worker, argc, argv);
}

int main(int argc, char **argv)
{
    nd_worker worker = {0};
    nd_config config = {0};
    nd_cli cli = {.plan_rank = -1};
    const char *command = argc > 1 ? argv[1] : "";
    if (strcmp(command, "train") == 0) {
        nd_thread_wait_shorten(argv);
    }
    nd_worker_die_with_parent();
    nd_limits_raise_files(); /* rank 0 may host the store, and each rank has sockets to others */
    if (strcmp(command, "version") == 0 || strcmp(command, "--version") == 0) {
        print_version();
        return 0;
    }
    if (strcmp(command, "--help") == 0) {
        return usage(stdout);
    }
    if (strcmp(command, "train") != 0 && strcmp(command, "check") != 0 &&
        strcmp(command, "plan") != 0) {
        return usage(stderr);
    }
    if (strcmp(command, "check") == 0 && getenv("ND_CONFIG_FD")) {
        print_version(); /* before anything can fail: ndlaunch compares it with its own */
        fflush(stdout);
    }
    nd_status status = nd_identity_read(&worker.identity);
    if (strcmp(command, "train") == 0) {
        install_signals(&worker.identity);
        status = status == ND_OK ? nd_identity_join(&worker.identity) : status;
    }
    status =
        status == ND_OK ? read_config(&config, &cli, &worker.identity, argc - 1, argv + 1) : status;
    status = status == ND_OK ? run_command(command, &config, &cli, &worker, argc, argv) : status;
    int code = nd_worker_close(&worker, status, status == ND_OK ? NULL : nd_error_last()->message);
    nd_config_fini(&config);
    return code;
}

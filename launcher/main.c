// SPDX-License-Identifier: Apache-2.0
/*
 * ndlaunch: starts and watches the workers of a job.
 *   ndlaunch --config-file FILE [flags]
 *   ndlaunch config [--config-file FILE]
 *   ndlaunch env
 *   ndlaunch generate|eval|bench [flags]         these commands of ndtrain, on several workers
 *   ndlaunch --make-key FILE | --help | --version
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <uv.h>

#include "launcher/launcher.h"
#include "runtime/base/log.h"
#include "runtime/base/process.h"
#include "runtime/base/version.h"
#include "runtime/config/commands.h"
#include "runtime/rdzv/key.h"

enum {
    CHECK_SECONDS = 120, /* for the check before the start, without the time to encode the data */
    PATH_CAPACITY = 4096
};

/* Workers that use a model have nothing to save when they are stopped. */
static const double use_grace_seconds = 0.8;

/* With launch.min_nodes some smaller number of nodes must do. */
static nd_status check_min_nodes(const nd_config *config)
{
    nd_config fewer;
    nd_status status = ND_OK;
    int64_t least = config->launch.min_nodes;
    if (least == 0 || least == config->launch.nnodes) {
        return ND_OK;
    }
    for (int64_t n = config->launch.nnodes - 1; n >= least; n--) {
        status = nd_config_with_nodes(config, n, &fewer);
        if (status == ND_OK) {
            return ND_OK;
        }
    }
    return nd_fail_context(status, "checking launch.min_nodes %lld", (long long)least);
}

static void print_start(const nd_config *config)
{
    char *text = NULL;
    char mesh[128];
    const int world = nd_mesh_world_size(&config->resolved_mesh);
    nd_log_info("ndlaunch: %d worker%s, mesh %s", world, world == 1 ? "" : "s",
                nd_mesh_format(&config->resolved_mesh, mesh, sizeof mesh));
    if (nd_log_get_level() >= ND_LOG_DEBUG && nd_config_to_yaml(config, false, &text) == ND_OK) {
        nd_log_debug("resolved configuration:\n%s", text);
        free(text);
    }
}

/* The worker program: $ND_WORKER, or ndtrain in the folder of this program. ND_ERR_CONFIG when it
 * is missing. */
static nd_status find_worker(char *path, int capacity)
{
    const char *named = getenv("ND_WORKER");
    char self[3072];
    if (named && named[0]) {
        snprintf(path, (size_t)capacity, "%s", named);
    } else {
        ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
        self[n > 0 ? n : 0] = '\0';
        char *slash = strrchr(self, '/');
        snprintf(path, (size_t)capacity, "%.*s/ndtrain", slash ? (int)(slash - self) : 0, self);
    }
    if (access(path, X_OK) != 0) {
        return nd_fail(
            ND_ERR_CONFIG,
            "the worker program %s cannot be run: %s; build it with scripts/build, or name it in "
            "ND_WORKER",
            path, strerror(errno));
    }
    return ND_OK;
}

/* The command that the workers run. */
typedef struct worker_command {
    nd_command_id command; /* ND_COMMAND_NONE: train */
    char **args;           /* args[0] is for the path of the worker program, as below */
    char **check;          /* what checks it: "check", the command, its flags */
} worker_command;

/* Everything that can be checked before a worker starts. *exit_code is that of a check that has
 * printed its own error. */
static nd_status check_before_start(const nd_config *config, const worker_command *command,
                                    char *program, nd_preflight *preflight, int *exit_code)
{
    ND_TRY(check_min_nodes(config));
    if (!command->command) { /* a command with flags of its own names its files there */
        /* The worker cannot name the file with the key. */
        ND_TRY(nd_config_check_model_path(config));
        ND_TRY(nd_config_check_data_paths(config));
    }
    ND_TRY(nd_preflight_check_files(config));
    ND_TRY(find_worker(program, PATH_CAPACITY));
    ND_TRY(nd_config_to_fd(config, &preflight->config_fd));
    return nd_preflight_run(preflight, exit_code);
}

static nd_status launch(const nd_config *config, const nd_slurm *slurm,
                        const worker_command *command, int *exit_code)
{
    char program[PATH_CAPACITY], digests[1024], *settings = NULL, *job_text = NULL;
    nd_preflight preflight = {
        .args = command->check,
        .config_name = config->source,
        .seconds = CHECK_SECONDS + nd_config_data_seconds(config),
        .digests = digests,
        .capacity = sizeof digests,
    };
    nd_job_options job = {.config = config,
                          .args = command->args,
                          .input = command->command != ND_COMMAND_NONE,
                          .slurm_job = slurm->job_id,
                          .world_size = nd_mesh_world_size(&config->resolved_mesh)};
    job.local_workers = job.world_size / (int)config->launch.nnodes;
    command->args[0] = command->check[0] = program;
    nd_status status = check_before_start(config, command, program, &preflight, exit_code);
    if (status != ND_OK || *exit_code != 0) {
        if (config->launch.nnodes > 1) {
            /* The others would wait for this one until their deadline. */
            nd_error reason = *nd_error_last();
            int ignored;
            job.cannot_start = status != ND_OK ? (int)status : *exit_code;
            (void)nd_job_run(&job, &ignored);
            nd_error_restore(&reason);
        }
        return status;
    }
    if (config->launch.node_rank == 0) {
        print_start(config);
    }
    /* The nodes compare the settings of the job, and digests of files in place of their paths. */
    ND_TRY(nd_config_job_text(config, &settings));
    bool made = asprintf(&job_text, "%s%s", settings, digests) >= 0;
    free(settings);
    ND_TRY(made ? ND_OK : nd_fail_memory("the settings of the job"));
    job.job_text = job_text;
    job.config_fd = preflight.config_fd;
    status = nd_job_run(&job, exit_code);
    free(job_text);
    return status;
}

/* Runs the worker program (args[0]), which prints its `what`, and waits for it. */
static nd_status print_of_worker(char **args, const char *what)
{
    int code = 0;
    pid_t pid;
    fflush(stdout);
    int error = posix_spawn(&pid, args[0], NULL, NULL, args, environ);
    if (error != 0 || waitpid(pid, &code, 0) < 0 || code != 0) {
        return nd_fail(ND_ERR_CONFIG, "the worker program %s cannot print its %s: %s", args[0],
                       what, error ? strerror(error) : "it failed");
    }
    return ND_OK;
}

/* The libraries of a job are those of its worker program, which lists them. */
static nd_status print_version(void)
{
    char worker[PATH_CAPACITY], *args[] = {worker, "--version", NULL};
    printf("ndlaunch %s\n  libuv     %s\n", ND_VERSION, uv_version_string());
    ND_TRY(find_worker(worker, sizeof worker));
    printf("worker program %s:\n", worker);
    return print_of_worker(args, "version");
}

/* The command lines of workers and of their check: they get the words as they are, and read those
 * that are no settings. *count and *words become the command with what is behind it. */
static nd_status read_command(worker_command *out, int *count, char ***words)
{
    const char *word = (*words)[1];
    out->command = nd_command_find(ND_NDLAUNCH, word);
    if (!out->command && word[0] != '-' && !strpbrk(word, "./")) { /* neither a flag nor a file */
        ND_TRY(nd_command_check_name(ND_NDLAUNCH, word));
    }
    *count -= out->command != ND_COMMAND_NONE;
    *words += out->command != ND_COMMAND_NONE;
    ND_TRY(ND_ALLOC(*count + 3, &out->args));
    ND_TRY(ND_ALLOC(*count + 3, &out->check));
    out->args[1] = "train";
    out->check[1] = "check";
    for (int i = 0; i < *count && out->command; i++) {
        out->args[1 + i] = out->check[2 + i] = (*words)[i];
    }
    return ND_OK;
}

static nd_status run_launcher(int argc, char **argv, const worker_command *command, int *exit_code)
{
    nd_config config = {0};
    nd_cli cli = {.help_topic = ""};
    nd_slurm slurm;
    nd_status status = nd_config_init(&config);
    status = status == ND_OK ? nd_slurm_read(&slurm, &config) : status;
    status = status == ND_OK ? nd_config_parse(&config, &cli, argc, argv) : status;
    if (status == ND_OK && cli.help && command->command && !cli.help_topic[0]) {
        const char *name = nd_command_name(command->command); /* whose help is the worker's */
        char worker[PATH_CAPACITY], *args[] = {worker, (char *)name, "--help", NULL};
        status = find_worker(worker, sizeof worker);
        status = status == ND_OK ? print_of_worker(args, "help") : status;
    } else if (status == ND_OK && cli.help) {
        status = nd_config_help(stdout, ND_NDLAUNCH, cli.help_topic);
    } else if (status == ND_OK && cli.version) {
        status = print_version();
    } else if (status == ND_OK) {
        signal(SIGPIPE, SIG_IGN); /* a job goes on without those that read what it says */
        status = nd_slurm_complete(&slurm, &config);
        status = status == ND_OK ? nd_config_resolve(&config) : status;
        status = status == ND_OK ? nd_config_check_meeting(&config) : status;
        nd_log_init(config.log.level == ND_LOG_DEBUG ? ND_LOG_DEBUG : ND_LOG_INFO, NULL);
        if (command->command && config.launch.max_restarts > 0) {
            nd_log_warning("launch.max_restarts has no effect: %s is not started again",
                           nd_command_name(command->command));
            config.launch.max_restarts = 0;
        }
        if (command->command && config.launch.grace_seconds > use_grace_seconds) {
            config.launch.grace_seconds = use_grace_seconds;
        }
        status = status == ND_OK ? launch(&config, &slurm, command, exit_code) : status;
    }
    nd_config_fini(&config);
    return status;
}

/* "--make-key FILE" or "--make-key=FILE", which stands alone. */
static nd_status make_key(const char *flag, int argc, char **argv)
{
    const char *file = flag[10] == '=' && argc == 2                ? flag + 11
                       : !flag[10] && argc == 3 && flag == argv[1] ? argv[2]
                                                                   : "";
    if (!*file || *file == '-') {
        return nd_fail(ND_ERR_CONFIG,
                       "--make-key needs the name of a new file, and no other flag: `ndlaunch "
                       "--make-key job.key`; then start each node with --rdzv-key-file job.key");
    }
    return nd_key_make_file(file);
}

/* Before the first worker there is nothing to end but this process and the check that it started,
 * which ends with it. */
static void on_early_signal(int number)
{
    static const char text[] = "ndlaunch: stopped by a signal before the first worker started\n";
    struct pollfd p = {.fd = STDERR_FILENO, .events = POLLOUT};
    ssize_t ignored = poll(&p, 1, 0) != 0 ? write(STDERR_FILENO, text, sizeof text - 1) : 0;
    (void)ignored; /* nobody reads it */
    _exit(ND_ERR_PREEMPTED);
}

/* Until the job handles signals: those that end it at a step boundary have the same code here. */
static void install_early_signals(void)
{
    const struct sigaction action = {.sa_handler = on_early_signal};
    struct sigaction hangup;
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN) {
        sigaction(SIGHUP, &action, NULL); /* it stays ignored under nohup */
    }
    signal(SIGUSR2, SIG_IGN); /* workers ignore it, too */
}

int main(int argc, char **argv)
{
    int exit_code = 0;
    nd_status status;
    nd_streams_open();
    if (nd_limits_check_stack() != ND_OK) {
        nd_log_error("%s", nd_error_last()->message);
        return (int)ND_ERR_RESOURCE;
    }
    nd_shown_guard_terminal();
    install_early_signals();
    nd_signals_unblock();
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error of write, with a sentence */
    if (argc == 1) {
        nd_program_print_usage(ND_NDLAUNCH);
        return (int)ND_ERR_CONFIG;
    }
    int key = 1;
    while (key < argc && strncmp(argv[key], "--make-key", 10) != 0 &&
           strncmp(argv[key], "--make_key", 10) != 0) {
        key++;
    }
    if (key < argc) {
        status = make_key(argv[key], argc, argv);
    } else if (strcmp(argv[1], "env") == 0 && argc > 2) {
        status = nd_fail(ND_ERR_CONFIG, "ndlaunch env takes no further argument");
    } else if (strcmp(argv[1], "env") == 0) {
        nd_host_report(stdout);
        status = print_version();
    } else if (strcmp(argv[1], "config") == 0) {
        status = nd_starter_main(stdout, argc - 1, argv + 1);
    } else {
        worker_command command = {0};
        status = read_command(&command, &argc, &argv);
        status = status == ND_OK ? run_launcher(argc, argv, &command, &exit_code) : status;
        free(command.args);
        free(command.check);
    }
    status = status == ND_OK ? nd_process_flush_output() : status;
    if (status != ND_OK) {
        nd_log_error("%s", nd_error_last()->message);
        return (int)status;
    }
    return exit_code;
}

// SPDX-License-Identifier: Apache-2.0
/*
 * ndtrain: the worker.
 *   ndtrain train [flags]   one worker of a job, started by ndlaunch, srun, or alone
 *   ndtrain check [flags]   reads and checks configuration, model and data; starts nothing
 *   ndtrain plan  [flags]   prints mesh, groups, memory and estimated step time; starts nothing
 *   ndtrain generate        continues prompts with a model
 *   ndtrain eval            the loss of a model on data, or how well it answers multiple choice
 *   ndtrain bench           times FP8 beside BF16: linears, or a layer on a mesh
 *   ndtrain ckpt VERB       lists, verifies, exports, compares and deletes checkpoints
 *   ndtrain tokenize        turns text into token files
 *   ndtrain report RUN      draws runs as one page
 *   ndtrain --version       prints the version and what is inside
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "runtime/base/printable.h"
#include "runtime/base/process.h"
#include "runtime/base/shown.h"
#include "runtime/config/commands.h"
#include "runtime/rdzv/identity.h"
#include "trainer/commands/command.h"
#include "trainer/worker/worker.h"

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
    snprintf(prefix, sizeof prefix, "%s:%d", id->host, id->rank); /* the form that ndlaunch uses */
    nd_log_init(level, id->rank > 0 && id->source != ND_IDENTITY_NDLAUNCH ? prefix : "");
}

static int usage(const char *unknown)
{
    char shown[256];
    if (unknown[0] && nd_command_check_name("ndtrain", unknown) != ND_OK) {
        nd_log_error("%s", nd_error_last()->message);
        return (int)ND_ERR_CONFIG;
    }
    if (unknown[0]) {
        nd_escape(shown, sizeof shown, unknown, "");
        nd_log_error("ndtrain has no command \"%s\"", shown);
    }
    fprintf(stderr, "usage: ndtrain train|check|plan [--config-file FILE] [flags]\n"
                    "       ndtrain generate --model PATH --prompt TEXT [flags]\n"
                    "       ndtrain eval --model PATH --data FILE | --requests FILE [flags]\n"
                    "       ndtrain bench --products | --layer [flags]\n"
                    "       ndtrain ckpt ls|verify|export|gguf|diff|prune ... | ckpt --help\n"
                    "       ndtrain tokenize --tokenizer PATH --input PATH ... --output-prefix P\n"
                    "       ndtrain report RUN ... [-o FILE]\n"
                    "       ndtrain --help [SECTION|all] | --version\n");
    return (int)ND_ERR_CONFIG;
}

static nd_status help(const char *topic)
{
    static const nd_help_entry own[] = {
        {"train", "one worker of a job, which ndlaunch, srun or torchrun starts"},
        {"check", "reads configuration, model and data; starts nothing"},
        {"plan [--explain]", "prints mesh, groups, memory and time; with --explain also why memory "
                             "is needed"},
        {"plan --rank R", "the rank whose groups and memory are printed; rank 0 if not given"},
        {"generate, eval", "texts of a model, and its loss on data (generate --help, eval --help)"},
        {"bench", "times FP8 beside BF16 on this machine (bench --help)"},
        {"ckpt VERB", "lists, verifies, exports, compares and deletes checkpoints (ckpt --help)"},
        {"tokenize", "turns text and JSON lines into token files (tokenize --help)"},
        {"report RUN", "draws runs as one page of HTML (report --help)"},
    };
    static const nd_help program = {"ndtrain train|check|plan [--config-file FILE] [flags]", own,
                                    sizeof own / sizeof *own};
    return nd_config_help(stdout, &program, topic);
}

static const nd_command *find_command(const char *name)
{
    static const nd_command *const commands[] = {&nd_command_train, &nd_command_check,
                                                 &nd_command_plan,  &nd_command_generate,
                                                 &nd_command_eval,  &nd_command_bench};
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(commands[i]->name, name) == 0) {
            return commands[i];
        }
    }
    return NULL;
}

static const struct {
    nd_command_id command;
    nd_tool *run;
} tools[] = {{ND_COMMAND_TOKENIZE, nd_tokenize}, {ND_COMMAND_REPORT, nd_report}};

/* Runs a command that is no worker and needs no configuration; false: `name` is none. */
static bool run_tool(const char *name, int argc, char **argv, int *exit_code)
{
    const bool is_ckpt = strcmp(name, "ckpt") == 0;
    if (is_ckpt) {
        *exit_code = nd_ckpt_main(argc, argv);
    }
    for (size_t i = 0; i < sizeof tools / sizeof *tools; i++) {
        if (strcmp(nd_command_name(tools[i].command), name) == 0) {
            int code = 0;
            nd_status status = nd_tool_run(tools[i].command, tools[i].run, argc, argv, &code);
            *exit_code = nd_tool_end(status, code);
            return true;
        }
    }
    return is_ckpt;
}

static nd_status run_command(const nd_command *command, const nd_command_call *call)
{
    if (call->cli->help && command->own && !call->cli->help_topic[0]) {
        nd_command_print_help(command->own);
        return ND_OK;
    }
    if (call->cli->help) {
        return help(call->cli->help_topic);
    }
    if (call->cli->version) {
        nd_version_print();
        return ND_OK;
    }
    init_log(call->config, &call->worker->identity);
    return command->run(call);
}

/* Checks the command's own flags. *rest becomes the words without them, or stays as it is where all
 * flags are settings; it is owned by the caller, but not its words. argv[0] is the command. */
static nd_status take_own_flags(const nd_command *command, int argc, char **argv, char ***rest,
                                int *count)
{
    const nd_command *use = command;
    if (command->find_use) {
        use = command->find_use(argc, argv);
        argc--;
        argv++;
    }
    if (!use || !use->own) {
        return ND_OK;
    }
    ND_TRY(nd_command_split(use->own, argc, argv, false, rest, count));
    return nd_command_wants_help(argc, argv) ? ND_OK : use->check_flags(argc, argv);
}

/* The exit code of a program that has printed something and is no worker. */
static int finish(nd_status status)
{
    status = status == ND_OK ? nd_process_flush_output() : status;
    if (status != ND_OK) {
        nd_log_error("%s", nd_error_last()->message);
    }
    return (int)status;
}

int main(int argc, char **argv)
{
    nd_worker worker = {.failure = ND_FAILURE_INIT};
    nd_config config = {0};
    nd_cli cli = {.plan_rank = -1, .help_topic = ""};
    const char *name = argc > 1 ? argv[1] : "";
    const nd_command *command = find_command(name);
    char **rest = NULL;
    int rest_count = argc - 1, code = 0;
    nd_streams_open();
    if (nd_limits_check_stack() != ND_OK) {
        nd_log_error("%s", nd_error_last()->message);
        return (int)ND_ERR_RESOURCE;
    }
    nd_shown_guard_terminal();
    if (command && command->trains) {
        nd_process_shorten_spin(argv, command->decodes);
    }
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error of write, with a sentence */
    if (run_tool(name, argc - 1, argv + 1, &code)) {
        return code;
    }
    nd_worker_die_with_parent();
    nd_limits_raise_files(); /* rank 0 may host the store, and each rank has sockets to others */
    if (strcmp(name, "version") == 0 || strcmp(name, "--version") == 0) {
        nd_version_print();
        return finish(ND_OK);
    }
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        return finish(help(argc > 2 ? argv[2] : ""));
    }
    if (!command) {
        return usage(name);
    }
    nd_command_call call = {&config, &cli, &worker, argc, argv};
    nd_status status = command->begin(&worker);
    if (status == ND_OK && command != &nd_command_plan) { /* which says what a worker needs */
        status = nd_limits_check_memory(ND_WORKER_LIBRARY_BYTES, "this program");
    }
    status =
        status == ND_OK ? take_own_flags(command, argc - 1, argv + 1, &rest, &rest_count) : status;
    status = status == ND_OK ? nd_settings_read(&config, &cli, &worker.identity, rest_count,
                                                rest ? rest : argv + 1)
                             : status;
    status = status == ND_OK ? run_command(command, &call) : status;
    status = status == ND_OK ? nd_process_flush_output() : status;
    code = nd_worker_close(&worker, status);
    nd_config_fini(&config);
    free(rest);
    return code;
}

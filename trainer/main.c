// SPDX-License-Identifier: Apache-2.0
/*
 * ndtrain: the worker.
 *   ndtrain COMMAND ...     the commands are in runtime/config/commands.def
 *   ndtrain --version       prints the version and what is inside
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops.h"
#include "runtime/base/log.h"
#include "runtime/base/printable.h"
#include "runtime/base/process.h"
#include "runtime/base/suggest.h"
#include "runtime/base/version.h"
#include "runtime/config/commands.h"
#include "runtime/device/device.h"
#include "runtime/rdzv/identity.h"
#include "trainer/commands/command.h"
#include "trainer/parts.h" /* made by meson.build: what this program was built with */
#include "trainer/run/run.h"
#include "trainer/worker/worker.h"

static void init_log(const nd_config *config, const nd_identity *id)
{
    const nd_log_level level =
        config->log.level == ND_LOG_INFO && id->rank > 0 ? ND_LOG_WARNING : config->log.level;
    char prefix[200];
    /* ndlaunch prefixes its workers' lines in this form, and knows their errors by "error: ". */
    snprintf(prefix, sizeof prefix, "%s:%d", id->host, id->rank);
    nd_log_init(level, id->rank > 0 && id->source != ND_IDENTITY_NDLAUNCH ? prefix : "");
}

static void print_part(const char *name, const char *version, const char *detail)
{
    bool built = version[0] && strcmp(version, "none") != 0;
    printf("  %-9s %s%s%s\n", name, built ? version : "not built in",
           built && detail[0] ? "; " : "", built ? detail : "");
}

/* The instruction set that the CPU ops use here, and what multiplies, or why there are none. */
static void print_cpu(void)
{
    nd_device *device = NULL;
    const nd_ops *ops = NULL;
    if (strcmp(nd_ops_library_version(), "none") == 0) {
        print_part("CPU", "", "");
    } else if (nd_device_open_cpu(1, &device) == ND_OK && nd_ops_cpu(device, &ops) == ND_OK) {
        print_part("CPU", nd_ops_machine(device), nd_ops_products(device));
    } else {
        print_part("CPU", nd_error_last()->message, "");
    }
    nd_device_close(device);
    nd_error_clear();
}

/* The version, then the libraries and GPU kernels inside, one a line. */
static void print_version(void)
{
    nd_run_text libraries[ND_LIBRARY_COUNT];
    int count = nd_library_versions(true, libraries);
    printf("ndtrain %s\n", ND_VERSION);
    for (int i = 0; i < count; i++) {
        print_part(libraries[i].key, libraries[i].value, "");
    }
    print_cpu();
    print_part("PMIx", ND_BUILT_PMIX, "");
    print_part("CUDA", ND_BUILT_CUDA, ND_BUILT_ARCHITECTURES);
    print_part("cuBLASLt", ND_BUILT_CUBLASLT, "");
    print_part("cuDNN", ND_BUILT_CUDNN,
               nd_ops_cuda_lacks_cudnn() ? "without cudnn-frontend, so device cuda is refused"
                                         : "");
    print_part("NCCL", ND_BUILT_NCCL, "");
}

static int usage(const char *unknown)
{
    char shown[256];
    if (unknown[0] && nd_command_check_name(ND_NDTRAIN, unknown) != ND_OK) {
        nd_log_error("%s", nd_error_last()->message);
        return (int)ND_ERR_CONFIG;
    }
    if (unknown[0]) {
        nd_escape(shown, sizeof shown, unknown, "");
        nd_log_error("ndtrain has no command \"%s\"", shown);
    }
    nd_program_print_usage(ND_NDTRAIN);
    return (int)ND_ERR_CONFIG;
}

static const nd_command *find_command(const char *name)
{
    static const nd_command *const commands[] = {&nd_command_train, &nd_command_check,
                                                 &nd_command_plan,  &nd_command_generate,
                                                 &nd_command_eval,  &nd_command_bench};
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(nd_command_name(commands[i]->id), name) == 0) {
            return commands[i];
        }
    }
    return NULL;
}

/* Tools. */

static const struct {
    nd_command_id command;
    nd_tool *run;
} tools[] = {{ND_COMMAND_TOKENIZE, nd_tokenize},    {ND_COMMAND_REPORT, nd_report},
             {ND_COMMAND_CKPT_LS, nd_ckpt_ls},      {ND_COMMAND_CKPT_VERIFY, nd_ckpt_verify},
             {ND_COMMAND_EXPORT, nd_export},        {ND_COMMAND_CKPT_DIFF, nd_ckpt_diff},
             {ND_COMMAND_CKPT_PRUNE, nd_ckpt_prune}};
enum { TOOLS = sizeof tools / sizeof *tools };

static const char ckpt[] = "ckpt";

/* The tool that the words name: one, or ckpt and a verb; TOOLS: none. */
static int find_tool(int argc, char **argv)
{
    char name[64];
    const bool verb = strcmp(argv[0], ckpt) == 0 && argc > 1;
    int i = 0;
    snprintf(name, sizeof name, "%s%s%s", argv[0], verb ? " " : "", verb ? argv[1] : "");
    while (i < TOOLS && strcmp(nd_command_name(tools[i].command), name) != 0) {
        i++;
    }
    return i;
}

/* ckpt without one of its verbs. */
static nd_status run_ckpt(const char *word)
{
    nd_suggest search;
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "help") == 0) {
        nd_command_print_help(ND_COMMAND_CKPT);
        return ND_OK;
    }
    if (strcmp(word, "--version") == 0) {
        print_version();
        return ND_OK;
    }
    nd_suggest_init(&search, word);
    for (int i = 0; i < TOOLS; i++) {
        const char *name = nd_command_name(tools[i].command);
        if (strncmp(name, ckpt, sizeof ckpt - 1) == 0) {
            nd_suggest_offer(&search, name + sizeof ckpt);
        }
    }
    return *word ? nd_fail(ND_ERR_CONFIG, "ndtrain ckpt has no verb \"%.60s\"; %s%s%s", word,
                           search.best ? "did you mean "
                                       : "it has ls, verify, diff and prune; ndtrain export writes "
                                         "models",
                           search.best ? search.best : "", search.best ? "?" : "")
                 : nd_fail(ND_ERR_CONFIG, "a verb is missing: ls, verify, diff or prune; ndtrain "
                                          "ckpt --help says more");
}

static nd_status run_tool(int tool, int argc, char **argv)
{
    nd_command_flags line;
    if (tool == TOOLS) {
        return run_ckpt(argc > 1 ? argv[1] : "");
    }
    if (nd_command_wants_help(argc, argv)) {
        nd_command_print_help(tools[tool].command);
        return ND_OK;
    }
    ND_TRY(nd_command_flags_read(tools[tool].command, argc, argv, &line));
    return tools[tool].run(&line);
}

/* The exit code of a program that has printed something and is no worker. */
static int finish(nd_status status)
{
    const nd_error own = *nd_error_last();
    const nd_status flushed = nd_process_flush_output(); /* what is printed stands first */
    if (status != ND_OK && own.message[0]) {
        nd_log_error("%s", own.message);
    }
    if (flushed != ND_OK) {
        nd_log_error("%s", nd_error_last()->message);
    }
    return (int)(flushed != ND_OK ? flushed : status);
}

static nd_status run_command(const nd_command *command, nd_command_call *call, const nd_cli *cli,
                             int count, char **words, nd_command_flags *line)
{
    if (cli->help && command != &nd_command_train && !cli->help_topic[0]) {
        nd_command_print_help(command->id);
        return ND_OK;
    }
    if (cli->help) {
        return nd_config_help(stdout, ND_NDTRAIN, cli->help_topic);
    }
    if (cli->version) {
        print_version();
        return ND_OK;
    }
    init_log(call->config, &call->worker->identity);
    call->line = line;
    ND_TRY(call->use ? nd_command_flags_read(call->use->id, count, words, line) : ND_OK);
    ND_TRY(call->use && call->use->check_flags ? call->use->check_flags(line) : ND_OK);
    ND_TRY(command == &nd_command_plan ? ND_OK : nd_config_check_meeting(call->config));
    return command->run(call);
}

int main(int argc, char **argv)
{
    nd_worker worker = {.gate = ND_GATE_INIT};
    nd_config config = {0};
    nd_cli cli = {.help_topic = ""};
    nd_command_flags line = {0}; /* as long as the call, which points to it */
    const char *name = argc > 1 ? argv[1] : "";
    const nd_command *command = find_command(name);
    char **words = argv + 1;
    int count = argc - 1;
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
    const int tool = argc > 1 ? find_tool(argc - 1, argv + 1) : TOOLS;
    if (tool < TOOLS || strcmp(name, ckpt) == 0) {
        const int verb = strcmp(name, ckpt) == 0 && tool < TOOLS;
        return finish(run_tool(tool, argc - 1 - verb, argv + 1 + verb));
    }
    nd_worker_die_with_parent();
    nd_limits_raise_files(); /* rank 0 may host the store, and each rank has sockets to others */
    if (strcmp(name, "version") == 0 || strcmp(name, "--version") == 0) {
        print_version();
        return finish(ND_OK);
    }
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        return finish(nd_config_help(stdout, ND_NDTRAIN, argc > 2 ? argv[2] : ""));
    }
    if (!command) {
        return usage(name);
    }
    /* With `check`, the command behind it; the words are then without "check". */
    const bool checks = command == &nd_command_check && count > 1;
    const nd_command *use = checks ? find_command(words[1]) : command;
    const bool has_flags = use && use != &nd_command_train && use != &nd_command_check;
    use = has_flags && (use->trains || !checks) ? use : NULL;
    count -= checks && use;
    words += checks && use;
    nd_command_call call = {
        .config = &config, .worker = &worker, .argc = argc, .argv = argv, .use = use};
    nd_status status =
        command->begin ? command->begin(&worker) : nd_identity_read(&worker.identity);
    if (status == ND_OK && command != &nd_command_plan) { /* which says what a worker needs */
        status = nd_limits_check_memory(ND_WORKER_LIBRARY_BYTES, "this program");
    }
    status =
        status == ND_OK ? nd_settings_read(&config, &cli, &worker.identity, count, words) : status;
    status = status == ND_OK ? run_command(command, &call, &cli, count, words, &line) : status;
    if (status != ND_OK) {
        fflush(stdout); /* what is printed stands before the error */
    }
    status = status == ND_OK ? nd_process_flush_output() : status;
    const int code = nd_worker_close(&worker, status);
    nd_config_fini(&config);
    return code;
}

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMMANDS_COMMAND_H
#define ND_COMMANDS_COMMAND_H
/* The commands of ndtrain, one file each, and the configuration of a worker. */
#include "runtime/config/commands.h"
#include "runtime/config/config.h"
#include "trainer/run/run.h"

typedef struct nd_command_call {
    nd_config *config; /* resolved, but for nd_config_take_epochs */
    const nd_cli *cli;
    nd_worker *worker; /* has its identity */
    int argc;          /* of main */
    char **argv;
} nd_command_call;

typedef struct nd_command {
    const char *name;
    bool trains; /* a worker of a job: OpenMP must wait briefly, which is set before main's work */
    /* Before the configuration is read: finds the worker's identity. */
    nd_status (*begin)(nd_worker *worker);
    nd_status (*run)(const nd_command_call *call);
    nd_command_id own; /* whose flags stand among the settings; ND_COMMAND_NONE: all are settings */
    /* The command whose flags stand behind this one's name, as in `check generate --model DIR`, or
     * NULL. Where the member is NULL, they are its own. */
    const struct nd_command *(*find_use)(int argc, char **argv);
    /* Checks its own flags before the job is joined; argv[0] is the command. `run` reads them
     * again. NULL where there are none. */
    nd_status (*check_flags)(int argc, char **argv);
    /* What `ndtrain check NAME ...` checks before workers start: model, its files, and room. The
     * call is as that of `run`, with the planner's device to be opened. NULL: it has no flags. */
    nd_status (*check)(const nd_command_call *call);
    bool decodes; /* by many short products, between which its threads had better not sleep */
} nd_command;

/* job.c: of commands that are workers of a job. `stop` is called by a stop signal. */
nd_status nd_job_begin(nd_worker *worker, void (*stop)(int signal_number));
/* The mesh against the number of workers, and what workers of one host need. */
nd_status nd_job_check(const nd_config *config, const nd_identity *identity);

/* One worker of a job: the run, from its first message to its last file. */
extern const nd_command nd_command_train;
/* Reads and checks configuration, model and data, or (check generate, check eval, check bench) what
 * that command needs; starts nothing. */
extern const nd_command nd_command_check;
/*
 * Prints mesh, the rule of each group, one rank's groups, parameters, the memory plan of a rank and
 * an estimated step time, without starting anything. The same code plans a run, so the plan is what
 * a run allocates. ND_ANSWER_NO: the job does not fit.
 */
extern const nd_command nd_command_plan;

/* Continues prompts, and prints the texts. */
extern const nd_command nd_command_generate;
/* The loss of a model on data, or how well it answers multiple choice. */
extern const nd_command nd_command_eval;

/* What FP8 gains here: times of linears, or of a layer on a mesh, beside BF16. */
extern const nd_command nd_command_bench;

/* A command that is no worker and needs no configuration. *code is the exit code when ND_OK is
 * returned, and is 0 before the call. */
typedef nd_status nd_tool(const nd_command_flags *line, int *code);
/* Reads the command line, or prints help, and runs the tool; argv[0] is the command. */
nd_status nd_tool_run(nd_command_id command, nd_tool *run, int argc, char **argv, int *code);
/* Writes out what was printed, logs the error, and returns the exit code: that of the status, or
 * `code` when all went well. */
int nd_tool_end(nd_status status, int code);

/* `ndtrain ckpt VERB ...`: tools for checkpoints, which need no configuration (ckpt.h). argv[0] is
 * "ckpt"; returns the exit code. */
int nd_ckpt_main(int argc, char **argv);

/* `ndtrain report RUN ...`: run folders as one page (docs/report.md). */
nd_tool nd_report;
/* `ndtrain tokenize`: files of text to the pair of files that Megatron-LM reads, with a loss mask
 * beside them. */
nd_tool nd_tokenize;

/*
 * A worker's configuration, resolved: the one that ndlaunch hands down, or that of the command
 * line. With cli->help or cli->version it is not resolved. argv[0] is the command's name.
 */
nd_status nd_settings_read(nd_config *config, nd_cli *cli, const nd_identity *identity, int argc,
                           char **argv);

/* Prints the version, then the libraries and GPU kernels inside, one a line. */
void nd_version_print(void);

/*
 * Compares the plans of this host's CPU workers together with its memory: ND_ERR_RESOURCE with
 * the numbers when there is not that much, a warning when it is not free now. The worker has the
 * planner's device.
 */
nd_status nd_plan_check_memory(const nd_config *config, const nd_inputs *inputs, nd_worker *worker);

#endif

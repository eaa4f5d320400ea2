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
    nd_worker *worker;            /* has its identity */
    const nd_command_flags *line; /* the command's own flags */
    int argc;                     /* of main */
    char **argv;
} nd_command_call;

typedef struct nd_command {
    nd_command_id id; /* its flags stand among the settings, if it has some */
    bool trains; /* a worker of a job: OpenMP must wait briefly, which is set before main's work */
    /* Before the configuration is read: finds the worker's identity. */
    nd_status (*begin)(nd_worker *worker);
    nd_status (*run)(const nd_command_call *call);
    /* The command whose flags stand behind this one's name, as in `check generate --model DIR`, or
     * NULL. Where the member is NULL, they are its own. */
    const struct nd_command *(*find_use)(int argc, char **argv);
    /* Checks its own flags beside each other, before the job is joined. NULL: there is nothing to
     * check. */
    nd_status (*check_flags)(const nd_command_flags *line);
    /* What `ndtrain check NAME ...` checks before workers start: model, its files, and room. The
     * call is as that of `run`, with the planner's device to be opened. NULL: it has no flags. */
    nd_status (*check)(const nd_command_call *call);
    bool decodes; /* by many short products, between which its threads had better not sleep */
} nd_command;

/* job.c: of commands that are workers of a job. `stop` is called by a stop signal. */
nd_status nd_job_begin(nd_worker *worker, void (*stop)(int signal_number));
/* The mesh against the number of workers, and what workers of one host need. */
nd_status nd_job_check(const nd_config *config, const nd_identity *identity);
/* Before workers start: the device of the job, and on the CPU the room that a worker of this host
 * needs before it knows its plan. */
nd_status nd_job_check_room(const nd_command_call *call);

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
/* Prints a row of JSON, which it takes; NULL: memory ran out. */
struct json_t;
nd_status nd_print_row(struct json_t *row);

/* `ndtrain ckpt VERB ...`: tools for checkpoints (ckpt.h). */
nd_tool nd_ckpt_ls, nd_ckpt_verify, nd_ckpt_export, nd_ckpt_gguf, nd_ckpt_diff, nd_ckpt_prune;
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

/*
 * Compares the plans of this host's CPU workers together with its memory: ND_ERR_RESOURCE with
 * the numbers when there is not that much, a warning when it is not free now. The worker has the
 * planner's device.
 */
nd_status nd_plan_check_memory(const nd_config *config, const nd_inputs *inputs, nd_worker *worker);

#endif

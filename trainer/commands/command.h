// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMMANDS_COMMAND_H
#define ND_COMMANDS_COMMAND_H
/* The commands of ndtrain, one file each. */
#include "runtime/config/commands.h"
#include "runtime/config/config.h"
#include "trainer/run/run.h"

typedef struct nd_command nd_command;
struct nd_session;

typedef struct nd_command_call {
    nd_config *config;            /* resolved, but for nd_config_take_epochs */
    nd_worker *worker;            /* has its identity */
    const nd_command_flags *line; /* the command's own flags */
    int argc;                     /* of main */
    char **argv;
    const nd_command *use; /* of `ndtrain check NAME ...`: whose flags the line has, or NULL */
    bool checks; /* looks for that at the model, its files and the room for a worker; joins no job,
                    and the planner's device is to be opened */
} nd_command_call;

struct nd_command {
    nd_command_id id; /* its flags stand among the settings, if it has some */
    bool trains; /* a worker of a job: OpenMP must wait briefly, which is set before main's work */
    /* Before the configuration is read: finds the worker's identity. NULL: nd_identity_read. */
    nd_status (*begin)(nd_worker *worker);
    nd_status (*run)(const nd_command_call *call);
    /* Checks its own flags beside each other, before the job is joined. NULL: there is nothing to
     * check. */
    nd_status (*check_flags)(const nd_command_flags *line);
    bool decodes; /* by many short products, between which its threads had better not sleep */
    /* For a command that uses a model through nd_session_run: its work with it, and its flags for
     * the model and its tokenizer. `use` calls nd_session_agree before the first other collective.
     * Where the session only checks, there are no ranks, and mesh and inputs are looked at. */
    nd_status (*use)(struct nd_session *session);
    nd_own_flag_id model, tokenizer;
};

/* runtime/config/commands.def says what they do. */
extern const nd_command nd_command_train, nd_command_check, nd_command_plan, nd_command_generate,
    nd_command_eval, nd_command_bench;

/* job.c: of commands that are workers of a job. The mesh against the number of workers, and what
 * workers of one host need. */
nd_status nd_job_check(const nd_config *config, const nd_identity *identity);
/* plan.c: compares the plans of this host's CPU workers together with its memory, on the planner's
 * device: ND_ERR_RESOURCE with the numbers when there is not that much, a warning when it is not
 * free now. */
nd_status nd_plan_check_memory(const nd_config *config, const nd_inputs *inputs, nd_worker *worker);
/* Before workers start: the device of the job, and on the CPU the room that a worker of this host
 * needs before it knows its plan. */
nd_status nd_job_check_room(const nd_command_call *call);

/* A command that is no worker and needs no configuration. One that has printed why it ends with
 * another status than ND_OK leaves no message. */
typedef nd_status nd_tool(const nd_command_flags *line);
nd_tool nd_ckpt_ls, nd_ckpt_verify, nd_ckpt_diff, nd_ckpt_prune;
nd_tool nd_export, nd_report, nd_tokenize;
/* ckpt.c: the path without slashes at its end, owned by the caller. ND_ERR_DATA: it is no folder,
 * and no link to one. */
nd_status nd_ckpt_folder(const char *argument, char **out);

/* Prints a row of JSON, which it takes; NULL: memory ran out. */
struct json_t;
nd_status nd_print_row(struct json_t *row);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONFIG_COMMANDS_H
#define ND_CONFIG_COMMANDS_H
/*
 * The commands of both programs, with the flags of their own (commands.def). Tools, such as
 * `ndtrain ckpt ls RUN --json`, have these alone. Others are workers of a job, whose flags stand
 * among the settings of a run: `generate --model DIR --top-k 5 --tp-size 2`. ndlaunch starts them
 * too: it reads the settings, and passes the command's own flags on. The meaning of a flag is with
 * the command (trainer/commands, launcher).
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef enum nd_program { ND_NDTRAIN, ND_NDLAUNCH } nd_program;

typedef enum nd_command_id {
    ND_COMMAND_NONE, /* a run */
#define ND_COMMAND(id, ...) ND_COMMAND_##id,
#include "runtime/config/commands.def"
    ND_COMMAND_COUNT
} nd_command_id;

/* The flags of all commands: ND_GENERATE_MODEL, ND_CKPT_LS_JSON, ... */
typedef enum nd_own_flag_id {
#define ND_OWN(command, id, ...) ND_##command##_##id,
#include "runtime/config/commands.def"
    ND_OWN_FLAG_COUNT
} nd_own_flag_id;

const char *nd_command_name(nd_command_id command); /* "ckpt ls" */
/* The worker's command of this name that the program has; ND_COMMAND_NONE: there is none. */
nd_command_id nd_command_find(nd_program program, const char *name);
/*
 * A word in the place of a command which the program does not have.
 * ND_ERR_CONFIG when the other program has it, or when it is nearly the name of a command; ND_OK
 * when there is nothing to say of it.
 */
nd_status nd_command_check_name(nd_program program, const char *word);
void nd_program_print_usage(nd_program program); /* to stderr */
void nd_command_print_help(nd_command_id command);
bool nd_command_wants_help(int argc, char **argv); /* --help or -h stands behind argv[0] */

typedef struct nd_flag_value {
    bool given;
    const char *text; /* NULL: not given, or a switch; the last one of several */
    int64_t whole;    /* of a choice: its place among the values, 0 if not given */
    double real;
} nd_flag_value;

enum { ND_WORDS_MAX = 32 };

/* A command line; borrows its words. */
typedef struct nd_command_flags {
    nd_command_id command;
    int argc;
    char **argv;
    nd_flag_value values[ND_OWN_FLAG_COUNT]; /* by nd_own_flag_id */
    int words; /* that belong to no flag of a tool; NULL stands behind the last */
    const char *word[ND_WORDS_MAX + 1];
} nd_command_flags;

/* Reads and checks the command's own flags; argv[0] is skipped. ND_ERR_CONFIG names the flag and
 * what it takes. Words and flags that the command does not have are an error for a tool; those of a
 * worker's command are settings, and are left to nd_config_parse. */
nd_status nd_command_flags_read(nd_command_id command, int argc, char **argv,
                                nd_command_flags *out);
/* The values of a flag one after the other; NULL behind the last. *at is 0 before the first. */
const char *nd_command_flags_next(const nd_command_flags *line, nd_own_flag_id flag, int *at);

#endif

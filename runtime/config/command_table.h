// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONFIG_COMMAND_TABLE_H
#define ND_CONFIG_COMMAND_TABLE_H
/* For commands.c, command_line.c and help.c alone: commands.def as arrays. */
#include "runtime/config/commands.h"

typedef enum nd_flag_kind {
    KIND_SWITCH,
    KIND_TEXT,
    KIND_TEXTS,
    KIND_WORDS,
    KIND_CHOICE,
    KIND_WHOLE,
    KIND_REAL
} nd_flag_kind;

typedef struct nd_own_flag {
    nd_command_id command;
    nd_flag_kind kind;
    const char *names, *value, *help;
    int64_t least, most;
    double initial;
} nd_own_flag;

extern const nd_own_flag nd_own_flags[ND_OWN_FLAG_COUNT];

typedef struct nd_command_row {
    unsigned programs; /* bit 1 << nd_program */
    const char *name;
    int least, most; /* words that belong to no flag */
    const char *word, *usage, *summary, *about, *codes;
} nd_command_row;

extern const nd_command_row nd_command_rows[ND_COMMAND_COUNT];

/* "ndtrain" or "ndlaunch"; of a command the one that has its help. */
const char *nd_program_name(nd_program program);
const char *nd_program_of(nd_command_id command);
/* A command of the program, but for the verbs of ckpt. */
bool nd_program_has(nd_program program, nd_command_id command);

/* Flags that users try with a command, and that have no effect on it, or have another name. */
typedef struct nd_refusal {
    const char *names;    /* without dashes, separated by spaces */
    const char *sentence; /* what to use */
} nd_refusal;

/* The commands of workers. */
typedef struct nd_worker_command {
    nd_command_id command;
    const char *const *settings; /* stand before those of the user; ends with NULL */
    int settings_unless;         /* the flag without which they do; ND_NO_FLAG: always */
    const nd_refusal *refused;   /* ends with names NULL; NULL: none */
} nd_worker_command;

/* NULL: a tool. */
const nd_worker_command *nd_find_worker_command(nd_command_id command);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONFIG_COMMAND_FLAGS_H
#define ND_CONFIG_COMMAND_FLAGS_H
/*
 * Commands of ndtrain that are workers of a job and have flags of their own, which stand among the
 * settings of a run: `generate --model DIR --top-k 5 --tp-size 2`. ndlaunch starts them too: it
 * reads the settings, and passes the command's own flags on. The meaning of a flag is with the
 * command (trainer/commands).
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct nd_command_flag {
    const char *name;  /* "--max-new-tokens"; '_' is as good as '-' */
    const char *value; /* what it takes: "N"; NULL: a switch */
    const char *help;
} nd_command_flag;

/* Flags that users try with a command, and that have no effect on it, or have another name. */
typedef struct nd_command_refusal {
    const char *names;    /* without dashes, space-separated */
    const char *sentence; /* what to use */
} nd_command_refusal;

typedef struct nd_command_flags {
    const char *command;
    const nd_command_flag *list;
    int count;
    const char *const *settings;       /* stand before those of the user; ends with NULL */
    int settings_unless;               /* the flag without which they do; -1: always */
    const nd_command_refusal *refused; /* ends with names NULL; NULL: none */
} nd_command_flags;

/* Numbers of the flags in their lists. */
enum {
    ND_GENERATE_MODEL,
    ND_GENERATE_TOKENIZER,
    ND_GENERATE_PROMPT,
    ND_GENERATE_PROMPT_FILE,
    ND_GENERATE_JSONL,
    ND_GENERATE_INTERACTIVE,
    ND_GENERATE_CONTEXT,
    ND_GENERATE_CHAT,
    ND_GENERATE_MAX_NEW,
    ND_GENERATE_TEMPERATURE,
    ND_GENERATE_TOP_K,
    ND_GENERATE_TOP_P,
    ND_GENERATE_MIN_P,
    ND_GENERATE_STOP,
    ND_GENERATE_IGNORE_EOS,
    ND_GENERATE_BATCH,
    ND_GENERATE_ROWS,
    ND_GENERATE_FLAGS
};
enum {
    ND_EVAL_MODEL,
    ND_EVAL_TOKENIZER,
    ND_EVAL_DATA,
    ND_EVAL_REQUESTS,
    ND_EVAL_SERVE,
    ND_EVAL_CONTEXT,
    ND_EVAL_JSONL,
    ND_EVAL_ADD_SPECIAL,
    ND_EVAL_ROWS,
    ND_EVAL_FLAGS
};
enum {
    ND_BENCH_PRODUCTS,
    ND_BENCH_LAYER,
    ND_BENCH_SIZES,
    ND_BENCH_REPEATS,
    ND_BENCH_JSONL,
    ND_BENCH_FLAGS
};
extern const nd_command_flags nd_generate_flags, nd_eval_flags, nd_bench_flags;

/* The command's flags; NULL: it has none, or is no such command. */
const nd_command_flags *nd_command_flags_find(const char *command);

/*
 * A word in the place of a command which `program` ("ndlaunch", "ndtrain") does not have.
 * ND_ERR_CONFIG when the other program has it, or when it is nearly the name of a command; ND_OK
 * when there is nothing to say of it.
 */
nd_status nd_command_check_name(const char *program, const char *word);

/* Calls apply(context, number, value or NULL) for each flag of the list, in the order of the
 * command line; argv[0] is skipped. ND_ERR_CONFIG: a value is missing, or a switch has one. */
typedef nd_status nd_command_flag_apply(void *context, int flag, const char *value);
nd_status nd_command_flags_read(const nd_command_flags *flags, int argc, char **argv,
                                nd_command_flag_apply *apply, void *context);
/*
 * The words of a command line without the command's own flags, behind argv[0] and the command's
 * settings; or (own) with them alone, behind argv[0]. *out ends with NULL; it is owned by the
 * caller, but not its words. ND_ERR_CONFIG (not `own`): a flag of neither; names the nearest one.
 */
nd_status nd_command_flags_split(const nd_command_flags *flags, int argc, char **argv, bool own,
                                 char ***out, int *count);
void nd_command_flags_print(const nd_command_flags *flags);

/* The value of a flag. ND_ERR_CONFIG names flag and range. */
nd_status nd_command_flag_whole(const nd_command_flag *flag, const char *value, int64_t least,
                                int64_t *out);
nd_status nd_command_flag_real(const nd_command_flag *flag, const char *value, double *out);

#endif

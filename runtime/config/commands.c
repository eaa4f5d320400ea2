// SPDX-License-Identifier: Apache-2.0
#include "runtime/config/command_table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/suggest.h"

#define CKPT_CODES                                                                                 \
    "Exit codes: 0 done, 2 wrong usage, 65 a bad or damaged folder, 73 output that cannot be\n"    \
    "written, 74 a failing disk, 71 out of memory. diff ends with 1 when the states differ.\n"

const nd_own_flag nd_own_flags[ND_OWN_FLAG_COUNT] = {
#define ND_OWN_SWITCH(command, id, names, help)                                                    \
    {ND_COMMAND_##command, KIND_SWITCH, names, NULL, help, 0, 0, 0},
#define ND_OWN_TEXT(command, id, kind, names, value, help)                                         \
    {ND_COMMAND_##command, KIND_##kind, names, value, help, 0, 0, 0},
#define ND_OWN_NUMBER(command, id, kind, names, value, least, most, initial, help)                 \
    {ND_COMMAND_##command, KIND_##kind, names, value, help, least, most, initial},
#include "runtime/config/commands.def"
};

const nd_command_row nd_command_rows[ND_COMMAND_COUNT] = {
#define ND_COMMAND(id, ...) [ND_COMMAND_##id] = {__VA_ARGS__},
#include "runtime/config/commands.def"
};

static const nd_refusal generate_refused[] = {
    {"max-tokens max-length max-new", "new tokens are counted by --max-new-tokens"},
    {"do-sample", "a --temperature above 0 draws tokens; without it the likeliest one is taken"},
    {"batch-size micro-batch-size per-device-train-batch-size",
     "texts of a replica at once are --max-batch"},
    {"sequence-length seq-length", "the room follows from the prompt and --max-new-tokens; of "
                                   "--interactive it is --context"},
    {"lr learning-rate num-steps max-steps num-train-epochs gradient-accumulation-steps "
     "warmup-steps weight-decay",
     "it is about training, and has no effect here; leave it out"},
    {"num-beams repetition-penalty num-return-sequences",
     "it does not exist here; tokens are chosen by --temperature, --top-k, --top-p and --min-p"},
    {NULL, NULL}};

/* A model that is used stands on each replica whole, on the CPU; what a configuration file says of
 * shards and devices is about training. */
static const char *const use_settings[] = {
    "--device", "cpu", "--dp-shard-size", "1", "--dp-replicate-size", "-1", NULL};
static const char *const no_settings[] = {NULL};

static const nd_worker_command worker_commands[] = {
    {ND_COMMAND_GENERATE, use_settings, ND_NO_FLAG, generate_refused},
    {ND_COMMAND_EVAL, use_settings, ND_EVAL_DATA, NULL},
    {ND_COMMAND_BENCH, no_settings, ND_NO_FLAG, NULL}};

const nd_worker_command *nd_find_worker_command(nd_command_id command)
{
    for (size_t i = 0; i < sizeof worker_commands / sizeof *worker_commands; i++) {
        if (worker_commands[i].command == command) {
            return &worker_commands[i];
        }
    }
    return NULL;
}

const char *nd_command_name(nd_command_id command)
{
    return nd_command_rows[command].name;
}

const char *nd_command_usage(nd_command_id command)
{
    return nd_command_rows[command].usage;
}

nd_command_id nd_command_find(const char *name)
{
    for (size_t i = 0; i < sizeof worker_commands / sizeof *worker_commands; i++) {
        if (strcmp(nd_command_rows[worker_commands[i].command].name, name) == 0) {
            return worker_commands[i].command;
        }
    }
    return ND_COMMAND_NONE;
}

static const char *const launcher_commands[] = {"config", "env", "generate", "eval", "bench", NULL};
static const char *const trainer_commands[] = {"train", "check",    "plan",   "generate", "eval",
                                               "ckpt",  "tokenize", "report", "bench",    NULL};

static bool has(const char *const *words, const char *word)
{
    for (; *words; words++) {
        if (strcmp(*words, word) == 0) {
            return true;
        }
    }
    return false;
}

nd_status nd_command_check_name(const char *program, const char *word)
{
    const bool launches = strcmp(program, "ndlaunch") == 0;
    const char *const *own = launches ? launcher_commands : trainer_commands;
    const char *const *others = launches ? trainer_commands : launcher_commands;
    const char *other = launches ? "ndtrain" : "ndlaunch";
    nd_suggest search;
    if (launches && strcmp(word, "train") == 0) {
        return nd_fail(ND_ERR_CONFIG, "ndlaunch starts `ndtrain train` itself; leave out the word "
                                      "train");
    }
    if (has(others, word)) {
        return nd_fail(ND_ERR_CONFIG, "%s has no command \"%s\"; it is `%s %s`", program, word,
                       other, word);
    }
    nd_suggest_init(&search, word);
    for (int i = 0; own[i]; i++) {
        nd_suggest_offer(&search, own[i]);
    }
    const int distance = search.distance;
    for (int i = 0; others[i]; i++) {
        nd_suggest_offer(&search, others[i]);
    }
    return search.best
               ? nd_fail(ND_ERR_CONFIG, "%s has no command \"%.60s\"; did you mean `%s %s`?",
                         program, word, search.distance < distance ? other : program, search.best)
               : ND_OK;
}

/* Help. */

enum { FLAG_TEXT_MAX = 100 };

/* "--tokenizer, --tokenizer-model PATH" */
static int format_flag(const nd_own_flag *flag, char *out, size_t size)
{
    int used = 0;
    for (const char *c = flag->names; *c; c++) {
        used += snprintf(out + used, size - (size_t)used, *c == ' ' ? ",%c" : "%c", *c);
    }
    return flag->value ? used + snprintf(out + used, size - (size_t)used, " %s", flag->value)
                       : used;
}

/* Two columns; further lines of a help stand below its first one. */
static void print_flag(const nd_own_flag *flag, int width)
{
    char name[FLAG_TEXT_MAX];
    format_flag(flag, name, sizeof name);
    printf("  %-*s  ", width, name);
    for (const char *line = flag->help; *line;) {
        const size_t size = strcspn(line, "\n");
        printf("%*s%.*s\n", line == flag->help ? 0 : width + 4, "", (int)size, line);
        line += size + (line[size] == '\n');
    }
}

void nd_command_print_help(nd_command_id command)
{
    char name[FLAG_TEXT_MAX];
    int width = 0;
    for (int i = 0; i < ND_OWN_FLAG_COUNT; i++) {
        const int size = format_flag(&nd_own_flags[i], name, sizeof name);
        width = nd_own_flags[i].command == command && size > width ? size : width;
    }
    printf("usage: %s %s %s\n\n%s\n\n", nd_command_rows[command].program,
           nd_command_rows[command].name, nd_command_rows[command].usage,
           nd_command_rows[command].about);
    for (int i = 0; i < ND_OWN_FLAG_COUNT; i++) {
        if (nd_own_flags[i].command == command) {
            print_flag(&nd_own_flags[i], width);
        }
    }
    printf("%s%s", width > 0 && *nd_command_rows[command].codes ? "\n" : "",
           nd_command_rows[command].codes);
}

bool nd_command_wants_help(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            return true;
        }
    }
    return false;
}

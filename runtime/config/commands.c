// SPDX-License-Identifier: Apache-2.0
#include "runtime/config/reader.h"

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

enum { TRAIN = 1 << ND_NDTRAIN, LAUNCH = 1 << ND_NDLAUNCH, BOTH = TRAIN | LAUNCH };
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
    {ND_COMMAND_PLAN, no_settings, ND_NO_FLAG, NULL},
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

nd_command_id nd_command_find(const char *name)
{
    for (size_t i = 0; i < sizeof worker_commands / sizeof *worker_commands; i++) {
        const nd_command_id id = worker_commands[i].command;
        if (nd_program_has(ND_NDLAUNCH, id) && strcmp(nd_command_rows[id].name, name) == 0) {
            return id;
        }
    }
    return ND_COMMAND_NONE;
}

const char *nd_program_name(nd_program program)
{
    return program == ND_NDTRAIN ? "ndtrain" : "ndlaunch";
}

const char *nd_program_of(nd_command_id command)
{
    return nd_program_name(nd_command_rows[command].programs & TRAIN ? ND_NDTRAIN : ND_NDLAUNCH);
}

bool nd_program_has(nd_program program, nd_command_id command)
{
    const nd_command_row *row = &nd_command_rows[command];
    return row->programs >> program & 1 && !strchr(row->name, ' ');
}

nd_status nd_command_check_name(nd_program program, const char *word)
{
    const nd_program other = program == ND_NDTRAIN ? ND_NDLAUNCH : ND_NDTRAIN;
    const char *own_name = nd_program_name(program), *other_name = nd_program_name(other);
    nd_suggest search;
    if (program == ND_NDLAUNCH && strcmp(word, "train") == 0) {
        return nd_fail(ND_ERR_CONFIG, "ndlaunch starts `ndtrain train` itself; leave out the word "
                                      "train");
    }
    nd_suggest_init(&search, word);
    for (int i = 1; i < ND_COMMAND_COUNT; i++) {
        if (nd_program_has(program, (nd_command_id)i)) {
            nd_suggest_offer(&search, nd_command_rows[i].name);
        }
    }
    const int distance = search.distance;
    for (int i = 1; i < ND_COMMAND_COUNT; i++) {
        if (nd_program_has(other, (nd_command_id)i)) {
            nd_suggest_offer(&search, nd_command_rows[i].name);
        }
    }
    if (search.best && strcmp(search.best, word) == 0) {
        return nd_fail(ND_ERR_CONFIG, "%s has no command \"%s\"; it is `%s %s`", own_name, word,
                       other_name, word);
    }
    return search.best
               ? nd_fail(ND_ERR_CONFIG, "%s has no command \"%.60s\"; did you mean `%s %s`?",
                         own_name, word, search.distance < distance ? other_name : own_name,
                         search.best)
               : ND_OK;
}

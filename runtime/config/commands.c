// SPDX-License-Identifier: Apache-2.0
/* The tables of commands and of their own flags (commands.def). */
#include <string.h>

#include "runtime/base/suggest.h"
#include "runtime/config/reader.h"

#define CKPT_CODES                                                                                 \
    "Exit codes: 0 done, 2 wrong usage, 65 a bad or damaged folder, 73 output that cannot be\n"    \
    "written, 74 a failing disk, 71 out of memory. diff ends with 1 when the states differ.\n"

enum { TRAIN = 1 << ND_NDTRAIN, LAUNCH = 1 << ND_NDLAUNCH, BOTH = TRAIN | LAUNCH };
const nd_command_row nd_command_rows[ND_COMMAND_COUNT] = {
#define ND_COMMAND(id, ...) [ND_COMMAND_##id] = {__VA_ARGS__},
#include "runtime/config/commands.def"
};

const nd_field nd_own_flags[ND_OWN_FLAG_COUNT] = {
#define ND_OWN(name, kind, names, value, ...)                                                      \
    {.command = ND_COMMAND_##name,                                                                 \
     .type = ND_FIELD_TYPE_##kind,                                                                 \
     .section = "",                                                                                \
     .flags = names,                                                                               \
     .choices = value,                                                                             \
     __VA_ARGS__},
#define ND_OWN_SWITCH(command, id, names, words) ND_OWN(command, SWITCH, names, NULL, .help = words)
#define ND_OWN_TEXT(command, id, kind, names, value, words)                                        \
    ND_OWN(command, kind, names, value, .help = words)
#define ND_OWN_NUMBER(command, id, kind, names, value, least, most, start, words)                  \
    ND_OWN(command, kind, names, value, .min = least, .max = (double)most, .initial = #start,      \
           .help = words)
#include "runtime/config/commands.def"
};

const char *nd_program_name(nd_program program)
{
    return program == ND_NDTRAIN ? "ndtrain" : "ndlaunch";
}

bool nd_program_has(nd_program program, nd_command_id command)
{
    const nd_command_row *row = &nd_command_rows[command];
    return row->programs >> program & 1 && !strchr(row->name, ' ');
}

const char *nd_command_name(nd_command_id command)
{
    return nd_command_rows[command].name;
}

nd_command_id nd_command_find(nd_program program, const char *name)
{
    for (int i = 1; i < ND_COMMAND_COUNT; i++) {
        if (nd_command_rows[i].programs & ND_TAKES_SETTINGS && nd_program_has(program, i) &&
            strcmp(nd_command_rows[i].name, name) == 0) {
            return (nd_command_id)i;
        }
    }
    return ND_COMMAND_NONE;
}

const char *nd_program_of(nd_command_id command)
{
    return nd_program_name(nd_command_rows[command].programs & TRAIN ? ND_NDTRAIN : ND_NDLAUNCH);
}

nd_status nd_command_check_name(nd_program program, const char *word)
{
    const nd_program other = program == ND_NDTRAIN ? ND_NDLAUNCH : ND_NDTRAIN;
    const char *own_name = nd_program_name(program), *other_name = nd_program_name(other);
    nd_suggest search;
    ND_REFUSE(program == ND_NDLAUNCH && strcmp(word, "train") == 0,
              "ndlaunch starts `ndtrain train` itself; leave out the word train");
    nd_suggest_init(&search, word);
    for (int i = 1; i < ND_COMMAND_COUNT; i++) {
        if (nd_program_has(program, i)) {
            nd_suggest_offer(&search, nd_command_rows[i].name);
        }
    }
    const int distance = search.distance;
    for (int i = 1; i < ND_COMMAND_COUNT; i++) {
        if (nd_program_has(other, i)) {
            nd_suggest_offer(&search, nd_command_rows[i].name);
        }
    }
    ND_REFUSE(search.best && strcmp(search.best, word) == 0,
              "%s has no command \"%s\"; it is `%s %s`", own_name, word, other_name, word);
    return search.best
               ? nd_fail(ND_ERR_CONFIG, "%s has no command \"%.60s\"; did you mean `%s %s`?",
                         own_name, word, search.distance < distance ? other_name : own_name,
                         search.best)
               : ND_OK;
}

// SPDX-License-Identifier: Apache-2.0
#include "runtime/config/reader.h"

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

enum { TRAIN = 1 << ND_NDTRAIN, LAUNCH = 1 << ND_NDLAUNCH, BOTH = TRAIN | LAUNCH };
const nd_command_row nd_command_rows[ND_COMMAND_COUNT] = {
#define ND_COMMAND(id, ...) [ND_COMMAND_##id] = {__VA_ARGS__},
#include "runtime/config/commands.def"
};

/* Flags that users try with a command, and that have no effect on it, or have another name. */
typedef struct refusal {
    const char *names;    /* without dashes, separated by spaces */
    const char *sentence; /* what to use */
} refusal;

/* The commands of workers. */
typedef struct worker_command {
    nd_command_id command;
    const char *const *settings; /* stand before those of the user; ends with NULL */
    int settings_unless;         /* the flag without which they do; ND_NO_FLAG: always */
    const refusal *refused;      /* ends with names NULL; NULL: none */
} worker_command;

static const refusal generate_refused[] = {
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

static const worker_command worker_commands[] = {
    {ND_COMMAND_PLAN, no_settings, ND_NO_FLAG, NULL},
    {ND_COMMAND_GENERATE, use_settings, ND_NO_FLAG, generate_refused},
    {ND_COMMAND_EVAL, use_settings, ND_EVAL_DATA, NULL},
    {ND_COMMAND_BENCH, no_settings, ND_NO_FLAG, NULL}};

/* NULL: a tool. */
static const worker_command *find_worker_command(nd_command_id command)
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

nd_command_id nd_command_find(nd_program program, const char *name)
{
    for (size_t i = 0; i < sizeof worker_commands / sizeof *worker_commands; i++) {
        const nd_command_id id = worker_commands[i].command;
        if (nd_program_has(program, id) && strcmp(nd_command_rows[id].name, name) == 0) {
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

/* Command lines. */

/* The command's flag that begins the word "--name" or "--name=value"; ND_NO_FLAG: none. */
static int find_flag(nd_command_id command, const char *word, const char **value)
{
    char name[ND_FLAG_NAME_MAX];
    const size_t size = strcspn(word, "=");
    *value = word[size] ? word + size + 1 : NULL;
    snprintf(name, sizeof name, "%.*s", (int)size, word);
    for (int i = 0; i < ND_OWN_FLAG_COUNT; i++) {
        if (nd_own_flags[i].command == command && nd_flag_list_holds(nd_own_flags[i].names, name)) {
            return i;
        }
    }
    return ND_NO_FLAG;
}

const char *nd_command_of_flag(const char *name)
{
    for (int i = 0; i < ND_OWN_FLAG_COUNT; i++) {
        if (strncmp(nd_own_flags[i].names, "--", 2) == 0 &&
            nd_flag_list_holds(nd_own_flags[i].names + 2, name)) {
            return nd_command_rows[nd_own_flags[i].command].name;
        }
    }
    return NULL;
}

typedef struct walk {
    nd_command_id command;
    int argc;
    char **argv;
    int at;   /* the next word */
    int open; /* a flag that takes further words, or ND_NO_FLAG */
} walk;

/* The next flag with its value (NULL: none), or (ND_NO_FLAG) a word that belongs to no flag of the
 * command, as the value. The next word is no value where it is a flag of the command: such a value
 * is given behind "=". false: the end. */
static bool next_part(walk *w, int *flag, const char **value)
{
    const char *ignored;
    if (w->at >= w->argc) {
        return false;
    }
    const char *word = w->argv[w->at++];
    *flag = find_flag(w->command, word, value);
    if (*flag == ND_NO_FLAG) {
        w->open = strncmp(word, "--", 2) == 0 ? ND_NO_FLAG : w->open;
        *flag = w->open;
        *value = word;
        return true;
    }
    w->open = nd_own_flags[*flag].kind == KIND_WORDS ? *flag : ND_NO_FLAG;
    if (nd_own_flags[*flag].kind != KIND_SWITCH && !*value && w->at < w->argc &&
        find_flag(w->command, w->argv[w->at], &ignored) == ND_NO_FLAG) {
        *value = w->argv[w->at++];
    }
    return true;
}

const char *nd_command_flags_next(const nd_command_flags *line, int flag, int *at)
{
    walk w = {line->command, line->argc, line->argv, 1, ND_NO_FLAG};
    const char *value;
    int found, number = 0;
    while (next_part(&w, &found, &value)) {
        if (found == flag && number++ == *at) {
            ++*at;
            return value;
        }
    }
    return NULL;
}

/* Values. */

static nd_status read_whole(const char *name, const nd_own_flag *flag, nd_flag_value *v)
{
    char range[64] = "";
    if (nd_int_parse(v->text, &v->whole) && v->whole >= flag->least && v->whole <= flag->most) {
        return ND_OK;
    }
    if (flag->most < INT64_MAX) {
        snprintf(range, sizeof range, " and at most %lld", nd_ll(flag->most));
    }
    return nd_fail(ND_ERR_CONFIG, "%s is \"%.40s\"; it must be a whole number of at least %lld%s",
                   name, v->text, nd_ll(flag->least), range);
}

static nd_status read_value(const char *name, const nd_own_flag *flag, nd_flag_value *v)
{
    if (flag->kind == KIND_WHOLE) {
        return read_whole(name, flag, v);
    }
    if (flag->kind == KIND_REAL && !nd_real_parse(v->text, &v->real)) {
        return nd_fail(ND_ERR_CONFIG, "%s is \"%.40s\"; it must be a number", name, v->text);
    }
    if (flag->kind == KIND_CHOICE) {
        v->whole = nd_choice_find(flag->value, v->text);
        return v->whole >= 0 ? ND_OK
                             : nd_fail(ND_ERR_CONFIG, "%s is \"%.40s\"; it must be one of %s", name,
                                       v->text, flag->value);
    }
    return ND_OK;
}

static nd_status take_value(nd_command_flags *line, int number, const char *value)
{
    const nd_own_flag *flag = &nd_own_flags[number];
    nd_flag_value *v = &line->values[number];
    char name[ND_FLAG_NAME_MAX];
    nd_flag_list_word(flag->names, 0, name, sizeof name);
    if (flag->kind == KIND_SWITCH) {
        v->given = true;
        return value ? nd_fail(ND_ERR_CONFIG, "%s takes no value", name) : ND_OK;
    }
    if (!value) {
        return nd_fail(ND_ERR_CONFIG, "%s needs a value: %s %s", name, name, flag->value);
    }
    if (v->given && flag->kind != KIND_TEXTS && flag->kind != KIND_WORDS) {
        return nd_fail(ND_ERR_CONFIG, "%s is given twice; give it once", name);
    }
    v->given = true;
    v->text = value;
    return read_value(name, flag, v);
}

/* A flag or word that a tool does not have. */
static nd_status fail_word(nd_command_id command, const char *word)
{
    const char *program = nd_program_of(command), *title = nd_command_rows[command].name;
    char names[ND_OWN_FLAG_COUNT][ND_FLAG_NAME_MAX], name[ND_FLAG_NAME_MAX];
    nd_suggest search;
    if (word[0] != '-' || !word[1]) {
        char most[64] = "belongs to no flag";
        if (nd_command_rows[command].most > 0) {
            snprintf(most, sizeof most, "is one argument too many, after %d",
                     nd_command_rows[command].most);
        }
        return nd_fail(ND_ERR_CONFIG, "\"%.200s\" %s; usage: %s %s %s", word, most, program, title,
                       nd_command_rows[command].usage);
    }
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word, "="), word);
    nd_suggest_init(&search, name);
    nd_suggest_offer(&search, "--help");
    for (int i = 0; i < ND_OWN_FLAG_COUNT; i++) {
        if (nd_own_flags[i].command == command) {
            nd_flag_list_word(nd_own_flags[i].names, 0, names[i], sizeof names[i]);
            nd_suggest_offer(&search, names[i]);
        }
    }
    return search.best ? nd_fail(ND_ERR_CONFIG, "%s %s has no flag %s; did you mean %s?", program,
                                 title, name, search.best)
                       : nd_fail(ND_ERR_CONFIG, "%s %s has no flag %s; %s %s --help lists them",
                                 program, title, name, program, title);
}

nd_status nd_command_flags_read(nd_command_id command, int argc, char **argv, nd_command_flags *out)
{
    const bool is_tool = !find_worker_command(command);
    walk w = {command, argc, argv, 1, ND_NO_FLAG};
    const char *value;
    int flag;
    *out = (nd_command_flags){.command = command, .argc = argc, .argv = argv};
    for (int i = 0; i < ND_OWN_FLAG_COUNT; i++) {
        out->values[i].real = nd_own_flags[i].initial;
        out->values[i].whole = (int64_t)nd_own_flags[i].initial;
    }
    while (next_part(&w, &flag, &value)) {
        if (flag != ND_NO_FLAG) {
            ND_TRY(take_value(out, flag, value));
        } else if (is_tool) {
            const bool fits =
                (value[0] != '-' || !value[1]) && out->words < nd_command_rows[command].most;
            ND_TRY(fits ? ND_OK : fail_word(command, value));
            out->words++;
        }
    }
    return out->words >= nd_command_rows[command].least
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG, "%s is missing; usage: %s %s %s",
                         nd_command_rows[command].word, nd_program_of(command),
                         nd_command_rows[command].name, nd_command_rows[command].usage);
}

nd_status nd_command_flags_need(const nd_command_flags *line, nd_own_flag_id flag)
{
    const char *text = line->values[flag].text;
    return text && text[0] ? ND_OK
                           : nd_fail(ND_ERR_CONFIG, "%.*s is missing: %s",
                                     (int)strcspn(nd_own_flags[flag].names, " "),
                                     nd_own_flags[flag].names, nd_own_flags[flag].help);
}

/* Settings of a run beside the flags of a worker's command. */

/* ND_ERR_CONFIG when the word is one of the refusal's flags. */
static nd_status check_refused(const refusal *r, const char *word)
{
    char name[ND_FLAG_NAME_MAX];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word, "="), word);
    return strncmp(name, "--", 2) != 0 || !nd_flag_list_holds(r->names, name + 2)
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG, "%s: %s", name, r->sentence);
}

nd_status nd_command_split(nd_command_id command, int argc, char **argv, bool own, char ***out,
                           int *count)
{
    const worker_command *c = find_worker_command(command);
    const char *const *settings = c->settings;
    const char *value;
    bool unless = false;
    int settings_count = 0, n = 0, flag;
    while (settings[settings_count]) {
        settings_count++;
    }
    for (walk w = {command, argc, argv, 1, ND_NO_FLAG}; next_part(&w, &flag, &value);) {
        for (const refusal *r = c->refused; flag == ND_NO_FLAG && r && r->names; r++) {
            ND_TRY(check_refused(r, value));
        }
        unless |= flag == c->settings_unless && flag != ND_NO_FLAG;
    }
    ND_TRY(ND_ALLOC(argc + settings_count + 1, out));
    (*out)[n++] = argv[0];
    for (int i = 0; i < settings_count && !own && !unless; i++) {
        (*out)[n++] = (char *)settings[i];
    }
    for (walk w = {command, argc, argv, 1, ND_NO_FLAG}; w.at < argc;) {
        const int begin = w.at;
        next_part(&w, &flag, &value);
        for (int i = begin; i < w.at && (flag != ND_NO_FLAG) == own; i++) {
            (*out)[n++] = argv[i];
        }
    }
    *count = n;
    return ND_OK;
}

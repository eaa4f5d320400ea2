// SPDX-License-Identifier: Apache-2.0
/*
 * Command lines. A flag is one that the command has of its own (commands.def), one of a run's
 * settings (fields.def), another program's (names.def), or one of those that every run has.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "runtime/base/text.h"
#include "runtime/config/reader.h"

/* Flags that every run has beside its settings. */
static const char run_flags[] = "config-file set help version";

/* Flags that users try with a command, and that have no effect on it, or have another name. */
static const struct {
    nd_command_id command;
    const char *names, *sentence;
} refusals[] = {
#define ND_OWN_REFUSED(command, names, sentence) {ND_COMMAND_##command, names, sentence},
#include "runtime/config/commands.def"
};

/* The field of "section.key", where '-' and '_' are the same; -1: none. */
static int find_key(const char *name)
{
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (nd_flag_list_holds(nd_fields[i].name, name)) {
            return i;
        }
    }
    return -1;
}

/* Words of a command line. */

enum { NO_FLAG = -1 };

/* A word of a command line: "--a_b=v" is a flag with the name "a-b" and the value "v". */
typedef struct part {
    const char *word;
    bool is_flag;
    char name[ND_FLAG_NAME_MAX];
    const char *value; /* NULL: there is none yet */
    int own;           /* the command's own flag that it is, or belongs to; NO_FLAG: none */
} part;

/* The flags of `command` are known as own ones. */
static part split_word(nd_command_id command, const char *word)
{
    part p = {.word = word, .own = NO_FLAG};
    p.is_flag = word[0] == '-' && word[1] && !(word[1] >= '0' && word[1] <= '9');
    if (!p.is_flag) {
        return p;
    }
    const bool two = word[1] == '-';
    const char *body = word + 1 + two;
    const size_t n = strcspn(body, "=");
    p.value = body[n] ? body + n + 1 : NULL;
    for (size_t i = 0; i < n && i < sizeof p.name - 1; i++) {
        p.name[i] = body[i] == '_' ? '-' : body[i];
    }
    for (int i = 0; i < ND_OWN_FLAG_COUNT && two == (n > 1); i++) {
        if (nd_own_flags[i].command == command &&
            nd_flag_list_holds(nd_own_flags[i].flags, p.name)) {
            p.own = i;
        }
    }
    if (strcmp(word, "-h") == 0) {
        memcpy(p.name, "help", 5);
    }
    return p;
}

/* A command line that is read from word to word; begins at word 1. */
typedef struct walk {
    nd_command_id command; /* whose own flags are known */
    int argc;
    char *const *argv;
    int at;   /* the next word */
    int open; /* an own flag that takes further words, or NO_FLAG */
} walk;

static const char *next_word(const walk *w)
{
    return w->at < w->argc ? w->argv[w->at] : NULL;
}

/*
 * The next word. An own flag takes the value behind it, but not another own flag: such a value is
 * given behind "=". Other flags are left to read_value. false: the end.
 */
static bool next_part(walk *w, part *p)
{
    if (!next_word(w)) {
        return false;
    }
    *p = split_word(w->command, w->argv[w->at++]);
    if (p->own == NO_FLAG) {
        w->open = strncmp(p->word, "--", 2) == 0 ? NO_FLAG : w->open;
        p->own = w->open;
        p->value = w->open == NO_FLAG ? p->value : p->word;
        return true;
    }
    const nd_field_type type = nd_own_flags[p->own].type;
    w->open = type == ND_FIELD_TYPE_WORDS ? p->own : NO_FLAG;
    if (type != ND_FIELD_TYPE_SWITCH && !p->value && next_word(w) &&
        split_word(w->command, next_word(w)).own == NO_FLAG) {
        p->value = w->argv[w->at++];
    }
    return true;
}

/* Flags that a command has of its own. */

const char *nd_command_flags_next(const nd_command_flags *line, nd_own_flag_id flag, int *at)
{
    int number = 0;
    part p;
    for (walk w = {line->command, line->argc, line->argv, 1, NO_FLAG}; next_part(&w, &p);) {
        if (p.own == (int)flag && number++ == *at) {
            ++*at;
            return p.value;
        }
    }
    return NULL;
}

static nd_status take_value(nd_command_flags *line, const part *p)
{
    const nd_field *flag = &nd_own_flags[p->own];
    nd_flag_value *v = &line->values[p->own];
    const bool again = v->given;
    char name[ND_FLAG_NAME_MAX], wanted[96] = "a number";
    nd_list_word(flag->flags, ' ', 0, name, sizeof name);
    v->given = true;
    v->text = p->value;
    if (flag->type == ND_FIELD_TYPE_SWITCH) {
        return v->text ? nd_fail(ND_ERR_CONFIG, "--%s takes no value", name) : ND_OK;
    }
    ND_REFUSE(!v->text, "--%s needs a value: --%s %s", name, name, flag->choices);
    if (flag->type == ND_FIELD_TYPE_TEXTS || flag->type == ND_FIELD_TYPE_WORDS) {
        return ND_OK;
    }
    ND_REFUSE(again, "--%s is given twice; give it once", name);
    if (flag->type == ND_FIELD_TYPE_TEXT || nd_value_read(flag, v->text, v) == ND_FAULT_NONE) {
        return ND_OK;
    }
    if (flag->type == ND_FIELD_TYPE_CHOICE) {
        snprintf(wanted, sizeof wanted, "one of %s", flag->choices);
    } else if (flag->type == ND_FIELD_TYPE_INT) {
        const int n = snprintf(wanted, sizeof wanted, "a whole number of at least %.0f", flag->min);
        if (flag->max < (double)INT64_MAX) {
            snprintf(wanted + n, sizeof wanted - (size_t)n, " and at most %.0f", flag->max);
        }
    }
    return nd_fail(ND_ERR_CONFIG, "--%s is \"%.40s\"; it must be %s", name, v->text, wanted);
}

static void offer_own(nd_suggest *search, nd_command_id command)
{
    for (int i = 0; i < ND_OWN_FLAG_COUNT; i++) {
        if (nd_own_flags[i].command == command) {
            nd_flag_list_offer(search, nd_own_flags[i].flags);
        }
    }
}

/* A word of a tool that belongs to none of its flags. */
static nd_status take_word(nd_command_flags *line, const part *p)
{
    const nd_command_row *row = &nd_command_rows[line->command];
    const char *program = nd_program_of(line->command);
    const bool is_word = p->word[0] != '-' || !p->word[1];
    const int n = (int)strcspn(p->word, "=");
    nd_suggest search;
    if (is_word && line->words < row->most) {
        line->word[line->words++] = p->word;
        return ND_OK;
    }
    ND_REFUSE(is_word && row->most > 0,
              "\"%.200s\" is one argument too many, after %d; usage: %s %s %s", p->word, row->most,
              program, row->name, row->usage);
    ND_REFUSE(is_word, "\"%.200s\" belongs to no flag; usage: %s %s %s", p->word, program,
              row->name, row->usage);
    nd_suggest_init(&search, p->name);
    search.distance = n / 3 + 1; /* the dashes are right */
    nd_suggest_offer(&search, "help");
    offer_own(&search, line->command);
    ND_REFUSE(search.best, "%s %s has no flag %.*s; did you mean %s%s?", program, row->name, n,
              p->word, search.best[1] ? "--" : "-", search.best);
    return nd_fail(ND_ERR_CONFIG, "%s %s has no flag %.*s; %s %s --help lists them", program,
                   row->name, n, p->word, program, row->name);
}

/* ND_ERR_CONFIG: a text that the command needs is not given, or empty; says what it is for. */
static nd_status check_needed(const nd_command_flags *line)
{
    for (int i = 0; i < ND_OWN_FLAG_COUNT; i++) {
        const nd_field *f = &nd_own_flags[i];
        const bool is_text = f->type == ND_FIELD_TYPE_TEXT || f->type == ND_FIELD_TYPE_WORDS;
        const char *text = line->values[i].text;
        ND_REFUSE(f->command == line->command && is_text && f->min > 0 && (!text || !text[0]),
                  "--%.*s is missing: %s", (int)strcspn(f->flags, " "), f->flags, f->help);
    }
    return ND_OK;
}

nd_status nd_command_flags_read(nd_command_id command, int argc, char **argv, nd_command_flags *out)
{
    const nd_command_row *row = &nd_command_rows[command];
    part p;
    *out = (nd_command_flags){.command = command, .argc = argc, .argv = argv};
    for (int i = 0; i < ND_OWN_FLAG_COUNT; i++) {
        nd_flag_value *v = &out->values[i];
        v->real = nd_own_flags[i].initial ? atof(nd_own_flags[i].initial) : 0;
        v->whole = (int64_t)v->real;
    }
    for (walk w = {command, argc, argv, 1, NO_FLAG}; next_part(&w, &p);) {
        if (p.own != NO_FLAG) {
            ND_TRY(take_value(out, &p));
        } else if (!(row->programs & ND_TAKES_SETTINGS)) {
            ND_TRY(take_word(out, &p));
        }
    }
    ND_REFUSE(out->words < row->least, "%s is missing; usage: %s %s %s", row->word,
              nd_program_of(command), row->name, row->usage);
    return check_needed(out);
}

/* Settings of a run. */

/* A flag's name stands for a flag of ours or for another program's. Another program's word for a
 * flag of a key is both; a name that accelerate's files have too is that of the flag. */
typedef struct target {
    bool of_run;
    const nd_name *foreign; /* NULL: none */
    int field;              /* -1: none */
} target;

static nd_status fail_unknown(const part *p, nd_command_id command)
{
    nd_suggest search;
    const char *other = NULL; /* a command that has the flag */
    nd_suggest_init(&search, p->name);
    offer_own(&search, command); /* the first of equally near ones counts */
    for (int i = 0; i < ND_OWN_FLAG_COUNT && !other; i++) {
        if (nd_flag_list_holds(nd_own_flags[i].flags, p->name)) {
            other = nd_command_name(nd_own_flags[i].command);
        }
    }
    ND_REFUSE(other && !search.best, "unknown flag %.80s; it belongs to `ndtrain %s`", p->word,
              other);
    nd_flag_list_offer(&search, run_flags);
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        nd_flag_list_offer(&search, nd_fields[i].flags);
    }
    nd_names_offer(ND_MAP_FLAGS, &search);
    for (int i = 0; i < ND_FIELD_COUNT && strchr(p->name, '.'); i++) {
        nd_suggest_offer(&search, nd_fields[i].name);
    }
    ND_REFUSE(search.best, "unknown flag %.80s; did you mean --%s?", p->word, search.best);
    return nd_fail(ND_ERR_CONFIG,
                   "unknown flag %.80s; %s%s%s--help all lists the flags, and --set "
                   "section.key=value sets any key",
                   p->word, command ? "ndtrain " : "", command ? nd_command_name(command) : "",
                   command ? " --help lists those of the command, " : "");
}

/* ND_ERR_CONFIG: nobody knows the flag, or the command refuses it. */
static nd_status resolve_flag(const part *p, nd_command_id command, target *out)
{
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        ND_REFUSE(refusals[i].command == command && strncmp(p->word, "--", 2) == 0 &&
                      nd_flag_list_holds(refusals[i].names, p->name),
                  "%.*s: %s", (int)strcspn(p->word, "="), p->word, refusals[i].sentence);
    }
    const nd_name *foreign = nd_name_find(ND_MAP_FLAGS, p->name);
    int field = 0;
    while (field < ND_FIELD_COUNT && !nd_flag_list_holds(nd_fields[field].flags, p->name)) {
        field++;
    }
    field = field < ND_FIELD_COUNT ? field : find_key(p->name);
    const bool both = field >= 0 && foreign && foreign->map != ND_MAP_FLAGS;
    *out = (target){nd_flag_list_holds(run_flags, p->name), both ? NULL : foreign, field};
    return out->of_run || out->foreign || out->field >= 0 ? ND_OK : fail_unknown(p, command);
}

/* Neither a flag nor the script that follows the flags of accelerate and torchrun. */
static bool is_plain_word(const char *word)
{
    return word && word[0] != '-' && !nd_ends_with(word, ".py");
}

/* The next word is the value of a flag that has none yet; a switch alone is true. */
static nd_status read_value(walk *w, part *p, const target *t)
{
    const char *next = next_word(w);
    bool ignored, is_value = next && strncmp(next, "--", 2) != 0;
    const bool is_switch = t->of_run    ? nd_flag_list_holds("help version", p->name)
                           : t->foreign ? nd_name_is_switch(t->foreign)
                                        : nd_fields[t->field].type == ND_FIELD_TYPE_BOOL;
    if (p->value) {
        return ND_OK;
    }
    if (is_switch) {
        const bool of_map = t->foreign && t->foreign->map != ND_MAP_FLAGS;
        is_value = of_map ? is_plain_word(next) : next && nd_bool_parse(next, true, &ignored);
    } else if (!is_value) {
        const char *section = t->field >= 0 ? nd_fields[t->field].section : NULL;
        return nd_fail(ND_ERR_CONFIG, "%s needs a value%s%s%s", p->word, section ? "; --help " : "",
                       section ? section : "", section ? " says which" : "");
    }
    p->value = is_value ? next : "true";
    w->at += is_value;
    return ND_OK;
}

/* The words behind the first one of a list, as the Trainer's "--report-to tensorboard wandb": the
 * value becomes "tensorboard,wandb", in `list`. */
static nd_status read_list(walk *w, part *p, char *list, size_t size)
{
    size_t used = (size_t)snprintf(list, size, "%s", p->value);
    while (is_plain_word(next_word(w)) && used < size) {
        used += (size_t)snprintf(list + used, size - used, ",%s", w->argv[w->at++]);
    }
    p->value = list;
    ND_REFUSE(used >= size, "%s has values of more than %zu bytes; give the flag less", p->word,
              size - 1);
    return ND_OK;
}

static nd_status apply_set(nd_reader *reader, const char *text)
{
    char name[ND_FLAG_NAME_MAX];
    size_t n = strcspn(text, "=");
    ND_REFUSE(!text[n] || n == 0 || n >= sizeof name, "--set %.200s: write it as section.key=value",
              text);
    memcpy(name, text, n);
    name[n] = '\0';
    const int field = find_key(name);
    if (field >= 0) {
        nd_setting setting = {"", nd_fields[field].name, text + n + 1, false};
        return nd_reader_set(reader, (nd_field_id)field, &setting);
    }
    nd_suggest search;
    nd_suggest_init(&search, name);
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        nd_suggest_offer(&search, nd_fields[i].name);
    }
    const char *dot = strchr(name, '.');
    const int near = search.best ? -1 : nd_field_near(dot ? dot + 1 : name);
    if (near >= 0) { /* of another section, or by the name of a flag */
        search.best = nd_fields[near].name;
    }
    return nd_fail(ND_ERR_CONFIG, "--set %s: unknown key%s%s%s", name,
                   search.best ? "; did you mean " : "; --help all lists the keys",
                   search.best ? search.best : "", search.best ? "?" : "");
}

nd_status nd_flags_scan(int argc, char **argv, const char **config_file, nd_cli *cli)
{
    const nd_command_id command = nd_command_find(ND_NDTRAIN, argv[0]);
    part p;
    for (walk w = {command, argc, argv, 1, NO_FLAG}; next_part(&w, &p);) {
        if (p.own != NO_FLAG || !nd_flag_list_holds(run_flags, p.name)) {
            continue;
        }
        if (strcmp(p.name, "help") == 0) {
            const char *next = next_word(&w);
            cli->help = true;
            cli->help_topic = p.value ? p.value : next && next[0] != '-' ? w.argv[w.at++] : "";
        }
        cli->version |= strcmp(p.name, "version") == 0;
        if (strcmp(p.name, "config-file") == 0) {
            ND_TRY(read_value(&w, &p, &(target){.of_run = true, .field = -1}));
            ND_REFUSE(*config_file, "--config-file is given twice (%.200s and %.200s); give one",
                      *config_file, p.value);
            *config_file = p.value;
        }
    }
    return ND_OK;
}

/* Settings in their order. */
static nd_status apply_words(nd_reader *reader, nd_command_id command, int argc, char *const *argv)
{
    char list[512], shown[ND_FLAG_NAME_MAX + 2];
    part p;
    target t;
    for (walk w = {command, argc, argv, 1, NO_FLAG}; next_part(&w, &p);) {
        if (p.own != NO_FLAG) {
            continue;
        }
        ND_REFUSE(!p.is_flag && nd_ends_with(p.word, ".py"),
                  "%.200s is a Python script, and no Python runs here: the training program is "
                  "built in; leave the script out and give model, data and steps by flags or in "
                  "the --config-file",
                  p.word);
        ND_REFUSE(!p.is_flag,
                  "unexpected argument '%.200s'; flags begin with --, and --help all lists them",
                  p.word);
        ND_TRY(resolve_flag(&p, command, &t));
        const bool in_one_word = p.value != NULL;
        ND_TRY(read_value(&w, &p, &t));
        if (t.field >= 0 && nd_fields[t.field].type == ND_FIELD_TYPE_CHOICES && !in_one_word) {
            ND_TRY(read_list(&w, &p, list, sizeof list));
        }
        snprintf(shown, sizeof shown, p.name[1] ? "--%s" : "-%s", p.name);
        const nd_setting setting = {"", shown, p.value, false};
        if (!t.of_run) {
            ND_TRY(t.foreign ? nd_name_apply(reader, t.foreign, &setting)
                             : nd_reader_set(reader, (nd_field_id)t.field, &setting));
        } else if (strcmp(p.name, "set") == 0) {
            ND_TRY(apply_set(reader, p.value));
        }
    }
    return ND_OK;
}

/* A model that is used stands on each replica whole, on the CPU; what a configuration file says of
 * shards and devices is about training. */
static char *const use_settings[] = {
    "", "--device", "cpu", "--dp-shard-size", "1", "--dp-replicate-size", "-1"};

nd_status nd_flags_apply(nd_reader *reader, int argc, char **argv)
{
    const nd_command_id command = nd_command_find(ND_NDTRAIN, argv[0]);
    int at = 0;
    const nd_command_flags line = {.command = command, .argc = argc, .argv = argv};
    if (command == ND_COMMAND_GENERATE ||
        (command == ND_COMMAND_EVAL && !nd_command_flags_next(&line, ND_EVAL_DATA, &at))) {
        ND_TRY(apply_words(reader, ND_COMMAND_NONE, sizeof use_settings / sizeof *use_settings,
                           use_settings));
    }
    return apply_words(reader, command, argc, argv);
}

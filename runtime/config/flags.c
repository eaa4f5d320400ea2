// SPDX-License-Identifier: Apache-2.0
#include "runtime/config/reader.h"

#include <string.h>
#include <strings.h>

#include "runtime/base/suggest.h"

/* Flags of the program itself, handled by the scan. */
static const char own_flags[] = "config-file set help version";

static const char *format_key(int field, char key[ND_FLAG_NAME_MAX])
{
    snprintf(key, ND_FLAG_NAME_MAX, "%s.%s", nd_fields[field].section, nd_fields[field].key);
    return key;
}

/* The field of "section.key", where '-' and '_' are the same; -1: none. */
static int find_key(const char *name)
{
    char key[ND_FLAG_NAME_MAX];
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (nd_flag_list_holds(format_key(i, key), name)) {
            return i;
        }
    }
    return -1;
}

int nd_flag_find_field(const char *name)
{
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (nd_flag_list_holds(nd_fields[i].flags, name)) {
            return i;
        }
    }
    return find_key(name);
}

static void offer_list(nd_suggest *search, const char *list)
{
    char word[ND_FLAG_NAME_MAX];
    for (int i = 0; nd_flag_list_word(list, i, word, sizeof word); i++) {
        nd_suggest_offer(search, word);
    }
}

int nd_flag_near_field(const char *name)
{
    nd_suggest search;
    char best[sizeof search.name] = "";
    int found = -1;
    nd_suggest_init(&search, name);
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        nd_suggest_offer(&search, nd_fields[i].key);
        offer_list(&search, nd_fields[i].flags);
        if (search.best && strcmp(search.best, best) != 0) {
            strcpy(best, search.best);
            found = i;
        }
    }
    return found;
}

/* `program` may be the name of a command, whose own flags are then among the near ones. */
static nd_status unknown_flag(const char *arg, const char *name, const char *program)
{
    const nd_command_id command = nd_command_find(ND_NDTRAIN, program);
    nd_suggest search;
    char key[ND_FLAG_NAME_MAX];
    nd_suggest_init(&search, name);
    for (int i = 0; i < ND_OWN_FLAG_COUNT; i++) { /* the first of equally near ones counts */
        if (nd_own_flags[i].command == command) {
            nd_suggest_offer(&search, nd_own_flags[i].names + 2); /* each has one name */
        }
    }
    const char *other = search.best ? NULL : nd_command_of_flag(name);
    offer_list(&search, own_flags);
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        offer_list(&search, nd_fields[i].flags);
    }
    nd_names_offer(ND_MAP_FLAGS, &search);
    for (int i = 0; i < ND_FIELD_COUNT && strchr(name, '.'); i++) {
        nd_suggest_offer(&search, format_key(i, key));
    }
    if (other) {
        return nd_fail(ND_ERR_CONFIG, "unknown flag %.80s; it belongs to `ndtrain %s`", arg, other);
    }
    if (search.best) {
        return nd_fail(ND_ERR_CONFIG, "unknown flag %.80s; did you mean --%s?", arg, search.best);
    }
    return nd_fail(ND_ERR_CONFIG,
                   "unknown flag %.80s; %s%s%s--help all lists the flags, and --set "
                   "section.key=value sets any key",
                   arg, command ? "ndtrain " : "", command ? nd_command_name(command) : "",
                   command ? " --help lists those of the command, " : "");
}

static bool is_script(const char *arg)
{
    size_t length = strlen(arg);
    return length > 3 && strcmp(arg + length - 3, ".py") == 0;
}

static nd_status unknown_positional(const char *arg)
{
    if (is_script(arg)) {
        return nd_fail(
            ND_ERR_CONFIG,
            "%.200s is a Python script, and no Python runs here: the training program is "
            "built in; leave the script out and give model, data and steps by flags or in the "
            "--config-file",
            arg);
    }
    return nd_fail(ND_ERR_CONFIG,
                   "unexpected argument '%.200s'; flags begin with --, and --help all "
                   "lists them",
                   arg);
}

/* Splits an argument: "--a_b=v" -> name "a-b", value "v"; value NULL when there is no '='. False
 * when it is no flag. */
static bool split_flag(const char *arg, char name[ND_FLAG_NAME_MAX], const char **value)
{
    if (arg[0] != '-' || !arg[1] || (arg[1] >= '0' && arg[1] <= '9')) {
        return false;
    }
    const char *body = arg + 1 + (arg[1] == '-');
    size_t n = strcspn(body, "=");
    *value = body[n] ? body + n + 1 : NULL;
    n = n < ND_FLAG_NAME_MAX - 1 ? n : ND_FLAG_NAME_MAX - 1;
    for (size_t i = 0; i < n; i++) {
        name[i] = body[i] == '_' ? '-' : body[i];
    }
    name[n] = '\0';
    if (strcmp(arg, "-h") == 0) {
        memcpy(name, "help", 5);
    }
    return true;
}

/* A flag's name stands for a flag of ours or for another program's. Another program's word for a
 * flag of a key is both; a name that accelerate's files have too is that of the flag. */
typedef struct target {
    bool own;
    const nd_name *foreign; /* NULL: none */
    int field;              /* -1: none */
} target;

static target find_target(const char *name)
{
    const nd_name *foreign = nd_name_find_flag(name);
    const int field = nd_flag_find_field(name);
    const bool both = field >= 0 && foreign && foreign->map != ND_MAP_FLAGS;
    return (target){nd_flag_list_holds(own_flags, name), both ? NULL : foreign, field};
}

static bool is_known(const target *t)
{
    return t->own || t->foreign || t->field >= 0;
}

static bool is_switch(const char *name, const target *t)
{
    return t->own       ? nd_flag_list_holds("help version", name)
           : t->foreign ? nd_name_is_switch(t->foreign)
                        : nd_fields[t->field].type == ND_FIELD_TYPE_BOOL;
}

nd_status nd_config_check_flags(int argc, char **argv)
{
    char name[ND_FLAG_NAME_MAX];
    const char *value;
    for (int i = 1; i < argc; i++) {
        if (split_flag(argv[i], name, &value)) {
            const target t = find_target(name);
            ND_TRY(is_known(&t) ? ND_OK : unknown_flag(argv[i], name, argv[0]));
        }
    }
    return ND_OK;
}

/* Neither a flag nor the script that follows the flags of accelerate and torchrun. */
static bool is_word(const char *arg)
{
    return arg[0] != '-' && !is_script(arg);
}

/* Finds the value of the flag at argv[*i]; advances *i when the value is the next argument. */
static nd_status read_value(const char *name, const target *t, int argc, char **argv, int *i,
                            const char **value)
{
    bool ignored = false;
    if (*value) {
        return ND_OK;
    }
    const char *next = *i + 1 < argc ? argv[*i + 1] : NULL;
    if (is_switch(name, t)) {
        const bool of_map = t->foreign && t->foreign->map != ND_MAP_FLAGS;
        bool is_value = next && (of_map ? is_word(next) : nd_bool_parse(next, true, &ignored));
        *value = is_value ? next : "true";
        *i += is_value;
        return ND_OK;
    }
    if (!next || strncmp(next, "--", 2) == 0) {
        const char *section = t->field >= 0 ? nd_fields[t->field].section : NULL;
        return nd_fail(ND_ERR_CONFIG, "%s needs a value%s%s%s", argv[*i],
                       section ? "; --help " : "", section ? section : "",
                       section ? " says which" : "");
    }
    *value = next;
    ++*i;
    return ND_OK;
}

/* The words behind the first one of a list, as the Trainer's "--report-to tensorboard wandb":
 * *value becomes "tensorboard,wandb", in `list`. */
static nd_status read_list(int argc, char **argv, int *i, char *list, size_t size,
                           const char **value)
{
    const char *flag = argv[*i - 1];
    size_t used = (size_t)snprintf(list, size, "%s", *value);
    while (*i + 1 < argc && is_word(argv[*i + 1]) && used < size) {
        used += (size_t)snprintf(list + used, size - used, ",%s", argv[++*i]);
    }
    if (used >= size) {
        return nd_fail(ND_ERR_CONFIG, "%s has values of more than %zu bytes; give the flag less",
                       flag, size - 1);
    }
    *value = list;
    return ND_OK;
}

static nd_status apply_set(nd_reader *reader, const char *text)
{
    char name[ND_FLAG_NAME_MAX], key[ND_FLAG_NAME_MAX];
    size_t n = strcspn(text, "=");
    if (!text[n] || n == 0 || n >= sizeof name) {
        return nd_fail(ND_ERR_CONFIG, "--set %.200s: write it as section.key=value", text);
    }
    memcpy(name, text, n);
    name[n] = '\0';
    const int field = find_key(name);
    if (field >= 0) {
        nd_setting setting = {"", format_key(field, key), text + n + 1, false};
        return nd_reader_set(reader, (nd_field_id)field, &setting);
    }
    nd_suggest search;
    nd_suggest_init(&search, name);
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        nd_suggest_offer(&search, format_key(i, key));
    }
    const char *dot = strchr(name, '.');
    const int near = search.best ? -1 : nd_flag_near_field(dot ? dot + 1 : name);
    if (near >= 0) { /* of another section, or by the name of a flag */
        search.best = format_key(near, key);
    }
    return nd_fail(ND_ERR_CONFIG, "--set %s: unknown key%s%s%s", name,
                   search.best ? "; did you mean " : "; --help all lists the keys",
                   search.best ? search.best : "", search.best ? "?" : "");
}

static nd_status apply_flag(nd_reader *reader, const char *name, const target *t, const char *value)
{
    char shown[ND_FLAG_NAME_MAX + 2];
    snprintf(shown, sizeof shown, name[1] ? "--%s" : "-%s", name);
    nd_setting setting = {"", shown, value, false};
    if (t->own) {
        return strcmp(name, "set") == 0 ? apply_set(reader, value) : ND_OK;
    }
    return t->foreign ? t->foreign->apply(reader, t->foreign, &setting)
                      : nd_reader_set(reader, (nd_field_id)t->field, &setting);
}

nd_status nd_flags_scan(int argc, char **argv, const char **config_file, nd_cli *cli)
{
    char name[ND_FLAG_NAME_MAX];
    for (int i = 1; i < argc; i++) {
        const char *value;
        if (!split_flag(argv[i], name, &value)) {
            continue;
        }
        target t = find_target(name);
        if (!t.own) {
            continue;
        }
        if (strcmp(name, "help") == 0) {
            const char *next = i + 1 < argc && argv[i + 1][0] != '-' ? argv[++i] : "";
            cli->help = true;
            cli->help_topic = value ? value : next;
        }
        cli->version |= strcmp(name, "version") == 0;
        if (strcmp(name, "config-file") == 0) {
            ND_TRY(read_value(name, &t, argc, argv, &i, &value));
            if (*config_file) {
                return nd_fail(ND_ERR_CONFIG,
                               "--config-file is given twice (%.200s and %.200s); give one",
                               *config_file, value);
            }
            *config_file = value;
        }
    }
    return ND_OK;
}

nd_status nd_flags_apply(nd_reader *reader, int argc, char **argv)
{
    char name[ND_FLAG_NAME_MAX], list[512];
    for (int i = 1; i < argc; i++) {
        const char *value;
        if (!split_flag(argv[i], name, &value)) {
            return unknown_positional(argv[i]);
        }
        target t = find_target(name);
        if (!is_known(&t)) {
            return unknown_flag(argv[i], name, argv[0]);
        }
        const bool in_one_word = value != NULL;
        ND_TRY(read_value(name, &t, argc, argv, &i, &value));
        if (t.field >= 0 && nd_fields[t.field].type == ND_FIELD_TYPE_CHOICES && !in_one_word) {
            ND_TRY(read_list(argc, argv, &i, list, sizeof list, &value));
        }
        ND_TRY(apply_flag(reader, name, &t, value));
    }
    return ND_OK;
}

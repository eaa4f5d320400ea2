// SPDX-License-Identifier: Apache-2.0
#include "runtime/config/reader.h"

#include <string.h>
#include <strings.h>

#include "runtime/base/suggest.h"

/* Flags of the program itself, handled by the scan. */
static const char own_flags[] = "config-file set rank explain help version";

int nd_flag_find_field(const char *name)
{
    char dotted[ND_FLAG_NAME_MAX];
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (nd_flag_list_holds(nd_fields[i].flags, name)) {
            return i;
        }
        snprintf(dotted, sizeof dotted, "%s.%s", nd_fields[i].section, nd_fields[i].key);
        if (nd_suggest_distance(dotted, name) == 0) { /* '-' and '_' alike */
            return i;
        }
    }
    return -1;
}

static void offer_list(nd_suggest *search, const char *list)
{
    char word[ND_FLAG_NAME_MAX];
    for (int i = 0; nd_flag_list_word(list, i, word, sizeof word); i++) {
        nd_suggest_offer(search, word);
    }
}

static void offer(void *search, const char *name)
{
    nd_suggest_offer(search, name);
}

static nd_status unknown_flag(const char *arg, const char *name, const char *const *more,
                              const char *otherwise)
{
    nd_suggest search;
    nd_suggest_init(&search, name);
    for (int i = 0; more && more[i]; i++) { /* the first of equally near ones counts */
        nd_suggest_offer(&search, more[i]);
    }
    offer_list(&search, own_flags);
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        offer_list(&search, nd_fields[i].flags);
    }
    for (int i = 0; i < nd_flags_known_count; i++) {
        offer_list(&search, nd_flags_known[i].names);
    }
    nd_accelerate_each_flag(offer, &search);
    if (search.best) {
        return nd_fail(ND_ERR_CONFIG, "unknown flag %.80s; did you mean --%s?", arg, search.best);
    }
    return nd_fail(ND_ERR_CONFIG,
                   "unknown flag %.80s; %s--help all lists the flags, and --set "
                   "section.key=value sets any key",
                   arg, otherwise);
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

/* What a flag's name stands for. */
typedef struct target {
    int field;                    /* -1: none */
    int known;                    /* index in nd_flags_known, -1: none */
    const nd_accelerate_key *key; /* NULL: none */
    bool is_switch;
    bool takes_list; /* of words */
    bool own;
} target;

static bool is_boolean(const char *list)
{
    return nd_flag_list_holds(list, "true") || nd_flag_list_holds(list, "false");
}

static target find_target(const char *name)
{
    target t = {.field = -1, .known = -1, .own = nd_flag_list_holds(own_flags, name)};
    char underscored[ND_FLAG_NAME_MAX];
    if (t.own) {
        t.is_switch = nd_flag_list_holds("explain help version", name);
        return t;
    }
    t.field = nd_flag_find_field(name);
    if (t.field >= 0) {
        t.is_switch = nd_fields[t.field].type == ND_FIELD_TYPE_BOOL;
        t.takes_list = nd_fields[t.field].type == ND_FIELD_TYPE_CHOICES;
        return t;
    }
    for (int i = 0; i < nd_flags_known_count; i++) {
        if (nd_flag_list_holds(nd_flags_known[i].names, name)) {
            t.known = i;
            t.is_switch = nd_flags_known[i].is_switch ||
                          (nd_flags_known[i].only && is_boolean(nd_flags_known[i].only));
            return t;
        }
    }
    snprintf(underscored, sizeof underscored, "%s", name);
    for (char *c = underscored; *c; c++) {
        *c = *c == '-' ? '_' : *c;
    }
    t.key = nd_accelerate_find_flag(underscored, &t.is_switch);
    return t;
}

static bool is_known(const target *t)
{
    return t->own || t->field >= 0 || t->known >= 0 || t->key;
}

nd_status nd_flags_check(const char *arg, const char *const *more, const char *otherwise)
{
    char name[ND_FLAG_NAME_MAX];
    const char *value;
    if (!split_flag(arg, name, &value)) {
        return ND_OK;
    }
    const target t = find_target(name);
    return is_known(&t) ? ND_OK : unknown_flag(arg, name, more, otherwise);
}

/* Neither a flag nor the script that follows the flags of accelerate and torchrun. */
static bool is_word(const char *arg)
{
    return arg[0] != '-' && !is_script(arg);
}

/* Finds the value of the flag at argv[*i]; advances *i when the value is the next argument. */
static nd_status read_value(const target *t, int argc, char **argv, int *i, const char **value)
{
    bool ignored = false;
    if (*value) {
        return ND_OK;
    }
    const char *next = *i + 1 < argc ? argv[*i + 1] : NULL;
    if (t->is_switch) {
        bool is_value = next && (t->key ? is_word(next) : nd_bool_parse(next, true, &ignored));
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
    char name[ND_FLAG_NAME_MAX], shown[ND_FLAG_NAME_MAX + 8];
    size_t n = strcspn(text, "=");
    if (!text[n] || n == 0 || n >= sizeof name) {
        return nd_fail(ND_ERR_CONFIG, "--set %.200s: write it as section.key=value", text);
    }
    memcpy(name, text, n);
    name[n] = '\0';
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        snprintf(shown, sizeof shown, "%s.%s", nd_fields[i].section, nd_fields[i].key);
        if (nd_suggest_distance(shown, name) == 0) {
            nd_setting setting = {"", shown, text + n + 1, false};
            return nd_reader_set(reader, (nd_field_id)i, &setting);
        }
    }
    nd_suggest search;
    nd_suggest_init(&search, name);
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        snprintf(shown, sizeof shown, "%s.%s", nd_fields[i].section, nd_fields[i].key);
        nd_suggest_offer(&search, shown);
    }
    const char *dot = strchr(name, '.');
    for (int i = 0; i < ND_FIELD_COUNT && dot && !search.best; i++) { /* of another section */
        if (nd_suggest_distance(nd_fields[i].key, dot + 1) == 0) {
            snprintf(shown, sizeof shown, "%s.%s", nd_fields[i].section, nd_fields[i].key);
            search.best = shown;
        }
    }
    return nd_fail(ND_ERR_CONFIG, "--set %s: unknown key%s%s%s", name,
                   search.best ? "; did you mean " : "; --help all lists the keys",
                   search.best ? search.best : "", search.best ? "?" : "");
}

static nd_status apply_rank(nd_cli *cli, const char *text)
{
    int64_t rank = 0;
    if (!nd_int_parse(text, &rank) || rank < 0 || rank > 1 << 24) {
        return nd_fail(ND_ERR_CONFIG, "--rank is '%.80s'; it must be a rank, 0 or more", text);
    }
    cli->plan_rank = (int)rank;
    return ND_OK;
}

static nd_status apply_explain(nd_cli *cli, const nd_setting *setting)
{
    return nd_reader_switch(setting, &cli->plan_explains);
}

/* Our name of a schedule of the Trainer. The warm-up is a key of its own here. */
static const char *schedule_of(const char *text)
{
    static const char *const names[][2] = {{"constant_with_warmup", "constant"},
                                           {"cosine_with_min_lr", "cosine"},
                                           {"warmup_stable_decay", "wsd"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcasecmp(text, names[i][0]) == 0) {
            return names[i][1];
        }
    }
    return text;
}

/* Sets a field from its flag. torchrun's elastic MIN:MAX is accepted when both are the same. */
static nd_status apply_field(nd_reader *reader, nd_field_id id, const nd_setting *setting)
{
    const char *colon = strchr(setting->text, ':');
    if (id == ND_FIELD_launch_nnodes && colon) {
        size_t n = (size_t)(colon - setting->text);
        if (strlen(colon + 1) != n || strncmp(setting->text, colon + 1, n) != 0) {
            return nd_reader_refuse(setting,
                                    "the number of nodes does not change during a job; give one "
                                    "number");
        }
        nd_setting one = {setting->where, setting->name, colon + 1, false};
        return nd_reader_set(reader, id, &one);
    }
    if (id == ND_FIELD_launch_nproc_per_node) {
        return nd_flag_apply_per_node(reader, setting);
    }
    nd_setting ours = *setting;
    if (id == ND_FIELD_train_steps && strcmp(setting->text, "-1") == 0) {
        ours.text = "0"; /* the Trainer's word for: as the epochs say */
    } else if (id == ND_FIELD_optimizer_schedule) {
        ours.text = schedule_of(setting->text);
    }
    setting = &ours;
    return nd_reader_set(reader, id, setting);
}

/* The list has the value, in upper or lower case; yes, on and 1 are true. */
static bool is_one_of(const char *list, const char *value)
{
    char word[ND_FLAG_NAME_MAX];
    bool on = false;
    if (is_boolean(list) && nd_bool_parse(value, true, &on)) {
        value = on ? "true" : "false";
    }
    for (int i = 0; nd_flag_list_word(list, i, word, sizeof word); i++) {
        if (strcasecmp(word, value) == 0) {
            return true;
        }
    }
    return false;
}

static nd_status apply_flag(nd_reader *reader, nd_cli *cli, const char *name, const target *t,
                            const char *value)
{
    char shown[ND_FLAG_NAME_MAX + 2];
    snprintf(shown, sizeof shown, name[1] ? "--%s" : "-%s", name);
    nd_setting setting = {"", shown, value, false};
    if (t->own) {
        return strcmp(name, "set") == 0       ? apply_set(reader, value)
               : strcmp(name, "rank") == 0    ? apply_rank(cli, value)
               : strcmp(name, "explain") == 0 ? apply_explain(cli, &setting)
                                              : ND_OK;
    }
    if (t->field >= 0) {
        return apply_field(reader, (nd_field_id)t->field, &setting);
    }
    const nd_flag *known = t->known >= 0 ? &nd_flags_known[t->known] : NULL;
    if (known && known->apply) {
        return known->apply(reader, &setting);
    }
    if (known && known->only) {
        return is_one_of(known->only, value) ? ND_OK : nd_reader_refuse(&setting, known->sentence);
    }
    if (known) {
        return nd_fail(ND_ERR_CONFIG, "%s: %s", shown, known->sentence);
    }
    return nd_accelerate_apply(reader, t->key, &setting);
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
            ND_TRY(read_value(&t, argc, argv, &i, &value));
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

nd_status nd_flags_apply(nd_reader *reader, nd_cli *cli, int argc, char **argv)
{
    char name[ND_FLAG_NAME_MAX], list[512];
    for (int i = 1; i < argc; i++) {
        const char *value;
        if (!split_flag(argv[i], name, &value)) {
            return unknown_positional(argv[i]);
        }
        target t = find_target(name);
        if (!is_known(&t)) {
            return unknown_flag(argv[i], name, NULL, "");
        }
        bool refused =
            t.known >= 0 && !nd_flags_known[t.known].apply && !nd_flags_known[t.known].only;
        if (refused) {
            return apply_flag(reader, cli, name, &t, "");
        }
        const bool in_one_word = value != NULL;
        ND_TRY(read_value(&t, argc, argv, &i, &value));
        if (t.takes_list && !in_one_word) {
            ND_TRY(read_list(argc, argv, &i, list, sizeof list, &value));
        }
        ND_TRY(apply_flag(reader, cli, name, &t, value));
    }
    return ND_OK;
}

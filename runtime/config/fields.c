// SPDX-License-Identifier: Apache-2.0
/* The table of fields: reads, formats and checks a value with its type, range and choices;
 * defaults, and the configuration as text. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "runtime/base/printable.h"
#include "runtime/base/suggest.h"
#include "runtime/config/reader.h"
#include "runtime/config/sources.h"

/* The choices of fp8.recipe; each name is behind a bar. */
static const char fp8_recipes[] =
#define ND_FP8_RECIPE(id, name, ...) "|" name
#include "runtime/config/fp8_recipes.def"
    ;
#define ND_FP8_RECIPES (fp8_recipes + 1)

#define ND_FIELD(section, key, type, initial, min, max, choices, scope, ...)                       \
    {#section,                                                                                     \
     #key,                                                                                         \
     #section "." #key,                                                                            \
     ND_FIELD_TYPE_##type,                                                                         \
     offsetof(nd_config, section.key),                                                             \
     initial,                                                                                      \
     min,                                                                                          \
     max,                                                                                          \
     choices,                                                                                      \
     #scope[0] == 'J',                                                                             \
     __VA_ARGS__},
/* CHOICE(nd_precision), as the table has it. */
#define ND_FIELD_TYPE_CHOICE(type) ND_FIELD_TYPE_CHOICE
const nd_field nd_fields[ND_FIELD_COUNT] = {
#include "runtime/config/fields.def"
};
#define ND_SECTION(name, title) {#name, title},
const nd_section nd_sections[ND_SECTION_COUNT] = {
#include "runtime/config/fields.def"
};

/* A CHOICE and CHOICES are written through an unsigned. */
static_assert(sizeof(nd_precision) == sizeof(unsigned), "enums have the size of unsigned");

static bool is_axis(const nd_field *field)
{
    return strcmp(field->section, "mesh") == 0;
}

static void *member_of(const nd_config *config, const nd_field *field)
{
    return (char *)config + field->offset;
}

int nd_choice_find(const char *choices, const char *text, char ours[ND_CHOICE_MAX])
{
    char choice[ND_CHOICE_MAX];
    for (int i = 0; nd_list_word(choices, '|', i, choice, sizeof choice); i++) {
        char *equals = strchr(choice, '=');
        snprintf(ours, ND_CHOICE_MAX, "%s", equals ? equals + 1 : choice);
        if (equals) {
            *equals = '\0';
        }
        if (strcasecmp(choice, text) == 0) {
            return i;
        }
    }
    return -1;
}

const char *nd_field_range(const nd_field *f, char *buffer, size_t size)
{
    char choice[ND_CHOICE_MAX], next[ND_CHOICE_MAX];
    size_t used = 0;
    buffer[0] = '\0';
    for (int i = 0; nd_list_word(f->choices, '|', i, choice, sizeof choice); i++) {
        const bool last = !nd_list_word(f->choices, '|', i + 1, next, sizeof next);
        used += (size_t)snprintf(buffer + used, size - used, "%s%s",
                                 i == 0 ? ""
                                 : last ? " or "
                                        : ", ",
                                 choice);
        ND_ASSERT(used < size);
    }
    if (f->type == ND_FIELD_TYPE_CHOICES) {
        snprintf(buffer + used, size - used, ", or a list of them");
    } else if (f->type == ND_FIELD_TYPE_BOOL) {
        snprintf(buffer, size, "true or false");
    } else if (f->type == ND_FIELD_TYPE_INT && f->min < 0) {
        snprintf(buffer, size, "-1, or %d to %.0f", is_axis(f), f->max);
    } else if (f->type == ND_FIELD_TYPE_INT) {
        snprintf(buffer, size, "%.0f to %.0f", f->min, f->max);
    } else if (f->type == ND_FIELD_TYPE_REAL || f->type == ND_FIELD_TYPE_PAIR) {
        snprintf(buffer, size, "%.9g to %.9g", f->min, f->max);
    }
    return buffer;
}

/* The first choice when no bit is set, the one whose bit is, or "[a, b]". */
static void print_choices(FILE *out, const nd_field *f, unsigned bits)
{
    const bool several = (bits & (bits - 1)) != 0;
    const unsigned left = bits ? bits : 1;
    const char *before = several ? "[" : "";
    char choice[ND_CHOICE_MAX];
    for (int i = 0; left >> i; i++) {
        if (!nd_list_word(f->choices, '|', i, choice, sizeof choice)) {
            fprintf(out, "%sunknown choices %#x", before, bits); /* a value put into the struct */
            break;
        }
        if (left >> i & 1) {
            fprintf(out, "%s%s", before, choice);
            before = ", ";
        }
    }
    fputs(several ? "]" : "", out);
}

/* In the form that set_field reads. */
static void print_field(FILE *out, const nd_config *config, nd_field_id id)
{
    const nd_field *f = &nd_fields[id];
    const void *member = member_of(config, f);
    const bool is_several = f->type == ND_FIELD_TYPE_CHOICES;
    char first[40], second[40];
    unsigned bits;
    switch (f->type) {
    case ND_FIELD_TYPE_INT:
        fprintf(out, "%lld", nd_ll(*(const int64_t *)member));
        return;
    case ND_FIELD_TYPE_REAL:
        nd_real_format(*(const double *)member, first, sizeof first);
        fprintf(out, "%s", first);
        return;
    case ND_FIELD_TYPE_PAIR:
        nd_real_format(((const double *)member)[0], first, sizeof first);
        nd_real_format(((const double *)member)[1], second, sizeof second);
        fprintf(out, "[%s, %s]", first, second);
        return;
    case ND_FIELD_TYPE_BOOL:
        fputs(*(const bool *)member ? "true" : "false", out);
        return;
    case ND_FIELD_TYPE_CHOICE:
    case ND_FIELD_TYPE_CHOICES:
        memcpy(&bits, member, sizeof bits);
        print_choices(out, f, is_several ? bits : 1U << (bits < 32 ? bits : 31));
        return;
    default:
        fputs(*(char *const *)member ? *(char *const *)member : "", out); /* unset: NULL */
    }
}

static nd_status format_field(const nd_config *config, nd_field_id id, char **out)
{
    nd_text text;
    ND_TRY(nd_text_begin(&text));
    print_field(text.out, config, id);
    return nd_text_finish(&text, out);
}

int nd_field_find(const char *name)
{
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (strcmp(nd_fields[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

int nd_field_near(const char *name)
{
    nd_suggest search;
    int nearest = -1;
    nd_suggest_init(&search, name);
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        const nd_suggest before = search;
        nd_suggest_offer(&search, nd_fields[i].key);
        nd_flag_list_offer(&search, nd_fields[i].flags);
        nearest = strcmp(search.name, before.name) != 0 ? i : nearest;
    }
    return nearest;
}

int nd_section_find(const char *name)
{
    for (int i = 0; i < ND_SECTION_COUNT; i++) {
        if (strcmp(nd_sections[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

/* Bytes of a path or a list of patterns, and of a list of sources. */
enum { TEXT_LIMIT = 4096, SOURCES_LIMIT = 64 << 10 };

/* ND_ERR_CONFIG when the text names no sources. A validation reads each of its sets once. */
static nd_status check_sources(nd_field_id id, const nd_setting *setting)
{
    nd_data_sources sources;
    nd_status status = ND_OK;
    ND_TRY(nd_data_sources_read(setting->where, setting->name, setting->text, &sources));
    for (int i = 0; i < sources.count && id == ND_FIELD_data_validation_path; i++) {
        const nd_data_source *s = &sources.list[i];
        if (s->weight > 0 || s->epochs > 0) {
            status = nd_fail(
                ND_ERR_CONFIG,
                "%s%s gives \"%.200s\" %s, but a validation reads each set once; leave it out",
                setting->where, setting->name, s->path, s->weight > 0 ? "a weight" : "epochs");
            break;
        }
    }
    nd_data_sources_fini(&sources);
    return status;
}

/* A mesh axis is -1 or at least 1; other integers that allow -1 allow 0 too. Without a least and a
 * greatest value there is no range. */
static bool in_range(const nd_field *f, double value)
{
    return f->min == f->max || (value >= f->min && value <= f->max && !(is_axis(f) && value == 0));
}

nd_fault nd_value_read(const nd_field *f, const char *text, nd_flag_value *out)
{
    char ours[ND_CHOICE_MAX];
    if (f->type == ND_FIELD_TYPE_CHOICE) {
        out->whole = nd_choice_find(f->choices, text, ours);
        return out->whole >= 0 ? ND_FAULT_NONE : ND_FAULT_RANGE;
    }
    const bool is_int = f->type == ND_FIELD_TYPE_INT;
    if (is_int ? !nd_int_parse(text, &out->whole) : !nd_real_parse(text, &out->real)) {
        return ND_FAULT_TYPE;
    }
    return in_range(f, is_int ? (double)out->whole : out->real) ? ND_FAULT_NONE : ND_FAULT_RANGE;
}

static nd_status wrong_type(const nd_field *f, const nd_setting *setting, const char *wanted)
{
    const bool several = strncmp(wanted, "two ", 4) != 0 && strchr(setting->text, ',');
    return nd_fail(ND_ERR_CONFIG, "%s%s is '%.80s'%s; it must be %s (%s)%s", setting->where,
                   setting->name, setting->text, setting->quoted ? " in quotes" : "", wanted,
                   f->help,
                   several ? "; scripts/sweep makes a run for each of several values" : "");
}

enum { NEAREST_MAX = 96 };

/* "; did you mean separate?"; empty where no choice is near. */
static const char *nearest_choice(const char *choices, const char *text, char near[NEAREST_MAX])
{
    char choice[ND_CHOICE_MAX];
    nd_suggest search;
    nd_suggest_init(&search, text);
    for (int i = 0; nd_list_word(choices, '|', i, choice, sizeof choice); i++) {
        nd_suggest_offer(&search, choice);
    }
    near[0] = '\0';
    if (search.best) {
        snprintf(near, NEAREST_MAX, "; did you mean %s?", search.best);
    }
    return near;
}

/* The value, or an item of it, is none of those that the field takes. */
static nd_status out_of_range(const nd_field *f, const nd_setting *setting, const char *item)
{
    char range[256], near[NEAREST_MAX], with[64] = "";
    if (strcmp(item, setting->text) != 0) {
        snprintf(with, sizeof with, ", with \"%.40s\"", item);
    }
    return nd_fail(ND_ERR_CONFIG, "%s%s is %.80s%s; it must be %s (%s)%s", setting->where,
                   setting->name, setting->text, with, nd_field_range(f, range, sizeof range),
                   f->help, nearest_choice(f->choices, item, near));
}

/* "[a, b]" -> "a,b": removes the brackets and the spaces around items. In quotes, brackets belong
 * to the text. */
static void strip_list(const char *text, bool quoted, char *out)
{
    const size_t length = strlen(text);
    const bool brackets = !quoted && length >= 2 && text[0] == '[' && text[length - 1] == ']';
    size_t used = 0, spaces = 0;
    for (size_t i = brackets; i < length - brackets; i++) {
        const bool within = text[i] != ',' && used > 0 && out[used - 1] != ',';
        spaces = text[i] == ' ' ? spaces + 1 : within ? spaces : 0;
        for (; text[i] != ' ' && spaces > 0; spaces--) {
            out[used++] = ' ';
        }
        if (text[i] != ' ') {
            out[used++] = text[i];
        }
    }
    out[used] = '\0';
}

static nd_status set_text(nd_config *config, nd_field_id id, const nd_setting *setting)
{
    const nd_field *f = &nd_fields[id];
    char buffer[TEXT_LIMIT + 1];
    const char *text = setting->text;
    const int limit = f->type == ND_FIELD_TYPE_SOURCES ? SOURCES_LIMIT : TEXT_LIMIT;
    ND_REFUSE(strlen(text) > (size_t)limit, "%s%s has %zu bytes; at most %d are supported",
              setting->where, setting->name, strlen(text), limit);
    ND_REFUSE(!nd_is_printable(text),
              "%s%s holds a control character or is not UTF-8; rename the file or folder",
              setting->where, setting->name);
    if (f->type == ND_FIELD_TYPE_SOURCES) {
        ND_TRY(check_sources(id, setting));
    }
    if (f->type == ND_FIELD_TYPE_LIST) {
        strip_list(text, setting->quoted, buffer);
        text = buffer;
    }
    return nd_text_replace((char **)member_of(config, f), text);
}

static nd_status set_pair(nd_config *config, nd_field_id id, const nd_setting *setting)
{
    const nd_field *f = &nd_fields[id];
    char buffer[128] = "";
    double pair[2];
    if (!setting->quoted && strlen(setting->text) < sizeof buffer) {
        strip_list(setting->text, false, buffer);
    }
    char *comma = strchr(buffer, ',');
    if (comma) {
        *comma = '\0';
    }
    if (!comma || !nd_real_parse(buffer, &pair[0]) || !nd_real_parse(comma + 1, &pair[1])) {
        return wrong_type(f, setting, "two numbers such as [0.9, 0.95]");
    }
    if (!in_range(f, pair[0]) || !in_range(f, pair[1])) {
        return out_of_range(f, setting, setting->text);
    }
    memcpy(member_of(config, f), pair, sizeof pair);
    return ND_OK;
}

/* "a", "a,b" or "[a, b]"; "[]" has none. */
static nd_status set_choices(const nd_field *f, const nd_setting *setting, unsigned *bits)
{
    char list[256], ours[ND_CHOICE_MAX];
    *bits = 0;
    if (strlen(setting->text) >= sizeof list || !*setting->text) {
        return out_of_range(f, setting, setting->text);
    }
    strip_list(setting->text, setting->quoted, list);
    const bool several = strchr(list, ',');
    for (char *item = list, *next; *list && item; item = next) {
        next = strchr(item, ',');
        if (next) {
            *next++ = '\0';
        }
        const int index = nd_choice_find(f->choices, item, ours);
        if (index < 0) {
            return out_of_range(f, setting, item);
        }
        ND_REFUSE(index == 0 && several, "%s%s is %.80s, but %s goes with no other; leave it out",
                  setting->where, setting->name, setting->text, item);
        *bits |= index > 0 ? 1U << index : 0;
    }
    return ND_OK;
}

/* A number or a choice. */
static nd_status set_value(nd_config *config, nd_field_id id, const nd_setting *setting)
{
    const nd_field *f = &nd_fields[id];
    const bool interval =
        id == ND_FIELD_checkpoint_interval || id == ND_FIELD_train_validation_interval;
    nd_flag_value v = {.whole = -1};
    nd_fault fault = ND_FAULT_NONE;
    if (!interval || strcmp(setting->text, "epoch") != 0) {
        fault = setting->quoted && f->type != ND_FIELD_TYPE_CHOICE
                    ? ND_FAULT_TYPE
                    : nd_value_read(f, setting->text, &v);
    }
    if (fault == ND_FAULT_TYPE) {
        return wrong_type(f, setting,
                          interval                       ? "an integer or epoch"
                          : f->type == ND_FIELD_TYPE_INT ? "an integer"
                                                         : "a number");
    }
    if (fault == ND_FAULT_RANGE) {
        return out_of_range(f, setting, setting->text);
    }
    void *member = member_of(config, f);
    if (f->type == ND_FIELD_TYPE_INT) {
        memcpy(member, &v.whole, sizeof v.whole);
    } else if (f->type == ND_FIELD_TYPE_REAL) {
        memcpy(member, &v.real, sizeof v.real);
    } else {
        memcpy(member, &(unsigned){(unsigned)v.whole}, sizeof(unsigned));
    }
    return ND_OK;
}

static nd_status set_field(nd_config *config, nd_field_id id, const nd_setting *setting)
{
    const nd_field *f = &nd_fields[id];
    void *member = member_of(config, f);
    unsigned bits;
    config->resolved = false;
    switch (f->type) {
    case ND_FIELD_TYPE_BOOL:
        return setting->quoted || !nd_bool_parse(setting->text, !*setting->where, member)
                   ? wrong_type(f, setting, "true or false")
                   : ND_OK;
    case ND_FIELD_TYPE_CHOICES:
        ND_TRY(set_choices(f, setting, &bits));
        memcpy(member, &bits, sizeof bits);
        return ND_OK;
    case ND_FIELD_TYPE_PAIR:
        return set_pair(config, id, setting);
    case ND_FIELD_TYPE_TEXT:
    case ND_FIELD_TYPE_LIST:
    case ND_FIELD_TYPE_SOURCES:
        return set_text(config, id, setting);
    default:
        return set_value(config, id, setting);
    }
}

nd_status nd_field_check(nd_config *config, nd_field_id id)
{
    const nd_field *f = &nd_fields[id];
    const bool resolved = config->resolved;
    char *text = NULL;
    if (nd_field_is_text(f)) {
        return ND_OK;
    }
    ND_TRY(format_field(config, id, &text));
    nd_status status = set_field(config, id, &(nd_setting){"", f->name, text, false});
    config->resolved = resolved;
    free(text);
    return status;
}

nd_status nd_config_init(nd_config *config)
{
    memset(config, 0, sizeof *config);
    nd_status status = nd_text_replace(&config->source, "");
    for (int i = 0; i < ND_FIELD_COUNT && status == ND_OK; i++) {
        nd_setting setting = {"", nd_fields[i].key, nd_fields[i].initial, false};
        status = set_field(config, (nd_field_id)i, &setting);
    }
    if (status != ND_OK) {
        nd_config_fini(config);
    }
    return status;
}

void nd_config_fini(nd_config *config)
{
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (nd_field_is_text(&nd_fields[i])) {
            char **text = (char **)((char *)config + nd_fields[i].offset);
            free(*text);
            *text = NULL;
        }
    }
    for (int i = 0; i < ND_PATH_COUNT; i++) {
        free(config->path_origin[i]);
        config->path_origin[i] = NULL;
    }
    free(config->source);
    config->source = NULL;
}

const nd_field_id nd_path_fields[ND_PATH_COUNT] = {
    [ND_PATH_MODEL_PATH] = ND_FIELD_model_path,
    [ND_PATH_MODEL_CONFIG] = ND_FIELD_model_config,
    [ND_PATH_DATA] = ND_FIELD_data_path,
    [ND_PATH_VALIDATION] = ND_FIELD_data_validation_path,
};

nd_status nd_reader_set(nd_reader *reader, nd_field_id id, const nd_setting *setting)
{
    char origin[700];
    ND_TRY(set_field(reader->config, id, setting));
    for (int i = 0; i < ND_PATH_COUNT && reader->notes_origins; i++) {
        if (nd_path_fields[i] == id) {
            snprintf(origin, sizeof origin, "%s%s", setting->where, setting->name);
            ND_TRY(nd_text_replace(&reader->config->path_origin[i], origin));
        }
    }
    reader->set_by[id] = (uint8_t)reader->layer;
    if (id == ND_FIELD_train_precision) {
        reader->no_fp16[0] = '\0';
    }
    return ND_OK;
}

nd_status nd_reader_put(nd_reader *reader, nd_field_id id, const char *text)
{
    return nd_reader_set(reader, id, &(nd_setting){"", nd_fields[id].key, text, false});
}

const char *nd_fp8_recipe_name(nd_fp8_recipe recipe)
{
    static const char *const names[ND_FP8_RECIPE_COUNT] = {
#define ND_FP8_RECIPE(id, name, ...) name,
#include "runtime/config/fp8_recipes.def"
    };
    return names[recipe];
}

bool nd_fp8_recipe_is_per_tensor(nd_fp8_recipe recipe)
{
    enum { TENSOR, ROW, COLUMN };
#define CURRENT(format, along) along
#define DELAYED(format)        TENSOR
    static const int x_of_y[ND_FP8_RECIPE_COUNT] = {
#define ND_FP8_RECIPE(id, name, x, ...) x,
#include "runtime/config/fp8_recipes.def"
    };
    return x_of_y[recipe] == TENSOR;
}

/* The configuration as text: native YAML, the lines that nodes compare, one key or each key for
 * run.json. */

nd_status nd_config_to_yaml(const nd_config *config, bool for_worker, char **out)
{
    nd_text text;
    const char *section = "";
    ND_TRY(nd_text_begin(&text));
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        const nd_field *f = &nd_fields[i];
        if (for_worker && i == ND_FIELD_train_sequence_length && !config->sequence_given) {
            continue;
        }
        if (strcmp(section, f->section) != 0) {
            fprintf(text.out, "%s:\n", f->section);
            section = f->section;
        }
        fprintf(text.out, "  %s: ", f->key);
        if (nd_field_is_text(f)) {
            nd_text_quote(text.out, *(char *const *)((const char *)config + f->offset));
        } else {
            print_field(text.out, config, (nd_field_id)i);
        }
        fprintf(text.out, "\n");
    }
    return nd_text_finish(&text, out);
}

nd_status nd_config_each(const nd_config *config,
                         void (*visit)(void *, const char *, const char *, bool), void *context)
{
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        char *value = NULL;
        ND_TRY(format_field(config, (nd_field_id)i, &value));
        visit(context, nd_fields[i].name, value, nd_fields[i].job);
        free(value);
    }
    return ND_OK;
}

nd_status nd_config_job_text(const nd_config *config, char **out)
{
    nd_text text;
    ND_TRY(nd_text_begin(&text));
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (nd_fields[i].job) {
            fprintf(text.out, "%s=", nd_fields[i].name);
            print_field(text.out, config, (nd_field_id)i);
            fprintf(text.out, "\n");
        }
    }
    return nd_text_finish(&text, out);
}

nd_status nd_config_diff(const char *text_a, const char *name_a, const char *text_b,
                         const char *name_b)
{
    const char *a = text_a, *b = text_b;
    while (*a || *b) {
        size_t na = strcspn(a, "\n"), nb = strcspn(b, "\n");
        if (na == nb && memcmp(a, b, na) == 0) {
            a += na + (a[na] == '\n');
            b += nb + (b[nb] == '\n');
            continue;
        }
        size_t ka = strcspn(a, "=\n"), kb = strcspn(b, "=\n");
        if (ka == kb && memcmp(a, b, ka) == 0 && a[ka] == '=' && b[kb] == '=') {
            return nd_fail(ND_ERR_CONFIG,
                           "the nodes have different configurations: %.*s is '%.*s' on %s but "
                           "'%.*s' on %s; start every node with the same settings",
                           (int)ka, a, (int)(na - ka - 1), a + ka + 1, name_a, (int)(nb - kb - 1),
                           b + kb + 1, name_b);
        }
        return nd_fail(ND_ERR_CONFIG,
                       "the nodes have different configurations: %s has '%.*s' where %s has "
                       "'%.*s'; start every node with the same version and settings",
                       name_a, (int)na, a, name_b, (int)nb, b);
    }
    return ND_OK;
}

nd_status nd_config_get(const nd_config *config, const char *key, char **out)
{
    const int id = nd_field_find(key);
    *out = NULL;
    return id >= 0 ? format_field(config, (nd_field_id)id, out) : nd_text_replace(out, "");
}

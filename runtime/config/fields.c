// SPDX-License-Identifier: Apache-2.0
/* The table of fields: parses, formats and checks a value with its type, range and choices. */
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

#define ND_FIELD(section, key, type, initial, min, max, choices, scope, unit, flags, help)         \
    {#section,                                                                                     \
     #key,                                                                                         \
     ND_FIELD_TYPE_##type,                                                                         \
     offsetof(nd_config, section.key),                                                             \
     initial,                                                                                      \
     min,                                                                                          \
     max,                                                                                          \
     choices,                                                                                      \
     #scope[0] == 'J',                                                                             \
     unit,                                                                                         \
     flags,                                                                                        \
     help},
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

static const nd_field_id axis_fields[ND_AXIS_COUNT] = {
#define ND_AXIS(id, name, ...)    ND_FIELD_mesh_##name,
#define ND_AXIS_RESERVED(id, ...) ND_FIELD_COUNT,
#include "runtime/mesh/mesh.def"
};

nd_field_id nd_axis_field(nd_axis axis)
{
    return axis_fields[axis];
}

int64_t *nd_axis_size(nd_config *config, nd_axis axis)
{
    nd_field_id id = axis_fields[axis];
    return id == ND_FIELD_COUNT ? NULL : (int64_t *)((char *)config + nd_fields[id].offset);
}

static bool is_axis(const nd_field *field)
{
    return strcmp(field->section, "mesh") == 0;
}

static void *member_of(const nd_config *config, const nd_field *field)
{
    return (char *)config + field->offset;
}

/* Choice number `index` of "a|b|c", not terminated; NULL when there are fewer. */
static const char *choice_at(const char *choices, unsigned index, size_t *length)
{
    const char *c = choices;
    for (; index > 0; index--) {
        c += strcspn(c, "|");
        if (!*c++) {
            return NULL;
        }
    }
    *length = strcspn(c, "|");
    return c;
}

const char *nd_field_range(nd_field_id id, char *buffer, size_t size)
{
    const nd_field *f = &nd_fields[id];
    buffer[0] = '\0';
    if (f->choices) {
        size_t used = 0;
        for (const char *c = f->choices; *c && used < size;) {
            size_t n = strcspn(c, "|");
            bool last = !c[n] || !strchr(c + n + 1, '|');
            used += (size_t)snprintf(buffer + used, size - used, "%.*s%s", (int)n, c,
                                     !c[n]  ? ""
                                     : last ? " or "
                                            : ", ");
            c += n + (c[n] == '|');
        }
        if (f->type == ND_FIELD_TYPE_CHOICES && used < size) {
            snprintf(buffer + used, size - used, ", or a list of them");
        }
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
static nd_status choices_format(const nd_field *f, unsigned bits, char *buffer, size_t size)
{
    const bool several = (bits & (bits - 1)) != 0;
    const unsigned left = bits ? bits : 1;
    size_t used = several ? (size_t)snprintf(buffer, size, "[") : 0, length = 0;
    for (unsigned i = 0; left >> i; i++) {
        const char *choice = choice_at(f->choices, i, &length);
        if (!choice) {
            return nd_fail(ND_ERR_INTERNAL, "%s.%s holds the unknown choices %#x", f->section,
                           f->key, bits);
        }
        if (left >> i & 1) {
            used += (size_t)snprintf(buffer + used, size - used, "%s%.*s", used > 1 ? ", " : "",
                                     (int)length, choice);
            ND_ASSERT(used + 1 < size);
        }
    }
    snprintf(buffer + used, size - used, several ? "]" : "");
    return ND_OK;
}

nd_status nd_field_format(const nd_config *config, nd_field_id id, char **out)
{
    const nd_field *f = &nd_fields[id];
    const void *member = member_of(config, f);
    char buffer[96] = "", second[40];
    char *text = NULL;
    switch (f->type) {
    case ND_FIELD_TYPE_INT:
        snprintf(buffer, sizeof buffer, "%lld", (long long)*(const int64_t *)member);
        break;
    case ND_FIELD_TYPE_REAL:
        nd_real_format(*(const double *)member, buffer, sizeof buffer);
        break;
    case ND_FIELD_TYPE_PAIR: {
        char first[40];
        nd_real_format(((const double *)member)[0], first, sizeof first);
        nd_real_format(((const double *)member)[1], second, sizeof second);
        snprintf(buffer, sizeof buffer, "[%s, %s]", first, second);
        break;
    }
    case ND_FIELD_TYPE_BOOL:
        snprintf(buffer, sizeof buffer, "%s", *(const bool *)member ? "true" : "false");
        break;
    case ND_FIELD_TYPE_CHOICE:
    case ND_FIELD_TYPE_CHOICES: {
        unsigned bits;
        memcpy(&bits, member, sizeof bits);
        if (f->type == ND_FIELD_TYPE_CHOICE) {
            bits = bits < 32 ? 1U << bits : 1U << 31;
        }
        ND_TRY(choices_format(f, bits, buffer, sizeof buffer));
        break;
    }
    case ND_FIELD_TYPE_TEXT:
    case ND_FIELD_TYPE_LIST:
        ND_TRY(nd_text_replace(&text, *(char *const *)member));
        *out = text;
        return ND_OK;
    }
    ND_TRY(nd_text_replace(&text, buffer));
    *out = text;
    return ND_OK;
}

int nd_field_find(const char *section, const char *key)
{
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (strcmp(nd_fields[i].section, section) == 0 && strcmp(nd_fields[i].key, key) == 0) {
            return i;
        }
    }
    return -1;
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

bool nd_field_is_sources(nd_field_id id)
{
    return id == ND_FIELD_data_path || id == ND_FIELD_data_validation_path;
}

/* ND_ERR_CONFIG when the text names no sources. A validation reads each of its sets once. */
static nd_status check_sources(nd_field_id id, const nd_setting *setting)
{
    nd_data_sources sources;
    nd_status status = ND_OK;
    ND_TRY(nd_data_sources_read(setting->where, setting->name, setting->text, &sources));
    for (int i = 0; i < sources.count && id == ND_FIELD_data_validation_path; i++) {
        const nd_data_source *s = &sources.list[i];
        if (s->weight > 0 || s->epochs > 0) {
            status = nd_fail(ND_ERR_CONFIG,
                             "%s%s gives \"%.200s\" %s, but a validation reads each set once; "
                             "leave it out",
                             setting->where, setting->name, s->path,
                             s->weight > 0 ? "a weight" : "epochs");
            break;
        }
    }
    nd_data_sources_fini(&sources);
    return status;
}

int nd_choice_find(const char *choices, const char *text)
{
    size_t length = strlen(text);
    int index = 0;
    for (const char *c = choices;; index++) {
        size_t n = strcspn(c, "|");
        if (n == length && strncasecmp(c, text, n) == 0) {
            return index;
        }
        if (!c[n]) {
            return -1;
        }
        c += n + 1;
    }
}

static nd_status wrong_type(const nd_field *f, const nd_setting *setting, const char *wanted)
{
    const bool several = strncmp(wanted, "two ", 4) != 0 && strchr(setting->text, ',');
    return nd_fail(ND_ERR_CONFIG, "%s%s is '%.80s'%s; it must be %s (%s)%s", setting->where,
                   setting->name, setting->text, setting->quoted ? " in quotes" : "", wanted,
                   f->help,
                   several ? "; scripts/sweep makes a run for each of several values" : "");
}

/* A mesh axis is -1 or at least 1; other integers that allow -1 allow 0 too. */
static bool in_range(const nd_field *f, double value)
{
    return value >= f->min && value <= f->max && !(is_axis(f) && value == 0);
}

enum { NEAREST_MAX = 96 };

/* "; did you mean separate?"; empty where no choice is near. */
static const char *nearest_choice(const char *choices, const char *text, char near[NEAREST_MAX])
{
    char word[64];
    size_t length = 0;
    nd_suggest search;
    nd_suggest_init(&search, text);
    near[0] = '\0';
    for (unsigned i = 0; choices; i++) {
        const char *choice = choice_at(choices, i, &length);
        const int before = search.distance;
        if (!choice) {
            break;
        }
        snprintf(word, sizeof word, "%.*s", (int)length, choice);
        nd_suggest_offer(&search, word);
        if (search.distance < before) {
            snprintf(near, NEAREST_MAX, "; did you mean %s?", word);
        }
    }
    return near;
}

static nd_status out_of_range(nd_field_id id, const nd_setting *setting)
{
    char range[256], near[NEAREST_MAX];
    return nd_fail(ND_ERR_CONFIG, "%s%s is %.80s; it must be %s (%s)%s", setting->where,
                   setting->name, setting->text, nd_field_range(id, range, sizeof range),
                   nd_fields[id].help, nearest_choice(nd_fields[id].choices, setting->text, near));
}

/* "[a, b]" -> "a,b": removes the brackets and the spaces around items. In quotes, brackets belong
 * to the text. */
static void strip_list(const char *text, bool quoted, char *out)
{
    size_t length = strlen(text);
    if (!quoted && length >= 2 && text[0] == '[' && text[length - 1] == ']') {
        text++;
        length -= 2;
    }
    size_t used = 0;
    for (size_t i = 0; i < length; i++) {
        bool edge = used == 0 || out[used - 1] == ',';
        if (text[i] == ' ' && edge) {
            continue;
        }
        while (text[i] == ',' && used > 0 && out[used - 1] == ' ') {
            used--;
        }
        out[used++] = text[i];
    }
    while (used > 0 && out[used - 1] == ' ') {
        used--;
    }
    out[used] = '\0';
}

static nd_status set_text(nd_config *config, nd_field_id id, const nd_setting *setting)
{
    const nd_field *f = &nd_fields[id];
    char buffer[TEXT_LIMIT + 1];
    const char *text = setting->text;
    const int limit = nd_field_is_sources(id) ? SOURCES_LIMIT : TEXT_LIMIT;
    if (strlen(text) > (size_t)limit) {
        return nd_fail(ND_ERR_CONFIG, "%s%s has %zu bytes; at most %d are supported",
                       setting->where, setting->name, strlen(text), limit);
    }
    if (!nd_is_printable(text)) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s%s holds a control character or is not UTF-8; rename the file or folder",
                       setting->where, setting->name);
    }
    if (nd_field_is_sources(id)) {
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
        return out_of_range(id, setting);
    }
    memcpy(member_of(config, f), pair, sizeof pair);
    return ND_OK;
}

static nd_status set_choice(nd_config *config, nd_field_id id, const nd_setting *setting)
{
    int index = nd_choice_find(nd_fields[id].choices, setting->text);
    if (index < 0) {
        return out_of_range(id, setting);
    }
    unsigned value = (unsigned)index;
    memcpy(member_of(config, &nd_fields[id]), &value, sizeof value);
    return ND_OK;
}

/* ND_ERR_CONFIG: the item of the value is none of the choices. */
static nd_status set_item(nd_field_id id, const nd_setting *setting, const char *item, int count,
                          unsigned *bits)
{
    const nd_field *f = &nd_fields[id];
    const int index = nd_choice_find(f->choices, item);
    char range[256], near[NEAREST_MAX];
    if (index < 0 && strcmp(item, setting->text) == 0) {
        return out_of_range(id, setting);
    }
    if (index < 0) {
        return nd_fail(ND_ERR_CONFIG, "%s%s is %.80s, with \"%.40s\"; it must be %s (%s)%s",
                       setting->where, setting->name, setting->text, item,
                       nd_field_range(id, range, sizeof range), f->help,
                       nearest_choice(f->choices, item, near));
    }
    if (index == 0 && count > 1) {
        return nd_fail(ND_ERR_CONFIG, "%s%s is %.80s, but %s goes with no other; leave it out",
                       setting->where, setting->name, setting->text, item);
    }
    *bits |= index > 0 ? 1U << index : 0;
    return ND_OK;
}

/* "a", "a,b" or "[a, b]"; "[]" has none. */
static nd_status set_choices(nd_config *config, nd_field_id id, const nd_setting *setting)
{
    char list[256];
    unsigned bits = 0;
    int count = 1;
    if (strlen(setting->text) >= sizeof list || !*setting->text) {
        return out_of_range(id, setting);
    }
    strip_list(setting->text, setting->quoted, list);
    for (const char *c = list; *c; c++) {
        count += *c == ',';
    }
    for (char *item = list, *next; *list && item; item = next) {
        next = strchr(item, ',');
        if (next) {
            *next++ = '\0';
        }
        ND_TRY(set_item(id, setting, item, count, &bits));
    }
    memcpy(member_of(config, &nd_fields[id]), &bits, sizeof bits);
    return ND_OK;
}

nd_status nd_field_set(nd_config *config, nd_field_id id, const nd_setting *setting)
{
    const nd_field *f = &nd_fields[id];
    void *member = member_of(config, f);
    config->resolved = false;
    switch (f->type) {
    case ND_FIELD_TYPE_INT: {
        int64_t value = 0;
        bool interval =
            id == ND_FIELD_checkpoint_interval || id == ND_FIELD_train_validation_interval;
        if (interval && strcmp(setting->text, "epoch") == 0) {
            value = -1;
        } else if (setting->quoted || !nd_int_parse(setting->text, &value)) {
            return wrong_type(f, setting, interval ? "an integer or epoch" : "an integer");
        }
        if (!in_range(f, (double)value)) {
            return out_of_range(id, setting);
        }
        memcpy(member, &value, sizeof value);
        return ND_OK;
    }
    case ND_FIELD_TYPE_REAL: {
        double value = 0;
        if (setting->quoted || !nd_real_parse(setting->text, &value)) {
            return wrong_type(f, setting, "a number");
        }
        if (!in_range(f, value)) {
            return out_of_range(id, setting);
        }
        memcpy(member, &value, sizeof value);
        return ND_OK;
    }
    case ND_FIELD_TYPE_BOOL: {
        bool value = false;
        if (setting->quoted || !nd_bool_parse(setting->text, !*setting->where, &value)) {
            return wrong_type(f, setting, "true or false");
        }
        memcpy(member, &value, sizeof value);
        return ND_OK;
    }
    case ND_FIELD_TYPE_CHOICE:
        return set_choice(config, id, setting);
    case ND_FIELD_TYPE_CHOICES:
        return set_choices(config, id, setting);
    case ND_FIELD_TYPE_PAIR:
        return set_pair(config, id, setting);
    case ND_FIELD_TYPE_TEXT:
    case ND_FIELD_TYPE_LIST:
        return set_text(config, id, setting);
    }
    ND_ASSERT(!"a field has a type");
    return ND_ERR_INTERNAL;
}

nd_status nd_field_check(nd_config *config, nd_field_id id)
{
    const nd_field *f = &nd_fields[id];
    const bool resolved = config->resolved;
    char name[64], *text = NULL;
    if (f->type == ND_FIELD_TYPE_TEXT || f->type == ND_FIELD_TYPE_LIST) {
        return ND_OK;
    }
    ND_TRY(nd_field_format(config, id, &text));
    snprintf(name, sizeof name, "%s.%s", f->section, f->key);
    nd_status status = nd_field_set(config, id, &(nd_setting){"", name, text, false});
    config->resolved = resolved;
    free(text);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
#include "runtime/config/fields.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define ND_FIELD(section, key, type, member, initial, min, max, choices, scope, unit, flags, help) \
    {#section,                                                                                     \
     #key,                                                                                         \
     ND_FIELD_TYPE_##type,                                                                         \
     offsetof(nd_config, member),                                                                  \
     initial,                                                                                      \
     min,                                                                                          \
     max,                                                                                          \
     choices,                                                                                      \
     #scope[0] == 'J',                                                                             \
     unit,                                                                                         \
     flags,                                                                                        \
     help},
const nd_field nd_fields[ND_FIELD_COUNT] = {
#include "runtime/config/config_fields.def"
};
#define ND_SECTION(name, title) {#name, title},
const nd_section nd_sections[ND_SECTION_COUNT] = {
#include "runtime/config/config_fields.def"
};

/* A CHOICE is written through an unsigned; a PAIR takes two doubles. */
static_assert(sizeof(nd_precision) == sizeof(unsigned), "enums have the size of unsigned");
static_assert(offsetof(nd_config, optimizer.beta2) ==
                  offsetof(nd_config, optimizer.beta1) + sizeof(double),
              "beta1 and beta2 are neighbours");

static const void *const_member_of(const nd_config *config, const nd_field *field)
{
    return (const char *)config + field->offset;
}

const char *nd_choice_at(const char *choices, unsigned index, size_t *length)
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
    } else if (f->type == ND_FIELD_TYPE_BOOL) {
        snprintf(buffer, size, "true or false");
    } else if (f->type == ND_FIELD_TYPE_INT && f->min < 0) {
        snprintf(buffer, size, "-1, or %d to %.0f", f->section[0] == 'm' && f->section[1] == 'e',
                 f->max);
    } else if (f->type == ND_FIELD_TYPE_INT) {
        snprintf(buffer, size, "%.0f to %.0f", f->min, f->max);
    } else if (f->type == ND_FIELD_TYPE_REAL || f->type == ND_FIELD_TYPE_PAIR) {
        snprintf(buffer, size, "%.9g to %.9g", f->min, f->max);
    }
    return buffer;
}

/* The shortest of 15 to 17 digits that reads back as the same double. */
static void real_format(double value, char *buffer, size_t size)
{
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(buffer, size, "%.*g", digits, value);
        if (strtod(buffer, NULL) == value) {
            return;
        }
    }
}

nd_status nd_field_format(const nd_config *config, nd_field_id id, char **out)
{
    const nd_field *f = &nd_fields[id];
    const void *member = const_member_of(config, f);
    char buffer[96] = "", second[40];
    char *text = NULL;
    switch (f->type) {
    case ND_FIELD_TYPE_INT:
        snprintf(buffer, sizeof buffer, "%lld", (long long)*(const int64_t *)member);
        break;
    case ND_FIELD_TYPE_REAL:
        real_format(*(const double *)member, buffer, sizeof buffer);
        break;
    case ND_FIELD_TYPE_PAIR: {
        char first[40];
        real_format(((const double *)member)[0], first, sizeof first);
        real_format(((const double *)member)[1], second, sizeof second);
        snprintf(buffer, sizeof buffer, "[%s, %s]", first, second);
        break;
    }
    case ND_FIELD_TYPE_BOOL:
        snprintf(buffer, sizeof buffer, "%s", *(const bool *)member ? "true" : "false");
        break;
    case ND_FIELD_TYPE_CHOICE: {
        unsigned index;
        size_t length = 0;
        memcpy(&index, member, sizeof index);
        const char *choice = nd_choice_at(f->choices, index, &length);
        if (!choice) {
            return nd_fail(ND_ERR_INTERNAL, "%s.%s holds the unknown choice %u", f->section, f->key,
                           index);
        }
        snprintf(buffer, sizeof buffer, "%.*s", (int)length, choice);
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

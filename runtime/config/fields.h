// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONFIG_FIELDS_H
#define ND_CONFIG_FIELDS_H
/*
 * The field table made of config_fields.def, and the one function each that sets, prints and checks
 * a field: files, flags, the echo and --help all go through here. Internal to runtime/config.
 */
#include <stdbool.h>
#include <stddef.h>

#include "runtime/config/config.h"
#include "runtime/config/text.h"

typedef enum nd_field_type {
    ND_FIELD_TYPE_INT = 0,
    ND_FIELD_TYPE_REAL,
    ND_FIELD_TYPE_BOOL,
    ND_FIELD_TYPE_CHOICE,
    ND_FIELD_TYPE_TEXT,
    ND_FIELD_TYPE_LIST,
    ND_FIELD_TYPE_PAIR
} nd_field_type;

typedef struct nd_field {
    const char *section, *key;
    nd_field_type type;
    size_t offset; /* in nd_config */
    const char *initial;
    double min, max;
    const char *choices; /* "a|b|c" or NULL */
    bool job;
    const char *unit, *flags, *help;
} nd_field;

typedef struct nd_section {
    const char *name, *title;
} nd_section;

#define ND_FIELD(section, key, ...) ND_FIELD_##section##_##key,
typedef enum nd_field_id {
#include "runtime/config/config_fields.def"
    ND_FIELD_COUNT
} nd_field_id;
#define ND_SECTION(name, title) ND_SECTION_##name,
typedef enum nd_section_id {
#include "runtime/config/config_fields.def"
    ND_SECTION_COUNT
} nd_section_id;

extern const nd_field nd_fields[ND_FIELD_COUNT];
extern const nd_section nd_sections[ND_SECTION_COUNT];

/* A value as somebody wrote it, and how to name it in a message. */
typedef struct nd_given {
    const char *where; /* "file.yaml:12: ", or "" for the command line */
    const char *name;  /* "train.steps", "--num-steps" */
    const char *text;  /* never NULL; lists as "[a, b]" */
    bool quoted;       /* in quotes: text, not a number or boolean */
} nd_given;

/* Remembers who gave a path, for nd_config_check_*_path; other fields are none of its business. */
nd_status nd_path_note_origin(nd_config *config, nd_field_id id, const nd_given *given);

nd_status nd_field_set(nd_config *config, nd_field_id id, const nd_given *given);

/* The value in the form that nd_field_set reads; owned by the caller. */
nd_status nd_field_format(const nd_config *config, nd_field_id id, char **out);

/* Range and choice of a value that may have been put into the struct directly. */
nd_status nd_field_check(const nd_config *config, nd_field_id id);

/* -1 when there is none. */
int nd_field_find(const char *section, const char *key);
int nd_section_find(const char *name);

/* "1 or more", "0 to 64", "bf16, fp32 or fp8"; returns buffer. */
const char *nd_field_range(nd_field_id id, char *buffer, size_t size);

/* Choice number `index` of "a|b|c", not terminated; NULL when there are fewer. */
const char *nd_choice_at(const char *choices, unsigned index, size_t *length);

/* true, yes, on / false, no, off in any case; with `digits` 1 and 0 too. */
bool nd_bool_parse(const char *text, bool digits, bool *out);
/* Decimal, whole text, no overflow. */
bool nd_int_parse(const char *text, int64_t *out);

#endif

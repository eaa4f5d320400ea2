// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONFIG_READER_H
#define ND_CONFIG_READER_H
/*
 * Declarations that the files of runtime/config share, lowest first: owned texts, the field table,
 * the layers that set fields (file, then command line), commands, accelerate's keys, flags, checks
 * of the whole. A file calls only those before it. Nothing outside runtime/config includes this but
 * its tests.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/suggest.h"
#include "runtime/base/yaml.h"
#include "runtime/config/config.h"

/* For %lld. */
static inline long long nd_ll(int64_t value)
{
    return value;
}

/* ---- text.c: owned and growing strings, numbers, lists of flags ---- */

/* Replaces an owned string; NULL is stored as "". */
nd_status nd_text_replace(char **target, const char *text);

/* A text that grows: what is written to `out`. */
typedef struct nd_text {
    FILE *out;
    char *data;
    size_t size;
} nd_text;

nd_status nd_text_begin(nd_text *text);
/* A double-quoted YAML scalar, without control characters. */
void nd_text_quote(FILE *out, const char *value);
/* Hands the text over, or frees it and returns the failure. */
nd_status nd_text_finish(nd_text *text, char **out);

/* true, yes, on / false, no, off in any case; with `digits` 1 and 0 too. */
bool nd_bool_parse(const char *text, bool digits, bool *out);
/* Decimal, whole text, no overflow; a real is finite. */
bool nd_int_parse(const char *text, int64_t *out);
bool nd_real_parse(const char *text, double *out);
/* The shortest of 15 to 17 digits that reads back as the same double. */
void nd_real_format(double value, char *buffer, size_t size);

enum { ND_FLAG_NAME_MAX = 96 };

/* Does the space-separated list hold the name? '-' and '_' are the same. */
bool nd_flag_list_holds(const char *list, const char *name);
/* Offers the names of such a list. */
void nd_flag_list_offer(nd_suggest *search, const char *list);
/* Word number `index` of a list into buffer; false when there are fewer, as in an empty list or
 * NULL. */
bool nd_list_word(const char *list, char between, int index, char *buffer, size_t size);

/* ---- fields.c: the field table ---- */

typedef enum nd_field_type {
    ND_FIELD_TYPE_INT = 0,
    ND_FIELD_TYPE_REAL,
    ND_FIELD_TYPE_BOOL,
    ND_FIELD_TYPE_CHOICE,
    ND_FIELD_TYPE_CHOICES,
    ND_FIELD_TYPE_TEXT,
    ND_FIELD_TYPE_LIST,
    ND_FIELD_TYPE_SOURCES, /* of data (sources.h): may be a list, and longer than other texts */
    ND_FIELD_TYPE_PAIR,
    ND_FIELD_TYPE_SWITCH, /* this one and those below are of commands' own flags */
    ND_FIELD_TYPE_TEXTS,
    ND_FIELD_TYPE_WORDS
} nd_field_type;

/* A key with its flags, or a flag that a command has of its own. */
typedef struct nd_field {
    const char *section, *key, *name; /* of a key: "train", "steps", "train.steps" */
    nd_field_type type;
    size_t offset; /* in nd_config */
    const char *initial;
    double min, max;     /* of a text, min 1: it is needed */
    const char *choices; /* "a|b|c"; of an own flag: what stands for its value; or NULL */
    bool job;
    const char *unit, *flags, *help;
    nd_command_id command; /* that has the flag; ND_COMMAND_NONE: it is a key's */
} nd_field;

typedef struct nd_section {
    const char *name, *title;
} nd_section;

#define ND_FIELD(section, key, ...) ND_FIELD_##section##_##key,
typedef enum nd_field_id {
#include "runtime/config/fields.def"
    ND_FIELD_COUNT
} nd_field_id;
#define ND_SECTION(name, title) ND_SECTION_##name,
typedef enum nd_section_id {
#include "runtime/config/fields.def"
    ND_SECTION_COUNT
} nd_section_id;

extern const nd_field nd_fields[ND_FIELD_COUNT];
extern const nd_section nd_sections[ND_SECTION_COUNT];

/* A value as the user wrote it, and its name in messages. */
typedef struct nd_setting {
    const char *where; /* "file.yaml:12: ", or "" for the command line */
    const char *name;  /* "train.steps", "--num-steps" */
    const char *text;  /* never NULL; lists as "[a, b]" */
    bool quoted;       /* in quotes: text, not a number or boolean */
} nd_setting;

static inline bool nd_field_is_text(const nd_field *field)
{
    return field->type >= ND_FIELD_TYPE_TEXT && field->type <= ND_FIELD_TYPE_SOURCES;
}

/* Range and choice of a value that may have been put into the struct directly. Texts are not
 * touched. */
nd_status nd_field_check(nd_config *config, nd_field_id id);

/* -1 when there is none. */
int nd_field_find(const char *name);
/* The field whose key without section, or one of whose flags, is nearest to the name. */
int nd_field_near(const char *name);
int nd_section_find(const char *name);

/* "0 to 64", "bf16, fp32 or fp8"; returns buffer. */
const char *nd_field_range(const nd_field *field, char *buffer, size_t size);

/* Finds the text, in upper or lower case, among "a|b=c" (or NULL): *ours is what stands behind "=",
 * or the choice itself. Returns its place; -1: none. */
enum { ND_CHOICE_MAX = 64 };
int nd_choice_find(const char *choices, const char *text, char ours[ND_CHOICE_MAX]);

/* Reads a number or a choice. */
typedef enum nd_fault { ND_FAULT_NONE = 0, ND_FAULT_TYPE, ND_FAULT_RANGE } nd_fault;
nd_fault nd_value_read(const nd_field *field, const char *text, nd_flag_value *out);

/* ---- fields.c: layers ---- */

typedef enum nd_layer { ND_LAYER_DEFAULT = 0, ND_LAYER_FILE, ND_LAYER_FLAGS } nd_layer;

/* Each state is the number of the value of a row (names.def) that was given, from 1; 0: none. */
typedef enum nd_state {
    ND_STATE_DISTRIBUTED,
    ND_STATE_SHARDING,
    ND_STATE_FP8_BACKEND,
    ND_STATE_SAVE,
    ND_STATE_EVAL,
    ND_STATE_COUNT
} nd_state;
enum { ND_DISTRIBUTED_NO = 1, ND_DISTRIBUTED_MULTI_GPU, ND_DISTRIBUTED_MULTI_CPU };
enum { ND_SHARDING_FULL = 1, ND_SHARDING_NONE = 3, ND_SHARDING_HYBRID, ND_SHARDING_HYBRID_ZERO2 };
enum { ND_FP8_BACKEND_AO = 1, ND_FP8_BACKEND_TE };
enum { ND_STRATEGY_NO = 1, ND_STRATEGY_STEPS, ND_STRATEGY_EPOCH };

typedef struct nd_reader {
    nd_config *config;  /* borrowed */
    bool notes_origins; /* keeps where each path was given, in the words of the user */
    nd_layer layer;     /* being read */
    const char *file;   /* of that layer */
    char where[600];    /* what messages begin with: "file.yaml:12: ", or "" */
    uint8_t set_by[ND_FIELD_COUNT];

    /* Names of other programs set these in a layer; they are applied when all of it is read. */
    int state[ND_STATE_COUNT];
    bool parallelism;   /* a parallelism_config with a size */
    int64_t sp_size;    /* ranks of Ulysses, 0 unless given */
    bool mixed_fp8;     /* mixed_precision: fp8 */
    char notices[1024]; /* keys without a meaning here, comma-separated */

    char no_fp16[768]; /* why the precision that the last layer gave is refused, or "" */
} nd_reader;

/* The fields of the paths, for which path_origin of nd_config says where each was given. */
extern const nd_field_id nd_path_fields[ND_PATH_COUNT];

nd_status nd_reader_set(nd_reader *reader, nd_field_id id, const nd_setting *setting);
/* Like nd_reader_set, but with a value chosen by the program; messages name the key. */
nd_status nd_reader_put(nd_reader *reader, nd_field_id id, const char *text);

/* ---- help.c: the tables of commands and of their flags ---- */

enum { ND_TAKES_SETTINGS = 4 };
typedef struct nd_command_row {
    unsigned programs; /* bit 1 << nd_program, and ND_TAKES_SETTINGS */
    const char *name;
    int least, most; /* words that belong to no flag */
    const char *word, *usage, *summary, *about, *codes;
} nd_command_row;

extern const nd_command_row nd_command_rows[ND_COMMAND_COUNT];
extern const nd_field nd_own_flags[ND_OWN_FLAG_COUNT];

/* "ndtrain" or "ndlaunch": the one that has the command's help. */
const char *nd_program_of(nd_command_id command);

/* ---- names.c: flags and keys of other programs ---- */

/* Flags, and accelerate's file with its maps of keys. */
typedef enum nd_map_id {
    ND_MAP_FLAGS = 0,
    ND_MAP_TOP,
    ND_MAP_FSDP,
    ND_MAP_PARALLELISM,
    ND_MAP_FP8,
    ND_MAP_DYNAMO,
    ND_MAP_COUNT
} nd_map_id;
typedef struct nd_map {
    const char *key, *prefix; /* the prefix may be left out in the map */
} nd_map;
extern const nd_map nd_maps[ND_MAP_COUNT];

/* A row of names.def. */
typedef enum nd_name_kind {
    ND_NAME_CALLS,
    ND_NAME_SETS,
    ND_NAME_REFUSED,
    ND_NAME_IGNORED
} nd_name_kind;
typedef struct nd_name nd_name;
struct nd_name {
    nd_name_kind kind;
    nd_map_id map;
    const char *names; /* separated by spaces. Each key is a flag, too */
    nd_field_id field; /* ND_FIELD_COUNT: none */
    nd_status (*apply)(nd_reader *reader, const nd_name *name, const nd_setting *setting);
    const char *values;   /* the only ones that are taken, or NULL */
    const char *sentence; /* why others are refused, or what to do in place of an ignored name */
    bool is_switch;
    nd_state state;
};

/* NULL: there is none. Keys of all maps are flags. */
const nd_name *nd_name_find(nd_map_id map, const char *name);
nd_status nd_name_apply(nd_reader *reader, const nd_name *name, const nd_setting *setting);
bool nd_name_is_switch(const nd_name *name); /* as a flag, it may stand without a value */
/* Offers the names of a map, or all as flags, for "did you mean". */
void nd_names_offer(nd_map_id map, nd_suggest *search);

/* ---- flags.c: the command line ---- */

/* --config-file's value, or NULL; more than one fails. Also finds --help and --version. */
nd_status nd_flags_scan(int argc, char **argv, const char **config_file, nd_cli *cli);
/* Applies everything but --config-file, in order. argv[0] may name the command, whose own flags
 * are then among the near ones. */
nd_status nd_flags_apply(nd_reader *reader, int argc, char **argv);

#endif

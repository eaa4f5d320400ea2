// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONFIG_CONFIG_H
#define ND_CONFIG_CONFIG_H
/*
 * The configuration of a run: one plain struct, filled from defaults, a YAML file (native or
 * accelerate's) and the command line, later wins. One field table (fields.def) drives
 * reading, --help, overrides, the printed configuration and run.json; a key exists once.
 * docs/config.md lists the keys.
 *
 * Strings are owned by the config (nd_config_fini). Relative paths in a file are relative to the
 * working directory, as on the command line.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/config/commands.h"
#include "runtime/mesh/mesh.h"

/* Returns ND_ERR_CONFIG with a sentence from the calling function where the condition holds. */
#define ND_REFUSE(condition, ...)                                                                  \
    do {                                                                                           \
        if (condition) {                                                                           \
            return nd_fail(ND_ERR_CONFIG, __VA_ARGS__);                                            \
        }                                                                                          \
    } while (0)

typedef enum nd_device_choice { ND_CHOOSE_AUTO, ND_CHOOSE_CPU, ND_CHOOSE_CUDA } nd_device_choice;
typedef enum nd_precision { ND_PRECISION_BF16, ND_PRECISION_FP32, ND_PRECISION_FP8 } nd_precision;
typedef enum nd_data_format {
    ND_DATA_AUTO = 0,
    ND_DATA_TEXT,
    ND_DATA_JSONL,
    ND_DATA_LLMC,
    ND_DATA_MEGATRON
} nd_data_format;
typedef enum nd_special_choice {
    ND_CHOOSE_SPECIAL_TEXT = 0,
    ND_CHOOSE_SPECIAL_PARSE,
    ND_CHOOSE_SPECIAL_REFUSE
} nd_special_choice;
typedef enum nd_invalid_choice {
    ND_CHOOSE_INVALID_REPLACE = 0,
    ND_CHOOSE_INVALID_REFUSE
} nd_invalid_choice;
typedef enum nd_chat_choice {
    ND_CHOOSE_CHAT_NONE = 0,
    ND_CHOOSE_CHAT_LLAMA3,
    ND_CHOOSE_CHAT_CHATML,
    ND_CHOOSE_CHAT_MODEL
} nd_chat_choice;
/* Documents of one block: separate ones see nothing of each other. */
typedef enum nd_documents_rule {
    ND_DOCUMENTS_AUTO = 0, /* until the data are open: separate where rows have prompts */
    ND_DOCUMENTS_JOIN,
    ND_DOCUMENTS_SEPARATE
} nd_documents_rule;
typedef enum nd_positions_rule { ND_POSITIONS_RESTART, ND_POSITIONS_RUNNING } nd_positions_rule;
typedef enum nd_long_rows { ND_LONG_ROWS_CUT, ND_LONG_ROWS_DROP } nd_long_rows;
typedef enum nd_optimizer_kind { ND_OPTIMIZER_ADAMW, ND_OPTIMIZER_SGD } nd_optimizer_kind;
typedef enum nd_schedule_kind {
    ND_SCHEDULE_CONSTANT = 0,
    ND_SCHEDULE_LINEAR,
    ND_SCHEDULE_COSINE,
    ND_SCHEDULE_WSD
} nd_schedule_kind;
/* In the order of how much is computed again. */
typedef enum nd_recompute {
    ND_RECOMPUTE_NONE = 0,
    ND_RECOMPUTE_SELECTIVE,
    ND_RECOMPUTE_ALL_BUT_ATTENTION,
    ND_RECOMPUTE_FULL
} nd_recompute;
typedef enum nd_cp_comm { ND_CP_ALLGATHER, ND_CP_RING, ND_CP_ULYSSES, ND_CP_AUTO } nd_cp_comm;
typedef enum nd_fp8_recipe {
#define ND_FP8_RECIPE(id, ...) ND_FP8_##id,
#include "runtime/config/fp8_recipes.def"
    ND_FP8_RECIPE_COUNT
} nd_fp8_recipe;
/* Its name among the choices of fp8.recipe. */
const char *nd_fp8_recipe_name(nd_fp8_recipe recipe);
/* Returns whether each operand has one scale; otherwise scales lie along rows or columns. */
bool nd_fp8_recipe_is_per_tensor(nd_fp8_recipe recipe);
typedef enum nd_fp8_format { ND_FP8_HYBRID, ND_FP8_E4M3 } nd_fp8_format;
typedef enum nd_fp8_amax { ND_FP8_AMAX_MOST_RECENT, ND_FP8_AMAX_MAX } nd_fp8_amax;
typedef enum nd_nonfinite {
    ND_NONFINITE_STOP = 0,
    ND_NONFINITE_SKIP,
    ND_NONFINITE_REWIND
} nd_nonfinite;
typedef enum nd_tracker {
    ND_TRACKER_NONE = 0,
    ND_TRACKER_TENSORBOARD,
    ND_TRACKER_ALL, /* without those of the network */
    ND_TRACKER_WANDB,
    ND_TRACKER_TRACKIO
} nd_tracker;
typedef enum nd_staging_choice { ND_STAGING_OVERLAP, ND_STAGING_WAIT } nd_staging_choice;
typedef enum nd_checksum_choice { ND_CHOOSE_XXH3, ND_CHOOSE_SHA256 } nd_checksum_choice;
typedef enum nd_on_error { ND_ON_ERROR_CONTINUE, ND_ON_ERROR_STOP } nd_on_error;
typedef enum nd_weights_dtype { ND_WEIGHTS_BF16, ND_WEIGHTS_FP32 } nd_weights_dtype;

/* Keys whose files must exist. */
typedef enum nd_path_key {
    ND_PATH_MODEL_PATH = 0,
    ND_PATH_MODEL_CONFIG,
    ND_PATH_DATA,
    ND_PATH_VALIDATION,
    ND_PATH_COUNT
} nd_path_key;

/* Sizes above which the program works in parts. Tests set them small; 0: the program's own. */
typedef struct nd_internal_limits {
    int64_t head_rows;    /* tokens per tp peer of a chunk of the head */
    int64_t head_columns; /* of a tile of its logits, before it is rounded up to a unit */
    int64_t save_piece;   /* elements of a rank that are gathered at once to save a model */
} nd_internal_limits;

/* The keys, as fields.def lists and explains them. Texts are owned, and never NULL. */
typedef double nd_number_pair[2];
#define ND_TYPE_INT          int64_t
#define ND_TYPE_REAL         double
#define ND_TYPE_BOOL         bool
#define ND_TYPE_CHOICE(type) type
#define ND_TYPE_CHOICES      unsigned
#define ND_TYPE_TEXT         char *
#define ND_TYPE_LIST         char *
#define ND_TYPE_SOURCES      char *
#define ND_TYPE_PAIR         nd_number_pair

typedef struct nd_config {
#define ND_SECTION(name, title)           struct {
#define ND_FIELD(section, key, type, ...) ND_TYPE_##type key;
#define ND_SECTION_END(name)                                                                       \
    }                                                                                              \
    name;
#include "runtime/config/fields.def"

    /* Derived, not keys. */
    char *source;                     /* the YAML file, or "" */
    char *path_origin[ND_PATH_COUNT]; /* "file.yaml:12: data.path", "--data-path"; NULL: unknown */
    bool from_accelerate;
    bool sequence_given;   /* train.sequence_length is no default: eval has another one */
    int data_sources;      /* of data.path, after nd_config_resolve */
    bool resolved;         /* nd_config_resolve succeeded */
    nd_mesh resolved_mesh; /* after nd_config_resolve */
    nd_axis open_axis;     /* the axis that was -1 before nd_config_resolve; ND_AXIS_COUNT: none */
    nd_internal_limits limits;
} nd_config;

/* Defaults. */
nd_status nd_config_init(nd_config *config);
void nd_config_fini(nd_config *config);

/* Requests of the command line besides settings; filled by nd_config_parse. */
typedef struct nd_cli {
    bool help, version;
    const char *help_topic; /* borrowed from argv: what follows --help, "" for nothing */
} nd_cli;

/*
 * Reads a YAML text (native or accelerate's) over what the config holds; `name` is its name in
 * messages and becomes config->source.
 */
nd_status nd_config_read_text(nd_config *config, const char *text, size_t bytes, const char *name);

/*
 * Defaults <- --config-file <- other flags in order. argv[0] is skipped. ND_ERR_CONFIG: file, line,
 * key, what was wrong, nearest known name.
 */
nd_status nd_config_parse(nd_config *config, nd_cli *cli, int argc, char **argv);

/*
 * Checks that need no other file: ranges, keys that exclude each other, the mesh against the worker
 * count (fills resolved_mesh), nodes. Called by nd_config_parse's users after the last change.
 */
nd_status nd_config_resolve(nd_config *config);
/* Several nodes without launch.rdzv_endpoint or a key are ND_ERR_CONFIG. For all that starts the
 * job, or says whether it would start; a plan needs neither. After nd_config_resolve. */
nd_status nd_config_check_meeting(const nd_config *config);

/* Samples of the training data and of a step, for keys that count in epochs. */
typedef struct nd_epochs {
    int64_t samples; /* of an epoch */
    int64_t limit;   /* that the data can give; INT64_MAX: any number */
    int64_t step;    /* of a step, over all ranks */
} nd_epochs;

/*
 * After nd_config_resolve, when the data are open: sets train.steps from train.epochs, rounded up,
 * and the intervals that are -1 to the steps of an epoch, rounded up. Then checks what depends on
 * them. ND_ERR_CONFIG: train.steps was given too and is another number, or the data cannot give so
 * many samples to a run that begins with the first of them (one that may go on from elsewhere, by
 * checkpoint.resume, is checked when that is known).
 */
nd_status nd_config_take_epochs(nd_config *config, const nd_epochs *epochs);
/* ND_ERR_CONFIG when the data end before train.steps of a run that has done `step` steps and seen
 * `seen` samples. */
nd_status nd_config_check_end(const nd_config *config, const nd_epochs *epochs, int64_t step,
                              int64_t seen);

/*
 * Makes the configuration with which a job goes on when only so many of its nodes are left:
 * workers, the mesh, whose axis that was -1 shrinks, and more micro-batches, so that the samples of
 * a step stay the same. The config is resolved; *out borrows its strings and must not be finished.
 * ND_ERR_CONFIG says what does not divide.
 */
nd_status nd_config_with_nodes(const nd_config *config, int64_t nodes, nd_config *out);

/* A sentence about the FP8 settings that differ from their defaults and that the run does not read;
 * "": there are none. */
enum { ND_IDLE_KEYS_MAX = 400 };
nd_status nd_config_idle_keys(const nd_config *config, char text[ND_IDLE_KEYS_MAX]);

/*
 * The time that a healthy program may take to encode the data on a slow disk: 400 s a GB, eight
 * times as much where they are compressed. 0 for data that are read as they are.
 * Deadlines that wait for the data add it.
 */
double nd_config_data_seconds(const nd_config *config);

/* Returns whether the records go to this tracker, by its name or by `all`. */
static inline bool nd_config_tracks(const nd_config *config, nd_tracker tracker)
{
    const unsigned all = tracker == ND_TRACKER_TENSORBOARD ? 1U << ND_TRACKER_ALL : 0;
    return (config->log.trackers & (1U << tracker | all)) != 0;
}

/* The steps of log.profile_steps or log.dump_steps; false: none. A wrong one is found by
 * nd_config_resolve. */
bool nd_config_steps(const char *steps, int64_t *first, int64_t *last);

/*
 * ND_ERR_DATA when a named file does not exist; the message has the key, where it was given, the
 * path and the working directory. The contents are checked by the code that reads the files.
 */
nd_status nd_config_check_model_path(const nd_config *config);
nd_status nd_config_check_data_paths(const nd_config *config);

/*
 * --help [TOPIC]. Topic "": usage and the flags used most, on one screen. A section's name: its
 * keys with flags, default, range and unit. "all": everything. ND_ERR_CONFIG for another topic.
 */
nd_status nd_config_help(FILE *out, nd_program program, const char *topic);

/* The resolved configuration as native YAML: reading it again gives the same config. For a worker
 * it is without what that finds by itself if nobody gave it (sequence_given). Owned by the
 * caller. */
nd_status nd_config_to_yaml(const nd_config *config, bool for_worker, char **out);

/*
 * Job-scoped fields only, as "key=value\n" lines in table order: compared between nodes at
 * rendezvous. Two texts that differ: nd_config_diff names the first key and both values in its
 * sentence.
 */
nd_status nd_config_job_text(const nd_config *config, char **out);
nd_status nd_config_diff(const char *text_a, const char *name_a, const char *text_b,
                         const char *name_b);

/* Value of "section.key" as text ("" when unknown), for run.json and messages. Owned by the
 * caller. */
nd_status nd_config_get(const nd_config *config, const char *key, char **out);

/* Calls visit(context, "section.key", value text, is_job_scoped) for every key in table order:
 * run.json. */
nd_status nd_config_each(const nd_config *config,
                         void (*visit)(void *, const char *, const char *, bool), void *context);

#endif

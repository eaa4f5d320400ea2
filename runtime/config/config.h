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

#include "runtime/base/status.h"
#include "runtime/mesh/mesh.h"

typedef enum nd_device_choice {
    ND_CHOOSE_AUTO = 0,
    ND_CHOOSE_CPU,
    ND_CHOOSE_CUDA
} nd_device_choice;
typedef enum nd_precision {
    ND_PRECISION_BF16 = 0,
    ND_PRECISION_FP32,
    ND_PRECISION_FP8
} nd_precision;
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
typedef enum nd_positions_rule { ND_POSITIONS_RESTART = 0, ND_POSITIONS_RUNNING } nd_positions_rule;
typedef enum nd_long_rows { ND_LONG_ROWS_CUT = 0, ND_LONG_ROWS_DROP } nd_long_rows;
typedef enum nd_optimizer_kind { ND_OPTIMIZER_ADAMW = 0, ND_OPTIMIZER_SGD } nd_optimizer_kind;
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
typedef enum nd_cp_comm { ND_CP_ALLGATHER = 0, ND_CP_RING, ND_CP_ULYSSES, ND_CP_AUTO } nd_cp_comm;
typedef enum nd_fp8_recipe {
#define ND_FP8_RECIPE(id, ...) ND_FP8_##id,
#include "runtime/config/fp8_recipes.def"
    ND_FP8_RECIPE_COUNT
} nd_fp8_recipe;
/* Its name among the choices of fp8.recipe. */
const char *nd_fp8_recipe_name(nd_fp8_recipe recipe);
/* Whether each operand has one scale; otherwise scales lie along rows or columns. */
bool nd_fp8_recipe_is_per_tensor(nd_fp8_recipe recipe);
typedef enum nd_fp8_format { ND_FP8_HYBRID = 0, ND_FP8_E4M3 } nd_fp8_format;
typedef enum nd_fp8_amax { ND_FP8_AMAX_MOST_RECENT = 0, ND_FP8_AMAX_MAX } nd_fp8_amax;
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
typedef enum nd_staging_choice { ND_STAGING_OVERLAP = 0, ND_STAGING_WAIT } nd_staging_choice;
typedef enum nd_checksum_choice { ND_CHOOSE_XXH3 = 0, ND_CHOOSE_SHA256 } nd_checksum_choice;
typedef enum nd_on_error { ND_ON_ERROR_CONTINUE = 0, ND_ON_ERROR_STOP } nd_on_error;
typedef enum nd_weights_dtype { ND_WEIGHTS_BF16 = 0, ND_WEIGHTS_FP32 } nd_weights_dtype;

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

typedef struct nd_config {
    struct {
        int64_t
            workers; /* total over all nodes; 0: what the mesh or nodes x nproc_per_node needs */
        nd_device_choice device;
        int64_t threads_per_worker; /* 0: cores of the allowed CPUs / local workers */
        char *log_dir;              /* "": worker output is not kept in files */
        double grace_seconds;       /* between TERM and KILL */
        int64_t nnodes, node_rank;
        int64_t nproc_per_node; /* 0: workers / nnodes */
        char *rdzv_endpoint;    /* host:port; "" on one host */
        char *rdzv_key_file;    /* "" on one host */
        char *gpu_ids;          /* "all" or a comma list */
        double comm_timeout_seconds;
        double rdzv_timeout_seconds;
        bool nccl_alone; /* groups of one member use NCCL too */
        int64_t max_restarts;
        int64_t spare_nodes; /* beyond nnodes: without workers until a node is replaced */
        int64_t min_nodes;   /* a restart may go on with so few; 0: with nnodes only */
    } launch;
    struct {
#define ND_AXIS(id, name, ...) int64_t name; /* one may be -1 where the axis allows it */
#include "runtime/mesh/mesh.def"
    } mesh;
    struct {
        char *path;   /* Hugging Face folder: config.json + safetensors */
        char *config; /* a config.json alone: fresh weights */
        char *name;   /* org/name in the local Hugging Face cache */
        bool verify;  /* path against its SHA256SUMS, where it has one */
        int64_t seed; /* of fresh weights; -1: train.seed */
    } model;
    struct {
        char *path;
        nd_data_format format;
        /* "bytes"; "file": token ids as they are in llmc and megatron files; "model": that of the
         * model's folder; else the path of a tokenizer.json or of its folder */
        char *tokenizer;
        bool append_eod;
        nd_special_choice special_in_text;
        nd_chat_choice chat_format;
        char *json_key;           /* "": those of rows of text, of prompts and of messages */
        char *document_separator; /* as nd_corpus_separator reads it; "": none */
        nd_invalid_choice invalid_utf8;
        int64_t skip_bad;            /* rows of each path */
        nd_documents_rule documents; /* auto becomes another one when the data are opened */
        nd_positions_rule positions;
        nd_long_rows long_rows;
        int64_t end_of_text;   /* -1: the model's */
        char *cache_dir;       /* "": the user's */
        char *validation_path; /* "": no validation */
        int64_t shuffle_seed;  /* -1: train.seed */
    } data;
    struct {
        double epochs; /* 0: steps counts */
        int64_t steps; /* 0: nd_config_take_epochs sets it */
        int64_t sequence_length, micro_batch_size, gradient_accumulation_steps;
        nd_precision precision;
        bool deterministic;
        int64_t seed;                /* the run's: model.seed and data.shuffle_seed follow it */
        int64_t validation_interval; /* steps; 0: only after the last step, if at all; -1: an
                                        epoch's, which nd_config_take_epochs sets */
        nd_nonfinite
            nonfinite;       /* what to do with a step whose loss or gradient norm is not finite */
        double spike_factor; /* a loss above this times the median of those before it; 0: off */
        char *sample_prompt; /* prompts, with \n between them; "": none */
        int64_t sample_tokens;
        int64_t early_stopping_patience; /* validations; 0: off */
        double early_stopping_threshold;
        int64_t validation_batches; /* micro-batches per data rank at each validation; 0: all */
    } train;
    struct {
        nd_optimizer_kind name;
        double lr, beta1, beta2, eps, weight_decay;
        double max_grad_norm; /* 0: off */
        nd_schedule_kind schedule;
        int64_t warmup_steps;
        double warmup_ratio; /* nd_config_resolve turns it into warmup_steps; 0: not given */
        double min_lr;
        int64_t decay_steps; /* wsd: length of the final decay; 0: a tenth of the steps */
    } optimizer;
    struct {
        bool reshard_after_forward;
        nd_cp_comm cp_comm;
        int64_t ulysses;
        nd_recompute recompute;
        int64_t tiled_mlp; /* pieces; 0 or 1: one; -1: of a length that the device likes */
    } parallel;
    struct {
        bool autotune;       /* choose algorithms of products by their times */
        char *autotune_from; /* "": none; the run.json whose choices are taken */
        bool cuda_graphs;    /* of each block's forward and backward */
        int64_t comm_blocks; /* most of a collective that runs beside products; 0: NCCL chooses */
        int64_t product_processors; /* 0: all that kernels.comm_blocks leaves */
    } kernels;
    struct {
        nd_fp8_recipe recipe;
        bool all_gather;
        char *filter; /* "accelerate", "auto", or a comma list of name patterns to convert */
        nd_fp8_format format; /* of delayed: E4M3 forward and E5M2 backward, or E4M3 in both */
        int64_t amax_history_length; /* of delayed */
        nd_fp8_amax amax_compute;    /* of delayed */
        int64_t margin;              /* of delayed: scales are divided by 2^margin */
        int64_t health_interval;     /* steps between health reports; 0: none */
    } fp8;
    struct {
        int64_t interval; /* steps; 0: no checkpoints; -1: as validation_interval */
        int64_t keep_last, keep_every;
        char *resume; /* "", "latest", "auto", a step, or a folder */
        char *allow;  /* keys that may differ from the checkpoint's, a comma list */
        nd_staging_choice staging;
        nd_checksum_choice checksum;
        bool export_model, verify;
        bool load_best; /* the model that is saved is that of the lowest validation loss */
        nd_on_error on_error;
    } checkpoint;
    struct {
        char *dir; /* "": runs/<config>-<n> */
        bool save_model;
        nd_weights_dtype dtype;
    } output;
    struct {
        int64_t interval;
        char *level;         /* error | warning | info | debug */
        unsigned trackers;   /* bit 1 << nd_tracker for each; 0: none */
        char *python;        /* a program, for wandb and trackio; "": none */
        char *profile_steps; /* "", "7" or "7-9" */
        char *dump_tensors;  /* names and patterns, separated by commas */
        char *dump_steps;    /* as profile_steps; "" where that is */
    } log;

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

/* What the command line asks for besides settings; filled by nd_config_parse. */
typedef struct nd_cli {
    bool help, version;
    const char *help_topic; /* borrowed from argv: what follows --help, "" for nothing */
    int plan_rank;          /* --rank R of `ndtrain plan`, -1 */
    bool plan_explains;     /* --explain of `ndtrain plan` */
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
 * What a job goes on with when only so many of its nodes are left: workers, the mesh, whose axis
 * that was -1 shrinks, and more micro-batches, so that the samples of a step stay the same. The
 * config is resolved; *out borrows its strings and must not be finished. ND_ERR_CONFIG says what
 * does not divide.
 */
nd_status nd_config_with_nodes(const nd_config *config, int64_t nodes, nd_config *out);

/* Calls `line` with a sentence for each kind of FP8 setting that differs from its default and that
 * the run does not read. */
nd_status nd_config_each_warning(const nd_config *config,
                                 void (*line)(void *context, const char *text), void *context);

/*
 * How long a healthy program may take to encode the data, on a slow disk: 400 s a GB, eight times
 * as much where they are compressed. 0 for data that are read as they are.
 * Deadlines that wait for the data add it.
 */
double nd_config_data_seconds(const nd_config *config);

/* Whether the records go to this tracker, by its name or by `all`. */
bool nd_config_tracks(const nd_config *config, nd_tracker tracker);

/* The steps of log.profile_steps or log.dump_steps; false: none. A wrong one is found by
 * nd_config_resolve. */
bool nd_config_steps(const char *steps, int64_t *first, int64_t *last);

/*
 * ND_ERR_DATA when a named file does not exist; the message has the key, where it was given, the
 * path and the working directory. The contents are checked by the code that reads the files.
 */
nd_status nd_config_check_model_path(const nd_config *config);
nd_status nd_config_check_data_paths(const nd_config *config);

/* What a program adds to --help. */
typedef struct nd_help_entry {
    const char *flag, *help;
} nd_help_entry;
typedef struct nd_help {
    const char *usage;        /* "ndlaunch [--config-file FILE] [flags]" */
    const nd_help_entry *own; /* its own flags and commands */
    int count;
} nd_help;

/*
 * --help [TOPIC]. Topic "": usage and the flags used most, on one screen. A section's name: its
 * keys with flags, default, range and unit. "all": everything. ND_ERR_CONFIG for another topic.
 */
nd_status nd_config_help(FILE *out, const nd_help *program, const char *topic);

/* The resolved configuration as native YAML: reading it again gives the same config. Owned by the
 * caller. */
nd_status nd_config_to_yaml(const nd_config *config, char **out);
/* The same for a worker, without what it finds by itself if nobody gave it (sequence_given). */
nd_status nd_config_to_worker(const nd_config *config, char **out);

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

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_REPORT_REPORT_H
#define ND_REPORT_REPORT_H
/*
 * Reports of a run, on rank 0: records of steps, validations, FP8 health and events go to several
 * sinks, each in a file of its own (metrics.jsonl, the terminal). A new sink is one more file, and
 * one more line in open.c.
 *
 * metrics.jsonl and the files of TensorBoard are written by a thread (writer.h), so that the run
 * only copies a record. nd_sinks_event waits until everything is written, as does nd_sinks_flush:
 * what follows an event may read metrics.jsonl.
 *
 * A full disk ends no run, nor does one that does not answer: records that cannot be written are
 * lost, later ones are tried again, and a line "records_lost" in metrics.jsonl and a warning say
 * how many. A tracker that fails otherwise is dropped with one warning. A metrics.jsonl that cannot
 * be opened, or was deleted during the run, with which the run folder is gone, is an error.
 *
 * All calls come from the thread of the run. The record of a step allocates nothing.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/comm/comm.h"
#include "runtime/config/config.h"
#include "trainer/layout/layout.h"
#include "trainer/precision/precision.h"
#include "trainer/report/writer.h"

/* Bytes that this rank sent since the groups were made, by purpose (runtime/mesh/mesh.def). */
void nd_traffic_bytes(const nd_groups *groups, int64_t bytes[ND_TRAFFIC_COUNT]);

/* FLOPs of one token of training, forward and backward: 6 N + 6 L H D S (causal attention). */
double nd_flops_per_token_causal(const nd_shape *shape, int64_t sequence);
/* FLOPs of one token as accelerate's examples count them. */
double nd_flops_per_token_accelerate(const nd_shape *shape, int64_t sequence);

/* One of several sources of the training data, or one of several sets of a validation. */
typedef struct nd_source_loss {
    const char *name; /* borrowed; letters, digits, dot, underscore, hyphen */
    double loss;      /* mean over its labels; not a number where there are none */
    int64_t tokens;   /* labels that counted, global */
} nd_source_loss;

typedef struct nd_step_record {
    int64_t step; /* from 1 */
    double loss, grad_norm, lr;
    int64_t tokens;      /* valid labels of the step, global */
    int64_t tokens_seen; /* since the start, global */
    double step_seconds, data_wait_seconds;
    double slowest_seconds, fastest_seconds; /* work of two ranks (nd_work); 0: not known */
    int slowest_rank;
    /* For separate documents, in the samples of this rank and its cp peers: pairs of a query and a
     * key that it sees, those of the cp rank with the most over the mean, and the share of tokens
     * that fill blocks. 0: documents are joined. */
    int64_t visible_pairs;
    double balance, padding;
    double peak_memory_bytes;             /* of this worker */
    int64_t wire_bytes[ND_TRAFFIC_COUNT]; /* sent by this rank in the step */
    bool skipped;                         /* not finite or a spike, and train.nonfinite is skip */
    const nd_source_loss *sources;        /* (source_count); lent for the call */
    int source_count;                     /* 0: the data have one source */
} nd_step_record;

typedef struct nd_validation_record {
    int64_t step; /* after which it was made */
    double loss;
    int64_t tokens; /* labels that counted, global */
    double seconds;
    const nd_source_loss *sets; /* (set_count); lent for the call */
    int set_count;              /* 0: the validation has one set */
    int64_t separate_length;    /* of blocks with separate documents; 0: they are joined */
} nd_validation_record;

typedef struct nd_health_record {
    int64_t step; /* which was counted */
    nd_health_summary summary;
} nd_health_record;

typedef enum nd_run_event_kind {
    ND_RUN_EVENT_MODEL_SAVED = 0,
    ND_RUN_EVENT_CHECKPOINT_SAVED,
    ND_RUN_EVENT_CHECKPOINT_FAILED,
    ND_RUN_EVENT_RESUMED,
    ND_RUN_EVENT_EARLY_STOPPED,
    ND_RUN_EVENT_SAMPLE, /* a text of the model in training, at a validation */
    ND_RUN_EVENT_ENDED,  /* by a signal, or a failure after the start of its first step */
    ND_RUN_EVENT_RECORDS_LOST
} nd_run_event_kind;

typedef struct nd_run_event {
    nd_run_event_kind kind;
    int64_t step;           /* steps done; of a checkpoint: the step whose state it has */
    const char *path;       /* of what was written or loaded, or the prompt of a sample; lent for
                               the call, may be NULL */
    const char *reason;     /* of a checkpoint: "interval", "signal", "end", or why it failed; of a
                               rewind: what its step had; of an early stop and an end: why; of
                               lost records: the first failure; of a sample: what the model wrote
                               behind the prompt, UTF-8 */
    double seconds;         /* until it was durable, or loaded */
    double blocked_seconds; /* that the loop over steps waited for it */
    uint64_t bytes;         /* of the whole checkpoint */
    int64_t restart;        /* resumed: how often ndlaunch has restarted the job */
    int64_t rewound_from;   /* resumed: the step that was not finite or a spike; 0: no rewind */
    int64_t samples;        /* resumed by a rewind: global samples that are passed over */
    const nd_mesh *mesh, *mesh_was; /* resumed on another mesh than before; else NULL; lent */
    const char *sink;               /* records lost: the name of the sink that did not take them */
    int64_t records;                /* records lost: how many */
    nd_status code;                 /* ended: that of the process, which is its exit code */
} nd_run_event;

/* One of these; lent for the call. */
typedef struct nd_record {
    const nd_step_record *step;
    const nd_validation_record *validation;
    const nd_health_record *health;
    const nd_run_event *event;
} nd_record;

/* A function that is NULL: the sink does not take such records. A sink whose function fails is
 * dropped. */
typedef struct nd_sink {
    const char *name; /* for messages; static */
    void *self;       /* owned; NULL: dropped */
    bool has_file;    /* it writes to this file of the writer */
    int file;
    nd_status (*step)(void *self, const nd_step_record *record);
    nd_status (*validation)(void *self, const nd_validation_record *record);
    nd_status (*health)(void *self, const nd_health_record *record);
    nd_status (*event)(void *self, const nd_run_event *event);
    void (*close)(void *self);
} nd_sink;

enum { ND_SINKS_MAX = 5 };

typedef struct nd_sinks {
    nd_sink all[ND_SINKS_MAX]; /* metrics.jsonl is the first */
    int count;                 /* dropped ones included */
    nd_writer *writer;         /* owned */
    int64_t step;              /* of the newest record */
} nd_sinks;                    /* all zero: none */

/* Borrowed until the sinks are closed. */
typedef struct nd_report_options {
    const nd_config *config;
    const nd_shape *shape;
    const char *dir; /* the run folder, exists */
    int world_size;
    int64_t tokens_per_step; /* global positions of a step: what tokens/s counts */
    bool terminal;           /* stderr is a terminal: progress bar on long runs */
    bool continues;          /* metrics.jsonl is appended to */
    nd_writer *writer;       /* nd_sinks_open sets it for the sinks */
} nd_report_options;

/* Opens all sinks. Closes those that were opened when metrics.jsonl or the terminal fails, or when
 * something lies in the run folder in the place of what a tracker makes there (ND_ERR_CANTCREATE).
 * A tracker that fails otherwise is dropped with a warning. wandb and trackio: log.python runs
 * scripts/wandb_sync.py beside the run, once for each (log.trackers). Records that it did not see
 * are in metrics.jsonl, from where wandb_sync.py can send them later. */
nd_status nd_sinks_open(nd_sinks *sinks, const nd_report_options *options);
/* Says that a sink is dropped; the calling thread's error is why. */
void nd_sinks_warn_of_dropped(const char *name);
/* Takes the sink over. */
void nd_sinks_add(nd_sinks *sinks, nd_sink sink);
/* Hands a record of `step`, with one of its members, to all sinks. ND_ERR_CANTCREATE: metrics.jsonl
 * cannot be written. */
nd_status nd_sinks_put(nd_sinks *sinks, int64_t step, nd_record record);
/* Puts the event and waits as nd_sinks_flush does. */
nd_status nd_sinks_event(nd_sinks *sinks, const nd_run_event *event);
/* Waits until everything is written, unless a write hangs. */
nd_status nd_sinks_flush(nd_sinks *sinks);
/* Length of metrics.jsonl, without a look at the disk; 0: there is none. */
int64_t nd_sinks_metrics_bytes(const nd_sinks *sinks);
/* Says how many records were lost, if any, and closes all. */
void nd_sinks_close(nd_sinks *sinks);

/*
 * metrics.jsonl: one line of JSON per record (docs/formats.md). Doubles have 17 digits, so equal
 * runs give equal bytes up to the first time. ND_ERR_CANTCREATE: the folder holds a run already, or
 * the file cannot be created. A run that continues appends to the file, whose last line it cuts off
 * where a dead process left half of one; after its line "resumed", a reader forgets the lines above
 * it that have later steps.
 */
nd_status nd_jsonl_sink_open(const nd_report_options *options, nd_sink *out);
/*
 * The human log: a step line for the first step, every log.interval steps and the last one, whose
 * speed is the mean since the line before; lines of validations and events. On a terminal, runs of
 * more than 20 seconds have a progress bar below; it ends with a carriage return, so that whatever
 * is written next takes its row. Without a terminal the time left is logged now and then.
 */
nd_status nd_terminal_sink_open(const nd_report_options *options, nd_sink *out);

/*
 * TensorBoard: event files in the run's folder tensorboard/ (log.trackers). Each
 * start of a run writes a file of its own; one that is resumed begins it with a mark after which
 * readers forget the steps that are made again. At step 0 lies the configuration as text.
 */
nd_status nd_tensorboard_sink_open(const nd_report_options *options, nd_sink *out);

/* Speed of a step or of the mean of several; all 0 when seconds is 0. */
typedef struct nd_speed {
    double tokens_per_second, tokens_per_second_per_worker;
    double tflops_causal, tflops_accelerate; /* per worker */
} nd_speed;
nd_speed nd_speed_of(const nd_report_options *options, double step_seconds);

/*
 * Text for a person, as pure functions of numbers. Each writes at most `size` bytes with the final
 * NUL and returns its first argument.
 */
/* The record has the mean time of the steps since the last line. Below 120 columns for numbers of
 * usual size. */
char *nd_step_line_format(char *text, size_t size, int64_t steps, const nd_step_record *record,
                          const nd_speed *speed);

/* "[=====> ] 52 % step 520/1000 loss 2.3456 4 min 03 s left": below 80 columns, no newline. */
char *nd_progress_bar_format(char *text, size_t size, int64_t step, int64_t steps, double loss,
                             double seconds_left);

char *nd_duration_format(char *text, size_t size, double seconds); /* "42 s", "4 min 03 s" */
char *nd_quantity_format(char *text, size_t size, double value);   /* "317", "16.3 k", "2.1 M" */
/* Bytes of memory: "17 KiB", "321 MiB", "12.4 GiB". */
char *nd_bytes_format(char *text, size_t size, double bytes);

#endif

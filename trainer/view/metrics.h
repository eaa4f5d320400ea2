// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_METRICS_H
#define ND_VIEW_METRICS_H
/*
 * metrics.jsonl of a run, read back: steps, validations, FP8 health and events in their order
 * (docs/formats.md).
 *
 * The file may have a million lines and hundreds of megabytes, so it is mapped, cut into parts at
 * line ends, and each part is read by a thread of its own. Lines of steps need no tree of JSON.
 * The result does not depend on the number of threads.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/config/sources.h"
#include "runtime/mesh/mesh.h"
#include "trainer/precision/precision.h"

typedef enum nd_metric {
    ND_METRIC_LOSS = 0,
    ND_METRIC_GRAD_NORM,
    ND_METRIC_LR,
    ND_METRIC_STEP_MS,
    ND_METRIC_DATA_WAIT_MS,
    ND_METRIC_SLOWEST_MS, /* work of a step on the rank with the most of it, and with the least */
    ND_METRIC_FASTEST_MS,
    ND_METRIC_SLOWEST_RANK,
    ND_METRIC_TOKENS_PER_SECOND,
    ND_METRIC_TFLOPS, /* of a worker, attention counted as causal */
    ND_METRIC_PEAK_MEMORY,
    ND_METRIC_WIRE,       /* bytes that rank 0 sent, all kinds */
    ND_METRIC_WIRE_KINDS, /* the first of ND_TRAFFIC_COUNT kinds */
    ND_METRIC_COUNT = ND_METRIC_WIRE_KINDS + ND_TRAFFIC_COUNT
} nd_metric;

/* Each entry of a list begins with its step. */
typedef struct nd_metric_row {
    int64_t step;
    double tokens_seen;
    float value[ND_METRIC_COUNT]; /* NaN: not in the line, or null */
    bool skipped;
} nd_metric_row;

typedef struct nd_validation_row {
    int64_t step;
    double loss, tokens, ms; /* NaN as above */
} nd_validation_row;

/* Of one of several sources in a step, or of one of several sets in a validation. */
typedef struct nd_source_row {
    int64_t step;
    double tokens; /* labels that counted */
    float loss;    /* NaN where there are none */
    int source;    /* in the names of the list */
} nd_source_row;

/* What the casts of one operand of one linear lost in a step, in the worst layer. */
typedef struct nd_health_row {
    int64_t step;
    nd_operand_kind operand;
    int linear;
    nd_health_worst worst;
} nd_health_row;

typedef enum nd_metric_event_kind {
    ND_METRIC_EVENT_OTHER = 0, /* of a later version */
    ND_METRIC_EVENT_CHECKPOINT,
    ND_METRIC_EVENT_CHECKPOINT_FAILED,
    ND_METRIC_EVENT_RESUMED,
    ND_METRIC_EVENT_EARLY_STOPPED,
    ND_METRIC_EVENT_RECORDS_LOST,
    ND_METRIC_EVENT_SAMPLE,
    ND_METRIC_EVENT_ENDED
} nd_metric_event_kind;

typedef struct nd_metric_event {
    int64_t step;
    nd_metric_event_kind kind;
    double bytes, save_ms, blocked_ms, load_ms; /* 0: not in the line */
    int64_t restart, rewound_from, passed_over_samples, records, code;
    char name[32];               /* what the line calls it */
    char text[640];              /* its reason, why, or text; cut where it is longer */
    char from[96];               /* resumed: last part of the folder; sample: its prompt */
    char mesh[96], mesh_was[96]; /* resumed on another mesh; else "" */
    char sink[32];               /* that did not take `records` records; else "" */
} nd_metric_event;

/* Names in the order in which the file has them first. */
typedef struct nd_metric_names {
    char (*name)[ND_DATA_SOURCE_NAME]; /* (count) owned */
    int count;
} nd_metric_names;

typedef struct nd_metrics {
    nd_metric_row *rows; /* owned, as all lists are; their steps increase */
    nd_validation_row *validations;
    nd_source_row *sources, *sets;
    nd_health_row *health;
    nd_metric_event *events;
    size_t row_count, validation_count, source_count, set_count, health_count, event_count;
    nd_metric_names source_names, set_names;
    size_t repeated; /* lines of steps that the run made again after it was resumed */
    bool half_line;  /* the last line has no end and does not count */
} nd_metrics;

/*
 * `threads` 0: as many as there are CPUs, for large files. ND_ERR_DATA: no such file, or a damaged
 * line, with its number; ND_ERR_IO.
 */
nd_status nd_metrics_read(const char *path, int threads, nd_metrics *out);
void nd_metrics_fini(nd_metrics *metrics);

#endif

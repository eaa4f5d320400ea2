// SPDX-License-Identifier: Apache-2.0
#ifndef ND_REPORT_REPORT_H
#define ND_REPORT_REPORT_H
/*
 * What a run says of itself: the step line (or progress bar), metrics.jsonl, run.json. Rank 0 only.
 *
 * Doubles are written with 17 digits, so equal runs give equal bytes (fields that hold times or
 * memory aside; they are named in docs/formats.md). Nothing is allocated after nd_metrics_open.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/comm/comm.h"
#include "runtime/config/config.h"
#include "trainer/layout/shape.h"

/* Bytes that this rank sent since the groups were made, by purpose (runtime/mesh/mesh.def). */
void nd_traffic_bytes(const nd_groups *groups, int64_t bytes[ND_TRAFFIC_COUNT]);

typedef struct nd_metrics nd_metrics;

typedef struct nd_step_record {
    int64_t step; /* from 1 */
    double loss, grad_norm, lr;
    int64_t tokens;      /* valid labels of the step, global */
    int64_t tokens_seen; /* since the start, global */
    double step_seconds, data_wait_seconds;
    double peak_memory_bytes;             /* of this worker */
    int64_t wire_bytes[ND_TRAFFIC_COUNT]; /* sent by this rank in the step */
    bool skipped;                         /* not finite, and train.nonfinite is skip */
} nd_step_record;

typedef struct nd_metrics_options {
    const nd_config *config;
    const nd_llama_shape *shape;
    const char *dir; /* the run folder, exists */
    int world_size;
    int64_t tokens_per_step; /* global positions of a step: what tokens/s counts */
    bool terminal;           /* stderr is a terminal: progress bar and time left on long runs */
} nd_metrics_options;

nd_status nd_metrics_open(const nd_metrics_options *options, nd_metrics **out);
void nd_metrics_close(nd_metrics *metrics);
/*
 * A line of metrics.jsonl (ND_ERR_CANTCREATE when the disk takes no more) and, for the first step,
 * every log.interval steps and the last one, a step line whose speed is the mean since the line
 * before. On a terminal, runs of more than 20 seconds have a progress bar below; it ends with a
 * carriage return, so that whatever is written next takes its row.
 */
nd_status nd_metrics_step(nd_metrics *metrics, const nd_step_record *record);
/* {"step": s, "validation_loss": x, ...} and a line on the terminal. */
nd_status nd_metrics_validation(nd_metrics *metrics, int64_t step, double loss, int64_t tokens,
                                double seconds);

/* FLOPs of one token of training (forward and backward). Sources: performance.md 1. */
double nd_flops_per_token_causal(const nd_llama_shape *shape,
                                 int64_t sequence); /* 6 N + 6 L H D S */
double nd_flops_per_token_accelerate(const nd_llama_shape *shape,
                                     int64_t sequence); /* accelerate's count, as it is */

/*
 * Text for a person, as pure functions of numbers. Each writes at most `size` bytes with the final
 * NUL and returns its first argument.
 */
typedef struct nd_step_view {
    int64_t step, steps;
    double loss, grad_norm, lr;
    double step_seconds; /* mean over the steps since the last line */
    double tokens_per_second;
    double tflops; /* per worker, attention counted as causal */
    double peak_memory_bytes;
} nd_step_view;

/* Below 120 columns for numbers of usual size. */
char *nd_step_line_format(char *text, size_t size, const nd_step_view *view);

/* "[=====> ] 52 % step 520/1000 loss 2.3456 4 min 03 s left": below 80 columns, no newline. */
char *nd_progress_bar_format(char *text, size_t size, int64_t step, int64_t steps, double loss,
                             double seconds_left);

char *nd_duration_format(char *text, size_t size, double seconds); /* "42 s", "4 min 03 s" */
char *nd_quantity_format(char *text, size_t size, double value);   /* "317", "16.3 k", "2.1 M" */
char *nd_bytes_format(char *text, size_t size, double bytes);      /* "321 MiB", "12.4 GiB" */

#endif

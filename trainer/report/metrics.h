// SPDX-License-Identifier: Apache-2.0
#ifndef ND_REPORT_METRICS_H
#define ND_REPORT_METRICS_H
/*
 * What a run says of itself: the step line (or progress bar), metrics.jsonl, run.json. Rank 0 only.
 *
 * Doubles are written with 17 digits, so equal runs give equal bytes (fields that hold times or
 * memory aside; they are named in docs/formats.md). Nothing is allocated after nd_metrics_open.
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/config/config.h"
#include "trainer/layout/shape.h"
#include "trainer/report/traffic.h"

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

/* Chooses or checks the run folder: `output.dir`, or runs/<config>-<n>. ND_ERR_CANTCREATE when it
 * holds a run already or cannot be written. Creates it. Owned by the caller. */
nd_status nd_run_folder_create(const nd_config *config, char **out);
/* Before any worker starts: that the folder could be used. A given one is made when it is not
 * there. */
nd_status nd_run_folder_check(const nd_config *config);

/* FLOPs of one token of training (forward and backward). Sources: performance.md 1. */
double nd_flops_per_token_causal(const nd_llama_shape *shape,
                                 int64_t sequence); /* 6 N + 6 L H D S */
double nd_flops_per_token_accelerate(const nd_llama_shape *shape,
                                     int64_t sequence); /* accelerate's count, as it is */

#endif

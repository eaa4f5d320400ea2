// SPDX-License-Identifier: Apache-2.0
#ifndef ND_REPORT_TERMINAL_H
#define ND_REPORT_TERMINAL_H
/*
 * What a person reads while a run goes on, as pure functions from numbers to text: the step line,
 * the progress bar. Each writes at most `size` bytes with the final NUL and returns its first
 * argument.
 */
#include <stddef.h>
#include <stdint.h>

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

/* NaN without the sign that printf would show. */
double nd_plain(double value);

char *nd_duration_format(char *text, size_t size, double seconds); /* "42 s", "4 min 03 s" */
char *nd_quantity_format(char *text, size_t size, double value);   /* "317", "16.3 k", "2.1 M" */
char *nd_bytes_format(char *text, size_t size, double bytes);      /* "321 MiB", "12.4 GiB" */

#endif

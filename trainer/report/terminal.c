// SPDX-License-Identifier: Apache-2.0
#include "trainer/report/report.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "trainer/step/step.h"

enum { SHORT = 32, BAR_WIDTH = 20 };

char *nd_quantity_format(char *text, size_t size, double value)
{
    if (value < 9999.5) {
        snprintf(text, size, "%.0f", value);
    } else if (value < 999.95e3) {
        snprintf(text, size, "%.1f k", value / 1e3);
    } else {
        snprintf(text, size, "%.1f M", value / 1e6);
    }
    return text;
}

char *nd_bytes_format(char *text, size_t size, double bytes)
{
    double mebibytes = bytes / (1 << 20);
    if (mebibytes < 9999.5) {
        snprintf(text, size, "%.0f MiB", mebibytes);
    } else {
        snprintf(text, size, "%.1f GiB", mebibytes / 1024);
    }
    return text;
}

char *nd_duration_format(char *text, size_t size, double seconds)
{
    const int64_t limit = 1000000000;
    int64_t s = seconds >= 0 && seconds < (double)limit ? (int64_t)(seconds + 0.5) : limit;
    if (s < 60) {
        snprintf(text, size, "%d s", (int)s);
    } else if (s < 3600) {
        snprintf(text, size, "%d min %02d s", (int)(s / 60), (int)(s % 60));
    } else if (s < limit) {
        snprintf(text, size, "%d h %02d min", (int)(s / 3600), (int)(s / 60 % 60));
    } else {
        snprintf(text, size, "an unknown time");
    }
    return text;
}

char *nd_step_line_format(char *text, size_t size, const nd_step_view *view)
{
    char all[SHORT], memory[SHORT];
    bool slow = view->step_seconds >= 10;
    snprintf(text, size,
             "step %lld/%lld  loss %.4f  norm %.3f  lr %.2e  %.*f %s  %s tok/s  "
             "%.*f TFLOP/s/worker  peak %s",
             (long long)view->step, (long long)view->steps, nd_positive_nan(view->loss),
             nd_positive_nan(view->grad_norm), view->lr,
             slow                        ? 1
             : view->step_seconds < 0.01 ? 2
                                         : 0,
             view->step_seconds * (slow ? 1 : 1e3), slow ? "s" : "ms",
             nd_quantity_format(all, sizeof all, view->tokens_per_second),
             view->tflops < 10 ? 3 : 1, view->tflops,
             nd_bytes_format(memory, sizeof memory, view->peak_memory_bytes));
    return text;
}

char *nd_progress_bar_format(char *text, size_t size, int64_t step, int64_t steps, double loss,
                             double seconds_left)
{
    char bar[BAR_WIDTH + 1], left[SHORT];
    double part = steps > 0 ? (double)step / (double)steps : 1;
    int filled = (int)floor(part * BAR_WIDTH);
    memset(bar, ' ', BAR_WIDTH);
    memset(bar, '=', (size_t)filled);
    if (filled < BAR_WIDTH) {
        bar[filled] = '>';
    }
    bar[BAR_WIDTH] = '\0';
    snprintf(text, size, "[%s] %3d %%  step %lld/%lld  loss %.4f  %s left", bar, (int)(part * 100),
             (long long)step, (long long)steps, nd_positive_nan(loss),
             nd_duration_format(left, sizeof left, seconds_left));
    return text;
}

// SPDX-License-Identifier: Apache-2.0
/* The sink for a person who watches the run: the step line and the progress bar. */
#include "trainer/report/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/printable.h"
#include "trainer/step/step.h"

enum { SHORT = 32, BAR_WIDTH = 20, LINE_MAX_BYTES = 1024 };

static const double bar_period_seconds = 0.1;
static const double long_run_seconds = 20; /* shorter runs get no bar */
/* Without a terminal the time left is logged after this, and again after as much as has gone by, at
 * most an hour. */
static const double first_left_seconds = 60, largest_left_seconds = 3600;

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
    if (mebibytes < 0.95) {
        snprintf(text, size, "%.0f KiB", bytes / 1024);
    } else if (mebibytes < 9999.5) {
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

char *nd_step_line_format(char *text, size_t size, int64_t steps, const nd_step_record *r,
                          const nd_speed *speed)
{
    char all[SHORT], memory[SHORT], learned[LINE_MAX_BYTES] = "no labels";
    const double seconds = r->step_seconds;
    const bool slow = seconds >= 10;
    if (r->tokens > 0) {
        snprintf(learned, sizeof learned, "loss %.4f  norm %.3f", nd_positive_nan(r->loss),
                 nd_positive_nan(r->grad_norm));
    }
    snprintf(text, size,
             "step %lld/%lld  %s  lr %.2e  %.*f %s  %s tok/s  "
             "%.*f TFLOP/s/worker  peak %s",
             (long long)r->step, (long long)steps, learned, r->lr,
             slow             ? 1
             : seconds < 0.01 ? 2
                              : 0,
             seconds * (slow ? 1 : 1e3), slow ? "s" : "ms",
             nd_quantity_format(all, sizeof all, speed->tokens_per_second),
             speed->tflops_causal < 10 ? 3 : 1, speed->tflops_causal,
             nd_bytes_format(memory, sizeof memory, r->peak_memory_bytes));
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

typedef struct terminal {
    nd_report_options options;
    int64_t steps, interval;
    bool bar_shown;
    double bar_drawn_at;   /* nd_clock_seconds of the last drawing */
    double smooth_seconds; /* of a step: moving mean, for the time left */
    double window_seconds; /* steps since the last line */
    int64_t window_steps;
    double run_seconds;  /* of all steps so far */
    double next_left_at; /* run_seconds at which the time left is logged next */
} terminal;

/* A line of the human log must not be mixed with what is left of the bar on that row. */
static void clear_bar(terminal *s)
{
    static const char erase[] = "\033[K";
    if (s->bar_shown) {
        s->bar_shown = false;
        (void)nd_log_write(erase, sizeof erase - 1);
    }
}

static void draw_bar(terminal *s, const nd_step_record *r)
{
    double left = s->smooth_seconds * (double)(s->steps - r->step);
    double whole = s->smooth_seconds * (double)s->steps;
    double now = nd_clock_seconds();
    if (!s->options.terminal || s->steps == r->step || whole < long_run_seconds || r->tokens == 0 ||
        now - s->bar_drawn_at < bar_period_seconds || nd_log_get_level() < ND_LOG_INFO) {
        return;
    }
    char text[128], row[160];
    nd_progress_bar_format(text, sizeof text, r->step, s->steps, r->loss, left);
    /* The cursor goes back to the first column: whatever is written next takes the row. */
    int length = snprintf(row, sizeof row, "%s\033[K\r", text);
    s->bar_shown = nd_log_write(row, (size_t)length);
    s->bar_drawn_at = now;
}

static void log_time_left(terminal *s, const nd_step_record *r)
{
    char text[64];
    s->run_seconds += r->step_seconds;
    if (s->options.terminal || s->steps == r->step || s->run_seconds < s->next_left_at) {
        return;
    }
    nd_log_info(
        "step %lld/%lld  about %s left", (long long)r->step, (long long)s->steps,
        nd_duration_format(text, sizeof text, s->smooth_seconds * (double)(s->steps - r->step)));
    s->next_left_at = s->run_seconds + fmin(s->run_seconds, largest_left_seconds);
}

static nd_status show_step(void *self, const nd_step_record *r)
{
    terminal *s = self;
    const double weight = 0.1; /* of the newest step in the moving mean */
    s->smooth_seconds = s->smooth_seconds > 0
                            ? (1 - weight) * s->smooth_seconds + weight * r->step_seconds
                            : r->step_seconds;
    s->window_seconds += r->step_seconds;
    s->window_steps++;
    if (r->step == 1 || r->step % s->interval == 0 || r->step == s->steps) {
        char line[LINE_MAX_BYTES];
        nd_step_record mean = *r;
        mean.step_seconds = s->window_seconds / (double)s->window_steps;
        const nd_speed speed = nd_speed_of(&s->options, mean.step_seconds);
        clear_bar(s);
        nd_log_info("%s", nd_step_line_format(line, sizeof line, s->steps, &mean, &speed));
        s->window_seconds = 0;
        s->window_steps = 0;
    }
    draw_bar(s, r);
    log_time_left(s, r);
    return ND_OK;
}

static nd_status show_validation(void *self, const nd_validation_record *r)
{
    terminal *s = self;
    clear_bar(s);
    nd_log_info("step %lld/%lld  validation loss %.4f over %lld tokens in %.1f s",
                (long long)r->step, (long long)s->steps, nd_positive_nan(r->loss),
                (long long)r->tokens, r->seconds);
    for (int i = 0; i < r->set_count; i++) {
        nd_log_info("  %s: %.4f over %lld tokens", r->sets[i].name,
                    nd_positive_nan(r->sets[i].loss), (long long)r->sets[i].tokens);
    }
    return ND_OK;
}

static nd_status show_event(void *self, const nd_run_event *event)
{
    char bytes[SHORT], prompt[LINE_MAX_BYTES / 2], text[LINE_MAX_BYTES];
    clear_bar(self);
    switch (event->kind) {
    case ND_RUN_EVENT_MODEL_SAVED:
        nd_log_info("model saved: %s", event->path);
        break;
    case ND_RUN_EVENT_CHECKPOINT_SAVED:
        nd_log_info("checkpoint of step %lld saved: %s, %s, durable after %.2f s, of which the "
                    "steps waited %.0f ms",
                    (long long)event->step, event->path,
                    nd_file_bytes_format(bytes, sizeof bytes, (double)event->bytes), event->seconds,
                    event->blocked_seconds * 1e3);
        break;
    case ND_RUN_EVENT_CHECKPOINT_FAILED: /* the rank that has the reason says it */
    case ND_RUN_EVENT_RECORDS_LOST:      /* said by sinks.c, at every level of the log */
    case ND_RUN_EVENT_ENDED:             /* the process says it */
        break;
    case ND_RUN_EVENT_SAMPLE:
        nd_escape(prompt, sizeof prompt, event->path, "");
        nd_escape(text, sizeof text, event->reason, "");
        nd_log_info("sample after step %lld: \"%s\" goes on \"%s\"", (long long)event->step, prompt,
                    text);
        break;
    case ND_RUN_EVENT_EARLY_STOPPED:
        nd_log_info("early stop after step %lld: %s", (long long)event->step, event->reason);
        break;
    case ND_RUN_EVENT_RESUMED:
        if (event->rewound_from > 0) {
            nd_log_warning("step %lld was not finite, so the run goes on after step %lld from %s; "
                           "%lld samples are passed over",
                           (long long)event->rewound_from, (long long)event->step, event->path,
                           (long long)event->samples);
            break;
        }
        nd_log_info("resumed after step %lld from %s, in %.2f s", (long long)event->step,
                    event->path, event->seconds);
        if (event->mesh_was) {
            char mesh[128], was[128];
            nd_log_info("the mesh was %s and is %s",
                        nd_mesh_format(event->mesh_was, was, sizeof was),
                        nd_mesh_format(event->mesh, mesh, sizeof mesh));
        }
        break;
    }
    return ND_OK;
}

static void close_terminal(void *self)
{
    clear_bar(self);
    free(self);
}

nd_status nd_terminal_sink_open(const nd_report_options *options, nd_sink *out)
{
    terminal *s = NULL;
    ND_TRY(ND_ALLOC(1, &s));
    s->options = *options;
    s->steps = options->config->train.steps;
    s->interval = options->config->log.interval > 0 ? options->config->log.interval : 1;
    s->next_left_at = first_left_seconds;
    *out = (nd_sink){.name = "the terminal",
                     .self = s,
                     .step = show_step,
                     .validation = show_validation,
                     .event = show_event,
                     .close = close_terminal};
    return ND_OK;
}

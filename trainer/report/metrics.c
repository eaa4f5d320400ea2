// SPDX-License-Identifier: Apache-2.0
#include "trainer/report/report.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fsio.h"
#include "runtime/base/log.h"
#include "trainer/step/step.h"

enum { LINE_MAX_BYTES = 1024 };
static const double bar_period_seconds = 0.1;
static const double long_run_seconds = 20; /* shorter runs get no bar */
/* Without a terminal the time left is said after this, and again after as much as has gone by, at
 * most an hour. */
static const double first_left_seconds = 60, largest_left_seconds = 3600;

struct nd_metrics {
    int fd; /* metrics.jsonl */
    char *path;
    int64_t steps, interval;
    int world_size;
    int64_t tokens_per_step;
    double flops_causal, flops_accelerate; /* per token */
    bool terminal;
    bool bar_shown;
    double bar_drawn_at;   /* nd_clock_seconds of the last drawing */
    double smooth_seconds; /* of a step: moving mean, for the time left */
    double window_seconds; /* steps since the last line */
    double run_seconds;    /* of all steps so far */
    double say_left_at;    /* run_seconds at which the time left is said next */
    int64_t window_steps;
};

nd_status nd_metrics_open(const nd_metrics_options *options, nd_metrics **out)
{
    nd_metrics *m = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &m));
    m->fd = -1;
    status = nd_fs_format(&m->path, "%s/metrics.jsonl", options->dir);
    if (status != ND_OK) {
        goto fail;
    }
    m->fd = open(m->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (m->fd < 0) {
        status = nd_fail(ND_ERR_CANTCREATE,
                         "%s cannot be created: %s. Give another folder as output.dir.", m->path,
                         errno == EEXIST ? "the folder already holds a run" : strerror(errno));
        goto fail;
    }
    m->steps = options->config->train.steps;
    m->interval = options->config->log.interval > 0 ? options->config->log.interval : 1;
    m->world_size = options->world_size;
    m->tokens_per_step = options->tokens_per_step;
    m->terminal = options->terminal;
    m->say_left_at = first_left_seconds;
    int64_t sequence = options->config->train.sequence_length;
    m->flops_causal = nd_flops_per_token_causal(options->shape, sequence);
    m->flops_accelerate = nd_flops_per_token_accelerate(options->shape, sequence);
    *out = m;
    return ND_OK;
fail:
    free(m->path);
    free(m);
    return status;
}

/* A line of the human log must not be mixed with what is left of the bar on that row. */
static void clear_bar(nd_metrics *m)
{
    static const char erase[] = "\033[K";
    if (m->bar_shown) {
        m->bar_shown = false;
        ssize_t written = write(STDERR_FILENO, erase, sizeof erase - 1);
        (void)written; /* a closed terminal must not stop training */
    }
}

void nd_metrics_close(nd_metrics *m)
{
    if (!m) {
        return;
    }
    clear_bar(m);
    close(m->fd);
    free(m->path);
    free(m);
}

/* One write per line, so that a reader who follows the file sees whole lines; more only when the
 * disk takes part of it. A part that stays alone is taken back. */
static nd_status append_line(nd_metrics *m, const char *line, int length)
{
    ND_ASSERT(length > 0 && length < LINE_MAX_BYTES);
    for (int done = 0; done < length;) {
        ssize_t n = write(m->fd, line + done, (size_t)(length - done));
        if (n > 0) {
            done += (int)n;
        } else if (n == 0 || errno != EINTR) {
            const char *why = n == 0 ? "nothing was taken" : strerror(errno);
            off_t end = lseek(m->fd, 0, SEEK_END);
            bool whole = done == 0 || (end >= done && ftruncate(m->fd, end - done) == 0);
            return nd_fail(ND_ERR_CANTCREATE,
                           "%s cannot be written: %s%s. Free some space there, or give another "
                           "folder as output.dir.",
                           m->path, why, whole ? "" : ", and its last line is cut off");
        }
    }
    return ND_OK;
}

/* 17 digits give the same double back. JSON has no NaN and no infinity. */
static const char *number(char text[32], double value)
{
    if (isfinite(value)) {
        snprintf(text, 32, "%.17g", value);
    } else {
        snprintf(text, 32, "null");
    }
    return text;
}

/* {"weights":1,"gradients":2,...}; returns their sum. */
static int64_t wire_object(char text[256], const int64_t bytes[ND_TRAFFIC_COUNT])
{
    int64_t sum = 0;
    int used = 0;
    for (nd_traffic_kind k = 0; k < ND_TRAFFIC_COUNT; k++) {
        sum += bytes[k];
        used += snprintf(text + used, 256 - (size_t)used, "%s\"%s\":%lld", k == 0 ? "{" : ",",
                         nd_traffic_name(k), (long long)bytes[k]);
    }
    snprintf(text + used, 256 - (size_t)used, "}");
    return sum;
}

static nd_status write_step(nd_metrics *m, const nd_step_record *r, double tokens_per_second)
{
    char line[LINE_MAX_BYTES], t[10][32], wire[256];
    double each = tokens_per_second / m->world_size;
    int64_t wire_bytes = wire_object(wire, r->wire_bytes);
    int length = snprintf(
        line, sizeof line,
        "{\"step\":%lld,%s\"loss\":%s,\"grad_norm\":%s,\"lr\":%s,\"tokens\":%lld,"
        "\"tokens_seen\":%lld,\"wire_bytes\":%lld,\"wire\":%s,\"step_ms\":%s,\"data_wait_ms\":%s,"
        "\"tokens_per_second\":%s,\"tokens_per_second_per_worker\":%s,"
        "\"tflops_per_worker_causal\":%s,\"tflops_per_worker_accelerate\":%s,"
        "\"peak_memory_bytes\":%.0f}\n",
        (long long)r->step, r->skipped ? "\"skipped\":true," : "", number(t[0], r->loss),
        number(t[1], r->grad_norm), number(t[2], r->lr), (long long)r->tokens,
        (long long)r->tokens_seen, (long long)wire_bytes, wire, number(t[3], r->step_seconds * 1e3),
        number(t[4], r->data_wait_seconds * 1e3), number(t[5], tokens_per_second),
        number(t[6], each), number(t[7], each * m->flops_causal * 1e-12),
        number(t[8], each * m->flops_accelerate * 1e-12), r->peak_memory_bytes);
    return append_line(m, line, length);
}

static void draw_bar(nd_metrics *m, const nd_step_record *r)
{
    double left = m->smooth_seconds * (double)(m->steps - r->step);
    double whole = m->smooth_seconds * (double)m->steps;
    double now = nd_clock_seconds();
    if (!m->terminal || m->steps == r->step || whole < long_run_seconds ||
        now - m->bar_drawn_at < bar_period_seconds || nd_log_get_level() < ND_LOG_INFO) {
        return;
    }
    char text[128], row[160];
    nd_progress_bar_format(text, sizeof text, r->step, m->steps, r->loss, left);
    /* The cursor goes back to the first column: whatever is written next takes the row. */
    int length = snprintf(row, sizeof row, "%s\033[K\r", text);
    m->bar_shown = write(STDERR_FILENO, row, (size_t)length) == length;
    m->bar_drawn_at = now;
}

static void say_time_left(nd_metrics *m, const nd_step_record *r)
{
    char text[64];
    m->run_seconds += r->step_seconds;
    if (m->terminal || m->steps == r->step || m->run_seconds < m->say_left_at) {
        return;
    }
    nd_log_info(
        "step %lld/%lld  about %s left", (long long)r->step, (long long)m->steps,
        nd_duration_format(text, sizeof text, m->smooth_seconds * (double)(m->steps - r->step)));
    m->say_left_at = m->run_seconds + fmin(m->run_seconds, largest_left_seconds);
}

nd_status nd_metrics_step(nd_metrics *m, const nd_step_record *r)
{
    double rate = r->step_seconds > 0 ? (double)m->tokens_per_step / r->step_seconds : 0;
    ND_TRY(write_step(m, r, rate));
    const double weight = 0.1; /* of the newest step in the moving mean */
    m->smooth_seconds = m->smooth_seconds > 0
                            ? (1 - weight) * m->smooth_seconds + weight * r->step_seconds
                            : r->step_seconds;
    m->window_seconds += r->step_seconds;
    m->window_steps++;
    if (r->step == 1 || r->step % m->interval == 0 || r->step == m->steps) {
        double seconds = m->window_seconds / (double)m->window_steps;
        double all = seconds > 0 ? (double)m->tokens_per_step / seconds : 0;
        double each = all / m->world_size;
        nd_step_view view = {.step = r->step,
                             .steps = m->steps,
                             .loss = r->loss,
                             .grad_norm = r->grad_norm,
                             .lr = r->lr,
                             .step_seconds = seconds,
                             .tokens_per_second = all,
                             .tflops = each * m->flops_causal * 1e-12,
                             .peak_memory_bytes = r->peak_memory_bytes};
        char line[LINE_MAX_BYTES];
        clear_bar(m);
        nd_log_info("%s", nd_step_line_format(line, sizeof line, &view));
        m->window_seconds = 0;
        m->window_steps = 0;
    }
    draw_bar(m, r);
    say_time_left(m, r);
    return ND_OK;
}

nd_status nd_metrics_validation(nd_metrics *m, int64_t step, double loss, int64_t tokens,
                                double seconds)
{
    char line[LINE_MAX_BYTES], t[2][32];
    int length = snprintf(line, sizeof line,
                          "{\"step\":%lld,\"validation_loss\":%s,\"validation_tokens\":%lld,"
                          "\"validation_ms\":%s}\n",
                          (long long)step, number(t[0], loss), (long long)tokens,
                          number(t[1], seconds * 1e3));
    ND_TRY(append_line(m, line, length));
    clear_bar(m);
    nd_log_info("step %lld/%lld  validation loss %.4f over %lld tokens in %.1f s", (long long)step,
                (long long)m->steps, nd_positive_nan(loss), (long long)tokens, seconds);
    return ND_OK;
}

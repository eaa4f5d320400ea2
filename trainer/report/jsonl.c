// SPDX-License-Identifier: Apache-2.0
/* The sink that writes metrics.jsonl. */
#include "trainer/report/report.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/printable.h"
#include "runtime/config/sources.h"

/* The bytes of a line without losses of sources, of one with them, each at most 160 bytes, and of a
 * text in a line. */
enum {
    LINE_MAX_BYTES = 1024,
    LONG_LINE_BYTES = LINE_MAX_BYTES + 160 * ND_DATA_SOURCES_MAX,
    TEXT_BYTES = 640
};

typedef struct jsonl {
    nd_report_options options;
    int file;
    size_t used; /* bytes of the line that is made */
    char line[LONG_LINE_BYTES];
} jsonl;

/* Members of a line. */

static void put_formatted(jsonl *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put_formatted(jsonl *s, const char *format, ...)
{
    const size_t room = sizeof s->line - s->used;
    va_list args;
    va_start(args, format);
    const int length = vsnprintf(s->line + s->used, room, format, args);
    va_end(args);
    ND_ASSERT(length >= 0 && (size_t)length < room);
    s->used += (size_t)length;
}

static void put_key(jsonl *s, const char *key)
{
    put_formatted(s, "%s\"%s\":", s->line[s->used - 1] == '{' ? "" : ",", key);
}

static void put_int(jsonl *s, const char *key, int64_t value)
{
    put_key(s, key);
    put_formatted(s, "%lld", (long long)value);
}

/* 17 digits give the same double back. JSON has no NaN and no infinity. */
static void put_number(jsonl *s, const char *key, double value)
{
    put_key(s, key);
    put_formatted(s, isfinite(value) ? "%.17g" : "null", value);
}

/* NULL is "". Bytes that are no UTF-8 become '?'; those that have no room in `capacity` bytes are
 * left out. */
static void put_text(jsonl *s, const char *key, const char *text, size_t capacity)
{
    const size_t size = text ? strlen(text) : 0;
    size_t at = 0;
    put_key(s, key);
    put_formatted(s, "\"");
    for (const size_t end = s->used + capacity - 13; at < size && s->used < end;) {
        unsigned code = '?';
        const int n = nd_utf8_decode(text + at, size - at, &code);
        if (n <= 0 || code < 0x20 || code == '"' || code == '\\') {
            put_formatted(s, "\\u%04x", n > 0 ? code : '?');
        } else {
            put_formatted(s, "%.*s", n, text + at);
        }
        at += n > 0 ? (size_t)n : 1;
    }
    put_formatted(s, "%s\"", at < size ? "..." : "");
}

/* The members that follow are those of an object, up to a "}". */
static void put_object(jsonl *s, const char *key)
{
    put_key(s, key);
    put_formatted(s, "{");
}

/* An object of losses and one of tokens, by the names of the sources; neither without sources. */
static void put_sources(jsonl *s, const nd_source_loss *list, int count, const char *losses,
                        const char *tokens)
{
    if (count == 0) {
        return;
    }
    put_object(s, losses);
    for (int i = 0; i < count; i++) {
        put_number(s, list[i].name, list[i].loss);
    }
    put_formatted(s, "}");
    put_object(s, tokens);
    for (int i = 0; i < count; i++) {
        put_int(s, list[i].name, list[i].tokens);
    }
    put_formatted(s, "}");
}

static void begin_line(jsonl *s)
{
    s->used = 0;
    put_formatted(s, "{");
}

/* The weight is that of nd_writer_put. */
static nd_status end_line(jsonl *s, int64_t weight)
{
    put_formatted(s, "}\n");
    nd_writer_put(s->options.writer, s->file, s->line, s->used, weight);
    return ND_OK;
}

/* Records. */

static nd_status write_step(void *self, const nd_step_record *r)
{
    jsonl *s = self;
    const nd_speed speed = nd_speed_of(&s->options, r->step_seconds);
    int64_t sent = 0;
    for (int k = 0; k < ND_TRAFFIC_COUNT; k++) {
        sent += r->wire_bytes[k];
    }
    begin_line(s);
    put_int(s, "step", r->step);
    if (r->skipped) {
        put_key(s, "skipped");
        put_formatted(s, "true");
    }
    put_number(s, "loss", r->loss);
    put_number(s, "grad_norm", r->grad_norm);
    put_number(s, "lr", r->lr);
    put_int(s, "tokens", r->tokens);
    put_int(s, "tokens_seen", r->tokens_seen);
    put_sources(s, r->sources, r->source_count, "source_loss", "source_tokens");
    put_int(s, "wire_bytes", sent);
    put_object(s, "wire");
    for (nd_traffic_kind k = 0; k < ND_TRAFFIC_COUNT; k++) {
        put_int(s, nd_traffic_name(k), r->wire_bytes[k]);
    }
    put_formatted(s, "}");
    if (r->visible_pairs > 0) {
        put_int(s, "visible_pairs", r->visible_pairs);
        put_number(s, "balance", r->balance);
        put_number(s, "padding", r->padding);
    }
    put_number(s, "step_ms", r->step_seconds * 1e3);
    put_number(s, "data_wait_ms", r->data_wait_seconds * 1e3);
    if (r->slowest_seconds > 0) {
        put_number(s, "slowest_ms", r->slowest_seconds * 1e3);
        put_number(s, "fastest_ms", r->fastest_seconds * 1e3);
        put_int(s, "slowest_rank", r->slowest_rank);
    }
    put_number(s, "tokens_per_second", speed.tokens_per_second);
    put_number(s, "tokens_per_second_per_worker", speed.tokens_per_second_per_worker);
    put_number(s, "tflops_per_worker_causal", speed.tflops_causal);
    put_number(s, "tflops_per_worker_accelerate", speed.tflops_accelerate);
    put_key(s, "peak_memory_bytes");
    put_formatted(s, "%.0f", r->peak_memory_bytes);
    return end_line(s, 1);
}

static nd_status write_validation(void *self, const nd_validation_record *r)
{
    jsonl *s = self;
    begin_line(s);
    put_int(s, "step", r->step);
    put_number(s, "validation_loss", r->loss);
    put_int(s, "validation_tokens", r->tokens);
    if (r->separate_length > 0) {
        put_int(s, "separate_length", r->separate_length);
    }
    put_sources(s, r->sets, r->set_count, "validation_set_loss", "validation_set_tokens");
    put_number(s, "validation_ms", r->seconds * 1e3);
    return end_line(s, 1);
}

/* {"step":10,"fp8_health":{"input":{"self_attn.q_proj":{...},...},"weight":{...},...}}. Linears in
 * BF16 are left out. A linear takes at most 250 bytes. */
static nd_status write_health(void *self, const nd_health_record *r)
{
    jsonl *s = self;
    begin_line(s);
    put_int(s, "step", r->step);
    put_object(s, "fp8_health");
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        put_object(s, nd_operand_name((nd_operand_kind)kind));
        for (int linear = 0; linear < ND_LINEAR_COUNT; linear++) {
            const nd_health_worst *w = &r->summary.worst[kind][linear];
            if (w->amax_layer >= 0) {
                put_object(s, nd_linears[linear].module);
                put_number(s, "underflow", w->underflow);
                put_int(s, "underflow_layer", w->underflow_layer);
                put_number(s, "saturation", w->saturation);
                put_int(s, "saturation_layer", w->saturation_layer);
                put_number(s, "amax", w->amax);
                put_int(s, "amax_layer", w->amax_layer);
                put_formatted(s, "}");
            }
        }
        put_formatted(s, "}");
    }
    put_formatted(s, "}");
    return end_line(s, 1);
}

static void put_resume(jsonl *s, const nd_run_event *e)
{
    char mesh[128];
    put_text(s, "from", e->path, TEXT_BYTES);
    put_int(s, "restart", e->restart);
    put_number(s, "load_ms", e->seconds * 1e3);
    if (e->rewound_from > 0) {
        put_int(s, "rewound_from", e->rewound_from);
        put_int(s, "passed_over_samples", e->samples);
        put_text(s, "why", e->reason, TEXT_BYTES);
    } else if (e->mesh_was) {
        put_text(s, "mesh", nd_mesh_format(e->mesh, mesh, sizeof mesh), sizeof mesh);
        put_text(s, "mesh_was", nd_mesh_format(e->mesh_was, mesh, sizeof mesh), sizeof mesh);
    }
}

static nd_status write_event(void *self, const nd_run_event *e)
{
    static const char *const names[] = {[ND_RUN_EVENT_CHECKPOINT_SAVED] = "checkpoint",
                                        [ND_RUN_EVENT_CHECKPOINT_FAILED] = "checkpoint_failed",
                                        [ND_RUN_EVENT_RESUMED] = "resumed",
                                        [ND_RUN_EVENT_EARLY_STOPPED] = "early_stopped",
                                        [ND_RUN_EVENT_SAMPLE] = "sample",
                                        [ND_RUN_EVENT_ENDED] = "ended",
                                        [ND_RUN_EVENT_RECORDS_LOST] = "records_lost"};
    jsonl *s = self;
    char why[TEXT_BYTES];
    begin_line(s);
    put_text(s, "event", names[e->kind], TEXT_BYTES);
    put_int(s, "step", e->step);
    switch (e->kind) {
    case ND_RUN_EVENT_MODEL_SAVED:
        return ND_OK;
    case ND_RUN_EVENT_CHECKPOINT_SAVED:
        put_text(s, "reason", e->reason, TEXT_BYTES);
        put_int(s, "bytes", (int64_t)e->bytes);
        put_number(s, "save_ms", e->seconds * 1e3);
        put_number(s, "blocked_ms", e->blocked_seconds * 1e3);
        break;
    case ND_RUN_EVENT_SAMPLE:
        put_text(s, "prompt", e->path, LONG_LINE_BYTES / 4);
        put_text(s, "text", e->reason, LONG_LINE_BYTES / 2);
        break;
    case ND_RUN_EVENT_ENDED:
        put_int(s, "code", e->code);
        put_text(s, "why", e->reason, TEXT_BYTES);
        break;
    case ND_RUN_EVENT_CHECKPOINT_FAILED:
    case ND_RUN_EVENT_EARLY_STOPPED:
        put_text(s, "why", e->reason, TEXT_BYTES);
        break;
    case ND_RUN_EVENT_RECORDS_LOST:
        snprintf(why, sizeof why, "%lld records did not go to %s: %s", (long long)e->records,
                 e->sink, e->reason);
        put_text(s, "sink", e->sink, TEXT_BYTES);
        put_int(s, "records", e->records);
        put_text(s, "why", why, TEXT_BYTES);
        return end_line(s, e->records);
    case ND_RUN_EVENT_RESUMED:
        put_resume(s, e);
        return end_line(s, 0); /* what a reader forgets depends on it */
    }
    return end_line(s, 1);
}

/* Cuts off what a dead process left of a line. */
static nd_status cut_half_line(int fd, const char *path, char tail[LONG_LINE_BYTES])
{
    off_t end = lseek(fd, 0, SEEK_END);
    off_t from = end > LONG_LINE_BYTES ? end - LONG_LINE_BYTES : 0;
    ssize_t n = pread(fd, tail, (size_t)(end - from), from);
    if (n < 0 || n != end - from) {
        return nd_fail(ND_ERR_IO, "%s cannot be read: %s", path, strerror(errno));
    }
    while (n > 0 && tail[n - 1] != '\n') {
        n--;
    }
    if (from + n < end && ftruncate(fd, from + n) != 0) {
        return nd_fail(ND_ERR_CANTCREATE, "%s cannot be written: %s", path, strerror(errno));
    }
    return ND_OK;
}

nd_status nd_jsonl_sink_open(const nd_report_options *options, nd_sink *out)
{
    jsonl *s = NULL;
    char *path = NULL;
    int fd = -1;
    nd_status status = ND_OK;
    ND_TRY_OUT(ND_ALLOC(1, &s));
    s->options = *options;
    ND_TRY_OUT(nd_fs_format(&path, "%s/metrics.jsonl", options->dir));
    /* A link is not followed: a resume cuts the file, and would cut that of somebody else. */
    fd = nd_fs_update(path, options->continues ? O_APPEND : O_APPEND | O_EXCL);
    if (fd < 0) {
        status = nd_fail(ND_ERR_CANTCREATE,
                         "%s cannot be created: %s; give another folder with --save-dir", path,
                         errno == EEXIST ? "the folder already holds a run" : nd_fs_reason(errno));
        goto out;
    }
    ND_TRY_OUT(options->continues ? cut_half_line(fd, path, s->line) : ND_OK);
    status = nd_writer_add(options->writer, "metrics.jsonl", path, fd, true, &s->file);
    fd = -1;
    ND_TRY_OUT(status);
    *out = (nd_sink){.name = "metrics.jsonl",
                     .self = s,
                     .has_file = true,
                     .file = s->file,
                     .step = write_step,
                     .validation = write_validation,
                     .health = write_health,
                     .event = write_event,
                     .close = free};
    s = NULL;
out:
    if (fd >= 0) {
        close(fd);
    }
    free(path);
    free(s);
    return status;
}

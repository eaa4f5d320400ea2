// SPDX-License-Identifier: Apache-2.0
/* The sink that writes metrics.jsonl. */
#include "trainer/report/report.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/printable.h"
#include "runtime/config/sources.h"

/* The bytes of a line without losses of sources, and of one with them, each at most 160 bytes. */
enum { LINE_MAX_BYTES = 1024, LONG_LINE_BYTES = LINE_MAX_BYTES + 160 * ND_DATA_SOURCES_MAX };

typedef struct jsonl {
    nd_report_options options;
    int fd;
    bool counts_links;  /* the file system says how many names a file has */
    char *path;         /* owned */
    atomic_llong bytes; /* of whole lines in the file */
    off_t torn;         /* where a part of a line begins that could not be removed; -1: nowhere */
    int64_t owed_step;  /* of the line in owed */
    char owed[2 * LINE_MAX_BYTES]; /* a line "resumed" that could not be written; "": none */
    char line[LONG_LINE_BYTES], sources[LONG_LINE_BYTES];
} jsonl;

static bool has_name(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 && st.st_nlink > 0;
}

/* The disk does not take a line: the run goes on without it. */
static nd_status fail_write(const jsonl *s, const char *why)
{
    return nd_fail(ND_ERR_IO, "%s cannot be written: %s; free some space there", s->path, why);
}

/* Removes a part of a line, so that a later line does not continue it. */
static nd_status remove_torn(jsonl *s)
{
    if (s->torn >= 0 && ftruncate(s->fd, s->torn) != 0) {
        return fail_write(s, strerror(errno));
    }
    s->torn = -1;
    return ND_OK;
}

/*
 * Writes each line with one call, so that a reader who follows the file sees whole lines; a second
 * call is needed only when the disk takes a part of the line. When the rest does not fit, the part
 * that was written is removed.
 */
static nd_status write_line(jsonl *s, const char *line, int length)
{
    for (int done = 0; done < length;) {
        ssize_t n = write(s->fd, line + done, (size_t)(length - done));
        if (n > 0) {
            done += (int)n;
        } else if (n == 0 || errno != EINTR) {
            nd_status status = fail_write(s, n == 0 ? "nothing was taken" : strerror(errno));
            const nd_error error = *nd_error_last();
            s->torn = done > 0 ? lseek(s->fd, 0, SEEK_END) - done : -1;
            (void)remove_torn(s);
            nd_error_restore(&error);
            return status;
        }
    }
    atomic_fetch_add(&s->bytes, length);
    return ND_OK;
}

static nd_status append_line(jsonl *s, const char *line, int length)
{
    ND_ASSERT(length > 0 && length < LONG_LINE_BYTES);
    if (s->counts_links && !has_name(s->fd)) {
        return nd_fail(ND_ERR_CANTCREATE,
                       "%s was deleted during the run; leave the run folder alone until its run "
                       "has ended",
                       s->path);
    }
    ND_TRY(remove_torn(s));
    if (s->owed[0]) {
        ND_TRY(write_line(s, s->owed, (int)strlen(s->owed)));
        s->owed[0] = '\0';
    }
    return write_line(s, line, length);
}

/* Readers forget the lines above a line "resumed" that have later steps, so it must not be lost. Of
 * two, the one that takes back more is kept: no line was written in between. */
static nd_status append_resumed(jsonl *s, const char *line, int length, int64_t step)
{
    nd_status status = append_line(s, line, length);
    if (status == ND_ERR_IO && (!s->owed[0] || step < s->owed_step)) {
        ND_ASSERT(length < (int)sizeof s->owed);
        memcpy(s->owed, line, (size_t)length + 1);
        s->owed_step = step;
    }
    return status;
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

/* "loss":{"web":2.5,"code":1.25},"tokens":{"web":100,"code":20},  with the two names given; ""
 * without sources. */
static const char *source_objects(jsonl *s, const nd_source_loss *list, int count,
                                  const char *loss_name, const char *tokens_name)
{
    char *out = s->sources, text[32];
    size_t used = 0;
    out[0] = '\0';
    for (int what = 0; what < 2 && count > 0; what++) {
        used += (size_t)snprintf(out + used, LONG_LINE_BYTES - used, "\"%s\":{",
                                 what == 0 ? loss_name : tokens_name);
        for (int i = 0; i < count; i++) {
            if (what == 0) {
                number(text, list[i].loss);
            } else {
                snprintf(text, sizeof text, "%lld", (long long)list[i].tokens);
            }
            used += (size_t)snprintf(out + used, LONG_LINE_BYTES - used, "\"%s\":%s%s",
                                     list[i].name, text, i + 1 < count ? "," : "},");
        }
    }
    return out;
}

/* "slowest_ms":9.5,"fastest_ms":8,"slowest_rank":3,  or nothing where it is not known. */
static const char *work_members(char text[160], const nd_step_record *r)
{
    char slowest[32], fastest[32];
    text[0] = '\0';
    if (r->slowest_seconds > 0) {
        snprintf(text, 160, "\"slowest_ms\":%s,\"fastest_ms\":%s,\"slowest_rank\":%d,",
                 number(slowest, r->slowest_seconds * 1e3),
                 number(fastest, r->fastest_seconds * 1e3), r->slowest_rank);
    }
    return text;
}

static nd_status write_step(void *self, const nd_step_record *r)
{
    jsonl *s = self;
    char t[10][32], wire[256], work[160];
    nd_speed speed = nd_speed_of(&s->options, r->step_seconds);
    int64_t wire_bytes = wire_object(wire, r->wire_bytes);
    int length = snprintf(
        s->line, sizeof s->line,
        "{\"step\":%lld,%s\"loss\":%s,\"grad_norm\":%s,\"lr\":%s,\"tokens\":%lld,"
        "\"tokens_seen\":%lld,%s\"wire_bytes\":%lld,\"wire\":%s,\"step_ms\":%s,\"data_wait_ms\":%s,"
        "%s\"tokens_per_second\":%s,\"tokens_per_second_per_worker\":%s,"
        "\"tflops_per_worker_causal\":%s,\"tflops_per_worker_accelerate\":%s,"
        "\"peak_memory_bytes\":%.0f}\n",
        (long long)r->step, r->skipped ? "\"skipped\":true," : "", number(t[0], r->loss),
        number(t[1], r->grad_norm), number(t[2], r->lr), (long long)r->tokens,
        (long long)r->tokens_seen,
        source_objects(s, r->sources, r->source_count, "source_loss", "source_tokens"),
        (long long)wire_bytes, wire, number(t[3], r->step_seconds * 1e3),
        number(t[4], r->data_wait_seconds * 1e3), work_members(work, r),
        number(t[5], speed.tokens_per_second), number(t[6], speed.tokens_per_second_per_worker),
        number(t[7], speed.tflops_causal), number(t[8], speed.tflops_accelerate),
        r->peak_memory_bytes);
    return append_line(s, s->line, length);
}

static nd_status write_validation(void *self, const nd_validation_record *r)
{
    jsonl *s = self;
    char t[2][32], separate[64] = "";
    if (r->separate_length > 0) {
        snprintf(separate, sizeof separate, "\"separate_length\":%lld,",
                 (long long)r->separate_length);
    }
    int length = snprintf(
        s->line, sizeof s->line,
        "{\"step\":%lld,\"validation_loss\":%s,\"validation_tokens\":%lld,%s%s\"validation_ms\":%s}"
        "\n",
        (long long)r->step, number(t[0], r->loss), (long long)r->tokens, separate,
        source_objects(s, r->sets, r->set_count, "validation_set_loss", "validation_set_tokens"),
        number(t[1], r->seconds * 1e3));
    return append_line(s, s->line, length);
}

/* "underflow":0.25,"underflow_layer":3; returns its bytes. */
static size_t worst_members(char *out, size_t size, const char *name, double value, int layer)
{
    char text[32];
    return (size_t)snprintf(out, size, "\"%s\":%s,\"%s_layer\":%d", name, number(text, value), name,
                            layer);
}

/* {"underflow":...,"saturation":...,"amax":...}, behind its name. */
static size_t worst_object(char *out, size_t size, const char *name, const nd_health_worst *w)
{
    size_t used = (size_t)snprintf(out, size, "\"%s\":{", name);
    used += worst_members(out + used, size - used, "underflow", w->underflow, w->underflow_layer);
    out[used++] = ',';
    used +=
        worst_members(out + used, size - used, "saturation", w->saturation, w->saturation_layer);
    out[used++] = ',';
    used += worst_members(out + used, size - used, "amax", w->amax, w->amax_layer);
    out[used++] = '}';
    return used;
}

/* {"step":10,"fp8_health":{"input":{"self_attn.q_proj":{...},...},"weight":{...},...}}. Linears in
 * BF16 are left out. A linear takes at most 250 bytes. */
static nd_status write_health(void *self, const nd_health_record *r)
{
    jsonl *s = self;
    const size_t size = sizeof s->line;
    size_t used =
        (size_t)snprintf(s->line, size, "{\"step\":%lld,\"fp8_health\":{", (long long)r->step);
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        int count = 0;
        used += (size_t)snprintf(s->line + used, size - used, "%s\"%s\":{", kind > 0 ? "," : "",
                                 nd_operand_name((nd_operand_kind)kind));
        for (int linear = 0; linear < ND_LINEAR_COUNT; linear++) {
            const nd_health_worst *w = &r->summary.worst[kind][linear];
            if (w->amax_layer >= 0) {
                s->line[used] = ',';
                used += count++ > 0;
                used += worst_object(s->line + used, size - used, nd_linear_name(linear), w);
            }
        }
        s->line[used++] = '}';
    }
    used += (size_t)snprintf(s->line + used, size - used, "}}\n");
    return append_line(s, s->line, (int)used);
}

/* A JSON string; NULL is "". What is no UTF-8 becomes '?', and what has no room is left out. */
static const char *quoted(char *out, size_t capacity, const char *text)
{
    const size_t size = text ? strlen(text) : 0;
    size_t used = 1, at = 0;
    out[0] = '"';
    while (at < size && used + 12 < capacity) {
        unsigned code = '?';
        const int n = nd_utf8_decode(text + at, size - at, &code);
        if (n <= 0 || code < 0x20 || code == '"' || code == '\\') {
            used += (size_t)sprintf(out + used, "\\u%04x", n > 0 ? code : '?');
        } else {
            memcpy(out + used, text + at, (size_t)n);
            used += (size_t)n;
        }
        at += n > 0 ? (size_t)n : 1;
    }
    snprintf(out + used, capacity - used, "%s\"", at < size ? "..." : "");
    return out;
}

/* ,"rewound_from":...  or  ,"mesh":...,"mesh_was":...  or nothing. */
static void further_of_resume(char out[512], const nd_run_event *e)
{
    char text[400], mesh[128], was[128];
    out[0] = '\0';
    if (e->rewound_from > 0) {
        snprintf(out, 512, ",\"rewound_from\":%lld,\"passed_over_samples\":%lld,\"why\":%s",
                 (long long)e->rewound_from, (long long)e->samples,
                 quoted(text, sizeof text, e->reason));
    } else if (e->mesh_was) {
        snprintf(out, 512, ",\"mesh\":\"%s\",\"mesh_was\":\"%s\"",
                 nd_mesh_format(e->mesh, mesh, sizeof mesh),
                 nd_mesh_format(e->mesh_was, was, sizeof was));
    }
}

static nd_status write_event(void *self, const nd_run_event *e)
{
    jsonl *s = self;
    char t[2][32], text[640], further[512], why[480];
    int length = 0;
    switch (e->kind) {
    case ND_RUN_EVENT_MODEL_SAVED:
    case ND_RUN_EVENT_FINISHED:
        return ND_OK; /* events_without_line */
    case ND_RUN_EVENT_CHECKPOINT_SAVED:
        length = snprintf(s->line, sizeof s->line,
                          "{\"event\":\"checkpoint\",\"step\":%lld,\"reason\":%s,"
                          "\"bytes\":%llu,\"save_ms\":%s,\"blocked_ms\":%s}\n",
                          (long long)e->step, quoted(text, sizeof text, e->reason),
                          (unsigned long long)e->bytes, number(t[0], e->seconds * 1e3),
                          number(t[1], e->blocked_seconds * 1e3));
        break;
    case ND_RUN_EVENT_CHECKPOINT_FAILED:
        length = snprintf(s->line, sizeof s->line,
                          "{\"event\":\"checkpoint_failed\",\"step\":%lld,\"why\":%s}\n",
                          (long long)e->step, quoted(text, sizeof text, e->reason));
        break;
    case ND_RUN_EVENT_SAMPLE:
        length = snprintf(s->line, sizeof s->line,
                          "{\"event\":\"sample\",\"step\":%lld,\"prompt\":%s,\"text\":%s}\n",
                          (long long)e->step, quoted(s->sources, LONG_LINE_BYTES / 4, e->path),
                          quoted(s->sources + LONG_LINE_BYTES / 4, LONG_LINE_BYTES / 2, e->reason));
        break;
    case ND_RUN_EVENT_EARLY_STOPPED:
        length = snprintf(s->line, sizeof s->line,
                          "{\"event\":\"early_stopped\",\"step\":%lld,\"why\":%s}\n",
                          (long long)e->step, quoted(text, sizeof text, e->reason));
        break;
    case ND_RUN_EVENT_ENDED:
        length = snprintf(s->line, sizeof s->line,
                          "{\"event\":\"ended\",\"step\":%lld,\"code\":%d,\"why\":%s}\n",
                          (long long)e->step, (int)e->code, quoted(text, sizeof text, e->reason));
        break;
    case ND_RUN_EVENT_RECORDS_LOST:
        snprintf(why, sizeof why, "%lld records did not go to %s: %s", (long long)e->records,
                 e->sink, e->reason);
        length = snprintf(s->line, sizeof s->line,
                          "{\"event\":\"records_lost\",\"step\":%lld,\"sink\":\"%s\","
                          "\"records\":%lld,\"why\":%s}\n",
                          (long long)e->step, e->sink, (long long)e->records,
                          quoted(text, sizeof text, why));
        break;
    case ND_RUN_EVENT_RESUMED:
        further_of_resume(further, e);
        length = snprintf(s->line, sizeof s->line,
                          "{\"event\":\"resumed\",\"step\":%lld,\"from\":%s,\"restart\":%lld,"
                          "\"load_ms\":%s%s}\n",
                          (long long)e->step, quoted(text, sizeof text, e->path),
                          (long long)e->restart, number(t[0], e->seconds * 1e3), further);
        break;
    }
    return e->kind == ND_RUN_EVENT_RESUMED ? append_resumed(s, s->line, length, e->step)
                                           : append_line(s, s->line, length);
}

static int64_t bytes_of(void *self)
{
    jsonl *s = self;
    return atomic_load(&s->bytes);
}

static void close_file(void *self)
{
    jsonl *s = self;
    if (s->fd >= 0) {
        close(s->fd);
    }
    free(s->path);
    free(s);
}

/* Cuts off what a dead process left of a line. */
static nd_status cut_half_line(jsonl *s)
{
    char *tail = s->line;
    off_t end = lseek(s->fd, 0, SEEK_END);
    off_t from = end > LONG_LINE_BYTES ? end - LONG_LINE_BYTES : 0;
    ssize_t n = pread(s->fd, tail, (size_t)(end - from), from);
    if (n < 0 || n != end - from) {
        return nd_fail(ND_ERR_IO, "%s cannot be read: %s", s->path, strerror(errno));
    }
    while (n > 0 && tail[n - 1] != '\n') {
        n--;
    }
    if (from + n < end && ftruncate(s->fd, from + n) != 0) {
        return nd_fail(ND_ERR_CANTCREATE, "%s cannot be written: %s", s->path, strerror(errno));
    }
    return ND_OK;
}

nd_status nd_jsonl_sink_open(const nd_report_options *options, nd_sink *out)
{
    jsonl *s = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &s));
    s->options = *options;
    s->fd = -1;
    s->torn = -1;
    ND_TRY_OUT(nd_fs_format(&s->path, "%s/metrics.jsonl", options->dir));
    /* A link is not followed: a resume cuts the file, and would cut that of somebody else. */
    s->fd = nd_fs_update(s->path, options->continues ? O_APPEND : O_APPEND | O_EXCL);
    if (s->fd < 0) {
        status = nd_fail(ND_ERR_CANTCREATE,
                         "%s cannot be created: %s; give another folder with --save-dir", s->path,
                         errno == EEXIST ? "the folder already holds a run" : nd_fs_reason(errno));
        goto out;
    }
    ND_TRY_OUT(options->continues ? cut_half_line(s) : ND_OK);
    s->counts_links = has_name(s->fd);
    atomic_store(&s->bytes, lseek(s->fd, 0, SEEK_END));
    *out = (nd_sink){.name = "metrics.jsonl",
                     .required = true,
                     .self = s,
                     .bytes = bytes_of,
                     .step = write_step,
                     .validation = write_validation,
                     .health = write_health,
                     .event = write_event,
                     .events_without_line =
                         1U << ND_RUN_EVENT_MODEL_SAVED | 1U << ND_RUN_EVENT_FINISHED,
                     .close = close_file};
    s = NULL;
out:
    if (s) {
        close_file(s);
    }
    return status;
}

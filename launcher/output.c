// SPDX-License-Identifier: Apache-2.0
/*
 * Workers' output. Rank 0's bytes pass through as they arrive, so that a progress bar can rewrite
 * its line; the lines of other ranks are passed on whole, with "host:rank: " in front. Control
 * characters reach a terminal as text; standard output that is none, and files of launch.log_dir,
 * have the bytes as they came.
 *
 * A reader that does not read stops no training: lines are lost where it has no room for 5 s, and
 * counted there. What a model writes when it is used is a result: standard output waits for its
 * reader, as in any pipeline.
 */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "launcher/launcher.h"
#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/printable.h"
#include "runtime/rdzv/uv.h"

static void write_all(int fd, const char *bytes, size_t count)
{
    while (count > 0) {
        ssize_t n = write(fd, bytes, count);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return; /* the reader is gone; the job continues */
        }
        bytes += n;
        count -= (size_t)n;
    }
}

/* False: bytes are lost. */
static bool give(const nd_output *output, const char *bytes, size_t count)
{
    nd_attempt *attempt = output->child->attempt;
    if (output == &output->child->err) {
        return nd_log_write(bytes, count);
    }
    if (!attempt->options.input) {
        return nd_outlet_write(&attempt->standard_output, bytes, count);
    }
    write_all(STDOUT_FILENO, bytes, count);
    return true;
}

/* Rank 0's bytes without control characters, but for those of the progress bar. A line whose
 * beginning was lost is lost. */
static void show(nd_output *output, const char *bytes, size_t count)
{
    enum { PART = 1024 };
    char text[ND_SHOWN_GROWTH * PART + ND_SHOWN_HELD];
    while (count > 0) {
        size_t part = count < PART ? count : PART;
        if (output->torn) {
            const char *newline = memchr(bytes, '\n', count);
            part = newline ? (size_t)(newline + 1 - bytes) : count;
            output->torn = !newline;
        } else if (!(output->as_it_is ? give(output, bytes, part)
                                      : give(output, text,
                                             nd_shown_filter(&output->shown, bytes, part, text)))) {
            output->torn = bytes[part - 1] != '\n';
        }
        bytes += part;
        count -= part;
    }
}

/* A full disk does not stop the job. */
static void warn_of_lost_lines(nd_attempt *attempt)
{
    if (!attempt->log_failed) {
        attempt->log_failed = true;
        nd_log_warning(
            "ndlaunch: %s: %s; lines of workers are missing in these files, the job goes "
            "on",
            attempt->options.log_folder, strerror(errno));
    }
}

/*
 * The error message that ends a worker is left to the failure screen, which repeats it. A stop at a
 * step boundary has no failure screen, so rank 0's message of it is passed on.
 */
static bool is_for_the_screen(const nd_output *output, const char *line, size_t length)
{
    static const char mark[] = "error: ";
    const nd_child *child = output->child;
    const nd_failure_slot *record = &child->attempt->progress.failures[child->local_rank];
    const size_t begin = sizeof mark - 1;
    if (output != &child->err || length <= begin || memcmp(line, mark, begin) != 0 ||
        atomic_load(&record->time_ns) == 0 || length - begin >= sizeof record->message ||
        (record->status == ND_ERR_PREEMPTED && child->rank == 0)) {
        return false;
    }
    return memcmp(record->message, line + begin, length - begin) == 0 &&
           record->message[length - begin] == '\0';
}

/* Rank 0's bytes as they arrive. A line is left to the failure screen only where all of it is in
 * these bytes. */
static void pass_on(nd_output *output, const char *bytes, size_t count)
{
    const char *end = bytes + count, *unwritten = bytes, *newline;
    bool begins = output->used == 0 || output->returned;
    for (const char *line = bytes; (newline = memchr(line, '\n', (size_t)(end - line))) != NULL;
         line = newline + 1) {
        if (begins && is_for_the_screen(output, line, (size_t)(newline - line))) {
            show(output, unwritten, (size_t)(line - unwritten));
            unwritten = newline + 1;
        }
        begins = true;
    }
    show(output, unwritten, (size_t)(end - unwritten));
}

static void emit_line(nd_output *output)
{
    nd_child *child = output->child;
    char shown[4 * ND_LINE_MAX], text[sizeof shown + 512]; /* four characters for a byte */
    output->line[output->used] = '\0';
    if (output == &child->err) {
        char *slot = child->tail[child->tail_count++ % ND_TAIL_LINES];
        snprintf(slot, ND_TAIL_BYTES, "%.*s", ND_TAIL_BYTES - 1, output->line);
    }
    if (output->file && fprintf(output->file, "%s\n", output->line) < 0) {
        warn_of_lost_lines(child->attempt);
    }
    if (child->rank != 0 && !is_for_the_screen(output, output->line, output->used)) {
        nd_escape(shown, sizeof shown, output->line, "\t");
        int n = snprintf(text, sizeof text, "%.400s:%d: %s\n", child->attempt->options.host_name,
                         child->rank, shown);
        (void)give(output, text, (size_t)n);
    }
    output->used = 0;
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer)
{
    static char bytes[65536]; /* filled and consumed within one callback of the only loop */
    *buffer = uv_buf_init(bytes, sizeof bytes);
}

static void on_read(uv_stream_t *stream, ssize_t count, const uv_buf_t *buffer)
{
    nd_output *output = stream->data;
    if (count < 0) {
        nd_output_close(output);
        return;
    }
    if (output->child->rank == 0) {
        pass_on(output, buffer->base, (size_t)count);
    }
    for (ssize_t i = 0; i < count; i++) {
        char c = buffer->base[i];
        if (c == '\r') {
            output->returned = true;
            continue;
        }
        if (output->returned && c != '\n') {
            output->used = 0; /* of a rewritten line only the last state is kept */
        }
        output->returned = false;
        if (c == '\n' || output->used == sizeof output->line - 1) {
            emit_line(output);
        }
        if (c != '\n') {
            output->line[output->used++] = c;
        }
    }
}

nd_status nd_output_make_folder(const char *log_dir, const char *run_id, char *folder,
                                size_t capacity)
{
    folder[0] = '\0';
    if (!log_dir[0]) {
        return ND_OK;
    }
    if ((size_t)snprintf(folder, capacity, "%s/%s", log_dir, run_id) >= capacity) {
        return nd_fail(ND_ERR_CANTCREATE, "launch.log_dir has more than %zu characters",
                       capacity - strlen(run_id) - 2);
    }
    ND_TRY(nd_fs_make_folders(folder, "the folder of launch.log_dir",
                              "give another folder as launch.log_dir"));
    nd_log_info("ndlaunch: output of the workers is kept in %s", folder);
    return ND_OK;
}

static nd_status open_file(nd_output *output, const char *kind)
{
    const char *folder = output->child->attempt->options.log_folder;
    char path[4096 + 64];
    if (!folder[0]) {
        return ND_OK;
    }
    snprintf(path, sizeof path, "%s/rank-%d.%s.log", folder, output->child->rank, kind);
    output->file = nd_fs_stream_new(path);
    if (!output->file) {
        return nd_fail(ND_ERR_CANTCREATE, "%s cannot be written: %s", path, strerror(errno));
    }
    setvbuf(output->file, NULL, _IOLBF, 0);
    return ND_OK;
}

static void on_closed(uv_handle_t *handle)
{
    ((nd_output *)handle->data)->child->attempt->handles--;
}

nd_status nd_output_open(nd_output *output, nd_child *child, bool is_error)
{
    output->child = child;
    ND_TRY(ND_UV(uv_pipe_init(child->attempt->options.loop, &output->pipe, 0)));
    output->pipe.data = output;
    output->as_it_is = !is_error && !isatty(STDOUT_FILENO);
    output->shown.text_only = !is_error;
    child->attempt->handles++;
    return open_file(output, is_error ? "stderr" : "stdout");
}

nd_status nd_output_start(nd_output *output)
{
    return ND_UV(uv_read_start((uv_stream_t *)&output->pipe, on_alloc, on_read));
}

void nd_output_close(nd_output *output)
{
    if (uv_is_closing((uv_handle_t *)&output->pipe)) {
        return;
    }
    char rest[ND_SHOWN_HELD];
    (void)give(output, rest, nd_shown_end(&output->shown, rest));
    if (output->used > 0) {
        emit_line(output);
    }
    if (output->file) {
        fclose(output->file);
        output->file = NULL;
    }
    uv_close((uv_handle_t *)&output->pipe, on_closed);
}

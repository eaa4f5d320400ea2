// SPDX-License-Identifier: Apache-2.0
/* The workers of one start: spawned, read, signalled, stopped, and collected. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/launcher.h"
#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/rdzv/uv.h"

enum {
    FIRST_FD = 3, /* of those that a worker inherits beside its standard streams */
    FD_COUNT = 3,
    READY_TICK_MS = 5
};

static const int64_t ready_ns = 10000000000; /* after it any worker is taken to handle signals */

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

/* False: bytes are lost. */
static bool write_bytes(const nd_output *output, const char *bytes, size_t count)
{
    nd_attempt *attempt = output->child->attempt;
    if (output == &output->child->err) {
        return nd_log_write(bytes, count);
    }
    if (!attempt->options.input) {
        return nd_outlet_write(&attempt->standard_output, bytes, count);
    }
    /* Without its reader the job continues. */
    if (!attempt->lost_results && !nd_stdout_write(bytes, count) && errno != EPIPE) {
        attempt->lost_results = true;
        nd_log_error("ndlaunch: standard output cannot be written: %s", strerror(errno));
        if (!attempt->stopping && attempt->running > 0) {
            attempt->options.failed(attempt->options.context, ND_ERR_CANTCREATE);
        }
    }
    return true;
}

/* Rank 0's bytes without control characters, but for those of the progress bar. A line whose
 * beginning was lost is lost. */
static void show_bytes(nd_output *output, const char *bytes, size_t count)
{
    enum { PART = 1024 };
    char text[ND_SHOWN_GROWTH * PART + ND_SHOWN_HELD];
    while (count > 0) {
        size_t part = count < PART ? count : PART;
        if (output->torn) {
            const char *newline = memchr(bytes, '\n', count);
            part = newline ? (size_t)(newline + 1 - bytes) : count;
            output->torn = !newline;
        } else if (!(output->as_it_is
                         ? write_bytes(output, bytes, part)
                         : write_bytes(output, text,
                                       nd_shown_filter(&output->shown, bytes, part, text)))) {
            output->torn = bytes[part - 1] != '\n';
        }
        bytes += part;
        count -= part;
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

/* Rank 0's bytes as they arrive. A line that is whole in them may be left to the failure screen. */
static void pass_on(nd_output *output, const char *bytes, size_t count)
{
    const char *end = bytes + count, *unwritten = bytes, *newline;
    bool begins = output->used == 0 || output->returned;
    for (const char *line = bytes; (newline = memchr(line, '\n', (size_t)(end - line))) != NULL;
         line = newline + 1) {
        if (begins && is_for_the_screen(output, line, (size_t)(newline - line))) {
            show_bytes(output, unwritten, (size_t)(line - unwritten));
            unwritten = newline + 1;
        }
        begins = true;
    }
    show_bytes(output, unwritten, (size_t)(end - unwritten));
}

static void emit_line(nd_output *output)
{
    nd_child *child = output->child;
    nd_attempt *attempt = child->attempt;
    char shown[4 * ND_LINE_MAX], text[sizeof shown + 512]; /* four characters for a byte */
    output->line[output->used] = '\0';
    if (output == &child->err) {
        char *slot = child->tail[child->tail_count++ % ND_TAIL_LINES];
        snprintf(slot, ND_TAIL_BYTES, "%.*s", ND_TAIL_BYTES - 1, output->line);
    }
    if (output->file && fprintf(output->file, "%s\n", output->line) < 0 && !attempt->log_failed) {
        attempt->log_failed = true; /* a full disk does not stop the job */
        nd_log_warning("ndlaunch: %s: %s; lines of workers are missing in these files, the job "
                       "goes on",
                       attempt->log_folder, strerror(errno));
    }
    if (child->rank != 0 && !is_for_the_screen(output, output->line, output->used)) {
        nd_escape(shown, sizeof shown, output->line, "\t");
        int n = snprintf(text, sizeof text, "%.400s:%d: %s\n", attempt->options.host_name,
                         child->rank, shown);
        (void)write_bytes(output, text, (size_t)n);
    }
    output->used = 0;
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer)
{
    static char bytes[65536]; /* filled and consumed within one callback of the only loop */
    *buffer = uv_buf_init(bytes, sizeof bytes);
}

static void on_closed(uv_handle_t *handle)
{
    ((nd_attempt *)handle->data)->handles--;
}

/* No other callback of the handle may run any more: its data become the attempt. */
static void close_handle(nd_attempt *attempt, void *handle)
{
    ((uv_handle_t *)handle)->data = attempt;
    uv_close(handle, on_closed);
}

static void close_output(nd_output *output)
{
    if (uv_is_closing((uv_handle_t *)&output->pipe)) {
        return;
    }
    char rest[ND_SHOWN_HELD];
    (void)write_bytes(output, rest, nd_shown_filter(&output->shown, NULL, 0, rest));
    if (output->used > 0) {
        emit_line(output);
    }
    if (output->file) {
        fclose(output->file);
        output->file = NULL;
    }
    close_handle(output->child->attempt, &output->pipe);
}

static void on_read(uv_stream_t *stream, ssize_t count, const uv_buf_t *buffer)
{
    nd_output *output = stream->data;
    if (count < 0) {
        close_output(output);
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

/* Makes log_dir/run_id; the folder stays "" without a log_dir. */
static nd_status make_log_folder(nd_attempt *attempt)
{
    const char *log_dir = attempt->options.config->launch.log_dir;
    const char *run_id = attempt->options.run_id;
    const size_t capacity = sizeof attempt->log_folder;
    if (!log_dir[0]) {
        return ND_OK;
    }
    if ((size_t)snprintf(attempt->log_folder, capacity, "%s/%s", log_dir, run_id) >= capacity) {
        return nd_fail(ND_ERR_CANTCREATE, "launch.log_dir has more than %zu characters",
                       capacity - strlen(run_id) - 2);
    }
    ND_TRY(nd_fs_make_folders(attempt->log_folder, "the folder of launch.log_dir",
                              "give another folder as launch.log_dir"));
    nd_log_info("ndlaunch: output of the workers is kept in %s", attempt->log_folder);
    return ND_OK;
}

static nd_status open_file(nd_output *output, const char *kind)
{
    const char *folder = output->child->attempt->log_folder;
    char path[4096 + 64];
    if (!folder[0]) {
        return ND_OK;
    }
    snprintf(path, sizeof path, "%s/rank-%d.%s.log", folder, output->child->rank, kind);
    output->file = nd_fs_stream_new(path, 0666);
    if (!output->file) {
        return nd_fail(ND_ERR_CANTCREATE, "%s cannot be written: %s", path, strerror(errno));
    }
    setvbuf(output->file, NULL, _IOLBF, 0);
    return ND_OK;
}

static nd_status open_output(nd_output *output, nd_child *child, bool is_error)
{
    output->child = child;
    ND_TRY(ND_UV(uv_pipe_init(child->attempt->options.loop, &output->pipe, 0)));
    output->pipe.data = output;
    output->as_it_is = !is_error && !isatty(STDOUT_FILENO);
    output->shown.text_only = !is_error;
    child->attempt->handles++;
    return open_file(output, is_error ? "stderr" : "stdout");
}

/* Processes. */

static nd_status make_environment(const nd_attempt *attempt, int local_rank, char ***out)
{
    const nd_attempt_options *o = &attempt->options;
    int rank = attempt->children[local_rank].rank;
    const int values[] = {rank,
                          local_rank,
                          o->world_size,
                          o->local_workers,
                          o->master_port,
                          o->first_rank / o->local_workers,
                          (int)o->config->launch.nnodes};
    char pid[24], epoch[24], numbers[sizeof values / sizeof *values][16];
    snprintf(pid, sizeof pid, "%ld", (long)getpid());
    snprintf(epoch, sizeof epoch, "%lld", (long long)o->epoch);
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        snprintf(numbers[i], sizeof numbers[i], "%d", values[i]);
    }
    const nd_variable own[] = {
        {"RANK", numbers[0]},
        {"LOCAL_RANK", numbers[1]},
        {"WORLD_SIZE", numbers[2]},
        {"LOCAL_WORLD_SIZE", numbers[3]},
        {"MASTER_ADDR", o->master_addr},
        {"MASTER_PORT", numbers[4]},
        {"ND_RUN_ID", o->run_id},
        {"ND_NODE_RANK", numbers[5]},
        {"ND_NNODES", numbers[6]},
        {"ND_LAUNCHER_PID", pid},
        {"ND_TERMINAL", isatty(STDERR_FILENO) && rank == 0 ? "1" : "0"},
        {"ND_CONFIG_NAME", o->config->source},
        {"ND_KEY_FD", "3"}, /* the order of fds[] in spawn() */
        {"ND_PROGRESS_FD", "4"},
        {"ND_CONFIG_FD", "5"},
        {"ND_RESTART_EPOCH", epoch},
        {"ND_RUN_FOLDER", o->run_folder}, /* last: left out of a first start */
    };
    int count = sizeof own / sizeof *own;
    return nd_environment_make(own, o->run_folder[0] ? count : count - 1, out);
}

static void on_exit_child(uv_process_t *process, int64_t code, int number)
{
    nd_child *child = process->data;
    nd_attempt *attempt = child->attempt;
    close_handle(attempt, process);
    if (!child->running) { /* it was given up */
        return;
    }
    child->running = false;
    child->exit_code = code;
    child->signal = number;
    child->ended_ns = nd_clock_ns();
    attempt->running--;
    if (code == ND_ERR_PREEMPTED && number == 0) {
        nd_attempt_start_grace(attempt); /* all ranks agree on the step after which they end */
    } else if ((code != 0 || number != 0) && !attempt->stopping) {
        attempt->options.failed(attempt->options.context, number ? 128 + number : (int)code);
    }
    if (attempt->running == 0) {
        uv_timer_stop(&attempt->kill_timer);
        uv_timer_stop(&attempt->ready_timer);
        attempt->options.ended(attempt->options.context);
    }
}

static nd_status spawn(nd_attempt *attempt, int local_rank)
{
    const nd_attempt_options *o = &attempt->options;
    nd_child *child = &attempt->children[local_rank];
    char **env = NULL;
    ND_TRY(open_output(&child->out, child, false));
    ND_TRY(open_output(&child->err, child, true));
    ND_TRY(make_environment(attempt, local_rank, &env));
    const int fds[FD_COUNT] = {o->key_fd, attempt->progress.fd, o->config_fd};
    uv_stdio_container_t stdio[FIRST_FD + FD_COUNT] = {
        {.flags = o->input && child->rank == 0 ? UV_INHERIT_FD : UV_IGNORE,
         .data.fd = STDIN_FILENO},
        {.flags = (uv_stdio_flags)(UV_CREATE_PIPE | UV_WRITABLE_PIPE),
         .data.stream = (uv_stream_t *)&child->out.pipe},
        {.flags = (uv_stdio_flags)(UV_CREATE_PIPE | UV_WRITABLE_PIPE),
         .data.stream = (uv_stream_t *)&child->err.pipe},
    };
    for (int i = 0; i < FD_COUNT; i++) {
        stdio[FIRST_FD + i] = (uv_stdio_container_t){.flags = UV_INHERIT_FD, .data.fd = fds[i]};
    }
    uv_process_options_t options = {
        .exit_cb = on_exit_child,
        .file = o->args[0],
        .args = (char **)o->args,
        .env = env,
        .flags = UV_PROCESS_DETACHED, /* its own session: ndlaunch gets the terminal's signals */
        .stdio_count = FIRST_FD + FD_COUNT,
        .stdio = stdio,
    };
    child->process.data = child;
    int code = uv_spawn(o->loop, &child->process, &options);
    free(env);
    if (code != 0) {
        return nd_fail(ND_ERR_IO, "the worker program %s cannot be started: %s", o->args[0],
                       uv_strerror(code));
    }
    child->running = true;
    attempt->running++;
    attempt->handles++;
    ND_TRY(ND_UV(uv_read_start((uv_stream_t *)&child->out.pipe, on_alloc, on_read)));
    return ND_UV(uv_read_start((uv_stream_t *)&child->err.pipe, on_alloc, on_read));
}

nd_status nd_attempt_start(const nd_attempt_options *options, nd_attempt *attempt)
{
    int count = options->local_workers;
    *attempt = (nd_attempt){
        .options = *options, .patient = true, .standard_output = {.fd = STDOUT_FILENO}};
    attempt->options.local_workers = 0; /* until there is something to know about them */
    ND_TRY(make_log_folder(attempt));
    ND_TRY(nd_progress_create(count, &attempt->progress));
    ND_TRY(ND_ALLOC(count, &attempt->children));
    attempt->options.local_workers = count;
    ND_TRY(ND_UV(uv_timer_init(options->loop, &attempt->kill_timer)));
    ND_TRY(ND_UV(uv_timer_init(options->loop, &attempt->ready_timer)));
    attempt->handles = 2;
    attempt->kill_timer.data = attempt->ready_timer.data = attempt;
    attempt->started_ns = nd_clock_ns();
    for (int i = 0; i < count; i++) {
        attempt->children[i] =
            (nd_child){.attempt = attempt, .rank = options->first_rank + i, .local_rank = i};
        ND_TRY(spawn(attempt, i));
    }
    return ND_OK;
}

static void on_ready_timer(uv_timer_t *timer)
{
    nd_attempt *attempt = timer->data;
    const bool late = nd_clock_ns() - attempt->started_ns > ready_ns;
    bool waits = false;
    for (int i = 0; i < attempt->options.local_workers; i++) {
        nd_child *child = &attempt->children[i];
        const nd_failure_slot *slot = &attempt->progress.failures[child->local_rank];
        child->pending = child->running ? child->pending : 0;
        if (child->pending && (late || atomic_load(&slot->ready) != 0)) {
            for (int number = 1; number < 32; number++) {
                if (child->pending & 1u << number) {
                    uv_process_kill(&child->process, number);
                }
            }
            child->pending = 0;
        }
        waits |= child->pending != 0;
    }
    if (!waits) {
        uv_timer_stop(timer);
    }
}

/* To all workers that run, at once. */
static void send_signal(nd_attempt *attempt, int number)
{
    for (int i = 0; attempt->children && i < attempt->options.local_workers; i++) {
        if (attempt->children[i].running) {
            uv_process_kill(&attempt->children[i].process, number);
        }
    }
}

void nd_attempt_forward(nd_attempt *attempt, int number)
{
    if (attempt->running == 0) {
        return; /* a start that failed may have no timers either */
    }
    if (number == SIGQUIT) { /* workers do not handle it */
        send_signal(attempt, number);
        return;
    }
    for (int i = 0; i < attempt->options.local_workers; i++) {
        attempt->children[i].pending |= 1u << number;
    }
    uv_timer_start(&attempt->ready_timer, on_ready_timer, 0, READY_TICK_MS);
}

/* Killed workers are still there: ends without them, or the job would never end. */
static void on_reap_timer(uv_timer_t *timer)
{
    nd_attempt *attempt = timer->data;
    for (int i = 0; i < attempt->options.local_workers; i++) {
        nd_child *child = &attempt->children[i];
        if (!child->running) {
            continue;
        }
        nd_log_error("ndlaunch: rank %d (pid %d) did not end within %d s of being killed, and is "
                     "left behind",
                     child->rank, child->process.pid, ND_REAP_MS / 1000);
        child->running = false;
        child->signal = SIGKILL;
        child->ended_ns = nd_clock_ns();
        uv_close((uv_handle_t *)&child->process, NULL);
        close_output(&child->out);
        close_output(&child->err);
    }
    attempt->running = 0;
    attempt->left_behind = true;
    attempt->options.ended(attempt->options.context);
}

void nd_attempt_kill(nd_attempt *attempt, nd_killed why)
{
    for (int i = 0; attempt->children && i < attempt->options.local_workers; i++) {
        nd_child *child = &attempt->children[i];
        child->killed = child->running && !child->stopped ? why : child->killed;
        child->kill_sent |= child->running;
    }
    send_signal(attempt, SIGKILL);
    if (attempt->running > 0) {
        uv_timer_start(&attempt->kill_timer, on_reap_timer, ND_REAP_MS, 0);
    }
}

static void on_kill_timer(uv_timer_t *timer)
{
    nd_attempt *attempt = timer->data;
    if (attempt->patient) {
        nd_log_warning("ndlaunch: %d worker%s did not end in time and %s killed", attempt->running,
                       attempt->running == 1 ? "" : "s", attempt->running == 1 ? "is" : "are");
    }
    nd_attempt_kill(attempt, ND_KILLED_GRACE);
}

void nd_attempt_stop(nd_attempt *attempt, int patience_ms)
{
    bool again = attempt->stopping;
    attempt->stopping = true;
    attempt->stop_ns = again ? attempt->stop_ns : nd_clock_ns();
    if (attempt->running == 0 || (again && patience_ms >= ND_STOP_MS)) {
        return;
    }
    attempt->patient = patience_ms >= ND_STOP_MS;
    for (int i = 0; i < attempt->options.local_workers && !again; i++) {
        attempt->children[i].stopped = attempt->children[i].running;
    }
    if (patience_ms == 0) {
        nd_attempt_kill(attempt, ND_KILLED_GRACE);
        return;
    }
    if (!again) {
        send_signal(attempt, SIGTERM);
    }
    uv_timer_start(&attempt->kill_timer, on_kill_timer, (uint64_t)patience_ms, 0);
}

bool nd_attempt_start_grace(nd_attempt *attempt)
{
    if (uv_is_active((uv_handle_t *)&attempt->kill_timer)) {
        return false;
    }
    uv_timer_start(&attempt->kill_timer, on_kill_timer,
                   (uint64_t)(attempt->options.config->launch.grace_seconds * 1000.0), 0);
    return true;
}

bool nd_attempt_free(nd_attempt *attempt, bool loop_ended)
{
    uv_timer_t *const timers[] = {&attempt->kill_timer, &attempt->ready_timer};
    for (int i = 0; i < 2; i++) {
        if (timers[i]->data && !uv_is_closing((uv_handle_t *)timers[i])) {
            close_handle(attempt, timers[i]);
        }
    }
    if (attempt->handles > 0 && !loop_ended) {
        return false;
    }
    nd_progress_close(&attempt->progress);
    free(attempt->children);
    free(attempt);
    return true;
}

// SPDX-License-Identifier: Apache-2.0
/* The workers of one start: spawned, signalled, stopped, and collected. */
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "launcher/launcher.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/rdzv/uv.h"

enum {
    FIRST_FD = 3, /* of those that a worker inherits beside its standard streams */
    FD_COUNT = 3,
    READY_TICK_MS = 5,
    REAP_MS = 30000 /* for a killed worker to end: one that waits inside the kernel may not */
};

static const int64_t ready_ns = 10000000000; /* after it any worker is taken to handle signals */

static nd_status make_environment(const nd_attempt *attempt, int local_rank, char ***out)
{
    const nd_attempt_options *o = &attempt->options;
    int rank = attempt->children[local_rank].rank;
    char port[16], pid[24], epoch[24], numbers[6][16];
    snprintf(port, sizeof port, "%d", o->master_port);
    snprintf(pid, sizeof pid, "%ld", (long)getpid());
    snprintf(epoch, sizeof epoch, "%lld", (long long)o->epoch);
    snprintf(numbers[0], sizeof numbers[0], "%d", rank);
    snprintf(numbers[1], sizeof numbers[1], "%d", local_rank);
    snprintf(numbers[2], sizeof numbers[2], "%d", o->world_size);
    snprintf(numbers[3], sizeof numbers[3], "%d", o->local_workers);
    snprintf(numbers[4], sizeof numbers[4], "%d", o->first_rank / o->local_workers);
    snprintf(numbers[5], sizeof numbers[5], "%d", (int)o->config->launch.nnodes);
    const nd_variable own[] = {
        {"RANK", numbers[0]},
        {"LOCAL_RANK", numbers[1]},
        {"WORLD_SIZE", numbers[2]},
        {"LOCAL_WORLD_SIZE", numbers[3]},
        {"MASTER_ADDR", o->master_addr},
        {"MASTER_PORT", port},
        {"ND_RUN_ID", o->run_id},
        {"ND_NODE_RANK", numbers[4]},
        {"ND_NNODES", numbers[5]},
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

static void on_closed_child(uv_handle_t *handle)
{
    ((nd_child *)handle->data)->attempt->handles--;
}

static void on_exit_child(uv_process_t *process, int64_t code, int number)
{
    nd_child *child = process->data;
    nd_attempt *attempt = child->attempt;
    if (!child->running) { /* it was given up */
        uv_close((uv_handle_t *)process, on_closed_child);
        return;
    }
    child->running = false;
    child->exit_code = code;
    child->signal = number;
    child->ended_ns = nd_clock_ns();
    attempt->running--;
    uv_close((uv_handle_t *)process, on_closed_child);
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
    ND_TRY(nd_output_open(&child->out, child, false));
    ND_TRY(nd_output_open(&child->err, child, true));
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
    ND_TRY(nd_output_start(&child->out));
    return nd_output_start(&child->err);
}

nd_status nd_attempt_start(const nd_attempt_options *options, nd_attempt *attempt)
{
    int count = options->local_workers;
    *attempt = (nd_attempt){
        .options = *options, .patient = true, .standard_output = {.fd = STDOUT_FILENO}};
    attempt->options.local_workers = 0; /* until there is something to know about them */
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

static bool is_ready(const nd_child *child)
{
    const nd_attempt *attempt = child->attempt;
    return atomic_load(&attempt->progress.failures[child->local_rank].ready) != 0 ||
           nd_clock_ns() - attempt->started_ns > ready_ns;
}

static void on_ready_timer(uv_timer_t *timer)
{
    nd_attempt *attempt = timer->data;
    bool waits = false;
    for (int i = 0; i < attempt->options.local_workers; i++) {
        nd_child *child = &attempt->children[i];
        child->pending = child->running ? child->pending : 0;
        if (child->pending && is_ready(child)) {
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

void nd_attempt_forward(nd_attempt *attempt, int number)
{
    if (attempt->running == 0) {
        return; /* a start that failed may have no timers either */
    }
    for (int i = 0; attempt->children && i < attempt->options.local_workers; i++) {
        attempt->children[i].pending |= 1u << number;
    }
    uv_timer_start(&attempt->ready_timer, on_ready_timer, 0, READY_TICK_MS);
}

void nd_attempt_signal(nd_attempt *attempt, int number)
{
    for (int i = 0; attempt->children && i < attempt->options.local_workers; i++) {
        if (attempt->children[i].running) {
            uv_process_kill(&attempt->children[i].process, number);
        }
    }
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
                     child->rank, child->process.pid, REAP_MS / 1000);
        child->running = false;
        child->signal = SIGKILL;
        child->ended_ns = nd_clock_ns();
        uv_close((uv_handle_t *)&child->process, NULL);
        nd_output_close(&child->out);
        nd_output_close(&child->err);
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
    nd_attempt_signal(attempt, SIGKILL);
    if (attempt->running > 0) {
        uv_timer_start(&attempt->kill_timer, on_reap_timer, REAP_MS, 0);
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
        nd_attempt_signal(attempt, SIGTERM);
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

static void on_closed_timer(uv_handle_t *handle)
{
    ((nd_attempt *)handle->data)->handles--;
}

void nd_attempt_retire(nd_attempt *attempt)
{
    uv_timer_t *const timers[] = {&attempt->kill_timer, &attempt->ready_timer};
    for (int i = 0; i < 2; i++) {
        if (timers[i]->data && !uv_is_closing((uv_handle_t *)timers[i])) {
            uv_close((uv_handle_t *)timers[i], on_closed_timer);
        }
    }
}

void nd_attempt_fini(nd_attempt *attempt)
{
    nd_progress_close(&attempt->progress);
    free(attempt->children);
    attempt->children = NULL;
}

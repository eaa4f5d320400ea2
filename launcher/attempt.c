// SPDX-License-Identifier: Apache-2.0
#include "launcher/launcher.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/log.h"

enum { FIRST_FD = 3, FD_COUNT = 4 };

static nd_status make_environment(const nd_job *job, int local_rank, char ***out)
{
    int rank = job->workers[local_rank].rank;
    char port[16], pid[24], numbers[6][16];
    snprintf(port, sizeof port, "%d", job->master_port);
    snprintf(pid, sizeof pid, "%ld", (long)getpid());
    snprintf(numbers[0], sizeof numbers[0], "%d", rank);
    snprintf(numbers[1], sizeof numbers[1], "%d", local_rank);
    snprintf(numbers[2], sizeof numbers[2], "%d", job->world_size);
    snprintf(numbers[3], sizeof numbers[3], "%d", job->local_workers);
    snprintf(numbers[4], sizeof numbers[4], "%d", (int)job->config->launch.node_rank);
    snprintf(numbers[5], sizeof numbers[5], "%d", (int)job->config->launch.nnodes);
    const nd_variable own[] = {
        {"RANK", numbers[0]},
        {"LOCAL_RANK", numbers[1]},
        {"WORLD_SIZE", numbers[2]},
        {"LOCAL_WORLD_SIZE", numbers[3]},
        {"MASTER_ADDR", job->master_addr},
        {"MASTER_PORT", port},
        {"ND_RUN_ID", job->run_id},
        {"ND_NODE_RANK", numbers[4]},
        {"ND_NNODES", numbers[5]},
        {"ND_LAUNCHER_PID", pid},
        {"ND_TERMINAL", isatty(STDERR_FILENO) && rank == 0 ? "1" : "0"},
        {"ND_CONFIG_NAME", job->config->source},
        {"ND_KEY_FD", "3"}, /* the order of fds[] below */
        {"ND_PROGRESS_FD", "4"},
        {"ND_FAILURE_FD", "5"},
        {"ND_CONFIG_FD", "6"},
    };
    return nd_environment_make(own, sizeof own / sizeof *own, out);
}

nd_status nd_job_spawn(nd_job *job, int local_rank, uv_exit_cb on_exit)
{
    nd_launched *worker = &job->workers[local_rank];
    char **env = NULL;
    ND_TRY(nd_output_open(&worker->out, worker, false));
    ND_TRY(nd_output_open(&worker->err, worker, true));
    ND_TRY(make_environment(job, local_rank, &env));
    const int fds[FD_COUNT] = {job->key_fd, job->progress.fd, job->failures.fd, job->config_fd};
    uv_stdio_container_t stdio[FIRST_FD + FD_COUNT] = {
        {.flags = UV_IGNORE},
        {.flags = (uv_stdio_flags)(UV_CREATE_PIPE | UV_WRITABLE_PIPE),
         .data.stream = (uv_stream_t *)&worker->out.pipe},
        {.flags = (uv_stdio_flags)(UV_CREATE_PIPE | UV_WRITABLE_PIPE),
         .data.stream = (uv_stream_t *)&worker->err.pipe},
    };
    for (int i = 0; i < FD_COUNT; i++) {
        stdio[FIRST_FD + i] = (uv_stdio_container_t){.flags = UV_INHERIT_FD, .data.fd = fds[i]};
    }
    char *args[] = {(char *)job->program, "train", NULL};
    uv_process_options_t options = {
        .exit_cb = on_exit,
        .file = job->program,
        .args = args,
        .env = env,
        .flags = UV_PROCESS_DETACHED, /* its own session: ndlaunch gets the terminal's signals */
        .stdio_count = FIRST_FD + FD_COUNT,
        .stdio = stdio,
    };
    worker->process.data = worker;
    int code = uv_spawn(&job->loop, &worker->process, &options);
    free(env);
    if (code != 0) {
        return nd_fail(ND_ERR_IO, "the worker program %s cannot be started: %s", job->program,
                       uv_strerror(code));
    }
    worker->running = true;
    job->running++;
    ND_TRY(nd_output_start(&worker->out));
    return nd_output_start(&worker->err);
}

/* How a job ends: signals to its workers, the time they get, the last handles. */

/* A failed job's other workers cannot finish their step: they get this long. */
enum { PEER_STOP_MS = 3000 };

void nd_job_signal(nd_job *job, int number)
{
    for (int i = 0; i < job->local_workers; i++) {
        if (job->workers[i].running) {
            uv_process_kill(&job->workers[i].process, number);
        }
    }
}

void nd_job_kill(nd_job *job, nd_killed why)
{
    for (int i = 0; i < job->local_workers; i++) {
        nd_launched *w = &job->workers[i];
        w->killed = w->running && !w->stopped ? why : w->killed;
    }
    nd_job_signal(job, SIGKILL);
}

static void on_kill_timer(uv_timer_t *timer)
{
    nd_job *job = timer->data;
    if (job->running == 0) { /* the other nodes' workers did not end */
        nd_job_finish(job, 128 + SIGTERM);
        return;
    }
    nd_log_warning("ndlaunch: %d workers did not end in time and are killed", job->running);
    nd_job_kill(job, ND_KILLED_GRACE);
}

/* A first failure: the others are told to end, and killed soon after. */
void nd_job_stop(nd_job *job)
{
    if (job->stopping) {
        return;
    }
    job->stopping = true;
    if (job->running == 0) {
        return;
    }
    for (int i = 0; i < job->local_workers; i++) {
        job->workers[i].stopped = job->workers[i].running;
    }
    nd_job_signal(job, SIGTERM);
    uv_timer_start(&job->kill_timer, on_kill_timer, PEER_STOP_MS, 0);
}

void nd_job_start_grace(nd_job *job)
{
    if (!uv_is_active((uv_handle_t *)&job->kill_timer)) {
        uv_timer_start(&job->kill_timer, on_kill_timer,
                       (uint64_t)(job->config->launch.grace_seconds * 1000.0), 0);
    }
}

/* Watchers of the job and of its nodes. Workers' pipes close at their end, the store's handles with
 * it. */
static void close_watcher(uv_handle_t *handle, void *context)
{
    uv_handle_type type = uv_handle_get_type(handle);
    if ((type == UV_TIMER || type == UV_SIGNAL || type == UV_POLL) && !uv_is_closing(handle)) {
        uv_close(handle, NULL);
    }
}

void nd_job_finish(nd_job *job, int exit_code)
{
    if (job->finished) {
        return;
    }
    job->finished = true;
    job->exit_code = exit_code;
    nd_store_server_close(job->store);
    job->store = NULL;
    uv_walk(&job->loop, close_watcher, NULL);
}

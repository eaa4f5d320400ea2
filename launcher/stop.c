// SPDX-License-Identifier: Apache-2.0
/* How a job ends: signals to its workers, the time they get, the last handles. */
#include <signal.h>

#include "launcher/job.h"
#include "runtime/base/log.h"

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
    nd_host_close(job->store);
    job->store = NULL;
    uv_walk(&job->loop, close_watcher, NULL);
}

// SPDX-License-Identifier: Apache-2.0
#include "launcher/job.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/key.h"

enum {
    PEER_STOP_MS = 3000
}; /* a failed job's other workers cannot finish their step: they get this long */

static const int forwarded[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

static void signal_workers(nd_job *job, int number)
{
    for (int i = 0; i < job->local_workers; i++) {
        if (job->workers[i].running) {
            uv_process_kill(&job->workers[i].process, number);
        }
    }
}

static void on_kill_timer(uv_timer_t *timer)
{
    nd_job *job = timer->data;
    nd_log_warning("ndlaunch: %d workers did not end in time and are killed", job->running);
    signal_workers(job, SIGKILL);
}

/* A first failure: the others are told to end, and killed soon after. */
static void stop_peers(nd_job *job)
{
    if (job->stopping) {
        return;
    }
    job->stopping = true;
    for (int i = 0; i < job->local_workers; i++) {
        job->workers[i].stopped = job->workers[i].running;
    }
    signal_workers(job, SIGTERM);
    uv_timer_start(&job->kill_timer, on_kill_timer, PEER_STOP_MS, 0);
}

static void close_everything(nd_job *job)
{
    for (size_t i = 0; i < sizeof forwarded / sizeof *forwarded; i++) {
        uv_close((uv_handle_t *)&job->signals[i], NULL);
    }
    uv_close((uv_handle_t *)&job->kill_timer, NULL);
    nd_host_close(job->store);
    job->store = NULL;
}

static void on_exit_worker(uv_process_t *process, int64_t code, int number)
{
    nd_launched *worker = process->data;
    nd_job *job = worker->job;
    worker->running = false;
    worker->exit_code = code;
    worker->signal = number;
    worker->ended_ns = nd_clock_ns();
    job->running--;
    uv_close((uv_handle_t *)process, NULL);
    bool failure = code != 0 || number != 0;
    if (failure && !(code == ND_ERR_PREEMPTED && job->asked) && job->running > 0) {
        stop_peers(job);
    }
    if (job->running == 0) {
        close_everything(job);
    }
}

static void on_signal(uv_signal_t *handle, int number)
{
    nd_job *job = handle->data;
    int64_t now = nd_clock_ns();
    bool again =
        number == SIGINT && job->last_interrupt_ns && now - job->last_interrupt_ns < 1000000000;
    job->last_interrupt_ns = number == SIGINT ? now : job->last_interrupt_ns;
    job->asked = true;
    signal_workers(job, again ? SIGKILL : number);
    bool ends = number == SIGTERM || number == SIGINT || number == SIGQUIT || number == SIGHUP;
    if (ends && !uv_is_active((uv_handle_t *)&job->kill_timer)) {
        nd_log_info("ndlaunch: signal %s forwarded; workers have %.0f s to end their step",
                    strsignal(number), job->config->launch.grace_seconds);
        uv_timer_start(&job->kill_timer, on_kill_timer,
                       (uint64_t)(job->config->launch.grace_seconds * 1000.0), 0);
    }
}

static void on_notice(void *context, const char *line)
{
    nd_log_info("ndlaunch: %s", line);
}

static nd_status open_store(nd_job *job, const uint8_t key[ND_KEY_BYTES])
{
    nd_address addresses[ND_ADDRESS_MAX];
    int count = 0;
    nd_host_options options = {
        .loop = &job->loop,
        .server = {.version = ND_VERSION,
                   .run_id = job->run_id,
                   .world_size = job->world_size,
                   .nnodes = 1},
        .hooks = {.context = job, .notice = on_notice},
    };
    memcpy(options.key, key, ND_KEY_BYTES);
    char host[ND_HOST_MAX] = "127.0.0.1";
    int port = 0;
    if (job->config->launch.rdzv_endpoint[0]) {
        ND_TRY(nd_endpoint_parse(job->config->launch.rdzv_endpoint, host, &port));
    }
    ND_TRY(nd_address_resolve(host, port, addresses, &count));
    options.address = addresses[0];
    if (!nd_address_is_loopback(&addresses[0]) && !job->config->launch.rdzv_key_file[0]) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.rdzv_endpoint %s is open to other hosts and needs a key: make one "
                       "with `ndlaunch --make-key FILE`, copy it to all nodes, and name it with "
                       "--rdzv-key-file",
                       job->config->launch.rdzv_endpoint);
    }
    return nd_host_open(&options, &job->store);
}

static nd_status prepare(nd_job *job)
{
    uint8_t key[ND_KEY_BYTES];
    ND_TRY(job->config->launch.rdzv_key_file[0]
               ? nd_key_read_file(job->config->launch.rdzv_key_file, key)
               : nd_key_random(key));
    ND_TRY(nd_key_to_fd(key, &job->key_fd));
    uint8_t
        name[ND_KEY_BYTES]; /* a key file may serve many jobs: the name is another random number */
    ND_TRY(nd_key_random(name));
    snprintf(job->run_id, sizeof job->run_id, "nd-%02x%02x%02x%02x", name[0], name[1], name[2],
             name[3]);
    ND_TRY(nd_progress_create(job->local_workers, &job->progress));
    ND_TRY(nd_failure_page_create(job->local_workers, &job->failures));
    ND_TRY(ND_ALLOC(job->local_workers, &job->workers));
    uv_loop_init(&job->loop);
    uv_timer_init(&job->loop, &job->kill_timer);
    job->kill_timer.data = job;
    for (size_t i = 0; i < sizeof forwarded / sizeof *forwarded; i++) {
        uv_signal_init(&job->loop, &job->signals[i]);
        job->signals[i].data = job;
        uv_signal_start(&job->signals[i], on_signal, forwarded[i]);
    }
    return open_store(job, key);
}

nd_status nd_job_run(nd_job *job, int *exit_code)
{
    signal(SIGPIPE, SIG_IGN);
    gethostname(job->host_name, sizeof job->host_name - 1);
    nd_status status = prepare(job);
    for (int i = 0; status == ND_OK && i < job->local_workers; i++) {
        job->workers[i] = (nd_launched){.job = job, .rank = i, .local_rank = i};
        status = nd_job_spawn(job, i, on_exit_worker);
    }
    if (status != ND_OK) {
        signal_workers(job, SIGKILL); /* PR_SET_PDEATHSIG ends them too when we return */
        return status;
    }
    uv_run(&job->loop, UV_RUN_DEFAULT);
    *exit_code = nd_job_report(job);
    uv_loop_close(&job->loop);
    nd_failure_page_close(&job->failures);
    nd_progress_close(&job->progress);
    free(job->workers);
    return ND_OK;
}

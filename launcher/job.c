// SPDX-License-Identifier: Apache-2.0
#include "launcher/launcher.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/nodes.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/uv.h"

double nd_nodes_limit(const nd_job *job)
{
    return job->config->launch.rdzv_timeout_seconds + nd_config_data_seconds(job->config);
}

void nd_node_frame(nd_wire_buffer *out, int type, const uint32_t *numbers, int count,
                   const char *text)
{
    nd_wire_begin(out, (nd_wire_type)type);
    for (int i = 0; i < count; i++) {
        nd_wire_put_u32(out, numbers[i]);
    }
    if (text) {
        nd_wire_put_blob(out, text, strlen(text));
    }
}

nd_status nd_nodes_watch(nd_job *job)
{
    return job->join ? nd_join_watch(job) : nd_collect_watch(job);
}

void nd_nodes_failed(nd_job *job, int code)
{
    if (job->join) {
        nd_join_failed(job, code);
    } else if (job->nodes) {
        nd_collect_failed(job, code);
    }
}

void nd_nodes_ended(nd_job *job, int code, const char *screen)
{
    if (job->join) {
        nd_join_ended(job, code, screen);
    } else {
        nd_collect_ended(job, code, screen);
    }
}

static const int forwarded[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

/* The last worker of this node has gone. */
static void workers_ended(nd_job *job)
{
    char *screen = NULL;
    size_t bytes;
    FILE *out = open_memstream(&screen, &bytes);
    int code = nd_job_report(job, out ? out : stderr);
    if (out) {
        fclose(out);
    }
    uv_timer_stop(&job->kill_timer);
    if (job->nodes || job->join) {
        nd_nodes_ended(job, code, screen ? screen : "");
    } else {
        fputs(screen ? screen : "", stderr);
        nd_job_finish(job, code);
    }
    free(screen);
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
    if (code == ND_ERR_PREEMPTED && number == 0) {
        nd_job_start_grace(job); /* all ranks agree on the step after which they end */
    } else if ((code != 0 || number != 0) && !job->stopping) {
        nd_nodes_failed(job, number ? 128 + number : (int)code);
        nd_job_stop(job);
    }
    if (job->running == 0) {
        workers_ended(job);
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
    if (again) {
        nd_job_kill(job, ND_KILLED_INTERRUPT);
    } else {
        nd_job_signal(job, number);
    }
    bool ends = number == SIGTERM || number == SIGINT || number == SIGQUIT || number == SIGHUP;
    if (again && job->running == 0) {
        nd_job_finish(job, 128 + number); /* only other nodes still have workers */
    } else if (ends && !uv_is_active((uv_handle_t *)&job->kill_timer)) {
        if (job->running > 0) {
            nd_log_info("ndlaunch: signal %s forwarded; workers have %.0f s to end their step",
                        strsignal(number), job->config->launch.grace_seconds);
        }
        nd_job_start_grace(job);
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
    nd_store_server_options options = {
        .loop = &job->loop,
        .server = {.version = ND_VERSION,
                   .run_id = job->run_id,
                   .world_size = job->world_size,
                   .nnodes = (int)job->config->launch.nnodes},
        .hooks = {.context = job,
                  .notice = on_notice,
                  .left = nd_nodes_on_left,
                  .node_frame = nd_nodes_on_frame},
    };
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
    memcpy(options.key, key, ND_KEY_BYTES);
    nd_status status = nd_store_server_open(&options, &job->store);
    explicit_bzero(options.key, sizeof options.key);
    ND_TRY(status);
    snprintf(job->master_addr, sizeof job->master_addr, "%s", nd_store_server_address(job->store));
    job->master_port = nd_store_server_port(job->store);
    return ND_OK;
}

/* The other nodes, where there are any; ranks and run id are known after it. */
static nd_status meet_nodes(nd_job *job, const uint8_t key[ND_KEY_BYTES])
{
    if (job->config->launch.node_rank > 0) {
        return nd_nodes_join(job, key);
    }
    if (job->config->launch.nnodes > 1) {
        ND_TRY(nd_nodes_create(job));
    }
    ND_TRY(open_store(job, key));
    return job->nodes ? nd_nodes_gather(job) : ND_OK;
}

static nd_status take_key(const char *file, uint8_t key[ND_KEY_BYTES])
{
    if (strcmp(file, "-") == 0) {
        return nd_key_read_stdin(key);
    }
    return file[0] ? nd_key_read_file(file, key) : nd_key_random(key);
}

/* A key file may serve many jobs: the name is a random number of its own. */
static nd_status name_job(nd_job *job)
{
    uint8_t name[ND_KEY_BYTES];
    ND_TRY(nd_key_random(name));
    snprintf(job->run_id, sizeof job->run_id, "nd-%02x%02x%02x%02x", name[0], name[1], name[2],
             name[3]);
    return ND_OK;
}

static nd_status watch_signals(nd_job *job)
{
    for (size_t i = 0; i < sizeof forwarded / sizeof *forwarded; i++) {
        ND_TRY(ND_UV(uv_signal_init(&job->loop, &job->signals[i])));
        job->signals[i].data = job;
        if (!job->under_nohup || forwarded[i] != SIGHUP) {
            ND_TRY(ND_UV(uv_signal_start(&job->signals[i], on_signal, forwarded[i])));
        }
    }
    return ND_OK;
}

/* Everything but the workers. The caller wipes the key. */
static nd_status prepare(nd_job *job, uint8_t key[ND_KEY_BYTES])
{
    ND_TRY(take_key(job->config->launch.rdzv_key_file, key));
    ND_TRY(nd_key_to_fd(key, &job->key_fd));
    ND_TRY(name_job(job));
    ND_TRY(nd_progress_create(job->local_workers, &job->progress));
    ND_TRY(nd_failure_page_create(job->local_workers, &job->failures));
    ND_TRY(ND_ALLOC(job->local_workers, &job->workers));
    ND_TRY(ND_UV(uv_loop_init(&job->loop)));
    job->loop.data = job;
    ND_TRY(meet_nodes(job, key));
    ND_TRY(ND_UV(uv_timer_init(&job->loop, &job->kill_timer)));
    job->kill_timer.data = job;
    ND_TRY(watch_signals(job));
    ND_TRY(nd_output_make_folder(job));
    return job->nodes || job->join ? nd_nodes_watch(job) : ND_OK;
}

static void close_handle(uv_handle_t *handle, void *context)
{
    if (!uv_is_closing(handle)) {
        uv_close(handle, NULL);
    }
}

/* A job that could not start. Workers that did are killed. */
static void abandon(nd_job *job)
{
    if (!job->loop.data) {
        return;
    }
    nd_job_signal(job, SIGKILL);
    nd_store_server_close(job->store);
    uv_walk(&job->loop, close_handle, NULL);
    uv_run(&job->loop, UV_RUN_DEFAULT);
    uv_loop_close(&job->loop);
}

static void release(nd_job *job)
{
    nd_failure_page_close(&job->failures);
    nd_progress_close(&job->progress);
    nd_nodes_destroy(job->nodes);
    nd_join_destroy(job->join);
    free(job->workers);
}

nd_status nd_job_run(nd_job *job, int *exit_code)
{
    struct sigaction hangup;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error of write */
    job->under_nohup = sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler == SIG_IGN;
    nd_identity_host(job->host_name, sizeof job->host_name);
    uint8_t key[ND_KEY_BYTES];
    nd_status status = prepare(job, key);
    explicit_bzero(key, sizeof key);
    for (int i = 0; status == ND_OK && i < job->local_workers; i++) {
        job->workers[i] = (nd_launched){.job = job, .rank = job->first_rank + i, .local_rank = i};
        status = nd_job_spawn(job, i, on_exit_worker);
    }
    if (status != ND_OK) {
        abandon(job);
        release(job);
        return status;
    }
    uv_run(&job->loop, UV_RUN_DEFAULT);
    *exit_code = job->exit_code;
    uv_loop_close(&job->loop);
    release(job);
    return ND_OK;
}

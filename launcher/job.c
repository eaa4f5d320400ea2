// SPDX-License-Identifier: Apache-2.0
/* The job on this node: its loop, store, signals and other nodes, around one attempt. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/launcher.h"
#include "launcher/nodes.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/shm_folder.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/store_server.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/uv.h"

static const int forwarded[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

typedef struct nd_job {
    nd_job_options options;
    uv_loop_t loop;
    char host_name[128];
    char log_folder[4096];       /* of this job, below launch.log_dir, or "" */
    int key_fd;                  /* for workers */
    nd_store_server *store;      /* NULL on nodes other than 0 */
    nd_coordinator *coordinator; /* on node 0 of several, or NULL */
    nd_member *member;           /* on another node of several, or NULL */
    nd_member_place place;       /* run id, store and first rank, on node 0 too */
    nd_attempt attempt;
    uv_signal_t signals[sizeof forwarded / sizeof *forwarded];
    uv_timer_t leave_timer; /* for the other nodes to end after a signal */
    bool under_nohup;       /* HUP was ignored when we started, and stays ignored */
    int64_t last_interrupt_ns;
    bool finished; /* handles are closing */
    int exit_code;
} nd_job;

static void close_watcher(uv_handle_t *handle, void *context)
{
    uv_handle_type type = uv_handle_get_type(handle);
    if ((type == UV_TIMER || type == UV_SIGNAL || type == UV_POLL) && !uv_is_closing(handle)) {
        uv_close(handle, NULL);
    }
}

/* The job is over: closes everything, which ends the loop. Pipes close when their workers end, the
 * store's handles with the store. */
static void finish(void *context, int exit_code)
{
    nd_job *job = context;
    if (job->finished) {
        return;
    }
    job->finished = true;
    job->exit_code = exit_code;
    nd_store_server_close(job->store);
    job->store = NULL;
    uv_walk(&job->loop, close_watcher, NULL);
}

static void stop_workers(void *context)
{
    nd_attempt_stop(&((nd_job *)context)->attempt);
}

static void on_workers_failed(void *context, int code)
{
    nd_job *job = context;
    if (job->coordinator) {
        nd_coordinator_failed(job->coordinator, code);
    } else if (job->member) {
        nd_member_failed(job->member, code);
    }
}

static void on_workers_ended(void *context)
{
    nd_job *job = context;
    char *screen = NULL;
    size_t bytes;
    FILE *out = open_memstream(&screen, &bytes);
    int code = nd_attempt_report(&job->attempt, out ? out : stderr);
    if (out) {
        fclose(out);
    }
    const char *text = screen ? screen : "";
    if (job->coordinator) {
        nd_coordinator_ended(job->coordinator, code, text);
    } else if (job->member) {
        nd_member_ended(job->member, code, text);
    } else {
        fputs(text, stderr);
        finish(job, code);
    }
    free(screen);
}

static void on_leave_timer(uv_timer_t *timer)
{
    finish(timer->data, 128 + SIGTERM); /* the other nodes' workers did not end */
}

/* False: the time that workers or nodes have to end already runs. */
static bool start_grace(nd_job *job)
{
    if (job->attempt.running > 0) {
        return nd_attempt_start_grace(&job->attempt);
    }
    if (!uv_is_active((uv_handle_t *)&job->leave_timer)) {
        uint64_t grace_ms = (uint64_t)(job->options.config->launch.grace_seconds * 1000.0);
        uv_timer_start(&job->leave_timer, on_leave_timer, grace_ms, 0);
    }
    return false;
}

static void on_signal(uv_signal_t *handle, int number)
{
    nd_job *job = handle->data;
    int64_t now = nd_clock_ns();
    bool again =
        number == SIGINT && job->last_interrupt_ns && now - job->last_interrupt_ns < 1000000000;
    job->last_interrupt_ns = number == SIGINT ? now : job->last_interrupt_ns;
    if (again && job->attempt.running == 0) {
        finish(job, 128 + number); /* only other nodes still have workers */
        return;
    }
    if (again) {
        nd_attempt_kill(&job->attempt, ND_KILLED_INTERRUPT);
    } else if (number == SIGQUIT) {
        nd_attempt_signal(&job->attempt, number); /* workers do not handle it, either */
    } else {
        nd_attempt_forward(&job->attempt, number);
    }
    bool ends = number == SIGTERM || number == SIGINT || number == SIGQUIT || number == SIGHUP;
    if (ends && start_grace(job)) {
        nd_log_info("ndlaunch: signal %s forwarded; workers have %.0f s to end their step",
                    strsignal(number), job->options.config->launch.grace_seconds);
    }
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

static void on_notice(void *context, const char *line)
{
    nd_log_info("ndlaunch: %s", line);
}

/* Of a job without other nodes, the coordinator is NULL. */
static void on_left(void *context, nd_peer *peer, nd_wire_role role, int index, bool clean)
{
    if (context) {
        nd_coordinator_on_left(context, peer, role, index, clean);
    }
}

static nd_status open_store(nd_job *job, const uint8_t key[ND_KEY_BYTES])
{
    const nd_config *config = job->options.config;
    nd_address addresses[ND_ADDRESS_MAX];
    int count = 0;
    nd_store_server_options options = {
        .loop = &job->loop,
        .server = {.version = ND_VERSION,
                   .run_id = job->place.run_id,
                   .world_size = job->options.world_size,
                   .nnodes = (int)config->launch.nnodes},
        .hooks = {.context = job->coordinator,
                  .notice = on_notice,
                  .left = on_left,
                  .node_frame = nd_coordinator_on_frame},
    };
    char host[ND_HOST_MAX] = "127.0.0.1";
    int port = 0;
    if (config->launch.rdzv_endpoint[0]) {
        ND_TRY(nd_endpoint_parse(config->launch.rdzv_endpoint, host, &port));
    }
    ND_TRY(nd_address_resolve(host, port, addresses, &count));
    options.address = addresses[0];
    if (nd_address_is_loopback(&addresses[0])) {
        ND_TRY(nd_address_check_loopback());
    }
    if (!nd_address_is_loopback(&addresses[0]) && !config->launch.rdzv_key_file[0]) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.rdzv_endpoint %s is open to other hosts and needs a key: make one "
                       "with `ndlaunch --make-key FILE`, copy it to all nodes, and name it with "
                       "--rdzv-key-file",
                       config->launch.rdzv_endpoint);
    }
    memcpy(options.key, key, ND_KEY_BYTES);
    nd_status status = nd_store_server_open(&options, &job->store);
    explicit_bzero(options.key, sizeof options.key);
    ND_TRY(status);
    snprintf(job->place.master_addr, sizeof job->place.master_addr, "%s",
             nd_store_server_address(job->store));
    job->place.master_port = nd_store_server_port(job->store);
    return ND_OK;
}

/* Meets the other nodes, if there are any; afterwards the place of this node is known. */
static nd_status meet_nodes(nd_job *job, const uint8_t key[ND_KEY_BYTES])
{
    const nd_job_options *o = &job->options;
    const nd_nodes_options options = {
        .loop = &job->loop,
        .config = o->config,
        .host_name = job->host_name,
        .job_text = o->job_text,
        .local_workers = o->local_workers,
        .world_size = o->world_size,
        .cannot_start = o->cannot_start,
        .context = job,
        .stop = stop_workers,
        .finish = finish,
    };
    if (o->config->launch.node_rank > 0) {
        return nd_member_join(&options, key, &job->member, &job->place);
    }
    if (o->config->launch.nnodes > 1) {
        ND_TRY(nd_coordinator_create(&options, &job->coordinator));
    }
    ND_TRY(open_store(job, key));
    return job->coordinator
               ? nd_coordinator_gather(job->coordinator, nd_store_server_engine(job->store))
               : ND_OK;
}

static nd_status watch_nodes(nd_job *job)
{
    if (job->coordinator) {
        return nd_coordinator_watch(job->coordinator);
    }
    return job->member ? nd_member_watch(job->member) : ND_OK;
}

static nd_status read_key(const char *file, uint8_t key[ND_KEY_BYTES])
{
    if (strcmp(file, "-") == 0) {
        return nd_key_read_stdin(key);
    }
    return file[0] ? nd_key_read_file(file, key) : nd_key_random(key);
}

/* A key file may serve many jobs, so the name comes from a random number of its own. */
static nd_status name_job(nd_job *job)
{
    uint8_t name[ND_KEY_BYTES];
    ND_TRY(nd_key_random(name));
    snprintf(job->place.run_id, sizeof job->place.run_id, "nd-%02x%02x%02x%02x", name[0], name[1],
             name[2], name[3]);
    return ND_OK;
}

/* Everything but the workers. The caller wipes the key. */
static nd_status prepare(nd_job *job, uint8_t key[ND_KEY_BYTES])
{
    ND_TRY(read_key(job->options.config->launch.rdzv_key_file, key));
    ND_TRY(nd_key_to_fd(key, &job->key_fd));
    ND_TRY(name_job(job));
    ND_TRY(ND_UV(uv_loop_init(&job->loop)));
    job->loop.data = job;
    ND_TRY(meet_nodes(job, key));
    ND_TRY(ND_UV(uv_timer_init(&job->loop, &job->leave_timer)));
    job->leave_timer.data = job;
    ND_TRY(watch_signals(job));
    ND_TRY(nd_output_make_folder(job->options.config->launch.log_dir, job->place.run_id,
                                 job->log_folder, sizeof job->log_folder));
    return watch_nodes(job);
}

static nd_status start_workers(nd_job *job)
{
    const nd_attempt_options options = {
        .loop = &job->loop,
        .config = job->options.config,
        .program = job->options.program,
        .host_name = job->host_name,
        .run_id = job->place.run_id,
        .slurm_job = job->options.slurm_job,
        .log_folder = job->log_folder,
        .master_addr = job->place.master_addr,
        .master_port = job->place.master_port,
        .local_workers = job->options.local_workers,
        .world_size = job->options.world_size,
        .first_rank = job->place.first_rank,
        .config_fd = job->options.config_fd,
        .key_fd = job->key_fd,
        .context = job,
        .failed = on_workers_failed,
        .ended = on_workers_ended,
    };
    return nd_attempt_start(&options, &job->attempt);
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
    nd_attempt_signal(&job->attempt, SIGKILL);
    nd_store_server_close(job->store);
    uv_walk(&job->loop, close_handle, NULL);
    uv_run(&job->loop, UV_RUN_DEFAULT);
}

static nd_status run(nd_job *job, int *exit_code)
{
    uint8_t key[ND_KEY_BYTES];
    nd_status status = prepare(job, key);
    explicit_bzero(key, sizeof key);
    status = status == ND_OK ? start_workers(job) : status;
    if (status != ND_OK) {
        abandon(job);
        return status;
    }
    uv_run(&job->loop, UV_RUN_DEFAULT);
    *exit_code = job->exit_code;
    return ND_OK;
}

nd_status nd_job_run(const nd_job_options *options, int *exit_code)
{
    nd_job *job;
    struct sigaction hangup;
    ND_TRY(ND_ALLOC(1, &job));
    job->options = *options;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error of write */
    job->under_nohup = sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler == SIG_IGN;
    nd_identity_host(job->host_name, sizeof job->host_name);
    nd_shm_folders_clean(); /* of workers that were killed in a former job */
    nd_status status = run(job, exit_code);
    nd_shm_folders_clean(); /* of this job's workers that could not remove theirs */
    if (job->loop.data) {
        uv_loop_close(&job->loop);
    }
    nd_attempt_fini(&job->attempt);
    nd_coordinator_destroy(job->coordinator);
    nd_member_destroy(job->member);
    free(job);
    return status;
}

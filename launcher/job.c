// SPDX-License-Identifier: Apache-2.0
/* The job on this node: its loop, signals and other nodes, around one attempt after the other. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/supervise.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/shm_folder.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/uv.h"

static const int forwarded[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

typedef struct nd_job {
    nd_job_options options;
    uv_loop_t loop;
    char host_name[128];
    int key_fd;                  /* for workers */
    nd_store_server *store;      /* NULL on nodes other than 0 */
    nd_coordinator *coordinator; /* on node 0, else NULL */
    nd_member *member;           /* on another node, else NULL */
    nd_job_place place;
    nd_supervisor *supervisor; /* of the workers of this node */
    nd_config fewer;           /* of a start with fewer nodes; borrows the configuration's texts */
    int fewer_fd;              /* the same for the workers; 0: there was none */
    bool between;              /* a restart is due, but no worker runs yet */
    uv_timer_t restart_timer;  /* until the next start */
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

/* The code of the job is known: a signal that comes while handles are closed, which gives signals
 * back their default effect, no longer changes it. QUIT still ends a process that hangs. */
static void block_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof forwarded / sizeof *forwarded; i++) {
        if (forwarded[i] != SIGQUIT) {
            sigaddset(&set, forwarded[i]);
        }
    }
    pthread_sigmask(SIG_BLOCK, &set, NULL);
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
    block_signals();
    nd_store_server_close(job->store);
    job->store = NULL;
    uv_walk(&job->loop, close_watcher, NULL);
}

static void stop_workers(void *context, int milliseconds)
{
    nd_attempt_stop(((nd_job *)context)->supervisor->attempt, milliseconds);
}

static int patience_ms(void *context, int code)
{
    return nd_supervisor_patience_ms(((nd_job *)context)->supervisor, code);
}

static void on_workers_failed(void *context, int code)
{
    nd_job *job = context;
    if (job->member) {
        nd_member_failed(job->member, code);
        stop_workers(job, ND_STOP_MS);
    } else {
        nd_coordinator_failed(job->coordinator, code);
        stop_workers(job, patience_ms(job, code));
    }
}

/* What the workers of a start of this size are to do. */
static nd_status config_of(nd_job *job, int world_size, const nd_config **config, int *fd)
{
    *config = job->options.config;
    *fd = job->options.config_fd;
    if (world_size == job->options.world_size) {
        return ND_OK;
    }
    ND_TRY(nd_config_with_nodes(job->options.config, world_size / job->options.local_workers,
                                &job->fewer));
    ND_TRY(nd_config_to_fd(&job->fewer, fd));
    if (job->fewer_fd > 0) {
        close(job->fewer_fd);
    }
    job->fewer_fd = *fd;
    *config = &job->fewer;
    return ND_OK;
}

static void on_restart_timer(uv_timer_t *timer)
{
    nd_job *job = timer->data;
    const nd_supervisor *s = job->supervisor;
    nd_coordinator_restart(job->coordinator, s->epoch + 1, s->run_folder);
}

/* Node 0: the workers of this start have ended everywhere. */
static void on_over(void *context, const nd_nodes_end *end)
{
    nd_job *job = context;
    double wait_seconds = 0;
    job->between = nd_supervisor_restarts(job->supervisor, end, &wait_seconds);
    if (job->between) {
        uv_timer_start(&job->restart_timer, on_restart_timer, (uint64_t)(wait_seconds * 1e3), 0);
    } else {
        nd_coordinator_release(job->coordinator, end->code);
    }
}

static void on_workers_ended(void *context)
{
    nd_job *job = context;
    const nd_supervisor *s = job->supervisor;
    char *screen = NULL;
    size_t bytes;
    FILE *out = open_memstream(&screen, &bytes);
    nd_nodes_end end = {.asked = s->asked, .left_behind = s->attempt->left_behind};
    int code = nd_attempt_report(s->attempt, out ? out : stderr);
    if (out) {
        fclose(out);
    }
    nd_attempt_failure_of(s->attempt, &end.own, end.words, sizeof end.words);
    end.code = s->start_failed ? (int)s->start_failed : code;
    const char *text = screen && !s->start_failed ? screen : ""; /* why it failed is told */
    if (job->member) {
        nd_member_ended(job->member, &end, text);
    } else {
        nd_coordinator_ended(job->coordinator, &end, text);
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
    if (job->supervisor->attempt->running > 0) {
        return nd_attempt_start_grace(job->supervisor->attempt);
    }
    if (!uv_is_active((uv_handle_t *)&job->leave_timer)) {
        uint64_t grace_ms = (uint64_t)(job->options.config->launch.grace_seconds * 1000.0);
        uv_timer_start(&job->leave_timer, on_leave_timer, grace_ms, 0);
    }
    return false;
}

/* No worker runs on this node: the job is not started again. */
static void end_between(nd_job *job, int number)
{
    if (job->between) {
        nd_log_warning("ndlaunch: signal %s: the job ends before restart %lld", strsignal(number),
                       (long long)job->supervisor->epoch + 1);
        uv_timer_stop(&job->restart_timer);
        job->between = false;
        nd_coordinator_release(job->coordinator, ND_ERR_PREEMPTED);
    } else if (job->member) {
        nd_member_asked(job->member);
    }
}

static void on_signal(uv_signal_t *handle, int number)
{
    nd_job *job = handle->data;
    int64_t now = nd_clock_ns();
    bool again =
        number == SIGINT && job->last_interrupt_ns && now - job->last_interrupt_ns < 1000000000;
    bool ends = number == SIGTERM || number == SIGINT || number == SIGQUIT || number == SIGHUP;
    job->last_interrupt_ns = number == SIGINT ? now : job->last_interrupt_ns;
    if (again && job->supervisor->attempt->running == 0) {
        finish(job, 128 + number); /* only other nodes still have workers */
        return;
    }
    if (ends || number == SIGUSR1) {
        job->supervisor->asked = true;
        if (job->supervisor->attempt->running == 0) {
            end_between(job, number);
        }
    }
    if (again) {
        nd_attempt_kill(job->supervisor->attempt, ND_KILLED_INTERRUPT);
    } else if (number == SIGQUIT) {
        nd_attempt_signal(job->supervisor->attempt, number); /* workers do not handle it, either */
    } else {
        nd_attempt_forward(job->supervisor->attempt, number);
    }
    if (ends && !job->finished && start_grace(job)) {
        nd_log_info("ndlaunch: signal %s forwarded; workers have %g s (--grace-seconds) to end "
                    "their step",
                    strsignal(number), job->options.config->launch.grace_seconds);
    }
}

/* From the first start on. Before it main ends the process at a signal. */
static nd_status watch_signals(nd_job *job)
{
    for (size_t i = 0; i < sizeof forwarded / sizeof *forwarded && !job->signals[i].data; i++) {
        ND_TRY(ND_UV(uv_signal_init(&job->loop, &job->signals[i])));
        job->signals[i].data = job;
        if (!job->under_nohup || forwarded[i] != SIGHUP) {
            ND_TRY(ND_UV(uv_signal_start(&job->signals[i], on_signal, forwarded[i])));
        }
    }
    return ND_OK;
}

/* Starts the workers of this node; the store takes only these from here on. */
static void start_workers(void *context, const nd_nodes_start *start)
{
    nd_job *job = context;
    nd_attempt_options *o = &job->supervisor->options;
    char run_id[ND_WIRE_TEXT_MAX];
    job->between = false;
    if (job->store && start->epoch > 0) {
        nd_restart_run_id(job->place.job, start->epoch, run_id, sizeof run_id);
        nd_server_restart(nd_store_server_engine(job->store), run_id, (uint32_t)start->epoch,
                          start->world_size);
    }
    nd_status status = watch_signals(job);
    status =
        status == ND_OK ? config_of(job, start->world_size, &o->config, &o->config_fd) : status;
    o->world_size = start->world_size;
    nd_supervisor_start(job->supervisor, start, status);
}

static void on_notice(void *context, const char *line)
{
    nd_log_info("ndlaunch: %s", line);
}

/* The job's key comes from a file, from standard input for "-", or is made here for "". */
static nd_status read_key(const char *file, uint8_t key[ND_KEY_BYTES])
{
    if (strcmp(file, "-") == 0) {
        return nd_key_read_stdin(key);
    }
    return file[0] ? nd_key_read_file(file, key) : nd_key_random(key);
}

/* The store listens at launch.rdzv_endpoint, or at a free port of loopback. Other hosts can
 * reach the store only where the job has a key file. */
static nd_status find_endpoint(const nd_config *config, nd_address *out)
{
    nd_address addresses[ND_ADDRESS_MAX];
    char host[ND_HOST_MAX] = "127.0.0.1";
    int port = 0, count = 0;
    if (config->launch.rdzv_endpoint[0]) {
        ND_TRY(nd_endpoint_parse(config->launch.rdzv_endpoint, host, &port));
    }
    ND_TRY(nd_address_resolve(host, port, addresses, &count));
    *out = addresses[0];
    return nd_address_is_loopback(out) || config->launch.rdzv_key_file[0]
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "launch.rdzv_endpoint %s is open to other hosts and needs a key; make one "
                         "with `ndlaunch --make-key FILE`, copy it to all nodes, and name it with "
                         "--rdzv-key-file",
                         config->launch.rdzv_endpoint);
}

static nd_status open_store(nd_job *job, const uint8_t key[ND_KEY_BYTES])
{
    const nd_config *config = job->options.config;
    nd_store_server_options options = {
        .loop = &job->loop,
        .server = {.version = ND_VERSION,
                   .run_id = job->place.job,
                   .world_size = job->options.world_size,
                   .nnodes = (int)(config->launch.nnodes + config->launch.spare_nodes)},
        .hooks = {.context = job->coordinator,
                  .notice = on_notice,
                  .left = nd_coordinator_on_left,
                  .node_frame = nd_coordinator_on_frame},
    };
    ND_TRY(find_endpoint(config, &options.address));
    memcpy(options.key, key, ND_KEY_BYTES);
    nd_status status = nd_store_server_open(&options, &job->store);
    explicit_bzero(options.key, sizeof options.key);
    ND_TRY(status);
    snprintf(job->place.master_addr, sizeof job->place.master_addr, "%s",
             nd_store_server_address(job->store));
    job->place.master_port = nd_store_server_port(job->store);
    return ND_OK;
}

/* Opens the store, or joins node 0. */
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
        .start = start_workers,
        .finish = finish,
        .patience_ms = patience_ms,
        .over = on_over,
    };
    if (o->config->launch.node_rank > 0) {
        return nd_member_join(&options, key, &job->member, &job->place);
    }
    ND_TRY(nd_coordinator_create(&options, &job->coordinator));
    return open_store(job, key);
}

/* Everything but the workers, which start once the nodes have met. The caller wipes the key. */
static nd_status prepare(nd_job *job, uint8_t key[ND_KEY_BYTES])
{
    ND_TRY(read_key(job->options.config->launch.rdzv_key_file, key));
    ND_TRY(nd_key_to_fd(key, &job->key_fd));
    /* A key file may serve many jobs, so the job's name comes from a random number of its own. */
    uint8_t bytes[ND_KEY_BYTES];
    ND_TRY(nd_key_random(bytes));
    snprintf(job->place.job, sizeof job->place.job, "nd-%02x%02x%02x%02x", bytes[0], bytes[1],
             bytes[2], bytes[3]);
    ND_TRY(ND_UV(uv_loop_init(&job->loop)));
    job->loop.data = job;
    ND_TRY(meet_nodes(job, key));
    const nd_attempt_options options = {
        .loop = &job->loop,
        .config = job->options.config,
        .args = job->options.args,
        .input = job->options.input,
        .host_name = job->host_name,
        .slurm_job = job->options.slurm_job,
        .master_addr = job->place.master_addr,
        .master_port = job->place.master_port,
        .local_workers = job->options.local_workers,
        .key_fd = job->key_fd,
        .context = job,
        .failed = on_workers_failed,
        .ended = on_workers_ended,
    };
    nd_supervisor_init(job->supervisor, &options, job->place.job);
    ND_TRY(ND_UV(uv_timer_init(&job->loop, &job->leave_timer)));
    ND_TRY(ND_UV(uv_timer_init(&job->loop, &job->restart_timer)));
    job->leave_timer.data = job->restart_timer.data = job;
    return job->member ? nd_member_watch(job->member)
                       : nd_coordinator_watch(job->coordinator, nd_store_server_engine(job->store));
}

static void close_handle(uv_handle_t *handle, void *context)
{
    if (!uv_is_closing(handle)) {
        uv_close(handle, NULL);
    }
}

static nd_status run(nd_job *job, int *exit_code)
{
    uint8_t key[ND_KEY_BYTES];
    nd_status status = prepare(job, key);
    explicit_bzero(key, sizeof key);
    if (status == ND_OK) {
        uv_run(&job->loop, UV_RUN_DEFAULT);
        *exit_code = job->exit_code;
    }
    if (job->loop.data) {
        nd_store_server_close(job->store);
        uv_walk(&job->loop, close_handle, NULL);
        uv_run(&job->loop, UV_RUN_DEFAULT);
    }
    return status;
}

nd_status nd_job_run(const nd_job_options *options, int *exit_code)
{
    nd_job *job;
    struct sigaction hangup;
    ND_TRY(ND_ALLOC(1, &job));
    if (nd_supervisor_create(&job->supervisor) != ND_OK) {
        free(job);
        return nd_error_last()->status;
    }
    job->options = *options;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error of write */
    job->under_nohup = sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler == SIG_IGN;
    nd_identity_host(job->host_name, sizeof job->host_name);
    nd_status status = run(job, exit_code);
    nd_shm_folders_clean(); /* of this job's workers that could not remove theirs */
    if (job->loop.data) {
        uv_loop_close(&job->loop);
    }
    if (job->fewer_fd > 0) {
        close(job->fewer_fd);
    }
    nd_supervisor_destroy(job->supervisor);
    nd_coordinator_destroy(job->coordinator);
    nd_member_destroy(job->member);
    free(job);
    return status;
}

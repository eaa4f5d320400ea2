// SPDX-License-Identifier: Apache-2.0
/* The job on this node: its loop, signals and other nodes, around one attempt after the other, each
 * with an epoch of its own. On node 0 it chooses whether a further one follows. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/launcher.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/shm_folder.h"
#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/uv.h"

enum {
    SIGNAL_BASE = 128, /* code of signal 0 */
    HANG_MS = 3000,    /* others may be at the same deadline, and name the stuck rank */
    MESSAGES_MS = 200,
};

/* Restarts. */

/* A start that fails sooner than this after its first step is likely to fail soon again. */
static const double brief_seconds = 10;
static const double wait_most_seconds = 60;

/* A failure with this code may be gone at the next start. */
static bool is_worth(int code)
{
    switch (code) {
    case ND_OK:
    case ND_ERR_CONFIG:
    case ND_ERR_DATA:
    case ND_ERR_NUMERIC:
    case ND_ERR_RESOURCE:   /* needs more memory, or a smaller job */
    case ND_ERR_CANTCREATE: /* needs room, or rights */
    case ND_ERR_PREEMPTED:  /* was asked to end, and is started again from outside */
        return false;
    default: /* internal, I/O, a deadline, a signal, and codes of libraries that end the process */
        return true;
    }
}

static nd_restart verdict_on(const nd_restart_case *c)
{
    if (c->max_restarts == 0 || c->code == ND_OK) {
        return ND_RESTART_OFF;
    }
    if (c->asked || c->code == ND_ERR_PREEMPTED) {
        return ND_RESTART_ASKED;
    }
    if (!is_worth(c->code)) {
        return ND_RESTART_NOT_WORTH;
    }
    if (c->left_behind) {
        return ND_RESTART_LEFT_BEHIND;
    }
    if (c->epoch >= c->max_restarts) {
        return ND_RESTART_ALL_USED;
    }
    if (!c->stepped) {
        return c->epoch == 0 ? ND_RESTART_NO_STEP : ND_RESTART_NO_START;
    }
    return c->epoch == 0 || c->durable > c->began_at ? ND_RESTART_YES : ND_RESTART_NO_PROGRESS;
}

static void describe_restart(const nd_restart_case *c, nd_restart_choice *choice)
{
    const int64_t kept = c->durable >= 0 ? c->durable : c->began_at;
    const int64_t lost = c->done > kept ? c->done - kept : 0;
    char when[48] = "at once", from[48] = "the beginning";
    if (choice->wait_seconds > 0) {
        snprintf(when, sizeof when, "in %g s", choice->wait_seconds);
    } else if (c->lacks_nodes) {
        snprintf(when, sizeof when, "when enough nodes are back");
    }
    if (kept > 0) {
        snprintf(from, sizeof from, "step %lld", (long long)kept);
    }
    snprintf(choice->text, sizeof choice->text,
             "restart %lld of %lld follows %s, from %s; %lld step%s lost", (long long)c->epoch + 1,
             (long long)c->max_restarts, when, from, (long long)lost, lost == 1 ? " is" : "s are");
}

nd_restart_choice nd_restart_decide(const nd_restart_case *c)
{
    static const char *const reasons[] = {
        [ND_RESTART_OFF] = "",
        [ND_RESTART_ASKED] = "",
        [ND_RESTART_NOT_WORTH] = "this failure would come again",
        [ND_RESTART_NO_STEP] = "the failure came before the first step",
        [ND_RESTART_NO_START] = "the last restart failed before its first step",
        [ND_RESTART_NO_PROGRESS] = "no checkpoint was completed since the last restart",
        [ND_RESTART_ALL_USED] = "all restarts of launch.max_restarts are used",
        [ND_RESTART_LEFT_BEHIND] = "a killed worker did not end",
    };
    nd_restart_choice choice = {.verdict = verdict_on(c)};
    if (choice.verdict != ND_RESTART_YES) {
        snprintf(choice.text, sizeof choice.text, "%s", reasons[choice.verdict]);
        return choice;
    }
    choice.brief = c->epoch > 0 && c->seconds < brief_seconds ? c->brief + 1 : 0;
    choice.wait_seconds = choice.brief > 0 ? 1 : 0;
    for (int i = 1; i < choice.brief && choice.wait_seconds < wait_most_seconds; i++) {
        choice.wait_seconds *= 2;
    }
    if (choice.wait_seconds > wait_most_seconds) {
        choice.wait_seconds = wait_most_seconds;
    }
    describe_restart(c, &choice);
    return choice;
}

static const int forwarded[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

typedef struct nd_job {
    nd_job_options options;
    uv_loop_t loop;
    char host_name[128];
    int key_fd; /* for workers */
    nd_nodes *nodes;
    nd_attempt_options start; /* of the current attempt; the texts of one start are these: */
    char run_id[96];
    char run_folder[ND_RUN_FOLDER_MAX]; /* that the first start began, or "" */
    nd_attempt *attempt;                /* the current one, or the last; without workers at first */
    nd_attempt *former;                 /* of which the loop may still have handles */
    nd_status start_failed;             /* the workers of this start could not be started */
    bool asked;                         /* a signal asked the job to end */
    int brief;                          /* nd_restart_case */
    nd_config fewer; /* of a start with fewer nodes; borrows the configuration's texts */
    int fewer_fd;    /* the same for the workers; 0: there was none */
    uv_signal_t signals[sizeof forwarded / sizeof *forwarded];
    uv_timer_t leave_timer; /* for the other nodes to end after a signal */
    bool under_nohup;       /* HUP was ignored when we started, and stays ignored */
    int64_t last_interrupt_ns;
    bool finished; /* handles are closing */
    int exit_code;
} nd_job;

/* Closes the handle; with `watchers_only` not NULL only one that no store and no worker closes. */
static void close_handle(uv_handle_t *handle, void *watchers_only)
{
    uv_handle_type type = uv_handle_get_type(handle);
    bool watcher = type == UV_TIMER || type == UV_SIGNAL || type == UV_POLL;
    if ((watcher || !watchers_only) && !uv_is_closing(handle)) {
        uv_close(handle, NULL);
    }
}

/* The job is over: closes everything, which ends the loop. Pipes close when their workers end, the
 * store's handles with the store. */
static void finish(void *context, int exit_code)
{
    nd_job *job = context;
    sigset_t set;
    if (job->finished) {
        return;
    }
    job->finished = true;
    job->exit_code = exit_code;
    /* A signal that comes while handles are closed, which gives signals back their default effect,
     * no longer changes the code. QUIT still ends a process that hangs. */
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof forwarded / sizeof *forwarded; i++) {
        if (forwarded[i] != SIGQUIT) {
            sigaddset(&set, forwarded[i]);
        }
    }
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    nd_nodes_close_store(job->nodes);
    uv_walk(&job->loop, close_handle, job);
}

/* Describes how far this start came, as rank 0 says on node 0's page, and its end with `code`. */
static nd_restart_case restart_case(const nd_job *job, int code)
{
    const nd_progress *page = &job->attempt->progress;
    nd_restart_case c = {.code = code,
                         .asked = job->asked,
                         .left_behind = job->attempt->left_behind,
                         .epoch = job->start.epoch,
                         .max_restarts = job->options.config->launch.max_restarts,
                         .brief = job->brief};
    int64_t stepped_ns = page->job ? atomic_load(&page->job->stepped_ns) : 0;
    if (stepped_ns != 0) {
        c.stepped = true;
        c.began_at = atomic_load(&page->job->first_step);
        c.durable = atomic_load(&page->job->durable_step);
        c.done = nd_progress_completed_steps(&page->slots[0]);
        c.seconds = (double)(nd_clock_ns() - stepped_ns) * 1e-9;
    }
    return c;
}

static void stop_workers(void *context, int milliseconds)
{
    nd_attempt_stop(((nd_job *)context)->attempt, milliseconds);
}

/* The time that workers get to end after a failure; it is short where a restart follows. The peers
 * of a worker that died of a signal know nothing about it, and others have at most their messages
 * left to write. */
static int patience_ms(void *context, int code)
{
    const nd_restart_case c = restart_case(context, code);
    return nd_restart_decide(&c).verdict != ND_RESTART_YES ? ND_STOP_MS
           : code > SIGNAL_BASE                            ? 0
           : code == ND_ERR_HANG                           ? HANG_MS
                                                           : MESSAGES_MS;
}

static void on_workers_failed(void *context, int code)
{
    nd_job *job = context;
    job->nodes->role->failed(job->nodes, code);
}

/* Finds the configuration for the workers of a start of this size, and its descriptor. */
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

/* Node 0: the workers of this start have ended everywhere. Says what follows, or why nothing does,
 * and where a run that saves can go on. */
static bool restarts(void *context, const nd_nodes_end *end, double *wait_seconds)
{
    nd_job *job = context;
    const nd_progress *page = &job->attempt->progress;
    const char *folder = page->job ? nd_progress_run_folder(page) : "";
    nd_restart_case c = restart_case(job, end->code);
    c.asked |= end->asked;
    c.left_behind |= end->left_behind;
    c.lacks_nodes = end->lacks_nodes;
    const nd_restart_choice choice = nd_restart_decide(&c);
    if (choice.verdict == ND_RESTART_YES) {
        if (folder[0]) {
            snprintf(job->run_folder, sizeof job->run_folder, "%s", folder);
        }
        job->brief = choice.brief;
        nd_log_warning("ndlaunch: %s; %s", end->words, choice.text);
        *wait_seconds = choice.wait_seconds;
        return true;
    }
    if (choice.text[0]) {
        nd_log_warning("ndlaunch: the job is not started again: %s", choice.text);
    }
    const int64_t durable = page->job ? atomic_load(&page->job->durable_step) : -1;
    if (end->code != 0 && end->code != ND_ERR_PREEMPTED && durable > 0) {
        nd_log_info("ndlaunch: the newest checkpoint is that of step %lld; to go on, give the same "
                    "command with --save-dir %s --resume-from-checkpoint latest",
                    (long long)durable, folder);
    }
    return false;
}

static void on_workers_ended(void *context)
{
    nd_job *job = context;
    nd_nodes_end end = {.asked = job->asked, .left_behind = job->attempt->left_behind};
    char *screen = nd_attempt_report(job->attempt, &end);
    const nd_status ours = job->start_failed            ? job->start_failed
                           : job->attempt->lost_results ? ND_ERR_CANTCREATE
                                                        : ND_OK;
    if (ours != ND_OK) {
        end.code = (int)ours;
        end.weight = nd_failure_weight_of(end.code);
    }
    const bool told = !screen || ours != ND_OK; /* what this node itself met is told */
    job->nodes->role->ended(job->nodes, &end, told ? "" : screen);
    free(screen);
}

static void on_leave_timer(uv_timer_t *timer)
{
    finish(timer->data, SIGNAL_BASE + SIGTERM); /* the other nodes' workers did not end */
}

static void on_signal(uv_signal_t *handle, int number)
{
    nd_job *job = handle->data;
    const bool running = job->attempt->running > 0;
    const double grace = job->options.config->launch.grace_seconds;
    int64_t now = nd_clock_ns();
    bool again =
        number == SIGINT && job->last_interrupt_ns && now - job->last_interrupt_ns < 1000000000;
    bool ends = number == SIGTERM || number == SIGINT || number == SIGQUIT || number == SIGHUP;
    job->last_interrupt_ns = number == SIGINT ? now : job->last_interrupt_ns;
    if (again && !running) {
        finish(job, SIGNAL_BASE + number); /* only other nodes still have workers */
        return;
    }
    if (ends || number == SIGUSR1) {
        job->asked = true;
        if (!running) {
            job->nodes->role->asked(job->nodes, number);
        }
    }
    if (again) {
        nd_attempt_kill(job->attempt, ND_KILLED_INTERRUPT);
    } else {
        nd_attempt_forward(job->attempt, number);
    }
    if (!ends || job->finished) {
        return;
    }
    if (!running) {
        if (!uv_is_active((uv_handle_t *)&job->leave_timer)) {
            uv_timer_start(&job->leave_timer, on_leave_timer, (uint64_t)(grace * 1e3), 0);
        }
    } else if (nd_attempt_start_grace(job->attempt)) { /* else that time already runs */
        nd_log_info("ndlaunch: signal %s forwarded; workers have %g s (--grace-seconds) to end "
                    "their step",
                    strsignal(number), grace);
    }
}

/* The attempts before the current one, as far as the loop has closed all of them. */
static void free_former(nd_job *job, bool loop_ended)
{
    for (nd_attempt **at = &job->former; *at;) {
        nd_attempt *next = (*at)->next;
        if (nd_attempt_free(*at, loop_ended)) {
            *at = next;
        } else {
            at = &(*at)->next;
        }
    }
}

static nd_status try_start(nd_job *job, const nd_nodes_start *next)
{
    nd_attempt_options *o = &job->start;
    nd_attempt *attempt;
    ND_TRY(ND_ALLOC(1, &attempt));
    job->attempt->next = job->former;
    job->former = job->attempt;
    job->attempt = attempt;
    free_former(job, false);
    o->epoch = next->epoch;
    o->first_rank = next->first_rank;
    o->world_size = next->world_size;
    nd_restart_run_id(job->nodes->job, next->epoch, job->run_id, sizeof job->run_id);
    /* From the first start on signals are handled here. Before it main ends the process. */
    for (size_t i = 0; i < sizeof forwarded / sizeof *forwarded && !job->signals[i].data; i++) {
        ND_TRY(ND_UV(uv_signal_init(&job->loop, &job->signals[i])));
        job->signals[i].data = job;
        if (!job->under_nohup || forwarded[i] != SIGHUP) {
            ND_TRY(ND_UV(uv_signal_start(&job->signals[i], on_signal, forwarded[i])));
        }
    }
    ND_TRY(config_of(job, next->world_size, &o->config, &o->config_fd));
    return nd_attempt_start(o, job->attempt);
}

/* Starts the workers of this node. A start that fails ends as a failure of its own. */
static void start_workers(void *context, const nd_nodes_start *start)
{
    nd_job *job = context;
    if (start->run_folder != job->run_folder) {
        snprintf(job->run_folder, sizeof job->run_folder, "%s", start->run_folder);
    }
    nd_shm_folders_clean(); /* the memory of killed workers, which the next ones need */
    job->start_failed = try_start(job, start);
    if (job->start_failed != ND_OK) {
        nd_log_error("ndlaunch: start %lld of the workers failed: %s", (long long)start->epoch,
                     nd_error_last()->message);
        nd_attempt_kill(job->attempt, ND_KILLED_GRACE);
        if (job->attempt->running == 0) {
            on_workers_ended(job);
        }
    } else if (job->asked) { /* the plan crossed the word of the signal */
        uv_timer_stop(&job->leave_timer);
        nd_attempt_forward(job->attempt, SIGTERM);
        (void)nd_attempt_start_grace(job->attempt);
    }
}

/* Everything but the workers, which start once the nodes have met. The caller wipes the key. */
static nd_status prepare(nd_job *job, uint8_t key[ND_KEY_BYTES])
{
    const nd_job_options *o = &job->options;
    const nd_nodes_options options = {
        .loop = &job->loop,
        .job = o,
        .host_name = job->host_name,
        .context = job,
        .stop = stop_workers,
        .start = start_workers,
        .finish = finish,
        .patience_ms = patience_ms,
        .restarts = restarts,
        .run_folder = job->run_folder,
    };
    ND_TRY(nd_key_read(o->config->launch.rdzv_key_file, key));
    ND_TRY(nd_key_to_fd(key, &job->key_fd));
    ND_TRY(ND_UV(uv_loop_init(&job->loop)));
    job->loop.data = job;
    ND_TRY(ND_UV(uv_timer_init(&job->loop, &job->leave_timer)));
    job->leave_timer.data = job;
    ND_TRY(o->config->launch.node_rank > 0 ? nd_member_join(&options, key, &job->nodes)
                                           : nd_coordinator_open(&options, key, &job->nodes));
    job->start = (nd_attempt_options){
        .loop = &job->loop,
        .config = o->config,
        .args = o->args,
        .input = o->input,
        .host_name = job->host_name,
        .run_id = job->run_id,
        .run_folder = job->run_folder,
        .slurm_job = o->slurm_job,
        .master_addr = job->nodes->master_addr,
        .master_port = job->nodes->master_port,
        .local_workers = o->local_workers,
        .key_fd = job->key_fd,
        .context = job,
        .failed = on_workers_failed,
        .ended = on_workers_ended,
    };
    return ND_OK;
}

static nd_status run_loop(nd_job *job, int *exit_code)
{
    uint8_t key[ND_KEY_BYTES];
    nd_status status = prepare(job, key);
    explicit_bzero(key, sizeof key);
    if (status == ND_OK) {
        uv_run(&job->loop, UV_RUN_DEFAULT);
    }
    if (job->loop.data) {
        if (job->nodes) {
            nd_nodes_close_store(job->nodes);
        }
        uv_walk(&job->loop, close_handle, NULL);
        uv_run(&job->loop, UV_RUN_DEFAULT);
    }
    /* The last bytes of a worker are read after its end. */
    const bool lost = job->exit_code == 0 && job->attempt->lost_results;
    *exit_code = lost ? ND_ERR_CANTCREATE : job->exit_code;
    return status;
}

nd_status nd_job_run(const nd_job_options *options, int *exit_code)
{
    nd_job *job;
    struct sigaction hangup;
    ND_TRY(ND_ALLOC(1, &job));
    if (ND_ALLOC(1, &job->attempt) != ND_OK) {
        free(job);
        return nd_error_last()->status;
    }
    job->options = *options;
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error of write */
    job->under_nohup = sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler == SIG_IGN;
    nd_identity_host(job->host_name, sizeof job->host_name);
    nd_status status = run_loop(job, exit_code);
    nd_shm_folders_clean(); /* of this job's workers that could not remove theirs */
    if (job->loop.data) {
        uv_loop_close(&job->loop);
    }
    if (job->fewer_fd > 0) {
        close(job->fewer_fd);
    }
    free_former(job, true);
    (void)nd_attempt_free(job->attempt, true);
    if (job->nodes) {
        job->nodes->role->destroy(job->nodes);
    }
    free(job);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
/* The job on this node: its loop, signals and other nodes, around one attempt after the other. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/launcher.h"
#include "launcher/nodes.h"
#include "launcher/restart.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/shm_folder.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/uv.h"

enum { FIRST_STEP_MS = 10 }; /* between two looks for the first step of a restart */

static const int forwarded[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

typedef struct nd_job {
    nd_job_options options;
    uv_loop_t loop;
    char host_name[128];
    char log_folder[4096];              /* of this start, below launch.log_dir, or "" */
    char run_folder[ND_RUN_FOLDER_MAX]; /* that the first start began, or "" */
    char run_id[96];                    /* of this start */
    int key_fd;                         /* for workers */
    nd_store_server *store;             /* NULL on nodes other than 0 */
    nd_coordinator *coordinator;        /* on node 0 of several, or NULL */
    nd_member *member;                  /* on another node of several, or NULL */
    nd_member_place place;              /* name, store and first rank, on node 0 too */
    nd_attempt *attempt;                /* the current one, or the last */
    nd_attempt *former;                 /* of which the loop may still have handles */
    int64_t epoch;                      /* of the current attempt */
    nd_status start_failed;             /* its workers could not be started */
    bool asked;                         /* a signal asked the job to end */
    bool between;                       /* a restart is due, but no worker runs yet */
    int brief;                          /* nd_restart_case */
    nd_restart_times times;
    char what[256];              /* failed */
    uv_timer_t restart_timer;    /* until the next start */
    uv_timer_t first_step_timer; /* looks for the first step of a restart */
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

static void on_workers_failed(void *context, int code);
static void on_workers_ended(void *context);
static void on_first_step_timer(uv_timer_t *timer);

/* The workers of the next start begin; those of the last one have ended. */
static nd_status start_workers(nd_job *job, int64_t epoch)
{
    const nd_config *config = job->options.config;
    const nd_attempt_options options = {
        .loop = &job->loop,
        .config = config,
        .program = job->options.program,
        .host_name = job->host_name,
        .run_id = job->run_id,
        .epoch = epoch,
        .run_folder = job->run_folder,
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
    job->epoch = epoch;
    nd_restart_run_id(job->place.job, epoch, job->run_id, sizeof job->run_id);
    ND_TRY(nd_output_make_folder(config->launch.log_dir, job->run_id, job->log_folder,
                                 sizeof job->log_folder));
    nd_status status = nd_attempt_start(&options, job->attempt);
    job->times.started = job->attempt->started_ns;
    return status;
}

/* The attempts before the current one, as far as the loop has closed all of them. */
static void free_former(nd_job *job, bool all)
{
    for (nd_attempt **at = &job->former; *at;) {
        nd_attempt *attempt = *at;
        if (all || nd_attempt_is_closed(attempt)) {
            *at = attempt->next;
            nd_attempt_fini(attempt);
            free(attempt);
        } else {
            at = &attempt->next;
        }
    }
}

/* Starts the workers of this node again. What cannot be started ends as a failure of its own. */
static void start_again(void *context, int64_t epoch, const char *run_folder)
{
    nd_job *job = context;
    nd_attempt *next;
    nd_shm_folders_clean(); /* the memory of killed workers, which the next ones need */
    free_former(job, false);
    job->between = false;
    nd_status status = ND_ALLOC(1, &next);
    if (status == ND_OK) {
        nd_attempt_retire(job->attempt);
        job->attempt->next = job->former;
        job->former = job->attempt;
        job->attempt = next;
        if (run_folder != job->run_folder) {
            snprintf(job->run_folder, sizeof job->run_folder, "%s", run_folder);
        }
        if (job->store) {
            char run_id[sizeof job->run_id];
            nd_restart_run_id(job->place.job, epoch, run_id, sizeof run_id);
            nd_server_restart(nd_store_server_engine(job->store), run_id, (uint32_t)epoch);
        }
        status = start_workers(job, epoch);
    }
    if (status != ND_OK) {
        nd_log_error("ndlaunch: start %lld of the workers failed: %s", (long long)epoch,
                     nd_error_last()->message);
        job->start_failed = status;
        nd_attempt_kill(job->attempt, ND_KILLED_GRACE);
        if (job->attempt->running == 0) {
            on_workers_ended(job);
        }
    } else if (job->coordinator || !job->member) {
        uv_timer_start(&job->first_step_timer, on_first_step_timer, FIRST_STEP_MS, FIRST_STEP_MS);
    }
}

/* What this start has reached, as rank 0 says on node 0's page, and how it ends with this code. */
static nd_restart_case restart_case(const nd_job *job, int code)
{
    const nd_progress *page = &job->attempt->progress;
    nd_restart_case c = {.code = code,
                         .asked = job->asked,
                         .epoch = job->epoch,
                         .max_restarts = job->options.config->launch.max_restarts,
                         .brief = job->brief};
    int64_t stepped_ns = page->job ? nd_progress_marked_ns(page, ND_MARK_FIRST_STEP) : 0;
    if (stepped_ns != 0) {
        c.stepped = true;
        c.began_at = nd_progress_first_step(page);
        c.durable = nd_progress_durable_step(page);
        c.seconds = (double)(nd_clock_ns() - stepped_ns) * 1e-9;
    }
    return c;
}

/* Time for the other workers to end after a failure: little where a restart follows. */
static int patience_ms(void *context, int code)
{
    const nd_restart_case c = restart_case(context, code);
    return nd_restart_decide(&c).verdict == ND_RESTART_YES ? nd_restart_patience_ms(code)
                                                           : ND_STOP_MS;
}

static void stop_workers(void *context, int milliseconds)
{
    nd_job *job = context;
    job->times.seen = job->times.seen ? job->times.seen : nd_clock_ns();
    nd_attempt_stop(job->attempt, milliseconds);
}

static void on_workers_failed(void *context, int code)
{
    nd_job *job = context;
    if (job->coordinator) {
        nd_coordinator_failed(job->coordinator, code);
    } else if (job->member) {
        nd_member_failed(job->member, code);
    }
    stop_workers(job, job->member ? ND_STOP_MS : patience_ms(job, code));
}

static void end_job(nd_job *job, int code)
{
    if (job->coordinator) {
        nd_coordinator_release(job->coordinator, code);
    } else {
        finish(job, code);
    }
}

/* Keeps what the pages of this start tell, for the next one and the lines about it. */
static void remember_start(nd_job *job, const nd_nodes_end *end)
{
    const nd_progress *page = &job->attempt->progress;
    nd_restart_times *t = &job->times;
    t->occurred = end->occurred_ns;
    t->seen = t->seen ? t->seen : nd_clock_ns();
    t->ended = nd_clock_ns();
    snprintf(job->what, sizeof job->what, "%s", end->words);
    if (page->job) {
        int64_t first = nd_progress_first_step(page);
        int64_t done = nd_progress_completed_steps(&page->slots[0]);
        const char *folder = nd_progress_run_folder(page);
        t->steps_before = done > first ? done : first;
        t->steps_from = nd_progress_durable_step(page);
        if (folder[0]) {
            snprintf(job->run_folder, sizeof job->run_folder, "%s", folder);
        }
    }
}

static void on_restart_timer(uv_timer_t *timer)
{
    nd_job *job = timer->data;
    if (job->coordinator) {
        nd_coordinator_restart(job->coordinator, job->epoch + 1, job->run_folder);
    } else {
        start_again(job, job->epoch + 1, job->run_folder);
    }
}

/* Node 0: the workers of this start have ended everywhere. */
static void on_over(void *context, const nd_nodes_end *end)
{
    nd_job *job = context;
    char when[48] = "at once", from[48] = "the beginning";
    nd_restart_case c = restart_case(job, end->code);
    c.asked |= end->asked;
    nd_restart_choice choice = nd_restart_decide(&c);
    uv_timer_stop(&job->first_step_timer);
    if (choice.verdict != ND_RESTART_YES) {
        const char *reason = nd_restart_reason(choice.verdict);
        if (reason) {
            nd_log_warning("ndlaunch: the job is not started again: %s", reason);
        }
        end_job(job, end->code);
        return;
    }
    remember_start(job, end);
    job->brief = choice.brief;
    job->between = true;
    if (choice.wait_seconds > 0) {
        snprintf(when, sizeof when, "in %g s", choice.wait_seconds);
    }
    if (job->times.steps_from > 0) {
        snprintf(from, sizeof from, "step %lld", (long long)job->times.steps_from);
    }
    nd_log_warning("ndlaunch: %s; restart %lld of %lld follows %s, from %s", job->what,
                   (long long)job->epoch + 1, (long long)c.max_restarts, when, from);
    uv_timer_start(&job->restart_timer, on_restart_timer, (uint64_t)(choice.wait_seconds * 1e3), 0);
}

/* The line about a restart, once its first step is done. */
static void on_first_step_timer(uv_timer_t *timer)
{
    nd_job *job = timer->data;
    const nd_progress *page = &job->attempt->progress;
    nd_restart_times *t = &job->times;
    char text[256];
    t->first_step = nd_progress_marked_ns(page, ND_MARK_FIRST_STEP);
    if (t->first_step == 0) {
        return;
    }
    uv_timer_stop(timer);
    t->joined = nd_progress_marked_ns(page, ND_MARK_JOINED);
    t->loaded = nd_progress_marked_ns(page, ND_MARK_LOADED);
    t->steps_from = nd_progress_first_step(page);
    nd_restart_text(t, text, sizeof text);
    nd_log_info("ndlaunch: restart %lld of %lld, since %s: %s", (long long)job->epoch,
                (long long)job->options.config->launch.max_restarts, job->what, text);
    *t = (nd_restart_times){0};
}

static void on_workers_ended(void *context)
{
    nd_job *job = context;
    char *screen = NULL;
    size_t bytes;
    FILE *out = open_memstream(&screen, &bytes);
    nd_nodes_end end = {.asked = job->asked};
    int code = nd_attempt_report(job->attempt, out ? out : stderr);
    if (out) {
        fclose(out);
    }
    nd_attempt_failure_of(job->attempt, &end.occurred_ns, end.words, sizeof end.words);
    code = job->start_failed ? (int)job->start_failed : code;
    const char *text = screen ? screen : "";
    if (job->coordinator) {
        nd_coordinator_ended(job->coordinator, code, &end, text);
    } else if (job->member) {
        nd_member_ended(job->member, code, job->asked, text);
    } else {
        fputs(text, stderr);
        end.code = code;
        on_over(job, &end);
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
    if (job->attempt->running > 0) {
        return nd_attempt_start_grace(job->attempt);
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
                       (long long)job->epoch + 1);
        uv_timer_stop(&job->restart_timer);
        job->between = false;
        end_job(job, ND_ERR_PREEMPTED);
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
    if (again && job->attempt->running == 0) {
        finish(job, 128 + number); /* only other nodes still have workers */
        return;
    }
    if (ends || number == SIGUSR1) {
        job->asked = true;
        if (job->attempt->running == 0) {
            end_between(job, number);
        }
    }
    if (again) {
        nd_attempt_kill(job->attempt, ND_KILLED_INTERRUPT);
    } else if (number == SIGQUIT) {
        nd_attempt_signal(job->attempt, number); /* workers do not handle it, either */
    } else {
        nd_attempt_forward(job->attempt, number);
    }
    if (ends && !job->finished && start_grace(job)) {
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
    const nd_rendezvous meeting = {
        .loop = &job->loop,
        .config = job->options.config,
        .name = job->place.job,
        .world_size = job->options.world_size,
        .hooks = {.context = job->coordinator,
                  .notice = on_notice,
                  .left = on_left,
                  .node_frame = nd_coordinator_on_frame},
    };
    ND_TRY(nd_rendezvous_open(&meeting, key, &job->store));
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
        .start = start_again,
        .finish = finish,
        .patience_ms = patience_ms,
        .over = on_over,
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

/* Everything but the workers. The caller wipes the key. */
static nd_status prepare(nd_job *job, uint8_t key[ND_KEY_BYTES])
{
    ND_TRY(nd_rendezvous_key(job->options.config->launch.rdzv_key_file, key));
    ND_TRY(nd_key_to_fd(key, &job->key_fd));
    ND_TRY(nd_rendezvous_name(job->place.job, sizeof job->place.job));
    ND_TRY(ND_UV(uv_loop_init(&job->loop)));
    job->loop.data = job;
    ND_TRY(meet_nodes(job, key));
    uv_timer_t *const timers[] = {&job->leave_timer, &job->restart_timer, &job->first_step_timer};
    for (size_t i = 0; i < sizeof timers / sizeof *timers; i++) {
        ND_TRY(ND_UV(uv_timer_init(&job->loop, timers[i])));
        timers[i]->data = job;
    }
    ND_TRY(watch_signals(job));
    return watch_nodes(job);
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
    nd_attempt_signal(job->attempt, SIGKILL);
    nd_store_server_close(job->store);
    uv_walk(&job->loop, close_handle, NULL);
    uv_run(&job->loop, UV_RUN_DEFAULT);
}

static nd_status run(nd_job *job, int *exit_code)
{
    uint8_t key[ND_KEY_BYTES];
    nd_status status = prepare(job, key);
    explicit_bzero(key, sizeof key);
    if (status == ND_OK) { /* a node that comes back takes part in a later start */
        snprintf(job->run_folder, sizeof job->run_folder, "%s", job->place.run_folder);
        status = start_workers(job, job->place.epoch);
    }
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
    if (ND_ALLOC(1, &job->attempt) != ND_OK) {
        free(job);
        return nd_error_last()->status;
    }
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
    job->attempt->next = job->former;
    job->former = job->attempt;
    free_former(job, true);
    nd_coordinator_destroy(job->coordinator);
    nd_member_destroy(job->member);
    free(job);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
#include "launcher/supervise.h"

#include <stdlib.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/shm_folder.h"
#include "runtime/rdzv/uv.h"

enum { LOOK_MS = 10 }; /* between two looks for the first step after a restart */

nd_status nd_supervisor_create(nd_supervisor **out)
{
    nd_supervisor *s;
    ND_TRY(ND_ALLOC(1, &s));
    if (ND_ALLOC(1, &s->attempt) != ND_OK) {
        free(s);
        return nd_error_last()->status;
    }
    *out = s;
    return ND_OK;
}

/* The attempts before the current one, as far as the loop has closed all of them. */
static void free_former(nd_supervisor *s, bool all)
{
    for (nd_attempt **at = &s->former; *at;) {
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

void nd_supervisor_destroy(nd_supervisor *s)
{
    if (s) {
        s->attempt->next = s->former;
        s->former = s->attempt;
        free_former(s, true);
        free(s);
    }
}

nd_status nd_supervisor_init(nd_supervisor *s, const nd_attempt_options *options, const char *job)
{
    s->options = *options;
    s->options.run_id = s->run_id;
    s->options.log_folder = s->log_folder;
    s->options.run_folder = s->run_folder;
    s->job = job;
    ND_TRY(ND_UV(uv_timer_init(options->loop, &s->first_step_timer)));
    s->first_step_timer.data = s;
    return ND_OK;
}

/* The line about a restart, once its first step is done. */
static void print_first_step(nd_supervisor *s)
{
    const nd_progress *page = &s->attempt->progress;
    nd_restart_times *t = &s->times;
    char text[256];
    if (!s->awaits_first_step) {
        return;
    }
    t->first_step = nd_progress_marked_ns(page, ND_MARK_FIRST_STEP);
    if (t->first_step == 0) {
        return;
    }
    s->awaits_first_step = false;
    uv_timer_stop(&s->first_step_timer);
    t->joined = nd_progress_marked_ns(page, ND_MARK_JOINED);
    t->loaded = nd_progress_marked_ns(page, ND_MARK_LOADED);
    t->steps_from = nd_progress_first_step(page);
    nd_restart_text(t, text, sizeof text);
    nd_log_info("ndlaunch: restart %lld of %lld%s%s, since %s: %s", (long long)s->epoch,
                (long long)s->options.config->launch.max_restarts, s->nodes[0] ? " on nodes " : "",
                s->nodes, s->what, text);
    *t = (nd_restart_times){0};
}

static void on_first_step_timer(uv_timer_t *timer)
{
    print_first_step(timer->data);
}

static nd_status start(nd_supervisor *s, int64_t epoch, nd_status prepared)
{
    nd_attempt *next;
    nd_attempt_options *o = &s->options;
    ND_TRY(ND_ALLOC(1, &next));
    nd_attempt_retire(s->attempt);
    s->attempt->next = s->former;
    s->former = s->attempt;
    s->attempt = next;
    s->epoch = o->epoch = epoch;
    nd_restart_run_id(s->job, epoch, s->run_id, sizeof s->run_id);
    ND_TRY(prepared);
    ND_TRY(nd_output_make_folder(o->config->launch.log_dir, s->run_id, s->log_folder,
                                 sizeof s->log_folder));
    nd_status status = nd_attempt_start(o, s->attempt);
    s->times.started = s->attempt->started_ns;
    return status;
}

void nd_supervisor_start(nd_supervisor *s, const nd_nodes_start *next, nd_status prepared)
{
    if (next->run_folder != s->run_folder) {
        snprintf(s->run_folder, sizeof s->run_folder, "%s", next->run_folder);
    }
    snprintf(s->nodes, sizeof s->nodes, "%s", next->nodes);
    s->options.first_rank = next->first_rank;
    s->start_failed = ND_OK;
    s->seen_ns = 0;
    nd_shm_folders_clean(); /* the memory of killed workers, which the next ones need */
    free_former(s, false);
    nd_status status = start(s, next->epoch, prepared);
    if (status != ND_OK) {
        nd_log_error("ndlaunch: start %lld of the workers failed: %s", (long long)next->epoch,
                     nd_error_last()->message);
        s->start_failed = status;
        nd_attempt_kill(s->attempt, ND_KILLED_GRACE);
        if (s->attempt->running == 0) {
            s->options.ended(s->options.context);
        }
    } else if (s->options.first_rank == 0 && next->epoch > 0) {
        s->awaits_first_step = true;
        uv_timer_start(&s->first_step_timer, on_first_step_timer, LOOK_MS, LOOK_MS);
    }
}

void nd_supervisor_stop(nd_supervisor *s, int patience_ms)
{
    if (s->seen_ns == 0) {
        print_first_step(s);
        s->seen_ns = nd_clock_ns();
    }
    nd_attempt_stop(s->attempt, patience_ms);
}

/* What this start has reached, as rank 0 says on node 0's page, and how it ends with this code. */
static nd_restart_case restart_case(const nd_supervisor *s, int code)
{
    const nd_progress *page = &s->attempt->progress;
    nd_restart_case c = {.code = code,
                         .asked = s->asked,
                         .left_behind = s->attempt->left_behind,
                         .epoch = s->epoch,
                         .max_restarts = s->options.config->launch.max_restarts,
                         .brief = s->brief};
    int64_t stepped_ns = page->job ? nd_progress_marked_ns(page, ND_MARK_FIRST_STEP) : 0;
    if (stepped_ns != 0) {
        c.stepped = true;
        c.began_at = nd_progress_first_step(page);
        c.durable = nd_progress_durable_step(page);
        c.seconds = (double)(nd_clock_ns() - stepped_ns) * 1e-9;
    }
    return c;
}

int nd_supervisor_patience_ms(const nd_supervisor *s, int code)
{
    const nd_restart_case c = restart_case(s, code);
    return nd_restart_decide(&c).verdict == ND_RESTART_YES ? nd_restart_patience_ms(code)
                                                           : ND_STOP_MS;
}

/* Keeps what the page of this start tells, for the next one and the lines about it. */
static void remember(nd_supervisor *s, const nd_nodes_end *end)
{
    const nd_progress *page = &s->attempt->progress;
    nd_restart_times *t = &s->times;
    t->occurred = end->occurred_ns;
    t->seen = s->seen_ns ? s->seen_ns : nd_clock_ns();
    t->ended = nd_clock_ns();
    snprintf(s->what, sizeof s->what, "%s", end->words);
    int64_t first = nd_progress_first_step(page);
    int64_t done = nd_progress_completed_steps(&page->slots[0]);
    const char *folder = nd_progress_run_folder(page);
    t->steps_before = done > first ? done : first;
    int64_t durable = nd_progress_durable_step(page); /* -1: it goes on from where it began */
    t->steps_from = durable >= 0 ? durable : first;
    if (folder[0]) {
        snprintf(s->run_folder, sizeof s->run_folder, "%s", folder);
    }
}

static void print_restart(const nd_supervisor *s, double wait_seconds)
{
    char when[48] = "at once", from[48] = "the beginning";
    if (wait_seconds > 0) {
        snprintf(when, sizeof when, "in %g s", wait_seconds);
    }
    if (s->times.steps_from > 0) {
        snprintf(from, sizeof from, "step %lld", (long long)s->times.steps_from);
    }
    nd_log_warning("ndlaunch: %s; restart %lld of %lld follows %s, from %s", s->what,
                   (long long)s->epoch + 1, (long long)s->options.config->launch.max_restarts, when,
                   from);
}

/* After a failure that ends the job: where a run that saves can go on. */
static void print_checkpoint(const nd_supervisor *s, int code)
{
    const nd_progress *page = &s->attempt->progress;
    if (code == 0 || code == ND_ERR_PREEMPTED || !page->job ||
        nd_progress_durable_step(page) <= 0) {
        return;
    }
    nd_log_info("ndlaunch: the newest checkpoint is that of step %lld; to go on, give the same "
                "command with --save-dir %s --resume-from-checkpoint latest",
                (long long)nd_progress_durable_step(page), nd_progress_run_folder(page));
}

bool nd_supervisor_restarts(nd_supervisor *s, const nd_nodes_end *end, double *wait_seconds)
{
    nd_restart_case c = restart_case(s, end->code);
    c.asked |= end->asked;
    c.left_behind |= end->left_behind;
    nd_restart_choice choice = nd_restart_decide(&c);
    print_first_step(s);
    s->awaits_first_step = false;
    uv_timer_stop(&s->first_step_timer);
    if (choice.verdict != ND_RESTART_YES) {
        const char *reason = nd_restart_reason(choice.verdict);
        if (reason) {
            nd_log_warning("ndlaunch: the job is not started again: %s", reason);
        }
        print_checkpoint(s, end->code);
        return false;
    }
    remember(s, end);
    s->brief = choice.brief;
    print_restart(s, choice.wait_seconds);
    *wait_seconds = choice.wait_seconds;
    return true;
}

// SPDX-License-Identifier: Apache-2.0
#include "launcher/supervise.h"

#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/shm_folder.h"
#include "runtime/base/status.h"
#include "runtime/rdzv/uv.h"

/* A start that fails sooner than this after its first step is likely to fail soon again. */
static const double brief_seconds = 10;
static const double wait_most_seconds = 60;

enum {
    SIGNAL_BASE = 128, /* code of signal 0 */
    HANG_MS = 3000,    /* others may be at the same deadline, and name the stuck rank */
    MESSAGES_MS = 200,
};

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

static double wait_before(int brief)
{
    double seconds = brief > 0 ? 1 : 0;
    for (int i = 1; i < brief && seconds < wait_most_seconds; i++) {
        seconds *= 2;
    }
    return seconds < wait_most_seconds ? seconds : wait_most_seconds;
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

nd_restart_choice nd_restart_decide(const nd_restart_case *c)
{
    nd_restart_choice choice = {.verdict = verdict_on(c)};
    if (choice.verdict == ND_RESTART_YES) {
        bool first = c->epoch == 0, soon = c->seconds < brief_seconds;
        choice.brief = !first && soon ? c->brief + 1 : 0;
        choice.wait_seconds = wait_before(choice.brief);
    }
    return choice;
}

const char *nd_restart_reason(nd_restart verdict)
{
    switch (verdict) {
    case ND_RESTART_NOT_WORTH:
        return "this failure would come again";
    case ND_RESTART_NO_STEP:
        return "the failure came before the first step";
    case ND_RESTART_NO_START:
        return "the last restart failed before its first step";
    case ND_RESTART_NO_PROGRESS:
        return "no checkpoint was completed since the last restart";
    case ND_RESTART_ALL_USED:
        return "all restarts of launch.max_restarts are used";
    case ND_RESTART_LEFT_BEHIND:
        return "a killed worker did not end";
    default:
        return NULL;
    }
}

/* How long workers may take to end after a failure, so that a restart follows soon: those of a
 * worker that died of a signal know nothing about it, and others have at most their messages left
 * to write. */
static int patience_after(int code)
{
    return code > SIGNAL_BASE ? 0 : code == ND_ERR_HANG ? HANG_MS : MESSAGES_MS;
}

void nd_restart_run_id(const char *job, int64_t epoch, char *out, size_t capacity)
{
    if (epoch == 0) {
        snprintf(out, capacity, "%s", job);
    } else {
        snprintf(out, capacity, "%s.%lld", job, (long long)epoch);
    }
}

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
        if (all || attempt->handles == 0) {
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

void nd_supervisor_init(nd_supervisor *s, const nd_attempt_options *options, const char *job)
{
    s->options = *options;
    s->options.run_id = s->run_id;
    s->options.log_folder = s->log_folder;
    s->options.run_folder = s->run_folder;
    s->job = job;
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
    return nd_attempt_start(o, s->attempt);
}

void nd_supervisor_start(nd_supervisor *s, const nd_nodes_start *next, nd_status prepared)
{
    if (next->run_folder != s->run_folder) {
        snprintf(s->run_folder, sizeof s->run_folder, "%s", next->run_folder);
    }
    s->options.first_rank = next->first_rank;
    s->start_failed = ND_OK;
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
    }
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
    int64_t stepped_ns = page->job ? nd_progress_stepped_ns(page) : 0;
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
    return nd_restart_decide(&c).verdict == ND_RESTART_YES ? patience_after(code) : ND_STOP_MS;
}

static void print_restart(const nd_supervisor *s, const nd_nodes_end *end, double wait_seconds)
{
    const nd_progress *page = &s->attempt->progress;
    const int64_t durable = nd_progress_durable_step(page); /* -1: it goes on from where it began */
    const int64_t kept = durable >= 0 ? durable : nd_progress_first_step(page);
    const int64_t done = nd_progress_completed_steps(&page->slots[0]);
    const int64_t lost = done > kept ? done - kept : 0;
    char when[48] = "at once", from[48] = "the beginning";
    if (wait_seconds > 0) {
        snprintf(when, sizeof when, "in %g s", wait_seconds);
    } else if (end->lacks_nodes) {
        snprintf(when, sizeof when, "when enough nodes are back");
    }
    if (kept > 0) {
        snprintf(from, sizeof from, "step %lld", (long long)kept);
    }
    nd_log_warning("ndlaunch: %s; restart %lld of %lld follows %s, from %s; %lld step%s lost",
                   end->words, (long long)s->epoch + 1,
                   (long long)s->options.config->launch.max_restarts, when, from, (long long)lost,
                   lost == 1 ? " is" : "s are");
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
    if (choice.verdict != ND_RESTART_YES) {
        const char *reason = nd_restart_reason(choice.verdict);
        if (reason) {
            nd_log_warning("ndlaunch: the job is not started again: %s", reason);
        }
        print_checkpoint(s, end->code);
        return false;
    }
    const char *folder = nd_progress_run_folder(&s->attempt->progress);
    if (folder[0]) {
        snprintf(s->run_folder, sizeof s->run_folder, "%s", folder);
    }
    s->brief = choice.brief;
    print_restart(s, end, choice.wait_seconds);
    *wait_seconds = choice.wait_seconds;
    return true;
}

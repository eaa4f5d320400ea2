// SPDX-License-Identifier: Apache-2.0
#include "launcher/restart.h"

#include <stdio.h>

#include "runtime/base/status.h"

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

int nd_restart_patience_ms(int code)
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

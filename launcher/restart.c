// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>

#include "launcher/launcher.h"

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

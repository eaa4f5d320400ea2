// SPDX-License-Identifier: Apache-2.0
#include "trainer/worker/failure.h"

#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/rdzv/pmix.h"

/* Seconds before a rank reports, for one that knows better to end the job. Ranks often fail for the
 * same reason of their own, such as a wrong setting: rank 0 speaks for them. Slurm soon ends a step
 * that has lost a process, so the first rank that hears of a loss waits only for the lines of a
 * rank that has just ended the job. */
static const double after_rank_0 = 0.5, after_a_loss = 0.1, after_the_reason = 4;

static void wait_seconds(double seconds)
{
    double end = nd_clock_seconds() + seconds;
    for (double left = seconds; left > 0; left = end - nd_clock_seconds()) {
        (void)poll(NULL, 0, (int)(left * 1e3 + 1)); /* a signal may end it early */
    }
}

static bool may_be_elsewhere(const nd_error *error)
{
    return error->cause == ND_CAUSE_ELSEWHERE ||
           (error->cause != ND_CAUSE_LOCAL && error->status == ND_ERR_IO);
}

/* False: another thread has reported. The page comes first: ndlaunch recognises the line by it. */
static bool report(nd_failure *f, const nd_error *error)
{
    const nd_identity *id = f->identity;
    if (!nd_gate_enter(&f->gate, nd_clock_after(f->kill_seconds))) {
        return false;
    }
    const bool reports = !f->ended;
    f->ended = true;
    if (reports) {
        nd_failure_record(nd_identity_record(id), error);
        nd_log_error("%s", error->message);
    }
    if (reports && error->status == ND_ERR_HANG && id->source != ND_IDENTITY_NDLAUNCH) {
        /* Ranks that wait for others name them, before the end of this one ends them. */
        wait_seconds(id->world_size > 1 ? after_the_reason : 0);
    }
    if (reports && id->pmix) {
        nd_pmix_abort(id->pmix, (int)error->status, error->message);
        wait_seconds(id->world_size > 1 ? f->kill_seconds : 0);
    }
    nd_gate_leave(&f->gate);
    return reports;
}

static bool ends_job(const nd_failure *f)
{
    return f->identity->pmix && f->identity->world_size > 1;
}

void nd_failure_end(nd_failure *f, const nd_error *error)
{
    if (ends_job(f) && error->status != ND_ERR_HANG) {
        wait_seconds(may_be_elsewhere(error) ? after_the_reason
                     : f->identity->rank > 0 ? after_rank_0
                                             : 0);
    }
    (void)report(f, error);
}

void nd_failure_end_lost(nd_failure *f, const char *message)
{
    nd_error error = {.status = ND_ERR_IO};
    snprintf(error.message, sizeof error.message, "%s", message);
    /* Rank 0 hears of the others, and they of rank 0. One of them that fails at this moment for a
     * reason of its own, or that knows why rank 0 has ended, says that in place of the loss. */
    const int rank = f->identity->rank;
    const bool first = rank <= (ends_job(f) ? 1 : 0);
    wait_seconds(!first ? after_rank_0 : ends_job(f) ? after_a_loss : 0);
    if (report(f, &error)) {
        _exit(ND_ERR_IO);
    }
}

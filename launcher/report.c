// SPDX-License-Identifier: Apache-2.0
/* The failure screen: the first failing rank, why, where it was, its last words; who was only stopped with it. */
#include <string.h>

#include "launcher/job.h"
#include "runtime/comm/comm.h"

static bool failed(const nd_launched *worker)
{
    return !worker->stopped && (worker->exit_code != 0 || worker->signal != 0);
}

/* When the worker knew: its own record where it left one, else when its end was seen. */
static int64_t failure_time(const nd_job *job, const nd_launched *worker)
{
    int64_t recorded = atomic_load(&job->failures.slots[worker->local_rank].time_ns);
    return recorded != 0 ? recorded : worker->ended_ns;
}

/* A lost peer (74) is mostly what another worker's death looks like, and may be noticed before the death itself. */
static bool is_echo(const nd_launched *worker)
{
    return worker->signal == 0 && worker->exit_code == ND_ERR_IO;
}

static const nd_launched *first_failure(const nd_job *job)
{
    const nd_launched *first = NULL;
    for (int i = 0; i < job->local_workers; i++) {
        const nd_launched *w = &job->workers[i];
        if (!failed(w)) {
            continue;
        }
        bool earlier = first && failure_time(job, w) < failure_time(job, first);
        if (!first || is_echo(w) < is_echo(first) || (is_echo(w) == is_echo(first) && earlier)) {
            first = w;
        }
    }
    return first;
}

static void print_place(FILE *out, const nd_job *job, const nd_launched *worker)
{
    const nd_progress_slot *slot = &job->progress.slots[worker->local_rank];
    int64_t sequence = atomic_load(&slot->sequence), since = atomic_load(&slot->since_ns);
    fprintf(out, "  phase %s, step %lld", nd_phase_name((nd_phase)atomic_load(&slot->phase)),
            (long long)atomic_load(&slot->step));
    if (sequence > 0) {
        fprintf(out, "; %s %s of group %s, sequence %lld", since ? "inside" : "after",
                nd_comm_op_name((nd_comm_op)atomic_load(&slot->op)),
                nd_group_name((nd_group_kind)atomic_load(&slot->group)), (long long)sequence);
    }
    fprintf(out, "\n");
}

static void print_tail(FILE *out, const nd_launched *worker)
{
    int count = worker->tail_count < ND_TAIL_LINES ? worker->tail_count : ND_TAIL_LINES;
    fprintf(out, "  its last lines:\n");
    for (int i = 0; i < count; i++) {
        fprintf(out, "    %s\n", worker->tail[(worker->tail_count - count + i) % ND_TAIL_LINES]);
    }
}

static void print_collateral(FILE *out, const nd_job *job, const nd_launched *first)
{
    fprintf(out, "  collateral (ended with it):");
    for (int i = 0; i < job->local_workers; i++) {
        if (&job->workers[i] != first) {
            fprintf(out, " %d", job->workers[i].rank);
        }
    }
    fprintf(out, "\n");
}

int nd_job_report(const nd_job *job, FILE *out)
{
    const nd_launched *first = first_failure(job);
    if (!first) {
        return 0;
    }
    const nd_failure_slot *record = &job->failures.slots[first->local_rank];
    int code = first->signal ? 128 + first->signal : (int)first->exit_code;
    if (code == ND_ERR_PREEMPTED) {
        fprintf(out, "ndlaunch: the job was stopped at a step boundary\n");
        return code;
    }
    fprintf(out, "\nndlaunch: rank %d failed first (host %s%s%s, pid %d, device %s): ", first->rank,
            job->host_name, job->slurm_job[0] ? ", Slurm job " : "", job->slurm_job,
            first->process.pid, record->device[0] ? record->device : "not chosen yet");
    if (first->signal) {
        fprintf(out, "signal %d (%s)\n", first->signal, strsignal(first->signal));
    } else {
        fprintf(out, "exit code %d (%s)\n", code, nd_status_name((nd_status)code));
    }
    print_place(out, job, first);
    if (atomic_load(&record->time_ns) != 0) {
        fprintf(out, "  it said: %s\n", record->message);
    } else if (first->tail_count > 0) {
        print_tail(out, first);
    }
    if (job->local_workers > 1) {
        print_collateral(out, job, first);
    }
    return code;
}

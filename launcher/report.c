// SPDX-License-Identifier: Apache-2.0
/* The failure screen: the first failing rank, why, where it was, its last words; who was only
 * stopped with it. */
#include <string.h>

#include "launcher/launcher.h"
#include "runtime/comm/comm.h"

enum { OTHERS_MAX = 3 }; /* sentences of other ranks */

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

/* A lost peer (74) is mostly what another worker's death looks like, and may be noticed before the
 * death itself. */
static bool is_echo(const nd_launched *worker)
{
    return worker->signal == 0 && worker->exit_code == ND_ERR_IO;
}

/* Of failures the one with the least weight counts as first: a stop at a boundary explains no other
 * worker's end. */
static int weight(const nd_launched *worker)
{
    bool stopped = worker->signal == 0 && worker->exit_code == ND_ERR_PREEMPTED;
    return stopped ? 2 : is_echo(worker) ? 1 : 0;
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
        if (!first || weight(w) < weight(first) || (weight(w) == weight(first) && earlier)) {
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
    if (sequence > 0 || since > 0) {
        fprintf(out, "; %s %s of group %s", since ? "inside" : "after",
                nd_comm_op_name((nd_comm_op)atomic_load(&slot->op)),
                nd_group_name((nd_group_kind)atomic_load(&slot->group)));
    }
    if (sequence > 0) { /* a set-up has none */
        fprintf(out, ", sequence %lld", (long long)sequence);
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

typedef bool (*rank_filter)(const nd_launched *worker, const nd_launched *first);

static bool is_other(const nd_launched *worker, const nd_launched *first)
{
    return worker != first;
}

static bool was_killed_too(const nd_launched *worker, const nd_launched *first)
{
    return worker->killed == first->killed;
}

/* " 0-65 67-199" */
static void print_ranks(FILE *out, const nd_job *job, rank_filter wanted, const nd_launched *first)
{
    for (int begin = 0; begin < job->local_workers; begin++) {
        int end = begin;
        while (end < job->local_workers && wanted(&job->workers[end], first)) {
            end++;
        }
        if (end > begin) {
            fprintf(out, end - begin > 1 ? " %d-%d" : " %d", job->workers[begin].rank,
                    job->workers[end - 1].rank);
            begin = end - 1;
        }
    }
    fprintf(out, "\n");
}

/* Other sentences than the first one's; of a lost peer the first one's tells more. */
static void print_other_sentences(FILE *out, const nd_job *job, const nd_launched *first)
{
    const nd_failure_slot *told = &job->failures.slots[first->local_rank];
    int left = OTHERS_MAX;
    for (int i = 0; i < job->local_workers && left > 0; i++) {
        const nd_launched *w = &job->workers[i];
        const nd_failure_slot *record = &job->failures.slots[w->local_rank];
        if (w == first || atomic_load(&record->time_ns) == 0 || record->status == ND_ERR_IO ||
            record->status == ND_ERR_PREEMPTED ||
            (atomic_load(&told->time_ns) != 0 && strcmp(record->message, told->message) == 0)) {
            continue;
        }
        fprintf(out, "  rank %d said: %s\n", w->rank, record->message);
        told = record;
        left--;
    }
}

/* Workers that did not end when they were asked to have not failed: we ended them. */
static void print_killed(FILE *out, const nd_job *job, const nd_launched *first)
{
    if (first->killed == ND_KILLED_INTERRUPT) {
        fprintf(out, "\nndlaunch: ended by ndlaunch at the second interrupt, ranks");
    } else {
        fprintf(out,
                "\nndlaunch: ended by ndlaunch: launch.grace_seconds (%g) were over; raise it if "
                "saving needs longer; ranks",
                job->config->launch.grace_seconds);
    }
    print_ranks(out, job, was_killed_too, first);
    fprintf(out, "  rank %d:", first->rank);
    print_place(out, job, first);
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
    if (first->killed) {
        print_killed(out, job, first);
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
    print_other_sentences(out, job, first);
    if (job->local_workers > 1) {
        fprintf(out, "  collateral (ended with it):");
        print_ranks(out, job, is_other, first);
    }
    return code;
}

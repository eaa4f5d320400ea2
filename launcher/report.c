// SPDX-License-Identifier: Apache-2.0
/*
 * Failures: which one explains the others, among the workers of a node and among the nodes, and the
 * failure screen: which rank failed first and why, where it was, its last lines, and which ranks
 * only ended with it.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/launcher.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/printable.h"
#include "runtime/comm/comm.h"
#include "runtime/rdzv/ranks.h"

enum { OTHERS_MAX = 3 }; /* messages of other ranks */

nd_failure_weight nd_failure_weight_of(int code)
{
    return code == ND_ERR_PREEMPTED ? ND_FAILURE_STOP
           : code == ND_ERR_IO      ? ND_FAILURE_EFFECT
                                    : ND_FAILURE_REASON;
}

/* `f` has less weight than `other`, or as much and was seen first. */
static bool explains(const nd_failure *f, const nd_failure *other)
{
    return f->weight < other->weight || (f->weight == other->weight && f->seen_ns < other->seen_ns);
}

/* The workers of this node. */

static bool is_local(const nd_failure_slot *record)
{
    return atomic_load(&record->time_ns) != 0 && record->cause == ND_CAUSE_LOCAL;
}

/*
 * A worker that was asked to end because another one failed has not failed, unless it did so by
 * itself: it died of a signal that this process did not send, or had recorded a reason of its own.
 * Such a worker may have failed first although its end was seen later.
 *
 * What a worker recorded before it was asked to end is its own failure. Later, a lost peer, a
 * deadline and a stop are consequences of that, and another rank's reason is not this one's.
 */
static bool failed(const nd_attempt *attempt, const nd_child *child)
{
    const nd_failure_slot *record = &attempt->progress.failures[child->local_rank];
    if (!child->stopped) {
        return child->exit_code != 0 || child->signal != 0;
    }
    if (child->signal != 0) {
        return child->signal != SIGTERM && !(child->signal == SIGKILL && child->kill_sent);
    }
    int64_t recorded_ns = atomic_load(&record->time_ns);
    return child->exit_code != 0 && recorded_ns != 0 &&
           (is_local(record) || recorded_ns < attempt->stop_ns ||
            (record->cause == ND_CAUSE_OWN && record->status != ND_ERR_IO &&
             record->status != ND_ERR_HANG && record->status != ND_ERR_PREEMPTED));
}

/*
 * The worker's failure, at the time when it recorded it, or else when this process saw its end. A
 * worker that dies makes others lose a peer, and they may notice before this process does.
 */
static nd_failure failure_of(const nd_attempt *attempt, const nd_child *child)
{
    const nd_failure_slot *record = &attempt->progress.failures[child->local_rank];
    const int64_t recorded_ns = atomic_load(&record->time_ns);
    const bool elsewhere = recorded_ns != 0 && record->cause == ND_CAUSE_ELSEWHERE;
    const int code = child->signal ? 128 + child->signal : (int)child->exit_code;
    return (nd_failure){.code = code,
                        .weight = child->signal != 0 || is_local(record) ? ND_FAILURE_REASON
                                  : elsewhere                            ? ND_FAILURE_EFFECT
                                              : nd_failure_weight_of(code),
                        .seen_ns = recorded_ns != 0 ? recorded_ns : child->ended_ns};
}

static const nd_child *first_failure(const nd_attempt *attempt, nd_failure *out)
{
    const nd_child *first = NULL;
    *out = (nd_failure){0};
    for (int i = 0; i < attempt->options.local_workers; i++) {
        const nd_child *c = &attempt->children[i];
        const nd_failure failure = failure_of(attempt, c);
        if (failed(attempt, c) && (!first || explains(&failure, out))) {
            first = c;
            *out = failure;
        }
    }
    return first;
}

static void print_place(FILE *out, const nd_attempt *attempt, const nd_child *child)
{
    const nd_progress_slot *slot = &attempt->progress.slots[child->local_rank];
    int64_t sequence = atomic_load(&slot->sequence), since = atomic_load(&slot->since_ns);
    char mesh[96];
    nd_mesh_format_rank(&attempt->options.config->resolved_mesh, child->rank, mesh, sizeof mesh);
    fprintf(out, "  %s%s%sphase %s, step %lld", mesh[0] ? "mesh " : "", mesh, mesh[0] ? ", " : "",
            nd_phase_name((nd_phase)atomic_load(&slot->phase)),
            (long long)atomic_load(&slot->step));
    if (sequence > 0 || since > 0) {
        fprintf(out, "; %s %s of group %s", since ? "inside" : "after",
                nd_comm_op_name((nd_comm_op)atomic_load(&slot->op)),
                nd_group_name((nd_group_kind)atomic_load(&slot->group)));
    }
    if (sequence > 0) { /* the set-up of a communicator has none */
        fprintf(out, ", sequence %lld", (long long)sequence);
    }
    fprintf(out, "\n");
}

/* The child of this rank; `child` is any of the same attempt. */
static const nd_child *child_of(const nd_child *child, int rank)
{
    return child + (rank - child->rank);
}

static bool is_other(const void *first, int rank)
{
    return child_of(first, rank) != first;
}

static bool was_killed_too(const void *first, int rank)
{
    return child_of(first, rank)->killed == ((const nd_child *)first)->killed;
}

static void print_ranks(FILE *out, nd_rank_test *wanted, const nd_child *first)
{
    const int workers = first->attempt->options.local_workers;
    char text[512];
    nd_ranks_text(wanted, first, first->rank - first->local_rank, workers, text, sizeof text);
    fprintf(out, " %s\n", text);
}

/* Messages that differ from the first failure's. A message about a lost peer adds nothing to it. */
static void print_other_messages(FILE *out, const nd_attempt *attempt, const nd_child *first)
{
    const nd_failure_slot *printed = &attempt->progress.failures[first->local_rank];
    int left = OTHERS_MAX;
    for (int i = 0; i < attempt->options.local_workers && left > 0; i++) {
        const nd_child *c = &attempt->children[i];
        const nd_failure_slot *record = &attempt->progress.failures[c->local_rank];
        if (c == first || atomic_load(&record->time_ns) == 0 ||
            (record->status == ND_ERR_IO && !is_local(record)) ||
            record->status == ND_ERR_PREEMPTED || record->cause == ND_CAUSE_ELSEWHERE ||
            (atomic_load(&printed->time_ns) != 0 &&
             strcmp(record->message, printed->message) == 0)) {
            continue;
        }
        fprintf(out, "  rank %d said: %s\n", c->rank, record->message);
        printed = record;
        left--;
    }
}

/* Workers that this process killed after it had asked them to end have not failed. */
static void print_killed(FILE *out, const nd_attempt *attempt, const nd_child *first)
{
    if (first->killed == ND_KILLED_INTERRUPT) {
        fprintf(out, "\nndlaunch: ended by ndlaunch at the second interrupt, ranks");
    } else {
        fprintf(out,
                "\nndlaunch: ended by ndlaunch: launch.grace_seconds (%g) were over; raise it with "
                "--grace-seconds where a step or saving needs longer; ranks",
                attempt->options.config->launch.grace_seconds);
    }
    print_ranks(out, was_killed_too, first);
    fprintf(out, "  rank %d:", first->rank);
    print_place(out, attempt, first);
}

/* Returns the code of this node. */
static int print_report(FILE *out, const nd_attempt *attempt, const nd_child *first, int code)
{
    const nd_failure_slot *record = &attempt->progress.failures[first->local_rank];
    if (attempt->options.input && (code == ND_ERR_PREEMPTED || first->killed)) {
        fprintf(out, "ndlaunch: stopped by a signal\n"); /* there was nothing to save */
        return ND_ERR_PREEMPTED;
    }
    if (code == ND_ERR_PREEMPTED) {
        fprintf(out, "ndlaunch: the job was stopped at a step boundary\n");
        return code;
    }
    if (first->killed) {
        print_killed(out, attempt, first);
        return code;
    }
    fprintf(out, "\nndlaunch: rank %d failed first (host %s%s%s, pid %d, device %s): ", first->rank,
            attempt->options.host_name, attempt->options.slurm_job[0] ? ", Slurm job " : "",
            attempt->options.slurm_job, first->process.pid,
            record->device[0] ? record->device : "not chosen yet");
    if (first->signal) {
        fprintf(out, "signal %d (%s)\n", first->signal, strsignal(first->signal));
    } else {
        fprintf(out, "exit code %d (%s)\n", code, nd_status_name((nd_status)code));
    }
    print_place(out, attempt, first);
    if (atomic_load(&record->time_ns) != 0) {
        fprintf(out, "  it said: %s\n", record->message);
    } else if (first->tail_count > 0) {
        int count = first->tail_count < ND_TAIL_LINES ? first->tail_count : ND_TAIL_LINES;
        fprintf(out, "  its last lines:\n");
        for (int i = 0; i < count; i++) {
            fprintf(out, "    %s\n", first->tail[(first->tail_count - count + i) % ND_TAIL_LINES]);
        }
    }
    print_other_messages(out, attempt, first);
    if (attempt->options.local_workers > 1) {
        fprintf(out, "  collateral (ended with it):");
        print_ranks(out, is_other, first);
    }
    return code;
}

char *nd_attempt_report(const nd_attempt *attempt, nd_nodes_end *end)
{
    enum { ESCAPE_MAX = 4 }; /* characters for a byte */
    nd_failure failure;
    const nd_child *first = first_failure(attempt, &failure);
    char *text = NULL, *printable = NULL;
    size_t bytes = 0;
    if (!first) {
        return NULL;
    }
    if (first->signal) {
        snprintf(end->words, sizeof end->words, "rank %d failed (signal %d, %s)", first->rank,
                 first->signal, strsignal(first->signal));
    } else {
        snprintf(end->words, sizeof end->words, "rank %d failed (exit code %d, %s)", first->rank,
                 (int)first->exit_code, nd_status_name((nd_status)first->exit_code));
    }
    FILE *out = open_memstream(&text, &bytes);
    end->code = print_report(out ? out : stderr, attempt, first, failure.code);
    end->weight = end->code == failure.code ? failure.weight : nd_failure_weight_of(end->code);
    /* Lines of workers and names from outside may hold bytes that change a terminal. */
    if (out && fclose(out) == 0 && ND_ALLOC(ESCAPE_MAX * bytes + 1, &printable) == ND_OK) {
        nd_escape(printable, ESCAPE_MAX * bytes + 1, text, "\n");
    } else if (out) {
        nd_log_error("ndlaunch: the workers failed with code %d; out of host memory for more",
                     end->code);
    }
    free(text);
    return printable;
}

/* The nodes, as node 0 hears of them. */

void nd_node_fail(nd_node *n, int code)
{
    if (n->failure.seen_ns == 0) {
        n->failure = (nd_failure){code, nd_failure_weight_of(code), nd_clock_ns()};
    }
}

/* A screen that cannot be kept is shown at once. */
static void keep_screen(nd_node *n, const char *screen, size_t bytes)
{
    free(n->screen);
    n->screen = bytes > 0 ? strndup(screen, bytes) : NULL;
    if (bytes > 0 && !n->screen) {
        nd_fail_memory("the failure screen of host %s", n->host);
        nd_log_warning("ndlaunch: %s; it follows", nd_error_last()->message);
        (void)nd_log_write(screen, bytes);
    }
}

void nd_node_lose(nd_node *n, int index, const char *why)
{
    char text[512];
    if (n->lost || n->ended) {
        return;
    }
    n->lost = true;
    nd_node_fail(n, ND_ERR_IO);
    n->failure.code = ND_ERR_IO;
    n->failure.weight = ND_FAILURE_REASON;
    snprintf(text, sizeof text, "\nndlaunch: node %d (host %s) was lost: %s\n", index, n->host,
             why);
    keep_screen(n, text, strlen(text));
}

void nd_node_end(nd_node *n, const nd_nodes_end *end, const char *screen, size_t bytes)
{
    n->ended = true;
    keep_screen(n, screen, bytes);
    if (end->code != 0) {
        nd_node_fail(n, end->code);
        n->failure.code = end->code;
        n->failure.weight = end->weight;
    }
}

int nd_roster_first_failure(const nd_roster *roster)
{
    const nd_node *nodes = roster->nodes;
    int first = -1;
    for (int i = 0; i < roster->count; i++) {
        if (nodes[i].failure.seen_ns != 0 &&
            (first < 0 || explains(&nodes[i].failure, &nodes[first].failure))) {
            first = i;
        }
    }
    return first;
}

bool nd_roster_all_over(const nd_roster *roster)
{
    for (int i = 0; i < roster->count; i++) {
        const nd_node *n = &roster->nodes[i];
        if (n->place >= 0 && !n->ended && !n->lost) {
            return false;
        }
    }
    return true;
}

// SPDX-License-Identifier: Apache-2.0
/* The failure screen of jobs that are over, without processes. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/launcher.h"
#include "runtime/comm/comm.h"

static const nd_config config = {.resolved_mesh = {{1, 1, 3, 1, 1}}};

typedef struct job {
    nd_attempt attempt;
    nd_child children[3];
    nd_progress_slot slots[3];
    nd_failure_slot failures[3];
} job;

/* Three workers that ended well. */
static job *make_job(void)
{
    job *j = calloc(1, sizeof *j);
    cr_assert_not_null(j);
    for (int i = 0; i < 3; i++) {
        j->children[i] = (nd_child){.attempt = &j->attempt, .rank = i, .local_rank = i};
    }
    j->attempt = (nd_attempt){.options = {.config = &config,
                                          .host_name = "host",
                                          .slurm_job = "",
                                          .local_workers = 3,
                                          .world_size = 3},
                              .progress = {.slots = j->slots, .failures = j->failures, .count = 3},
                              .children = j->children};
    return j;
}

/* Frees the job. */
static char *report_of(job *j, int expected)
{
    nd_nodes_end end = {0};
    char *text = nd_attempt_report(&j->attempt, &end);
    free(j);
    cr_assert_not_null(text);
    cr_expect_eq(end.code, expected, "%d, not %d: %s", end.code, expected, text);
    return text;
}

static void record(job *j, int rank, nd_status status, nd_failure_cause cause, int64_t time_ns)
{
    nd_failure_slot *slot = &j->failures[rank];
    slot->status = (int32_t)status;
    slot->cause = (int32_t)cause;
    snprintf(slot->message, sizeof slot->message, "reason of rank %d", rank);
    atomic_store(&slot->time_ns, time_ns);
    j->children[rank].exit_code = status;
}

/* Rank 2 died, ranks 0 and 1 lost it, and the end of rank 0 was seen first: the others were being
 * stopped by then. */
Test(report, a_signal_wins_over_what_others_lost_by_it)
{
    job *j = make_job();
    record(j, 0, ND_ERR_IO, ND_CAUSE_OWN, 5);
    record(j, 1, ND_ERR_IO, ND_CAUSE_OWN, 4);
    j->children[1].stopped = j->children[2].stopped = true;
    j->children[2].signal = 9;
    char *text = report_of(j, 128 + 9);
    cr_expect(strstr(text, "rank 2 failed first"), "%s", text);
    free(text);
}

/* The same, but rank 2 was killed because it did not end when it was asked to. */
Test(report, our_own_kill_is_no_failure)
{
    job *j = make_job();
    record(j, 0, ND_ERR_DATA, ND_CAUSE_OWN, 5);
    j->children[1].stopped = j->children[2].stopped = true;
    j->children[1].signal = 15;
    j->children[2].signal = 9;
    j->children[2].kill_sent = true;
    char *text = report_of(j, 65);
    cr_expect(strstr(text, "rank 0 failed first"), "%s", text);
    free(text);
}

Test(report, the_rank_that_has_the_reason_wins_over_those_that_refer_to_it)
{
    job *j = make_job();
    record(j, 0, ND_ERR_RESOURCE, ND_CAUSE_ELSEWHERE, 3);
    record(j, 1, ND_ERR_RESOURCE, ND_CAUSE_OWN, 4);
    j->children[1].stopped = j->children[2].stopped = true;
    char *text = report_of(j, 71);
    cr_expect(strstr(text, "rank 1 failed first"), "%s", text);
    cr_expect_null(strstr(text, "reason of rank 0"), "%s", text);
    free(text);
}

/* Rank 0 noticed the lost peer before rank 1, which ended by itself, had recorded why. */
Test(report, a_lost_peer_is_no_cause)
{
    job *j = make_job();
    record(j, 0, ND_ERR_IO, ND_CAUSE_OWN, 3);
    record(j, 1, ND_ERR_DATA, ND_CAUSE_OWN, 5);
    char *text = report_of(j, 65);
    cr_expect(strstr(text, "rank 1 failed first"), "%s", text);
    free(text);
}

static void expect_words(const job *j, bool own, const char *words)
{
    nd_nodes_end end = {0};
    free(nd_attempt_report(&j->attempt, &end));
    cr_expect_eq(end.own, own);
    cr_expect_eq(strncmp(end.words, words, words[0] ? strlen(words) : 1), 0, "%s", end.words);
}

/* A node tells whether the first failure is surely its own. */
Test(report, a_local_failure_is_the_nodes_own)
{
    job *j = make_job();
    expect_words(j, false, "");
    record(j, 0, ND_ERR_HANG, ND_CAUSE_OWN, 3);
    expect_words(j, false, "rank 0 failed (exit code 124, ");
    record(j, 1, ND_ERR_IO, ND_CAUSE_LOCAL, 2);
    expect_words(j, true, "rank 1 failed (exit code 74, ");
    free(j);
}

/* The ends of processes are seen in any order. */
Test(report, the_failure_that_was_recorded_first_is_the_first)
{
    job *j = make_job();
    record(j, 0, ND_ERR_DATA, ND_CAUSE_OWN, 9);
    record(j, 1, ND_ERR_RESOURCE, ND_CAUSE_OWN, 4);
    j->children[0].ended_ns = 20;
    j->children[1].ended_ns = 30;
    char *text = report_of(j, 71);
    cr_expect(strstr(text, "rank 1 failed first"), "%s", text);
    free(text);
}

Test(report, control_characters_of_a_worker_are_escaped)
{
    job *j = make_job();
    j->children[1].exit_code = 7;
    j->children[1].tail_count = 1;
    snprintf(j->children[1].tail[0], ND_TAIL_BYTES, "before\x1b[2Jafter");
    char *text = report_of(j, 7);
    cr_expect(strstr(text, "    before\\x1b[2Jafter\n"), "%s", text);
    free(text);
}

/* Rank 1 was killed at `place`; what is said of it. */
static char *screen_of(const nd_mesh *mesh, const nd_progress_slot *place)
{
    const nd_config own = {.resolved_mesh = *mesh};
    job *j = make_job();
    j->attempt.options.config = &own;
    j->children[0].stopped = j->children[2].stopped = true;
    j->children[1].signal = 9;
    j->slots[1] = *place;
    char *text = report_of(j, 128 + 9);
    cr_assert_not_null(strstr(text, "rank 1 failed first"), "%s", text);
    return text;
}

static void expect_place(nd_progress_slot place, const char *words)
{
    char *text = screen_of(&config.resolved_mesh, &place);
    cr_expect(strstr(text, words), "no \"%s\" in:\n%s", words, text);
    free(text);
}

Test(report, the_operation_that_a_rank_was_in)
{
    expect_place((nd_progress_slot){.group = ND_GROUP_TP,
                                    .op = ND_COMM_ALL_GATHER,
                                    .step = 3,
                                    .sequence = 17,
                                    .since_ns = 5},
                 "step 3; inside all_gather of group tp, sequence 17\n");
    expect_place((nd_progress_slot){.group = ND_GROUP_TP, .op = ND_COMM_ALL_GATHER, .sequence = 17},
                 "step 0; after all_gather of group tp, sequence 17\n");
}

Test(report, a_set_up_has_no_sequence_and_is_named)
{
    expect_place((nd_progress_slot){.group = ND_GROUP_TP, .op = ND_COMM_SETUP, .since_ns = 5},
                 "step 0; inside the communicator of group tp\n");
}

Test(report, a_rank_that_entered_nothing_has_no_operation)
{
    expect_place((nd_progress_slot){0}, "step 0\n");
}

Test(report, a_rank_has_its_coordinates_in_the_mesh)
{
    static const nd_mesh hybrid = {{1, 2, 1, 1, 2}}, one = {{1, 1, 1, 1, 1}};
    const nd_progress_slot place = {0};
    char *text = screen_of(&hybrid, &place);
    cr_expect(strstr(text, "\n  mesh r0 t1, phase start, step 0\n"), "%s", text);
    free(text);
    text = screen_of(&one, &place);
    cr_expect(strstr(text, "\n  phase start, step 0\n"), "%s", text);
    free(text);
}

/* Its peers lose it, and may say so before this process has seen its end; it may be asked to end
 * before it says anything. */
Test(report, an_io_error_of_a_rank_itself_is_the_cause)
{
    job *j = make_job();
    record(j, 0, ND_ERR_IO, ND_CAUSE_OWN, 3);
    record(j, 1, ND_ERR_IO, ND_CAUSE_LOCAL, 5);
    record(j, 2, ND_ERR_IO, ND_CAUSE_ELSEWHERE, 4);
    j->children[1].stopped = true;
    char *text = report_of(j, ND_ERR_IO);
    cr_expect_not_null(strstr(text, "rank 1 failed first"), "%s", text);
    cr_expect_not_null(strstr(text, "it said: reason of rank 1"), "%s", text);
    free(text);
}

// SPDX-License-Identifier: Apache-2.0
/* The failure screen of jobs that are over, without processes. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/launcher.h"
#include "runtime/comm/comm.h"
#include "tests/support/printed.h"

static const nd_config config = {.resolved_mesh = {{1, 1, 3, 1, 1}}};

typedef struct job {
    nd_attempt attempt;
    nd_child children[6];
    nd_progress_slot slots[6];
    nd_failure_slot failures[6];
} job;

/* Three workers that ended well, with room for as many more. */
static job *make_job(void)
{
    job *j = calloc(1, sizeof *j);
    cr_assert_not_null(j);
    for (int i = 0; i < 6; i++) {
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

static char *text; /* of the last report */

/* Frees the job. */
static void report(job *j, int expected)
{
    nd_nodes_end end = {0};
    free(text);
    text = nd_attempt_report(&j->attempt, &end);
    free(j);
    cr_assert_not_null(text);
    cr_expect_eq(end.code, expected, "%d, not %d: %s", end.code, expected, text);
}

static void record(job *j, int rank, nd_status status, nd_failure_cause cause, int64_t time_ns)
{
    nd_failure_slot *slot = &j->failures[rank];
    slot->status = (int32_t)status;
    slot->cause = (int32_t)cause;
    snprintf(slot->message, sizeof slot->message, "reason of rank %d", rank);
    snprintf(slot->device, sizeof slot->device, "device%d", rank);
    atomic_store(&slot->time_ns, time_ns);
    j->children[rank].exit_code = status;
}

/* How a rank ended, and what it had recorded. */
typedef struct rank_end {
    int code;
    nd_failure_cause cause;
    int64_t recorded, ended; /* times; 0: nothing was recorded */
    bool stopped, kill_sent; /* by ndlaunch, because another one failed */
    int signal;
} rank_end;

Test(report, the_rank_that_failed_first)
{
    static const struct {
        const char *what;
        rank_end ranks[3];
        struct {
            int code, first;
        } end;
        int64_t stopped;   /* when ndlaunch asked the others to end */
        const char *other; /* what another rank said; NULL: nothing that matters */
    } cases[] = {
        {"a signal wins over what others lost by it, whose ends were seen before",
         {{ND_ERR_IO, ND_CAUSE_OWN, 5},
          {ND_ERR_IO, ND_CAUSE_OWN, 4, .stopped = true},
          {.stopped = true, .signal = 9}},
         {128 + 9, 2}},
        {"a kill of ours is no failure, of a rank that did not end when it was asked to",
         {{ND_ERR_DATA, ND_CAUSE_OWN, 5},
          {.stopped = true, .signal = 15},
          {.stopped = true, .kill_sent = true, .signal = 9}},
         {65, 0}},
        {"the rank that has the reason wins over those that refer to it",
         {{ND_ERR_RESOURCE, ND_CAUSE_ELSEWHERE, 3},
          {ND_ERR_RESOURCE, ND_CAUSE_OWN, 4, .stopped = true},
          {.stopped = true}},
         {71, 1}},
        {"a lost peer is no cause: rank 0 noticed it before rank 1 had recorded why",
         {{ND_ERR_IO, ND_CAUSE_OWN, 3}, {ND_ERR_DATA, ND_CAUSE_OWN, 5}},
         {65, 1}},
        {"the ends of processes are seen in any order",
         {{ND_ERR_DATA, ND_CAUSE_OWN, 9, 20}, {ND_ERR_RESOURCE, ND_CAUSE_OWN, 4, 30}},
         {71, 1},
         .other = "rank 0 said: reason of rank 0"},
        {"an i/o error of a rank itself is the cause, although its peers say so before",
         {{ND_ERR_IO, ND_CAUSE_OWN, 3},
          {ND_ERR_IO, ND_CAUSE_LOCAL, 5, .stopped = true},
          {ND_ERR_IO, ND_CAUSE_ELSEWHERE, 4}},
         {74, 1}},
        {"a deadline that was over before ranks were asked to end is no consequence of that",
         {{ND_ERR_IO, ND_CAUSE_OWN, 9}, {ND_ERR_HANG, ND_CAUSE_OWN, 4, .stopped = true}},
         {124, 1},
         5},
        {"a crash is a failure of its own, although a kill was sent",
         {{ND_ERR_IO, ND_CAUSE_OWN, 3}, {.stopped = true, .kill_sent = true, .signal = 11}},
         {128 + 11, 1}},
        {"a stop at a step boundary explains no failure",
         {{ND_ERR_PREEMPTED, ND_CAUSE_OWN, 3}, {ND_ERR_IO, ND_CAUSE_OWN, 5}},
         {74, 1}},
        {"a deadline that was over after it is one",
         {{ND_ERR_IO, ND_CAUSE_OWN, 9}, {ND_ERR_HANG, ND_CAUSE_OWN, 6, .stopped = true}},
         {74, 0},
         5,
         "rank 1 said: reason of rank 1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        job *j = make_job();
        j->attempt.stop_ns = cases[i].stopped;
        for (int rank = 0; rank < 3; rank++) {
            const rank_end *e = &cases[i].ranks[rank];
            record(j, rank, (nd_status)e->code, e->cause, e->recorded);
            j->children[rank].stopped = e->stopped;
            j->children[rank].kill_sent = e->kill_sent;
            j->children[rank].signal = e->signal;
            j->children[rank].ended_ns = e->ended;
        }
        report(j, cases[i].end.code);
        cr_expect(strstr(text, printed("rank %d failed first", cases[i].end.first)), "%s: %s",
                  cases[i].what, text);
        const char *own = printed("it said: reason of rank %d", cases[i].end.first);
        cr_expect(strstr(text, own) || cases[i].end.code > 128, "%s: %s", cases[i].what, text);
        const char *said = strstr(text, " said: reason of rank");
        said = said && said[-1] == 't' ? strstr(said + 1, " said: reason of rank") : said;
        cr_expect(cases[i].other ? said && strstr(text, cases[i].other) : !said, "%s: %s",
                  cases[i].what, text);
        cr_expect(strstr(text, printed(", device device%d): ", cases[i].end.first)), "%s: %s",
                  cases[i].what, text);
    }
}

/* A message that two ranks share is shown once, and at most three of other ranks are. */
Test(report, a_few_of_many_messages_are_shown)
{
    job *j = make_job();
    j->attempt.options.local_workers = 6;
    for (int rank = 0; rank < 6; rank++) {
        record(j, rank, ND_ERR_DATA, ND_CAUSE_OWN, 7 + rank);
    }
    snprintf(j->failures[2].message, ND_ERROR_MESSAGE_MAX, "%s", j->failures[1].message);
    report(j, 65);
    cr_expect(strstr(text, "  it said: reason of rank 0\n"
                           "  rank 1 said: reason of rank 1\n"
                           "  rank 3 said: reason of rank 3\n"
                           "  rank 4 said: reason of rank 4\n"
                           "  collateral (ended with it): 1-5\n"),
              "%s", text);
}

static void expect_words(const job *j, nd_failure_weight weight, const char *words)
{
    nd_nodes_end end = {0};
    free(nd_attempt_report(&j->attempt, &end));
    cr_expect_eq(end.weight, weight);
    cr_expect_eq(strncmp(end.words, words, words[0] ? strlen(words) : 1), 0, "%s", end.words);
}

/* A node tells the others how its first failure stands among theirs. */
Test(report, a_failure_that_may_be_another_nodes_is_told_as_such)
{
    job *j = make_job();
    expect_words(j, ND_FAILURE_REASON, "");
    record(j, 0, ND_ERR_PREEMPTED, ND_CAUSE_OWN, 1);
    expect_words(j, ND_FAILURE_STOP, "rank 0 failed (exit code 75, ");
    record(j, 0, ND_ERR_DATA, ND_CAUSE_ELSEWHERE, 3);
    expect_words(j, ND_FAILURE_EFFECT, "rank 0 failed (exit code 65, ");
    record(j, 1, ND_ERR_IO, ND_CAUSE_OWN, 2);
    expect_words(j, ND_FAILURE_EFFECT, "rank 1 failed (exit code 74, ");
    record(j, 2, ND_ERR_IO, ND_CAUSE_LOCAL, 4);
    expect_words(j, ND_FAILURE_REASON, "rank 2 failed (exit code 74, ");
    free(j);
}

Test(report, control_characters_of_a_worker_are_escaped)
{
    job *j = make_job();
    j->children[1].exit_code = 7;
    j->children[1].tail_count = 1;
    j->attempt.options.slurm_job = "77";
    snprintf(j->children[1].tail[0], ND_TAIL_BYTES, "before\x1b[2Jafter");
    report(j, 7);
    cr_expect(strstr(text, "    before\\x1b[2Jafter\n"), "%s", text);
    cr_expect(strstr(text, "rank 1 failed first (host host, Slurm job 77, pid"), "%s", text);
}

/* Rank 1 was killed at `place`, of which these words are said. */
static void expect_place(nd_mesh mesh, nd_progress_slot place, const char *words)
{
    const nd_config own = {.resolved_mesh = mesh};
    job *j = make_job();
    j->attempt.options.config = &own;
    j->children[0].stopped = j->children[2].stopped = true;
    j->children[1].signal = 9;
    j->slots[1] = place;
    report(j, 128 + 9);
    cr_assert_not_null(strstr(text, "rank 1 failed first"), "%s", text);
    cr_expect(strstr(text, words), "no \"%s\" in:\n%s", words, text);
}

Test(report, the_operation_that_a_rank_was_in)
{
    static const struct {
        nd_progress_slot place;
        const char *words;
    } cases[] = {
        {{.op = ND_COMM_ALL_GATHER, .step = 3, .sequence = 17, .since_ns = 5},
         "step 3; inside all_gather of group tp, sequence 17\n"},
        {{.op = ND_COMM_ALL_GATHER, .sequence = 17},
         "step 0; after all_gather of group tp, sequence 17\n"},
        /* A set-up has no sequence, and a rank that entered nothing no operation. */
        {{.op = ND_COMM_SETUP, .since_ns = 5}, "step 0; inside the communicator of group tp\n"},
        {{0}, "step 0\n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_progress_slot place = cases[i].place;
        place.group = ND_GROUP_TP;
        expect_place(config.resolved_mesh, place, cases[i].words);
    }
}

Test(report, a_rank_has_its_coordinates_in_the_mesh)
{
    const nd_progress_slot place = {0};
    expect_place((nd_mesh){{1, 2, 1, 1, 2}}, place, "\n  mesh r0 t1, phase start, step 0\n");
    expect_place((nd_mesh){{1, 1, 1, 1, 1}}, place, "\n  phase start, step 0\n");
}

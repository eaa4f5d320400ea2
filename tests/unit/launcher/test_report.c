// SPDX-License-Identifier: Apache-2.0
/* The failure screen of jobs that are over, without processes. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/launcher.h"
#include "runtime/comm/comm.h"

/* Rank 1 of 2 was killed at `place`; what is said of it. */
static char *screen_of(const nd_progress_slot *place)
{
    nd_attempt *attempt = calloc(1, sizeof *attempt);
    nd_child *children = calloc(2, sizeof *children);
    nd_progress_slot slots[2] = {{.rank = 0}, *place};
    nd_failure_slot failures[2] = {0};
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    cr_assert(attempt && children && out);
    children[0].stopped = true;
    children[1].rank = children[1].local_rank = 1;
    children[1].signal = 9;
    attempt->options = (nd_attempt_options){
        .host_name = "host", .slurm_job = "", .local_workers = 2, .world_size = 2};
    attempt->children = children;
    attempt->progress = (nd_progress){.slots = slots, .count = 2};
    attempt->failures = (nd_failure_page){.slots = failures, .count = 2};
    cr_expect_eq(nd_attempt_report(attempt, out), 128 + 9);
    fclose(out);
    free(children);
    free(attempt);
    cr_assert_not_null(strstr(text, "rank 1 failed first"), "%s", text);
    return text;
}

static void expect_place(nd_progress_slot place, const char *words)
{
    char *text = screen_of(&place);
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

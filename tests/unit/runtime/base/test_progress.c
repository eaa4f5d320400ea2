// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/progress.h"
#include "tests/support/tempdir.h"

/* Also of a worker that is killed: what rank 0 leaves for the next start. */
Test(progress, what_a_worker_writes_its_launcher_reads)
{
    nd_progress page;
    char longest[ND_RUN_FOLDER_MAX];
    snprintf(longest, sizeof longest, "/%0*d", (int)sizeof longest - 2, 0);
    cr_assert_eq(nd_progress_create(4, &page), ND_OK);
    cr_assert_eq(page.count, 4);
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(atomic_load(&page.slots[i].rank), -1);
        cr_assert_eq(atomic_load(&page.slots[i].phase), ND_PHASE_START);
        cr_assert_eq(atomic_load(&page.slots[i].sequence), 0);
    }
    cr_assert_str_eq(nd_progress_run_folder(&page), "");
    cr_assert_eq(atomic_load(&page.job->first_step), -1);
    cr_assert_eq(atomic_load(&page.job->durable_step), -1);
    cr_assert_eq(atomic_load(&page.job->stepped_ns), 0);
    pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        nd_progress own;
        if (nd_progress_open(dup(page.fd), 4, &own) != ND_OK ||
            nd_progress_set_run_folder(&own, longest) != ND_OK) {
            _exit(1);
        }
        atomic_store(&own.slots[2].rank, 2);
        atomic_store(&own.slots[2].bytes, (int64_t)5 << 40);
        nd_progress_set_phase(&own.slots[2], ND_PHASE_BACKWARD, 17);
        atomic_store(&own.job->first_step, 12);
        atomic_store(&own.job->durable_step, 16);
        nd_progress_set_stepped(&own);
        kill(getpid(), SIGKILL);
    }
    int status = 0;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFSIGNALED(status));
    cr_assert_eq(atomic_load(&page.slots[2].rank), 2);
    cr_assert_eq(atomic_load(&page.slots[2].phase), ND_PHASE_BACKWARD);
    cr_assert_eq(atomic_load(&page.slots[2].step), 17);
    cr_assert_eq(atomic_load(&page.slots[2].bytes), (int64_t)5 << 40);
    cr_assert_eq(atomic_load(&page.slots[1].rank), -1);
    cr_assert_str_eq(nd_progress_run_folder(&page), longest);
    cr_assert_eq(atomic_load(&page.job->first_step), 12);
    cr_assert_eq(atomic_load(&page.job->durable_step), 16);
    int64_t first = atomic_load(&page.job->stepped_ns);
    cr_assert(first > 0 && first <= nd_clock_ns());
    nd_progress_set_stepped(&page); /* the first call counts */
    cr_assert_eq(atomic_load(&page.job->stepped_ns), first);
    nd_progress_close(&page);
    cr_assert_null(page.slots);
    nd_progress_close(&page); /* twice is legal */
}

/* Touching a page behind the end of the file would be SIGBUS: the size is checked before. */
Test(progress, a_page_that_is_too_small_or_no_page_is_refused)
{
    nd_progress page, other;
    cr_assert_eq(nd_progress_create(2, &page), ND_OK);
    assert_fails(nd_progress_open(page.fd, 3, &other), ND_ERR_INTERNAL, "not one of 3 slots");
    assert_fails(nd_progress_open(9999, 1, &other), ND_ERR_INTERNAL, "9999");
    nd_progress_close(&page);
}

Test(progress, every_phase_has_a_name_of_its_own)
{
    for (int a = 0; a < ND_PHASE_COUNT; a++) {
        cr_assert_str_neq(nd_phase_name((nd_phase)a), "unknown");
        for (int b = 0; b < a; b++) {
            cr_assert_str_neq(nd_phase_name((nd_phase)a), nd_phase_name((nd_phase)b));
        }
    }
    cr_assert_str_eq(nd_phase_name(ND_PHASE_COUNT), "unknown");
    cr_assert_str_eq(nd_phase_name((nd_phase)-1), "unknown");
}

/* On the private page of a worker without a launcher. */
Test(progress, a_run_folder_is_absolute_and_fits_and_is_set_once)
{
    nd_progress page;
    char too_long[ND_RUN_FOLDER_MAX + 1];
    snprintf(too_long, sizeof too_long, "/%0*d", (int)sizeof too_long - 2, 0);
    cr_assert_eq(nd_progress_open(-1, 1, &page), ND_OK);
    cr_assert_eq(nd_progress_set_run_folder(&page, too_long), ND_ERR_CANTCREATE);
    cr_assert_eq(nd_progress_set_run_folder(&page, "runs/a"), ND_ERR_CANTCREATE);
    cr_assert_str_eq(nd_progress_run_folder(&page), "");
    cr_assert_eq(nd_progress_set_run_folder(&page, "/runs/a"), ND_OK);
    cr_assert_eq(nd_progress_set_run_folder(&page, "/runs/b"), ND_OK);
    cr_assert_str_eq(nd_progress_run_folder(&page), "/runs/a");
    cr_assert_eq(atomic_load(&page.job->durable_step), -1);
    nd_progress_set_phase(&page.slots[0], ND_PHASE_SAVE, 3);
    cr_assert_eq(atomic_load(&page.slots[0].phase), ND_PHASE_SAVE);
    nd_progress_close(&page);
}

Test(progress, the_first_failure_of_a_worker_stays)
{
    nd_failure_slot slots[2] = {0}, slot;
    const nd_progress page = {.failures = slots, .count = 2};
    nd_failure_record(&(nd_progress){0}, 1, &(nd_error){ND_ERR_DATA, ND_CAUSE_OWN, "no page"});
    nd_failure_record(&page, 1, &(nd_error){ND_ERR_DATA, ND_CAUSE_LOCAL, "the first"});
    const int64_t first = atomic_load(&slots[1].time_ns);
    cr_assert(first > 0 && first <= nd_clock_ns());
    nd_failure_record(&page, 1, &(nd_error){ND_ERR_IO, ND_CAUSE_OWN, "another"});
    cr_expect_eq(atomic_load(&slots[0].time_ns), 0, "another worker's record");
    slot = slots[1];
    cr_expect(slot.status == ND_ERR_DATA && slot.cause == ND_CAUSE_LOCAL);
    cr_expect_str_eq(slot.message, "the first");
    cr_expect_eq(atomic_load(&slot.time_ns), first);
}

Test(progress, a_step_counts_once_it_is_over)
{
    static const struct {
        nd_phase phase;
        int64_t step, completed;
    } cases[] = {
        {ND_PHASE_START, 0, 0},    {ND_PHASE_INIT, 0, 0},      {ND_PHASE_FORWARD, 1, 0},
        {ND_PHASE_BACKWARD, 8, 7}, {ND_PHASE_OPTIMIZER, 8, 7}, {ND_PHASE_EVAL, 8, 8},
        {ND_PHASE_SAVE, 8, 8},     {ND_PHASE_DONE, 8, 8},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_progress_slot slot = {0};
        nd_progress_set_phase(&slot, cases[i].phase, cases[i].step);
        cr_assert_eq(nd_progress_completed_steps(&slot), cases[i].completed, "case %zu", i);
    }
}

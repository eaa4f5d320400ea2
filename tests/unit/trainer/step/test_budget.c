// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>

#include "trainer/step/parts.h"

/* Memory that only saves time, beside a host's memory and a limit of one worker. Units are
 * gigabytes here. */
Test(budget, what_only_saves_time_fits_in_three_quarters_and_in_what_is_free)
{
    static const struct {
        uint64_t physical, available;
        int64_t left; /* 0: the worker has no limit */
        size_t bytes;
        int workers;
        bool exceeds;
    } cases[] = {
        {256, 256, 0, 192, 1, false},                               /* three quarters */
        {256, 256, 0, 193, 1, true},  {256, 166, 0, 166, 1, false}, /* other programs hold 90 */
        {256, 166, 0, 167, 1, true},  {256, 166, 0, 83, 2, false},  /* all workers together */
        {256, 166, 0, 84, 2, true},   {256, 256, 0, 193, 0, true},  /* of no number: one */
        {256, 0, 0, 1, 1, true},      {0, 0, 0, 1000, 8, false},    /* memory is not known */
        {256, 256, 40, 30, 2, false},                               /* a limit is for each worker */
        {256, 256, 40, 31, 2, true},  {0, 0, 40, 31, 1, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const nd_host_memory host = {cases[i].physical, cases[i].available};
        const nd_memory_limit limit = {.option = cases[i].left > 0 ? "ulimit -v" : NULL,
                                       .left = cases[i].left};
        cr_expect_eq(nd_budget_exceeds(cases[i].bytes, cases[i].workers, &host, &limit),
                     cases[i].exceeds, "case %zu", i);
    }
}

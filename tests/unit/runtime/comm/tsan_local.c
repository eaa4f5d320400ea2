// SPDX-License-Identifier: Apache-2.0
/* The local transport under the thread sanitizer: a plain program, as Criterion does not run
 * there. */
#include <stdio.h>

#include "tests/unit/runtime/comm/cases.h"

static int failures;

static void run(const char *name, int size, nd_status (*body)(nd_transport *, void *),
                void *context)
{
    nd_ranks ranks = {.size = size, .timeout_seconds = 60, .body = body, .context = context};
    nd_status status = nd_ranks_run_threads(&ranks);
    printf("%s on %d ranks: %s\n", name, size,
           status == ND_OK ? "passed" : nd_error_last()->message);
    failures += status != ND_OK;
}

/* Nobody checks the sentence here (test_local.c does): that operations are taken back without a
 * race is the point. */
static void run_fault(const char *name, case_fault fault, int64_t count)
{
    case_faulty c = {.fault = fault, .rank = 1, .count = count};
    nd_ranks ranks = {.size = 3, .timeout_seconds = 2, .body = case_fault_body, .context = &c};
    nd_status status = nd_ranks_run_threads(&ranks);
    printf("%s: %s\n", name, status != ND_OK ? "passed" : "nobody noticed");
    failures += status == ND_OK;
}

int main(void)
{
    static case_collectives c = {.counts = {0, 1, 1000, -1}, .large = 1.1};
    run("collectives", 2, case_collectives_body, &c);
    c.large = 0;
    run("collectives", 4, case_collectives_body, &c);
    run("collectives", 9, case_collectives_body, &c);
    run("pending operations", 3, case_pending_body, NULL);
    run("groups", 8, case_groups_body, NULL);
    run_fault("a rank that skips", CASE_SKIP, 200000);
    run_fault("a rank that ends", CASE_LEAVE, 200000);
    run_fault("another count", CASE_OTHER_COUNT, 200000);
    return failures > 0;
}

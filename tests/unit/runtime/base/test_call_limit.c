// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/call_limit.h"

#include <criterion/criterion.h>
#include <unistd.h>

/* A process that is not ended ends with 3. */
static nd_call_limit *begin(double seconds, int exit_code, int *call)
{
    nd_call_limit *limit;
    cr_assert_eq(nd_call_limit_create(&limit), ND_OK);
    *call = nd_call_limit_begin(limit, "the call", seconds, "nobody answers", exit_code);
    return limit;
}

Test(call_limit, a_call_that_outlasts_its_limit_ends_the_process, .exit_code = 124, .timeout = 60)
{
    int call;
    begin(0.05, 124, &call);
    sleep(30);
    _exit(3);
}

Test(call_limit, the_earliest_limit_counts, .exit_code = 7, .timeout = 60)
{
    int call;
    nd_call_limit *limit = begin(25, 5, &call);
    nd_call_limit_begin(limit, "another", 0.05, "nobody answers", 7);
    sleep(30);
    _exit(3);
}

Test(call_limit, a_call_that_ends_in_time_does_no_harm, .exit_code = 0, .timeout = 60)
{
    for (int i = 0; i < 20; i++) { /* more than can be open at once */
        int call, other;
        nd_call_limit *limit = begin(i == 0 ? 1.5 : 60, 124, &call);
        other = nd_call_limit_begin(limit, "another", 60, "nobody answers", 124);
        nd_call_limit_end(limit, call);
        usleep(i == 0 ? 1600000 : 0); /* past the first one's deadline */
        nd_call_limit_end(limit, other);
        nd_call_limit_destroy(limit);
    }
    nd_call_limit_destroy(NULL);
}

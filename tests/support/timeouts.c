// SPDX-License-Identifier: Apache-2.0
/*
 * Before the first test of a program: all its tests that have a timeout must have the same one.
 * Criterion 2.4 keeps the tests that run in a list, sorted by when each must have ended. One put
 * before others cuts these off: they have no timeout any more, and the leak sanitizer makes the
 * program fail. Of tests with one timeout, the one that begins last is always the last of the list.
 */
#include <criterion/criterion.h>
#include <criterion/hooks.h>
#include <criterion/internal/ordered-set.h>
#include <stdio.h>
#include <stdlib.h>

static double timeout_of(const struct criterion_suite *suite, const struct criterion_test *test)
{
    if (test->data && test->data->timeout > 0) {
        return test->data->timeout;
    }
    return suite->data ? suite->data->timeout : 0;
}

ReportHook(PRE_ALL)(struct criterion_test_set *all)
{
    const struct criterion_test *first = NULL;
    double seconds = 0;
    FOREACH_SET (struct criterion_suite_set *set, all->suites) {
        FOREACH_SET (struct criterion_test *test, set->tests) {
            double own = timeout_of(&set->suite, test);
            if (own <= 0) {
                continue;
            }
            if (!first) {
                first = test;
                seconds = own;
            }
            if (own != seconds) {
                fprintf(stderr,
                        "%s:%u: %s::%s has a timeout of %g s and %s::%s one of %g s. Criterion "
                        "loses timeouts of a program whose tests have different ones: give both "
                        "the longer one.\n",
                        test->data->file_, test->data->line_, test->category, test->name, own,
                        first->category, first->name, seconds);
                exit(1);
            }
        }
    }
}

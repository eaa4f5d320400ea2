// SPDX-License-Identifier: Apache-2.0
/* A program of tests with two timeouts, which tests/support/timeouts.c must refuse. */
#include <criterion/criterion.h>

TestSuite(of_the_suite, .timeout = 60);

Test(of_the_suite, has_its_timeout)
{
    cr_assert(true);
}

Test(of_the_suite, has_its_own, .timeout = 30)
{
    cr_assert(true);
}

Test(without, has_none)
{
    cr_assert(true);
}

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SUPPORT_SKIP_H
#define ND_TESTS_SUPPORT_SKIP_H
#include <criterion/criterion.h>
#include <stdio.h>

/* Ends the test without a verdict, and without its .fini; .ci/suites shows the line that says
 * why. */
#define skip_test(reason)                                                                          \
    do {                                                                                           \
        fputs("skipped: " reason "\n", stderr);                                                    \
        cr_skip(reason);                                                                           \
    } while (0)

#endif

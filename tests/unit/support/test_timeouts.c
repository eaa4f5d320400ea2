// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/shell.h"

/* Criterion orders suites and tests by name. */
Test(timeouts, a_program_with_two_is_refused, .timeout = 60)
{
    tempdir dir;
    tempdir_make(&dir);
    /* Without the variables by which Criterion tells a process which test it is to run. */
    cr_expect_eq(shell_run(&dir, "env -i " TWO_TIMEOUTS), 1);
    cr_expect(strstr(shell_output, "of_the_suite::has_its_timeout has a timeout of 60 s and "
                                   "of_the_suite::has_its_own one of 30 s. Criterion loses "),
              "%s", shell_output);
    cr_expect_null(strstr(shell_output, "Synthesis"), "its tests ran: %s", shell_output);
    tempdir_remove(&dir);
}

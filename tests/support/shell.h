// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SUPPORT_SHELL_H
#define ND_TESTS_SUPPORT_SHELL_H
/* Shell commands inside a test's folder. */
#include <sys/wait.h>

#include "tests/support/tempdir.h"

/* What the last command printed, on both streams. */
static char shell_output[32768];

/* The exit code of the command, run in the folder; 128 + the signal that ended it. */
static inline int shell_run(const tempdir *dir, const char *command)
{
    char line[4096];
    int n = snprintf(line, sizeof line, "cd %s && { %s; } 2>&1", dir->path, command);
    cr_assert_lt(n, (int)sizeof line, "too long: %s", command);
    FILE *f = popen(line, "r");
    cr_assert_not_null(f);
    size_t size = fread(shell_output, 1, sizeof shell_output - 1, f);
    shell_output[size] = '\0';
    int status = pclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* The command, which ends with 0. */
static inline void shell(const tempdir *dir, const char *command)
{
    int code = shell_run(dir, command);
    cr_assert_eq(code, 0, "%s\nended with %d:\n%s", command, code, shell_output);
}

#endif

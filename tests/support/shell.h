// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SUPPORT_SHELL_H
#define ND_TESTS_SUPPORT_SHELL_H
/* Shell commands inside a test's folder. */
#include <string.h>
#include <sys/wait.h>

#include "tests/support/printed.h"
#include "tests/support/tempdir.h"

/* The output of the last command, on both streams. */
static char shell_output[32768];

/* The exit code of the command, run in the folder; 128 + the signal that ended it. */
static inline int shell_run(const tempdir *dir, const char *command)
{
    FILE *f = popen(printed("cd %s && { %s; } 2>&1", dir->path, command), "r");
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

/* A command with values in it. */
#define shell_line printed

/* The last command printed all of `facts`, texts ended by NULL. */
static inline void shell_says(const char *const *facts)
{
    for (; *facts != NULL; facts++) {
        cr_assert_not_null(strstr(shell_output, *facts), "no \"%s\" in:\n%s", *facts, shell_output);
    }
}

static inline void says_not(const char *words)
{
    cr_assert_null(strstr(shell_output, words), "\"%s\" in:\n%s", words, shell_output);
}

/* The command, which ends with this code and says all of `facts`. */
static inline void shell_ends_saying(const tempdir *dir, int code, const char *command,
                                     const char *const *facts)
{
    const int got = shell_run(dir, command);
    cr_assert_eq(got, code, "%s\nended with %d:\n%s", command, got, shell_output);
    shell_says(facts);
}

#define says(...) shell_says((const char *const[]){__VA_ARGS__, NULL})
#define shell_ends(dir, code, command, ...)                                                        \
    shell_ends_saying(dir, code, command, (const char *const[]){NULL, ##__VA_ARGS__, NULL} + 1)

#endif

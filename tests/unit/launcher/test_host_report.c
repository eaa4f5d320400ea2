// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/launcher.h"

static char *report(void)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    cr_assert_not_null(out);
    nd_host_report(out);
    cr_assert_eq(fclose(out), 0);
    return text;
}

Test(host_report, says_what_a_reader_asks_for)
{
    static const char *const names[] = {"system",    "kernel",      "C library",   "CPU",
                                        "memory",    "/dev/shm",    "open files",  "locked memory",
                                        "available", "NVIDIA GPUs", "environment:"};
    char *text = report();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        cr_expect_not_null(strstr(text, names[i]), "no %s in\n%s", names[i], text);
    }
    free(text);
}

Test(host_report, shows_variables_that_matter_and_no_secret)
{
    setenv("NCCL_DEBUG", "IN\x1b[31mFO\n", 1);
    setenv("HF_TOKEN", "hf_verysecret", 1);
    setenv("ND_MY_PASSWORD", "verysecret", 1);
    setenv("SOMETHING_ELSE", "private", 1);
    char *text = report();
    cr_expect_not_null(strstr(text, "NCCL_DEBUG         IN\\x1b[31mFO\\n\n"), "%s", text);
    cr_expect_not_null(strstr(text, "HF_TOKEN           (set; not shown)\n"), "%s", text);
    cr_expect_null(strstr(text, "verysecret"), "%s", text);
    cr_expect_null(strstr(text, "private"), "%s", text);
    free(text);
}

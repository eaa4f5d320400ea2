// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/launcher.h"
#include "tests/support/tempdir.h"

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
    setenv("SLURM_JWT", "verysecret", 1); /* a login of Slurm's REST interface */
    setenv("slurm_x", "private", 1);
    setenv("NCCL_SOME_AUTH", "verysecret", 1);
    setenv("ND_CREDS", "verysecret", 1);
    setenv("HF_COOKIE", "verysecret", 1);
    setenv("HF_PASS", "verysecret", 1);
    setenv("ND_api_Key", "verysecret", 1);
    setenv("HF_ENDPOINT", "https://me:verysecret@hub", 1);
    setenv("SLURM_X", "eyJhbGciOi.verysecret", 1);
    setenv("SOMETHING_ELSE", "private", 1);
    char *text = report();
    cr_expect_not_null(strstr(text, "NCCL_DEBUG         IN\\x1b[31mFO\\n\n"), "%s", text);
    cr_expect_not_null(strstr(text, "HF_TOKEN           (set; not shown)\n"), "%s", text);
    cr_expect_not_null(strstr(text, "SLURM_JWT          (set; not shown)\n"), "%s", text);
    cr_expect_null(strstr(text, "verysecret"), "%s", text);
    cr_expect_null(strstr(text, "private"), "%s", text);
    free(text);
}

static char *gpu_models(const char *driver)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    cr_assert_not_null(out);
    nd_host_put_gpu_models(out, driver);
    cr_assert_eq(fclose(out), 0);
    return text;
}

static void put_gpu(tempdir *driver, const char *bus, const char *text)
{
    char name[64];
    snprintf(name, sizeof name, "gpus/%.30s", bus);
    assert_ok(nd_fs_make_folders(tempdir_file(driver, name), "the folder", ""));
    snprintf(name, sizeof name, "gpus/%.30s/information", bus);
    tempdir_write(driver, name, text, strlen(text));
}

Test(host_report, names_the_model_of_each_gpu)
{
    tempdir driver;
    tempdir_make(&driver);
    put_gpu(&driver, "0000:04:00.0",
            "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 5\nDevice Minor: \t 0\n");
    put_gpu(&driver, "0000:8a:00.0", "Model: \t\t NVIDIA H200\nDevice Minor: \t 1\n");
    char *text = gpu_models(driver.path);
    cr_expect_str_eq(text, "  GPU 0              NVIDIA H100 80GB HBM3, bus 0000:04:00.0\n"
                           "  GPU 1              NVIDIA H200, bus 0000:8a:00.0\n");
    free(text);
    tempdir_remove(&driver);
}

Test(host_report, says_that_there_is_no_gpu)
{
    char *text = gpu_models("/nonexistent");
    cr_expect_not_null(strstr(text, "none: the NVIDIA driver shows no GPU"), "%s", text);
    free(text);
}

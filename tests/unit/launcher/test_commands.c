// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launcher/launcher.h"
#include "tests/support/printed.h"
#include "tests/support/tempdir.h"
#include "tests/support/variables.h"

static tempdir dir;

TEMPDIR_SUITE(commands, tempdir_leave_empty);

static char *written;
static size_t size;

static FILE *open_text(void)
{
    free(written);
    FILE *out = open_memstream(&written, &size);
    cr_assert_not_null(out);
    return out;
}

/* Closes the stream and returns the text that was written, good until the next one. */
static const char *close_text(FILE *out)
{
    cr_assert_eq(fclose(out), 0);
    return written;
}

static const char *report(void)
{
    FILE *out = open_text();
    nd_host_report(out);
    return close_text(out);
}

Test(commands, a_host_report_says_what_a_reader_asks_for)
{
    static const char *const names[] = {"system",    "kernel",      "C library",   "CPU",
                                        "memory",    "/dev/shm",    "open files",  "locked memory",
                                        "available", "NVIDIA GPUs", "environment:"};
    const char *text = report();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        cr_expect_not_null(strstr(text, names[i]), "no %s in\n%s", names[i], text);
    }
}

Test(commands, a_host_report_shows_variables_that_matter_and_no_secret)
{
    SET_VARIABLES("NCCL_DEBUG=IN\x1b[31mFO\n", "HF_TOKEN=hf_verysecret",
                  "ND_MY_PASSWORD=verysecret",
                  "SLURM_JWT=verysecret", /* a login of Slurm's REST interface */
                  "ND_SECRET=verysecret", "HF_BEARER=verysecret", "UCX_PSK=verysecret",
                  "slurm_x=private", "RANKING=private", "NCCL_SOME_AUTH=verysecret",
                  "ND_CREDS=verysecret", "HF_COOKIE=verysecret", "HF_PASS=verysecret",
                  "ND_api_Key=verysecret", "HF_ENDPOINT=https://me:verysecret@hub",
                  "SLURM_X=eyJhbGciOi.verysecret", "SOMETHING_ELSE=private");
    const char *text = report();
    cr_expect_not_null(strstr(text, "NCCL_DEBUG         IN\\x1b[31mFO\\n\n"), "%s", text);
    cr_expect_not_null(strstr(text, "HF_TOKEN           (set; not shown)\n"), "%s", text);
    cr_expect_not_null(strstr(text, "SLURM_JWT          (set; not shown)\n"), "%s", text);
    cr_expect_null(strstr(text, "verysecret"), "%s", text);
    cr_expect_null(strstr(text, "private"), "%s", text);
}

Test(commands, a_host_report_has_all_kinds_of_variables_that_matter)
{
    SET_VARIABLES("CUDA_X=mine", "UCX_X=mine", "OMP_X=mine", "GOMP_X=mine", "ONEDNN_X=mine",
                  "DNNL_X=mine", "PMIX_X=mine", "RANK=mine", "LOCAL_RANK=mine", "WORLD_X=mine",
                  "MASTER_X=mine", "XDG_X=mine", "LD_LIBRARY_X=mine", "MALLOC_X=mine",
                  "ACCELERATE_X=mine");
    const char *text = report();
    cr_expect_eq(times_in(text, " mine\n"), 15, "%s", text);
}

static const char *gpu_models(const char *driver)
{
    FILE *out = open_text();
    nd_host_put_gpu_models(out, driver);
    return close_text(out);
}

static void put_gpu(const char *bus, const char *text)
{
    const char *folder = tempdir_file(&dir, printed("gpus/%s", bus));
    assert_ok(nd_fs_make_folders(folder, "the folder", ""));
    tempdir_write(&dir, printed("gpus/%s/information", bus), text, strlen(text));
}

Test(commands, names_the_model_of_each_gpu)
{
    put_gpu("0000:04:00.0",
            "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 5\nDevice Minor: \t 0\n");
    put_gpu("0000:8a:00.0", "Model: \t\t NVIDIA H200\nDevice Minor: \t 1\n");
    const char *text = gpu_models(dir.path);
    cr_expect_str_eq(text, "  GPU 0              NVIDIA H100 80GB HBM3, bus 0000:04:00.0\n"
                           "  GPU 1              NVIDIA H200, bus 0000:8a:00.0\n");
}

Test(commands, says_that_there_is_no_gpu)
{
    const char *text = gpu_models("/nonexistent");
    cr_expect_not_null(strstr(text, "none: the NVIDIA driver shows no GPU"), "%s", text);
}

/* Returns what was said. */
static const char *write_starter(const char *path, nd_status wanted)
{
    FILE *out = open_text();
    char *argv[] = {"config", "--config-file", (char *)path};
    cr_expect_eq(nd_starter_main(out, 3, argv), wanted);
    return close_text(out);
}

static void expect_text(nd_config *config, const char *key, const char *wanted)
{
    char *value = NULL;
    assert_ok(nd_config_get(config, key, &value));
    cr_expect_str_eq(value, wanted, "%s is %s, not %s", key, value, wanted);
    free(value);
}

Test(commands, a_first_configuration_is_a_run)
{
    const char *path = tempdir_file(&dir, "run.yaml");
    char *argv[] = {"ndlaunch", "--config-file", (char *)path};
    nd_config config = {0};
    nd_cli cli = {.help_topic = ""};
    const char *said = write_starter(path, ND_OK);
    cr_expect_not_null(strstr(said, path));
    assert_ok(nd_config_init(&config));
    assert_ok(nd_config_parse(&config, &cli, 3, argv));
    assert_ok(nd_config_resolve(&config));
    expect_text(&config, "model.config", "configs/model-small.json");
    expect_text(&config, "data.tokenizer", "bytes");
    expect_text(&config, "optimizer.warmup_steps", "100");
    nd_config_fini(&config);
}

Test(commands, a_first_configuration_replaces_nothing)
{
    struct stat after;
    const char *path = tempdir_write(&dir, "run.yaml", "mine", 4);
    write_starter(path, ND_ERR_CANTCREATE);
    cr_expect_not_null(strstr(nd_error_last()->message, "exists already"), "%s",
                       nd_error_last()->message);
    cr_expect(stat(path, &after) == 0 && after.st_size == 4);
    write_starter(tempdir_file(&dir, "nowhere/run.yaml"), ND_ERR_CANTCREATE);
    cr_expect_not_null(strstr(nd_error_last()->message, "cannot be created"), "%s",
                       nd_error_last()->message);
}

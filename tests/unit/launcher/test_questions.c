// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/launcher.h"

/* A name in a new folder of its own. */
static void make_path(char path[64], char folder[32])
{
    snprintf(folder, 32, "/tmp/nd_questions_XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, 64, "%s/run.yaml", folder);
}

/* Answers, one a line; NULL: --default. Returns what was said, owned by the caller. */
static char *interview(const char *answers, const char *path, nd_status *status)
{
    char *said = NULL;
    size_t size = 0;
    FILE *in = answers ? fmemopen((void *)(uintptr_t)answers, strlen(answers), "r") : NULL;
    FILE *out = open_memstream(&said, &size);
    cr_assert_not_null(out);
    *status = nd_questions_ask(in, out, path);
    cr_assert_eq(fclose(out), 0);
    if (in) {
        fclose(in);
    }
    return said;
}

/* Reads the file as a run would. */
static nd_config read_back(char *path)
{
    nd_config config = {0};
    nd_cli cli = {.plan_rank = -1, .help_topic = ""};
    char *argv[] = {"ndlaunch", "--config-file", path};
    cr_assert_eq(nd_config_init(&config), ND_OK);
    cr_assert_eq(nd_config_parse(&config, &cli, 3, argv), ND_OK, "%s", nd_error_last()->message);
    cr_assert_eq(nd_config_resolve(&config), ND_OK, "%s", nd_error_last()->message);
    return config;
}

static void expect_text(nd_config *config, const char *key, const char *wanted)
{
    char *value = NULL;
    cr_assert_eq(nd_config_get(config, key, &value), ND_OK);
    cr_expect_str_eq(value, wanted, "%s is %s, not %s", key, value, wanted);
    free(value);
}

Test(questions, the_defaults_are_a_run)
{
    char path[64], folder[32];
    nd_status status;
    make_path(path, folder);
    char *said = interview(NULL, path, &status);
    cr_assert_eq(status, ND_OK, "%s", nd_error_last()->message);
    cr_expect_not_null(strstr(said, path));
    nd_config config = read_back(path);
    expect_text(&config, "model.config", "configs/model-small.json");
    expect_text(&config, "data.tokenizer", "bytes");
    expect_text(&config, "optimizer.warmup_steps", "100");
    nd_config_fini(&config);
    free(said);
    unlink(path);
    rmdir(folder);
}

Test(questions, an_answer_that_the_key_cannot_have_is_asked_again)
{
    /* workers, replicas, cp, tp, model, two files, tokenizer, steps, ... */
    static const char answers[] =
        "many\n8\n2\n\n 2 \nORG/NAME\n a \"b\".jsonl\n-\n\n0\n20\n\n\nfp9\n"
        "fp32\n\n\n\n\n";
    char path[64], folder[32];
    nd_status status;
    make_path(path, folder);
    char *said = interview(answers, path, &status);
    cr_assert_eq(status, ND_OK, "%s", nd_error_last()->message);
    cr_expect_not_null(strstr(said, "launch.workers"), "%s", said);
    cr_expect_not_null(strstr(said, "train.steps"), "%s", said);
    cr_expect_not_null(strstr(said, "fp9"), "%s", said);
    nd_config config = read_back(path);
    expect_text(&config, "launch.workers", "8");
    expect_text(&config, "mesh.dp_shard", "2");
    expect_text(&config, "mesh.tp", "2");
    expect_text(&config, "model.name", "ORG/NAME");
    expect_text(&config, "data.path", "a \"b\".jsonl");
    expect_text(&config, "data.validation_path", "");
    expect_text(&config, "data.tokenizer", "model");
    expect_text(&config, "train.precision", "fp32");
    nd_config_fini(&config);
    free(said);
    unlink(path);
    rmdir(folder);
}

/* 3 does not divide 4: said before the model is asked for, and no answer after it is lost. */
Test(questions, a_mesh_that_does_not_fit_is_asked_for_again)
{
    char path[64], folder[32];
    nd_status status;
    make_path(path, folder);
    char *said =
        interview("4\n3\n1\n1\n2\n1\n1\n\nno/such.txt\n-\n\n\n\n\n\n\n\n\n\n", path, &status);
    cr_assert_eq(status, ND_OK, "%s\n%s", nd_error_last()->message, said);
    const char *complaint = strstr(said, "dp_replicate 3"), *model = strstr(said, "Model: ");
    cr_expect(complaint && model && complaint < model, "%s", said);
    cr_expect_not_null(strstr(said, "not there yet: no/such.txt (data.path)\n"), "%s", said);
    cr_expect_null(strstr(said, "(data.validation_path)"), "%s", said);
    nd_config config = read_back(path);
    expect_text(&config, "mesh.dp_replicate", "2");
    nd_config_fini(&config);
    free(said);
    unlink(path);
    rmdir(folder);
}

Test(questions, nothing_is_written_when_they_fail)
{
    char path[64], folder[32];
    nd_status status;
    make_path(path, folder);
    free(interview("4\n1\n1\n", path, &status));
    cr_expect_eq(status, ND_ERR_CONFIG);
    cr_expect_not_null(strstr(nd_error_last()->message, "--default"));
    free(
        interview("4\n3\n1\n1\n\n\n\n\n\n\n\n\n\n\n\n\n", path, &status)); /* 3 does not divide 4 */
    cr_expect_eq(status, ND_ERR_CONFIG);
    cr_expect_neq(access(path, F_OK), 0);
    FILE *mine = fopen(path, "w");
    cr_assert_not_null(mine);
    fclose(mine);
    free(interview(NULL, path, &status));
    cr_expect_eq(status, ND_ERR_CANTCREATE);
    unlink(path);
    rmdir(folder);
}

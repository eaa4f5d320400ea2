// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launcher/launcher.h"
#include "tests/support/tempdir.h"

static tempdir dir;

TEMPDIR_SUITE(starter, tempdir_leave_empty);

/* Returns what was said, which the caller frees. */
static char *write_starter(const char *path, nd_status wanted)
{
    char *said = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&said, &size);
    cr_assert_not_null(out);
    char *argv[] = {"config", "--config-file", (char *)path};
    cr_expect_eq(nd_starter_main(out, 3, argv), wanted);
    cr_assert_eq(fclose(out), 0);
    return said;
}

static void expect_text(nd_config *config, const char *key, const char *wanted)
{
    char *value = NULL;
    assert_ok(nd_config_get(config, key, &value));
    cr_expect_str_eq(value, wanted, "%s is %s, not %s", key, value, wanted);
    free(value);
}

Test(starter, is_a_run)
{
    const char *path = tempdir_file(&dir, "run.yaml");
    char *argv[] = {"ndlaunch", "--config-file", (char *)path};
    nd_config config = {0};
    nd_cli cli = {.help_topic = ""};
    char *said = write_starter(path, ND_OK);
    cr_expect_not_null(strstr(said, path));
    assert_ok(nd_config_init(&config));
    assert_ok(nd_config_parse(&config, &cli, 3, argv));
    assert_ok(nd_config_resolve(&config));
    expect_text(&config, "model.config", "configs/model-small.json");
    expect_text(&config, "data.tokenizer", "bytes");
    expect_text(&config, "optimizer.warmup_steps", "100");
    nd_config_fini(&config);
    free(said);
}

Test(starter, replaces_nothing)
{
    struct stat after;
    const char *path = tempdir_write(&dir, "run.yaml", "mine", 4);
    free(write_starter(path, ND_ERR_CANTCREATE));
    cr_expect_not_null(strstr(nd_error_last()->message, "exists already"), "%s",
                       nd_error_last()->message);
    cr_expect(stat(path, &after) == 0 && after.st_size == 4);
    free(write_starter(tempdir_file(&dir, "nowhere/run.yaml"), ND_ERR_CANTCREATE));
    cr_expect_not_null(strstr(nd_error_last()->message, "cannot be created"), "%s",
                       nd_error_last()->message);
}

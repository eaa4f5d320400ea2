// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launcher/launcher.h"

/* A name in a new folder of its own. */
static void make_path(char path[64], char folder[32])
{
    snprintf(folder, 32, "/tmp/nd_starter_XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, 64, "%s/run.yaml", folder);
}

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
    cr_assert_eq(nd_config_get(config, key, &value), ND_OK);
    cr_expect_str_eq(value, wanted, "%s is %s, not %s", key, value, wanted);
    free(value);
}

Test(starter, is_a_run)
{
    char path[64], folder[32], *argv[] = {"ndlaunch", "--config-file", path};
    nd_config config = {0};
    nd_cli cli = {.help_topic = ""};
    make_path(path, folder);
    char *said = write_starter(path, ND_OK);
    cr_expect_not_null(strstr(said, path));
    cr_assert_eq(nd_config_init(&config), ND_OK);
    cr_assert_eq(nd_config_parse(&config, &cli, 3, argv), ND_OK, "%s", nd_error_last()->message);
    cr_assert_eq(nd_config_resolve(&config), ND_OK, "%s", nd_error_last()->message);
    expect_text(&config, "model.config", "configs/model-small.json");
    expect_text(&config, "data.tokenizer", "bytes");
    expect_text(&config, "optimizer.warmup_steps", "100");
    nd_config_fini(&config);
    free(said);
    unlink(path);
    rmdir(folder);
}

Test(starter, replaces_nothing)
{
    char path[64], folder[32];
    struct stat after;
    make_path(path, folder);
    FILE *mine = fopen(path, "w");
    cr_assert_not_null(mine);
    fputs("mine", mine);
    fclose(mine);
    free(write_starter(path, ND_ERR_CANTCREATE));
    cr_expect_not_null(strstr(nd_error_last()->message, "exists already"), "%s",
                       nd_error_last()->message);
    cr_expect(stat(path, &after) == 0 && after.st_size == 4);
    unlink(path);
    rmdir(folder);
    free(write_starter(path, ND_ERR_CANTCREATE)); /* the folder is gone */
    cr_expect_not_null(strstr(nd_error_last()->message, "cannot be created"), "%s",
                       nd_error_last()->message);
}

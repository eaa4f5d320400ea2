// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/launcher.h"
#include "runtime/config/reader.h"
#include "tests/support/tempdir.h"
#include "tests/support/variables.h"

/* The value of the only variable of this name, NULL without one. */
static const char *value_of(char **env, const char *name)
{
    const char *found = NULL;
    size_t length = strlen(name);
    for (; *env; env++) {
        if (strncmp(*env, name, length) == 0 && (*env)[length] == '=') {
            cr_assert_null(found, "%s is there twice", name);
            found = *env + length + 1;
        }
    }
    return found;
}

Test(environment, ours_stands_over_what_is_inherited)
{
    const nd_variable own[] = {{"RANK", "3"}, {"ND_TEST_OWN", ""}};
    char **env;
    SET_VARIABLES("RANK=77", "RANKING=kept", "ND_TEST_OWN=replaced");
    assert_ok(nd_environment_make(own, 2, &env));
    cr_assert_str_eq(value_of(env, "RANK"), "3");
    cr_assert_str_eq(value_of(env, "RANKING"), "kept");
    cr_assert_str_eq(value_of(env, "ND_TEST_OWN"), "");
    cr_assert_str_eq(value_of(env, "PATH"), getenv("PATH"));
    free(env);
}

/* A worker's identity must not come from a launcher around ours, also where we set nothing. */
Test(environment, an_outer_launchers_identity_is_left_out)
{
    static const char names[] =
        "WORLD_SIZE LOCAL_RANK MASTER_ADDR ND_RESTART_EPOCH ND_KEY_FD ND_RUN_ID ND_CONFIG_FD "
        "LOCAL_WORLD_SIZE MASTER_PORT ND_PROGRESS_FD ND_NNODES ND_CONFIG_NAME ND_LAUNCHER_PID "
        "ND_RUN_FOLDER ND_TERMINAL ND_NODE_RANK RANK";
    char name[32];
    char **env;
    for (int i = 0; nd_list_word(names, ' ', i, name, sizeof name); i++) {
        setenv(name, "9", 1);
    }
    setenv("ND_CPU_ISA", "avx2", 1);
    setenv("CUDA_VISIBLE_DEVICES", "1,2", 1);
    assert_ok(nd_environment_make(NULL, 0, &env));
    for (int i = 0; nd_list_word(names, ' ', i, name, sizeof name); i++) {
        cr_assert_null(value_of(env, name), "%s", name);
    }
    cr_assert_str_eq(value_of(env, "ND_CPU_ISA"), "avx2");
    cr_assert_str_eq(value_of(env, "CUDA_VISIBLE_DEVICES"), "1,2");
    free(env);
}

// SPDX-License-Identifier: Apache-2.0
/* The check before the start, with shell scripts as worker programs. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "launcher/launcher.h"
#include "runtime/base/process.h"
#include "runtime/base/version.h"
#include "tests/support/tempdir.h"

static tempdir dir;
static char digests[512];
static int exit_code;

TEMPDIR_SUITE(preflight, tempdir_leave_empty, .timeout = 60);

static nd_status run(const char *script, double seconds)
{
    char text[1024];
    int n = snprintf(text, sizeof text, "#!/bin/sh\n%s\n", script);
    const char *path = tempdir_write(&dir, "worker", text, (size_t)n);
    cr_assert_eq(chmod(path, 0700), 0);
    int config = open("/dev/null", O_RDONLY | O_CLOEXEC);
    const nd_preflight check = {.args = (char *[]){(char *)path, "check", NULL},
                                .config_name = "c.yaml",
                                .config_fd = config,
                                .seconds = seconds,
                                .digests = digests,
                                .capacity = sizeof digests};
    nd_status status = nd_preflight_run(&check, &exit_code);
    close(config);
    return status;
}

#define SAYS_VERSION "echo ndtrain " ND_VERSION "; "

Test(preflight, code_and_digests_are_taken)
{
    assert_ok(run(SAYS_VERSION "echo digest data.path 12ab; echo noise; echo digest model.config "
                               "77; test $1 = check && test $ND_CONFIG_NAME = c.yaml && exit 65",
                  30));
    cr_assert_eq(exit_code, 65);
    cr_assert_str_eq(digests, "data.path=12ab\nmodel.config=77\n");
    assert_ok(run(SAYS_VERSION "kill -9 $$", 30));
    cr_assert_eq(exit_code, 128 + SIGKILL);
    assert_ok(run(SAYS_VERSION "printf %200000d 0; exit 3", 30)); /* more than is kept */
    cr_assert_eq(exit_code, 3);
}

Test(preflight, a_check_that_does_not_end_is_killed_at_its_deadline)
{
    char script[256];
    snprintf(script, sizeof script, SAYS_VERSION "echo $$ >%s/pid; exec sleep 500", dir.path);
    assert_fails(run(script, 2), ND_ERR_HANG, "did not end within");
    FILE *f = fopen(tempdir_file(&dir, "pid"), "r");
    int pid = 0;
    cr_assert(f && fscanf(f, "%d", &pid) == 1);
    fclose(f);
    cr_assert_eq(kill(pid, 0), -1, "it is still there");
}

Test(preflight, another_version_is_named)
{
    assert_fails(run("echo ndtrain 9.9.9", 30), ND_ERR_CONFIG, "ndtrain 9.9.9");
    assert_fails(run("true", 30), ND_ERR_CONFIG, ND_VERSION);
}

/* As with a library that is missing, or that does not fit into the memory that is allowed: a limit
 * is the reason only where it leaves little. */
Test(preflight, a_program_that_cannot_start_is_not_of_another_version)
{
    struct rlimit space;
    assert_fails(run("exit 127", 30), ND_ERR_CONFIG, "cannot start (exit code 127)");
    assert_fails(run("kill -9 $$", 30), ND_ERR_CONFIG, "cannot start (signal 9)");
    cr_assert_eq(getrlimit(RLIMIT_AS, &space), 0);
    space.rlim_cur = (rlim_t)1 << 46;
    cr_assert_eq(setrlimit(RLIMIT_AS, &space), 0);
    assert_fails(run("exit 127", 30), ND_ERR_CONFIG, "cannot start (exit code 127)");
    space.rlim_cur -= (rlim_t)nd_limits_read_memory().left - ((rlim_t)256 << 20);
    cr_assert_eq(setrlimit(RLIMIT_AS, &space), 0);
    assert_fails(run("exit 127", 30), ND_ERR_RESOURCE, "(ulimit -v); raise that limit");
}

/* 16 workers of two nodes: on node 0 connections of 16 workers and 2 nodes. */
Test(preflight, open_files_that_a_node_needs)
{
    nd_config config = {.resolved_mesh = {{1, 1, 16, 1, 1}}};
    struct rlimit files;
    config.launch.nnodes = 2;
    config.launch.log_dir = (char *)"";
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = 50;
    files.rlim_max = 16 + 2 + 3 * 8 + 128;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
    assert_ok(nd_preflight_check_files(&config));
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &files), 0);
    cr_assert_eq(files.rlim_cur, files.rlim_max, "the soft limit is raised");
    files.rlim_cur = --files.rlim_max;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
    assert_fails(nd_preflight_check_files(&config), ND_ERR_CONFIG, "needs 170 open files");
    cr_assert_not_null(strstr(nd_error_last()->message, "hard limit is 169"));
    config.launch.spare_nodes = 1; /* has a connection too */
    assert_fails(nd_preflight_check_files(&config), ND_ERR_CONFIG, "needs 171 open files");
    config.launch.node_rank = 1;
    assert_ok(nd_preflight_check_files(&config));
    config.launch.log_dir = (char *)"logs";
    assert_ok(nd_preflight_check_files(&config)); /* 5 x 8 + 128 = 168 */
    files.rlim_cur = files.rlim_max = 167;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
    assert_fails(nd_preflight_check_files(&config), ND_ERR_CONFIG, "needs 168 open files");
    config.resolved_mesh.size[ND_AXIS_DP_SHARD] = 2 * 65536; /* as many as a node may have */
    assert_fails(nd_preflight_check_files(&config), ND_ERR_CONFIG, "open files");
    config.resolved_mesh.size[ND_AXIS_DP_SHARD] += 2;
    assert_fails(nd_preflight_check_files(&config), ND_ERR_CONFIG, "makes 65537 workers for each");
}

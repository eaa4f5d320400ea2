// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <jansson.h>
#include <string.h>

#include "runtime/base/version.h"
#include "tests/support/tempdir.h"
#include "trainer/run/state.h"

static tempdir dir;
static nd_config config;
static char *const argv[] = {(char *)"ndtrain", (char *)"train", (char *)"--x\xe4"};
static const char *hosts[] = {"left", "right"};
static nd_worker worker = {
    .identity = {.source = ND_IDENTITY_NDLAUNCH, .world_size = 8, .nnodes = 2, .run_id = "abc"},
    .peers = {.hosts = hosts, .host_count = 2}};
static nd_run run = {
    .worker = &worker, .rank = &worker.rank, .config = &config, .argc = 3, .argv = argv};

static void make(void)
{
    tempdir_make(&dir);
    unsetenv("SLURM_JOB_ID");
    setenv("SLURM_JOB_NODELIST", "node[1-4]", 1);
    unsetenv("ND_LAUNCHER_PID");
    assert_ok(nd_config_init(&config));
    config.optimizer.lr = 0.1;
    worker.rank.mesh = (nd_mesh){{1, 2, 2, 1, 2}};
    run.dir = dir.path;
}

static void clean(void)
{
    nd_config_fini(&config);
    tempdir_remove(&dir);
}

static nd_status write_record(void)
{
    return nd_run_record_write(&run, json_pack("{s:{s:s}}", "libraries", "UCX", "1.13.1"));
}

TestSuite(run_record, .init = make, .fini = clean);

static json_t *written(void)
{
    json_error_t error;
    json_t *root = json_load_file(tempdir_file(&dir, "run.json"), JSON_REJECT_DUPLICATES, &error);
    cr_assert_not_null(root, "line %d: %s", error.line, error.text);
    return root;
}

/* SECTION/KEY of the record, or KEY at its top. */
static const json_t *at(const json_t *root, const char *path)
{
    const char *slash = strchr(path, '/');
    char section[64];
    snprintf(section, sizeof section, "%.*s", slash ? (int)(slash - path) : 0, path);
    return json_object_get(slash ? json_object_get(root, section) : root, slash ? slash + 1 : path);
}

static void count_field(void *context, const char *key, const char *value, bool job_scoped)
{
    ++*(size_t *)context;
}

Test(run_record, holds_what_a_run_was)
{
    worker.rank.mesh.kv_copies = 2;
    setenv("SLURM_JOB_ID", "4711", 1);
    setenv("SLURM_STEP_NODELIST", "node[2-3]", 1);
    assert_ok(write_record());
    json_t *root = written();
    static const char *const texts[][2] = {{"program", "ndtrain"},
                                           {"version", ND_VERSION},
                                           {"job/run_id", "abc"},
                                           {"job/slurm_job_id", "4711"},
                                           {"job/slurm_nodes", "node[2-3]"},
                                           {"libraries/UCX", "1.13.1"}};
    static const struct {
        const char *axis;
        int size;
    } sizes[] = {{"mesh/dp_replicate", 2}, {"mesh/cp", 1},      {"mesh/tp", 2},
                 {"mesh/kv_copies", 2},    {"mesh/ulysses", 1}, {"job/world_size", 8},
                 {"job/nnodes", 2}};
    for (int i = 0; i < 7; i++) {
        cr_expect(i > 5 || strcmp(json_string_value(at(root, texts[i][0])), texts[i][1]) == 0);
        cr_expect_eq(json_integer_value(at(root, sizes[i].axis)), sizes[i].size, "%s",
                     sizes[i].axis);
    }
    cr_assert_str_eq(json_string_value(at(root, "job/started_by")),
                     nd_identity_source_name(ND_IDENTITY_NDLAUNCH));
    cr_assert_eq(strlen(json_string_value(at(root, "start_time"))), strlen("2030-01-01T00:00:00Z"));
    const json_t *command = at(root, "command"), *job_hosts = at(root, "job/hosts");
    cr_assert(json_array_size(command) == 3 && json_array_size(job_hosts) == 2);
    cr_assert_str_eq(json_string_value(json_array_get(command, 1)), "train");
    cr_assert_str_eq(json_string_value(json_array_get(command, 2)), "--x?", "not UTF-8");
    cr_assert_str_eq(json_string_value(json_array_get(job_hosts, 1)), "right");
    json_decref(root);
}

Test(run_record, has_every_key_of_the_configuration_with_its_json_type)
{
    assert_ok(write_record());
    json_t *root = written(), *fields = json_object_get(root, "config");
    size_t keys = 0;
    assert_ok(nd_config_each(&config, count_field, &keys));
    cr_assert_eq(json_object_size(fields), keys);
    cr_assert_eq(json_integer_value(json_object_get(fields, "train.steps")), config.train.steps);
    cr_assert_eq(json_real_value(json_object_get(fields, "optimizer.lr")), 0.1);
    cr_assert(json_is_boolean(json_object_get(fields, "output.save_model")));
    cr_assert(json_is_string(json_object_get(fields, "train.precision")));
    cr_assert(json_is_null(at(root, "job/slurm_job_id")));
    json_decref(root);
}

Test(run_record, is_never_written_over_and_leaves_nothing_beside_it)
{
    assert_ok(write_record());
    assert_fails(write_record(), ND_ERR_CANTCREATE, "already holds a run");
    nd_fs_names names;
    assert_ok(nd_fs_list(dir.path, &names));
    cr_assert_eq(names.count, 1);
    nd_fs_names_fini(&names);
    run.dir = (char *)"/proc/nd";
    assert_fails(write_record(), ND_ERR_CANTCREATE, "/proc/nd/run.json");
}

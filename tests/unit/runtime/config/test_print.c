// SPDX-License-Identifier: Apache-2.0
#include "support.h"

#include "runtime/config/reader.h"

Test(echo, yaml_reads_back_as_the_same_configuration)
{
    nd_config c, d;
    char *once = NULL, *twice = NULL;
    assert_ok(FLAGS(&c, "--num-processes", "8", "--dp-replicate-size", "2", "--tp-size", "2",
                    "--lr", "0.1234567890123456789", "--min-lr", "1e-7", "--data-path",
                    "a \"quoted\\path\" \xc3\xa9 #x: y", "--validation-path", "", "--fp8-filter",
                    "a,b", "--reshard-after-forward", "false", "--precision", "fp8", "--log-level",
                    "debug", "--model-name", "org/name", "--beta2", "0.3"));
    assert_ok(nd_config_resolve(&c));
    assert_ok(nd_config_to_yaml(&c, false, &once));
    cr_assert_eq(read_text(&d, once), ND_OK, "%s in %s", nd_error_last()->message, once);
    assert_ok(nd_config_resolve(&d));
    assert_ok(nd_config_to_yaml(&d, false, &twice));
    cr_expect_str_eq(once, twice);
    cr_expect_str_eq(d.data.path, c.data.path);
    cr_expect_eq(d.optimizer.lr, 0.1234567890123456789, "every bit");
    cr_expect_eq(d.optimizer.betas[1], 0.3);
    cr_expect_str_eq(d.model.name, "org/name");
    cr_expect_eq(memcmp(&c.resolved_mesh, &d.resolved_mesh, sizeof c.resolved_mesh), 0);
    free(twice); /* a default is not the length that somebody gave */
    assert_ok(nd_config_to_yaml(&c, true, &twice));
    cr_expect_null(strstr(twice, "sequence_length"));
    free(once);
    free(twice);
    nd_config_fini(&c);
    nd_config_fini(&d);
}

static void count(void *context, const char *key, const char *value, bool job)
{
    cr_expect(strchr(key, '.'));
    cr_expect_not_null(value);
    *(int *)context += 1;
}

Test(echo, each_and_get)
{
    nd_config c;
    int seen = 0;
    char *value = NULL;
    assert_ok(nd_config_init(&c));
    assert_ok(nd_config_each(&c, count, &seen));
    cr_expect_eq(seen, ND_FIELD_COUNT);
    assert_ok(nd_config_get(&c, "train.nothing", &value));
    cr_expect_str_eq(value, "");
    free(value);
    nd_config_fini(&c);
}

/* The texts of the job of two nodes that have one flag each; valid until the next call. */
static char *a, *b;

static void job_texts(const char *flag_a, const char *flag_b)
{
    nd_config c;
    const char *flags[] = {flag_a, flag_b};
    char **texts[] = {&a, &b};
    for (int i = 0; i < 2; i++) {
        free(*texts[i]);
        assert_ok(FLAGS(&c, "--num-processes=4", flags[i]));
        assert_ok(nd_config_resolve(&c));
        assert_ok(nd_config_job_text(&c, texts[i]));
        nd_config_fini(&c);
    }
}

Test(echo, job_text_holds_what_nodes_must_share)
{
    job_texts("--num-steps=7", "--num-steps=7");
    cr_expect_eq(nd_config_diff(a, "node 0", b, "node 1"), ND_OK);
    cr_expect(strstr(a, "train.steps=7\n"));
    cr_expect_null(strstr(a, "launch.node_rank"));
    cr_expect_null(strstr(a, "data.path"), "paths may differ; contents are compared by digest");
    job_texts("--log-dir=x", "--log-dir=y");
    cr_expect_eq(nd_config_diff(a, "node 0", b, "node 1"), ND_OK);
}

Test(echo, diff_names_key_and_both_values)
{
    job_texts("--num-steps=7", "--num-steps=70");
    expect_sentence(nd_config_diff(a, "node 0", b, "node 3"), ND_ERR_CONFIG,
                    "train.steps is '7' on node 0|'70' on node 3");
    expect_sentence(nd_config_diff("a=1\n", "x", "a=1\nb=2\n", "y"), ND_ERR_CONFIG,
                    "b=2|same version");
    expect_sentence(nd_config_diff("a=1\n", "x", "b=1\n", "y"), ND_ERR_CONFIG, "a=1|b=1");
}

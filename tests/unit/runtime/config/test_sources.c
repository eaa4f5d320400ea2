// SPDX-License-Identifier: Apache-2.0
#include "runtime/config/sources.h"
#include "tests/unit/runtime/config/support.h"

/* The text that a configuration keeps of data.path, also when it is printed and read again. */
static void expect_path(const char *yaml, const char *wanted)
{
    nd_config config;
    char *printed_yaml = NULL;
    cr_assert_eq(read_text(&config, yaml), ND_OK, "%s: %s", yaml, nd_error_last()->message);
    cr_expect_str_eq(config.data.path, wanted);
    assert_ok(nd_config_to_yaml(&config, false, &printed_yaml));
    nd_config_fini(&config);
    assert_ok(read_text(&config, printed_yaml));
    cr_expect_str_eq(config.data.path, wanted);
    nd_config_fini(&config);
    free(printed_yaml);
}

Test(sources, lists_of_a_file_become_one_text)
{
    expect_path("data:\n  path: a.txt\n", "a.txt");
    expect_path("data:\n  path: [a.txt, 'b c']\n", "[\"a.txt\", \"b c\"]");
    expect_path("data:\n  path:\n    - path: a\n      weight: 0.7\n    - {path: b, weight: 3, "
                "epochs: 2, name: code}\n",
                "[{path: \"a\", weight: 0.7}, {path: \"b\", weight: 3, epochs: 2, name: code}]");
    expect_path("data:\n  path: {web: a, code: {path: 'b\"c'}}\n",
                "[{path: \"a\", name: web}, {path: \"b\\\"c\", name: code}]");
    expect_path("data:\n  path: {b: {path: 'a \\ c', epochs: 0.5}}\n",
                "[{path: \"a \\\\ c\", epochs: 0.5, name: b}]");
    expect_path("data:\n  path: 0.7 a 0.3 b\n", "0.7 a 0.3 b");
    expect_path("data:\n  path: \"[a, b]\"\n", "[a, b]");
}

Test(sources, a_text_reads_as_sources)
{
    tempdir dir;
    nd_data_sources s;
    assert_ok(nd_data_sources_read("", "data.path", "0.7 x/web.jsonl.zst 30 y/web.bin", &s));
    cr_assert_eq(s.count, 2);
    cr_assert_float_eq(s.list[0].weight, 0.7, 0);
    cr_assert_float_eq(s.list[1].weight, 30, 0);
    cr_assert_str_eq(s.list[1].path, "y/web.bin");
    cr_assert_str_eq(s.list[0].name, "web");
    cr_assert_str_eq(s.list[1].name, "web-2");
    nd_data_sources_fini(&s);
    assert_ok(
        nd_data_sources_read("", "data.path", "[{path: \"a \\\\ c\", epochs: 0.5, name: b}]", &s));
    cr_assert_eq(s.count, 1);
    cr_assert_str_eq(s.list[0].path, "a \\ c");
    cr_assert_float_eq(s.list[0].epochs, 0.5, 0);
    nd_data_sources_fini(&s);
    static const char *const named[][2] = {{"1 x/web/*.jsonl 2 x/web/*.gz", "web"},
                                           {"1 x/code-*.jsonl 2 y", "code"},
                                           {"1 a/b/*/c?.txt 2 y", "c"},
                                           {"1 a/b/*/[0-9]* 2 y", "b"},
                                           {"1 a.b/*.jsonl 2 y", "a.b"},
                                           {"1 *.jsonl 2 y", "_"},
                                           {"[x/web.txt, {path: y, name: web}]", "web-2"}};
    for (size_t i = 0; i < sizeof named / sizeof *named; i++) {
        assert_ok(nd_data_sources_read("", "data.path", named[i][0], &s));
        cr_assert_eq(s.count, 2);
        cr_expect_str_eq(s.list[0].name, named[i][1], "%s", named[i][0]);
        nd_data_sources_fini(&s);
    }
    /* The last two are names of files. */
    static const char *const single[] = {"a b",   "7 up.txt x", "[ab]*.txt", "0.7 a 0.3",
                                         "a 0.7", "1 a",        "[a, b]"};
    tempdir_make(&dir);
    cr_assert_eq(chdir(dir.path), 0);
    tempdir_write(&dir, "1 a", "", 0);
    tempdir_write(&dir, "[a, b]", "", 0);
    for (size_t i = 0; i < sizeof single / sizeof *single; i++) {
        assert_ok(nd_data_sources_read("", "data.path", single[i], &s));
        cr_assert_eq(s.count, 1);
        cr_assert_str_eq(s.list[0].path, single[i]);
        nd_data_sources_fini(&s);
    }
    tempdir_remove(&dir);
}

/* A long name is cut so that there is room for a number behind it. */
Test(sources, long_texts)
{
    nd_config config;
    nd_data_sources s;
    char two[12000];
    snprintf(two, sizeof two, "1 %05000d 2 %05000d", 0, 0);
    assert_ok(FLAGS(&config, "--data-path", two));
    assert_ok(nd_data_sources_read("", "data.path", config.data.path, &s));
    cr_expect_str_eq(s.list[0].name, printed("%040d", 0));
    cr_expect_str_eq(s.list[1].name, printed("%040d-2", 0));
    nd_data_sources_fini(&s);
    nd_config_fini(&config);
    expect_bad_value("--save-dir", two + 5005, "has 5000 bytes; at most 4096");
    char many[2 * ND_DATA_SOURCES_MAX + 4] = "[";
    for (int i = 0; i < ND_DATA_SOURCES_MAX; i++) {
        strcat(many, "a,");
    }
    strcat(many, "b]");
    expect_bad_value("--data-path", many, "has more than 256 sources");
    many[2] = '['; /* of one less */
    assert_ok(FLAGS(&config, "--data-path", many + 2));
    nd_config_fini(&config);
}

Test(sources, faults_have_line_and_key)
{
    expect_bad_text("data:\n  path:\n    - path: a\n    - path: b\n      weight: -1\n",
                    "test.yaml:5: |data.path|weight is '-1'|above 0");
    expect_bad_text("data:\n  path: [{path: a, weight: 1}, b]\n",
                    "test.yaml:2: data.path gives \"a\" a weight, but not \"b\"");
    expect_bad_text("data:\n  path: [a, {path: b, epochs: 1}]\n",
                    "gives \"b\" epochs, but not \"a\"");
    expect_bad_text("data:\n  path: [{weight: 1}]\n", "without a path");
    expect_bad_text("data:\n  path: [{path: a, wieght: 1}]\n", "'wieght'|weight, epochs");
    expect_bad_text("data:\n  path: [{path: a, weight: 0}]\n", "weight is '0'|above 0");
    expect_bad_text("data:\n  validation_path: [{path: a, epochs: 2}]\n", "gives \"a\" epochs");
    expect_bad_text("data:\n  path: []\n", "empty list");
    expect_bad_text("data:\n  path: [[a]]\n", "a list inside a list");
    expect_bad_text("data:\n  path: {path: a, weight: 1}\n", "list of one");
    expect_bad_text("data:\n  path: [{path: a, name: x}, {path: b, name: x}]\n", "two sources x");
    expect_bad_text("data:\n  path: [{path: a, name: 'x y'}]\n", "'x y'|letters");
    expect_bad_text("data:\n  validation_path: 0.5 a 0.5 b\n",
                    "test.yaml:2: data.validation_path|reads each set once");
    expect_bad_value("--data-path", "[{path: a, weight: x}]", "--data-path|'x'");
}

Test(sources, each_path_must_exist)
{
    nd_config config;
    assert_ok(FLAGS(&config, "--data-path", "[/dev/null, /nowhere/b]"));
    expect_sentence(nd_config_check_data_paths(&config), ND_ERR_DATA,
                    "--data-path names \"/nowhere/b\", which does not exist");
    nd_config_fini(&config);
    assert_ok(FLAGS(&config, "--data-path", "/dev/null", "--validation-path", "/nowhere/v"));
    expect_sentence(nd_config_check_data_paths(&config), ND_ERR_DATA,
                    "--validation-path is \"/nowhere/v\", which does not exist");
    nd_config_fini(&config);
}

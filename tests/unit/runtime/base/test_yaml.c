// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/yaml.h"
#include "tests/support/tempdir.h"

static nd_yaml_node *good(const char *text)
{
    nd_yaml_node *root = NULL;
    cr_assert_eq(nd_yaml_parse(text, strlen(text), "t.yaml", &root), ND_OK, "%s",
                 nd_error_last()->message);
    return root;
}

static void bad_bytes(const char *text, size_t bytes, const char *first, const char *second)
{
    nd_yaml_node *root = NULL;
    nd_status status = nd_yaml_parse(text, bytes, "t.yaml", &root);
    cr_assert_eq(status, ND_ERR_CONFIG, "<%.60s> gave %d", text, status);
    cr_assert_null(root, "an output is written only on success");
    cr_expect(strstr(nd_error_last()->message, first), "<%s> is not in: %s", first,
              nd_error_last()->message);
    cr_expect(strstr(nd_error_last()->message, second), "<%s> is not in: %s", second,
              nd_error_last()->message);
}

static void bad(const char *text, const char *first, const char *second)
{
    bad_bytes(text, strlen(text), first, second);
}

Test(yaml, tree_with_lines)
{
    nd_yaml_node *root =
        good("# a comment\nmesh:\n  tp: 2 # two\n  name: 'quoted'\n\nlist: [1, b]\n"
             "empty:\nnothing: []\n");
    cr_assert_eq(root->kind, ND_YAML_MAP);
    cr_assert_eq(root->count, 4);
    const nd_yaml_node *mesh = nd_yaml_find(root, "mesh");
    const nd_yaml_node *tp = nd_yaml_find(mesh, "tp");
    cr_assert_str_eq(tp->text, "2");
    cr_assert_eq(tp->line, 3);
    cr_assert(!tp->quoted);
    cr_assert(nd_yaml_find(mesh, "name")->quoted);
    const nd_yaml_node *list = nd_yaml_find(root, "list");
    cr_assert_eq(list->kind, ND_YAML_SEQUENCE);
    cr_assert_eq(list->count, 2);
    cr_assert_str_eq(list->first->next->text, "b");
    cr_assert(nd_yaml_is_null(nd_yaml_find(root, "empty")));
    cr_assert_eq(nd_yaml_find(root, "nothing")->count, 0);
    cr_assert_null(nd_yaml_find(root, "absent"));
    cr_assert_null(nd_yaml_find(tp, "absent"));
    nd_yaml_destroy(root);
}

Test(yaml, a_byte_order_mark_is_skipped)
{
    nd_yaml_node *root = good("\xef\xbb\xbfmesh:\n  tp: 2\ntrain:\n  steps: 3\n");
    cr_assert_eq(root->count, 2);
    cr_assert_str_eq(nd_yaml_find(nd_yaml_find(root, "mesh"), "tp")->text, "2");
    nd_yaml_destroy(root);
    root = good("\xef\xbb\xbf---\na: 1\n");
    nd_yaml_destroy(root);
    bad("\xef\xbb\xbf", "t.yaml is empty", "");
    bad("\xef\xbb\xbf\ta: 1\n", "t.yaml:1", "tab");
}

Test(yaml, null_is_plain_only)
{
    nd_yaml_node *root = good("a: null\nb: 'null'\nc: ~\nd: \"\"\ne: nullable\nf: Null\n"
                              "g: NULL\nh: |-\n  null\n");
    for (const nd_yaml_node *node = root->first; node; node = node->next) {
        cr_expect_eq(nd_yaml_is_null(node), strchr("acfg", node->key[0]) != NULL, "%s", node->key);
    }
    cr_expect_eq(root->count, 8);
    nd_yaml_destroy(root);
}

Test(yaml, doubled_keys_name_both_lines)
{
    bad("a: 1\nb: 2\na: 3\n", "t.yaml:3", "first on line 1");
    bad("m:\n  x: 1\n  x: 2\n", "t.yaml:3", "'x' is given twice");
    bad("a:\n  - 1\nb: 2\na: 3\n", "t.yaml:4", "first on line 1");
    nd_yaml_destroy(good("m:\n  x: 1\nn:\n  x: 2\n"));
}

Test(yaml, tabs_are_named)
{
    bad("m:\n\tx: 1\n", "t.yaml:2", "indented with a tab");
    bad("m:\n  x: 1\n  \ty: 2\n", "t.yaml:3", "tab");
    bad("a: 1\n\t# a comment\n", "t.yaml:2", "tab");
    nd_yaml_destroy(good("a:\t1\n"));
}

Test(yaml, broken_text_names_line_and_column)
{
    bad("a: [1, 2\nb: 3\n", "t.yaml:2", "broken YAML");
    bad("a: 1\n b: 2\n", "t.yaml:2:", "need the same indentation");
    bad("a: \"open\n", "t.yaml:", "broken YAML");
    bad("a: 1\n}\n", "t.yaml:2", "broken YAML");
    bad("- 1\nb: 2\n", "t.yaml:2", "broken YAML");
    bad_bytes("a: \xff\xfe\n", 6, "t.yaml", "byte 3");
    bad_bytes("a: 1\0b", 6, "t.yaml", "not a YAML text");
    bad("a: \"x\\0y\"\n", "t.yaml:1", "zero byte");
}

Test(yaml, empty_text_is_refused)
{
    bad("", "t.yaml is empty", "");
    bad("# only a comment\n", "t.yaml is empty", "");
}

Test(yaml, anchors_tags_and_documents_are_refused)
{
    bad("a: &x 1\nb: *x\n", "t.yaml:1", "anchor");
    bad("a: &x {b: 1}\n", "t.yaml:1", "anchor");
    bad("a: &x [1]\n", "t.yaml:1", "anchor");
    bad("b: 1\na: *x\n", "t.yaml:2", "alias");
    bad("*x : 1\n", "t.yaml:1", "alias");
    bad("a: !!int 1\n", "t.yaml:1", "tag");
    bad("a: !!set {b: 1}\n", "t.yaml:1", "tag");
    bad("a: !!seq [1]\n", "t.yaml:1", "tag");
    bad("b: 1\n!!str a: 1\n", "t.yaml:2", "tag");
    bad("b: 1\n&x a: 1\n", "t.yaml:2", "anchor");
    bad("a: 1\n---\nb: 2\n", "t.yaml:2", "second YAML document");
    bad("? [a, b]\n: 1\n", "t.yaml:1", "plain name");
    nd_yaml_destroy(good("---\na: 1\n...\n"));
}

Test(yaml, limits)
{
    char deep[256] = "a: ";
    for (int i = 0; i < ND_YAML_MAX_DEPTH; i++) {
        strcat(deep, "[");
    }
    bad(deep, "t.yaml:1", "deeper than 16");
    deep[2 + ND_YAML_MAX_DEPTH] = '\0'; /* a bracket less, since the map is a level, too */
    for (int i = 1; i < ND_YAML_MAX_DEPTH; i++) {
        strcat(deep, "]");
    }
    nd_yaml_destroy(good(deep));

    size_t room = 3 * (ND_YAML_MAX_NODES + 2);
    char *many = malloc(room + 8);
    cr_assert_not_null(many);
    strcpy(many, "a: [");
    for (int i = 0; i < ND_YAML_MAX_NODES; i++) {
        memcpy(many + 4 + 2 * i, "1,", 3);
    }
    strcat(many, "]");
    bad(many, "t.yaml:1", "more than 4096 values");
    strcpy(many + 4 + 2 * (ND_YAML_MAX_NODES - 2), "]"); /* beside the map and the list */
    nd_yaml_destroy(good(many));
    free(many);

    char *large = malloc(ND_YAML_MAX_BYTES + 2);
    cr_assert_not_null(large);
    memset(large, '#', ND_YAML_MAX_BYTES + 1);
    bad_bytes(large, ND_YAML_MAX_BYTES + 1, "larger than", "262144");
    memcpy(large, "a: 1 ", 5);
    large[ND_YAML_MAX_BYTES] = '\0';
    nd_yaml_destroy(good(large));
    free(large);
}

Test(yaml, files)
{
    nd_yaml_node *root = NULL;
    assert_fails(nd_yaml_read("/nonexistent/x.yaml", &root), ND_ERR_CONFIG, "/nonexistent/x.yaml");
    cr_assert_eq(nd_yaml_read("/tmp", &root), ND_ERR_CONFIG, "a folder is no file");
    cr_assert_null(root);
}

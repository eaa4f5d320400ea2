// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>

#include "runtime/base/json.h"

Test(json, a_document_that_lacks_a_value_is_missing_as_a_whole)
{
    json_t *object = json_object(), *array = json_array();
    nd_json_set(&object, "a", json_integer(1));
    nd_json_append(&array, json_integer(2));
    cr_assert(object && array);
    nd_json_append(&array, NULL); /* as a failed allocation gives it */
    cr_assert_null(array);
    nd_json_set(&object, "list", array);
    cr_assert_null(object);
    nd_json_set(&object, "b", json_integer(3)); /* stays missing, and the value is freed */
    cr_assert_null(object);
    cr_assert_null(nd_json_text(object, 0));
}

Test(json, a_text_is_that_of_jansson)
{
    json_t *root = json_pack("{s:[f, i, n], s:s}", "numbers", 0.1, 7, "text", "\xc3\xa4\n");
    const size_t flags[] = {0, JSON_COMPACT, JSON_INDENT(2) | JSON_REAL_PRECISION(17)};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        char *expected = json_dumps(root, flags[i]), *text = nd_json_text(root, flags[i]);
        cr_assert_not_null(text);
        cr_expect_str_eq(text, expected);
        free(expected);
        free(text);
    }
    json_decref(root);
}

Test(json, bytes_that_are_no_utf8_become_question_marks)
{
    json_t *good = nd_json_string("a\xc3\xa4"), *bad = nd_json_string("a\xff/b");
    cr_expect_str_eq(json_string_value(good), "a\xc3\xa4");
    cr_expect_str_eq(json_string_value(bad), "a?/b");
    json_decref(good);
    json_decref(bad);
}

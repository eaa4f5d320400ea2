// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "trainer/checkpoint/dcp.h"

Test(dcp, a_head_is_read_back_as_it_was_written)
{
    nd_dcp_list list = {0}, got = {0};
    const nd_rect body = {2, 4, 8, 3, 5}, vector = {1, 6, 0, 7, 1}, scalar = {0, 0, 0, 1, 1};
    assert_ok(nd_dcp_list_add(&list, "a.weight", ND_SAFETENSORS_F32, &body));
    assert_ok(nd_dcp_list_add(&list, "norm.weight", ND_SAFETENSORS_F32, &vector));
    assert_ok(nd_dcp_list_add(&list, "optimizer.state.a.weight.step", ND_SAFETENSORS_F32, &scalar));
    char *head = NULL;
    size_t bytes = 0;
    assert_ok(nd_dcp_head(&list, &head, &bytes));
    cr_assert_eq(bytes % ND_DCP_ALIGNMENT, 0);
    cr_assert_eq(list.entries[0].begin, bytes);
    cr_assert_eq(list.entries[2].end, bytes + 4 * (15 + 7 + 1));
    nd_safetensors_list tensors = {0};
    assert_ok(nd_safetensors_parse(head + 8, bytes - 8, list.entries[2].end, "f", &tensors));
    assert_ok(nd_dcp_entries(&tensors, "f", &got));
    cr_assert_eq(got.count, list.count);
    for (int64_t i = 0; i < got.count; i++) {
        const nd_dcp_entry *a = &list.entries[i], *b = &got.entries[i];
        cr_assert_str_eq(a->name, b->name);
        cr_assert(a->begin == b->begin && a->end == b->end && a->dtype == b->dtype);
        cr_assert(a->rect.axes == b->rect.axes && a->rect.row == b->rect.row &&
                  a->rect.col == b->rect.col && a->rect.rows == b->rect.rows &&
                  a->rect.cols == b->rect.cols);
    }
    nd_safetensors_list_fini(&tensors);
    nd_dcp_list_fini(&got);
    nd_dcp_list_fini(&list);
    free(head);
}

/* One file with a (2, 2) and b (2), and this sharding string. */
static nd_status read_sharding(const char *sharding, nd_dcp_list *out)
{
    char header[1024];
    snprintf(header, sizeof header,
             "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"%s\"},"
             "\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
             "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[16,24]}}",
             sharding);
    nd_safetensors_list tensors = {0};
    assert_ok(nd_safetensors_parse(header, strlen(header), 8 + strlen(header) + 24, "f", &tensors));
    nd_status status = nd_dcp_entries(&tensors, "f", out);
    nd_safetensors_list_fini(&tensors);
    return status;
}

#define A(offsets) "\\\"a\\\":{\\\"saved_offsets\\\":" offsets "}"
#define B(offsets) "\\\"b\\\":{\\\"saved_offsets\\\":" offsets "}"

Test(dcp, refuses_sharding_that_does_not_fit_the_file)
{
    static const struct {
        const char *sharding, *words;
    } bad[] = {
        {"", "is not a JSON object"},
        {"[]", "is not a JSON object"},
        {"{", "is not a JSON object"},
        {"{" A("[0,0]") "}", "of \"b\" is missing"},
        {"{" A("[0]") "," B("[0]") "}", "one offset for each axis"},
        {"{" A("[0,0,0]") "," B("[0]") "}", "one offset for each axis"},
        {"{" A("7") "," B("[0]") "}", "one offset for each axis"},
        {"{" A("[0,-1]") "," B("[0]") "}", "no natural number"},
        {"{" A("[0,1.5]") "," B("[0]") "}", "no natural number"},
        {"{" A("[0,9223372036854775807]") "," B("[0]") "}", "no natural number"},
        {"{" A("[0,0]") "," B("[0]") ",\\\"c\\\":{\\\"saved_offsets\\\":[]}}",
         "belongs to no tensor"},
        {"{" A("[0,0]") "," A("[0,2]") "," B("[0]") "}", "duplicate object key"},
        {"{\\\"a\\\":5," B("[0]") "}", "of \"a\" is missing"},
        {"{\\\"a\\\":{\\\"saved_offsets\\\":[0,0],\\\"logical_fqn\\\":3}," B("[0]") "}",
         "not a string"},
    };
    nd_dcp_list list = {0};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_fails(read_sharding(bad[i].sharding, &list), ND_ERR_DATA, bad[i].words);
    }
    assert_ok(read_sharding("{" A("[4,0]") "," B("[6]") "}", &list));
    cr_assert(list.entries[0].rect.row == 4 && list.entries[1].rect.row == 6);
    nd_dcp_list_fini(&list);
}

Test(dcp, several_rectangles_of_a_tensor_have_a_logical_name)
{
    nd_dcp_list list = {0};
    assert_ok(
        read_sharding("{\\\"a\\\":{\\\"saved_offsets\\\":[0,0],\\\"logical_fqn\\\":\\\"w\\\"},"
                      "\\\"b\\\":{\\\"saved_offsets\\\":[9],\\\"logical_fqn\\\":\\\"w\\\"}}",
                      &list));
    cr_assert_str_eq(list.entries[0].name, "w");
    cr_assert_str_eq(list.entries[1].name, "w");
    nd_dcp_list_fini(&list);
    assert_fails(
        read_sharding("{\\\"a\\\":{\\\"saved_offsets\\\":[3,0],\\\"logical_fqn\\\":\\\"w\\\"},"
                      "\\\"b\\\":{\\\"saved_offsets\\\":[3],\\\"logical_fqn\\\":\\\"w\\\"}}",
                      &list),
        ND_ERR_DATA, "two entries at the same offsets");
}

Test(dcp, files_are_named_as_torch_names_them)
{
    char name[ND_DCP_FILE_NAME_MAX];
    cr_assert_str_eq(nd_dcp_file_name(name, 0, 0, 3),
                     "shard-00001-model-00001-of-00003.safetensors");
    cr_assert_str_eq(nd_dcp_file_name(name, 16383, 2, 3),
                     "shard-16384-model-00003-of-00003.safetensors");
}

// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "trainer/weights/safetensors.h"

static tempdir dir;

TEMPDIR_SUITE(safetensors, tempdir_leave_empty);

static nd_safetensors_list list;

/* Parses a header followed by `data` bytes. */
static nd_status parse(const char *header, uint64_t data)
{
    size_t n = strlen(header);
    return nd_safetensors_parse(header, n, 8 + n + data, "f", &list);
}

Test(safetensors, reads_tensors_in_the_order_of_their_data)
{
    const char *header =
        "{\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[4,28]},"
        "\"__metadata__\":{\"format\":\"pt\"},"
        "\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},"
        "\"scalar\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[28,29]},"
        "\"none\":{\"dtype\":\"I64\",\"shape\":[4,0],\"data_offsets\":[28,28]}}   ";
    uint64_t data = 8 + strlen(header);
    assert_ok(parse(header, 29));
    cr_assert_eq(list.count, 4);
    cr_assert_str_eq(list.tensors[0].name, "a");
    cr_assert_str_eq(list.tensors[1].name, "b");
    const nd_safetensors_tensor *b = nd_safetensors_list_find(&list, "b");
    cr_assert_eq(b->begin, data + 4);
    cr_assert_eq(b->end, data + 28);
    cr_assert_eq(b->dtype, ND_SAFETENSORS_F32);
    cr_assert_eq(b->axes, 2);
    cr_assert(b->shape[0] == 2 && b->shape[1] == 3);
    cr_assert_eq(nd_safetensors_tensor_count(b), 6);
    cr_assert_eq(nd_safetensors_tensor_count(nd_safetensors_list_find(&list, "scalar")), 1);
    cr_assert_eq(nd_safetensors_tensor_count(nd_safetensors_list_find(&list, "none")), 0);
    cr_assert_null(nd_safetensors_list_find(&list, "c"));
    nd_safetensors_list_fini(&list);
    assert_ok(parse("{}", 0));
    nd_safetensors_list_fini(&list);
}

#define ONE(dtype, shape, offsets)                                                                 \
    "{\"a\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
#define TWO(first, second)                                                                         \
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" first "},"                          \
    "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" second "}}"

/* A tensor of each type has 16 elements, on as many axes as there may be. */
Test(safetensors, reads_every_type)
{
    static const struct {
        const char *name;
        int bits;
    } types[] = {{"BOOL", 8},    {"F4", 4},          {"F6_E2M3", 6}, {"F6_E3M2", 6},
                 {"U8", 8},      {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8},
                 {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"I16", 16},    {"F8_E5M2FNUZ", 8},
                 {"U16", 16},    {"F16", 16},        {"BF16", 16},   {"I32", 32},
                 {"U32", 32},    {"F32", 32},        {"C64", 64},    {"F64", 64},
                 {"I64", 64},    {"U64", 64}};
    cr_assert_eq(sizeof types / sizeof *types, ND_SAFETENSORS_DTYPE_COUNT);
    for (int i = 0; i < ND_SAFETENSORS_DTYPE_COUNT; i++) {
        char header[160];
        snprintf(header, sizeof header, ONE("\"%s\"", "[2,1,4,1,1,2,1,1]", "[0,%d]"), types[i].name,
                 2 * types[i].bits);
        assert_ok(parse(header, (uint64_t)types[i].bits * 2));
        cr_expect_eq(nd_safetensors_dtype_bits(list.tensors[0].dtype), types[i].bits);
        nd_safetensors_list_fini(&list);
    }
}

Test(safetensors, refuses_what_the_format_forbids)
{
    static const struct {
        const char *header;
        uint64_t data;
        const char *words;
    } bad[] = {
        {"", 0, "does not begin with {"},
        {" {}", 0, "does not begin with {"},
        {"[]", 0, "does not begin with {"},
        {"{\"a\":", 0, "not valid JSON at byte"},
        {"{}x", 0, "not valid JSON at byte"},
        {"{\"\xff\":{}}", 0, "not valid JSON at byte"},
        {"{\"a\":1}", 0, "is not an object"},
        {"{\"__metadata__\":{\"step\":5}}", 0, "__metadata__ is not an object of strings"},
        {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object of strings"},
        {ONE("\"F8\"", "[4]", "[0,4]"), 4, "unknown dtype \"F8\""},
        {ONE("7", "[4]", "[0,4]"), 4, "has no dtype"},
        {ONE("\"U8\"", "4", "[0,4]"), 4, "is not a list"},
        {ONE("\"U8\"", "[1,1,1,1,1,1,1,1,4]", "[0,4]"), 4, "is not a list of at most 8"},
        {ONE("\"U8\"", "[-4]", "[0,4]"), 4, "not a natural number"},
        {ONE("\"U8\"", "[4.0]", "[0,4]"), 4, "not a natural number"},
        {ONE("\"F64\"", "[4611686018427387904,8]", "[0,4]"), 4, "more than 2^64 bits"},
        {ONE("\"U8\"", "[4294967296,4294967296]", "[0,0]"), 0, "more than 2^64 bits"},
        {ONE("\"F4\"", "[3]", "[0,1]"), 1, "no whole number of bytes"},
        {ONE("\"U8\"", "[4]", "[0,5]"), 5, "has 5 bytes by its data_offsets, but 4"},
        {ONE("\"U8\"", "[4]", "[4,0]"), 4, "not two rising numbers"},
        {ONE("\"U8\"", "[4]", "[0]"), 4, "not two rising numbers"},
        {ONE("\"U8\"", "[4]", "[-4,0]"), 4, "not two rising numbers"},
        {ONE("\"U8\"", "[4]", "[0,4,4]"), 4, "not two rising numbers"},
        {ONE("\"U8\"", "[4]", "[0,99999999999999999999]"), 4, "not valid JSON"},
        {ONE("\"U8\"", "[4]", "[1,5]"), 5, "leave a hole"},
        {TWO("[0,4]", "[5,9]"), 9, "leave a hole"},
        {TWO("[0,4]", "[3,7]"), 7, "overlap"},
        {TWO("[0,4]", "[0,4]"), 4, "overlap"},
        {TWO("[0,4]", "[4,8]"), 7, "it is truncated"},
        {TWO("[0,4]", "[4,8]"), 9, "something was appended"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
         8, "duplicate object key"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4,
         "duplicate object key"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_fails(parse(bad[i].header, bad[i].data), ND_ERR_DATA, bad[i].words);
    }
}

Test(safetensors, refuses_files_shorter_than_they_say)
{
    struct {
        uint64_t length;
        size_t bytes;
        const char *words;
    } bad[] = {
        {2, 7, "too short"},
        {3, 10, "announces a header of 3"},
        {UINT64_MAX, 10, "announces a header of 18446744073709551615"},
        {UINT64_MAX - 7, 10, "announces a header of"}, /* 8 + n would be 0 */
        {100000001, 10, "at most 100000000"},
        {0, 8, "does not begin with {"},
        {0, 0, "too short"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char file[16] = "        {}";
        memcpy(file, &bad[i].length, 8);
        int fd = open(tempdir_write(&dir, "a", file, bad[i].bytes), O_RDONLY);
        assert_fails(nd_safetensors_read_header(fd, "a", &list), ND_ERR_DATA, bad[i].words);
        close(fd);
    }
}

/* The reader accepts the header that layout writes, aligned and in the documented order. */
Test(safetensors, layout_is_sorted_aligned_and_readable)
{
    nd_safetensors_tensor tensors[] = {
        {.name = "z.weight", .dtype = ND_SAFETENSORS_BF16, .axes = 1, .shape = {3}},
        {.name = "b.weight", .dtype = ND_SAFETENSORS_BF16, .axes = 2, .shape = {5, 7}},
        {.name = "odd", .dtype = ND_SAFETENSORS_U8, .axes = 0},
        {.name = "a.\"quoted\"", .dtype = ND_SAFETENSORS_F32, .axes = 2, .shape = {2, 2}},
        {.name = "i", .dtype = ND_SAFETENSORS_I64, .axes = 1, .shape = {1}},
    };
    static const char *const order[] = {"i", "a.\"quoted\"", "b.weight", "z.weight", "odd"};
    char *head;
    size_t bytes;
    assert_ok(nd_safetensors_layout(tensors, 5, &head, &bytes));
    cr_assert_eq(bytes % 8, 0);
    cr_assert_eq(head[8], '{');
    uint64_t data_bytes = 8 + 16 + 70 + 6 + 1;
    cr_assert_eq(tensors[4].end, bytes + data_bytes);

    char *file = calloc(1, bytes + data_bytes);
    memcpy(file, head, bytes);
    int fd = open(tempdir_write(&dir, "a", file, bytes + data_bytes), O_RDONLY);
    assert_ok(nd_safetensors_read_header(fd, "a", &list));
    cr_assert_eq(list.count, 5);
    for (int i = 0; i < 5; i++) {
        cr_assert_str_eq(list.tensors[i].name, order[i]);
        cr_assert_eq(list.tensors[i].begin, tensors[i].begin);
        cr_assert_eq(list.tensors[i].end, tensors[i].end);
        cr_assert_eq(list.tensors[i].dtype, tensors[i].dtype);
        cr_assert_eq(tensors[i].begin % (uint64_t)(nd_safetensors_dtype_bits(tensors[i].dtype) / 8),
                     0);
    }
    nd_safetensors_list_fini(&list);
    close(fd);
    free(file);
    free(head);
}

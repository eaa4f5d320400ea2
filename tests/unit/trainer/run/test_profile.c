// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "trainer/run/state.h"

static nd_progress_slot slot;

static void enter(int32_t group, int64_t sequence)
{
    atomic_store(&slot.group, group);
    atomic_store(&slot.op, ND_COMM_ALL_GATHER);
    atomic_store(&slot.sequence, sequence);
    atomic_store(&slot.bytes, 100 * sequence);
}

Test(profile, a_call_that_enters_a_collective_has_its_name)
{
    nd_profile p;
    assert_ok(nd_profile_init(&p, &slot, 4));
    enter(ND_GROUP_TP, 7);
    nd_profile_add(&p, ND_TRACE_COMMUNICATION, "nd_comm_all_gather(comm)", 10, 20);
    nd_profile_add(&p, ND_TRACE_GEMM, "matmul", 20, 30);
    enter(ND_GROUP_CP, 7);
    nd_profile_add(&p, ND_TRACE_COMMUNICATION, "nd_comm_all_gather(comm)", 30, 40);
    cr_assert_eq(p.events[0].group, ND_GROUP_TP);
    cr_assert_eq(p.events[0].sequence, 7);
    cr_assert_eq(p.events[0].bytes, 700);
    cr_assert_eq(p.events[1].group, -1);
    cr_assert_eq(p.events[2].group, ND_GROUP_CP);
    nd_profile_add(&p, ND_TRACE_DATA, "nd_loader_next(l)", 40, 50);
    nd_profile_add(&p, ND_TRACE_DATA, "nd_loader_next(l)", 50, 60);
    cr_assert_eq(p.count, 4);
    cr_assert_eq(p.dropped, 1);
    free(p.events);
}

Test(profile, its_text_is_json)
{
    nd_profile p;
    char *text = NULL, *whole = NULL;
    size_t size = 0;
    json_error_t error;
    assert_ok(nd_profile_init(&p, &slot, 4));
    p.origin_ns = 1000;
    enter(ND_GROUP_TP, 3);
    nd_profile_add(&p, ND_TRACE_COMMUNICATION, "nd_comm_all_gather(\"x\")", 3000, 5500);
    nd_profile_add(&p, -1, "step", 2000, 9000);
    assert_ok(nd_run_profile_text(&p, 5, "rank 5 \"host\\<", &text, &size));
    cr_assert_eq(size, strlen(text));
    assert_ok(nd_fs_format(&whole, "[%snull]", text));
    json_t *list = json_loads(whole, 0, &error);
    cr_assert_not_null(list, "%s: %s", error.text, whole);
    cr_assert_eq(json_array_size(list), 7, "four names, two calls, and null");
    const json_t *name = json_object_get(json_object_get(json_array_get(list, 0), "args"), "name");
    cr_assert_str_eq(json_string_value(name), "rank 5 ?host??");
    const json_t *call = json_array_get(list, 4), *args = json_object_get(call, "args");
    cr_assert_str_eq(json_string_value(json_object_get(call, "name")), "comm_all_gather");
    for (int64_t i = 0; i < 2; i++) { /* Perfetto shows calls and steps in rows of their own */
        const json_t *row = json_object_get(json_array_get(list, 4 + (size_t)i), "tid");
        cr_assert_eq(json_integer_value(row), 2 - i);
    }
    cr_assert_eq(json_number_value(json_object_get(call, "ts")), 2);
    cr_assert_eq(json_number_value(json_object_get(call, "dur")), 2.5);
    cr_assert_eq(json_integer_value(json_object_get(call, "pid")), 5);
    cr_assert_str_eq(json_string_value(json_object_get(args, "group")), "tp");
    cr_assert_str_eq(json_string_value(json_object_get(args, "op")), "all_gather");
    cr_assert_eq(json_integer_value(json_object_get(args, "sequence")), 3);
    cr_assert_eq(json_integer_value(json_object_get(args, "bytes")), 300);
    json_decref(list);
    free(whole);
    free(text);
    free(p.events);
}

// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/host_memory.h"
#include "runtime/device/memplan.h"
#include "tests/support/printed.h"
#include "tests/support/tempdir.h"

Test(memplan, buffers_are_apart_aligned_and_zero)
{
    nd_memplan plan;
    nd_device *device = NULL;
    char *at[3] = {0};
    void *none = &plan;
    const size_t bytes[] = {1001 * 4, 6, 77 * 8};
    nd_memplan_init(&plan);
    nd_memplan_want(&plan, ND_MEM_STATE, "a", bytes[0], &at[0]);
    nd_memplan_want(&plan, ND_MEM_HEAD, "none", 0, &none);
    nd_memplan_want(&plan, ND_MEM_SCRATCH, "b", bytes[1], &at[1]);
    nd_memplan_want(&plan, ND_MEM_STATE, "c", bytes[2], &at[2]);
    nd_memplan_add_external(&plan, ND_MEM_COMMUNICATION, "staging", 5000);
    cr_assert_eq(nd_memplan_class_bytes(&plan, ND_MEM_STATE), bytes[0] + bytes[2]);
    cr_assert_eq(plan.external, 5000);
    cr_assert_eq(nd_device_open_cpu(1, &device), ND_OK);
    cr_assert_eq(nd_memplan_commit(&plan, device), ND_OK);
    cr_assert_null(none);
    for (int i = 0; i < 3; i++) {
        cr_assert_eq((uintptr_t)at[i] % 256, 0);
        for (size_t k = 0; k < bytes[i]; k++) {
            cr_assert_eq(at[i][k], 0);
        }
        memset(at[i], i + 1, bytes[i]);
    }
    for (int i = 0; i < 3; i++) {
        cr_assert(at[i][0] == i + 1 && at[i][bytes[i] - 1] == i + 1, "buffer %d was overwritten",
                  i);
    }
    nd_memplan_fini(&plan);
    nd_device_close(device);
}

/* More pointers than the plan starts with room for: parts, aliases, and NULL in an empty buffer. */
Test(memplan, further_pointers_lie_in_their_buffer)
{
    enum { PARTS = 200, PART = 48 };
    nd_memplan plan;
    nd_device *device = NULL;
    char *whole = NULL, *parts[PARTS] = {0};
    char *alias = NULL, *nothing = (char *)&plan;
    nd_memplan_init(&plan);
    nd_memplan_want(&plan, ND_MEM_STATE, "before", 1, NULL);
    int want = nd_memplan_want(&plan, ND_MEM_STATE, "parts", (size_t)PARTS * PART, &whole);
    for (int i = 0; i < PARTS; i++) {
        nd_memplan_also(&plan, want, (size_t)i * PART, &parts[i]);
    }
    nd_memplan_also(&plan, want, 0, &alias);
    int empty = nd_memplan_want(&plan, ND_MEM_STATE, "empty", 0, NULL);
    nd_memplan_also(&plan, empty, 16, &nothing);
    cr_assert_eq(nd_device_open_cpu(1, &device), ND_OK);
    cr_assert_eq(nd_memplan_commit(&plan, device), ND_OK);
    cr_expect_eq((char *)plan.base + 256, whole);
    cr_expect_eq(alias, whole);
    cr_expect_null(nothing);
    for (int i = 0; i < PARTS; i++) {
        cr_expect_eq(parts[i], whole + i * PART);
    }
    nd_memplan_fini(&plan);
    nd_device_close(device);
}

/* The total has MiB below 10 GiB, and includes what libraries allocate for themselves. A class has
 * the sum of its buffers. */
Test(memplan, is_printed_by_class)
{
    static const char *const begins[] = {
        "  state                      10237.50 MiB\n    weights                          "
        "    10236.50 MiB\n    moments                                  1.00 MiB\n",
        "  state                         9.998 GiB\n    weights                          "
        "       9.997 GiB\n    moments                                 0.001 GiB\n"};
    static const size_t state[] = {((size_t)10 << 30) - (3 << 19) - 256,
                                   ((size_t)10 << 30) - (3 << 19)};
    static const char *const ends[] = {" 1.50 MiB (not in the one allocation)\n"
                                       "  total                      10240.00 MiB\n",
                                       "  total                        10.000 GiB\n"};
    for (int i = 0; i < 2; i++) {
        nd_memplan plan;
        char *text = NULL;
        size_t size;
        nd_memplan_init(&plan);
        nd_memplan_want(&plan, ND_MEM_STATE, "weights", state[i] - (2 << 20), NULL);
        nd_memplan_want(&plan, ND_MEM_STATE, "moments", 1 << 20, NULL);
        nd_memplan_want(&plan, ND_MEM_SCRATCH, "work", 1 << 20, NULL);
        nd_memplan_add_external(&plan, ND_MEM_COMMUNICATION, "staging", 3 << 19);
        FILE *out = open_memstream(&text, &size);
        nd_memplan_print(&plan, out);
        fclose(out);
        cr_expect(strstr(text, begins[i]) == text && strstr(text, ends[i]), "%s", text);
        free(text);
        nd_memplan_fini(&plan);
    }
}

Test(memplan, what_this_host_has_not_is_said_by_class)
{
    nd_memplan plan;
    nd_device *device = NULL;
    const uint64_t more = nd_host_memory_read("").physical + 1;
    nd_memplan_init(&plan);
    nd_memplan_want(&plan, ND_MEM_STATE, "weights", more, NULL);
    nd_memplan_want(&plan, ND_MEM_DATA, "tokens", 3 << 20, NULL);
    assert_ok(nd_device_open_cpu(1, &device));
    assert_fails(nd_memplan_commit(&plan, device), ND_ERR_RESOURCE,
                 printed("plan: state %.0f MiB, gathered weights 0 MiB, ", (double)more / 1048576));
    cr_expect_not_null(strstr(nd_error_last()->message, ", data 3 MiB)"));
    nd_memplan_fini(&plan);
    nd_device_close(device);
}

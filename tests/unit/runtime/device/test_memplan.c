// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdint.h>
#include <string.h>

#include "runtime/device/memplan.h"

Test(memplan, segments_are_apart_aligned_and_zero)
{
    nd_memplan plan;
    nd_device *device = NULL;
    nd_memplan_init(&plan);
    int a = nd_memplan_add(&plan, ND_MEM_STATE, "a", 1001, 4),
        none = nd_memplan_add(&plan, ND_MEM_HEAD, "none", 0, 8);
    int b = nd_memplan_add(&plan, ND_MEM_SCRATCH, "b", 3, 2),
        c = nd_memplan_add(&plan, ND_MEM_STATE, "c", 77, 8);
    nd_memplan_add_external(&plan, ND_MEM_COMMUNICATION, "staging", 5000);
    cr_assert_eq(nd_memplan_class_bytes(&plan, ND_MEM_STATE), 1001 * 4 + 77 * 8);
    cr_assert_eq(plan.external, 5000);
    cr_assert_eq(nd_device_open_cpu(1, &device), ND_OK);
    cr_assert_eq(nd_memplan_commit(&plan, device), ND_OK);
    char *at[] = {nd_memplan_at(&plan, a), nd_memplan_at(&plan, b), nd_memplan_at(&plan, c)};
    const size_t bytes[] = {1001 * 4, 6, 77 * 8};
    cr_assert_null(nd_memplan_at(&plan, none));
    for (int i = 0; i < 3; i++) {
        cr_assert_eq((uintptr_t)at[i] % 256, 0);
        for (size_t k = 0; k < bytes[i]; k++) {
            cr_assert_eq(at[i][k], 0);
        }
        memset(at[i], i + 1, bytes[i]);
    }
    for (int i = 0; i < 3; i++) {
        cr_assert(at[i][0] == i + 1 && at[i][bytes[i] - 1] == i + 1, "segment %d was written over",
                  i);
    }
    nd_memplan_fini(&plan);
    nd_device_close(device);
}

// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <sched.h>

#include "runtime/device/affinity.h"

static int first_allowed(cpu_set_t *set)
{
    cr_assert_eq(sched_getaffinity(0, sizeof *set, set), 0);
    for (int c = 0; c < CPU_SETSIZE; c++) {
        if (CPU_ISSET(c, set)) {
            return c;
        }
    }
    return -1;
}

Test(affinity, never_widens_the_mask)
{
    cpu_set_t set, one;
    nd_affinity affinity;
    int cpu = first_allowed(&set);
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    cr_assert_eq(sched_setaffinity(0, sizeof one, &one), 0);
    cr_assert_eq(nd_affinity_apply(0, 1, 0, &affinity), ND_OK);
    cr_assert_eq(affinity.allowed, 1);
    cr_assert_eq(affinity.threads, 1);
    cr_assert_eq(first_allowed(&set), cpu);
    cr_assert_eq(CPU_COUNT(&set), 1);
    cr_assert_eq(nd_affinity_apply(3, 4, 0, &affinity), ND_OK);
    cr_assert_eq(affinity.bound, 0, "fewer CPUs than workers: nobody is bound");
    cr_assert_eq(affinity.threads, 1);
}

Test(affinity, workers_share_the_cpus)
{
    nd_affinity affinity;
    cpu_set_t set;
    first_allowed(&set);
    int cpus = CPU_COUNT(&set);
    cr_assert_eq(nd_affinity_apply(0, cpus, 0, &affinity), ND_OK);
    cr_assert_eq(affinity.threads, 1);
    cr_assert_eq(affinity.bound, 1);
    first_allowed(&set);
    cr_assert_eq(CPU_COUNT(&set), 1);
}

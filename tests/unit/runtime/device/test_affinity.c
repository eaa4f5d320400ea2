// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/device/affinity.h"

/* Stands in place of the C library's. NULL: the set is that of the system. */
static const int *given; /* CPUs, and -1 behind them */

int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set)
{
    memset(set, 0, bytes);
    for (const int *c = given; c && *c >= 0; c++) {
        CPU_SET_S((size_t)*c, bytes, set);
    }
    return given || syscall(SYS_sched_getaffinity, pid, bytes, set) >= 0 ? 0 : -1;
}

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

/* hwloc describes a machine that is not here, so it binds nothing. */
Test(affinity, a_core_of_two_cpus_has_one_thread)
{
    static const struct {
        int rank, workers, wanted, threads, bound;
        const char *cpus;
    } cases[] = {
        {0, 1, 0, 4, 8, "0-7"}, {1, 2, 0, 2, 4, "4-7"}, {1, 4, 0, 1, 2, "2-3"},
        {2, 3, 0, 1, 2, "4-5"}, {5, 8, 0, 1, 1, "5"},   {0, 9, 0, 1, 0, "0-7"},
        {0, 1, 8, 8, 8, "0-7"}, {1, 2, 3, 3, 4, "4-7"},
    };
    setenv("HWLOC_SYNTHETIC", "core:4 pu:2", 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_affinity a;
        cr_assert_eq(nd_affinity_apply(cases[i].rank, cases[i].workers, cases[i].wanted, &a),
                     ND_OK);
        cr_expect(a.allowed == 8 && a.cores == 4, "%d CPUs, %d cores", a.allowed, a.cores);
        cr_expect_eq(a.threads, cases[i].threads, "case %d: %d", (int)i, a.threads);
        cr_expect_eq(a.bound, cases[i].bound, "case %d: %d", (int)i, a.bound);
        cr_expect_str_eq(a.cpus, cases[i].cpus);
        cr_expect_eq(nd_affinity_threads(cases[i].workers, cases[i].wanted), cases[i].threads);
    }
}

/* The real mask on a machine where CPUs 2 c and 2 c + 1 are core c. */
Test(affinity, cores_are_those_of_the_mask)
{
    cpu_set_t set;
    nd_affinity affinity;
    const int first = first_allowed(&set);
    int cores = 0;
    for (int c = first; c + 1 < CPU_SETSIZE; c++) {
        cores += CPU_ISSET(c, &set) && !(c % 2 == 1 && CPU_ISSET(c - 1, &set));
    }
    setenv("HWLOC_SYNTHETIC", "core:512 pu:2", 1);
    setenv("HWLOC_THISSYSTEM", "1", 1);
    cr_assert_eq(nd_affinity_apply(0, 1, 0, &affinity), ND_OK);
    cr_expect_eq(affinity.allowed, CPU_COUNT(&set));
    cr_expect_eq(affinity.cores, cores);
    cr_expect_eq(affinity.threads, cores);
}

/* A machine whose cores are not known. */
Test(affinity, cpus_count_where_there_are_no_cores)
{
    nd_affinity affinity;
    setenv("HWLOC_SYNTHETIC", "pack:1 pu:6", 1);
    cr_assert_eq(nd_affinity_apply(1, 2, 0, &affinity), ND_OK);
    cr_expect_eq(affinity.cores, 6);
    cr_expect_eq(affinity.threads, 3);
}

Test(affinity, digests_tell_sets_of_cpus_apart)
{
    static const int sets[][4] = {{0, -1},    {1, -1},    {0, 1, -1},    {2, 3, -1},
                                  {0, 3, -1}, {8191, -1}, {0, 8191, -1}, {0, 1, 2, -1}};
    enum { SETS = sizeof sets / sizeof *sets };
    uint64_t digests[2][SETS];
    for (int i = 0; i < 2 * SETS; i++) {
        given = sets[i % SETS];
        cr_assert_eq(nd_affinity_digest(&digests[i / SETS][i % SETS]), ND_OK);
    }
    for (int i = 0; i < SETS * SETS; i++) {
        const int a = i / SETS, b = i % SETS;
        cr_expect_eq(digests[0][a] == digests[1][b], a == b, "%d and %d", a, b);
    }
}

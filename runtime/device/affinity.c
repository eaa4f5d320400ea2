// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/affinity.h"

#include <errno.h>
#include <hwloc.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { MAX_CPUS = 8192 };

/* CPUs [first, first + count) of the allowed set, in topology order. */
static void take_cpus(hwloc_topology_t topology, hwloc_const_cpuset_t allowed, int first, int count,
                      hwloc_cpuset_t out)
{
    int seen = 0;
    hwloc_obj_t pu = NULL;
    while ((pu = hwloc_get_next_obj_inside_cpuset_by_type(topology, allowed, HWLOC_OBJ_PU, pu)) !=
           NULL) {
        if (seen >= first && seen < first + count) {
            hwloc_bitmap_or(out, out, pu->cpuset);
        }
        seen++;
    }
}

static int threads_of(int cpus, int local_workers, int threads_wanted)
{
    int share = cpus / local_workers;
    return threads_wanted > 0 ? threads_wanted : share > 0 ? share : 1;
}

int nd_affinity_threads(int local_workers, int threads_wanted)
{
    cpu_set_t set[MAX_CPUS / CPU_SETSIZE];
    int cpus = sched_getaffinity(0, sizeof set, set) == 0 ? CPU_COUNT_S(sizeof set, set) : 1;
    return threads_of(cpus, local_workers, threads_wanted);
}

static nd_status fail_hwloc(int code, const char *what)
{
    return code == ENOMEM ? nd_fail_memory("hwloc") : nd_fail(ND_ERR_INTERNAL, "%s", what);
}

static nd_status apply(hwloc_topology_t topology, int local_rank, int local_workers,
                       int threads_wanted, nd_affinity *out)
{
    nd_status status = ND_OK;
    hwloc_cpuset_t allowed = hwloc_bitmap_alloc(), mine = hwloc_bitmap_alloc();
    bool made = allowed && mine;
    if (!made || hwloc_get_cpubind(topology, allowed, HWLOC_CPUBIND_THREAD) != 0) {
        status =
            fail_hwloc(made ? errno : ENOMEM, "the CPUs that this process may use cannot be read");
        hwloc_bitmap_free(allowed);
        hwloc_bitmap_free(mine);
        return status;
    }
    int cpus = hwloc_bitmap_weight(allowed);
    *out =
        (nd_affinity){.allowed = cpus, .threads = threads_of(cpus, local_workers, threads_wanted)};
    int share = cpus / local_workers;
    hwloc_bitmap_list_snprintf(out->cpus, sizeof out->cpus, allowed);
    if (share > 0) {
        take_cpus(topology, allowed, local_rank * share, share, mine);
        if (hwloc_set_cpubind(topology, mine, HWLOC_CPUBIND_THREAD) == 0) {
            out->bound = share;
            hwloc_bitmap_list_snprintf(out->cpus, sizeof out->cpus, mine);
        }
    }
    hwloc_bitmap_free(allowed);
    hwloc_bitmap_free(mine);
    return status;
}

nd_status nd_affinity_apply(int local_rank, int local_workers, int threads_wanted, nd_affinity *out)
{
    hwloc_topology_t topology;
    ND_ASSERT(local_workers >= 1 && local_rank >= 0 && local_rank < local_workers);
    errno = 0;
    if (hwloc_topology_init(&topology) != 0) {
        return fail_hwloc(errno, "hwloc cannot be initialised");
    }
    hwloc_topology_set_all_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_STRUCTURE);
    nd_status status = hwloc_topology_load(topology) == 0
                           ? apply(topology, local_rank, local_workers, threads_wanted, out)
                           : fail_hwloc(errno, "hwloc cannot read the topology of this machine");
    hwloc_topology_destroy(topology);
    return status;
}

nd_status nd_affinity_digest(uint64_t *out)
{
    cpu_set_t set[MAX_CPUS / CPU_SETSIZE];
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    if (sched_getaffinity(0, sizeof set, set) != 0) {
        return nd_fail(ND_ERR_INTERNAL, "the CPUs that this process may use cannot be read: %s",
                       strerror(errno));
    }
    for (int i = 0; i < MAX_CPUS; i++) {
        h = CPU_ISSET_S(i, sizeof set, set) ? (h ^ (uint64_t)i) * UINT64_C(0x100000001b3) : h;
    }
    *out = h;
    return ND_OK;
}

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

static nd_status fail_hwloc(int code, const char *what)
{
    return code == ENOMEM ? nd_fail_memory("hwloc") : nd_fail(ND_ERR_INTERNAL, "%s", what);
}

typedef struct machine {
    hwloc_topology_t topology;
    hwloc_bitmap_t allowed; /* CPUs that this thread may use */
    int cpus, cores;        /* of them; cores with one of them */
} machine;

static nd_status read_allowed(machine *m)
{
    m->allowed = hwloc_bitmap_alloc();
    if (!m->allowed || hwloc_get_cpubind(m->topology, m->allowed, HWLOC_CPUBIND_THREAD) != 0) {
        nd_status status = fail_hwloc(m->allowed ? errno : ENOMEM,
                                      "the CPUs that this process may use cannot be read");
        hwloc_bitmap_free(m->allowed);
        return status;
    }
    m->cpus = hwloc_bitmap_weight(m->allowed);
    hwloc_obj_t core = NULL;
    while ((core = hwloc_get_next_obj_by_type(m->topology, HWLOC_OBJ_CORE, core)) != NULL) {
        m->cores += hwloc_bitmap_intersects(core->cpuset, m->allowed) != 0;
    }
    m->cores = m->cores > 0 ? m->cores : m->cpus; /* a topology may know no cores */
    return ND_OK;
}

static nd_status open_machine(machine *out)
{
    machine m = {0};
    errno = 0;
    if (hwloc_topology_init(&m.topology) != 0) {
        return fail_hwloc(errno, "hwloc cannot be initialised");
    }
    hwloc_topology_set_all_types_filter(m.topology, HWLOC_TYPE_FILTER_KEEP_STRUCTURE);
    hwloc_topology_set_type_filter(m.topology, HWLOC_OBJ_CORE, HWLOC_TYPE_FILTER_KEEP_ALL);
    nd_status status = hwloc_topology_load(m.topology) == 0
                           ? read_allowed(&m)
                           : fail_hwloc(errno, "hwloc cannot read the topology of this machine");
    if (status != ND_OK) {
        hwloc_topology_destroy(m.topology);
        return status;
    }
    *out = m;
    return ND_OK;
}

static void close_machine(machine *m)
{
    hwloc_bitmap_free(m->allowed);
    hwloc_topology_destroy(m->topology);
}

static int threads_of(const machine *m, int local_workers, int threads_wanted)
{
    int share = m->cores / local_workers;
    return threads_wanted > 0 ? threads_wanted : share > 0 ? share : 1;
}

int nd_affinity_threads(int local_workers, int threads_wanted)
{
    machine m;
    if (threads_wanted > 0) {
        return threads_wanted;
    }
    if (open_machine(&m) != ND_OK) {
        nd_error_clear();
        return 1;
    }
    int threads = threads_of(&m, local_workers, 0);
    close_machine(&m);
    return threads;
}

static nd_status bind_share(const machine *m, int local_rank, int local_workers, nd_affinity *out)
{
    int share = m->cpus / local_workers;
    hwloc_bitmap_t mine = hwloc_bitmap_alloc();
    if (!mine) {
        return nd_fail_memory("hwloc");
    }
    hwloc_bitmap_list_snprintf(out->cpus, sizeof out->cpus, m->allowed);
    if (share > 0) {
        take_cpus(m->topology, m->allowed, local_rank * share, share, mine);
        if (hwloc_set_cpubind(m->topology, mine, HWLOC_CPUBIND_THREAD) == 0) {
            out->bound = share;
            hwloc_bitmap_list_snprintf(out->cpus, sizeof out->cpus, mine);
        }
    }
    hwloc_bitmap_free(mine);
    return ND_OK;
}

nd_status nd_affinity_apply(int local_rank, int local_workers, int threads_wanted, nd_affinity *out)
{
    machine m;
    ND_ASSERT(local_workers >= 1 && local_rank >= 0 && local_rank < local_workers);
    ND_TRY(open_machine(&m));
    nd_affinity affinity = {.allowed = m.cpus,
                            .cores = m.cores,
                            .threads = threads_of(&m, local_workers, threads_wanted)};
    nd_status status = bind_share(&m, local_rank, local_workers, &affinity);
    close_machine(&m);
    ND_TRY(status);
    *out = affinity;
    return ND_OK;
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

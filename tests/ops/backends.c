// SPDX-License-Identifier: Apache-2.0
/* The backends that the suites of this folder are run against: the CPU's, at each of its levels. */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cpu/isa.h"
#include "tests/ops/conformance.h"

void nd_side_open_cpu(nd_side *side, int threads)
{
    ND_OK_OR_FAIL(nd_device_open_cpu(threads, &side->device));
    ND_OK_OR_FAIL(side->device->table->stream_init(side->device, &side->stream));
    ND_OK_OR_FAIL(nd_ops_cpu(side->device, &side->ops));
}

typedef void (*check_fn)(const nd_backend *backend);

static void check_at(const char *level, int threads, check_fn check)
{
    nd_backend backend;
    nd_side_open_ref(&backend.ref);
    nd_side_open_cpu(&backend.side, threads);
    snprintf(backend.name, sizeof backend.name, "cpu, %s, threads %d", level, threads);
    check(&backend);
    nd_case_free();
    nd_side_close(&backend.side);
    nd_side_close(&backend.ref);
}

void nd_best_backend(check_fn check)
{
    nd_cpu_isa isa;
    ND_OK_OR_FAIL(nd_cpu_isa_choose(&isa));
    for (int threads = 1; threads <= 3; threads++) {
        check_at(nd_cpu_isa_name(isa), threads, check);
    }
}

void nd_each_backend(check_fn check)
{
    nd_best_backend(check);
    for (int isa = nd_cpu_isa_detect(); isa >= ND_CPU_ISA_BASELINE; isa--) {
        setenv("ND_CPU_ISA", nd_cpu_isa_name((nd_cpu_isa)isa), 1);
        check_at(nd_cpu_isa_name((nd_cpu_isa)isa), 1, check);
    }
    setenv("ND_CPU_ISA", nd_cpu_isa_name(ND_CPU_ISA_AMX_EMULATED), 1);
    check_at(nd_cpu_isa_name(ND_CPU_ISA_AMX_EMULATED), 1, check);
    unsetenv("ND_CPU_ISA");
}

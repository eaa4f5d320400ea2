// SPDX-License-Identifier: Apache-2.0
/* The suites of tests/ops against the CUDA kernels on the host, with threads and blocks in each
 * order. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "tests/hostcuda/fibers.h"
#include "tests/hostcuda/kernel_table.h"
#include "tests/ops/conformance.h"

void nd_best_backend(void (*check)(const nd_backend *backend))
{
    static const char *const orders[] = {"ascending", "descending", "shuffled"};
    for (int order = HOSTCUDA_ASCENDING; order <= HOSTCUDA_SHUFFLED; order++) {
        nd_backend backend;
        hostcuda_set_order((enum hostcuda_order)order);
        nd_side_open_ref(&backend.ref);
        nd_side_open_ref(&backend.side);
        backend.side.ops = nd_ops_kernels();
        snprintf(backend.name, sizeof backend.name, "kernels on the host, %s", orders[order]);
        check(&backend);
        nd_case_free();
        nd_side_close(&backend.side);
        nd_side_close(&backend.ref);
    }
}

void nd_each_backend(void (*check)(const nd_backend *backend))
{
    nd_best_backend(check);
}

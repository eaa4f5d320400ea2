// SPDX-License-Identifier: Apache-2.0
/*
 * The suites of tests/ops against the CUDA kernels as a backend over host memory, without the
 * device and the libraries beside them: every op that has a kernel of ours is its launcher,
 * products and attention are the reference's. With threads and blocks in each order.
 */
#include <stdio.h>

#include "kernels/cuda/kernels.h"
#include "kernels/ref/ref.h"
#include "tests/hostcuda/fibers.h"
#include "tests/ops/conformance.h"

static _Alignas(256) char scratch[ND_CUDA_SCRATCH];

#define LAUNCHED(op, prefix)                                                                       \
    static nd_status prefix##op(nd_stream *stream, const nd_##op##_args *args)                     \
    {                                                                                              \
        int error = nd_cuda_##op(stream->native, args, scratch);                                   \
        return error ? nd_fail(ND_ERR_INTERNAL, "a launcher returned %d", error) : ND_OK;          \
    }
ND_EACH_KERNEL_OP(LAUNCHED, launched_)

/* As on a GPU, whose products read transposed codes; the reference reads both. */
static nd_form_rule form(const nd_device *device, const nd_form_need *need)
{
    nd_form_rule rule = nd_ref_form(device, need);
    rule.transposed = need->role == ND_W_OF_DX;
    return rule;
}

static const nd_ops *ops_of_kernels(void)
{
    static nd_ops kernels = {.name = "kernels",
                             ND_EACH_PREPARED_OP(ND_OP_ENTRY, nd_ref_)
                                 ND_EACH_KERNEL_OP(ND_OP_ENTRY, launched_)
                                     ND_EACH_QUERY(ND_QUERY_ENTRY, nd_ref_)};
    kernels.form = form;
    return &kernels;
}

void nd_best_backend(void (*check)(const nd_backend *backend))
{
    static const char *const orders[] = {"ascending", "descending", "shuffled"};
    for (int order = HOSTCUDA_ASCENDING; order <= HOSTCUDA_SHUFFLED; order++) {
        nd_backend backend;
        hostcuda_set_order((enum hostcuda_order)order);
        nd_side_open_ref(&backend.ref);
        nd_side_open_ref(&backend.side);
        backend.side.ops = ops_of_kernels();
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

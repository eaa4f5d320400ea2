// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/comm.h"

nd_status nd_transport_open_nccl(const nd_transport_options *options, nd_transport **out)
{
    return nd_fail(ND_ERR_CONFIG,
                   "%d workers on GPUs communicate over NCCL, and this program was built without "
                   "CUDA; use --device cpu",
                   options->size);
}

// SPDX-License-Identifier: Apache-2.0
#include "tests/hostcuda/mesh_cuda.h"

#include "kernels/cuda/context.h"
#include "kernels/cuda/cuda_ops.h"
#include "tests/hostcuda/cuda_ranks.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/parity/mesh_data.h"
#include "tests/parity/rank_device.h"
#include "trainer/rank.h"

enum { SEQUENCE = 32, GLOBAL_BATCH = 4, TOKENS = 3000, VOCAB = 96 };

static bool on_gpus;
static int64_t ordered_bytes;

mesh_job mesh_cuda_job(tempdir *dir, nd_precision precision)
{
    nd_shape shape = mesh_small_llama(VOCAB);
    shape.ffn = 96;
    shape.heads = 4;
    shape.kv_heads = 2;
    mesh_job job =
        mesh_sized_job(dir, TOKENS, shape, precision, GLOBAL_BATCH, SEQUENCE, MESH_CUDA_STEPS);
    job.lr = 0.003;
    return job;
}

void mesh_use_gpus(bool gpus, bool cast_units)
{
    on_gpus = gpus;
    /* The copy of the weights in the compute dtype must leave 1 GiB free, which 1 GiB cannot. */
    nd_double_machine_get()->memory = (size_t)(cast_units ? 1 : 64) << 30;
    ordered_bytes = 0;
    cuda_rank_alone(false);
}

void mesh_use_ordered(int64_t bytes)
{
    ordered_bytes = bytes;
}

static nd_status open_gpu(nd_rank *rank)
{
    nd_transport *local = rank->transport;
    /* A third of the deadline is autotune's time, which a busy machine needs. */
    ND_TRY(cuda_rank_open(local, 600.0, &rank->device, &rank->transport));
    ND_TRY(nd_ops_cuda(rank->device, ordered_bytes > 0, &rank->ops));
    if (ordered_bytes > 0) {
        nd_cuda_context_of(rank->device)->ordered_bytes = ordered_bytes;
    }
    return ND_OK;
}

static nd_status open_cpu(nd_rank *rank, int threads)
{
    ND_TRY(nd_device_open_cpu(threads, &rank->device));
    return nd_ops_cpu(rank->device, &rank->ops);
}

nd_status rank_device_open(nd_rank *rank, int threads)
{
    nd_transport *local = rank->transport;
    nd_status status = on_gpus ? open_gpu(rank) : open_cpu(rank, threads);
    if (status != ND_OK) {
        rank_device_close(rank, local);
    }
    return status;
}

void rank_device_close(nd_rank *rank, nd_transport *local)
{
    if (rank->transport != local) {
        nd_transport_close(rank->transport);
    }
    nd_device_close(rank->device);
    rank->device = NULL;
}

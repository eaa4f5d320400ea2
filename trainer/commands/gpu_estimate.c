// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands/gpu_estimate.h"

#include <math.h>

#include "runtime/base/math.h"
#include "trainer/commands/gpu_rates.h"
#include "trainer/dry/dry.h"

static const double f32_flops = 50e12, nvlink_bytes = 360e9, network_bytes = 45e9;
enum { GPUS_OF_HOST = 8 };

typedef struct parts {
    double products, attention, others, update, wire; /* seconds of a step */
} parts;

/* Bytes that the update reads and writes, with the norm's pass over gradients before it. */
static double update_bytes(const nd_trainer *t)
{
    bool adam = t->rank->config->optimizer.name == ND_OPTIMIZER_ADAMW;
    double weights = (double)t->model->layout->shard_total;
    double of_weight = 4.0 + (adam ? 28.0 : 12.0); /* p, m, v read and written, the gradient read */
    return weights * (of_weight + (t->model->fsdp.resident ? 2.0 : 0.0));
}

/* The all-reduce of gradients over replicas, once a step. */
static double replica_bytes(const nd_trainer *t)
{
    double replicas = t->rank->mesh.size[ND_AXIS_DP_REPLICATE];
    return 2.0 * 4.0 * (double)t->model->layout->shard_total * (replicas - 1) / replicas;
}

static parts parts_of(const nd_trainer *t, const nd_step_work *work, const struct nd_gpu_rates *gpu)
{
    double bandwidth = gpu->bytes_per_second * gpu->memory_share;
    double link = t->rank->world_size > GPUS_OF_HOST ? network_bytes : nvlink_bytes;
    return (parts){
        .products = work->flops_bf16 / gpu->bf16_flops + work->flops_fp8 / gpu->fp8_flops +
                    work->flops_f32 / f32_flops,
        .attention = work->flops_attention / gpu->attention_flops,
        .others = work->moved_bytes / bandwidth,
        .update = update_bytes(t) / bandwidth,
        .wire = (work->wire_bytes + replica_bytes(t)) / link,
    };
}

static void print_row(FILE *out, const nd_trainer *t, const nd_step_work *work,
                      const struct nd_gpu_rates *gpu)
{
    const nd_config *config = t->rank->config;
    parts p = parts_of(t, work, gpu);
    double compute = p.products + p.attention + p.others + p.update;
    double longest = compute + p.wire, shortest = fmax(compute, p.wire);
    double tokens = (double)config->train.sequence_length * (double)nd_step_blocks(config) /
                    t->rank->world_size;
    double gib = (double)(t->plan.total + t->plan.external) / nd_gib;
    fprintf(out,
            "  %s: %.3f s products, %.3f s attention, %.3f s other ops, %.3f s update, %.3f s "
            "communication\n"
            "        %.3f to %.3f s a step, %.0f to %.0f tokens/s a worker; %s: %.1f of %.1f GiB\n",
            gpu->name, p.products, p.attention, p.others, p.update, p.wire, shortest, longest,
            tokens / longest, tokens / shortest, gib <= gpu->gib ? "fits" : "does not fit", gib,
            gpu->gib);
}

nd_status nd_gpu_estimates_print(FILE *out, const nd_trainer *t)
{
    nd_step_work work;
    ND_TRY(nd_dry_run_work(t->rank, &work));
    fprintf(out, "estimates by the ops of a step, %s:\n", ND_RATES_FROM);
    for (int i = 0; i < ND_RATED_GPUS; i++) {
        print_row(out, t, &work, &nd_gpu_rates[i]);
    }
    fprintf(out,
            "  work of a worker: %.4g TFLOP in BF16, %.4g in FP8, %.4g in F32, %.4g in attention; "
            "%.4g GB moved, %.4g GB sent\n",
            work.flops_bf16 * 1e-12, work.flops_fp8 * 1e-12, work.flops_f32 * 1e-12,
            work.flops_attention * 1e-12, work.moved_bytes * 1e-9,
            (work.wire_bytes + replica_bytes(t)) * 1e-9);
    for (int i = 0; i < ND_RATED_GPUS; i++) {
        const struct nd_gpu_rates *of = &nd_gpu_rates[i];
        fprintf(
            out,
            "  %s by %.0f TFLOP/s in BF16, %.0f in FP8, %.0f in attention, other ops at %.0f %% "
            "of the memory's bandwidth\n",
            of->name, of->bf16_flops * 1e-12, of->fp8_flops * 1e-12, of->attention_flops * 1e-12,
            of->memory_share * 100);
    }
    fprintf(out,
            "  %.0f GB/s sent %s; the shorter step hides all communication behind compute, the "
            "longer one none; no gaps between kernels\n",
            (t->rank->world_size > GPUS_OF_HOST ? network_bytes : nvlink_bytes) * 1e-9,
            t->rank->world_size > GPUS_OF_HOST ? "over the network" : "over NVLink");
    return ND_OK;
}

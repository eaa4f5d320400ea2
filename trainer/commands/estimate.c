// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands/estimate.h"

#include <math.h>

#include "runtime/base/math.h"
#include "runtime/device/affinity.h"
#include "trainer/commands/gpu_rates.h"
#include "trainer/dry/dry.h"

static const double nvlink_bytes = 360e9, network_bytes = 45e9;
enum { GPUS_OF_HOST = 8 };

/* What one worker does in a second. */
typedef struct rates {
    const char *machine;
    double bf16_flops, fp8_flops, f32_flops, attention_flops;
    double memory_bytes, host_bytes, wire_bytes; /* of memory; sent within a host, between hosts */
} rates;

static rates rates_of_gpu(const struct nd_gpu_rates *gpu)
{
    return (rates){
        .machine = gpu->name,
        .bf16_flops = gpu->bf16_flops,
        .fp8_flops = gpu->fp8_flops,
        .f32_flops = 50e12,
        .attention_flops = gpu->attention_flops,
        .memory_bytes = gpu->bytes_per_second * gpu->memory_share,
        .host_bytes = nvlink_bytes,
        .wire_bytes = network_bytes,
    };
}

/*
 * A core computes BF16 products with AVX-512's dot products, and F32 at half that speed; it widens
 * FP8 codes to BF16. Threads beyond the worker's share of the cores wait for each other.
 */
static rates rates_of_cpu(const nd_trainer *t)
{
    const double all = nd_affinity_threads(1, 0);
    const double local = (double)t->rank->config->launch.nproc_per_node;
    const double cores = fmin(t->rank->device->threads, all / local);
    const double flops = 100e9 * cores;
    const bool f32 = t->model->dims.act == ND_DTYPE_F32;
    return (rates){.machine = "CPU",
                   .bf16_flops = flops,
                   .fp8_flops = flops,
                   .f32_flops = flops / 2,
                   .attention_flops = f32 ? flops / 2 : flops,
                   .memory_bytes = 5e9 * cores,
                   .host_bytes = 2e9,
                   .wire_bytes = 1e9};
}

/* Bytes that the update reads and writes, with the norm's pass over gradients before it. */
static double update_bytes(const nd_trainer *t)
{
    bool adam = t->rank->config->optimizer.name == ND_OPTIMIZER_ADAMW;
    double weights = (double)t->model->layout->shard_total;
    double of_weight = 4.0 + (adam ? 28.0 : 12.0); /* p, m, v read and written, the gradient read */
    return weights * (of_weight + (t->model->fsdp.resident ? 2.0 : 0.0));
}

/* GPUs of a host; all CPU workers that a host is planned for. */
static int host_ranks_of(const nd_trainer *t)
{
    const nd_config *config = t->rank->config;
    const int planned = (int)config->launch.nproc_per_node;
    return config->launch.device == ND_CHOOSE_CUDA ? (int)nd_min(planned, GPUS_OF_HOST) : planned;
}

/* The work of a step with the all-reduce of gradients over replicas, once, which is not in it. */
static nd_status work_of(const nd_trainer *t, nd_step_work *work)
{
    const double replicas = t->rank->mesh.size[ND_AXIS_DP_REPLICATE];
    const double bytes = 8.0 * (double)t->model->layout->shard_total * (replicas - 1) / replicas;
    const int host_ranks = host_ranks_of(t);
    ND_TRY(nd_dry_run_work(t->rank, host_ranks, work));
    *(t->rank->world_size <= host_ranks ? &work->host_bytes : &work->wire_bytes) += bytes;
    return ND_OK;
}

static nd_estimate estimate_by(const nd_trainer *t, const nd_step_work *work, const rates *of)
{
    const nd_config *config = t->rank->config;
    nd_estimate e = {
        .machine = of->machine,
        .products = work->flops_bf16 / of->bf16_flops + work->flops_fp8 / of->fp8_flops +
                    work->flops_f32 / of->f32_flops,
        .attention = work->flops_attention / of->attention_flops,
        .others = work->moved_bytes / of->memory_bytes,
        .update = update_bytes(t) / of->memory_bytes,
        .wire = work->host_bytes / of->host_bytes + work->wire_bytes / of->wire_bytes,
        .tokens = (double)config->train.sequence_length * (double)nd_step_blocks(config),
    };
    const double compute = e.products + e.attention + e.others + e.update;
    e.longest = compute + e.wire;
    e.shortest = fmax(compute, e.wire);
    return e;
}

static int list_rates(const nd_trainer *t, rates list[ND_ESTIMATES_MAX])
{
    if (t->rank->config->launch.device != ND_CHOOSE_CUDA) {
        list[0] = rates_of_cpu(t);
        return 1;
    }
    for (int i = 0; i < ND_RATED_GPUS; i++) {
        list[i] = rates_of_gpu(&nd_gpu_rates[i]);
    }
    return ND_RATED_GPUS;
}

nd_status nd_estimate_steps(const nd_trainer *trainer, nd_estimate list[ND_ESTIMATES_MAX],
                            int *count)
{
    nd_step_work work;
    rates of[ND_ESTIMATES_MAX];
    ND_TRY(work_of(trainer, &work));
    *count = list_rates(trainer, of);
    for (int i = 0; i < *count; i++) {
        list[i] = estimate_by(trainer, &work, &of[i]);
    }
    return ND_OK;
}

void nd_estimates_print(FILE *out, const nd_estimate *list, int count)
{
    for (int i = 0; i < count; i++) {
        const nd_estimate *e = &list[i];
        fprintf(out, "%s%s %.4g to %.4g s, %.0f to %.0f tokens/s", i ? "; " : "", e->machine,
                e->shortest, e->longest, e->tokens / e->longest, e->tokens / e->shortest);
    }
    fprintf(out, "\n");
}

static void print_rates(FILE *out, const rates *of)
{
    fprintf(
        out,
        "  %s by %.4g TFLOP/s in BF16, %.4g in FP8, %.4g in F32, %.4g in attention; other ops at "
        "%.4g GB/s of memory; %.4g GB/s sent within a host, %.4g between hosts\n",
        of->machine, of->bf16_flops * 1e-12, of->fp8_flops * 1e-12, of->f32_flops * 1e-12,
        of->attention_flops * 1e-12, of->memory_bytes * 1e-9, of->host_bytes * 1e-9,
        of->wire_bytes * 1e-9);
}

nd_status nd_estimates_explain(FILE *out, const nd_trainer *t)
{
    nd_step_work work;
    rates of[ND_ESTIMATES_MAX];
    ND_TRY(work_of(t, &work));
    const int count = list_rates(t, of);
    const bool cuda = t->rank->config->launch.device == ND_CHOOSE_CUDA;
    fprintf(out, "where a worker's step goes, by its ops and rates; %s:\n",
            cuda ? ND_RATES_FROM : "none was measured here");
    for (int i = 0; i < count; i++) {
        const nd_estimate e = estimate_by(t, &work, &of[i]);
        fprintf(out,
                "  %s: %.4g s products, %.4g s attention, %.4g s other ops, %.4g s update, %.4g s "
                "communication\n",
                e.machine, e.products, e.attention, e.others, e.update, e.wire);
    }
    fprintf(out,
            "  work of a worker: %.4g TFLOP in BF16, %.4g in FP8, %.4g in F32, %.4g in attention; "
            "%.4g GB moved, %.4g GB sent within a host, %.4g between hosts\n",
            work.flops_bf16 * 1e-12, work.flops_fp8 * 1e-12, work.flops_f32 * 1e-12,
            work.flops_attention * 1e-12, work.moved_bytes * 1e-9, work.host_bytes * 1e-9,
            work.wire_bytes * 1e-9);
    fprintf(
        out,
        "  exposed communication: %.4g GB, which ops wait for at once; the other %.4g GB are sent "
        "beside compute\n",
        work.exposed_bytes * 1e-9, (work.host_bytes + work.wire_bytes - work.exposed_bytes) * 1e-9);
    for (int i = 0; i < count; i++) {
        print_rates(out, &of[i]);
    }
    fprintf(out,
            "  the shorter step hides all communication behind compute, the longer one none; no "
            "gaps between ops; a host has %d ranks\n",
            host_ranks_of(t));
    return ND_OK;
}

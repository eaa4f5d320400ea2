// SPDX-License-Identifier: Apache-2.0
#include <math.h>
#include <stdio.h>

#include "runtime/base/math.h"
#include "runtime/device/affinity.h"
#include "trainer/commands/gpu_rates.h"
#include "trainer/commands/plan.h"
#include "trainer/dry/dry.h"

static const double nvlink_bytes = 360e9, network_bytes = 45e9;
enum { GPUS_OF_HOST = 8, ESTIMATES_MAX = ND_RATED_GPUS };

/* A machine, what one worker does there in a second, and what follows for a step. */
typedef struct estimate {
    const char *machine; /* "H100", "CPU" */
    double bf16_flops, fp8_flops, f32_flops, attention_flops;
    double memory_bytes, host_bytes, wire_bytes; /* of memory; sent within a host, between hosts */
    double products, attention, others, update, wire; /* seconds of a step of one worker */
    double shortest, longest; /* seconds: communication hidden behind the rest, or not at all */
} estimate;

/* A step of the trainer's rank, which is not computed. */
typedef struct step {
    nd_step_work work;
    int host_ranks;      /* GPUs of a host; all CPU workers that a host is planned for */
    double update_bytes; /* read and written, with the norm's pass over gradients before */
    double tokens;       /* of all workers */
    estimate list[ESTIMATES_MAX];
    int count;
} step;

static estimate rates_of_gpu(const struct nd_gpu_rates *gpu)
{
    return (estimate){
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
static estimate rates_of_cpu(const nd_trainer *t)
{
    const double all = nd_affinity_threads(1, 0);
    const double local = (double)t->rank->config->launch.nproc_per_node;
    const double cores = fmin(t->rank->device->threads, all / local);
    const double flops = 100e9 * cores;
    const bool f32 = t->model->dims.act == ND_DTYPE_F32;
    return (estimate){.machine = "CPU",
                      .bf16_flops = flops,
                      .fp8_flops = flops,
                      .f32_flops = flops / 2,
                      .attention_flops = f32 ? flops / 2 : flops,
                      .memory_bytes = 5e9 * cores,
                      .host_bytes = 2e9,
                      .wire_bytes = 1e9};
}

static void estimate_seconds(const step *s, estimate *e)
{
    const nd_step_work *work = &s->work;
    e->products = work->flops_bf16 / e->bf16_flops + work->flops_fp8 / e->fp8_flops +
                  work->flops_f32 / e->f32_flops;
    e->attention = work->flops_attention / e->attention_flops;
    e->others = work->moved_bytes / e->memory_bytes;
    e->update = s->update_bytes / e->memory_bytes;
    e->wire = work->host_bytes / e->host_bytes + work->wire_bytes / e->wire_bytes;
    const double compute = e->products + e->attention + e->others + e->update;
    e->longest = compute + e->wire;
    e->shortest = fmax(compute, e->wire);
}

static nd_status estimate_step(const nd_trainer *t, step *s)
{
    const nd_config *config = t->rank->config;
    const bool cuda = config->launch.device == ND_CHOOSE_CUDA;
    const double replicas = t->rank->mesh.size[ND_AXIS_DP_REPLICATE];
    const double weights = (double)t->model->layout->shard_total;
    /* p, m and v are read and written, the gradient is read. */
    const double of_weight = 4.0 + (config->optimizer.name == ND_OPTIMIZER_ADAMW ? 28.0 : 12.0);
    s->host_ranks = (int)config->launch.nproc_per_node;
    s->host_ranks = cuda ? (int)nd_min(s->host_ranks, GPUS_OF_HOST) : s->host_ranks;
    s->update_bytes = weights * (of_weight + (t->model->fsdp.resident ? 2.0 : 0.0));
    s->tokens = (double)config->train.sequence_length * (double)nd_step_blocks(config);
    ND_TRY(nd_dry_run_work(t->rank, s->host_ranks, &s->work));
    /* The all-reduce of gradients over replicas, once, is not in the dry run's work. */
    *(t->rank->world_size <= s->host_ranks ? &s->work.host_bytes : &s->work.wire_bytes) +=
        8.0 * weights * (replicas - 1) / replicas;
    s->count = cuda ? ND_RATED_GPUS : 1;
    for (int i = 0; i < s->count; i++) {
        s->list[i] = cuda ? rates_of_gpu(&nd_gpu_rates[i]) : rates_of_cpu(t);
        estimate_seconds(s, &s->list[i]);
    }
    return ND_OK;
}

nd_status nd_estimate_format(const nd_trainer *trainer, bool all, char out[ND_ESTIMATE_TEXT_MAX])
{
    step s;
    size_t at = 0;
    ND_TRY(estimate_step(trainer, &s));
    for (int i = 0; i < (all ? s.count : 1); i++) {
        const estimate *e = &s.list[i];
        at += (size_t)snprintf(out + at, ND_ESTIMATE_TEXT_MAX - at,
                               "%s%s %.4g to %.4g s, %.0f to %.0f tokens/s", i ? "; " : "",
                               e->machine, e->shortest, e->longest, s.tokens / e->longest,
                               s.tokens / e->shortest);
    }
    return ND_OK;
}

nd_status nd_estimate_explain(const nd_trainer *t)
{
    step s;
    const nd_step_work *work = &s.work;
    ND_TRY(estimate_step(t, &s));
    printf("where a worker's step goes, by its ops and rates; %s:\n",
           t->rank->config->launch.device == ND_CHOOSE_CUDA ? ND_RATES_FROM
                                                            : "none was measured here");
    for (int i = 0; i < s.count; i++) {
        const estimate *e = &s.list[i];
        printf("  %s: %.4g s products, %.4g s attention, %.4g s other ops, %.4g s update, %.4g s "
               "communication\n",
               e->machine, e->products, e->attention, e->others, e->update, e->wire);
    }
    printf("  work of a worker: %.4g TFLOP in BF16, %.4g in FP8, %.4g in F32, %.4g in attention; "
           "%.4g GB moved, %.4g GB sent within a host, %.4g between hosts\n",
           work->flops_bf16 * 1e-12, work->flops_fp8 * 1e-12, work->flops_f32 * 1e-12,
           work->flops_attention * 1e-12, work->moved_bytes * 1e-9, work->host_bytes * 1e-9,
           work->wire_bytes * 1e-9);
    printf("  exposed communication: %.4g GB, which ops wait for at once; the other %.4g GB are "
           "sent beside compute\n",
           work->exposed_bytes * 1e-9,
           (work->host_bytes + work->wire_bytes - work->exposed_bytes) * 1e-9);
    for (int i = 0; i < s.count; i++) {
        const estimate *e = &s.list[i];
        printf("  %s by %.4g TFLOP/s in BF16, %.4g in FP8, %.4g in F32, %.4g in attention; other "
               "ops at %.4g GB/s of memory; %.4g GB/s sent within a host, %.4g between hosts\n",
               e->machine, e->bf16_flops * 1e-12, e->fp8_flops * 1e-12, e->f32_flops * 1e-12,
               e->attention_flops * 1e-12, e->memory_bytes * 1e-9, e->host_bytes * 1e-9,
               e->wire_bytes * 1e-9);
    }
    printf("  the shorter step hides all communication behind compute, the longer one none; no "
           "gaps between ops; a host has %d ranks\n",
           s.host_ranks);
    return ND_OK;
}

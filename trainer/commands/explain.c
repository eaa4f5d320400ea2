// SPDX-License-Identifier: Apache-2.0
/* The plan of a rank, how long a step would take, and `ndtrain plan --explain`: why a buffer is as
 * large as it is, where time goes, and what other settings need. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/math.h"
#include "runtime/device/affinity.h"
#include "trainer/commands/gpu_rates.h"
#include "trainer/commands/plan.h"
#include "trainer/dry/dry.h"

nd_status nd_plan_make(const nd_planner *p, const nd_config *config, const nd_tuning *tuning,
                       nd_trainer **out)
{
    nd_rank *r = &p->worker->rank;
    r->rank = p->rank;
    r->mesh = nd_shape_mesh(&p->inputs->shape, config);
    r->world_size = nd_mesh_world_size(&r->mesh);
    r->host_ranks = (int)config->launch.nproc_per_node;
    r->coord = nd_mesh_coord_of(&r->mesh, p->rank);
    r->config = config;
    r->shape = p->inputs->shape;
    r->device = p->worker->device;
    return nd_trainer_create(r, tuning, out);
}

nd_status nd_plan_make_changed(const nd_planner *p, nd_config *c, nd_trainer **out)
{
    const int64_t per_node = c->launch.nproc_per_node;
    c->launch.nproc_per_node = 0; /* else it contradicts further workers */
    ND_TRY(nd_config_resolve(c));
    c->launch.nproc_per_node = per_node; /* further workers are on further hosts */
    ND_TRY(nd_shape_check_mesh(&p->inputs->shape, &c->resolved_mesh, c->train.micro_batch_size,
                               c->train.sequence_length));
    return nd_plan_make(p, c, NULL, out);
}

double nd_plan_bytes(const nd_trainer *trainer)
{
    return (double)(trainer->plan.total + trainer->plan.external);
}

/* The estimate of a step. */

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

static nd_status explain_step(const nd_trainer *t)
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

static void print_reasons(void)
{
    static const char *const reasons[][2] = {
        {"state",
         "F32 weights, their gradients and AdamW's two moments: 16 bytes for each parameter of the "
         "shard; mesh.dp_shard, mesh.cp and mesh.tp divide them, optimizer.name sgd has no "
         "moments"},
        {"gathered weights",
         "the units in work, or with parallel.reshard_after_forward false all of them; mesh.tp "
         "divides them, fp8.all_gather halves them"},
        {"unsharded gradients",
         "F32, before they are added up over the shards; mesh.tp divides them"},
        {"activations",
         "what backward needs: they grow with train.micro_batch_size and train.sequence_length; "
         "parallel.recompute, mesh.cp and mesh.tp make them smaller"},
        {"scratch",
         "one layer at a time; it grows with the tokens of a micro-batch, too, unless for the MLP "
         "with parallel.tiled_mlp"},
        {"head", "logits of one chunk of tokens, never of all; mesh.tp divides the vocabulary"},
    };
    printf("why:\n");
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) {
        printf("  %-22s %s\n", reasons[i][0], reasons[i][1]);
    }
}

/* How long each way of exchanging keys or heads would make a rank wait. */
static void print_exchanges(const nd_planner *p)
{
    const nd_shape *shape = &p->inputs->shape;
    const nd_mesh *mesh = &p->config->resolved_mesh;
    nd_cp_exchange list[ND_CP_EXCHANGES_MAX], own = nd_cp_exchange_of(shape, p->config);
    char name[64];
    if (mesh->size[ND_AXIS_CP] == 1) {
        return;
    }
    const int count = nd_cp_list_exchanges(shape, p->config, list);
    printf("attention over the %d ranks of mesh.cp: %s%s; GB that a worker sends for it in a step "
           "and waits for at once:\n",
           mesh->size[ND_AXIS_CP], nd_cp_exchange_format(&own, mesh, name, sizeof name),
           p->config->parallel.cp_comm == ND_CP_AUTO ? ", the least as parallel.cp_comm auto asks"
                                                     : "");
    for (int i = 0; i < count; i++) {
        printf("  %-26s %.4g\n", nd_cp_exchange_format(&list[i], mesh, name, sizeof name),
               list[i].exposed_bytes * 1e-9);
    }
}

/* The table of other settings, each alone. */

/* own: bytes of the plan as it is. */
static nd_status print_row(double own, const char *name, const nd_trainer *trainer)
{
    char step_text[ND_ESTIMATE_TEXT_MAX];
    const double bytes = nd_plan_bytes(trainer);
    ND_TRY(nd_estimate_format(trainer, false, step_text));
    printf("  %-64s %9.3f GiB %+6.1f %%  %s\n", name, bytes / nd_gib, (bytes / own - 1) * 100,
           step_text);
    return ND_OK;
}

/* The run with other values of one key or two; they are already in `changed`. A setting that cannot
 * be is a row that says why. */
static nd_status try_keys(const nd_planner *p, double own, nd_config *changed, const char *key,
                          const char *second)
{
    char *value = NULL, *second_value = NULL, name[96];
    nd_trainer *trainer = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_config_get(changed, key, &value));
    ND_TRY_OUT(second ? nd_config_get(changed, second, &second_value) : ND_OK);
    if (second) {
        snprintf(name, sizeof name, "%s: %s, %s: %s", key, value, second, second_value);
    } else if (changed->launch.workers != p->config->launch.workers) {
        snprintf(name, sizeof name, "%s: %s, on %lld workers", key, value,
                 (long long)changed->launch.workers);
    } else {
        snprintf(name, sizeof name, "%s: %s", key, value);
    }
    status = nd_plan_make_changed(p, changed, &trainer);
    status = status == ND_OK ? print_row(own, name, trainer) : status;
    if (status != ND_OK) {
        printf("  %-64s not possible: %s\n", name, nd_error_last()->message);
        nd_error_clear();
        status = ND_OK;
    }
out:
    nd_trainer_destroy(trainer);
    free(second_value);
    free(value);
    return status;
}

/* The changes that the run can make and that leave what is learned as it is. */
static nd_status print_changes(const nd_planner *p, double own)
{
    static const char *const axes[] = {"mesh.dp_shard", "mesh.cp", "mesh.tp"};
    const nd_config *config = p->config;
    nd_config c; /* borrows the texts of the run's own */
    for (nd_recompute r = ND_RECOMPUTE_NONE; r <= ND_RECOMPUTE_FULL; r++) {
        c = *config;
        c.parallel.recompute = r;
        ND_TRY(r != config->parallel.recompute ? try_keys(p, own, &c, "parallel.recompute", NULL)
                                               : ND_OK);
    }
    c = *config;
    c.parallel.tiled_mlp = config->parallel.tiled_mlp == -1 ? 1 : -1;
    ND_TRY(try_keys(p, own, &c, "parallel.tiled_mlp", NULL));
    c = *config;
    c.parallel.reshard_after_forward = !config->parallel.reshard_after_forward;
    ND_TRY(try_keys(p, own, &c, "parallel.reshard_after_forward", NULL));
    for (nd_cp_comm way = 0; way <= ND_CP_ULYSSES && config->mesh.cp > 1; way++) {
        c = *config;
        c.parallel.cp_comm = way;
        c.parallel.ulysses = 1;
        ND_TRY(way != config->parallel.cp_comm || config->parallel.ulysses > 1
                   ? try_keys(p, own, &c, "parallel.cp_comm", NULL)
                   : ND_OK);
    }
    if (config->train.micro_batch_size > 1) {
        c = *config;
        c.train.micro_batch_size = 1;
        c.train.gradient_accumulation_steps *= config->train.micro_batch_size;
        ND_TRY(try_keys(p, own, &c, "train.micro_batch_size", "train.gradient_accumulation_steps"));
    }
    for (int i = 0; i < 3; i++) {
        c = *config;
        int64_t *const sizes[] = {&c.mesh.dp_shard, &c.mesh.cp, &c.mesh.tp};
        *sizes[i] *= 2;
        c.launch.workers *= 2;
        ND_TRY(try_keys(p, own, &c, axes[i], NULL));
    }
    return ND_OK;
}

nd_status nd_plan_explain(const nd_planner *p)
{
    nd_trainer *trainer = NULL;
    double own = 0;
    nd_status status = ND_OK;
    print_reasons();
    print_exchanges(p);
    ND_TRY(nd_plan_make(p, p->config, NULL, &trainer));
    ND_TRY_OUT(explain_step(trainer));
    own = nd_plan_bytes(trainer);
    printf("what other settings would need, each alone, of a worker and by the same estimate; "
           "further workers are on further hosts like this one:\n");
    ND_TRY_OUT(print_row(own, "as it is", trainer));
out:
    nd_trainer_destroy(trainer);
    return status == ND_OK ? print_changes(p, own) : status;
}

// SPDX-License-Identifier: Apache-2.0
/*
 * `ndtrain plan`: plans the trainer of one rank without allocating anything, prints the plan and
 * how long a step of it would take, and with --explain why a buffer is as large as it is, where
 * time goes, and what other settings need.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/comm/comm.h"
#include "runtime/device/affinity.h"
#include "runtime/device/host_memory.h"
#include "trainer/checkpoint/saver.h"
#include "trainer/commands/command.h"
#include "trainer/commands/gpu_rates.h"
#include "trainer/dry/dry.h"
#include "trainer/precision/precision.h"
#include "trainer/report/report.h"
#include "trainer/step/step.h"
#include "trainer/tune/tune.h"
#include "trainer/worker/worker.h"

/* The rank whose plan is made, with its configuration, inputs and worker. */
typedef struct planner {
    const nd_config *config;
    const nd_inputs *inputs;
    nd_worker *worker; /* has the planner's device */
    int rank;
} planner;

/* Plans the rank's trainer with another configuration than the planner's own, or with that one. The
 * worker's rank borrows `config`. */
static nd_status make_plan(const planner *p, const nd_config *config, const nd_tuning *tuning,
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

/* Like make_plan, for a configuration that has been changed. ND_ERR_CONFIG: a run with it would be
 * refused before it plans anything. */
static nd_status make_changed_plan(const planner *p, nd_config *c, nd_trainer **out)
{
    const int64_t per_node = c->launch.nproc_per_node;
    c->launch.nproc_per_node = 0; /* else it contradicts further workers */
    ND_TRY(nd_config_resolve(c));
    c->launch.nproc_per_node = per_node; /* further workers are on further hosts */
    ND_TRY(nd_shape_check_mesh(&p->inputs->shape, &c->resolved_mesh, c->train.micro_batch_size,
                               c->train.sequence_length));
    return make_plan(p, c, NULL, out);
}

static double plan_bytes(const nd_trainer *trainer)
{
    return (double)(trainer->plan.total + trainer->plan.external);
}

/*
 * The estimated time of a step: the ops of a dry run, each kind at a rate that is printed with the
 * result. For device cuda there is an estimate for each kind of GPU in gpu_rates.h, since any
 * machine can plan any job; for device cpu one for CPUs like those here.
 */

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

enum { ESTIMATE_TEXT_MAX = 256 };
/* "H100 0.4 to 0.5 s, 800 to 1000 tokens/s; ...": for the first kind alone, or for all. */
static nd_status format_estimate(const nd_trainer *trainer, bool all, char out[ESTIMATE_TEXT_MAX])
{
    step s;
    size_t at = 0;
    ND_TRY(estimate_step(trainer, &s));
    for (int i = 0; i < (all ? s.count : 1); i++) {
        const estimate *e = &s.list[i];
        at += (size_t)snprintf(out + at, ESTIMATE_TEXT_MAX - at,
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

/* Decimals of GiB, of two sizes that may be almost equal. */
static int decimals(double a, double b, int usual)
{
    return fabs(a - b) < 0.1 ? 6 : usual;
}

/* The plan beside each kind of GPU, since any machine can plan any job, or the plans of all workers
 * of this host beside its memory. */
static bool print_fit(const nd_config *config, double each)
{
    bool fits = false;
    if (config->launch.device == ND_CHOOSE_CUDA) {
        for (int i = 0; i < ND_RATED_GPUS; i++) {
            const double gib = nd_gpu_rates[i].gib;
            printf("%s one %s: %.*f of its %.1f GiB\n", each <= gib ? "fits" : "does not fit",
                   nd_gpu_rates[i].name, decimals(each, gib, 2), each, gib);
            fits |= each <= gib;
        }
        return fits;
    }
    const nd_host_memory host = nd_host_memory_read("");
    const double all = each * (double)config->launch.nproc_per_node;
    const double physical = (double)host.physical / nd_gib;
    const int digits = decimals(all, physical, 1);
    fits = all <= physical;
    printf("%s: %lld worker%s of %.2f GiB take%s %.*f of its %.*f GiB, of which %.1f are free\n",
           !fits                                   ? "does not fit this host"
           : all > (double)host.available / nd_gib ? "fits this host once other programs give way"
                                                   : "fits this host",
           (long long)config->launch.nproc_per_node, config->launch.nproc_per_node == 1 ? "" : "s",
           each, config->launch.nproc_per_node == 1 ? "s" : "", digits, all, digits, physical,
           (double)host.available / nd_gib);
    return fits;
}

nd_status nd_plan_check_memory(const nd_config *config, const nd_inputs *inputs, nd_worker *worker)
{
    nd_trainer *trainer = NULL;
    const double local = (double)config->launch.nproc_per_node;
    ND_TRY(make_plan(&(planner){config, inputs, worker, 0}, config, NULL, &trainer));
    const double planned = plan_bytes(trainer), each = planned / nd_gib, all = each * local;
    nd_trainer_destroy(trainer);
    /* The workers will have the limits of this process. */
    ND_TRY(nd_worker_check_room(worker, planned, config->launch.workers,
                                config->launch.nproc_per_node));
    const nd_host_memory host = nd_host_memory_read("");
    const double physical = (double)host.physical / nd_gib;
    const double available = (double)host.available / nd_gib;
    if (host.physical > 0 && all > physical) {
        return nd_fail(ND_ERR_RESOURCE,
                       "%.0f workers with a plan of %.2f GiB each need %.1f GiB, but this host has "
                       "%.1f GiB of memory; use a smaller model, a shorter sequence, a smaller "
                       "micro-batch, parallel.recompute, more shards or more hosts (ndtrain plan "
                       "shows what each needs)",
                       local, each, all, physical);
    }
    if (host.physical > 0 && all > available) {
        nd_log_warning(
            "%.0f workers with a plan of %.2f GiB each need %.1f GiB, but of this host's "
            "%.1f GiB only %.1f are free now",
            local, each, all, physical, available);
    }
    return ND_OK;
}

/* A CPU's saves and loads copy nothing. */
static nd_status print_checkpoints(const nd_trainer *trainer)
{
    const nd_config *config = trainer->rank->config;
    const int arrays = config->optimizer.name == ND_OPTIMIZER_ADAMW ? ND_STATE_KINDS : 1;
    size_t bytes = 0;
    if (config->launch.device != ND_CHOOSE_CUDA) {
        return ND_OK;
    }
    if (config->checkpoint.interval != 0) {
        ND_TRY(nd_saver_pinned_bytes(trainer, &bytes));
        printf("checkpoints: %.2f GiB of pinned host memory a worker\n", (double)bytes / nd_gib);
    }
    if (config->checkpoint.interval != 0 || config->checkpoint.resume[0]) {
        printf("loading a checkpoint: %.2f GiB of host memory a worker\n",
               (double)nd_restore_host_bytes(trainer->model->layout, arrays) / nd_gib);
    }
    return ND_OK;
}

static void print_groups(const nd_mesh *mesh, int rank)
{
    printf("groups of rank %d (members share all other coordinates):\n", rank);
    for (nd_group_kind kind = 0; kind < ND_GROUP_COUNT; kind++) {
        const int size = nd_mesh_group_size(mesh, kind);
        const bool rare = kind == ND_GROUP_ULYSSES || kind == ND_GROUP_KV_COPIES;
        if (kind == ND_GROUP_WORLD || (rare && size == 1)) {
            continue; /* all ranks, whatever the mesh; what most jobs do not have */
        }
        const int first = nd_mesh_group_member(mesh, kind, rank, 0);
        printf("  %-13s %5d rank%s %d", nd_group_name(kind), size, size == 1 ? " " : "s", first);
        for (int m = 1; m < size && m < 4; m++) {
            printf(", %d", nd_mesh_group_member(mesh, kind, rank, m));
        }
        if (size > 4) {
            printf(", ... %d", nd_mesh_group_member(mesh, kind, rank, size - 1));
        }
        if (size > 1) {
            printf(" (first step %d)", nd_mesh_group_member(mesh, kind, rank, 1) - first);
        }
        printf(": %s\n", nd_group_rows[kind].use);
    }
}

static void print_line(void *context, const char *text)
{
    (void)context;
    printf("%s\n", text);
}

/* *fits: the plan, into the memory it is meant for. */
static nd_status print_plan(const planner *p, const nd_tuning *tuning, bool *fits)
{
    const nd_config *config = p->config;
    const nd_rank *r = &p->worker->rank;
    const nd_shape *shape = &r->shape;
    nd_trainer *trainer = NULL;
    char mesh[128], seconds[ESTIMATE_TEXT_MAX];
    nd_status status = ND_OK;
    ND_TRY(make_plan(p, config, tuning, &trainer));
    printf("mesh: %s, %d worker%s; tp peers are adjacent ranks\n",
           nd_mesh_format(&r->mesh, mesh, sizeof mesh), r->world_size,
           r->world_size == 1 ? "" : "s");
    print_groups(&r->mesh, p->rank);
    printf("model: %lld parameters, %lld layers, hidden %lld, ffn %lld, %lld heads, %lld KV "
           "heads, vocab %lld%s\n",
           (long long)nd_shape_parameters(shape), (long long)shape->layers,
           (long long)shape->hidden, (long long)shape->ffn, (long long)shape->heads,
           (long long)shape->kv_heads, (long long)shape->vocab,
           shape->tied ? ", tied embeddings" : "");
    printf("shard of a rank: %lld of them, padded\n",
           (long long)trainer->model->layout->shard_total);
    nd_precision_each_line(&trainer->model->scales, shape, print_line, NULL);
    if (trainer->tuning) {
        nd_tuning_each_line(trainer->tuning, print_line, NULL);
    } else if (config->kernels.autotune && config->train.precision == ND_PRECISION_FP8) {
        printf("autotune: a run may leave more linears in BF16; this plan has all that the "
               "filter converts in FP8\n");
    }
    printf("memory plan of rank %d, %d thread%s:\n", p->rank, r->device->threads,
           r->device->threads == 1 ? "" : "s");
    nd_memplan_print(&trainer->plan, stdout);
    *fits = print_fit(config, plan_bytes(trainer) / nd_gib);
    ND_TRY_OUT(print_checkpoints(trainer));
    ND_TRY_OUT(format_estimate(trainer, true, seconds));
    printf("estimated step, all workers: %s\n", seconds);
out:
    nd_trainer_destroy(trainer);
    return status;
}

typedef struct length_search {
    const planner *planner;
    nd_config config; /* borrows the texts of the run's own */
    double room;      /* bytes of a worker */
    bool refused;     /* the last length that did not fit is one that no run takes */
} length_search;

/* Finds whether the plan of a run with sequences of this length fits. A length that the
 * configuration refuses does not. */
static nd_status length_fits(length_search *s, int64_t length, bool *fits)
{
    nd_trainer *trainer = NULL;
    s->config.train.sequence_length = length;
    nd_status status = make_changed_plan(s->planner, &s->config, &trainer);
    const bool refused = status == ND_ERR_CONFIG;
    *fits = status == ND_OK && plan_bytes(trainer) <= s->room;
    s->refused = *fits ? s->refused : refused;
    nd_trainer_destroy(trainer);
    if (refused) {
        nd_error_clear();
    }
    return refused ? ND_OK : status;
}

static nd_status print_longest(length_search *s, const char *where)
{
    const nd_mesh *mesh = &s->config.resolved_mesh;
    const int64_t cp = mesh->size[ND_AXIS_CP], tp = mesh->size[ND_AXIS_TP];
    const int64_t rows = s->config.train.precision == ND_PRECISION_FP8 ? 16 : 1;
    const int64_t chunks = cp > 1 ? 2 : 1, most = s->planner->inputs->shape.max_positions;
    int64_t local = chunks; /* tokens of a rank: a multiple of tp's ranks, and of rows of FP8 */
    while (local % tp != 0 || local % rows != 0) {
        local += chunks;
    }
    const int64_t unit = cp * local;
    int64_t low = 0, high = most / unit; /* in units: what fits, and the most there is */
    for (int tries = 0; low < high; tries++) {
        /* The shortest and the longest first, since often none or all fit. */
        const int64_t middle = tries == 0 ? 1 : tries == 1 ? high : low + (high - low + 1) / 2;
        bool fits = false;
        ND_TRY(length_fits(s, middle * unit, &fits));
        low = fits ? middle : low;
        high = fits ? high : middle - 1;
    }
    const int64_t length = low * unit;
    if (length == 0) {
        printf("longest sequence that fits %s: none\n", where);
        return ND_OK;
    }
    printf("longest sequence that fits %s: %lld tokens%s\n", where, (long long)length,
           length + unit > most ? ", as many as the model has positions"
           : s->refused         ? "; a longer one is refused"
                                : "");
    return ND_OK;
}

/* On each kind of GPU, or on this host. */
static nd_status print_longest_sequences(const planner *p)
{
    const bool cuda = p->config->launch.device == ND_CHOOSE_CUDA;
    const double local = (double)p->config->launch.nproc_per_node;
    length_search s = {.planner = p, .config = *p->config};
    for (int i = 0; i < (cuda ? ND_RATED_GPUS : 1); i++) {
        char where[64];
        snprintf(where, sizeof where, cuda ? "one %s" : "this host", nd_gpu_rates[i].name);
        s.room =
            cuda ? nd_gpu_rates[i].gib * nd_gib : (double)nd_host_memory_read("").physical / local;
        ND_TRY(print_longest(&s, where));
    }
    return ND_OK;
}

/* --explain. */

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

/* Prints how long each way of exchanging keys or heads would make a rank wait. */
static void print_exchanges(const planner *p)
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
    char step_text[ESTIMATE_TEXT_MAX];
    const double bytes = plan_bytes(trainer);
    ND_TRY(format_estimate(trainer, false, step_text));
    printf("  %-64s %9.3f GiB %+6.1f %%  %s\n", name, bytes / nd_gib, (bytes / own - 1) * 100,
           step_text);
    return ND_OK;
}

/* The run with other values of one key or two; they are already in `changed`. A setting that cannot
 * be is a row that says why. */
static nd_status try_keys(const planner *p, double own, nd_config *changed, const char *key,
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
    status = make_changed_plan(p, changed, &trainer);
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
static nd_status print_changes(const planner *p, double own)
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

/* Prints why a buffer is as large as it is, where a step's time goes, and what other settings would
 * need. */
static nd_status explain(const planner *p)
{
    nd_trainer *trainer = NULL;
    double own = 0;
    nd_status status = ND_OK;
    print_reasons();
    print_exchanges(p);
    ND_TRY(make_plan(p, p->config, NULL, &trainer));
    ND_TRY_OUT(explain_step(trainer));
    own = plan_bytes(trainer);
    printf("what other settings would need, each alone, of a worker and by the same estimate; "
           "further workers are on further hosts like this one:\n");
    ND_TRY_OUT(print_row(own, "as it is", trainer));
out:
    nd_trainer_destroy(trainer);
    return status == ND_OK ? print_changes(p, own) : status;
}

static nd_status plan(const nd_command_call *call)
{
    const nd_config *config = call->config;
    nd_worker *worker = call->worker;
    nd_inputs inputs = {0};
    nd_tuning *tuning = NULL;
    nd_status status = ND_OK;
    const int world = nd_mesh_world_size(&config->resolved_mesh);
    const bool cuda = config->launch.device == ND_CHOOSE_CUDA;
    const char *path = config->data.path;
    const bool rows = config->data.format == ND_DATA_JSONL ||
                      (config->data.format == ND_DATA_AUTO &&
                       (strstr(path, ".jsonl") || strstr(path, ".ndjson")));
    bool fits = true;
    const planner p = {config, &inputs, worker, (int)call->line->values[ND_PLAN_RANK].whole};
    if (p.rank >= world) {
        return nd_fail(ND_ERR_CONFIG, "--rank %d is not in the mesh; use a rank from 0 to %d",
                       p.rank, world - 1);
    }
    ND_TRY_OUT(nd_inputs_open_model(config, &inputs));
    ND_TRY_OUT(nd_tuning_check(config, &inputs.shape, cuda, &tuning));
    ND_TRY_OUT(nd_worker_open_planner(config, worker));
    const nd_mesh mesh = nd_shape_mesh(&inputs.shape, config);
    status = nd_trainer_check_limits(worker->rank.ops, config, &mesh, &inputs.shape);
    /* A job that no host could address has no plan to print. */
    ND_TRY_OUT(status == ND_ERR_RESOURCE ? ND_ANSWER_NO : status);
    nd_banner_warn_of_documents(config, &inputs.shape, cuda, NULL);
    if (config->data.documents == ND_DOCUMENTS_AUTO && rows) { /* separate once they are open */
        nd_log_info("data.documents is auto, and planned as join; for rows with prompts plan with "
                    "--documents separate");
    }
    ND_TRY_OUT(print_plan(&p, tuning, &fits));
    ND_TRY_OUT(print_longest_sequences(&p));
    ND_TRY_OUT(call->line->values[ND_PLAN_EXPLAIN].given ? explain(&p) : ND_OK);
    if (!fits) {
        status = nd_fail(ND_ANSWER_NO,
                         "the job does not fit; plan --explain prints what other settings need");
    }
out:
    worker->rank.config = config; /* changed ones end before */
    nd_tuning_destroy(tuning);
    nd_inputs_close(&inputs);
    return status;
}

const nd_command nd_command_plan = {.id = ND_COMMAND_PLAN, .run = plan};

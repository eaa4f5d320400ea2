// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands/plan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/process.h"
#include "runtime/comm/comm.h"
#include "runtime/device/affinity.h"
#include "runtime/device/host_memory.h"
#include "trainer/checkpoint/saver.h"
#include "trainer/commands/gpu_rates.h"
#include "trainer/precision/precision.h"
#include "trainer/report/report.h"
#include "trainer/step/step.h"
#include "trainer/tune/tune.h"
#include "trainer/worker/worker.h"

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
static nd_status print_plan(const nd_planner *p, const nd_tuning *tuning, bool *fits)
{
    const nd_config *config = p->config;
    const nd_rank *r = &p->worker->rank;
    const nd_shape *shape = &r->shape;
    nd_trainer *trainer = NULL;
    char mesh[128], estimate[ND_ESTIMATE_TEXT_MAX];
    nd_status status = ND_OK;
    ND_TRY(nd_plan_make(p, config, tuning, &trainer));
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
    *fits = print_fit(config, nd_plan_bytes(trainer) / nd_gib);
    ND_TRY_OUT(print_checkpoints(trainer));
    ND_TRY_OUT(nd_estimate_format(trainer, true, estimate));
    printf("estimated step, all workers: %s\n", estimate);
out:
    nd_trainer_destroy(trainer);
    return status;
}

typedef struct length_search {
    const nd_planner *planner;
    nd_config config; /* borrows the texts of the run's own */
    double room;      /* bytes of a worker */
    bool refused;     /* the last length that did not fit is one that no run takes */
} length_search;

/* Whether the plan of a run with sequences of this length fits. A length that the configuration
 * refuses does not. */
static nd_status length_fits(length_search *s, int64_t length, bool *fits)
{
    nd_trainer *trainer = NULL;
    s->config.train.sequence_length = length;
    nd_status status = nd_plan_make_changed(s->planner, &s->config, &trainer);
    const bool refused = status == ND_ERR_CONFIG;
    *fits = status == ND_OK && nd_plan_bytes(trainer) <= s->room;
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
static nd_status print_longest_sequences(const nd_planner *p)
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
    const nd_planner p = {config, &inputs, worker, (int)call->line->values[ND_PLAN_RANK].whole};
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
    ND_TRY_OUT(call->line->values[ND_PLAN_EXPLAIN].given ? nd_plan_explain(&p) : ND_OK);
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

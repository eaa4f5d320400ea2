// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands/command.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/process.h"
#include "runtime/comm/comm.h"
#include "runtime/device/affinity.h"
#include "runtime/device/host_memory.h"
#include "trainer/checkpoint/restore.h"
#include "trainer/checkpoint/snapshot.h"
#include "trainer/commands/estimate.h"
#include "trainer/commands/gpu_rates.h"
#include "trainer/precision/precision.h"
#include "trainer/report/report.h"
#include "trainer/step/step.h"
#include "trainer/tune/tune.h"
#include "trainer/worker/worker.h"

static double planned_bytes(const nd_trainer *trainer)
{
    return (double)(trainer->plan.total + trainer->plan.external);
}

/* Decimals of GiB, of two sizes that may be almost equal. */
static int decimals(double a, double b, int usual)
{
    return fabs(a - b) < 0.1 ? 6 : usual;
}

/* The plan for each kind of GPU, since any machine can plan any job. *fits: for one of them. */
static void print_fit_of_gpus(FILE *out, double each, bool *fits)
{
    *fits = false;
    for (int i = 0; i < ND_RATED_GPUS; i++) {
        const double gib = nd_gpu_rates[i].gib;
        const bool room = each <= gib;
        fprintf(out, "%s one %s: %.*f of its %.1f GiB\n", room ? "fits" : "does not fit",
                nd_gpu_rates[i].name, decimals(each, gib, 2), each, gib);
        *fits |= room;
    }
}

/* The plans of all workers of this host beside its memory. */
static void print_fit(FILE *out, const nd_trainer *trainer, bool *fits)
{
    const nd_config *config = trainer->rank->config;
    double each = planned_bytes(trainer) / nd_gib;
    if (config->launch.device == ND_CHOOSE_CUDA) {
        print_fit_of_gpus(out, each, fits);
        return;
    }
    nd_host_memory host = nd_host_memory_read("");
    double all = each * (double)config->launch.nproc_per_node;
    const double physical = (double)host.physical / nd_gib;
    const int digits = decimals(all, physical, 1);
    *fits = all <= physical;
    fprintf(out,
            "%s: %lld worker%s of %.2f GiB take %.*f of its %.*f GiB, of which %.1f are free\n",
            !*fits                                  ? "does not fit this host"
            : all > (double)host.available / nd_gib ? "fits this host once other programs give way"
                                                    : "fits this host",
            (long long)config->launch.nproc_per_node, config->launch.nproc_per_node == 1 ? "" : "s",
            each, digits, all, digits, physical, (double)host.available / nd_gib);
}

/* A CPU's saves and loads copy nothing. */
static nd_status print_checkpoints(FILE *out, const nd_trainer *trainer)
{
    const nd_config *config = trainer->rank->config;
    size_t bytes = 0;
    int arrays = config->optimizer.name == ND_OPTIMIZER_ADAMW ? ND_STATE_KINDS : 1;
    if (config->launch.device == ND_CHOOSE_CUDA && config->checkpoint.interval != 0) {
        ND_TRY(nd_snapshot_pinned_bytes(trainer, &bytes));
        fprintf(out, "checkpoints: %.2f GiB of pinned host memory a worker\n",
                (double)bytes / nd_gib);
    }
    if (config->launch.device == ND_CHOOSE_CUDA &&
        (config->checkpoint.interval != 0 || config->checkpoint.resume[0])) {
        fprintf(out, "loading a checkpoint: %.2f GiB of host memory a worker\n",
                (double)nd_restore_host_bytes(trainer->model->layout, arrays) / nd_gib);
    }
    return ND_OK;
}

static void print_groups(FILE *out, const nd_mesh *mesh, int rank)
{
    fprintf(out, "groups of rank %d (members share all other coordinates):\n", rank);
    for (nd_group_kind kind = 0; kind < ND_GROUP_COUNT; kind++) {
        int size = nd_mesh_group_size(mesh, kind);
        const bool rare = kind == ND_GROUP_ULYSSES || kind == ND_GROUP_KV_COPIES;
        if (kind == ND_GROUP_WORLD || (rare && size == 1)) {
            continue; /* all ranks, whatever the mesh; what most jobs do not have */
        }
        int first = nd_mesh_group_member(mesh, kind, rank, 0);
        int stride = size > 1 ? nd_mesh_group_member(mesh, kind, rank, 1) - first : 1;
        fprintf(out, "  %-13s %5d rank%s ", nd_group_name(kind), size, size == 1 ? " " : "s");
        fprintf(out, "%d", first);
        for (int m = 1; m < size && m < 4; m++) {
            fprintf(out, ", %d", nd_mesh_group_member(mesh, kind, rank, m));
        }
        fprintf(out, size > 4 ? ", ... %d" : "%.0d",
                size > 4 ? nd_mesh_group_member(mesh, kind, rank, size - 1) : 0);
        fprintf(out, size > 1 ? " (first step %d): %s\n" : "%.0d: %s\n", size > 1 ? stride : 0,
                nd_group_use(kind));
    }
}

static void print_line(void *context, const char *text)
{
    fprintf(context, "%s\n", text);
}

/* Plans the trainer of one rank; allocates nothing. */
static nd_status plan_rank(const nd_config *config, const nd_inputs *inputs, nd_worker *worker,
                           const nd_tuning *tuning, int rank, nd_trainer **out)
{
    nd_rank *r = &worker->rank;
    r->rank = rank;
    r->mesh = nd_shape_mesh(&inputs->shape, config);
    r->world_size = nd_mesh_world_size(&r->mesh);
    r->host_ranks = (int)config->launch.nproc_per_node;
    r->coord = nd_mesh_coord_of(&r->mesh, rank);
    r->config = config;
    r->shape = inputs->shape;
    r->device = worker->device;
    return nd_trainer_create(r, tuning, out);
}

nd_status nd_plan_check_memory(const nd_config *config, const nd_inputs *inputs, nd_worker *worker)
{
    nd_trainer *trainer = NULL;
    double local = (double)config->launch.nproc_per_node;
    ND_TRY(plan_rank(config, inputs, worker, NULL, 0, &trainer));
    double planned = planned_bytes(trainer), each = planned / nd_gib, all = each * local;
    nd_trainer_destroy(trainer);
    /* The workers will have the limits of this process. */
    ND_TRY(nd_worker_check_room(worker, planned, config->launch.workers,
                                config->launch.nproc_per_node));
    nd_host_memory host = nd_host_memory_read("");
    double physical = (double)host.physical / nd_gib, available = (double)host.available / nd_gib;
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

static nd_status print_estimate(FILE *out, const nd_trainer *trainer)
{
    nd_estimate list[ND_ESTIMATES_MAX];
    int count = 0;
    ND_TRY(nd_estimate_steps(trainer, list, &count));
    fprintf(out, "estimated step, all workers: ");
    nd_estimates_print(out, list, count);
    return ND_OK;
}

/* rank: whose groups and plan are printed. *fits: the plan, into the memory it is meant for. */
static nd_status print_plan(FILE *out, const nd_config *config, const nd_inputs *inputs,
                            nd_worker *worker, const nd_tuning *tuning, int rank, bool *fits)
{
    nd_rank *r = &worker->rank;
    nd_trainer *trainer = NULL;
    char mesh[128];
    nd_status status = ND_OK;
    ND_TRY(plan_rank(config, inputs, worker, tuning, rank, &trainer));
    fprintf(out, "mesh: %s, %d worker%s; tp peers are adjacent ranks\n",
            nd_mesh_format(&r->mesh, mesh, sizeof mesh), r->world_size,
            r->world_size == 1 ? "" : "s");
    print_groups(out, &r->mesh, rank);
    fprintf(out,
            "model: %lld parameters, %lld layers, hidden %lld, ffn %lld, %lld heads, %lld KV "
            "heads, vocab %lld%s\n",
            (long long)nd_shape_parameters(&r->shape), (long long)r->shape.layers,
            (long long)r->shape.hidden, (long long)r->shape.ffn, (long long)r->shape.heads,
            (long long)r->shape.kv_heads, (long long)r->shape.vocab,
            r->shape.tied ? ", tied embeddings" : "");
    fprintf(out, "shard of a rank: %lld of them, padded\n",
            (long long)trainer->model->layout->shard_total);
    nd_precision_each_line(&trainer->model->scales, &r->shape, print_line, out);
    if (trainer->tuning) {
        nd_tuning_each_line(trainer->tuning, print_line, out);
    } else if (config->kernels.autotune && config->train.precision == ND_PRECISION_FP8) {
        fprintf(out, "autotune: a run may leave more linears in BF16; this plan has all that the "
                     "filter converts in FP8\n");
    }
    fprintf(out, "memory plan of rank %d, %d thread%s:\n", rank, r->device->threads,
            r->device->threads == 1 ? "" : "s");
    nd_memplan_print(&trainer->plan, out);
    print_fit(out, trainer, fits);
    status = print_checkpoints(out, trainer);
    status = status == ND_OK ? print_estimate(out, trainer) : status;
    nd_trainer_destroy(trainer);
    return status;
}

/* --explain: why a buffer is as large as it is, and what other settings would need. */

static void print_reasons(FILE *out)
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
    fprintf(out, "why:\n");
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) {
        fprintf(out, "  %-22s %s\n", reasons[i][0], reasons[i][1]);
    }
}

/* What each way of exchanging keys or heads would make a rank wait for. */
static void print_exchanges(FILE *out, const nd_shape *shape, const nd_config *config)
{
    nd_cp_exchange list[ND_CP_EXCHANGES_MAX], own = nd_cp_exchange_of(shape, config);
    const nd_mesh *mesh = &config->resolved_mesh;
    char name[64];
    if (mesh->size[ND_AXIS_CP] == 1) {
        return;
    }
    const int count = nd_cp_list_exchanges(shape, config, list);
    fprintf(out,
            "attention over the %d ranks of mesh.cp: %s%s; GB that a worker sends for it in a step "
            "and waits for at once:\n",
            mesh->size[ND_AXIS_CP], nd_cp_exchange_format(&own, mesh, name, sizeof name),
            config->parallel.cp_comm == ND_CP_AUTO ? ", the least as parallel.cp_comm auto asks"
                                                   : "");
    for (int i = 0; i < count; i++) {
        fprintf(out, "  %-26s %.4g\n", nd_cp_exchange_format(&list[i], mesh, name, sizeof name),
                list[i].exposed_bytes * 1e-9);
    }
}

/* The run with some other settings. */
typedef struct variant {
    char name[96];
    nd_config config; /* borrows the texts of the run's own */
} variant;

enum { VARIANTS_MAX = 12 };

static variant *add_variant(variant *list, int *count, const nd_config *config)
{
    variant *v = &list[(*count)++];
    ND_ASSERT(*count <= VARIANTS_MAX);
    v->config = *config;
    return v;
}

/* Lists the changes that the run can make and that leave what is learned as it is. */
static int list_variants(const nd_config *config, variant list[VARIANTS_MAX])
{
    static const char *const recompute[] = {"none", "selective", "all_but_attention", "full"};
    static const nd_axis axes[] = {ND_AXIS_DP_SHARD, ND_AXIS_CP, ND_AXIS_TP};
    int count = 0;
    int64_t samples = config->train.micro_batch_size;
    for (int i = 0; i < (int)(sizeof recompute / sizeof *recompute); i++) {
        if ((int)config->parallel.recompute != i) {
            variant *v = add_variant(list, &count, config);
            v->config.parallel.recompute = (nd_recompute)i;
            snprintf(v->name, sizeof v->name, "parallel.recompute: %s", recompute[i]);
        }
    }
    variant *v = add_variant(list, &count, config);
    v->config.parallel.tiled_mlp = config->parallel.tiled_mlp == -1 ? 1 : -1;
    snprintf(v->name, sizeof v->name, "parallel.tiled_mlp: %lld",
             (long long)v->config.parallel.tiled_mlp);
    v = add_variant(list, &count, config);
    v->config.parallel.reshard_after_forward = !config->parallel.reshard_after_forward;
    snprintf(v->name, sizeof v->name, "parallel.reshard_after_forward: %s",
             v->config.parallel.reshard_after_forward ? "true" : "false");
    for (nd_cp_comm c = 0; c <= ND_CP_ULYSSES && config->mesh.cp > 1; c++) {
        static const char *const names[] = {"allgather", "ring", "ulysses"};
        if (c != config->parallel.cp_comm || config->parallel.ulysses > 1) {
            v = add_variant(list, &count, config);
            v->config.parallel.cp_comm = c;
            v->config.parallel.ulysses = 1;
            snprintf(v->name, sizeof v->name, "parallel.cp_comm: %s", names[c]);
        }
    }
    if (samples > 1) {
        v = add_variant(list, &count, config);
        v->config.train.micro_batch_size = 1;
        v->config.train.gradient_accumulation_steps *= samples;
        snprintf(v->name, sizeof v->name,
                 "train.micro_batch_size: 1, train.gradient_accumulation_steps: %lld",
                 (long long)v->config.train.gradient_accumulation_steps);
    }
    for (int i = 0; i < 3; i++) {
        v = add_variant(list, &count, config);
        int64_t *const sizes[] = {&v->config.mesh.dp_shard, &v->config.mesh.cp, &v->config.mesh.tp};
        *sizes[i] *= 2;
        v->config.launch.workers *= 2;
        snprintf(v->name, sizeof v->name, "mesh.%s: %lld, on %lld workers", nd_axis_name(axes[i]),
                 (long long)*sizes[i], (long long)v->config.launch.workers);
    }
    return count;
}

/* Refuses what a run with these settings would be refused for before it plans anything. */
static nd_status check_variant(variant *v, const nd_inputs *inputs)
{
    nd_config *c = &v->config;
    const int64_t per_node = c->launch.nproc_per_node;
    c->launch.nproc_per_node = 0; /* else it contradicts the further workers */
    ND_TRY(nd_config_resolve(c));
    c->launch.nproc_per_node = per_node; /* the further workers are on further hosts */
    return nd_shape_check_mesh(&inputs->shape, &c->resolved_mesh, c->train.micro_batch_size,
                               c->train.sequence_length);
}

static nd_status print_variant(FILE *out, const char *name, const nd_trainer *trainer, double own)
{
    nd_estimate list[ND_ESTIMATES_MAX];
    int count = 0;
    double bytes = planned_bytes(trainer);
    ND_TRY(nd_estimate_steps(trainer, list, &count));
    fprintf(out, "  %-64s %9.3f GiB %+6.1f %%  ", name, bytes / nd_gib, (bytes / own - 1) * 100);
    nd_estimates_print(out, list, 1);
    return ND_OK;
}

/* A setting that cannot be is a row that says why. */
static void try_variant(FILE *out, variant *v, const nd_inputs *inputs, nd_worker *worker, int rank,
                        double own)
{
    nd_trainer *trainer = NULL;
    nd_status status = check_variant(v, inputs);
    status = status == ND_OK ? plan_rank(&v->config, inputs, worker, NULL, rank, &trainer) : status;
    status = status == ND_OK ? print_variant(out, v->name, trainer, own) : status;
    if (status != ND_OK) {
        fprintf(out, "  %-64s not possible: %s\n", v->name, nd_error_last()->message);
        nd_error_clear();
    }
    nd_trainer_destroy(trainer);
}

/* The run as it is; *own: the bytes of its plan. */
static nd_status print_own(FILE *out, const nd_config *config, const nd_inputs *inputs,
                           nd_worker *worker, int rank, double *own)
{
    nd_trainer *trainer = NULL;
    nd_status status = ND_OK;
    ND_TRY(plan_rank(config, inputs, worker, NULL, rank, &trainer));
    ND_TRY_OUT(nd_estimates_explain(out, trainer));
    *own = planned_bytes(trainer);
    fprintf(out,
            "what other settings would need, each alone, of a worker and by the same estimate; "
            "further workers are on further hosts like this one:\n");
    ND_TRY_OUT(print_variant(out, "as it is", trainer, *own));
out:
    nd_trainer_destroy(trainer);
    return status;
}

static nd_status print_variants(FILE *out, const nd_config *config, const nd_inputs *inputs,
                                nd_worker *worker, int rank)
{
    variant *list = NULL;
    double own = 0.0;
    ND_TRY(print_own(out, config, inputs, worker, rank, &own));
    ND_TRY(ND_ALLOC(VARIANTS_MAX, &list));
    const int count = list_variants(config, list);
    for (int i = 0; i < count; i++) {
        try_variant(out, &list[i], inputs, worker, rank, own);
    }
    worker->rank.config = config; /* those of the list end here */
    free(list);
    return ND_OK;
}

/* The longest sequence. */

typedef struct length_search {
    const nd_inputs *inputs;
    nd_worker *worker;
    int rank;
    variant *v;
    double room;  /* bytes of a worker */
    bool refused; /* the last length that did not fit is one that no run takes */
} length_search;

/* Whether the plan of a run with sequences of this length fits. A length that the configuration
 * refuses does not. */
static nd_status length_fits(length_search *s, int64_t length, bool *fits)
{
    nd_trainer *trainer = NULL;
    s->v->config.train.sequence_length = length;
    nd_status status = check_variant(s->v, s->inputs);
    if (status == ND_OK) {
        status = plan_rank(&s->v->config, s->inputs, s->worker, NULL, s->rank, &trainer);
    }
    const bool refused = status == ND_ERR_CONFIG;
    *fits = status == ND_OK && planned_bytes(trainer) <= s->room;
    s->refused = *fits ? s->refused : refused;
    nd_trainer_destroy(trainer);
    if (refused) {
        nd_error_clear();
    }
    return refused ? ND_OK : status;
}

/* What the length of a sequence must be a multiple of: two chunks a rank of cp, tokens of a tp
 * rank, rows of FP8 products. */
static int64_t length_unit(const nd_config *config)
{
    const nd_mesh *mesh = &config->resolved_mesh;
    const int64_t cp = mesh->size[ND_AXIS_CP], tp = mesh->size[ND_AXIS_TP];
    const int64_t rows = config->train.precision == ND_PRECISION_FP8 ? 16 : 1;
    int64_t local = cp > 1 ? 2 : 1; /* tokens of a rank */
    while (local % tp != 0 || local % rows != 0) {
        local += cp > 1 ? 2 : 1;
    }
    return cp * local;
}

/* *length: the longest one, at most `most`; 0: none fits. */
static nd_status find_longest(length_search *s, int64_t unit, int64_t most, int64_t *length)
{
    int64_t low = 0, high = most / unit; /* in units: what fits, and the most there is */
    for (int tries = 0; low < high; tries++) {
        /* The shortest and the longest first, since often none or all fit. */
        const int64_t middle = tries == 0 ? 1 : tries == 1 ? high : low + (high - low + 1) / 2;
        bool fits = false;
        ND_TRY(length_fits(s, middle * unit, &fits));
        low = fits ? middle : low;
        high = fits ? high : middle - 1;
    }
    *length = low * unit;
    return ND_OK;
}

static nd_status print_longest(FILE *out, length_search *s, const char *where)
{
    const int64_t unit = length_unit(&s->v->config), most = s->inputs->shape.max_positions;
    int64_t length = 0;
    ND_TRY(find_longest(s, unit, most, &length));
    if (length == 0) {
        fprintf(out, "longest sequence that fits %s: none\n", where);
        return ND_OK;
    }
    fprintf(out, "longest sequence that fits %s: %lld tokens%s\n", where, (long long)length,
            length + unit > most ? ", as many as the model has positions"
            : s->refused         ? "; a longer one is refused"
                                 : "");
    return ND_OK;
}

/* On each kind of GPU, or on this host. */
static nd_status print_longest_sequences(FILE *out, const nd_config *config,
                                         const nd_inputs *inputs, nd_worker *worker, int rank)
{
    const bool cuda = config->launch.device == ND_CHOOSE_CUDA;
    length_search s = {.inputs = inputs, .worker = worker, .rank = rank};
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &s.v));
    s.v->config = *config;
    for (int i = 0; i < (cuda ? ND_RATED_GPUS : 1) && status == ND_OK; i++) {
        char where[64];
        snprintf(where, sizeof where, cuda ? "one %s" : "this host", nd_gpu_rates[i].name);
        s.room =
            cuda ? nd_gpu_rates[i].gib * nd_gib
                 : (double)nd_host_memory_read("").physical / (double)config->launch.nproc_per_node;
        status = print_longest(out, &s, where);
    }
    worker->rank.config = config; /* the variant ends here */
    free(s.v);
    return status;
}

static nd_status begin(nd_worker *worker)
{
    return nd_identity_read(&worker->identity);
}

/* A job that no host could address has no plan to print. */
static nd_status check_limits(const nd_config *config, const nd_inputs *inputs,
                              const nd_worker *worker)
{
    const nd_mesh mesh = nd_shape_mesh(&inputs->shape, config);
    const nd_status status =
        nd_trainer_check_limits(worker->rank.ops, config, &mesh, &inputs->shape);
    return status == ND_ERR_RESOURCE ? ND_ANSWER_NO : status;
}

/* Of rows with prompts, auto is separate once they are open. */
static bool names_rows(const nd_config *config)
{
    const nd_data_format format = config->data.format;
    const char *path = config->data.path;
    return format == ND_DATA_JSONL ||
           (format == ND_DATA_AUTO && (strstr(path, ".jsonl") || strstr(path, ".ndjson")));
}

static nd_status plan(const nd_command_call *call)
{
    const nd_config *config = call->config;
    nd_worker *worker = call->worker;
    nd_inputs inputs = {0};
    nd_tuning *tuning = NULL;
    nd_status status = ND_OK;
    int world = nd_mesh_world_size(&config->resolved_mesh);
    bool cuda = config->launch.device == ND_CHOOSE_CUDA, fits = true;
    const int rank = (int)call->line->values[ND_PLAN_RANK].whole;
    if (rank >= world) {
        return nd_fail(ND_ERR_CONFIG, "--rank %d is not in the mesh; use a rank from 0 to %d", rank,
                       world - 1);
    }
    ND_TRY_OUT(nd_inputs_open_model(config, &inputs));
    ND_TRY_OUT(nd_tuning_check(config, &inputs.shape, cuda, &tuning));
    ND_TRY_OUT(nd_worker_open_planner(config, worker));
    ND_TRY_OUT(check_limits(config, &inputs, worker));
    nd_banner_warn_of_documents(config, &inputs.shape, cuda, NULL);
    if (config->data.documents == ND_DOCUMENTS_AUTO && names_rows(config)) {
        nd_log_info("data.documents is auto, and planned as join; for rows with prompts plan with "
                    "--documents separate");
    }
    ND_TRY_OUT(print_plan(stdout, config, &inputs, worker, tuning, rank, &fits));
    ND_TRY_OUT(print_longest_sequences(stdout, config, &inputs, worker, rank));
    if (call->line->values[ND_PLAN_EXPLAIN].given) {
        print_reasons(stdout);
        print_exchanges(stdout, &inputs.shape, config);
        ND_TRY_OUT(print_variants(stdout, config, &inputs, worker, rank));
    }
    if (!fits) {
        status = nd_fail(ND_ANSWER_NO,
                         "the job does not fit; plan --explain prints what other settings need");
    }
out:
    nd_tuning_destroy(tuning);
    nd_inputs_close(&inputs);
    return status;
}

const nd_command nd_command_plan = {.id = ND_COMMAND_PLAN, .begin = begin, .run = plan};

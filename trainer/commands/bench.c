// SPDX-License-Identifier: Apache-2.0
/*
 * `ndtrain bench`: what FP8 gains on this machine. --products times single linears, --layer a whole
 * layer on a mesh. Both print BF16 and every recipe.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "runtime/base/process.h"
#include "trainer/commands/generate.h"
#include "trainer/step/step.h"
#include "trainer/tune/timing.h"

enum { SIZES_MAX = 256, RECIPES = ND_FP8_RECIPE_COUNT, ROUNDS = 3 };

typedef struct bench_call {
    bool products, layer, jsonl;
    nd_linear_extents sizes[SIZES_MAX];
    int size_count;
    int64_t repeats;
} bench_call;

/* Flags. */

static nd_status add_size(bench_call *o, nd_linear_extents size)
{
    for (int i = 0; i < o->size_count; i++) {
        const nd_linear_extents *s = &o->sizes[i];
        if (s->m == size.m && s->k == size.k && s->n == size.n) {
            return ND_OK;
        }
    }
    if (o->size_count == SIZES_MAX) {
        return nd_fail(ND_ERR_CONFIG, "--sizes has more than %d sizes", SIZES_MAX);
    }
    o->sizes[o->size_count++] = size;
    return ND_OK;
}

/* A number of 16 up to 2^24, and what stands behind it. */
static bool read_extent(const char **text, char end, int64_t *out)
{
    char *rest;
    errno = 0;
    if (**text < '0' || **text > '9') {
        return false;
    }
    *out = strtoll(*text, &rest, 10);
    if (errno != 0 || *out < 16 || *out > 1 << 24 || *out % 16 != 0 ||
        (*rest != end && !(end == ',' && *rest == '\0'))) {
        return false;
    }
    *text = *rest ? rest + 1 : rest;
    return true;
}

/* "1024x4096x14336,512x512x512" */
static nd_status read_sizes(bench_call *o, const char *value)
{
    const char *at = value;
    do {
        nd_linear_extents size;
        if (!read_extent(&at, 'x', &size.m) || !read_extent(&at, 'x', &size.k) ||
            !read_extent(&at, ',', &size.n)) {
            return nd_fail(
                ND_ERR_CONFIG,
                "--sizes is \"%.60s\"; it must be MxKxN, or several of them with commas "
                "between, each a multiple of 16 up to 16777216: tokens x inputs x outputs",
                value);
        }
        ND_TRY(add_size(o, size));
    } while (*at);
    return ND_OK;
}

static nd_status parse(const nd_command_flags *line, bench_call *o)
{
    const nd_flag_value *v = line->values;
    *o = (bench_call){.products = v[ND_BENCH_PRODUCTS].given,
                      .layer = v[ND_BENCH_LAYER].given,
                      .jsonl = v[ND_BENCH_JSONL].given,
                      .repeats = v[ND_BENCH_REPEATS].whole};
    ND_TRY(v[ND_BENCH_SIZES].given ? read_sizes(o, v[ND_BENCH_SIZES].text) : ND_OK);
    if (o->products == o->layer) {
        return nd_fail(ND_ERR_CONFIG, "give --products, which times single linears, or --layer, "
                                      "which times a layer on a mesh");
    }
    if (o->layer && o->size_count > 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "--sizes is for --products; the sizes of a layer are those of "
                       "the model, --model-config");
    }
    return o->products && v[ND_BENCH_REPEATS].given
               ? nd_fail(ND_ERR_CONFIG, "--repeats is for --layer; a product's time is the least "
                                        "of three medians")
               : ND_OK;
}

static nd_status check_flags(const nd_command_flags *line)
{
    bench_call o;
    return parse(line, &o);
}

/* Products. */

/* The linears of the model, as one rank of the mesh has them. */
static nd_status sizes_of_model(const nd_config *config, const nd_shape *shape, bench_call *o)
{
    const nd_mesh *mesh = &config->resolved_mesh;
    const nd_dims d = nd_dims_of(shape, mesh, (nd_coord){{0}}, config, false);
    for (int i = 0; i < ND_LINEAR_COUNT; i++) {
        nd_linear_extents size = {.m = d.T};
        nd_linear_sizes(shape, i, mesh->size[ND_AXIS_TP], &size.n, &size.k);
        ND_TRY(add_size(o, size));
    }
    return ND_OK;
}

static nd_status print_product(const bench_call *o, nd_linear_extents e, const nd_linear_times *t)
{
    if (o->jsonl) {
        json_t *row = json_object();
        nd_json_set(&row, "m", json_integer(e.m));
        nd_json_set(&row, "k", json_integer(e.k));
        nd_json_set(&row, "n", json_integer(e.n));
        nd_json_set(&row, "bf16_seconds", json_real(t->bf16));
        for (int i = 0; i < RECIPES; i++) {
            char key[64];
            snprintf(key, sizeof key, "%s_seconds", nd_fp8_recipe_name((nd_fp8_recipe)i));
            nd_json_set(&row, key, json_real(t->fp8[i]));
        }
        return nd_print_row(row);
    }
    printf("%7lld %7lld %7lld %10.3f %9.1f", (long long)e.m, (long long)e.k, (long long)e.n,
           1e3 * t->bf16, 1e-9 * nd_linear_flops(e) / t->bf16);
    for (int i = 0; i < RECIPES; i++) {
        printf(" %11.3f %6.2f", 1e3 * t->fp8[i], t->bf16 / t->fp8[i]);
    }
    printf("\n");
    return nd_process_flush_output();
}

/* What multiplies on a CPU. */
static void print_cpu(const nd_rank *r)
{
    if (!nd_rank_is_gpu(r)) {
        printf("%s; %s\n", nd_ops_machine(r->device), nd_ops_products(r->device));
    }
}

static void print_products_head(const nd_rank *r, const nd_mesh *mesh)
{
    char text[128];
    if (mesh && nd_mesh_world_size(mesh) > 1) {
        printf("the linears that a rank of mesh %s has, timed by one worker alone\n",
               nd_mesh_format(mesh, text, sizeof text));
    }
    print_cpu(r);
    printf("one linear, forward and backward, on %s with %d thread%s; milliseconds, and BF16's "
           "time over FP8's\n%7s %7s %7s %10s %9s",
           nd_ops_machine(r->device), r->device->threads, r->device->threads == 1 ? "" : "s", "M",
           "K", "N", "bf16", "GFLOP/s");
    for (int i = 0; i < RECIPES; i++) {
        printf(" %11.11s %6s",
               i == ND_FP8_ROWWISE_GW_HP ? "rowwise_gw" : nd_fp8_recipe_name((nd_fp8_recipe)i),
               "x");
    }
    printf("\n");
}

static nd_status check_alone(const bench_call *o, int64_t workers)
{
    return o->layer || workers == 1
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "--products times one worker, but this job has %lld; start it with "
                         "`ndtrain bench --products`, which takes any mesh, or use --layer",
                         (long long)workers);
}

static nd_status has_room(void *context, double bytes)
{
    const nd_worker *worker = context;
    return worker->device->kind == ND_DEVICE_CPU
               ? nd_limits_check_memory((int64_t)bytes + ND_WORKER_LIBRARY_BYTES,
                                        "a worker of this bench")
               : ND_OK;
}

static bool is_stopped(void)
{
    return nd_session_signal() != 0;
}

/* mesh: one of its ranks has the sizes; NULL: they were given. */
static nd_status products(nd_worker *worker, const bench_call *o, const nd_mesh *mesh)
{
    nd_fp8_recipe list[RECIPES];
    for (int i = 0; i < RECIPES; i++) {
        list[i] = (nd_fp8_recipe)i;
    }
    const nd_timing timing = {.rank = &worker->rank,
                              .repeats = ROUNDS,
                              .stop = is_stopped,
                              .room = has_room,
                              .context = worker};
    if (!o->jsonl) {
        print_products_head(&worker->rank, mesh);
    }
    for (int i = 0; i < o->size_count; i++) {
        nd_linear_times times;
        ND_TRY(nd_time_linear(&timing, list, RECIPES, o->sizes[i], &times));
        if (times.stopped) {
            return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal");
        }
        ND_TRY(print_product(o, o->sizes[i], &times));
    }
    return ND_OK;
}

/* One layer. */

static nd_status print_layer(const bench_call *o, const char *name, const nd_layer_times *t,
                             double bf16, double tokens)
{
    const double both = t->forward + t->backward;
    if (o->jsonl) {
        json_t *row = json_object();
        nd_json_set(&row, "precision", nd_json_string(name));
        nd_json_set(&row, "forward_seconds", json_real(t->forward));
        nd_json_set(&row, "backward_seconds", json_real(t->backward));
        nd_json_set(&row, "tokens", json_real(tokens));
        return nd_print_row(row);
    }
    printf("%-22s %10.3f %10.3f %10.3f %6.2f %12.0f\n", name, 1e3 * t->forward, 1e3 * t->backward,
           1e3 * both, bf16 / both, tokens / both);
    return nd_process_flush_output();
}

static nd_status time_layer(nd_worker *worker, const nd_config *config, int64_t repeats,
                            nd_layer_times *out)
{
    nd_rank rank = worker->rank;
    const nd_timing timing = {.rank = &rank,
                              .repeats = (int)repeats,
                              .stop = is_stopped,
                              .room = has_room,
                              .context = worker};
    rank.config = config;
    ND_TRY(nd_trainer_check_limits(rank.ops, config, &rank.mesh, &rank.shape));
    ND_TRY(nd_time_layer(&timing, out));
    return out->stopped ? nd_fail(ND_ERR_PREEMPTED, "stopped by a signal") : ND_OK;
}

/* The configuration with this recipe. The filter that leaves out a model's first and last linears
 * is for whole models: a layer in the middle has all of its linears in FP8. */
static nd_config config_with(const nd_config *from, nd_fp8_recipe recipe)
{
    static char everything[] = "*";
    nd_config config = *from;
    config.train.precision = ND_PRECISION_FP8;
    config.fp8.recipe = recipe;
    config.fp8.all_gather &= nd_fp8_recipe_is_per_tensor(recipe);
    config.fp8.health_interval = 0;
    if (strcmp(config.fp8.filter, "accelerate") == 0) {
        config.fp8.filter = everything;
    }
    return config;
}

/* Whether the layer can run in FP8 on this mesh. */
static nd_status check_recipes(const nd_config *config, const nd_shape *shape)
{
    for (int i = 0; i < RECIPES && config->train.precision != ND_PRECISION_FP32; i++) {
        const nd_config with = config_with(config, (nd_fp8_recipe)i);
        ND_TRY(nd_trainer_check_precision(&with, shape));
    }
    return ND_OK;
}

static nd_status layer(nd_worker *worker, const nd_config *from, const bench_call *o)
{
    nd_rank *r = &worker->rank;
    nd_config config = *from;
    nd_layer_times times;
    char mesh[128];
    const bool f32 = config.train.precision == ND_PRECISION_FP32;
    const double sequences = (double)config.train.micro_batch_size *
                             r->mesh.size[ND_AXIS_DP_SHARD] * r->mesh.size[ND_AXIS_DP_REPLICATE];
    const double tokens = sequences * (double)config.train.sequence_length;
    const bool speaks = r->rank == 0;
    ND_TRY(check_recipes(from, &r->shape));
    if (speaks && !o->jsonl) {
        print_cpu(r);
        printf("one layer on %s, mesh %s, %.0f tokens; milliseconds of the slowest rank\n"
               "%-22s %10s %10s %10s %6s %12s\n",
               nd_ops_machine(r->device), nd_mesh_format(&r->mesh, mesh, sizeof mesh), tokens,
               "precision", "forward", "backward", "both", "x", "tokens/s");
    }
    if (speaks && !o->jsonl && f32) {
        printf("FP8 is compared with BF16, so it is not timed here\n");
    }
    config = *from;
    config.train.precision = f32 ? ND_PRECISION_FP32 : ND_PRECISION_BF16;
    ND_TRY(time_layer(worker, &config, o->repeats, &times));
    const double bf16 = times.forward + times.backward;
    ND_TRY(speaks ? print_layer(o, f32 ? "fp32" : "bf16", &times, bf16, tokens) : ND_OK);
    for (int i = 0; i < RECIPES && !f32; i++) {
        char name[64];
        snprintf(name, sizeof name, "fp8 %s", nd_fp8_recipe_name((nd_fp8_recipe)i));
        config = config_with(from, (nd_fp8_recipe)i);
        ND_TRY(time_layer(worker, &config, o->repeats, &times));
        ND_TRY(speaks ? print_layer(o, name, &times, bf16, tokens) : ND_OK);
    }
    return ND_OK;
}

/* The command. */

/* One layer of the configured model, with the smallest vocabulary that its tp ranks can share. */
static nd_status open_shape(const nd_config *config, bench_call *o, nd_shape *out)
{
    nd_inputs inputs = {0};
    if (o->size_count > 0) {
        const int64_t tp = config->resolved_mesh.size[ND_AXIS_TP];
        *out = (nd_shape){.layers = 1, .heads = tp, .kv_heads = tp, .init_std = 0.02};
        return ND_OK;
    }
    nd_status status = nd_inputs_open_model(config, &inputs);
    *out = inputs.shape;
    nd_inputs_close(&inputs);
    if (status == ND_OK && o->products) {
        status = sizes_of_model(config, out, o);
    }
    out->layers = 1;
    out->vocab = 16 * (int64_t)config->resolved_mesh.size[ND_AXIS_TP];
    return status;
}

/* The mesh has given the sizes of --products; one worker times them, without its peers. */
static void leave_mesh(nd_config *config)
{
    config->resolved_mesh = (nd_mesh){{1, 1, 1, 1, 1}};
    config->launch.workers = config->launch.nproc_per_node = config->launch.nnodes = 1;
}

/* ndlaunch's workers are counted in the configuration: what asks before they start is alone. */
static int64_t workers_of_job(const nd_config *config, const nd_identity *id)
{
    return id->source == ND_IDENTITY_NDLAUNCH ? config->launch.workers : id->world_size;
}

/* ndlaunch asks for it before workers start. */
static nd_status check(const nd_command_call *call)
{
    nd_config *config = call->config;
    nd_shape shape;
    bench_call o;
    ND_TRY(parse(call->line, &o));
    ND_TRY(check_alone(&o, workers_of_job(config, &call->worker->identity)));
    ND_TRY(open_shape(config, &o, &shape));
    if (o.layer) {
        ND_TRY(check_recipes(config, &shape));
        ND_TRY(nd_shape_check_mesh(&shape, &config->resolved_mesh, config->train.micro_batch_size,
                                   config->train.sequence_length));
    } else {
        leave_mesh(config);
    }
    return nd_job_check_room(call);
}

static nd_status run_layer(const nd_command_call *call, bench_call *o)
{
    nd_worker *worker = call->worker;
    nd_shape shape;
    ND_TRY(nd_job_check(call->config, &worker->identity));
    ND_TRY(nd_worker_meet(worker, call->config));
    ND_TRY(open_shape(call->config, o, &shape));
    ND_TRY(nd_worker_join(worker, call->config, &shape));
    return layer(worker, call->config, o);
}

static nd_status run_products(const nd_command_call *call, bench_call *o)
{
    nd_worker *worker = call->worker;
    const nd_mesh mesh = call->config->resolved_mesh;
    const bool of_model = o->size_count == 0;
    nd_shape shape;
    ND_TRY(check_alone(o, workers_of_job(call->config, &worker->identity)));
    ND_TRY(open_shape(call->config, o, &shape));
    leave_mesh(call->config);
    ND_TRY(nd_worker_meet(worker, call->config));
    ND_TRY(nd_worker_join(worker, call->config, &shape));
    return products(worker, o, of_model ? &mesh : NULL);
}

static nd_status run(const nd_command_call *call)
{
    bench_call o;
    ND_TRY(parse(call->line, &o));
    return o.products ? run_products(call, &o) : run_layer(call, &o);
}

const nd_command nd_command_bench = {.id = ND_COMMAND_BENCH,
                                     .trains = true,
                                     .begin = nd_session_begin,
                                     .run = run,
                                     .check_flags = check_flags,
                                     .check = check};

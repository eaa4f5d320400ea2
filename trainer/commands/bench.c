// SPDX-License-Identifier: Apache-2.0
/*
 * `ndtrain bench`: what FP8 gains on this machine. --products times single linears, --layer a whole
 * layer on a mesh. Both print BF16 and every recipe.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "runtime/base/process.h"
#include "trainer/commands/session.h"
#include "trainer/step/step.h"
#include "trainer/tune/timing.h"

enum { SIZES_MAX = 256, RECIPES = ND_FP8_RECIPE_COUNT, ROUNDS = 3 };

typedef struct bench {
    const nd_flag_value *flags;
    bool jsonl;
    nd_linear_extents sizes[SIZES_MAX]; /* of --products */
    int size_count;
    nd_shape shape;
} bench;

static nd_status add_size(bench *o, nd_linear_extents size)
{
    for (int i = 0; i < o->size_count; i++) {
        const nd_linear_extents *s = &o->sizes[i];
        if (s->m == size.m && s->k == size.k && s->n == size.n) {
            return ND_OK;
        }
    }
    ND_REFUSE(o->size_count == SIZES_MAX, "--sizes has more than %d sizes", SIZES_MAX);
    o->sizes[o->size_count++] = size;
    return ND_OK;
}

/* "1024x4096x14336,512x512x512" */
static nd_status read_sizes(bench *o, const char *value)
{
    const char *at = value;
    do {
        int64_t extents[3];
        for (int i = 0; i < 3; i++) {
            const size_t digits = strspn(at, "0123456789");
            extents[i] = digits > 0 && digits <= 8 ? strtoll(at, NULL, 10) : 0;
            at += digits;
            const bool ends = *at == (i < 2 ? 'x' : ',') || (i == 2 && !*at);
            ND_REFUSE(extents[i] < 16 || extents[i] > 1 << 24 || extents[i] % 16 != 0 || !ends,
                      "--sizes is \"%.60s\"; it must be MxKxN, or several of them with commas "
                      "between, each a multiple of 16 up to 16777216: tokens x inputs x outputs",
                      value);
            at += *at != '\0';
        }
        ND_TRY(add_size(o, (nd_linear_extents){extents[0], extents[1], extents[2]}));
    } while (*at);
    return ND_OK;
}

static nd_status read_flags(const nd_command_flags *line, bench *o)
{
    const nd_flag_value *v = line->values;
    *o = (bench){.flags = v, .jsonl = v[ND_BENCH_JSONL].given};
    ND_TRY(v[ND_BENCH_SIZES].given ? read_sizes(o, v[ND_BENCH_SIZES].text) : ND_OK);
    ND_REFUSE(v[ND_BENCH_PRODUCTS].given == v[ND_BENCH_LAYER].given,
              "give --products, which times single linears, or --layer, which times a layer on a "
              "mesh");
    ND_REFUSE(v[ND_BENCH_LAYER].given && v[ND_BENCH_SIZES].given,
              "--sizes is for --products; the sizes of a layer are those of the model, "
              "--model-config");
    ND_REFUSE(v[ND_BENCH_PRODUCTS].given && v[ND_BENCH_REPEATS].given,
              "--repeats is for --layer; a product's time is the least of three medians");
    return ND_OK;
}

static nd_status check_flags(const nd_command_flags *line)
{
    bench o;
    return read_flags(line, &o);
}

/* One layer of the configured model, with the smallest vocabulary that its tp ranks can share, and
 * its linears, as one rank of the mesh has them. */
static nd_status open_shape(const nd_config *config, bench *o)
{
    const nd_mesh *mesh = &config->resolved_mesh;
    const int tp = mesh->size[ND_AXIS_TP];
    nd_inputs inputs = {0};
    if (o->size_count > 0) {
        o->shape = (nd_shape){.layers = 1, .heads = tp, .kv_heads = tp, .init_std = 0.02};
        return ND_OK;
    }
    nd_status status = nd_inputs_open_model(config, &inputs);
    o->shape = inputs.shape;
    nd_inputs_close(&inputs);
    ND_TRY(status);
    if (o->flags[ND_BENCH_PRODUCTS].given) {
        const nd_dims d = nd_dims_of(&o->shape, mesh, (nd_coord){{0}}, config, false);
        for (int i = 0; i < ND_LINEAR_COUNT; i++) {
            nd_linear_extents size = {.m = d.T};
            nd_linear_sizes(&o->shape, i, tp, &size.n, &size.k);
            ND_TRY(add_size(o, size));
        }
    }
    o->shape.layers = 1;
    o->shape.vocab = 16 * (int64_t)tp;
    return ND_OK;
}

static nd_status has_room(void *context, double bytes)
{
    const nd_worker *worker = context;
    return worker->device->kind == ND_DEVICE_CPU
               ? nd_limits_check_memory((int64_t)bytes + ND_WORKER_LIBRARY_BYTES,
                                        "a worker of this bench")
               : ND_OK;
}

static nd_timing timing_of(nd_worker *worker, nd_rank *rank, int repeats)
{
    return (nd_timing){.rank = rank,
                       .repeats = repeats,
                       .stop = nd_session_is_stopped,
                       .room = has_room,
                       .context = worker};
}

/* On a CPU, which instructions multiply. */
static void print_cpu(const nd_rank *r)
{
    if (!nd_rank_is_gpu(r)) {
        printf("%s; %s\n", nd_ops_machine(r->device), nd_ops_products(r->device));
    }
}

static nd_status print_product(const bench *o, nd_linear_extents e, const nd_linear_times *t)
{
    if (o->jsonl) {
        json_t *row = json_pack("{s:I, s:I, s:I, s:f}", "m", (json_int_t)e.m, "k", (json_int_t)e.k,
                                "n", (json_int_t)e.n, "bf16_seconds", t->bf16);
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

/* mesh: one of its ranks has the sizes; NULL: they were given. */
static nd_status products(nd_worker *worker, const bench *o, const nd_mesh *mesh)
{
    const nd_rank *r = &worker->rank;
    const nd_timing timing = timing_of(worker, &worker->rank, ROUNDS);
    nd_fp8_recipe list[RECIPES];
    char text[128];
    if (!o->jsonl && mesh && nd_mesh_world_size(mesh) > 1) {
        printf("the linears that a rank of mesh %s has, timed by one worker alone\n",
               nd_mesh_format(mesh, text, sizeof text));
    }
    if (!o->jsonl) {
        print_cpu(r);
        printf("one linear, forward and backward, on %s with %d thread%s; milliseconds, and BF16's "
               "time over FP8's\n%7s %7s %7s %10s %9s",
               nd_ops_machine(r->device), r->device->threads, r->device->threads == 1 ? "" : "s",
               "M", "K", "N", "bf16", "GFLOP/s");
    }
    for (int i = 0; i < RECIPES; i++) {
        list[i] = (nd_fp8_recipe)i;
        if (!o->jsonl) {
            const bool is_long = list[i] == ND_FP8_ROWWISE_GW_HP;
            printf(" %11.11s %6s%s", is_long ? "rowwise_gw" : nd_fp8_recipe_name(list[i]), "x",
                   i == RECIPES - 1 ? "\n" : "");
        }
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

static nd_status print_layer(const bench *o, const char *name, const nd_layer_times *t,
                             double usual, double tokens)
{
    const double both = t->forward + t->backward;
    if (o->jsonl) {
        return nd_print_row(json_pack("{s:s, s:f, s:f, s:f}", "precision", name, "forward_seconds",
                                      t->forward, "backward_seconds", t->backward, "tokens",
                                      tokens));
    }
    printf("%-22s %10.3f %10.3f %10.3f %6.2f %12.0f\n", name, 1e3 * t->forward, 1e3 * t->backward,
           1e3 * both, usual / both, tokens / both);
    return nd_process_flush_output();
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

/* Checks that the layer can run on this mesh, and, unless it is in F32, in FP8. */
static nd_status check_layer(const nd_config *config, const nd_shape *shape)
{
    for (int i = 0; i < RECIPES && config->train.precision != ND_PRECISION_FP32; i++) {
        const nd_config with = config_with(config, (nd_fp8_recipe)i);
        ND_TRY(nd_trainer_check_precision(&with, shape));
    }
    return nd_shape_check_mesh(shape, &config->resolved_mesh, config->train.micro_batch_size,
                               config->train.sequence_length);
}

static nd_status layer(nd_worker *worker, const nd_config *from, const bench *o)
{
    nd_config config = *from;
    nd_rank rank = worker->rank;
    const nd_timing timing = timing_of(worker, &rank, (int)o->flags[ND_BENCH_REPEATS].whole);
    double usual = 0; /* seconds without FP8 */
    char mesh[128];
    const bool f32 = config.train.precision == ND_PRECISION_FP32;
    const bool speaks = rank.rank == 0;
    const double sequences = (double)config.train.micro_batch_size *
                             rank.mesh.size[ND_AXIS_DP_SHARD] *
                             rank.mesh.size[ND_AXIS_DP_REPLICATE];
    const double tokens = sequences * (double)config.train.sequence_length;
    ND_TRY(check_layer(from, &rank.shape));
    rank.config = &config;
    if (speaks && !o->jsonl) {
        print_cpu(&rank);
        printf("one layer on %s, mesh %s, %.0f tokens; milliseconds of the slowest rank\n"
               "%-22s %10s %10s %10s %6s %12s\n%s",
               nd_ops_machine(rank.device), nd_mesh_format(&rank.mesh, mesh, sizeof mesh), tokens,
               "precision", "forward", "backward", "both", "x", "tokens/s",
               f32 ? "FP8 is compared with BF16, so it is not timed here\n" : "");
    }
    for (int i = -1; i < (f32 ? 0 : RECIPES); i++) { /* -1: the one that others are compared with */
        nd_layer_times times;
        char name[64];
        snprintf(name, sizeof name, "fp8 %s", i < 0 ? "" : nd_fp8_recipe_name((nd_fp8_recipe)i));
        config = i < 0 ? *from : config_with(from, (nd_fp8_recipe)i);
        if (i < 0 && !f32) {
            config.train.precision = ND_PRECISION_BF16;
        }
        ND_TRY(nd_trainer_check_limits(rank.ops, &config, &rank.mesh, &rank.shape));
        ND_TRY(nd_time_layer(&timing, &times));
        if (times.stopped) {
            return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal");
        }
        usual = i < 0 ? times.forward + times.backward : usual;
        if (speaks) {
            ND_TRY(print_layer(o, i >= 0 ? name : f32 ? "fp32" : "bf16", &times, usual, tokens));
        }
    }
    return ND_OK;
}

static nd_status run_bench(const nd_command_call *call)
{
    nd_config *config = call->config;
    nd_worker *worker = call->worker;
    const nd_mesh mesh = config->resolved_mesh;
    const bool is_layer = call->line->values[ND_BENCH_LAYER].given;
    bench o;
    ND_TRY(read_flags(call->line, &o));
    /* ndlaunch's workers are counted in the configuration: what asks before they start is alone. */
    const int64_t workers = worker->identity.source == ND_IDENTITY_NDLAUNCH
                                ? config->launch.workers
                                : worker->identity.world_size;
    ND_REFUSE(!is_layer && workers != 1,
              "--products times one worker, but this job has %lld; start it with `ndtrain bench "
              "--products`, which takes any mesh, or use --layer",
              (long long)workers);
    if (is_layer && !call->checks) {
        ND_TRY(nd_job_check(config, &worker->identity));
        ND_TRY(nd_worker_meet(worker, config));
    }
    ND_TRY(open_shape(config, &o));
    if (!is_layer) { /* the mesh has given the sizes; one worker times them, without its peers */
        config->resolved_mesh = (nd_mesh){{1, 1, 1, 1, 1}};
        config->launch.workers = config->launch.nproc_per_node = config->launch.nnodes = 1;
    }
    if (call->checks) {
        ND_TRY(is_layer ? check_layer(config, &o.shape) : ND_OK);
        return nd_job_check_room(call);
    }
    ND_TRY(is_layer ? ND_OK : nd_worker_meet(worker, config));
    ND_TRY(nd_worker_join(worker, config, &o.shape));
    return is_layer ? layer(worker, config, &o)
                    : products(worker, &o, o.flags[ND_BENCH_SIZES].given ? NULL : &mesh);
}

const nd_command nd_command_bench = {.id = ND_COMMAND_BENCH,
                                     .trains = true,
                                     .begin = nd_session_begin,
                                     .run = run_bench,
                                     .check_flags = check_flags};

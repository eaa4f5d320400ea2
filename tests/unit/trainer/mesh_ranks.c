// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/trainer/mesh_ranks.h"

#include <stdlib.h>

#include "tests/unit/trainer/shapes.h"
#include "trainer/weights/weights.h"

nd_config mesh_config_of(void)
{
    nd_config c = {0};
    c.train.steps = 10;
    c.train.sequence_length = 32;
    c.train.micro_batch_size = 1;
    c.train.gradient_accumulation_steps = 1;
    c.train.precision = ND_PRECISION_FP32;
    c.optimizer.name = ND_OPTIMIZER_ADAMW;
    c.parallel.reshard_after_forward = true;
    c.fp8.recipe = ND_FP8_TENSORWISE;
    c.fp8.filter = (char *)"*";
    c.log.level = ND_LOG_INFO;
    return c;
}

nd_shape mesh_shape_of(int64_t layers, bool tied)
{
    return (nd_shape){SIZES(97, 32, 64, layers, 4, 4, 16), .max_positions = 64, .init_std = 0.02,
                      .tied = tied, .rope = {.theta = 10000.0}};
}

mesh_ranks mesh_ranks_of(nd_mesh mesh, int64_t layers, bool tied,
                         nd_status (*body)(nd_rank *rank, void *context), const void *context)
{
    return (mesh_ranks){mesh, mesh_shape_of(layers, tied), mesh_config_of(), body, (void *)context};
}

/* A model of this rank, which is a thread, or a generator, or shards alone. */
typedef struct opened {
    nd_memplan plan;
    nd_model *model;
    nd_generator *generator;
    mesh_shards shards;
    struct opened *next;
} opened;

static _Thread_local opened *all_opened;

static nd_status open_one(opened **out)
{
    ND_TRY(ND_ALLOC(1, out));
    nd_memplan_init(&(*out)->plan);
    (*out)->next = all_opened;
    all_opened = *out;
    return ND_OK;
}

static void close_all(void)
{
    for (opened *o = all_opened, *next; o; o = next) {
        next = o->next;
        nd_model_destroy(o->model);
        nd_generator_destroy(o->generator);
        nd_fsdp_fini(&o->shards.fsdp);
        nd_scales_fini(&o->shards.scales);
        nd_layout_destroy(o->shards.layout);
        nd_memplan_fini(&o->plan);
        free(o);
    }
    all_opened = NULL;
}

static nd_status run_on_device(nd_rank *rank, const mesh_ranks *job)
{
    nd_status status = ND_OK;
    const nd_device_table *table = rank->device->table;
    ND_TRY(nd_ops_ref(&rank->ops));
    ND_TRY(table->stream_init(rank->device, &rank->stream));
    ND_TRY_OUT(nd_groups_create(rank->transport, &rank->mesh, &rank->groups));
    status = job->body(rank, job->context);
    close_all();
    nd_groups_destroy(&rank->groups);
out:
    table->stream_fini(&rank->stream);
    return status;
}

static nd_status rank_body(nd_transport *transport, void *context)
{
    const mesh_ranks *job = context;
    nd_rank rank = {
        .rank = transport->rank,
        .world_size = transport->size,
        .mesh = job->mesh,
        .config = &job->config,
        .shape = job->shape,
        .transport = transport,
        .progress = transport->progress,
    };
    rank.mesh.kv_copies = (int)nd_shape_kv_copies(&rank.shape, rank.mesh.size[ND_AXIS_TP]);
    rank.coord = nd_mesh_coord_of(&rank.mesh, rank.rank);
    ND_TRY(nd_device_open_cpu(1, &rank.device));
    nd_status status = run_on_device(&rank, job);
    nd_device_close(rank.device);
    return status;
}

nd_status mesh_ranks_run(const mesh_ranks *job)
{
    nd_ranks ranks = {.size = nd_mesh_world_size(&job->mesh),
                      .timeout_seconds = 60,
                      .body = rank_body,
                      .context = (void *)job};
    return nd_ranks_run_threads(&ranks);
}

int64_t mesh_calls(const nd_rank *rank, nd_group_kind group, nd_comm_op op)
{
    return rank->groups.by_kind[group]->stats.calls[op];
}

float mesh_value(uint64_t seed, int64_t index)
{
    /* The finaliser of SplitMix64 (Steele, Lea and Flood, 2014). */
    uint64_t x = (uint64_t)index + seed * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return (float)((int)((x ^ x >> 31) % 17) - 8) / 8.0f;
}

float mesh_get(nd_tensor t, int64_t row, int64_t column)
{
    const int64_t at = row * t.stride[0] + column;
    return t.dtype == ND_DTYPE_F32 ? ((const float *)t.data)[at]
                                   : nd_bf16_to_f32(((const nd_bf16 *)t.data)[at]);
}

void mesh_put(nd_tensor t, int64_t row, int64_t column, float value)
{
    const int64_t at = row * t.stride[0] + column;
    if (t.dtype == ND_DTYPE_F32) {
        ((float *)t.data)[at] = value;
    } else {
        ((nd_bf16 *)t.data)[at] = nd_bf16_from_f32(value);
    }
}

/* 4 to 1 quarters, by the quarter of an axis counted from either end. Not powers of two alone: by
 * those a scale may be wrong and FP8 values are still the same. */
static float quarters(int64_t at, int64_t extent, bool from_end)
{
    int64_t q = at * 4 / extent;
    return (float)(from_end ? q + 1 : 4 - q) / 4.0f;
}

float mesh_param_value(uint64_t seed, const nd_param *param, int64_t element)
{
    bool odd = param->id % 2;
    return mesh_value(seed * 4096 + param->random_stream, element) *
           quarters(element / param->cols, param->rows, odd) *
           quarters(element % param->cols, param->cols, !odd);
}

nd_status mesh_each_span(const nd_layout *layout, nd_span_visit *visit, void *context)
{
    for (int u = 0; u < layout->unit_count; u++) {
        ND_TRY(nd_layout_each_span(layout, &layout->units[u], layout->shard_index, visit, context));
    }
    return ND_OK;
}

static nd_status want_span(void *context, const nd_span *span, float *to)
{
    for (int64_t i = 0; i < span->rows * span->cols; i++) {
        to[i] = mesh_param_value(*(uint64_t *)context, span->param, nd_span_global(span, i));
    }
    return ND_OK;
}

typedef struct filling {
    uint64_t seed;
    float *state;
} filling;

static nd_status fill_span(void *context, const nd_span *span)
{
    filling *f = context;
    return want_span(&f->seed, span, f->state + span->begin);
}

nd_status mesh_fill(const nd_layout *layout, uint64_t seed, float *state)
{
    return mesh_each_span(layout, fill_span, &(filling){seed, state});
}

nd_status mesh_load(nd_fsdp *fsdp, uint64_t seed)
{
    const nd_values values = {.context = &seed, .want = want_span};
    return fsdp->converts ? nd_weights_fill(fsdp, &values, false)
                          : mesh_fill(fsdp->layout, seed, fsdp->master);
}

nd_status mesh_shards_open(nd_rank *rank, bool shares, mesh_shards **out)
{
    opened *o = NULL;
    ND_TRY(open_one(&o));
    mesh_shards *s = &o->shards;
    *s = (mesh_shards){.rank = rank, .plan = &o->plan};
    ND_TRY(nd_scales_init(&s->scales, rank, NULL, false));
    nd_layout_options options = {.shape = &rank->shape,
                                 .mesh = &rank->mesh,
                                 .coord = rank->coord,
                                 .converts = nd_scales_in_segment,
                                 .context = &s->scales};
    ND_TRY(nd_layout_create(&options, &s->layout));
    ND_TRY(nd_fsdp_init(&s->fsdp, rank, s->layout, &s->scales, false, s->plan));
    ND_TRY(nd_fsdp_plan_weights(&s->fsdp, shares, s->plan));
    ND_TRY(nd_scales_plan(&s->scales, s->layout, 256, 0, s->plan));
    ND_TRY(nd_memplan_commit(s->plan, rank->device));
    *out = s;
    return nd_scales_start(&s->scales);
}

nd_status mesh_model_open_packed(nd_rank *rank, const nd_model_options *options, mesh_packed packed,
                                 uint64_t seed, nd_model **out)
{
    opened *o = NULL;
    ND_TRY(open_one(&o));
    ND_TRY(nd_model_create(rank, options ? options : &(nd_model_options){0}, &o->plan, &o->model));
    *out = o->model;
    ND_TRY(nd_model_plan_weights(o->model, false, &o->plan));
    if (packed.blocks) {
        nd_packed_plan(&o->model->packed, false, &o->plan);
    }
    if (packed.head) {
        nd_packed_plan(&o->model->packed, true, &o->plan);
    }
    nd_fsdp *fsdp = &o->model->fsdp;
    ND_TRY(nd_memplan_commit(&o->plan, rank->device));
    ND_TRY(nd_model_start(o->model));
    ND_TRY(mesh_load(fsdp, seed));
    return nd_scales_refresh(&o->model->scales, fsdp->master, fsdp->version);
}

nd_status mesh_model_open(nd_rank *rank, const nd_model_options *options, uint64_t seed,
                          nd_model **out)
{
    return mesh_model_open_packed(rank, options, (mesh_packed){true, true}, seed, out);
}

nd_status mesh_generator_open(nd_rank *rank, const nd_generate_options *options, uint64_t seed,
                              nd_generator **out)
{
    opened *o = NULL;
    ND_TRY(open_one(&o));
    ND_TRY(nd_generator_create(rank, options, &o->generator));
    ND_TRY(nd_generator_commit(o->generator));
    *out = o->generator;
    return mesh_load(&o->generator->model->fsdp, seed);
}

size_t mesh_model_bytes(const nd_model *model)
{
    const opened *o = all_opened;
    while (o->model != model) {
        o = o->next;
    }
    return o->plan.total;
}

enum { T = 32 };

nd_status mesh_load_ids(nd_model *m, const int32_t *ids, const int32_t *labels,
                        nd_activation_set **set)
{
    int32_t positions[T];
    *set = nd_model_take_set(m);
    ND_ASSERT(m->dims.B * m->dims.S == T);
    for (int i = 0; i < T; i++) {
        positions[i] = i;
    }
    return nd_model_load_batch(m, *set, ids, labels, positions);
}

nd_status mesh_load_batch(nd_model *m, int micro, nd_activation_set **set)
{
    int32_t ids[T], labels[T];
    for (int i = 0; i < T; i++) {
        ids[i] = (i * 7 + 3 * micro) % 97;
        labels[i] = (i * 13 + 5) % 97;
    }
    return mesh_load_ids(m, ids, labels, set);
}

nd_status mesh_micro_batch(nd_model *m, int micro, nd_pass pass)
{
    nd_activation_set *set;
    ND_TRY(mesh_load_batch(m, micro, &set));
    ND_TRY(nd_model_forward(m, set, pass));
    if (pass == ND_PASS_TRAIN) {
        ND_TRY(nd_model_backward(m, set));
    }
    return nd_model_give_back(m, set);
}

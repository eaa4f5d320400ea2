// SPDX-License-Identifier: Apache-2.0
/* Divides a GPU between collectives and the products beside them, by measured times. */
#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/clock.h"
#include "runtime/base/math.h"
#include "runtime/device/cuda.h"
#include "trainer/tune/measure.h"

enum { REPEATS = 5, PRODUCTS_MAX = 64, GATHERS_MAX = 2, ALIGN = 256 };

/* The product. */

static bool is_product(const nd_call *call)
{
    return call->kind == ND_CALL_PRODUCT || call->kind == ND_CALL_PRODUCT_FP8;
}

/* In multiplications of BF16, whose rate FP8 has twice. c (m, n) and k: a has m k elements,
 * whichever way it is stored. */
static double cost_of(const nd_call *call)
{
    double all = (double)call->c.columns * (double)call->a.rows * (double)call->a.columns;
    return call->kind == ND_CALL_PRODUCT_FP8 ? all / 2.0 : all;
}

/* The calls of a step of one micro-batch with so many layers. */
static nd_status list_calls(const nd_rank *rank, int64_t layers, nd_calls *calls)
{
    nd_rank r = *rank;
    nd_config config = *rank->config;
    config.train.gradient_accumulation_steps = 1;
    r.config = &config;
    r.shape.layers = layers;
    return nd_dry_run(&r, NULL, calls);
}

/* Returns how often the last layer makes the call. */
static int64_t times_of(const nd_calls *without, const nd_call_entry *with)
{
    const nd_call_entry *entry = nd_calls_find(without, &with->call);
    return is_product(&with->call) ? with->times - (entry ? entry->times : 0) : 0;
}

nd_status nd_layer_product(const nd_rank *rank, nd_call *product, int64_t *times)
{
    nd_calls with = {0}, without = {0};
    double total = 0.0, most = 0.0;
    const nd_call *found = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(list_calls(rank, rank->shape.layers, &without));
    ND_TRY_OUT(list_calls(rank, rank->shape.layers + 1, &with));
    for (int i = 0; i < with.count; i++) {
        const nd_call *call = &with.entries[i].call;
        int64_t more = times_of(&without, &with.entries[i]);
        double cost = more > 0 ? (double)more * cost_of(call) : 0.0;
        total += cost;
        found = cost > most ? call : found;
        most = cost > most ? cost : most;
    }
    if (!found) {
        status = nd_fail(ND_ERR_INTERNAL, "a layer of the model has no products");
        goto out;
    }
    *product = *found;
    *times = (int64_t)(total / cost_of(found) + 0.5);
out:
    nd_calls_free(&with);
    nd_calls_free(&without);
    return status;
}

/* The work that is timed. */

typedef struct measurement {
    nd_rank *rank;
    double deadline;
    int processors; /* of the GPU with the fewest */
    nd_call product;
    int products; /* calls of it */
    int gathers;
    nd_bench bench;
    char *memory;
    size_t weights, shard; /* bytes: gathered and rounded up, and of this rank */
    int64_t gradients;     /* elements of a shard, F32 */
    size_t bytes;          /* of memory: gathered weights, gradients, this rank's reduced part */
} measurement;

/* Reads which weights the first block gathers and which gradients it reduces. */
static nd_status find_sizes(measurement *m)
{
    nd_rank *r = m->rank;
    const nd_dims dims = nd_dims_of(&r->shape, &r->mesh, r->coord, r->config, true);
    nd_scales scales = {0};
    nd_layout *layout = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_scales_init(&scales, r, NULL));
    const nd_layout_options options = {.shape = &r->shape,
                                       .mesh = &r->mesh,
                                       .coord = r->coord,
                                       .converts = nd_scales_in_segment,
                                       .context = &scales};
    ND_TRY_OUT(nd_layout_create(&options, &layout));
    const nd_segment *segments = nd_layout_unit(layout, ND_UNIT_BLOCK, 0)->segments;
    m->shard = (size_t)segments[ND_SEGMENT_HP].shard_count * nd_dtype_size(dims.act) +
               (size_t)segments[ND_SEGMENT_FP8].shard_count;
    m->weights = nd_round_up_bytes(m->shard * (size_t)layout->shards, ALIGN);
    m->gradients = segments[ND_SEGMENT_HP].shard_count + segments[ND_SEGMENT_FP8].shard_count;
    m->bytes = m->weights + (size_t)m->gradients * 4 * (size_t)(layout->shards + 1);
out:
    nd_layout_destroy(layout);
    nd_scales_fini(&scales);
    return status;
}

static nd_status list_work(measurement *m)
{
    int64_t times = 0;
    ND_TRY(nd_layer_product(m->rank, &m->product, &times));
    m->products = (int)(times < PRODUCTS_MAX ? times : PRODUCTS_MAX);
    m->gathers = m->rank->config->parallel.reshard_after_forward ? GATHERS_MAX : 1;
    return find_sizes(m);
}

/* Takes memory when this rank has enough of it, also for the communicators: `lacks` if not. */
static nd_status take_memory(measurement *m, bool *lacks)
{
    nd_call_entry entry = {.call = m->product};
    const nd_calls calls = {.entries = &entry, .count = 1};
    nd_device *device = m->rank->device;
    nd_cuda_info gpu;
    ND_TRY(nd_cuda_info_of(device, &gpu));
    m->processors = gpu.processors;
    *lacks = m->bytes + nd_bench_bytes(m->rank, &calls) + nd_comm_nccl_bytes(&m->rank->mesh) >
             gpu.free_bytes;
    if (*lacks) {
        return ND_OK;
    }
    nd_status status = nd_device_alloc(device, m->bytes, (void **)&m->memory);
    status = status == ND_OK ? nd_bench_open(&m->bench, m->rank, &calls) : status;
    if (status == ND_ERR_RESOURCE) { /* other ranks of this GPU, or pieces between what is taken */
        nd_error_clear();
        *lacks = true;
        return ND_OK;
    }
    ND_TRY(status);
    ND_TRY(nd_zero(&m->rank->stream, m->memory, m->bytes));
    return nd_bench_fill(&m->bench, &m->product);
}

static void give_memory(measurement *m)
{
    nd_bench_close(&m->bench);
    if (m->memory) {
        nd_device_free(m->rank->device, m->memory, m->bytes);
        m->memory = NULL;
    }
}

static nd_status reduce(nd_rank *rank, int64_t values[2])
{
    return nd_comm_all_reduce(rank->groups.by_kind[ND_GROUP_WORLD], &rank->stream, values, 2,
                              ND_DTYPE_I64, ND_REDOP_MAX, NULL);
}

static nd_status begin_gather(const measurement *m, nd_stream *stream, nd_event *done)
{
    nd_comm *comm = m->rank->groups.trial[0];
    char *own = m->memory + (size_t)comm->index * m->shard;
    return nd_comm_all_gather(
        comm, stream,
        &(nd_comm_args){
            .send = own, .recv = m->memory, .count = (int64_t)m->shard, .dtype = ND_DTYPE_U8},
        done);
}

static nd_status begin_reduction(const measurement *m, nd_stream *stream, nd_event *done)
{
    nd_comm *comm = m->rank->groups.trial[1];
    char *from = m->memory + m->weights;
    char *to = from + (size_t)m->gradients * 4 * (size_t)comm->size;
    return nd_comm_reduce_scatter(comm, stream,
                                  &(nd_comm_args){.send = from,
                                                  .recv = to,
                                                  .count = m->gradients,
                                                  .dtype = ND_DTYPE_F32,
                                                  .redop = ND_REDOP_SUM},
                                  done);
}

/* Does the work of a layer in one micro-batch: the products in as many parts as there are gathers,
 * each beside one, and the reduce-scatter beside all. */
static nd_status run_layer(void *context, nd_stream *stream)
{
    measurement *m = context;
    nd_event reduced = {0};
    int made = 0;
    ND_TRY(begin_reduction(m, stream, &reduced));
    for (int part = 1; part <= m->gathers; part++) {
        nd_event gathered = {0};
        ND_TRY(begin_gather(m, stream, &gathered));
        for (; made < m->products * part / m->gathers; made++) {
            ND_TRY(nd_bench_enqueue(&m->bench, &m->product));
        }
        ND_TRY(nd_stream_wait(stream, &gathered));
    }
    return nd_stream_wait(stream, &reduced);
}

/* All ranks get the same time and the same `late`. */
static nd_status time_pair(measurement *m, nd_tuned_pair *pair, bool *late)
{
    nd_device *device = m->rank->device;
    double seconds = 0.0;
    ND_TRY(nd_ops_cuda_install(device, NULL, 0)); /* plans of other divisions fill the table */
    ND_TRY(nd_ops_cuda_limit_products(device, pair->product_processors));
    ND_TRY(nd_ops_cuda_median(&m->rank->stream, run_layer, m, REPEATS, &seconds));
    int64_t values[2] = {(int64_t)(seconds * 1e9), nd_clock_seconds() >= m->deadline};
    ND_TRY(reduce(m->rank, values));
    pair->seconds = (double)values[0] * 1e-9;
    *late = values[1] != 0;
    return ND_OK;
}

static void list_pairs(nd_tuned_division *d, int processors)
{
    static const int blocks[] = {4, 8, 16, 32};
    d->pairs[d->pair_count++] = (nd_tuned_pair){0, 0, -1.0};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks && blocks[i] < processors; i++) {
        d->pairs[d->pair_count++] = (nd_tuned_pair){blocks[i], processors - blocks[i], -1.0};
        d->pairs[d->pair_count++] = (nd_tuned_pair){blocks[i], processors, -1.0};
    }
}

/* Pairs with equal blocks are adjacent, and share communicators. */
static nd_status time_pairs(measurement *m, nd_tuned_division *d)
{
    nd_rank *r = m->rank;
    bool late = false;
    for (int i = 0; i < d->pair_count && !late; i++) {
        if (i == 0 || d->pairs[i].comm_blocks != d->pairs[i - 1].comm_blocks) {
            nd_groups_end_trial(&r->groups);
            nd_transport_limit_blocks(r->transport, (int)d->pairs[i].comm_blocks);
            ND_TRY(nd_groups_begin_trial(r->transport, &r->mesh, &r->groups));
        }
        ND_TRY(time_pair(m, &d->pairs[i], &late));
    }
    nd_groups_end_trial(&r->groups);
    nd_transport_limit_blocks(r->transport, 0);
    ND_TRY(nd_ops_cuda_limit_products(r->device, 0));
    return nd_ops_cuda_install(r->device, NULL, 0);
}

static nd_status measure(measurement *m, nd_tuned_division *d)
{
    bool lacks = false;
    ND_TRY(list_work(m));
    ND_TRY(take_memory(m, &lacks));
    int64_t values[2] = {lacks, -m->processors};
    ND_TRY(reduce(m->rank, values));
    if (values[0] != 0) {
        d->reason = ND_DIVISION_MEMORY;
        return ND_OK;
    }
    list_pairs(d, (int)-values[1]);
    ND_TRY(time_pairs(m, d));
    double seconds[ND_TUNED_PAIRS_MAX];
    for (int i = 0; i < d->pair_count; i++) {
        seconds[i] = d->pairs[i].seconds;
    }
    const nd_tuned_pair *best = &d->pairs[nd_decide(seconds, d->pair_count, 0)];
    d->reason = ND_DIVISION_TIMED;
    d->comm_blocks = best->comm_blocks;
    d->product_processors = best->product_processors;
    return ND_OK;
}

nd_status nd_divide(nd_rank *rank, double budget, nd_tuned_division *out)
{
    const nd_config *c = rank->config;
    const double begin = nd_clock_seconds();
    measurement m = {.rank = rank, .deadline = begin + budget};
    nd_tuned_division d = {.comm_blocks = c->kernels.comm_blocks,
                           .product_processors = c->kernels.product_processors};
    nd_status status = ND_OK;
    if (d.comm_blocks > 0 || d.product_processors > 0) {
        d.reason = ND_DIVISION_SET;
    } else if (nd_mesh_group_size(&rank->mesh, ND_GROUP_DP_SHARD_CP) == 1) {
        d.reason = ND_DIVISION_ALONE;
    } else {
        status = measure(&m, &d);
        give_memory(&m);
    }
    ND_TRY(status);
    d.seconds = nd_clock_seconds() - begin;
    *out = d;
    return ND_OK;
}

nd_status nd_divide_products(nd_rank *rank, const nd_tuned_division *d)
{
    return d->reason == ND_DIVISION_TIMED
               ? nd_ops_cuda_limit_products(rank->device, d->product_processors)
               : ND_OK;
}

nd_status nd_divide_collectives(nd_rank *rank, const nd_tuned_division *d)
{
    if (d->reason != ND_DIVISION_TIMED || d->comm_blocks == rank->config->kernels.comm_blocks) {
        return ND_OK;
    }
    nd_transport_limit_blocks(rank->transport, (int)d->comm_blocks);
    return nd_groups_remake(rank->transport, &rank->mesh, &rank->groups);
}

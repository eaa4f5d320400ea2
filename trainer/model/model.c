// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/model.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/rope.h"
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

/* Micro-batches. */

/* Arrays of one slot: 256-byte aligned and adjacent, so that one copy brings all. */
enum { IDS = 0, LABELS, POSITIONS, ARRAYS };

static int64_t padded(int64_t count)
{
    return nd_round_up(count, 64);
}

void nd_batches_plan(nd_batches *b, nd_rank *rank, const nd_dims *dims, int sets, nd_memplan *plan)
{
    const bool gpu = nd_rank_is_gpu(rank);
    b->rank = rank;
    b->dims = dims;
    b->slots = sets + gpu;
    b->stride = padded(dims->T);
    b->common = ARRAYS * b->stride + padded(b->keys.numbers);
    b->each = b->common + b->sources * b->stride;
    b->in_use = b->keys.numbers > 0 ? b->stride + b->keys.numbers : dims->T;
    nd_memplan_want(plan, ND_MEM_DATA, "micro-batches: ids, labels, positions",
                    (size_t)(b->slots * b->each) * sizeof *b->memory, &b->memory);
    const int64_t positions = (sets - 1) * padded(b->in_use) + b->in_use;
    nd_memplan_want(plan, ND_MEM_DATA, "positions in use",
                    gpu ? (size_t)positions * sizeof *b->positions : 0, &b->positions);
    if (b->keys.numbers > 0 && !gpu) {
        nd_memplan_add_external(plan, ND_MEM_DATA, "dealing of tokens", (size_t)b->keys.scratch);
    }
}

nd_status nd_batches_open(nd_batches *b)
{
    nd_device *device = b->rank->device;
    void *ring = NULL;
    b->ring_count =
        (int)nd_min(b->rank->config->train.gradient_accumulation_steps + 1, ND_RING_MOST);
    if (b->sources > 0) {
        ND_TRY(ND_ALLOC(b->slots * b->sources, &b->found));
    }
    if (b->keys.numbers > 0) {
        ND_TRY(ND_ALLOC(b->slots * b->keys.sent, &b->sent));
        ND_TRY(ND_ALLOC(b->keys.scratch, &b->dealing));
    }
    ND_TRY(ND_ALLOC(b->slots, &b->slot));
    ND_TRY(device->table->stream_init(device, &b->stream));
    for (int i = 0; i < b->slots; i++) {
        ND_TRY(device->table->event_init(device, &b->slot[i].read));
    }
    ND_TRY(nd_host_alloc(device, (size_t)(b->ring_count * b->each) * sizeof *b->ring, &ring));
    b->ring = ring;
    for (int i = 0; i < b->ring_count; i++) {
        ND_TRY(device->table->event_init(device, &b->copied[i]));
    }
    return ND_OK;
}

void nd_batches_close(nd_batches *b)
{
    if (b->stream.device) {
        const nd_device_table *table = b->stream.device->table;
        table->stream_fini(&b->stream);
        for (int i = 0; i < b->slots; i++) {
            table->event_fini(&b->slot[i].read);
        }
        for (int i = 0; i < b->ring_count && b->ring; i++) {
            table->event_fini(&b->copied[i]);
        }
        nd_host_free(b->stream.device, b->ring);
    }
    free(b->dealing);
    free(b->sent);
    free(b->found);
    free(b->slot);
    *b = (nd_batches){0};
}

static int32_t *array_at(const nd_batches *b, int slot, int array)
{
    return b->memory + slot * b->each + array * b->stride;
}

/* Labels in the order in which the head reads them: chunk by chunk, in each chunk the rows of all
 * tp peers. */
static void order_labels(const nd_dims *d, const int32_t *labels, int32_t *out)
{
    int64_t peers = d->T / d->Tl;
    for (int64_t begin = 0; begin < d->Tl; begin += d->head_rows) {
        int64_t rows = nd_min(d->Tl - begin, d->head_rows);
        for (int64_t p = 0; p < peers; p++) {
            memcpy(out + begin * peers + p * rows, labels + p * d->Tl + begin, (size_t)rows * 4);
        }
    }
}

/* Finds the sources of the batch's samples; returns how many. */
static int find_sources(const nd_batches *b, const int *sources, int *found)
{
    const int64_t B = b->rank->config->train.micro_batch_size;
    int count = 0;
    for (int64_t row = 0; row < B; row++) {
        int i = 0;
        while (i < count && found[i] != sources[row]) {
            i++;
        }
        found[i] = sources[row];
        count += i == count;
    }
    ND_ASSERT(count <= b->sources);
    return count;
}

/* Labels by source lie at the end of a slot; the ids' place in the staging memory holds each of
 * them while it is put into order. With one source its labels are those of the batch. */
static int stage_sources(nd_batches *b, const nd_step_batch *from, int32_t *staged, int *found)
{
    const int count = from->sources && b->sources > 0 ? find_sources(b, from->sources, found) : 0;
    const int64_t s = b->dims->T / b->rank->config->train.micro_batch_size;
    int32_t *own = staged + IDS * b->stride;
    for (int i = 0; i < count && count > 1; i++) {
        for (int64_t t = 0; t < b->dims->T; t++) {
            own[t] = from->sources[t / s] == found[i] ? from->labels[t] : ND_LABEL_IGNORED;
        }
        order_labels(b->dims, own, staged + b->common + i * b->stride);
    }
    return count;
}

static nd_status copy_in(nd_batches *b, const nd_step_batch *from, nd_micro_batch *out,
                         nd_event **copied)
{
    const nd_device_table *table = b->rank->device->table;
    nd_event *done = &b->copied[b->ring_next];
    int32_t *staged = b->ring + b->ring_next * b->each;
    size_t bytes = (size_t)b->dims->T * sizeof *from->inputs;
    int *found = b->found ? b->found + out->slot * b->sources : NULL;
    ND_TRY(table->event_sync(b->rank->device, done));
    out->source_count = stage_sources(b, from, staged, found);
    out->sources = found;
    const int64_t labels = out->source_count > 1 ? out->source_count * b->stride : 0;
    ND_ASSERT(!from->first_keys || b->keys.numbers > 0);
    memcpy(staged + IDS * b->stride, from->inputs, bytes);
    order_labels(b->dims, from->labels, staged + LABELS * b->stride);
    memcpy(staged + POSITIONS * b->stride, from->positions, bytes);
    if (from->first_keys) {
        int64_t *sent = b->sent + out->slot * b->keys.sent;
        nd_cp_first_keys(b->rank, b->dims, from->first_keys, from->places, b->dealing,
                         staged + ARRAYS * b->stride, sent);
        out->sent = sent;
    }
    ND_TRY(nd_copy(&b->stream, array_at(b, out->slot, IDS), staged,
                   (size_t)(b->common + labels) * sizeof *staged));
    ND_TRY(table->event_record(done, &b->stream));
    b->ring_next = (b->ring_next + 1) % b->ring_count;
    *copied = done;
    return ND_OK;
}

/* One micro-batch of a step. */
static nd_step_batch micro_batch_of(const nd_batches *b, const nd_step_batch *step, int micro)
{
    const int64_t B = b->dims->B, offset = micro * b->dims->T, all = micro * B * b->dims->S;
    return (nd_step_batch){.inputs = step->inputs + offset,
                           .labels = step->labels + offset,
                           .positions = step->positions + offset,
                           .sources = step->sources ? step->sources + micro * B : NULL,
                           .first_keys = step->first_keys ? step->first_keys + all : NULL,
                           .places = step->first_keys ? step->places + all : NULL};
}

nd_status nd_batches_load(nd_batches *b, const nd_step_batch *step, int micro, int set,
                          nd_micro_batch *out)
{
    const nd_step_batch from = micro_batch_of(b, step, micro);
    nd_stream *compute = &b->rank->stream;
    nd_event *copied = NULL;
    while (b->slot[b->next].taken) { /* the slot that is free for the longest time */
        b->next = (b->next + 1) % b->slots;
    }
    const int slot = b->next;
    nd_micro_batch batch = {.slot = slot};
    b->slot[slot].taken = true;
    b->next = (slot + 1) % b->slots;
    ND_TRY(nd_stream_wait(&b->stream, &b->slot[slot].read));
    ND_TRY(copy_in(b, &from, &batch, &copied));
    ND_TRY(nd_stream_wait(compute, copied));
    batch.ids = array_at(b, slot, IDS);
    batch.labels = array_at(b, slot, LABELS);
    batch.positions = array_at(b, slot, POSITIONS);
    if (b->positions) {
        int32_t *in_use = b->positions + set * padded(b->in_use);
        ND_TRY(nd_copy(compute, in_use, batch.positions, (size_t)b->in_use * sizeof *in_use));
        batch.positions = in_use;
    }
    batch.first_keys = from.first_keys ? batch.positions + b->stride : NULL;
    batch.source_labels =
        batch.source_count > 1 ? array_at(b, slot, IDS) + b->common : batch.labels;
    *out = batch;
    return ND_OK;
}

nd_status nd_batches_give_back(nd_batches *b, const nd_micro_batch *batch)
{
    nd_stream *compute = &b->rank->stream;
    b->slot[batch->slot].taken = false;
    return compute->device->table->event_record(&b->slot[batch->slot].read, compute);
}

/* The model. */

static void plan_rope(nd_model *m, int64_t positions, nd_memplan *plan)
{
    const nd_dims *d = &m->dims;
    size_t bytes = (size_t)(positions * d->rotated / 2) * sizeof(float);
    const nd_shape *s = &m->rank->shape;
    nd_rope_view *const views[] = {&m->rope, s->rope.query_beta > 0 ? &m->query_rope : NULL,
                                   s->window_theta > 0 ? &m->window_rope : NULL};
    for (size_t v = 0; v < sizeof views / sizeof *views; v++) {
        if (!views[v]) {
            continue;
        }
        views[v]->positions = positions;
        nd_memplan_want(plan, ND_MEM_DATA, "rope cosines", bytes, &views[v]->cos);
        nd_memplan_want(plan, ND_MEM_DATA, "rope sines", bytes, &views[v]->sin);
    }
}

/* Tokens of a piece, where their number is left to the program, and to what they are rounded up
 * where any number gives the same sums. A CPU's take one block of its products. */
enum { PIECE_CPU = 1024, PIECE_GPU = 8192, PIECE_UNIT = 16 };

/* Tokens of a block in which the backend sums up weight gradients; 0: there are none. */
static int64_t block_of(const nd_model *m)
{
    const nd_dims *d = &m->dims;
    const nd_form_need need = {.role = ND_X_OF_DW,
                               .rows = d->T,
                               .columns = d->C,
                               .others = d->F,
                               .stored = d->act,
                               .format = d->act,
                               .uses = 1};
    return m->rank->ops->form(m->rank->device, &need).block;
}

/* Finds the pieces of tokens in which the MLP is computed (nd_dims.piece), and refuses what they
 * cannot have: scales that follow from all tokens of a micro-batch. */
static nd_status init_pieces(nd_model *m)
{
    const int64_t pieces = m->rank->config->parallel.tiled_mlp, T = m->dims.T;
    const nd_recipe *recipe = &m->scales.recipe;
    const int64_t wanted = pieces > 0                ? nd_ceil_div(T, pieces)
                           : pieces == 0             ? T
                           : nd_rank_is_gpu(m->rank) ? PIECE_GPU
                                                     : PIECE_CPU;
    m->piece_block = block_of(m);
    m->dims.piece = nd_min(T, nd_round_up(wanted, nd_max(m->piece_block, PIECE_UNIT)));
    if (!nd_mlp_has_pieces(m)) {
        return ND_OK;
    }
    if (recipe->name && recipe->rules[ND_DY_OF_DW].scaling != ND_SCALING_NONE) {
        return nd_fail(
            ND_ERR_CONFIG,
            "parallel.tiled_mlp is %lld, but fp8.recipe %s has scales or sums that follow "
            "from all tokens of a micro-batch; use fp8.recipe rowwise_with_gw_hp, "
            "train.precision bf16, or parallel.tiled_mlp 1",
            (long long)pieces, recipe->name);
    }
    return m->delays ? nd_fail(ND_ERR_INTERNAL, "weight gradients of an MLP in pieces are delayed")
                     : ND_OK;
}

nd_status nd_model_create(nd_rank *rank, const nd_model_options *o, nd_memplan *plan,
                          nd_model **out)
{
    nd_model *m = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &m));
    m->rank = rank;
    m->dims =
        nd_dims_of(&rank->shape, &rank->mesh, rank->coord, rank->config, nd_rank_is_gpu(rank));
    if (o->cache) {
        m->dims = nd_dims_of_rows(m->dims, &rank->mesh, o->cache->tokens);
    }
    m->recompute = rank->config->parallel.recompute;
    m->forward_only = o->forward_only;
    m->sources = o->sources > 1 ? o->sources : 0;
    m->set_count = (int)nd_max(1, o->sets);
    m->delays = o->delays;
    ND_TRY_OUT(ND_ALLOC(m->set_count, &m->sets));
    ND_ASSERT(!o->cache || o->forward_only);
    ND_TRY_OUT(nd_scales_init(&m->scales, rank, o->linears, o->forward_only));
    ND_TRY_OUT(o->cache ? ND_OK : init_pieces(m));
    ND_TRY_OUT(m->set_count == 1 || !m->scales.recipe.name
                   ? ND_OK
                   : nd_fail(ND_ERR_INTERNAL, "%d micro-batches in flight, but FP8 scales of one",
                             m->set_count));
    /* linear.c pads the rows of FP8 products up to these. */
    ND_ASSERT(!m->scales.recipe.name || rank->ops->fp8_rows == 0 ||
              m->dims.T % rank->ops->fp8_rows == 0);
    nd_layout_options layout = {.shape = &rank->shape,
                                .mesh = &rank->mesh,
                                .coord = rank->coord,
                                .converts = nd_scales_in_segment,
                                .context = &m->scales};
    ND_TRY_OUT(nd_layout_create(&layout, &m->layout));
    m->stage = &m->layout->stages[0];
    /* plan_head, and forward and backward below, take the stage for the whole model. */
    ND_ASSERT(m->layout->stage_count == 1 && m->stage->embeds && m->stage->has_head);
    ND_TRY_OUT(nd_fsdp_init(&m->fsdp, rank, m->layout, &m->scales, o->forward_only, plan));
    const nd_dims *d = &m->dims;
    /* Kept weights have their own. A backward has those of dy and w of up to three linears. */
    ND_TRY_OUT(nd_scales_plan(&m->scales, m->layout,
                              nd_max(nd_max(d->T, d->C), nd_max(d->H * d->D, d->F)),
                              o->forward_only ? d->T : 3 * (d->T + d->C), plan));
    ND_TRY_OUT(nd_activations_plan(m, o->cache, plan));
    plan_rope(m, o->cache ? o->cache->capacity : m->dims.S, plan);
    m->batches.sources = (int)nd_min(m->sources, rank->config->train.micro_batch_size);
    if (o->separate) {
        m->batches.keys = nd_cp_key_sizes_of(rank, &m->dims);
    }
    nd_batches_plan(&m->batches, rank, &m->dims, m->set_count, plan);
    ND_TRY_OUT(nd_linears_create(m, plan));
    if (o->cache) {
        nd_kv_cache_plan(&m->kv, rank, &m->dims, m->stage->layers, o->cache, plan);
    } else {
        nd_cp_init(&m->cp, rank, &m->dims, o->separate, plan);
    }
    *out = m;
out:
    if (status != ND_OK) {
        nd_model_destroy(m);
    }
    return status;
}

/* The host computes the table and copies it. */
static nd_status load_rope_table(nd_model *m, const nd_rope_config *rope, nd_rope_view to,
                                 bool queries)
{
    const nd_dims *d = &m->dims;
    int64_t count = to.positions * d->rotated / 2;
    float *host = NULL;
    if (count == 0) { /* there is no such table */
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(2 * count, &host));
    nd_rope_table(rope, d->rotated, to.positions, queries, host, host + count);
    nd_stream *stream = &m->rank->stream;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_copy(stream, (float *)to.cos, host, (size_t)count * 4));
    ND_TRY_OUT(nd_copy(stream, (float *)to.sin, host + count, (size_t)count * 4));
    ND_TRY_OUT(nd_stream_sync(stream));
out:
    free(host);
    return status;
}

nd_status nd_model_start(nd_model *m)
{
    ND_TRY(nd_scales_start(&m->scales));
    ND_TRY(nd_batches_open(&m->batches));
    const nd_shape *s = &m->rank->shape;
    const nd_rope_config windows = {.theta = s->window_theta};
    ND_TRY(load_rope_table(m, &s->rope, m->query_rope, true));
    ND_TRY(load_rope_table(m, &windows, m->window_rope, false));
    return load_rope_table(m, &s->rope, m->rope, false);
}

void nd_model_destroy(nd_model *m)
{
    if (m) {
        nd_batches_close(&m->batches);
        free(m->linears);
        free(m->packed.weights);
        nd_fsdp_fini(&m->fsdp);
        nd_scales_fini(&m->scales);
        nd_layout_destroy(m->layout);
        for (int s = 0; m->sets && s < m->set_count; s++) {
            free(m->sets[s].blocks);
        }
        free(m->sets);
        free(m);
    }
}

nd_status nd_model_unshard(nd_model *m)
{
    ND_TRY(nd_scales_refresh(&m->scales, m->fsdp.master, m->fsdp.version));
    return nd_fsdp_prefetch(&m->fsdp, nd_layout_param(m->layout, ND_PARAM_EMBED, -1)->unit);
}

nd_activation_set *nd_model_take_set(nd_model *m)
{
    nd_activation_set *set = m->sets;
    while (set->taken) {
        set++;
        ND_ASSERT(set < m->sets + m->set_count);
    }
    set->taken = true;
    return set;
}

nd_status nd_model_load(nd_model *m, nd_activation_set *set, const nd_step_batch *from, int micro)
{
    ND_ASSERT(set->taken && !set->loaded);
    set->loaded = true;
    set->micro = micro;
    return nd_batches_load(&m->batches, from, micro, (int)(set - m->sets), &set->batch);
}

nd_status nd_model_load_batch(nd_model *m, nd_activation_set *set, const int32_t *inputs,
                              const int32_t *labels, const int32_t *positions)
{
    const nd_step_batch from = {.inputs = inputs, .labels = labels, .positions = positions};
    return nd_model_load(m, set, &from, 0);
}

nd_status nd_model_give_back(nd_model *m, nd_activation_set *set)
{
    bool loaded = set->loaded;
    ND_ASSERT(set->taken);
    set->taken = set->loaded = false;
    return loaded ? nd_batches_give_back(&m->batches, &set->batch) : ND_OK;
}

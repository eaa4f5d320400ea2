// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/thread.h"
#include "trainer/data/formats.h"
#include "trainer/context/deal.h"

enum { SLOTS = 2, WAIT_SECONDS = 300, JOIN_SECONDS = 30 };

/* One step's arrays. The caller holds at most one slot while the thread fills the other. */
typedef struct slot {
    int32_t *inputs, *labels; /* (accumulation, B, s); owned */
    /* Of separate documents, else NULL: (accumulation, B, s), (accumulation, B, S) twice; owned. */
    int32_t *positions, *first_keys, *places;
    nd_step_sight sight;
    int64_t valid;
    int *sources;          /* (accumulation, B); of a blend, else NULL; owned */
    int64_t *source_valid; /* (sources); likewise */
} slot;

struct nd_loader {
    const nd_dataset *dataset; /* changed by nd_loader_rewind, with the lock held */
    const nd_dataset *reading; /* the thread's copy of it, for the step that it fills */
    nd_loader_options options;
    nd_deal_of deal;
    slot slots[SLOTS];
    int32_t *positions; /* (accumulation, B, s) of joined documents, in their places; owned */
    /* The thread's scratch: (S) of a block, (s) the places of the rank's tokens, of nd_deal; owned.
     */
    int32_t *block_inputs, *block_labels, *local;
    char *dealing;
    nd_thread thread; /* its stop is also read between the blocks of a step */

    nd_monitor monitor; /* guards what follows */
    int64_t produced;   /* steps that the thread has filled since open or rewind */
    int64_t taken;      /* steps given to the caller */
    bool lent;          /* the caller holds slot (taken - 1) % SLOTS */
    int64_t rewinds;    /* a step that was begun before a rewind is dropped */
    nd_error error;     /* of the thread, which produces nothing after its first error */
};

int64_t nd_step_blocks(const nd_config *config)
{
    return config->train.micro_batch_size * config->train.gradient_accumulation_steps *
           nd_mesh_group_size(&config->resolved_mesh, ND_GROUP_DP);
}

nd_loader_options nd_loader_options_of(const nd_rank *rank, bool validation)
{
    const nd_config *config = rank->config;
    const nd_deal_of deal =
        nd_deal_of_mesh(&rank->shape, &rank->mesh, config->train.sequence_length);
    return (nd_loader_options){
        .sequence = config->train.sequence_length,
        .micro_batch = config->train.micro_batch_size,
        .accumulation = validation ? 1 : config->train.gradient_accumulation_steps,
        .dp_size = nd_mesh_group_size(&rank->mesh, ND_GROUP_DP),
        .dp_index = nd_mesh_group_index(&rank->mesh, ND_GROUP_DP, rank->rank),
        .cp_size = deal.cp,
        .cp_index = rank->coord.at[ND_AXIS_CP],
        .ulysses = deal.ulysses,
        .windows = deal.windows,
        .seed = config->data.shuffle_seed,
        .validation = validation,
        .separate = config->data.documents != ND_DOCUMENTS_JOIN,
        .running = config->data.positions == ND_POSITIONS_RUNNING,
    };
}

static nd_deal_of deal_of(const nd_loader_options *o)
{
    return (nd_deal_of){o->sequence, o->cp_size, (int)nd_max(o->ulysses, 1), o->windows};
}

/* The block of sample i; N past the end. */
static int64_t block_of(const nd_loader *loader, int64_t i)
{
    int64_t N = loader->reading->blocks;
    if (loader->options.validation) {
        return i < N ? i : N;
    }
    return nd_dataset_sample(loader->reading, loader->options.seed, i);
}

/* Sums over the rows of a step. */
typedef struct step_sums {
    int64_t pairs, most, filled, inputs;
} step_sums;

/* First keys of a block that was read, where its tokens go, and the positions of this rank's. */
static nd_status deal_documents(nd_loader *loader, int64_t block, int64_t row, slot *out,
                                step_sums *sums)
{
    const nd_loader_options *o = &loader->options;
    const int64_t local = o->sequence / o->cp_size;
    int32_t *first_keys = out->first_keys + row * o->sequence;
    int32_t *places = out->places + row * o->sequence;
    int64_t filled;
    ND_TRY(
        nd_dataset_first_keys(loader->reading, block, loader->block_inputs, first_keys, &filled));
    const nd_deal_pairs pairs = nd_deal(&loader->deal, first_keys, loader->dealing, places);
    nd_deal_local(&loader->deal, places, o->cp_index, loader->local);
    for (int64_t i = 0; i < local; i++) {
        const int32_t place = loader->local[i];
        out->positions[row * local + i] = place - (o->running ? 0 : first_keys[place]);
    }
    sums->most += pairs.most;
    sums->pairs += pairs.all;
    sums->filled += filled;
    sums->inputs += o->sequence;
    return ND_OK;
}

/* Where it has separate documents. */
static nd_step_sight sight_of(const nd_deal_of *deal, const step_sums *sums)
{
    if (sums->inputs == 0) {
        return (nd_step_sight){0};
    }
    return (nd_step_sight){.pairs = sums->pairs / nd_max(deal->windows.layers, 1),
                           .balance = (double)sums->most * (deal->cp / deal->ulysses) /
                                      (double)sums->pairs,
                           .padding = (double)(sums->inputs - sums->filled) / (double)sums->inputs};
}

static nd_status fill_sample(nd_loader *loader, int64_t block, int64_t row, slot *out,
                             step_sums *sums)
{
    const nd_loader_options *o = &loader->options;
    const int64_t local = o->sequence / o->cp_size;
    const int32_t *places = loader->positions;
    int32_t *inputs = out->inputs + row * local, *labels = out->labels + row * local;
    if (block == loader->reading->blocks) {
        for (int64_t i = 0; out->first_keys && i < o->sequence; i++) {
            out->first_keys[row * o->sequence + i] = (int32_t)i;
            out->places[row * o->sequence + i] = (int32_t)i;
        }
        for (int64_t i = 0; out->first_keys && i < local; i++) {
            out->positions[row * local + i] = 0;
        }
        for (int64_t i = 0; i < local; i++) {
            inputs[i] = 0;
            labels[i] = ND_LABEL_IGNORED;
        }
        return ND_OK;
    }
    ND_TRY(nd_dataset_block(loader->reading, block, loader->block_inputs, loader->block_labels));
    if (out->first_keys) {
        ND_TRY(deal_documents(loader, block, row, out, sums));
        places = loader->local;
    }
    for (int64_t i = 0; i < local; i++) {
        inputs[i] = loader->block_inputs[places[i]];
        labels[i] = loader->block_labels[places[i]];
    }
    return ND_OK;
}

/* Fills all micro-batches of step `step` of the run. Returns early, with the slot half filled, when
 * the loader closes. */
static nd_status fill_step(nd_loader *loader, int64_t step, slot *out)
{
    const nd_loader_options *o = &loader->options;
    int64_t local = o->sequence / o->cp_size, B = o->micro_batch;
    int64_t round = o->dp_size * B; /* samples of one micro-batch over all data ranks */
    int64_t valid = 0;
    step_sums sums = {0};
    for (int j = 0; out->source_valid && j < nd_dataset_sources(loader->reading); j++) {
        out->source_valid[j] = 0;
    }
    for (int64_t row = 0; row < o->accumulation * B && !loader->thread.stop; row++) {
        int64_t micro = row / B, b = row % B;
        int64_t sample = step * o->accumulation * round + o->samples_ahead + micro * round +
                         (int64_t)o->dp_index * B + b;
        int32_t *labels = out->labels + row * local;
        int64_t block = block_of(loader, sample), before = valid;
        ND_TRY(fill_sample(loader, block, row, out, &sums));
        for (int64_t i = 0; i < local; i++) {
            valid += labels[i] != ND_LABEL_IGNORED;
        }
        if (out->sources) { /* a sample past the end has no labels, whatever its source */
            const bool past = block == loader->reading->blocks;
            out->sources[row] = past ? 0 : nd_dataset_source_of(loader->reading, block);
            out->source_valid[out->sources[row]] += valid - before;
        }
    }
    out->valid = valid;
    out->sight = sight_of(&loader->deal, &sums);
    return ND_OK;
}

/* Waits, with the lock held, until a slot is free. False: the loader closes. */
static bool wait_for_slot(nd_loader *loader)
{
    while (!loader->thread.stop &&
           (loader->error.status != ND_OK ||
            loader->produced - loader->taken + (loader->lent ? 1 : 0) >= SLOTS)) {
        nd_monitor_wait(&loader->monitor, ND_CLOCK_NEVER); /* nd_loader_close ends the wait */
    }
    return !loader->thread.stop;
}

static void prefetch(void *context)
{
    nd_loader *loader = context;
    nd_monitor_lock(&loader->monitor);
    while (wait_for_slot(loader)) {
        int64_t number = loader->produced, rewinds = loader->rewinds;
        loader->reading = loader->dataset;
        nd_monitor_unlock(&loader->monitor);
        nd_status status =
            fill_step(loader, loader->options.first_step + number, &loader->slots[number % SLOTS]);
        nd_monitor_lock(&loader->monitor);
        if (loader->rewinds != rewinds) {
            continue;
        }
        if (status == ND_OK) {
            loader->produced++;
        } else {
            loader->error = *nd_error_last();
        }
        nd_monitor_tell(&loader->monitor);
    }
    nd_monitor_unlock(&loader->monitor);
}

static nd_status make_arrays(nd_loader *loader)
{
    const nd_loader_options *o = &loader->options;
    int64_t local = o->sequence / o->cp_size;
    /* A validation reads its sets one by one. */
    const int sources = o->validation ? 1 : nd_dataset_sources(loader->dataset);
    for (int i = 0; i < SLOTS; i++) {
        ND_TRY(ND_ALLOC(o->accumulation * o->micro_batch * local, &loader->slots[i].inputs));
        ND_TRY(ND_ALLOC(o->accumulation * o->micro_batch * local, &loader->slots[i].labels));
        if (o->separate) {
            const int64_t rows = o->accumulation * o->micro_batch;
            ND_TRY(ND_ALLOC(rows * local, &loader->slots[i].positions));
            ND_TRY(ND_ALLOC(rows * o->sequence, &loader->slots[i].first_keys));
            ND_TRY(ND_ALLOC(rows * o->sequence, &loader->slots[i].places));
        }
        if (sources > 1) {
            ND_TRY(ND_ALLOC(o->accumulation * o->micro_batch, &loader->slots[i].sources));
            ND_TRY(ND_ALLOC(sources, &loader->slots[i].source_valid));
        }
    }
    ND_TRY(ND_ALLOC(o->accumulation * o->micro_batch * local, &loader->positions));
    ND_TRY(ND_ALLOC(o->sequence, &loader->block_inputs));
    ND_TRY(ND_ALLOC(o->sequence, &loader->block_labels));
    ND_TRY(ND_ALLOC(local, &loader->local));
    ND_TRY(ND_ALLOC((int64_t)nd_deal_bytes(&loader->deal), &loader->dealing));
    nd_deal(&loader->deal, NULL, loader->dealing, loader->block_inputs);
    for (int64_t b = 0; b < o->accumulation * o->micro_batch; b++) {
        nd_deal_local(&loader->deal, loader->block_inputs, o->cp_index,
                      loader->positions + b * local);
    }
    return ND_OK;
}

nd_status nd_loader_open(const nd_dataset *dataset, const nd_loader_options *options,
                         nd_loader **out)
{
    const nd_loader_options *o = options;
    ND_ASSERT(o->sequence == dataset->sequence && o->micro_batch >= 1 && o->accumulation >= 1);
    ND_ASSERT(o->dp_index >= 0 && o->dp_index < o->dp_size && o->first_step >= 0);
    ND_ASSERT(o->first_step * o->accumulation * o->micro_batch * o->dp_size + o->samples_ahead >=
              0);
    ND_ASSERT(o->cp_index >= 0 && o->cp_index < o->cp_size);
    ND_ASSERT(o->cp_size == 1 || o->sequence % (2 * o->cp_size) == 0);
    nd_status status = ND_OK;
    nd_loader *loader = NULL;
    ND_TRY_OUT(ND_ALLOC(1, &loader));
    loader->monitor = (nd_monitor)ND_MONITOR_INIT;
    loader->dataset = dataset;
    loader->options = *o;
    loader->deal = deal_of(o);
    ND_TRY_OUT(make_arrays(loader));
    ND_TRY_OUT(nd_thread_start(&loader->thread, &loader->monitor, "the data prefetch thread",
                               prefetch, loader));
    *out = loader;
    loader = NULL;
out:
    nd_loader_close(loader);
    return status;
}

bool nd_loader_close(nd_loader *loader)
{
    if (!loader) {
        return true;
    }
    if (!nd_thread_join(&loader->thread, JOIN_SECONDS)) {
        nd_log_warning("the data prefetch thread hangs while it reads \"%s\"; the run ends without "
                       "it",
                       loader->dataset->path);
        return false; /* it still uses its memory */
    }
    nd_monitor_fini(&loader->monitor);
    for (int i = 0; i < SLOTS; i++) {
        free(loader->slots[i].inputs);
        free(loader->slots[i].labels);
        free(loader->slots[i].positions);
        free(loader->slots[i].first_keys);
        free(loader->slots[i].places);
        free(loader->slots[i].sources);
        free(loader->slots[i].source_valid);
    }
    free(loader->dealing);
    free(loader->local);
    free(loader->block_labels);
    free(loader->block_inputs);
    free(loader->positions);
    free(loader);
    return true;
}

size_t nd_loader_bytes(const nd_loader_options *options)
{
    const nd_loader_options *o = options;
    int64_t rows = o->accumulation * o->micro_batch, local = o->sequence / o->cp_size;
    int64_t separate = o->separate ? SLOTS * rows * (local + 2 * o->sequence) : 0;
    const int64_t scratch = 2 * o->sequence + local;
    const nd_deal_of deal = deal_of(o);
    return (size_t)((SLOTS * 2 + 1) * rows * local + separate + scratch) * sizeof(int32_t) +
           nd_deal_bytes(&deal);
}

/* Waits, with the lock held, until step `taken` is filled or the thread has failed. */
static nd_status wait_for_step(nd_loader *loader)
{
    const int64_t deadline = nd_clock_after(WAIT_SECONDS);
    while (loader->produced == loader->taken) {
        if (loader->error.status != ND_OK) {
            return nd_fail(loader->error.status, "%s", loader->error.message);
        }
        if (!nd_monitor_wait(&loader->monitor, deadline) && loader->produced == loader->taken &&
            loader->error.status == ND_OK) {
            return nd_fail(
                ND_ERR_HANG,
                "the data of step %lld did not arrive within %d s: reading \"%s\" hangs; "
                "check whether its file system can be reached",
                (long long)(loader->options.first_step + loader->taken + 1), WAIT_SECONDS,
                loader->dataset->path);
        }
    }
    return ND_OK;
}

nd_status nd_loader_next(nd_loader *loader, nd_step_batch *out)
{
    double begin = nd_clock_seconds();
    nd_monitor_lock(&loader->monitor);
    loader->lent = false;
    nd_monitor_tell(&loader->monitor);
    nd_status status = wait_for_step(loader);
    if (status == ND_OK) {
        const slot *s = &loader->slots[loader->taken % SLOTS];
        const bool separate = s->first_keys && nd_dataset_is_separate(loader->dataset);
        loader->taken++;
        loader->lent = true;
        *out = (nd_step_batch){.inputs = s->inputs,
                               .labels = s->labels,
                               .positions = separate ? s->positions : loader->positions,
                               .first_keys = separate ? s->first_keys : NULL,
                               .places = separate ? s->places : NULL,
                               .sight = separate ? s->sight : (nd_step_sight){0},
                               .valid = s->valid,
                               .sources = s->sources,
                               .source_valid = s->source_valid,
                               .wait_seconds = nd_clock_seconds() - begin};
        /* The other slot is free now: the thread reads one step ahead. */
        nd_monitor_tell(&loader->monitor);
    }
    nd_monitor_unlock(&loader->monitor);
    return status;
}

void nd_loader_rewind(nd_loader *loader, const nd_dataset *dataset)
{
    ND_ASSERT(!dataset || dataset->sequence == loader->options.sequence);
    nd_monitor_lock(&loader->monitor);
    loader->dataset = dataset ? dataset : loader->dataset;
    loader->produced = 0;
    loader->taken = 0;
    loader->lent = false;
    loader->rewinds++;
    nd_monitor_tell(&loader->monitor);
    nd_monitor_unlock(&loader->monitor);
}

int64_t nd_loader_validation_steps(const nd_dataset *dataset, const nd_loader_options *options)
{
    int64_t round = options->accumulation * options->micro_batch * options->dp_size;
    return nd_ceil_div(dataset->blocks, round);
}

int64_t nd_loader_last_step(const nd_dataset *dataset, const nd_loader_options *options,
                            int64_t steps)
{
    const nd_loader_options *o = options;
    const int64_t samples = o->accumulation * o->micro_batch * o->dp_size;
    const int64_t seen = o->first_step * samples + o->samples_ahead;
    const int64_t all = nd_dataset_samples(dataset);
    const int64_t full = seen < all ? (all - seen) / samples : 0;
    return steps - o->first_step > full ? o->first_step + full : steps;
}

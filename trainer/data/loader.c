// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/thread.h"
#include "trainer/data/dataset.h"

enum { SLOTS = 2, WAIT_SECONDS = 300, JOIN_SECONDS = 30 };

/* The arrays of nd_step_batch, and its numbers. */
typedef struct slot {
    int32_t *inputs, *labels;
    int32_t *positions, *first_keys, *places; /* of separate documents, else NULL */
    nd_step_sight sight;
    int64_t valid;
    int *sources; /* of a blend, else NULL, as source_valid */
    int64_t *source_valid;
} slot;

struct nd_loader {
    const nd_dataset *dataset; /* changed by nd_loader_rewind, with the lock held */
    const nd_dataset *reading; /* the thread's copy of it, for the step that it fills */
    nd_loader_options options;
    slot slots[SLOTS];  /* the caller holds at most one while the thread fills the other */
    char *memory;       /* of all arrays; owned */
    int32_t *positions; /* (accumulation, B, s) of joined documents, in their places */
    /* The thread's scratch: a block, (s) the places of the rank's tokens, that of nd_deal. */
    nd_block block;
    int32_t *local;
    char *dealing;
    nd_thread thread; /* its stop is also read between the blocks of a step */

    nd_monitor monitor; /* guards what follows */
    int64_t produced;   /* steps that the thread has filled since open or rewind */
    int64_t taken;      /* steps given to the caller */
    bool lent;          /* the caller holds slot (taken - 1) % SLOTS */
    int64_t rewinds;    /* a step that was begun before a rewind is dropped */
    nd_error error;     /* of the thread, which then produces nothing until a rewind */
};

int64_t nd_step_blocks(const nd_config *config)
{
    return config->train.micro_batch_size * config->train.gradient_accumulation_steps *
           nd_mesh_group_size(&config->resolved_mesh, ND_GROUP_DP);
}

nd_loader_options nd_loader_options_of(const nd_rank *rank, bool validation)
{
    const nd_config *config = rank->config;
    return (nd_loader_options){
        .deal = nd_deal_of_mesh(&rank->shape, &rank->mesh, config->train.sequence_length),
        .micro_batch = config->train.micro_batch_size,
        .accumulation = validation ? 1 : config->train.gradient_accumulation_steps,
        .dp_size = nd_mesh_group_size(&rank->mesh, ND_GROUP_DP),
        .dp_index = nd_mesh_group_index(&rank->mesh, ND_GROUP_DP, rank->rank),
        .cp_index = rank->coord.at[ND_AXIS_CP],
        .seed = config->data.shuffle_seed,
        .validation = validation,
        .separate = config->data.documents != ND_DOCUMENTS_JOIN,
        .running = config->data.positions == ND_POSITIONS_RUNNING,
    };
}

/* The samples that all data-parallel ranks read together. */
static int64_t samples_of_step(const nd_loader_options *o)
{
    return o->accumulation * o->micro_batch * o->dp_size;
}

/* Sums over the rows of a step that have separate documents. */
typedef struct step_sums {
    int64_t pairs, most, filled, inputs;
} step_sums;

/* Puts this rank's part of a block into a row of the step; where documents are separate also their
 * first keys, where the block's tokens go, and the positions of this rank's. */
static nd_status fill_row(nd_loader *loader, int64_t block, int64_t row, slot *out, step_sums *sums)
{
    const nd_loader_options *o = &loader->options;
    const int64_t S = o->deal.sequence, local = S / o->deal.cp;
    const int32_t *places = loader->positions;
    int32_t *first_keys = out->first_keys ? out->first_keys + row * S : NULL;
    loader->block.first_keys = first_keys;
    ND_TRY(nd_dataset_block(loader->reading, block, &loader->block));
    if (first_keys) {
        int32_t *dealt = out->places + row * S;
        const nd_deal_pairs pairs = nd_deal(&o->deal, first_keys, loader->dealing, dealt);
        nd_deal_local(&o->deal, dealt, o->cp_index, loader->local);
        places = loader->local;
        for (int64_t i = 0; i < local; i++) {
            out->positions[row * local + i] = places[i] - (o->running ? 0 : first_keys[places[i]]);
        }
        if (block < loader->reading->blocks) {
            sums->most += pairs.most;
            sums->pairs += pairs.all;
            sums->filled += loader->block.filled;
            sums->inputs += S;
        }
    }
    for (int64_t i = 0; i < local; i++) {
        out->inputs[row * local + i] = loader->block.inputs[places[i]];
        out->labels[row * local + i] = loader->block.labels[places[i]];
    }
    return ND_OK;
}

/* Fills all micro-batches of step `step` of the run. Returns early, with the slot half filled, when
 * the loader closes. */
static nd_status fill_step(nd_loader *loader, int64_t step, slot *out)
{
    const nd_loader_options *o = &loader->options;
    const nd_dataset *data = loader->reading;
    const int64_t local = o->deal.sequence / o->deal.cp, B = o->micro_batch, N = data->blocks;
    const int64_t first = step * samples_of_step(o) + o->samples_ahead;
    step_sums sums = {0};
    out->valid = 0;
    for (int j = 0; out->sources && j < nd_dataset_sources(data); j++) {
        out->source_valid[j] = 0;
    }
    for (int64_t row = 0; row < o->accumulation * B && !loader->thread.stop; row++) {
        const int64_t micro = row / B, b = row % B;
        const int64_t sample = first + micro * o->dp_size * B + (int64_t)o->dp_index * B + b;
        const int64_t block = !o->validation ? nd_dataset_sample(data, o->seed, sample)
                              : sample < N   ? sample
                                             : N;
        int64_t valid = 0;
        ND_TRY(fill_row(loader, block, row, out, &sums));
        for (int64_t i = 0; i < local; i++) {
            valid += out->labels[row * local + i] != ND_LABEL_IGNORED;
        }
        out->valid += valid;
        if (out->sources) { /* a sample past the end has no labels, whatever its source */
            out->sources[row] = block == N ? 0 : nd_blend_part_of(data->blend, block);
            out->source_valid[out->sources[row]] += valid;
        }
    }
    out->sight = (nd_step_sight){0};
    if (sums.inputs > 0) {
        const int groups = o->deal.cp / o->deal.ulysses;
        out->sight =
            (nd_step_sight){.pairs = sums.pairs / nd_max(o->deal.windows.layers, 1),
                            .balance = (double)sums.most * groups / (double)sums.pairs,
                            .padding = (double)(sums.inputs - sums.filled) / (double)sums.inputs};
    }
    return ND_OK;
}

static void prefetch(void *context)
{
    nd_loader *loader = context;
    nd_monitor_lock(&loader->monitor);
    while (!loader->thread.stop) {
        const int64_t number = loader->produced, rewinds = loader->rewinds;
        if (loader->error.status != ND_OK || number - loader->taken + loader->lent >= SLOTS) {
            nd_monitor_wait(&loader->monitor, ND_CLOCK_NEVER); /* nd_loader_close ends the wait */
            continue;
        }
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

/* A part of the memory from `base` on, of which *at bytes are taken; NULL where there is none. */
static void *take_memory(char *base, size_t *at, int64_t count, size_t size)
{
    const size_t begin = *at;
    *at += ((size_t)count * size + 63) / 64 * 64;
    return base && count > 0 ? base + begin : NULL;
}

/* Gives each array its part of the memory, and returns how much there must be. */
static size_t lay_out(nd_loader *loader, char *base)
{
    const nd_loader_options *o = &loader->options;
    const int64_t S = o->deal.sequence, rows = o->accumulation * o->micro_batch;
    const int64_t local = S / o->deal.cp, separate = o->separate ? rows : 0;
    /* A validation reads its sets one by one. */
    const int all = loader->dataset && !o->validation ? nd_dataset_sources(loader->dataset) : 1;
    const int64_t sources = all > 1 ? all : 0;
    size_t at = 0;
    for (slot *s = loader->slots; s < loader->slots + SLOTS; s++) {
        s->inputs = take_memory(base, &at, rows * local, sizeof *s->inputs);
        s->labels = take_memory(base, &at, rows * local, sizeof *s->labels);
        s->positions = take_memory(base, &at, separate * local, sizeof *s->positions);
        s->first_keys = take_memory(base, &at, separate * S, sizeof *s->first_keys);
        s->places = take_memory(base, &at, separate * S, sizeof *s->places);
        s->sources = take_memory(base, &at, sources > 0 ? rows : 0, sizeof *s->sources);
        s->source_valid = take_memory(base, &at, sources, sizeof *s->source_valid);
    }
    loader->positions = take_memory(base, &at, rows * local, sizeof *loader->positions);
    loader->block.inputs = take_memory(base, &at, S, sizeof *loader->block.inputs);
    loader->block.labels = take_memory(base, &at, S, sizeof *loader->block.labels);
    loader->local = take_memory(base, &at, local, sizeof *loader->local);
    loader->dealing = take_memory(base, &at, (int64_t)nd_deal_bytes(&o->deal), 1);
    return at;
}

static nd_status make_arrays(nd_loader *loader)
{
    const nd_loader_options *o = &loader->options;
    const int64_t rows = o->accumulation * o->micro_batch;
    ND_TRY(nd_alloc(lay_out(loader, NULL), 1, (void **)&loader->memory));
    lay_out(loader, loader->memory);
    nd_deal(&o->deal, NULL, loader->dealing, loader->block.inputs);
    for (int64_t b = 0; b < rows; b++) {
        nd_deal_local(&o->deal, loader->block.inputs, o->cp_index,
                      loader->positions + b * (o->deal.sequence / o->deal.cp));
    }
    return ND_OK;
}

nd_status nd_loader_open(const nd_dataset *dataset, const nd_loader_options *options,
                         nd_loader **out)
{
    const nd_loader_options *o = options;
    const int cp = o->deal.cp;
    ND_ASSERT(o->deal.sequence == dataset->sequence && o->micro_batch >= 1 && o->accumulation >= 1);
    ND_ASSERT(o->dp_index >= 0 && o->dp_index < o->dp_size && o->first_step >= 0);
    ND_ASSERT(o->first_step * samples_of_step(o) + o->samples_ahead >= 0);
    ND_ASSERT(o->cp_index >= 0 && o->cp_index < cp && o->deal.ulysses >= 1);
    ND_ASSERT(cp == 1 || o->deal.sequence % (2 * cp) == 0);
    nd_status status = ND_OK;
    nd_loader *loader = NULL;
    ND_TRY_OUT(ND_ALLOC(1, &loader));
    loader->monitor = (nd_monitor)ND_MONITOR_INIT;
    loader->dataset = dataset;
    loader->options = *o;
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
    free(loader->memory);
    free(loader);
    return true;
}

size_t nd_loader_bytes(const nd_loader_options *options)
{
    nd_loader loader = {.options = *options};
    return lay_out(&loader, NULL);
}

/* Waits, with the lock held, until step `taken` is filled or the thread has failed. */
static nd_status wait_for_step(nd_loader *loader)
{
    const int64_t deadline = nd_clock_after(WAIT_SECONDS);
    while (loader->produced == loader->taken) {
        if (loader->error.status != ND_OK) {
            return nd_fail_as(loader->error.cause, loader->error.status, "%s",
                              loader->error.message);
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
        loader->taken++;
        loader->lent = true;
        /* The other slot is free now: the thread reads one step ahead. */
        nd_monitor_tell(&loader->monitor);
    }
    nd_monitor_unlock(&loader->monitor);
    return status;
}

void nd_loader_rewind(nd_loader *loader, const nd_dataset *dataset)
{
    ND_ASSERT(!dataset || dataset->sequence == loader->options.deal.sequence);
    nd_monitor_lock(&loader->monitor);
    loader->dataset = dataset ? dataset : loader->dataset;
    loader->produced = 0;
    loader->taken = 0;
    loader->lent = false;
    loader->error = (nd_error){0}; /* of data that were read ahead, and may not be read any more */
    loader->rewinds++;
    nd_monitor_tell(&loader->monitor);
    nd_monitor_unlock(&loader->monitor);
}

int64_t nd_loader_validation_steps(const nd_dataset *dataset, const nd_loader_options *options)
{
    return nd_ceil_div(dataset->blocks, samples_of_step(options));
}

int64_t nd_loader_last_step(const nd_dataset *dataset, const nd_loader_options *options,
                            int64_t steps)
{
    const nd_loader_options *o = options;
    const int64_t seen = o->first_step * samples_of_step(o) + o->samples_ahead;
    const int64_t all = nd_dataset_facts_of(dataset).samples;
    const int64_t full = seen < all ? (all - seen) / samples_of_step(o) : 0;
    return steps - o->first_step > full ? o->first_step + full : steps;
}

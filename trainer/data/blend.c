// SPDX-License-Identifier: Apache-2.0
/* A dataset of several sources, and the order of the training samples of any dataset. */
#include <stdlib.h>

#include "runtime/base/rng.h"
#include "trainer/data/dataset.h"

static nd_status make_mix(nd_blend *blend)
{
    nd_mix_source *list;
    bool mixed = false;
    ND_TRY(ND_ALLOC(blend->count, &list));
    for (int j = 0; j < blend->count; j++) {
        const nd_dataset_part *part = &blend->parts[j];
        mixed = mixed || part->weight > 0 || part->epochs > 0;
        list[j] = (nd_mix_source){part->data->blocks, part->weight, part->epochs};
    }
    nd_status status = mixed ? nd_mix_create(list, blend->count, &blend->mix) : ND_OK;
    free(list);
    return status;
}

static nd_status take_parts(nd_dataset *dataset, nd_dataset_part *parts, int count)
{
    nd_blend *blend = dataset->blend;
    dataset->vocab = parts[0].data->vocab;
    dataset->sequence = parts[0].data->sequence;
    dataset->format = parts[0].data->format;
    for (; blend->count < count; blend->count++) {
        nd_dataset_part *from = &parts[blend->count], *part = &blend->parts[blend->count];
        char *name;
        ND_ASSERT(from->data->sequence == dataset->sequence);
        ND_TRY(nd_fs_format(&name, "%s", from->name));
        *part = *from;
        part->name = name;
        from->data = NULL;
        blend->named = blend->named || name[0];
        blend->firsts[blend->count] = dataset->blocks;
        dataset->blocks += part->data->blocks;
        dataset->tokens += nd_dataset_tokens(part->data);
    }
    ND_TRY(nd_fs_format(&dataset->path, "%s and %d more", blend->parts[0].data->path,
                        blend->count - 1)); /* for messages */
    return make_mix(blend);
}

nd_status nd_dataset_blend(nd_dataset_part *parts, int count, nd_dataset **out)
{
    ND_ASSERT(count >= 1);
    nd_status status = ND_OK;
    nd_dataset *dataset = NULL;
    ND_TRY_OUT(ND_ALLOC(1, &dataset));
    ND_TRY_OUT(ND_ALLOC(1, &dataset->blend));
    ND_TRY_OUT(ND_ALLOC(count, &dataset->blend->parts));
    ND_TRY_OUT(ND_ALLOC(count, &dataset->blend->firsts));
    ND_TRY_OUT(take_parts(dataset, parts, count));
    *out = dataset;
    dataset = NULL;
out:
    nd_dataset_close(dataset);
    for (int j = 0; j < count; j++) {
        nd_dataset_close(parts[j].data);
        parts[j].data = NULL;
    }
    return status;
}

void nd_blend_close(nd_blend *blend)
{
    if (!blend) {
        return;
    }
    for (int j = 0; j < blend->count; j++) {
        nd_dataset_close(blend->parts[j].data);
        free((char *)blend->parts[j].name);
    }
    nd_mix_destroy(blend->mix);
    free(blend->parts);
    free(blend->firsts);
    free(blend);
}

int nd_blend_find(const nd_blend *blend, int64_t block)
{
    int low = 0, high = blend->count;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (blend->firsts[middle] <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

int nd_dataset_sources(const nd_dataset *dataset)
{
    return dataset->blend && dataset->blend->named ? dataset->blend->count : 1;
}

const char *nd_dataset_source_name(const nd_dataset *dataset, int index)
{
    return dataset->blend && dataset->blend->named ? dataset->blend->parts[index].name : "";
}

const nd_dataset *nd_dataset_source(const nd_dataset *dataset, int index)
{
    return dataset->blend && dataset->blend->named ? dataset->blend->parts[index].data : dataset;
}

int nd_dataset_source_of(const nd_dataset *dataset, int64_t block)
{
    return dataset->blend && dataset->blend->named ? nd_blend_find(dataset->blend, block) : 0;
}

int64_t nd_dataset_sample(const nd_dataset *dataset, int64_t seed, int64_t i)
{
    const nd_blend *blend = dataset->blend;
    const int64_t N = dataset->blocks;
    if (!blend || !blend->mix) {
        return (int64_t)nd_rng_permute((uint64_t)seed, (uint64_t)(i / N), (uint64_t)N,
                                       (uint64_t)(i % N));
    }
    if (i >= blend->mix->samples) {
        return N;
    }
    const nd_mix_place at = nd_mix_at(blend->mix, i);
    const int64_t own = blend->parts[at.source].data->blocks;
    /* Sources of equal size must not share their orders. */
    const uint64_t stream = (uint64_t)(at.index / own) + ((uint64_t)at.source << 48);
    return blend->firsts[at.source] + (int64_t)nd_rng_permute((uint64_t)seed, stream, (uint64_t)own,
                                                              (uint64_t)(at.index % own));
}

/* Of the samples, those that blocks 0 to `blocks` - 1 may be expected to give. */
static int64_t expect(const nd_dataset *dataset, int64_t samples, int64_t blocks)
{
    return (int64_t)((long double)samples * blocks / dataset->blocks + 0.5L);
}

bool nd_dataset_count_samples(const nd_dataset *dataset, int64_t samples, int64_t *counts)
{
    const nd_blend *blend = dataset->blend;
    if (!blend || !blend->named) {
        counts[0] = samples;
        return true;
    }
    if (blend->mix) {
        nd_mix_counts(blend->mix, samples, counts);
        return true;
    }
    for (int j = 0; j < blend->count; j++) {
        const int64_t first = blend->firsts[j], blocks = blend->parts[j].data->blocks;
        counts[j] = expect(dataset, samples, first + blocks) - expect(dataset, samples, first);
    }
    return samples % dataset->blocks == 0;
}

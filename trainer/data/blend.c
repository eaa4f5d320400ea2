// SPDX-License-Identifier: Apache-2.0
/* A dataset of several sources, and the order of the training samples of any dataset. */
#include <stdlib.h>

#include "runtime/base/rng.h"
#include "trainer/data/formats.h"

static nd_status make_mix(nd_blend *blend)
{
    nd_mix_source *list;
    bool mixed = false;
    ND_TRY(ND_ALLOC(blend->count, &list));
    for (int j = 0; j < blend->count; j++) {
        const nd_source *s = &blend->sources[j];
        mixed = mixed || s->weight > 0 || s->epochs > 0;
        list[j] = (nd_mix_source){s->data->blocks, s->weight, s->epochs};
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
        nd_dataset_part *part = &parts[blend->count];
        nd_source *s = &blend->sources[blend->count];
        ND_ASSERT(part->data->sequence == dataset->sequence);
        ND_TRY(nd_fs_format(&s->name, "%s", part->name));
        blend->named = blend->named || s->name[0];
        s->weight = part->weight;
        s->epochs = part->epochs;
        s->first = dataset->blocks;
        s->data = part->data;
        part->data = NULL;
        dataset->blocks += s->data->blocks;
        dataset->tokens += nd_dataset_tokens(s->data);
    }
    ND_TRY(nd_fs_format(&dataset->path, "%s and %d more", blend->sources[0].data->path,
                        blend->count - 1)); /* for messages */
    return make_mix(blend);
}

int nd_dataset_sources(const nd_dataset *dataset)
{
    return dataset->blend && dataset->blend->named ? dataset->blend->count : 1;
}

const char *nd_dataset_source_name(const nd_dataset *dataset, int index)
{
    return dataset->blend && dataset->blend->named ? dataset->blend->sources[index].name : "";
}

const nd_dataset *nd_dataset_source(const nd_dataset *dataset, int index)
{
    return dataset->blend && dataset->blend->named ? dataset->blend->sources[index].data : dataset;
}

int nd_dataset_source_of(const nd_dataset *dataset, int64_t block)
{
    return dataset->blend && dataset->blend->named ? nd_blend_find(dataset->blend, block) : 0;
}

size_t nd_dataset_packed_bytes(const nd_dataset *dataset)
{
    const nd_documents *d = dataset->documents;
    size_t bytes = 0;
    if (d && d->firsts) {
        bytes = sizeof *d->firsts * (size_t)d->begins[dataset->blocks] +
                sizeof *d->begins * (size_t)(dataset->blocks + 1);
    }
    for (int j = 0; dataset->blend && j < dataset->blend->count; j++) {
        bytes += nd_dataset_packed_bytes(dataset->blend->sources[j].data);
    }
    return bytes;
}

bool nd_dataset_is_packed(const nd_dataset *dataset)
{
    return nd_dataset_packed_bytes(dataset) > 0;
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
    const nd_source *s = &blend->sources[at.source];
    const int64_t own = s->data->blocks;
    /* Sources of equal size must not share their orders. */
    const uint64_t stream = (uint64_t)(at.index / own) + ((uint64_t)at.source << 48);
    return s->first + (int64_t)nd_rng_permute((uint64_t)seed, stream, (uint64_t)own,
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
        const int64_t first = blend->sources[j].first, blocks = blend->sources[j].data->blocks;
        counts[j] = expect(dataset, samples, first + blocks) - expect(dataset, samples, first);
    }
    return samples % dataset->blocks == 0;
}

int64_t nd_dataset_samples(const nd_dataset *dataset)
{
    const nd_blend *blend = dataset->blend;
    return blend && blend->mix ? blend->mix->samples : INT64_MAX;
}

int64_t nd_dataset_epoch(const nd_dataset *dataset)
{
    const nd_blend *blend = dataset->blend;
    bool by_epochs = blend && blend->mix && blend->sources[0].weight == 0;
    return by_epochs ? blend->mix->samples : dataset->blocks;
}

int64_t nd_dataset_period(const nd_dataset *dataset)
{
    const nd_blend *blend = dataset->blend;
    return blend && blend->mix ? blend->mix->period : 0;
}

nd_status nd_dataset_blend(nd_dataset_part *parts, int count, nd_dataset **out)
{
    ND_ASSERT(count >= 1);
    nd_status status = ND_OK;
    nd_dataset *dataset = NULL;
    ND_TRY_OUT(ND_ALLOC(1, &dataset));
    ND_TRY_OUT(ND_ALLOC(1, &dataset->blend));
    ND_TRY_OUT(ND_ALLOC(count, &dataset->blend->sources));
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

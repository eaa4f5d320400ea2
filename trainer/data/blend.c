// SPDX-License-Identifier: Apache-2.0
/* A dataset of several sources, and the order of the training samples of any dataset. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/hash.h"
#include "runtime/base/rng.h"
#include "trainer/data/formats.h"
#include "trainer/data/mix.h"

typedef struct source {
    nd_dataset *data; /* owned */
    char *name;       /* owned */
    double weight, epochs;
    int64_t first; /* block of the blend */
} source;

struct nd_blend {
    source *sources; /* (count); owned */
    int count;
    bool named;  /* the sources are told apart */
    nd_mix *mix; /* NULL: one text; owned */
};

static nd_status make_mix(nd_blend *blend)
{
    nd_mix_source *list;
    bool mixed = false;
    ND_TRY(ND_ALLOC(blend->count, &list));
    for (int j = 0; j < blend->count; j++) {
        const source *s = &blend->sources[j];
        mixed = mixed || s->weight > 0 || s->epochs > 0;
        list[j] = (nd_mix_source){s->name, s->data->blocks, s->weight, s->epochs};
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
        source *s = &blend->sources[blend->count];
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

static void destroy(nd_blend *blend)
{
    for (int j = 0; j < blend->count; j++) {
        nd_dataset_close(blend->sources[j].data);
        free(blend->sources[j].name);
    }
    nd_mix_destroy(blend->mix);
    free(blend->sources);
    free(blend);
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

/* The last source that begins at or before the block. */
static int find(const nd_blend *blend, int64_t block)
{
    int low = 0, high = blend->count;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (blend->sources[middle].first <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

int nd_dataset_source_of(const nd_dataset *dataset, int64_t block)
{
    return dataset->blend && dataset->blend->named ? find(dataset->blend, block) : 0;
}

static nd_status read_block(const nd_blend *blend, int64_t index, int32_t *inputs, int32_t *labels)
{
    const source *s = &blend->sources[find(blend, index)];
    return nd_dataset_block(s->data, index - s->first, inputs, labels);
}

static nd_status read_first_keys(const nd_blend *blend, int64_t index, const int32_t *inputs,
                                 int32_t *first_keys, int64_t *filled)
{
    const source *s = &blend->sources[find(blend, index)];
    return nd_dataset_first_keys(s->data, index - s->first, inputs, first_keys, filled);
}

static nd_documents_rule documents(const nd_blend *blend)
{
    const nd_documents_rule first = nd_dataset_documents(blend->sources[0].data);
    for (int j = 1; j < blend->count; j++) {
        if (nd_dataset_documents(blend->sources[j].data) != first) {
            return ND_DOCUMENTS_AUTO;
        }
    }
    return first;
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

static nd_status count_ignored(const nd_blend *blend, int64_t *tokens)
{
    int64_t sum = 0;
    for (int j = 0; j < blend->count; j++) {
        int64_t part;
        ND_TRY(nd_dataset_ignored(blend->sources[j].data, &part));
        sum += part;
    }
    *tokens = sum;
    return ND_OK;
}

int64_t nd_dataset_sample(const nd_dataset *dataset, int64_t seed, int64_t i)
{
    const nd_blend *blend = dataset->blend;
    const int64_t N = dataset->blocks;
    if (!blend || !blend->mix) {
        return (int64_t)nd_rng_permute((uint64_t)seed, (uint64_t)(i / N), (uint64_t)N,
                                       (uint64_t)(i % N));
    }
    if (i >= nd_mix_samples(blend->mix)) {
        return N;
    }
    const nd_mix_place at = nd_mix_at(blend->mix, i);
    const source *s = &blend->sources[at.source];
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
    for (int j = 0; j < blend->count; j++) {
        const int64_t first = blend->sources[j].first, blocks = blend->sources[j].data->blocks;
        counts[j] =
            blend->mix ? nd_mix_count(blend->mix, j, samples)
                       : expect(dataset, samples, first + blocks) - expect(dataset, samples, first);
    }
    return blend->mix || samples % dataset->blocks == 0;
}

int64_t nd_dataset_samples(const nd_dataset *dataset)
{
    const nd_blend *blend = dataset->blend;
    return blend && blend->mix ? nd_mix_samples(blend->mix) : INT64_MAX;
}

int64_t nd_dataset_epoch(const nd_dataset *dataset)
{
    const nd_blend *blend = dataset->blend;
    bool by_epochs = blend && blend->mix && blend->sources[0].weight == 0;
    return by_epochs ? nd_mix_samples(blend->mix) : dataset->blocks;
}

nd_dataset_rounding nd_dataset_rounding_of(const nd_dataset *dataset)
{
    const nd_blend *blend = dataset->blend;
    if (!blend || !blend->mix) {
        return (nd_dataset_rounding){.source = -1};
    }
    const nd_mix_rounding r = nd_mix_rounding_of(blend->mix);
    return (nd_dataset_rounding){r.period, r.source, r.share, r.counts};
}

/* SHA-256 of the digests of the sources, in order, and of their weights and epochs. With `all` of
 * their contents instead. */
static nd_status digest_sources(const nd_blend *blend, const nd_content_share *all, char hex[65])
{
    char *text = NULL;
    size_t bytes;
    FILE *lines = open_memstream(&text, &bytes);
    if (!lines) {
        return nd_fail_memory("the digest of the data");
    }
    nd_status status = ND_OK;
    for (int j = 0; j < blend->count && status == ND_OK; j++) {
        const source *s = &blend->sources[j];
        status = all ? nd_content_of(s->data, all, hex) : nd_dataset_digest(s->data, hex);
        fprintf(lines, "%s %a %a\n", status == ND_OK ? hex : "", s->weight, s->epochs);
    }
    if (fclose(lines) != 0 && status == ND_OK) {
        status = nd_fail_memory("the digest of the data");
    }
    status = status == ND_OK ? nd_sha256(text, bytes, hex) : status;
    free(text);
    return status;
}

static nd_status digest(const nd_blend *blend, char hex[65])
{
    return digest_sources(blend, NULL, hex);
}

static void count_files(const nd_blend *blend, nd_content_share *all)
{
    for (int j = 0; j < blend->count; j++) {
        nd_content_count(blend->sources[j].data, all);
    }
}

static nd_status content(const nd_blend *blend, const nd_content_share *all, char hex[33])
{
    char whole[65] = "";
    nd_status status = digest_sources(blend, all, whole);
    memcpy(hex, whole, 32);
    hex[32] = '\0';
    return status;
}

static const nd_blend_calls calls = {read_block, read_first_keys, documents, count_ignored,
                                     digest,     count_files,     content,   destroy};

nd_status nd_dataset_blend(nd_dataset_part *parts, int count, nd_dataset **out)
{
    ND_ASSERT(count >= 1);
    nd_status status = ND_OK;
    nd_dataset *dataset = NULL;
    ND_TRY_OUT(ND_ALLOC(1, &dataset));
    dataset->blend_calls = &calls;
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

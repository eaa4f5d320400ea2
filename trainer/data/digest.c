// SPDX-License-Identifier: Apache-2.0
/* Two digests of data: one of samples, for the comparison between nodes, and one of more of the
 * content, for the comparison at a resume. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/hash.h"
#include "trainer/data/dataset.h"

enum {
    DIGEST_SAMPLES = 64,
    DIGEST_SAMPLE_BYTES = 4096,
    CONTENT_BYTES = 64 << 20,      /* of all files, by their sizes */
    CONTENT_EVEN_BYTES = 16 << 20, /* of several files also, alike */
    CONTENT_SAMPLE_BYTES = 64 << 10
};

/* The files that share what nd_dataset_content reads; encoded texts are not among them. */
typedef struct files_of {
    uint64_t files, bytes;
} files_of;

typedef struct file_hash {
    const nd_dataset *dataset;
    nd_hash *hash;
    uint64_t head[3]; /* numbers before the content */
    size_t whole;     /* a file of up to so many bytes is read, of a larger one samples */
    size_t sample;    /* bytes of each: the first at the beginning, the last at the end, the others
                         evenly spaced */
    int samples;
} file_hash;

static nd_status hash_content(void *context)
{
    const file_hash *f = context;
    const nd_fs_map *map = &f->dataset->map;
    if (map->size <= f->whole) {
        return nd_hash_add(f->hash, map->data, map->size);
    }
    const size_t last = map->size - f->sample, step = last / (size_t)(f->samples - 1);
    for (int i = 0; i < f->samples; i++) {
        const size_t at = i == f->samples - 1 ? last : step * (size_t)i;
        ND_TRY(nd_hash_add(f->hash, map->data + at, f->sample));
    }
    return ND_OK;
}

static nd_status hash_mask(const file_hash *f)
{
    return f->dataset->mask
               ? nd_hash_add(f->hash, f->dataset->mask_digest, ND_LOSS_MASK_DIGEST_BYTES)
               : ND_OK;
}

/* Numbers and bytes are hashed as they lie in memory: machines that this program runs on are
 * little-endian. */
static nd_status hash_file(file_hash *f, nd_hash_kind kind, char *hex)
{
    const nd_dataset *dataset = f->dataset;
    nd_status status = ND_OK;
    ND_TRY(nd_hash_create(kind, &f->hash));
    ND_TRY_OUT(nd_hash_begin(f->hash));
    ND_TRY_OUT(nd_hash_add(f->hash, f->head, sizeof f->head));
    ND_TRY_OUT(kind == ND_HASH_XXH3_128 ? hash_mask(f) : ND_OK);
    ND_TRY_OUT(nd_fs_map_guard(&dataset->map, dataset->path, hash_content, f));
    ND_TRY_OUT(kind == ND_HASH_SHA256 ? hash_mask(f) : ND_OK);
    ND_TRY_OUT(nd_hash_end_text(f->hash, hex));
out:
    nd_hash_destroy(f->hash);
    return status;
}

/* Checksums of all ids stand for them. */
static nd_status digest_cache(const nd_token_cache *cache, char hex[65])
{
    const nd_token_view *v = &cache->view;
    const uint64_t numbers[] = {v->width, v->tokens, v->documents, v->spans};
    nd_bytes text = {0};
    nd_status status = nd_bytes_add(&text, numbers, sizeof numbers);
    status = status == ND_OK ? nd_bytes_add(&text, v->sums, v->chunks * 8) : status;
    status = status == ND_OK ? nd_sha256(text.data, text.count, hex) : status;
    free(text.data);
    return status;
}

static nd_status content_of(const nd_dataset *dataset, const files_of *all, char *hex);

/* SHA-256 of the digests of the sources, in order, and of their weights and epochs; with `all` of
 * their contents instead. */
static nd_status digest_sources(const nd_blend *blend, const files_of *all, char hex[65])
{
    char *text = NULL;
    size_t bytes;
    FILE *lines = open_memstream(&text, &bytes);
    if (!lines) {
        return nd_fail_memory("the digest of the data");
    }
    nd_status status = ND_OK;
    for (int j = 0; j < blend->count && status == ND_OK; j++) {
        const nd_dataset_part *s = &blend->parts[j];
        status = all ? content_of(s->data, all, hex) : nd_dataset_digest(s->data, hex);
        fprintf(lines, "%s %a %a\n", status == ND_OK ? hex : "", s->weight, s->epochs);
    }
    if (fclose(lines) != 0 && status == ND_OK) {
        status = nd_fail_memory("the digest of the data");
    }
    status = status == ND_OK ? nd_sha256(text, bytes, hex) : status;
    free(text);
    return status;
}

nd_status nd_dataset_digest(const nd_dataset *dataset, char hex[65])
{
    file_hash file = {
        .dataset = dataset,
        .head = {dataset->map.size, dataset->format->number, (uint64_t)dataset->tokens},
        .whole = (size_t)DIGEST_SAMPLES * DIGEST_SAMPLE_BYTES,
        .sample = DIGEST_SAMPLE_BYTES,
        .samples = DIGEST_SAMPLES};
    return dataset->blend   ? digest_sources(dataset->blend, NULL, hex)
           : dataset->cache ? digest_cache(dataset->cache, hex)
                            : hash_file(&file, ND_HASH_SHA256, hex);
}

static void count_files(const nd_dataset *dataset, files_of *all)
{
    for (int j = 0; dataset->blend && j < dataset->blend->count; j++) {
        count_files(dataset->blend->parts[j].data, all);
    }
    if (!dataset->blend && !dataset->cache) {
        all->files++;
        all->bytes += dataset->map.size;
    }
}

/* Bytes of a file that are read, when it is one of several. */
static size_t share_of(size_t size, const files_of *all)
{
    if (all->files == 1 || all->bytes <= CONTENT_BYTES) {
        return CONTENT_BYTES;
    }
    return (size_t)((double)size / (double)all->bytes * CONTENT_BYTES) +
           (size_t)(CONTENT_EVEN_BYTES / all->files);
}

/* The content of a dataset that is all of these files, or a part of them. */
static nd_status content_of(const nd_dataset *dataset, const files_of *all, char *hex)
{
    char whole[ND_HASH_HEX_MAX] = "";
    hex[0] = '\0';
    if (dataset->blend) {
        ND_TRY(digest_sources(dataset->blend, all, whole));
        memcpy(hex, whole, 32);
        hex[32] = '\0';
        return ND_OK;
    }
    if (dataset->cache) {
        return ND_OK;
    }
    const size_t bytes = share_of(dataset->map.size, all);
    const bool few = bytes < 2 * CONTENT_SAMPLE_BYTES; /* the first and the last bytes at least */
    file_hash file = {
        .dataset = dataset,
        .head = {dataset->map.size, dataset->index.digest[0], dataset->index.digest[1]},
        .whole = bytes,
        .sample = few ? bytes / 2 : CONTENT_SAMPLE_BYTES,
        .samples = few ? 2 : (int)(bytes / CONTENT_SAMPLE_BYTES)};
    return hash_file(&file, ND_HASH_XXH3_128, hex);
}

nd_status nd_dataset_content(nd_dataset *dataset, char hex[33])
{
    files_of all = {0};
    if (!dataset->content_known) {
        count_files(dataset, &all);
        ND_TRY(content_of(dataset, &all, dataset->content));
        dataset->content_known = true;
    }
    memcpy(hex, dataset->content, sizeof dataset->content);
    return ND_OK;
}

// SPDX-License-Identifier: Apache-2.0
/* Two digests of data: one of samples, for the comparison between nodes, and one of more of the
 * content, for the comparison at a resume. */
#include <stdio.h>
#include <string.h>

#include "runtime/base/hash.h"
#include "runtime/base/math.h"
#include "trainer/data/dataset.h"

enum {
    DIGEST_BYTES = 256 << 10, /* of a file */
    DIGEST_SAMPLE_BYTES = 4096,
    CONTENT_BYTES = 64 << 20,      /* of all files, by their sizes */
    CONTENT_EVEN_BYTES = 16 << 20, /* of several files also, alike */
    CONTENT_SAMPLE_BYTES = 64 << 10
};

/* Numbers and bytes are hashed as they lie in memory: machines that this program runs on are
 * little-endian. */
static nd_status hash_file(const nd_dataset *dataset, nd_hash_kind kind, const uint64_t *numbers,
                           size_t count, nd_samples samples, char *hex)
{
    const char *mask = dataset->mask ? dataset->mask_digest : "";
    const size_t size = dataset->mask ? ND_LOSS_MASK_DIGEST_BYTES : 0;
    const bool mask_first = kind == ND_HASH_XXH3_128;
    nd_status status = ND_OK;
    ND_TRY(nd_hash_create(kind, &samples.hash));
    ND_TRY_OUT(nd_hash_begin(samples.hash));
    ND_TRY_OUT(nd_hash_add(samples.hash, numbers, count * sizeof *numbers));
    ND_TRY_OUT(mask_first ? nd_hash_add(samples.hash, mask, size) : ND_OK);
    ND_TRY_OUT(nd_fs_map_guard(&dataset->map, dataset->path, nd_samples_add, &samples));
    ND_TRY_OUT(mask_first ? ND_OK : nd_hash_add(samples.hash, mask, size));
    ND_TRY_OUT(nd_hash_end_text(samples.hash, hex));
out:
    nd_hash_destroy(samples.hash);
    return status;
}

/* The files that share what nd_dataset_content reads; encoded texts are not among them. */
typedef struct files_of {
    uint64_t files, bytes;
} files_of;

static nd_status hash_dataset(const nd_dataset *dataset, const files_of *all, char *hex);

/* SHA-256 of the digests of the sources, in order, and of their weights and epochs. */
static nd_status hash_sources(const nd_blend *blend, const files_of *all, char *hex)
{
    nd_hash *hash;
    nd_status status = ND_OK;
    ND_TRY(nd_hash_create(ND_HASH_SHA256, &hash));
    ND_TRY_OUT(nd_hash_begin(hash));
    for (int j = 0; j < blend->count; j++) {
        const nd_dataset_part *part = &blend->parts[j];
        char own[ND_HASH_HEX_MAX], line[ND_HASH_HEX_MAX + 64];
        ND_TRY_OUT(hash_dataset(part->data, all, own));
        const int length =
            snprintf(line, sizeof line, "%s %a %a\n", own, part->weight, part->epochs);
        ND_TRY_OUT(nd_hash_add(hash, line, (size_t)length));
    }
    ND_TRY_OUT(nd_hash_end_text(hash, hex));
    hex[all ? 32 : 64] = '\0';
out:
    nd_hash_destroy(hash);
    return status;
}

/* `all` NULL: the digest of a dataset, else its content, of which these files are all. */
static nd_status hash_dataset(const nd_dataset *dataset, const files_of *all, char *hex)
{
    const size_t size = dataset->map.size;
    nd_samples samples = {.data = dataset->map.data,
                          .size = size,
                          .bytes = DIGEST_BYTES,
                          .sample = DIGEST_SAMPLE_BYTES};
    if (dataset->blend) {
        return hash_sources(dataset->blend, all, hex);
    }
    if (dataset->cache) {
        const nd_token_view *v = &dataset->cache->view;
        const uint64_t numbers[] = {v->width, v->tokens, v->documents, v->spans};
        /* The checksums of all ids stand for the ids. */
        samples = (nd_samples){.data = v->sums, .size = v->chunks * 8, .bytes = SIZE_MAX};
        hex[0] = '\0';
        return all ? ND_OK : hash_file(dataset, ND_HASH_SHA256, numbers, 4, samples, hex);
    }
    if (!all) {
        const uint64_t numbers[] = {size, dataset->format->number, (uint64_t)dataset->tokens};
        return hash_file(dataset, ND_HASH_SHA256, numbers, 3, samples, hex);
    }
    const bool share = all->files > 1 && all->bytes > CONTENT_BYTES;
    const double part = (double)size / (double)all->bytes * CONTENT_BYTES;
    const uint64_t numbers[] = {size, dataset->index.digest[0], dataset->index.digest[1]};
    samples.bytes =
        share ? (size_t)part + (size_t)(CONTENT_EVEN_BYTES / all->files) : CONTENT_BYTES;
    /* The first and the last bytes at least. */
    samples.sample = (size_t)nd_min(CONTENT_SAMPLE_BYTES, (int64_t)samples.bytes / 2);
    return hash_file(dataset, ND_HASH_XXH3_128, numbers, 3, samples, hex);
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

nd_status nd_dataset_digest(const nd_dataset *dataset, char hex[65])
{
    return hash_dataset(dataset, NULL, hex);
}

nd_status nd_dataset_content(nd_dataset *dataset, char hex[33])
{
    files_of all = {0};
    if (!dataset->content[0]) {
        count_files(dataset, &all);
        ND_TRY(hash_dataset(dataset, &all, dataset->content));
    }
    memcpy(hex, dataset->content, 33);
    return ND_OK;
}

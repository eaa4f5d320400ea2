// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/reads.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/fsio.h"
#include "runtime/tensor/dtype.h"

void nd_reads_fini(nd_reads *reads)
{
    free(reads->list);
    *reads = (nd_reads){0};
}

nd_status nd_reads_add(nd_reads *reads, const nd_read *read)
{
    if (reads->count == reads->capacity) {
        int64_t capacity = reads->capacity ? 2 * reads->capacity : 64;
        void *list = realloc(reads->list, (size_t)capacity * sizeof *reads->list);
        if (!list) {
            return nd_fail(ND_ERR_RESOURCE, "out of host memory for %lld reads of a checkpoint",
                           (long long)capacity);
        }
        reads->list = list;
        reads->capacity = capacity;
    }
    reads->list[reads->count++] = *read;
    return ND_OK;
}

static int by_place(const void *a, const void *b)
{
    const nd_read *x = a, *y = b;
    return x->from < y->from ? -1 : x->from > y->from;
}

static uint64_t width_of(const nd_read *read)
{
    return (uint64_t)nd_safetensors_dtype_bits(read->dtype) / 8;
}

static uint64_t end_of(const nd_read *read)
{
    return read->from + (uint64_t)(read->runs - 1) * read->stride +
           (uint64_t)read->run * width_of(read);
}

static void convert(const nd_read *read, float *to, const uint8_t *from, int64_t count)
{
    if (read->dtype == ND_SAFETENSORS_F32) {
        memcpy(to, from, (size_t)count * sizeof *to);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        uint16_t code;
        memcpy(&code, from + 2 * i, sizeof code);
        to[i] = read->dtype == ND_SAFETENSORS_F16 ? nd_f16_to_f32(code) : nd_bf16_to_f32(code);
    }
}

/* The part of a read that lies in bytes [begin, end) of the file, which are at `data`. Elements do
 * not straddle these bounds. */
static void scatter(const nd_read *read, uint64_t begin, uint64_t end, const uint8_t *data)
{
    uint64_t width = width_of(read), run_bytes = (uint64_t)read->run * width;
    int64_t first = 0;
    if (begin > read->from + run_bytes && read->stride > 0) { /* runs that end before */
        first = (int64_t)((begin - read->from - run_bytes) / read->stride);
    }
    for (int64_t r = first; r < read->runs; r++) {
        uint64_t run = read->from + (uint64_t)r * read->stride;
        if (run >= end) {
            break;
        }
        uint64_t from = run > begin ? run : begin;
        uint64_t to = run + run_bytes < end ? run + run_bytes : end;
        if (from < to) {
            convert(read, read->to + r * read->to_stride + (int64_t)((from - run) / width),
                    data + (from - begin), (int64_t)((to - from) / width));
        }
    }
}

nd_status nd_read_chunk(const nd_read_file *file, int64_t index, size_t *size)
{
    const nd_hashed_file *hashed = file->hashed;
    uint64_t begin = (uint64_t)index * ND_CHUNK_BYTES;
    uint64_t left = hashed->bytes - begin;
    *size = left < ND_CHUNK_BYTES ? (size_t)left : ND_CHUNK_BYTES;
    ND_TRY(nd_fs_pread(file->fd, file->path, file->staging, *size, (int64_t)begin));
    uint8_t digest[ND_DIGEST_MAX];
    size_t width = (size_t)nd_checksum_chunk_bytes(file->kind);
    ND_TRY(nd_digest_chunk(file->kind, file->staging, *size, digest));
    if (memcmp(digest, hashed->digests + (size_t)index * width, width) != 0) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" is damaged: bytes %llu to %llu are not those that were written",
                       file->path, (unsigned long long)begin, (unsigned long long)(begin + *size));
    }
    return ND_OK;
}

/* Chunk after chunk: each that a read reaches is read and verified once. */
static nd_status run_chunks(nd_reads *reads, const nd_read_file *file, int64_t *bytes)
{
    int64_t next = 0; /* reads before it end before the chunk */
    uint64_t at = reads->list[0].from / ND_CHUNK_BYTES * ND_CHUNK_BYTES;
    while (next < reads->count) {
        size_t size = 0;
        uint64_t end = at + ND_CHUNK_BYTES;
        ND_TRY(nd_read_chunk(file, (int64_t)(at / ND_CHUNK_BYTES), &size));
        *bytes += (int64_t)size;
        for (int64_t i = next; i < reads->count && reads->list[i].from < end; i++) {
            scatter(&reads->list[i], at, at + size, file->staging);
        }
        while (next < reads->count && end_of(&reads->list[next]) <= end) {
            next++;
        }
        at = end;
        if (next < reads->count && reads->list[next].from >= end) {
            at = reads->list[next].from / ND_CHUNK_BYTES * ND_CHUNK_BYTES;
        }
    }
    return ND_OK;
}

/* Without digests: windows that begin with an element and hold whole ones. */
static nd_status run_windows(nd_reads *reads, const nd_read_file *file, int64_t *bytes)
{
    for (int64_t i = 0; i < reads->count; i++) {
        const nd_read *read = &reads->list[i];
        uint64_t end = end_of(read);
        for (uint64_t at = read->from; at < end; at += ND_CHUNK_BYTES) {
            size_t size = end - at < ND_CHUNK_BYTES ? (size_t)(end - at) : ND_CHUNK_BYTES;
            ND_TRY(nd_fs_pread(file->fd, file->path, file->staging, size, (int64_t)at));
            *bytes += (int64_t)size;
            scatter(read, at, at + size, file->staging);
        }
    }
    return ND_OK;
}

nd_status nd_reads_run(nd_reads *reads, const nd_read_file *file, int64_t *bytes)
{
    if (reads->count == 0) {
        return ND_OK;
    }
    qsort(reads->list, (size_t)reads->count, sizeof *reads->list, by_place);
    nd_status status =
        file->hashed ? run_chunks(reads, file, bytes) : run_windows(reads, file, bytes);
    reads->count = 0;
    return status;
}

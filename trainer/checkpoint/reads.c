// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/reads.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"

enum {
    SLICE_BYTES = 256 << 10, /* hashed while it is in the cache of a core */
    DIRECT_BYTES = 16 << 10  /* a shorter run costs less in the staging buffer */
};

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
            return nd_fail_memory("%lld reads of a checkpoint", (long long)capacity);
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

static uint64_t end_of(const nd_read *read)
{
    return read->from + (uint64_t)(read->runs - 1) * read->stride +
           (uint64_t)read->run * sizeof(float);
}

/* The part of a read that lies in bytes [begin, end) of the file, which are at `data`. Elements do
 * not straddle these bounds. */
static void scatter(const nd_read *read, uint64_t begin, uint64_t end, const uint8_t *data)
{
    const uint64_t width = sizeof *read->to, run_bytes = (uint64_t)read->run * width;
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
            memcpy(read->to + r * read->to_stride + (int64_t)((from - run) / width),
                   data + (from - begin), to - from);
        }
    }
}

/* Bytes of the file from `from` on to `to`, in slices that stay in the processor's cache while they
 * are hashed. */
static nd_status read_slices(const nd_read_file *file, uint64_t from, uint64_t size, uint8_t *to)
{
    for (uint64_t done = 0; done < size;) {
        size_t n = size - done < SLICE_BYTES ? (size_t)(size - done) : SLICE_BYTES;
        ND_TRY(nd_fs_pread(file->fd, file->path, to + done, n, (int64_t)(from + done)));
        ND_TRY(file->digests ? nd_hash_add(file->digester, to + done, n) : ND_OK);
        done += n;
    }
    return ND_OK;
}

static nd_status compare_digest(const nd_read_file *file, int64_t index, size_t size)
{
    uint8_t digest[ND_HASH_MAX];
    size_t width = (size_t)nd_checksum_chunk_bytes(file->kind);
    uint64_t begin = (uint64_t)index * ND_CHUNK_BYTES;
    if (!file->digests) {
        return ND_OK;
    }
    ND_TRY(nd_hash_end(file->digester, digest));
    if (memcmp(digest, file->digests + (size_t)index * width, width) != 0) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" is damaged: bytes %llu to %llu are not those that were written",
                       file->path, (unsigned long long)begin, (unsigned long long)(begin + size));
    }
    return ND_OK;
}

static size_t chunk_size(const nd_read_file *file, int64_t index)
{
    uint64_t left = file->bytes - (uint64_t)index * ND_CHUNK_BYTES;
    return left < ND_CHUNK_BYTES ? (size_t)left : ND_CHUNK_BYTES;
}

nd_status nd_read_chunk(const nd_read_file *file, int64_t index, size_t *size)
{
    *size = chunk_size(file, index);
    ND_TRY(nd_hash_begin(file->digester));
    ND_TRY(read_slices(file, (uint64_t)index * ND_CHUNK_BYTES, *size, file->staging));
    return compare_digest(file, index, *size);
}

/* A long run that no other read overlaps. `i` is an index of the sorted list. */
static bool is_direct(const nd_reads *reads, int64_t i)
{
    const nd_read *read = &reads->list[i];
    uint64_t bytes = (uint64_t)read->run * sizeof(float);
    return read->runs == 1 && bytes >= DIRECT_BYTES &&
           (i + 1 == reads->count || reads->list[i + 1].from >= read->from + bytes);
}

/* Where bytes end that begin at `at`, before `end`, and pass through the staging buffer: at the
 * next run that does not. */
static uint64_t end_of_staged(const nd_reads *reads, int64_t next, uint64_t at, uint64_t end)
{
    uint64_t reach = 0; /* of the reads so far, some of which may be strided */
    end = end - at < SLICE_BYTES ? end : at + SLICE_BYTES;
    for (int64_t i = next; i < reads->count && reads->list[i].from < end; i++) {
        const nd_read *read = &reads->list[i];
        if (read->from > at && read->from >= reach && is_direct(reads, i)) {
            return read->from;
        }
        reach = end_of(read) > reach ? end_of(read) : reach;
    }
    return end;
}

/* Reads from `at` on, at most to *end: as many bytes as have one way, straight to a run or through
 * the staging buffer. Sets *end to where they end. */
static nd_status read_part(const nd_reads *reads, int64_t next, const nd_read_file *file,
                           uint64_t at, uint64_t *end)
{
    const nd_read *read = next < reads->count ? &reads->list[next] : NULL;
    if (read && read->from <= at && is_direct(reads, next)) {
        *end = end_of(read) < *end ? end_of(read) : *end;
        return read_slices(file, at, *end - at, (uint8_t *)read->to + (at - read->from));
    }
    *end = end_of_staged(reads, next, at, *end);
    ND_TRY(read_slices(file, at, *end - at, file->staging));
    for (int64_t i = next; i < reads->count && reads->list[i].from < *end; i++) {
        scatter(&reads->list[i], at, *end, file->staging);
    }
    return ND_OK;
}

/* Chunk after chunk: each that a read reaches is read and verified once. */
static nd_status run_chunks(nd_reads *reads, const nd_read_file *file, int64_t *bytes)
{
    int64_t next = 0; /* reads before it end before what is read next */
    int64_t index = (int64_t)(reads->list[0].from / ND_CHUNK_BYTES);
    while (next < reads->count) {
        uint64_t begin = (uint64_t)index * ND_CHUNK_BYTES, size = chunk_size(file, index);
        if (end_of(&reads->list[reads->count - 1]) > begin + size) {
            posix_fadvise(file->fd, (off_t)(begin + size), ND_CHUNK_BYTES, POSIX_FADV_WILLNEED);
        }
        ND_TRY(nd_hash_begin(file->digester));
        for (uint64_t at = begin, end; at < begin + size; at = end) {
            end = begin + size;
            ND_TRY(read_part(reads, next, file, at, &end));
            while (next < reads->count && end_of(&reads->list[next]) <= end) {
                next++;
            }
        }
        ND_TRY(compare_digest(file, index, size));
        *bytes += (int64_t)size;
        index++;
        if (next < reads->count && reads->list[next].from / ND_CHUNK_BYTES > (uint64_t)index) {
            index = (int64_t)(reads->list[next].from / ND_CHUNK_BYTES);
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
    nd_status status = run_chunks(reads, file, bytes);
    reads->count = 0;
    return status;
}

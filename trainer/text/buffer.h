// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_BUFFER_H
#define ND_TEXT_BUFFER_H
/* Growing arrays. An all-zero one is empty; the owner frees `data`. */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime/base/status.h"

/* Makes room for `count` elements of `size` bytes in a list; what is there stays. `list` is the
 * place of a pointer to any type. The pointer is not NULL then, for no elements either. */
static inline nd_status nd_array_reserve(void *list, size_t *room, size_t count, size_t size)
{
    const size_t wanted = count + count / 2 + 16;
    void *data;
    memcpy(&data, list, sizeof data);
    if (count <= *room && data) {
        return ND_OK;
    }
    data = wanted <= SIZE_MAX / size ? realloc(data, wanted * size) : NULL;
    if (!data) {
        return nd_fail_memory("%zu elements of %zu bytes for text", wanted, size);
    }
    memcpy(list, &data, sizeof data);
    *room = wanted;
    return ND_OK;
}

/* Like nd_array_reserve, for elements like **list. */
#define ND_ARRAY_RESERVE(list, room, count)                                                        \
    nd_array_reserve((list), (room), (count), sizeof(**(list)))

typedef struct nd_bytes {
    uint8_t *data;
    size_t count, room;
} nd_bytes;

/* Makes room for `count` bytes in all. */
static inline nd_status nd_bytes_reserve(nd_bytes *bytes, size_t count)
{
    return ND_ARRAY_RESERVE(&bytes->data, &bytes->room, count);
}

static inline nd_status nd_bytes_add(nd_bytes *bytes, const void *data, size_t size)
{
    nd_status status = nd_bytes_reserve(bytes, bytes->count + size);
    if (status == ND_OK && size > 0) {
        memcpy(bytes->data + bytes->count, data, size);
        bytes->count += size;
    }
    return status;
}

typedef struct nd_ids {
    int32_t *data;
    size_t count, room;
} nd_ids;

/* Makes room for `count` ids in all. */
static inline nd_status nd_ids_reserve(nd_ids *ids, size_t count)
{
    return ND_ARRAY_RESERVE(&ids->data, &ids->room, count);
}

static inline nd_status nd_ids_add(nd_ids *ids, const int32_t *data, size_t count)
{
    nd_status status = nd_ids_reserve(ids, ids->count + count);
    if (status == ND_OK && count > 0) {
        memcpy(ids->data + ids->count, data, count * sizeof(int32_t));
        ids->count += count;
    }
    return status;
}

static inline bool nd_ids_hold(const nd_ids *ids, int32_t id)
{
    size_t i = 0;
    while (i < ids->count && ids->data[i] != id) {
        i++;
    }
    return i < ids->count;
}

typedef struct nd_u64s {
    uint64_t *data;
    size_t count, room;
} nd_u64s;

static inline nd_status nd_u64s_add(nd_u64s *list, uint64_t value)
{
    ND_TRY(ND_ARRAY_RESERVE(&list->data, &list->room, list->count + 1));
    list->data[list->count++] = value;
    return ND_OK;
}

/*
 * Memory for tables that are read at random. It begins on a page, is zero, and lies on huge pages
 * where the system has them: with small ones, most of the time of a lookup would go into finding
 * the page.
 */
/* 0 bytes: *out is NULL. */
static inline nd_status nd_pages_map(size_t bytes, void **out)
{
    *out = NULL;
    if (bytes == 0) {
        return ND_OK;
    }
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        return nd_fail_memory("a table of %zu bytes for text", bytes);
    }
    madvise(pages, bytes, MADV_HUGEPAGE); /* a hint: no error matters */
    *out = pages;
    return ND_OK;
}

/* NULL is legal. */
static inline void nd_pages_unmap(void *pages, size_t bytes)
{
    if (pages) {
        munmap(pages, bytes);
    }
}

/* The two take `count` elements like **out. */
#define ND_PAGES_MAP(count, out)     nd_pages_map((count) * sizeof(**(out)), (void **)(out))
#define ND_PAGES_UNMAP(pages, count) nd_pages_unmap((pages), (count) * sizeof(*(pages)))

#endif

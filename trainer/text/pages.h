// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_PAGES_H
#define ND_TEXT_PAGES_H
/*
 * Memory for tables that are read at random. It begins on a page, is zero, and lies on huge pages
 * where the system has them: with small ones, most of the time of a lookup would go into finding
 * the page.
 */
#include <stddef.h>

#include "runtime/base/status.h"

/* 0 bytes: *out is NULL. */
nd_status nd_pages_map(size_t bytes, void **out);
void nd_pages_unmap(void *pages, size_t bytes); /* NULL is legal */

/* Of `count` elements like **out. */
#define ND_PAGES_MAP(count, out)     nd_pages_map((count) * sizeof(**(out)), (void **)(out))
#define ND_PAGES_UNMAP(pages, count) nd_pages_unmap((pages), (count) * sizeof(*(pages)))

#endif

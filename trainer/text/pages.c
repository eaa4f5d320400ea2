// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/buffer.h"

#include <sys/mman.h>

nd_status nd_pages_map(size_t bytes, void **out)
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

void nd_pages_unmap(void *pages, size_t bytes)
{
    if (pages) {
        munmap(pages, bytes);
    }
}

// SPDX-License-Identifier: Apache-2.0
#include <stdint.h>

#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"

/* Elements that are worth a thread: some 10 microseconds of work, several times what waking one
 * costs. */
enum { ELEMENTS_PER_THREAD = 32768 };

void nd_cpu_parallel(nd_stream *stream, int64_t items, int64_t work, nd_cpu_body body, void *arg)
{
    int64_t threads = items * work / ELEMENTS_PER_THREAD;
    threads = threads < stream->device->threads ? threads : stream->device->threads;
    threads = threads < items ? threads : items;
    if (threads <= 1) {
        body(arg, 0, items);
        return;
    }
#pragma omp parallel for num_threads((int)threads) schedule(static, 1)
    for (int64_t t = 0; t < threads; t++) {
        body(arg, items * t / threads, items * (t + 1) / threads);
    }
}

const char *nd_ops_openmp_version(void)
{
#define ND_TEXT_(x) #x
#define ND_TEXT(x)  ND_TEXT_(x)
#ifdef __clang__
    return ND_TEXT(_OPENMP) ", clang " __clang_version__;
#else
    return ND_TEXT(_OPENMP) ", gcc " __VERSION__;
#endif
}

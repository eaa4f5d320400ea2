// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime/base/math.h"
#include "runtime/device/host_memory.h"

static void cpu_close(nd_device *device)
{
    if (device->native_close) {
        device->native_close(device->native);
    }
    free(device);
}

/* Anonymous pages are zero already and cost nothing until touched; huge pages save most of the
 * faults. */
static nd_status cpu_alloc(nd_device *device, size_t bytes, void **out)
{
    uint64_t physical = nd_host_memory_read("").physical;
    void *p = MAP_FAILED;
    if (physical == 0 || bytes <= physical) { /* the kernel may promise more than it has */
        p = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                 0);
    }
    if (p == MAP_FAILED) {
        return nd_fail(
            ND_ERR_RESOURCE,
            "out of host memory: %.2f GiB wanted in one piece, and this host has %.1f GiB; use a "
            "smaller model, a shorter sequence, recompute, or more shards (ndtrain plan shows what "
            "each needs)",
            (double)bytes / nd_gib, (double)physical / nd_gib);
    }
    madvise(p, bytes, MADV_HUGEPAGE);
    *out = p;
    return ND_OK;
}

static void cpu_free(nd_device *device, void *p, size_t bytes)
{
    if (p) {
        munmap(p, bytes ? bytes : 1);
    }
}

static nd_status cpu_host_alloc(nd_device *device, size_t bytes, void **out)
{
    char *p = NULL;
    ND_TRY(ND_ALLOC(bytes > 0 ? bytes : 1, &p));
    *out = p;
    return ND_OK;
}

static void cpu_host_free(nd_device *device, void *p)
{
    free(p);
}

static nd_status cpu_copy(nd_stream *stream, void *dst, const void *src, size_t bytes)
{
    memmove(dst, src, bytes);
    return ND_OK;
}

static nd_status cpu_zero(nd_stream *stream, void *dst, size_t bytes)
{
    memset(dst, 0, bytes);
    return ND_OK;
}

static nd_status cpu_stream_init(nd_device *device, nd_stream *stream)
{
    *stream = (nd_stream){.device = device};
    return ND_OK;
}

static void cpu_stream_fini(nd_stream *stream)
{
}

static nd_status cpu_event_init(nd_device *device, nd_event *event)
{
    *event = (nd_event){0};
    return ND_OK;
}

static void cpu_event_fini(nd_event *event)
{
}

/* Compute is complete when its call returns, so a recorded event has nothing pending. */
static nd_status cpu_event_record(nd_event *event, nd_stream *stream)
{
    event->finish = NULL;
    return ND_OK;
}

static nd_status cpu_stream_wait(nd_stream *stream, nd_event *event)
{
    if (!event->finish) {
        return ND_OK;
    }
    nd_status (*finish)(void *) = event->finish;
    event->finish = NULL;
    return finish(event->operation);
}

static nd_status cpu_event_sync(nd_device *device, nd_event *event)
{
    return cpu_stream_wait(NULL, event);
}

static nd_status cpu_event_query(nd_device *device, nd_event *event, bool *done)
{
    *done = !event->finish;
    return ND_OK;
}

static nd_status cpu_stream_sync(nd_stream *stream)
{
    return ND_OK;
}

static const nd_device_table cpu_table = {
    .name = "cpu",
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .host_alloc = cpu_host_alloc,
    .host_free = cpu_host_free,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .stream_init = cpu_stream_init,
    .stream_fini = cpu_stream_fini,
    .event_init = cpu_event_init,
    .event_fini = cpu_event_fini,
    .event_record = cpu_event_record,
    .stream_wait = cpu_stream_wait,
    .stream_sync = cpu_stream_sync,
    .event_sync = cpu_event_sync,
    .event_query = cpu_event_query,
};

nd_status nd_device_open_cpu(int threads, nd_device **out)
{
    ND_ASSERT(threads >= 1);
    nd_device *device = NULL;
    ND_TRY(ND_ALLOC(1, &device));
    device->table = &cpu_table;
    device->kind = ND_DEVICE_CPU;
    device->threads = threads;
    snprintf(device->name, sizeof device->name, "cpu, %d thread%s", threads,
             threads == 1 ? "" : "s");
    *out = device;
    return ND_OK;
}

void nd_device_close(nd_device *device)
{
    if (device) {
        device->table->close(device);
    }
}

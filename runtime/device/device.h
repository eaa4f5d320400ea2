// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_DEVICE_H
#define ND_DEVICE_DEVICE_H
/*
 * One compute device: memory, copies, streams, events. A backend is one table of functions
 * (device_cpu.c, device_cuda.c).
 *
 * A stream orders work. On the CPU compute runs inside the call, so only communication is pending;
 * on CUDA everything is. An event marks the end of work enqueued on a stream: nd_stream_wait makes
 * later work of another stream see its results (no host wait on CUDA; on the CPU it progresses
 * communication until the operation is complete). Device memory is not the host's on CUDA: only
 * copies reach it.
 */
#include <stdbool.h>
#include <stddef.h>

#include "runtime/base/status.h"

typedef enum nd_device_kind { ND_DEVICE_CPU = 0, ND_DEVICE_CUDA } nd_device_kind;

typedef struct nd_device nd_device;
typedef struct nd_stream nd_stream;
typedef struct nd_device_graph nd_device_graph;

/* Caller storage. `finish` completes the pending operation on the CPU; `native` is a cudaEvent_t on
 * CUDA. */
typedef struct nd_event {
    nd_status (*finish)(void *operation); /* NULL: nothing pending, already complete */
    void *operation;
    void *native;
} nd_event;

struct nd_stream {
    nd_device *device;
    void *native;            /* cudaStream_t, NULL on the CPU */
    struct nd_graphs *graph; /* work is recorded or replayed (graphs.h); NULL: it is enqueued */
};

typedef struct nd_device_table {
    const char *name; /* "cpu", "cuda" */
    void (*close)(nd_device *device);
    /* Zeroed memory, aligned to 4096 bytes (cpu: huge pages where possible). Before step 0 only. */
    nd_status (*alloc)(nd_device *device, size_t bytes, void **out);
    void (*free)(nd_device *device, void *p, size_t bytes);
    /* Zeroed host memory that the device copies from and to by itself. Before step 0 only. */
    nd_status (*host_alloc)(nd_device *device, size_t bytes, void **out);
    void (*host_free)(nd_device *device, void *p); /* NULL is legal */
    nd_status (*copy)(nd_stream *stream, void *dst, const void *src,
                      size_t bytes); /* any direction */
    nd_status (*zero)(nd_stream *stream, void *dst, size_t bytes);
    nd_status (*stream_init)(nd_device *device, nd_stream *stream);
    /* The GPU runs its blocks before those of other streams: for communication, which compute waits
     * for soon. NULL on the CPU. */
    nd_status (*stream_init_urgent)(nd_device *device, nd_stream *stream);
    void (*stream_fini)(nd_stream *stream);
    nd_status (*event_init)(nd_device *device, nd_event *event);
    void (*event_fini)(nd_event *event);
    nd_status (*event_record)(nd_event *event, nd_stream *stream);
    nd_status (*stream_wait)(nd_stream *stream, nd_event *event);
    nd_status (*stream_sync)(nd_stream *stream); /* host waits for all work of the stream */
    nd_status (*event_sync)(nd_device *device, nd_event *event); /* host waits for the event */
    /* Sets *done to whether the event is complete; from any thread. */
    nd_status (*event_query)(nd_device *device, nd_event *event, bool *done);
    void (*range_push)(const char *name); /* names what follows in a profiler; may be NULL */
    void (*range_pop)(void);
    /*
     * CUDA graphs; NULL on the CPU. Work enqueued on `stream` (and on streams that it waits for)
     * between begin and end is recorded and not run; launch runs it with the same pointers. The
     * graph is owned by the caller. A fault after its launch names it and its ops: "forward of
     * block 3, part 1 (rmsnorm_fwd, matmul)". One capture of a device at a time.
     */
    nd_status (*capture_begin)(nd_stream *stream, const char *name);
    nd_status (*capture_end)(nd_stream *stream, nd_device_graph **out);
    /* Ends it, and forgets what was recorded. Sets no error: one is being passed up. */
    void (*capture_cancel)(nd_stream *stream);
    nd_status (*graph_launch)(nd_device_graph *graph, nd_stream *stream);
    void (*graph_destroy)(nd_device_graph *graph); /* not NULL */
} nd_device_table;

struct nd_device {
    const nd_device_table *table;
    nd_device_kind kind;
    int ordinal;   /* CUDA ordinal, 0 on the CPU */
    int threads;   /* CPU threads of this worker */
    char name[96]; /* "cpu, 2 threads", "NVIDIA H200" */
    void *native;  /* what the ops of a backend keep for the device (kernels/cpu/context.h) */
    void (*native_close)(void *native); /* called when the device closes; NULL: nothing to do */
    /* Called again and again while the host waits for a stream, with the seconds waited so far. An
     * error ends the wait: a peer was lost, or a deadline passed. NULL: nothing is called. */
    nd_status (*while_waiting)(void *context, double seconds);
    void *waiting_context;
};

/* threads >= 1: of the team that runs this worker's CPU ops, and as many of oneDNN's products. */
nd_status nd_device_open_cpu(int threads, nd_device **out);
void nd_device_close(nd_device *device); /* NULL is legal */

static inline nd_status nd_device_alloc(nd_device *d, size_t bytes, void **out)
{
    return d->table->alloc(d, bytes, out);
}
static inline void nd_device_free(nd_device *d, void *p, size_t bytes)
{
    d->table->free(d, p, bytes);
}

/* Something enqueued: an op, or a copy or fill with its buffers. */
typedef struct nd_graph_op {
    const char *name; /* static: "matmul", "copy" */
    const void *to, *from;
    size_t bytes;
} nd_graph_op;

/* For streams with a graph, in graphs.c. Before work that runs between the graphs of a block: */
nd_status nd_graphs_outside(struct nd_graphs *graphs);
/* Before an op; not *enqueue: it is in a graph that runs again. */
nd_status nd_graphs_inside(struct nd_graphs *graphs, const nd_graph_op *op, bool *enqueue);

static inline nd_status nd_stream_outside(nd_stream *s)
{
    return s && s->graph ? nd_graphs_outside(s->graph) : ND_OK;
}
static inline nd_status nd_stream_inside(nd_stream *s, const nd_graph_op *op, bool *enqueue)
{
    *enqueue = true;
    return s->graph ? nd_graphs_inside(s->graph, op, enqueue) : ND_OK;
}
/* An op of a backend calls the table instead, because a replay does not see this call. */
static inline nd_status nd_copy(nd_stream *s, void *dst, const void *src, size_t bytes)
{
    const nd_graph_op op = {"copy", dst, src, bytes};
    bool enqueue;
    ND_TRY(nd_stream_inside(s, &op, &enqueue));
    return enqueue ? s->device->table->copy(s, dst, src, bytes) : ND_OK;
}
static inline nd_status nd_zero(nd_stream *s, void *dst, size_t bytes)
{
    const nd_graph_op op = {"fill", dst, NULL, bytes};
    bool enqueue;
    ND_TRY(nd_stream_inside(s, &op, &enqueue));
    return enqueue ? s->device->table->zero(s, dst, bytes) : ND_OK;
}
static inline nd_status nd_stream_wait(nd_stream *s, nd_event *e)
{
    if (e->finish || e->native) {
        ND_TRY(nd_stream_outside(s));
    }
    return s->device->table->stream_wait(s, e);
}
static inline nd_status nd_stream_sync(nd_stream *s)
{
    return s->device->table->stream_sync(s);
}
static inline void nd_range_push(const nd_device *d, const char *name)
{
    if (d->table->range_push) {
        d->table->range_push(name);
    }
}
static inline void nd_range_pop(const nd_device *d)
{
    if (d->table->range_pop) {
        d->table->range_pop();
    }
}

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_GRAPHS_H
#define ND_DEVICE_GRAPHS_H
/*
 * CUDA graphs of work that repeats with the same buffers: the forward and the backward of a block.
 *
 * Between nd_graphs_begin and nd_graphs_end the ops, copies and fills of the stream belong to one
 * key. The first time they are recorded, and run from what was recorded. Later, the caller goes
 * through the same code: an op of a recorded part is not enqueued, the part's graph was launched at
 * its first op. Collectives and waits for other streams divide the work into parts and run between
 * them without a graph, so a graph has one stream and no peer.
 *
 * One thread, one stream. The ops of a key must be the same each time: names and order, and of
 * copies and fills the buffers, are compared one by one. How much may be recorded is planned; a dry
 * run of the same code counts it. Capturing allocates in the driver; nothing else here does.
 */
#include <stdint.h>

#include "runtime/device/device.h"

typedef struct nd_graphs nd_graphs;

enum { ND_GRAPH_BUFFERS = 4 };

typedef struct nd_graph_key {
    const char *name; /* static: "forward" */
    int64_t number;   /* the block's */
    int64_t variant;  /* what else the ops depend on */
    const void *buffers[ND_GRAPH_BUFFERS];
} nd_graph_key;

typedef struct nd_graph_counts {
    int64_t works, graphs, ops; /* keys; their parts; ops, copies and fills in those */
    int64_t launches;
} nd_graph_counts;

/*
 * `stream`: borrowed. `most`: what will be recorded at most; going beyond it is an error. NULL:
 * counts what would be recorded, for the stream of a device that does nothing. ND_ERR_CONFIG where
 * the device has no graphs or ops wait (ND_CUDA_SYNC).
 */
nd_status nd_graphs_create(nd_stream *stream, const nd_graph_counts *most, nd_graphs **out);
/* May be called in the midst of a recording, which is dropped; the error record stays as it is.
 * NULL is legal. */
void nd_graphs_destroy(nd_graphs *graphs);

/* The step that follows, for messages. NULL is legal. */
void nd_graphs_set_step(nd_graphs *graphs, int64_t step);

/*
 * Both do nothing when `graphs` is NULL. `status` is what became of the ops: when they failed, what
 * was recorded of them is dropped, the stream is as without graphs, and end returns `status`.
 */
nd_status nd_graphs_begin(nd_graphs *graphs, const nd_graph_key *key);
nd_status nd_graphs_end(nd_graphs *graphs, nd_status status);

nd_graph_counts nd_graphs_count(const nd_graphs *graphs);

/*
 * Device memory of graphs, an estimate: 64 KiB an op, as grew the memory of a GPU with the kernels
 * of a graph under driver 470 (forums.developer.nvidia.com, topic 244901), and as much for what a
 * graph itself may take. An op of several kernels counts once.
 */
static inline size_t nd_graphs_bytes(const nd_graph_counts *counts)
{
    return (size_t)(counts->ops + counts->graphs) << 16;
}

#endif

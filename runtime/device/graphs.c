// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/graphs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/cuda.h"

/* A graph between two collectives. */
typedef struct part {
    nd_cuda_graph *graph;
    int64_t ops;
} part;

typedef struct work {
    nd_graph_key key;
    part *parts;
    int count, room;
} work;

struct nd_graphs {
    nd_stream *stream;
    work *works;
    int count, room;
    int64_t launches;

    /* Between begin and end. */
    work *current;
    bool records; /* else it replays */
    bool open;    /* record: the stream is captured; replay: part `next` was launched */
    int next;     /* replay: the part that comes, or that is open */
    int64_t ops;  /* seen in the open part */
};

nd_status nd_graphs_create(nd_stream *stream, nd_graphs **out)
{
    const char *sync = getenv("ND_CUDA_SYNC");
    if (stream->device->kind != ND_DEVICE_CUDA) {
        return nd_fail(ND_ERR_CONFIG,
                       "kernels.cuda_graphs is true, but this run is on %s, which "
                       "has no CUDA graphs; set kernels.cuda_graphs: false",
                       stream->device->name);
    }
    if (sync && sync[0] && strcmp(sync, "0") != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "ND_CUDA_SYNC makes each op wait for its result, and ops of a CUDA graph "
                       "cannot; unset it, or set kernels.cuda_graphs: false to find the op");
    }
    ND_TRY(ND_ALLOC(1, out));
    (*out)->stream = stream;
    return ND_OK;
}

void nd_graphs_destroy(nd_graphs *g)
{
    if (!g) {
        return;
    }
    g->stream->graph = NULL;
    for (int i = 0; i < g->count; i++) {
        for (int p = 0; p < g->works[i].count; p++) {
            nd_cuda_graph_destroy(g->works[i].parts[p].graph);
        }
        free(g->works[i].parts);
    }
    free(g->works);
    free(g);
}

static bool same_key(const nd_graph_key *a, const nd_graph_key *b)
{
    bool same = a->number == b->number && a->variant == b->variant && strcmp(a->name, b->name) == 0;
    for (int i = 0; i < ND_GRAPH_BUFFERS && same; i++) {
        same = a->buffers[i] == b->buffers[i];
    }
    return same;
}

/* Room for one more; the array may move. */
static nd_status grow(void **array, int count, int *room, size_t bytes)
{
    if (count == *room) {
        int wanted = *room > 0 ? 2 * *room : 8;
        void *larger = realloc(*array, (size_t)wanted * bytes);
        if (!larger) {
            return nd_fail(ND_ERR_INTERNAL, "out of host memory");
        }
        *array = larger;
        *room = wanted;
    }
    return ND_OK;
}

nd_status nd_graphs_begin(nd_graphs *g, const nd_graph_key *key)
{
    if (!g) {
        return ND_OK;
    }
    ND_ASSERT(!g->current);
    for (int i = 0; i < g->count && !g->current; i++) {
        g->current = same_key(&g->works[i].key, key) ? &g->works[i] : NULL;
    }
    g->records = !g->current;
    if (g->records) {
        ND_TRY(grow((void **)&g->works, g->count, &g->room, sizeof *g->works));
        g->current = &g->works[g->count++];
        *g->current = (work){.key = *key};
    }
    g->open = false;
    g->next = 0;
    g->stream->graph = g;
    return ND_OK;
}

static nd_status begin_capture(nd_graphs *g)
{
    const nd_graph_key *key = &g->current->key;
    char name[64];
    snprintf(name, sizeof name, "%s of block %lld, part %d", key->name, (long long)key->number,
             g->current->count + 1);
    return nd_cuda_capture_begin(g->stream, name);
}

static nd_status end_capture(nd_graphs *g)
{
    work *w = g->current;
    part p = {.ops = g->ops};
    nd_status status = nd_cuda_capture_end(g->stream, &p.graph);
    if (status == ND_OK && (status = grow((void **)&w->parts, w->count, &w->room, sizeof p)) != 0) {
        nd_cuda_graph_destroy(p.graph);
    }
    if (status != ND_OK) {
        return nd_fail_context(status,
                               "capturing the %s of block %lld (kernels.cuda_graphs: false runs "
                               "without)",
                               w->key.name, (long long)w->key.number);
    }
    w->parts[w->count++] = p;
    g->launches++;
    return nd_cuda_graph_launch(p.graph, g->stream);
}

static nd_status differs(const nd_graphs *g)
{
    const work *w = g->current;
    int64_t recorded = g->next < w->count ? w->parts[g->next].ops : 0;
    return nd_fail(ND_ERR_INTERNAL,
                   "the %s of block %lld has %lld ops in part %d of %d, and its CUDA graph has "
                   "%lld; set kernels.cuda_graphs: false",
                   w->key.name, (long long)w->key.number, (long long)g->ops, g->next + 1, w->count,
                   (long long)recorded);
}

static nd_status launch_next(nd_graphs *g)
{
    if (g->next == g->current->count) {
        return differs(g);
    }
    g->launches++;
    return nd_cuda_graph_launch(g->current->parts[g->next].graph, g->stream);
}

/* Copies are not counted: what an op copies is not seen when the op is replayed. */
nd_status nd_graphs_inside(nd_graphs *g, bool op, bool *enqueue)
{
    *enqueue = g->records;
    if (g->open) {
        g->ops += op;
        return ND_OK;
    }
    g->open = true;
    g->ops = op;
    return g->records ? begin_capture(g) : launch_next(g);
}

nd_status nd_graphs_outside(nd_graphs *g)
{
    if (!g->open) {
        return ND_OK;
    }
    g->open = false;
    if (g->records) {
        return end_capture(g);
    }
    if (g->ops != g->current->parts[g->next].ops) {
        return differs(g);
    }
    g->next++;
    return ND_OK;
}

nd_status nd_graphs_end(nd_graphs *g)
{
    if (!g) {
        return ND_OK;
    }
    ND_TRY(nd_graphs_outside(g));
    if (!g->records && g->next != g->current->count) {
        g->ops = 0;
        return differs(g);
    }
    g->stream->graph = NULL;
    g->current = NULL;
    return ND_OK;
}

nd_graph_counts nd_graphs_count(const nd_graphs *g)
{
    nd_graph_counts counts = {.works = g->count, .launches = g->launches};
    for (int i = 0; i < g->count; i++) {
        counts.graphs += g->works[i].count;
        for (int p = 0; p < g->works[i].count; p++) {
            counts.ops += g->works[i].parts[p].ops;
        }
    }
    return counts;
}

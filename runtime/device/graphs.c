// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/graphs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A graph between two collectives: `count` ops from `first` on. */
typedef struct part {
    nd_device_graph *graph; /* NULL in a dry run */
    int64_t first, count;
} part;

/* `count` parts from `first` on. */
typedef struct work {
    nd_graph_key key;
    int64_t step; /* in which it was recorded */
    int64_t first, count;
} work;

struct nd_graphs {
    nd_stream *stream;
    const nd_device_table *device; /* the stream's */
    bool dry;
    nd_graph_counts room; /* of the arrays: what is planned; a dry run makes more */
    nd_graph_counts used;
    work *works;
    part *parts;
    nd_graph_op *ops;
    int64_t step, recent; /* the work that was met last */

    /* Between begin and end. */
    work *current;
    bool records; /* otherwise it replays */
    bool open;    /* record: the stream is captured; replay: part `next` was launched */
    int64_t next; /* replay: the next part, or the open one */
    int64_t seen; /* ops in the open part */
};

nd_status nd_graphs_create(nd_stream *stream, const nd_graph_counts *most, nd_graphs **out)
{
    const char *sync = getenv("ND_CUDA_SYNC");
    nd_graphs *g = NULL;
    nd_status status = ND_OK;
    if (most && stream->device->kind != ND_DEVICE_CUDA) {
        return nd_fail(ND_ERR_CONFIG,
                       "kernels.cuda_graphs is true, but this run is on %s, which "
                       "has no CUDA graphs; set kernels.cuda_graphs: false",
                       stream->device->name);
    }
    if (most && sync && sync[0] && strcmp(sync, "0") != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "ND_CUDA_SYNC makes each op wait for its result, and ops of a CUDA graph "
                       "cannot; unset it, or set kernels.cuda_graphs: false to find the op");
    }
    ND_TRY(ND_ALLOC(1, &g));
    g->stream = stream;
    g->device = stream->device->table;
    g->dry = !most;
    if (most) {
        g->room = *most;
        ND_TRY_OUT(ND_ALLOC(most->works, &g->works));
        ND_TRY_OUT(ND_ALLOC(most->graphs, &g->parts));
        ND_TRY_OUT(ND_ALLOC(most->ops, &g->ops));
    }
    *out = g;
out:
    if (status != ND_OK) {
        nd_graphs_destroy(g);
    }
    return status;
}

static void destroy_part(const nd_graphs *g, const part *p)
{
    if (p->graph) {
        g->device->graph_destroy(p->graph);
    }
}

/* Discards what was recorded of the current work; the stream is free again. */
static void drop(nd_graphs *g)
{
    if (g->records && g->open && !g->dry) {
        g->device->capture_cancel(g->stream);
    }
    while (g->records && g->used.graphs > g->current->first) {
        part *p = &g->parts[--g->used.graphs];
        destroy_part(g, p);
        g->used.ops = p->first;
    }
    g->used.works -= g->records;
    g->open = false;
    g->current = NULL;
}

void nd_graphs_destroy(nd_graphs *g)
{
    if (!g) {
        return;
    }
    if (g->current) {
        drop(g);
    }
    g->stream->graph = NULL;
    for (int64_t p = 0; p < g->used.graphs; p++) {
        destroy_part(g, &g->parts[p]);
    }
    free(g->works);
    free(g->parts);
    free(g->ops);
    free(g);
}

void nd_graphs_set_step(nd_graphs *g, int64_t step)
{
    if (g) {
        g->step = step;
    }
}

/* Room for one more of `used`; in a dry run the array may move. */
static nd_status reserve(nd_graphs *g, const nd_graph_key *key, void **array, int64_t used,
                         int64_t *room, size_t bytes)
{
    if (used < *room) {
        return ND_OK;
    }
    if (!g->dry) {
        return nd_fail(ND_ERR_INTERNAL,
                       "step %lld: the %s of block %lld goes beyond the planned %lld CUDA graphs "
                       "(of %lld works, with %lld ops); set kernels.cuda_graphs: false",
                       (long long)g->step, key->name, (long long)key->number,
                       (long long)g->room.graphs, (long long)g->room.works, (long long)g->room.ops);
    }
    int64_t wanted = *room > 0 ? 2 * *room : 64;
    void *larger = realloc(*array, (size_t)wanted * bytes);
    if (!larger) {
        return nd_fail_memory("the records of CUDA graphs");
    }
    *array = larger;
    *room = wanted;
    return ND_OK;
}

/* Works mostly repeat in the order in which they were recorded, so the search begins after the last
 * one. */
static work *find_work(nd_graphs *g, const nd_graph_key *key)
{
    for (int64_t i = 1; i <= g->used.works; i++) {
        int64_t at = (g->recent + i) % g->used.works;
        const nd_graph_key *k = &g->works[at].key;
        if (k->number == key->number && k->variant == key->variant &&
            strcmp(k->name, key->name) == 0 &&
            memcmp(k->buffers, key->buffers, sizeof k->buffers) == 0) {
            g->recent = at;
            return &g->works[at];
        }
    }
    return NULL;
}

nd_status nd_graphs_begin(nd_graphs *g, const nd_graph_key *key)
{
    if (!g) {
        return ND_OK;
    }
    ND_ASSERT(!g->current);
    g->current = find_work(g, key);
    g->records = !g->current;
    if (g->records) {
        ND_TRY(
            reserve(g, key, (void **)&g->works, g->used.works, &g->room.works, sizeof *g->works));
        g->recent = g->used.works++;
        g->current = &g->works[g->recent];
        *g->current = (work){.key = *key, .step = g->step, .first = g->used.graphs};
    }
    g->open = false;
    g->next = 0;
    g->stream->graph = g;
    return ND_OK;
}

static nd_status begin_part(nd_graphs *g)
{
    work *w = g->current;
    char name[64];
    ND_TRY(
        reserve(g, &w->key, (void **)&g->parts, g->used.graphs, &g->room.graphs, sizeof *g->parts));
    if (!g->dry) {
        snprintf(name, sizeof name, "%s of block %lld, part %lld", w->key.name,
                 (long long)w->key.number, (long long)w->count + 1);
        ND_TRY(g->device->capture_begin(g->stream, name));
    }
    g->parts[g->used.graphs++] = (part){.first = g->used.ops};
    w->count++;
    g->open = true;
    return ND_OK;
}

static nd_status record(nd_graphs *g, const nd_graph_op *op)
{
    if (!g->open) {
        ND_TRY(begin_part(g));
    }
    ND_TRY(
        reserve(g, &g->current->key, (void **)&g->ops, g->used.ops, &g->room.ops, sizeof *g->ops));
    g->ops[g->used.ops++] = *op;
    g->parts[g->used.graphs - 1].count++;
    return ND_OK;
}

static nd_status launch(nd_graphs *g, const part *p)
{
    g->used.launches++;
    return g->dry ? ND_OK : g->device->graph_launch(p->graph, g->stream);
}

static nd_status end_part(nd_graphs *g)
{
    part *p = &g->parts[g->used.graphs - 1];
    nd_status status = g->dry ? ND_OK : g->device->capture_end(g->stream, &p->graph);
    g->open = false;
    if (status != ND_OK) {
        return nd_fail_context(status,
                               "capturing the %s of block %lld (kernels.cuda_graphs: false runs "
                               "without)",
                               g->current->key.name, (long long)g->current->key.number);
    }
    return launch(g, p);
}

static const part *next_part(const nd_graphs *g)
{
    return g->next < g->current->count ? &g->parts[g->current->first + g->next] : NULL;
}

/* Op `seen` of the next part is not the recorded one; op NULL: a collective or the end came. */
static nd_status differs(const nd_graphs *g, const nd_graph_op *op)
{
    const work *w = g->current;
    const part *p = next_part(g);
    const nd_graph_op *recorded = p && g->seen < p->count ? &g->ops[p->first + g->seen] : NULL;
    bool buffers = op && recorded && strcmp(op->name, recorded->name) == 0;
    return nd_fail(ND_ERR_INTERNAL,
                   "step %lld, %s of block %lld: op %lld of part %lld is %s%s, and the CUDA graph "
                   "of step %lld has %s there; set kernels.cuda_graphs: false",
                   (long long)g->step, w->key.name, (long long)w->key.number,
                   (long long)g->seen + 1, (long long)g->next + 1, op ? op->name : "none",
                   buffers ? " with other buffers" : "", (long long)w->step,
                   recorded ? recorded->name : "none");
}

static nd_status replay(nd_graphs *g, const nd_graph_op *op)
{
    const part *p = next_part(g);
    bool launches = !g->open;
    g->seen = launches ? 0 : g->seen;
    const nd_graph_op *was = p && g->seen < p->count ? &g->ops[p->first + g->seen] : NULL;
    if (!was || strcmp(op->name, was->name) != 0 || op->to != was->to || op->from != was->from ||
        op->bytes != was->bytes) {
        return differs(g, op);
    }
    g->seen++;
    g->open = true;
    return launches ? launch(g, p) : ND_OK;
}

nd_status nd_graphs_inside(nd_graphs *g, const nd_graph_op *op, bool *enqueue)
{
    *enqueue = g->records;
    return g->records ? record(g, op) : replay(g, op);
}

nd_status nd_graphs_outside(nd_graphs *g)
{
    if (!g->open) {
        return ND_OK;
    }
    if (g->records) {
        return end_part(g);
    }
    if (g->seen != next_part(g)->count) {
        return differs(g, NULL);
    }
    g->open = false;
    g->next++;
    return ND_OK;
}

nd_status nd_graphs_end(nd_graphs *g, nd_status status)
{
    if (!g) {
        return status;
    }
    status = status == ND_OK ? nd_graphs_outside(g) : status;
    if (status == ND_OK && !g->records && next_part(g)) {
        g->seen = 0;
        status = differs(g, NULL);
    }
    if (status != ND_OK) {
        drop(g);
    }
    g->current = NULL;
    g->stream->graph = NULL;
    return status;
}

nd_graph_counts nd_graphs_count(const nd_graphs *g)
{
    return g->used;
}

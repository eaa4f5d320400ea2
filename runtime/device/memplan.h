// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_MEMPLAN_H
#define ND_DEVICE_MEMPLAN_H
/*
 * The memory of a run: named segments, planned before step 0, printed, then allocated once.
 *
 * Adding a segment costs nothing, so the same code that lays out a run also answers `ndtrain plan`
 * for any size. A segment's pointer is valid from nd_memplan_commit to nd_memplan_fini.
 */
#include <stdint.h>
#include <stdio.h>

#include "runtime/device/device.h"

typedef enum nd_mem_class {
    ND_MEM_STATE = 0,     /* F32 master weights, gradients, optimizer moments: this rank's shards */
    ND_MEM_WEIGHTS,       /* gathered units in the compute dtype */
    ND_MEM_GRADIENTS,     /* unsharded F32 gradients of the unit in work */
    ND_MEM_ACTIVATIONS,   /* kept from forward to backward */
    ND_MEM_SCRATCH,       /* reused by every layer */
    ND_MEM_HEAD,          /* logits of one chunk and their statistics */
    ND_MEM_COMMUNICATION, /* staging of the transport */
    ND_MEM_DATA,          /* token buffers */
    ND_MEM_CLASS_COUNT
} nd_mem_class;

enum { ND_MEMPLAN_MAX_SEGMENTS = 96 };

typedef struct nd_mem_segment {
    nd_mem_class class;
    char name[56];
    size_t bytes;
    size_t offset;
    bool external; /* owned by a library or the transport: counted and printed only */
} nd_mem_segment;

typedef struct nd_memplan {
    nd_mem_segment segments[ND_MEMPLAN_MAX_SEGMENTS];
    int count;
    size_t total;    /* bytes of the one allocation */
    size_t external; /* bytes counted besides */
    nd_device *device;
    void *base;
} nd_memplan;

void nd_memplan_init(nd_memplan *plan);
/* Returns the segment's id. Zero bytes is legal (its pointer is NULL). */
int nd_memplan_add(nd_memplan *plan, nd_mem_class class, const char *name, int64_t count,
                   size_t element_size);
/* Memory that someone else allocates for this run. */
void nd_memplan_add_external(nd_memplan *plan, nd_mem_class class, const char *name, size_t bytes);
/* One zeroed allocation of plan->total. */
nd_status nd_memplan_commit(nd_memplan *plan, nd_device *device);
void *nd_memplan_at(const nd_memplan *plan, int id);
void nd_memplan_fini(nd_memplan *plan);

const char *nd_mem_class_name(nd_mem_class class);
size_t nd_memplan_class_bytes(const nd_memplan *plan, nd_mem_class class);
void nd_memplan_print(const nd_memplan *plan, FILE *out);

#endif

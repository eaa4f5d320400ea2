// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_MEMPLAN_H
#define ND_DEVICE_MEMPLAN_H
/*
 * The memory of a run: named buffers, wanted before step 0, printed, then allocated at once.
 *
 * A want costs nothing, so the same code that lays out a run also answers `ndtrain plan` for any
 * size. Buffers lie and are printed in the order in which they were wanted. nd_memplan_commit
 * fills the pointers, which are valid until nd_memplan_fini: until the commit, a struct whose
 * pointers are to be filled must stay where it is.
 */
#include <stdint.h>
#include <stdio.h>

#include "runtime/device/device.h"

typedef enum nd_mem_class {
    ND_MEM_STATE = 0,     /* F32 master weights, gradients, optimizer moments: this rank's shards */
    ND_MEM_WEIGHTS,       /* gathered units in the compute dtype */
    ND_MEM_GRADIENTS,     /* unsharded F32 gradients of the unit in work */
    ND_MEM_ACTIVATIONS,   /* kept from forward to backward */
    ND_MEM_CACHE,         /* keys and values of sequences that are continued */
    ND_MEM_SCRATCH,       /* reused by every layer */
    ND_MEM_HEAD,          /* logits of one chunk and their statistics */
    ND_MEM_COMMUNICATION, /* staging of the transport */
    ND_MEM_DATA,          /* token buffers */
    ND_MEM_CLASS_COUNT
} nd_mem_class;

enum { ND_MEMPLAN_MAX_BUFFERS = 160 };

typedef struct nd_mem_buffer {
    nd_mem_class class;
    char name[56];
    size_t bytes;
    size_t offset;
    bool external; /* owned by a library, the transport or the ops: counted and printed only */
} nd_mem_buffer;

/* A pointer that the commit fills. */
typedef struct nd_mem_pointer {
    void *to; /* address of a T * */
    int want;
    size_t offset;
} nd_mem_pointer;

typedef struct nd_memplan {
    nd_mem_buffer buffers[ND_MEMPLAN_MAX_BUFFERS];
    int count;
    nd_mem_pointer *pointers; /* owned, until the commit */
    int pointer_count, pointer_capacity;
    nd_status status; /* of the plan's own memory; returned by nd_memplan_commit */
    size_t total;     /* bytes of the one allocation */
    size_t external;  /* bytes counted besides */
    nd_device *device;
    void *base;
} nd_memplan;

void nd_memplan_init(nd_memplan *plan);
/* Wants a buffer. `pointer` is the address of a T *, which the commit sets to the buffer, or to
 * NULL where the buffer has no bytes; NULL: nd_memplan_also names all pointers. No other buffer has
 * the name, which is its key in run.json. Returns the want's number. */
int nd_memplan_want(nd_memplan *plan, nd_mem_class class, const char *name, size_t bytes,
                    void *pointer);
/* A further pointer into a buffer: `offset` bytes behind its start, or NULL where the buffer has no
 * bytes. */
void nd_memplan_also(nd_memplan *plan, int want, size_t offset, void *pointer);
/* Memory that a library, the transport or the ops allocate for this run. */
void nd_memplan_add_external(nd_memplan *plan, nd_mem_class class, const char *name, size_t bytes);
/* One zeroed allocation of plan->total; the pointers are filled. */
nd_status nd_memplan_commit(nd_memplan *plan, nd_device *device);
void nd_memplan_fini(nd_memplan *plan);

size_t nd_memplan_class_bytes(const nd_memplan *plan, nd_mem_class class);
void nd_memplan_print(const nd_memplan *plan, FILE *out);

/* Zeroed host memory beside the plan, that the device copies from and to by itself: a copy from
 * other host memory makes the caller wait. Before step 0 only. */
static inline nd_status nd_host_alloc(nd_device *device, size_t bytes, void **out)
{
    return device->table->host_alloc(device, bytes, out);
}
static inline void nd_host_free(nd_device *device, void *p) /* NULL is legal for both */
{
    if (device) {
        device->table->host_free(device, p);
    }
}

#endif

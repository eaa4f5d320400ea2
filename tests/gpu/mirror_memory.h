// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_GPU_MIRROR_MEMORY_H
#define ND_TESTS_GPU_MIRROR_MEMORY_H
/*
 * For mirror.c: the memory that the arguments of one call span on the host, and where it lies on
 * the device. mirror_to_device, the op, mirror_from_device.
 */
#include <stdint.h>

#include "kernels/ops.h"

enum {
    MIRROR_RANGES = 24,
    MIRROR_ARENA = 64 << 20,
    MIRROR_SCRATCH = 64 << 20,
};

typedef struct mirror_range {
    uintptr_t begin, end; /* host */
    char *device;
} mirror_range;

typedef struct mirror_state {
    nd_device *device;
    const nd_ops *ops;
    char *arena, *scratch;
    mirror_range ranges[MIRROR_RANGES];
    int count;
} mirror_state;

extern mirror_state mirrored;

/* A member of the arguments of a call: a tensor, or the address of a pointer to `size` bytes. */
typedef struct mirror_operand {
    nd_tensor *tensor;
    void *pointer;
    size_t size;
} mirror_operand;

/* Copies what the operands span to the device, and makes them point there. Absent ones stay. */
nd_status mirror_to_device(nd_stream *stream, const mirror_operand *operands, size_t count);
/* Copies everything back, and waits. */
nd_status mirror_from_device(nd_stream *stream);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_GPU_MIRROR_MEMORY_H
#define ND_TESTS_GPU_MIRROR_MEMORY_H
/*
 * For mirror*.c: what the arguments of one call span on the host, and where it lies on the device.
 * mirror_start, mirror_see of every argument, mirror_to_device, the op with mirror_there of each,
 * mirror_from_device.
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

void mirror_start(void);
void mirror_see(const void *p, size_t bytes);
void mirror_see_tensor(nd_tensor t);
nd_status mirror_to_device(nd_stream *stream);
nd_status mirror_from_device(nd_stream *stream);
void *mirror_there(const void *p);
nd_tensor mirror_there_tensor(nd_tensor t);

static inline nd_tensor mirror_floats(const float *p, int64_t count)
{
    return nd_tensor_1d((float *)p, ND_DTYPE_F32, count);
}

#define T1(t) mirror_there_tensor(t)
#define RUN(op_)                                                                                   \
    ((status = mirror_to_device(s)) == ND_OK && (status = (op_)) == ND_OK ? mirror_from_device(s)  \
                                                                          : status)

/* An op of tensors alone: SEE its tensors, then call it. */
#define SEE(...)                                                                                   \
    nd_status status = ND_OK;                                                                      \
    const nd_tensor seen_[] = {__VA_ARGS__};                                                       \
    mirror_start();                                                                                \
    for (size_t i_ = 0; i_ < sizeof seen_ / sizeof *seen_; i_++) {                                 \
        mirror_see_tensor(seen_[i_]);                                                              \
    }

typedef nd_stream *S;
typedef nd_tensor T;

#endif

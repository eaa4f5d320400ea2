// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/mirror_memory.h"

#include <string.h>

mirror_state mirrored;

static void note(const void *p, size_t bytes)
{
    if (p && bytes > 0) {
        ND_ASSERT(mirrored.count < MIRROR_RANGES);
        mirrored.ranges[mirrored.count++] =
            (mirror_range){(uintptr_t)p, (uintptr_t)p + bytes, NULL};
    }
}

static void note_tensor(nd_tensor t)
{
    int64_t last = 0;
    for (int i = 0; i < t.axes; i++) {
        last += (t.shape[i] - 1) * t.stride[i];
    }
    if (nd_tensor_count(t) > 0) {
        note(t.data, (size_t)(last + 1) * nd_dtype_size(t.dtype));
    }
}

/* Overlapping ranges become one, so aliases stay aliases. */
static void join(void)
{
    for (int i = 0; i < mirrored.count; i++) {
        for (int j = i + 1; j < mirrored.count; j++) {
            mirror_range *a = &mirrored.ranges[i], *b = &mirrored.ranges[j];
            if (a->begin < b->end && b->begin < a->end) {
                a->begin = a->begin < b->begin ? a->begin : b->begin;
                a->end = a->end > b->end ? a->end : b->end;
                *b = mirrored.ranges[--mirrored.count];
                i = -1; /* it may now overlap an earlier one */
                break;
            }
        }
    }
}

static nd_status copy_ranges(nd_stream *stream)
{
    size_t used = 0;
    join();
    for (int i = 0; i < mirrored.count; i++) {
        mirror_range *r = &mirrored.ranges[i];
        size_t bytes = r->end - r->begin;
        used = (used + 255) / 256 * 256 + r->begin % 256;
        ND_ASSERT(used + bytes <= MIRROR_ARENA);
        r->device = mirrored.arena + used;
        ND_TRY(nd_copy(stream, r->device, (const void *)r->begin, bytes));
        used += bytes;
    }
    return ND_OK;
}

/* Where host memory lies on the device. */
static void *there(const void *p)
{
    uintptr_t at = (uintptr_t)p;
    for (int i = 0; i < mirrored.count; i++) {
        const mirror_range *r = &mirrored.ranges[i];
        if (at >= r->begin && at < r->end) {
            return r->device + (at - r->begin);
        }
    }
    return p ? mirrored.arena : NULL; /* an empty tensor: any address of the device */
}

static void *pointer_of(const mirror_operand *o)
{
    void *p;
    memcpy(&p, o->pointer, sizeof p);
    return p;
}

nd_status mirror_to_device(nd_stream *stream, const mirror_operand *operands, size_t count)
{
    mirrored.count = 0;
    for (size_t i = 0; i < count; i++) {
        if (operands[i].tensor) {
            note_tensor(*operands[i].tensor);
        } else {
            note(pointer_of(&operands[i]), operands[i].size);
        }
    }
    ND_TRY(copy_ranges(stream));
    for (size_t i = 0; i < count; i++) {
        if (operands[i].tensor) {
            operands[i].tensor->data = there(operands[i].tensor->data);
        } else {
            void *p = there(pointer_of(&operands[i]));
            memcpy(operands[i].pointer, &p, sizeof p);
        }
    }
    return ND_OK;
}

nd_status mirror_from_device(nd_stream *stream)
{
    for (int i = 0; i < mirrored.count; i++) {
        const mirror_range *r = &mirrored.ranges[i];
        ND_TRY(nd_copy(stream, (void *)r->begin, r->device, r->end - r->begin));
    }
    return nd_stream_sync(stream);
}

// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/conformance.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "kernels/ops_check.h"
#include "runtime/base/rng.h"
#include "runtime/tensor/fp8.h"

/* sides */

void nd_expect_ok(nd_status status, const char *what)
{
    cr_assert(status == ND_OK, "%s failed: %s", what, nd_error_last()->message);
}

void nd_side_open_ref(nd_side *side)
{
    ND_OK_OR_FAIL(nd_device_open_cpu(1, &side->device));
    ND_OK_OR_FAIL(side->device->table->stream_init(side->device, &side->stream));
    ND_OK_OR_FAIL(nd_ops_ref(&side->ops));
}

void nd_side_close(nd_side *side)
{
    side->device->table->stream_fini(&side->stream);
    nd_device_close(side->device);
}

/* tensors */

enum { MAX_TENSORS = 4096 };

static struct allocation {
    char *memory;
    size_t begin; /* of the tensor in it */
    size_t bytes; /* from there on */
    size_t end;   /* of what may be written; 0: gaps are compared */
} allocations[MAX_TENSORS];
static int allocation_count;
static uint64_t seed;
static nd_draw *shifts; /* not NULL: of the first elements of tensors */

/* All of it is NaN, so that a read between rows or beyond the end is seen. */
static char *new_memory(size_t bytes, size_t begin)
{
    cr_assert(allocation_count < MAX_TENSORS, "a case made more than %d tensors", MAX_TENSORS);
    char *memory = aligned_alloc(64, (begin + bytes + 63) / 64 * 64);
    cr_assert(memory != NULL);
    memset(memory, 0xff, begin + bytes);
    allocations[allocation_count++] = (struct allocation){memory, begin, bytes, 0};
    return memory + begin;
}

void *nd_case_memory(size_t bytes)
{
    enum { ALIGNMENT = 256, BEHIND = 64 };
    char *memory = new_memory(bytes + ALIGNMENT + BEHIND, 0);
    char *begin = memory + (-(uintptr_t)memory & (ALIGNMENT - 1));
    allocations[allocation_count - 1].end = (size_t)(begin - memory) + bytes;
    return begin;
}

void *nd_attention_memory(const nd_side *side, const nd_attention *a, nd_dtype dtype, bool backward)
{
    return nd_case_memory(side->ops->attention_scratch(side->device, a, dtype, backward));
}

/* A few elements more than the view needs, so that a store beyond its end is seen as well. */
static nd_tensor allocate(nd_dtype dtype, int axes, const int64_t *shape, int64_t gap)
{
    nd_tensor t = {.dtype = dtype, .axes = axes};
    int64_t stride = 1;
    for (int a = axes - 1; a >= 0; a--) {
        t.shape[a] = shape[a];
        t.stride[a] = stride;
        stride = stride * shape[a] + gap;
    }
    const int64_t first = shifts && draw_once_in(shifts, 2) ? draw_range(shifts, 0, 31) : 0;
    const size_t size = nd_dtype_size(dtype);
    t.data = new_memory((size_t)(stride + 64) * size, (size_t)first * size);
    return t;
}

static struct allocation *allocation_of(nd_tensor t)
{
    for (int i = 0; i < allocation_count; i++) {
        if (allocations[i].memory + allocations[i].begin == t.data) {
            return &allocations[i];
        }
    }
    cr_assert(false, "a tensor that the harness did not make");
    return NULL;
}

void nd_case_free(void)
{
    while (allocation_count > 0) {
        const struct allocation *a = &allocations[--allocation_count];
        for (size_t i = a->end; a->end > 0 && i < a->bytes; i++) {
            cr_assert(a->memory[i] == (char)0xff, "byte %zu behind memory was written", i - a->end);
        }
        free(a->memory);
    }
}

float nd_get(nd_tensor t, int64_t index)
{
    int64_t at = nd_offset_of(t, index);
    if (nd_dtype_is_fp8(t.dtype)) {
        return nd_fp8_to_f32(t.dtype, ((const uint8_t *)t.data)[at]);
    }
    return t.dtype == ND_DTYPE_F32 ? ((const float *)t.data)[at]
                                   : nd_bf16_to_f32(((const nd_bf16 *)t.data)[at]);
}

void nd_put(nd_tensor t, int64_t index, float value)
{
    int64_t at = nd_offset_of(t, index);
    if (t.dtype == ND_DTYPE_F32) {
        ((float *)t.data)[at] = value;
    } else {
        ((nd_bf16 *)t.data)[at] = nd_bf16_from_f32(value);
    }
}

/* Nearly a normal draw: four uniform ones of 16 bits (splitmix64), added up. Those of nd_rng_normal
 * took a fifth of the time of all tests. */
static float draw_normal(uint64_t stream, uint64_t index)
{
    uint64_t x = (stream << 40) + (index + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    x ^= x >> 31;
    const int sum = (int)((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48));
    return (float)(sum - 2 * 0xffff) * (1.0f / 37837.2f); /* the deviation of such a sum */
}

nd_tensor nd_random(nd_dtype dtype, int axes, const int64_t *shape, int64_t gap, float deviation)
{
    nd_tensor t = allocate(dtype, axes, shape, gap);
    const int64_t count = nd_tensor_count(t);
    seed++;
    for (int64_t i = 0; i < count; i++) {
        nd_put(t, i, deviation * draw_normal(seed, (uint64_t)i));
    }
    return t;
}

nd_tensor nd_random_1d(nd_dtype dtype, int64_t n0, float deviation)
{
    return nd_random(dtype, 1, (int64_t[]){n0}, 0, deviation);
}

nd_tensor nd_random_2d(nd_dtype dtype, int64_t n0, int64_t n1, int64_t gap, float deviation)
{
    return nd_random(dtype, 2, (int64_t[]){n0, n1}, gap, deviation);
}

nd_tensor nd_blank_2d(nd_dtype dtype, int64_t n0, int64_t n1, int64_t gap)
{
    return allocate(dtype, 2, (int64_t[]){n0, n1}, gap);
}

nd_tensor nd_random_ids(int64_t n, int64_t low, int64_t high)
{
    nd_tensor t = allocate(ND_DTYPE_I32, 1, &n, 0);
    seed++;
    for (int64_t i = 0; i < n; i++) {
        uint64_t draw = nd_rng_u64(seed, 0, (uint64_t)i) % (uint64_t)(high - low);
        ((int32_t *)t.data)[i] = (int32_t)(low + (int64_t)draw);
    }
    return t;
}

nd_tensor nd_clone(nd_tensor t)
{
    struct allocation from = *allocation_of(t);
    t.data = new_memory(from.bytes, from.begin);
    memcpy(t.data, from.memory + from.begin, from.bytes);
    return t;
}

void nd_case_poison(nd_tensor t)
{
    for (int64_t i = 0; i < nd_tensor_count(t); i++) {
        nd_put(t, i, NAN);
    }
}

/* draws */

static nd_drawn_check *drawn_check;

static void check_draws(const nd_backend *backend)
{
    enum { FIXED = ND_SANITIZED ? 4 : 16, OF_THE_DAY = ND_SANITIZED ? 2 : 8 };
    const char *only = getenv("ND_DRAW");
    const uint64_t today = (uint64_t)time(NULL) / 86400;
    for (uint64_t i = 0; i < (only ? 1 : FIXED + OF_THE_DAY); i++) {
        nd_backend named = *backend;
        nd_draw d = {.seed = only ? strtoull(only, NULL, 10) : i < FIXED ? i : today * 1000 + i};
        snprintf(named.name, sizeof named.name, "%.30s, ND_DRAW=%llu", backend->name,
                 (unsigned long long)d.seed);
        shifts = &d;
        drawn_check(&d, &named);
        shifts = NULL;
        nd_case_free();
    }
}

void nd_each_draw(nd_drawn_check *check)
{
    drawn_check = check;
    nd_each_backend(check_draws);
}

/* comparisons */

/* Copies the elements of `from` into `to`, after which equal tensors are equal as memory. */
static void copy_elements(nd_tensor to, nd_tensor from)
{
    size_t size = nd_dtype_size(to.dtype);
    for (int64_t i = 0; i < nd_tensor_count(to); i++) {
        memcpy((char *)to.data + (size_t)nd_offset_of(to, i) * size,
               (const char *)from.data + (size_t)nd_offset_of(from, i) * size, size);
    }
}

/* How many bytes are equal before the first that differs; none before the tensor was written. */
static size_t same_bytes(const struct allocation *a, const struct allocation *b)
{
    size_t same = 0;
    for (size_t i = 0; i < a->begin; i++) {
        cr_assert(a->memory[i] == (char)0xff, "a byte before the tensor was written");
    }
    while (same < a->bytes && a->memory[a->begin + same] == b->memory[b->begin + same]) {
        same++;
    }
    return same;
}

static void expect_same_gaps(const char *backend, const char *what, nd_tensor got, nd_tensor want)
{
    struct allocation *a = allocation_of(got), *b = allocation_of(want);
    cr_assert(a->bytes == b->bytes);
    copy_elements(got, want);
    const size_t same = same_bytes(a, b);
    cr_assert(same == a->bytes, "%s: %s: byte %zu, outside of the view, was written", backend, what,
              same);
}

void nd_expect_close(const char *backend, const char *what, nd_tensor got, nd_tensor want,
                     nd_tolerance tolerance)
{
    double rounding = got.dtype == ND_DTYPE_BF16 ? nd_eps_bf16 : nd_eps_f32;
    cr_assert(got.dtype == want.dtype && nd_tensor_count(got) == nd_tensor_count(want));
    const int64_t count = nd_tensor_count(got);
    for (int64_t i = 0; i < count; i++) {
        double g = nd_get(got, i), w = nd_get(want, i);
        double allowed = tolerance.absolute + (tolerance.relative + rounding) * fabs(w);
        bool close = isnan(w) ? isnan(g) : isinf(w) ? g == w : fabs(g - w) <= allowed;
        if (!close) {
            cr_expect(false,
                      "%s: %s: element %lld is %.9g, the reference has %.9g, allowed are %.3g",
                      backend, what, (long long)i, g, w, allowed);
            return; /* the other cases of the test say how far it goes */
        }
    }
    expect_same_gaps(backend, what, got, want);
}

bool nd_has_tensor_cores(const nd_backend *backend)
{
    return strcmp(backend->side.device->table->name, "cuda") == 0 &&
           !strstr(backend->name, "double");
}

/* A NaN may have any of its codes: where both are NaN, `got` gets the bits of `want`. */
static void equate_nans(nd_tensor got, nd_tensor want)
{
    size_t size = nd_dtype_size(got.dtype);
    bool is_float =
        got.dtype == ND_DTYPE_F32 || got.dtype == ND_DTYPE_BF16 || nd_dtype_is_fp8(got.dtype);
    for (int64_t i = 0; is_float && i < nd_tensor_count(got); i++) {
        if (isnan(nd_get(got, i)) && isnan(nd_get(want, i))) {
            memcpy((char *)got.data + (size_t)nd_offset_of(got, i) * size,
                   (const char *)want.data + (size_t)nd_offset_of(want, i) * size, size);
        }
    }
}

void nd_expect_same(const char *backend, const char *what, nd_tensor got, nd_tensor want)
{
    struct allocation *a = allocation_of(got), *b = allocation_of(want);
    cr_assert(a->bytes == b->bytes);
    equate_nans(got, want);
    const size_t same = same_bytes(a, b);
    cr_assert(same == a->bytes, "%s: %s: byte %zu (of element %zu) differs", backend, what, same,
              same / nd_dtype_size(got.dtype));
}

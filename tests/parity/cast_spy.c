// SPDX-License-Identifier: Apache-2.0
#include "tests/parity/cast_spy.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/tensor/fp8.h"
#include "tests/support/tempdir.h"

static _Thread_local cast_spy *active;

void *cast_spy_memory(size_t bytes)
{
    static _Atomic(void **) last; /* each block has the one before */
    void **block = calloc(1, 2 * sizeof *block + bytes);
    ND_ASSERT(block);
    *block = atomic_exchange(&last, block);
    return block + 2;
}

int64_t cast_spy_scales(nd_granularity granularity, int64_t rows, int64_t columns)
{
    return granularity == ND_PER_TENSOR ? 1 : granularity == ND_PER_ROW ? rows : columns;
}

static void *copy_rows(nd_tensor t, size_t element)
{
    size_t row = (size_t)t.shape[1] * element;
    char *copy = cast_spy_memory((size_t)t.shape[0] * row);
    for (int64_t i = 0; i < t.shape[0]; i++) {
        memcpy(copy + (size_t)i * row, (char *)t.data + (size_t)(i * t.stride[0]) * element, row);
    }
    return copy;
}

static void keep(cast_spy *spy, nd_matrix out, nd_tensor x)
{
    if (spy->count < CAST_SPY_MAX) {
        int64_t rows = x.shape[0], columns = x.shape[1];
        size_t scales = (size_t)cast_spy_scales(out.granularity, rows, columns) * sizeof(float);
        spied_cast *c = &spy->casts[spy->count];
        *c = (spied_cast){.granularity = out.granularity,
                          .at = out.scale,
                          .rows = rows,
                          .columns = columns,
                          .x = copy_rows(x, 2),
                          .codes = copy_rows(out.stored, 1),
                          .scale = cast_spy_memory(scales)};
        memcpy(c->scale, out.scale, scales);
    }
    spy->count++;
}

static nd_status spied_make_form(nd_stream *stream, const nd_make_form_args *args)
{
    ND_TRY(active->real->make_form(stream, args));
    /* Not the gather of a master weight. */
    if (args->x.dtype == ND_DTYPE_BF16 && args->x.axes == 2) {
        keep(active, args->out, args->x);
    }
    return ND_OK;
}

static bool same_rows(const spied_cast *c, nd_tensor x)
{
    bool same = c->rows == x.shape[0] && c->columns == x.shape[1];
    for (int64_t i = 0; same && i < c->rows; i++) {
        same = memcmp(c->x + i * c->columns, (nd_bf16 *)x.data + i * x.stride[0],
                      (size_t)c->columns * sizeof *c->x) == 0;
    }
    return same;
}

/* Returns true when this operand was kept already, since several products read it. Another one may
 * have had its scales at the same place before. */
static bool is_latest(const cast_spy *spy, const nd_matrix *x)
{
    for (int i = spy->count - 1; i >= 0 && i < CAST_SPY_MAX; i--) {
        const spied_cast *c = &spy->casts[i];
        if (c->at == x->scale) {
            return c->granularity == x->granularity && same_rows(c, x->stored);
        }
    }
    return false;
}

/* An operand that a product casts, once for all products that read it. Of one in parts the first
 * scale alone is taken: goldens have none. */
static nd_status keep_uncast(nd_stream *stream, const nd_matrix *operand)
{
    nd_matrix x = *operand;
    const nd_tensor from = x.stored;
    if (!nd_matrix_is_fp8(&x) || nd_dtype_is_fp8(from.dtype) || is_latest(active, &x)) {
        return ND_OK;
    }
    void *codes = cast_spy_memory((size_t)(from.shape[0] * from.shape[1]));
    x.stored = nd_tensor_2d(codes, x.format, from.shape[0], from.shape[1]);
    nd_status status = ND_CALL(active->real, stream, make_form, .out = x, .x = from);
    keep(active, x, from);
    return status;
}

static nd_status spied_product(nd_stream *stream, const nd_product_args *args)
{
    ND_TRY(keep_uncast(stream, &args->a));
    ND_TRY(keep_uncast(stream, &args->b));
    return active->real->product(stream, args);
}

void cast_spy_start(cast_spy *spy, nd_rank *rank)
{
    *spy = (cast_spy){.ops = *rank->ops, .real = rank->ops};
    spy->ops.make_form = spied_make_form;
    spy->ops.product = spied_product;
    rank->ops = &spy->ops;
    active = spy;
}

spied_cast cast_by_reference(nd_bf16 *x, nd_granularity granularity, int64_t rows, int64_t columns,
                             bool power_of_two)
{
    const int64_t scales = cast_spy_scales(granularity, rows, columns);
    float *amax = cast_spy_memory((size_t)scales * sizeof *amax);
    const nd_tensor from = nd_tensor_2d(x, ND_DTYPE_BF16, rows, columns);
    const spied_cast out = {.granularity = granularity,
                            .rows = rows,
                            .columns = columns,
                            .x = x,
                            .codes = cast_spy_memory((size_t)(rows * columns)),
                            .scale = cast_spy_memory((size_t)scales * sizeof *out.scale)};
    const nd_matrix fp8 = {.stored = nd_tensor_2d(out.codes, ND_DTYPE_F8_E4M3, rows, columns),
                           .scale = out.scale,
                           .inverse = cast_spy_memory((size_t)scales * sizeof *fp8.inverse),
                           .granularity = granularity};
    const nd_ops *ops;
    nd_device *device;
    nd_stream stream;
    assert_ok(nd_device_open_cpu(1, &device));
    assert_ok(nd_ops_ref(&ops));
    assert_ok(device->table->stream_init(device, &stream));
    assert_ok(ND_CALL(ops, &stream, amax, .amax = amax, .x = from, .granularity = granularity));
    assert_ok(ND_CALL(ops, &stream, fp8_scale, .scale = out.scale, .inverse = fp8.inverse,
                      .amax = amax, .count = scales, .format = ND_DTYPE_F8_E4M3,
                      .power_of_two = power_of_two));
    assert_ok(ND_CALL(ops, &stream, make_form, .out = fp8, .x = from));
    device->table->stream_fini(&stream);
    nd_device_close(device);
    return out;
}

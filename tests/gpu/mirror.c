// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/mirror.h"

#include "kernels/ops_list.h"
#include "tests/gpu/mirror_memory.h"

enum { MOST_RANGES = 8 };

static int64_t scales_of(nd_granularity g, int64_t rows, int64_t columns)
{
    return g == ND_PER_TENSOR ? 1 : g == ND_PER_ROW ? rows : columns;
}

/* Bytes of the scales of an FP8 matrix of the extents of `matrix`. */
static size_t scale_bytes(const nd_matrix *x, nd_tensor matrix)
{
    return (size_t)scales_of(x->granularity, matrix.shape[0],
                             matrix.axes == 1 ? 1 : matrix.shape[1]) *
           sizeof(float);
}

/* Bytes of the scales of an operand of a product, which has its extents itself. */
static size_t operand_scale_bytes(const nd_matrix *x)
{
    const int64_t *shape = x->stored.shape;
    return sizeof(float) *
           (size_t)scales_of(x->granularity, shape[x->transposed], shape[!x->transposed]);
}

static size_t floats(int64_t count)
{
    return (size_t)count * sizeof(float);
}

/* Operands: members of the arguments `x` of a call. FUSE and FP8 stand for all pointers of an
 * nd_fuse or an nd_matrix. */
#define TENSOR(member)                                                                             \
    {                                                                                              \
        .tensor = &x.member                                                                        \
    }
#define POINTER(member, bytes)                                                                     \
    {                                                                                              \
        .pointer = &x.member, .size = (bytes)                                                      \
    }
#define FUSE(member)                                                                               \
    TENSOR(member.codes), POINTER(member.amax, sizeof(float)), POINTER(member.scale, sizeof(float))
#define FP8(member, bytes)                                                                         \
    TENSOR(member.stored), POINTER(member.scale, bytes), POINTER(member.inverse, bytes)

/* Mirrors an op: copies its operands, calls it, and copies them back. `prepare` comes before the
 * call. */
#define MIRROR_PREPARED(op, prepare, ...)                                                          \
    static nd_status mirror_##op(nd_stream *stream, const nd_##op##_args *args)                    \
    {                                                                                              \
        nd_##op##_args x = *args;                                                                  \
        const mirror_operand operands[] = {__VA_ARGS__};                                           \
        ND_TRY(mirror_to_device(stream, operands, sizeof operands / sizeof *operands));            \
        prepare;                                                                                   \
        ND_TRY(mirrored.ops->op(stream, &x));                                                      \
        return mirror_from_device(stream);                                                         \
    }
#define MIRROR(op, ...)              MIRROR_PREPARED(op, (void)0, __VA_ARGS__)
#define MIRROR_WITH_SCRATCH(op, ...) MIRROR_PREPARED(op, x.scratch = mirrored.scratch, __VA_ARGS__)

MIRROR_WITH_SCRATCH(product, TENSOR(c), FP8(a, operand_scale_bytes(&args->a)),
                    FP8(b, operand_scale_bytes(&args->b)))
MIRROR(embedding_fwd, TENSOR(out), TENSOR(ids), TENSOR(table))
MIRROR(embedding_bwd, TENSOR(dtable), TENSOR(ids), TENSOR(dout))
MIRROR(rmsnorm_fwd, TENSOR(y), TENSOR(sum), TENSOR(rstd), TENSOR(x), TENSOR(delta), TENSOR(weight),
       FUSE(fuse), TENSOR(squares))
MIRROR(rmsnorm_bwd, TENSOR(dx), TENSOR(dweight), TENSOR(dy), TENSOR(dres), TENSOR(x),
       TENSOR(weight), TENSOR(rstd), POINTER(amax, sizeof(float)), TENSOR(dots))
MIRROR(row_dots, TENSOR(out), TENSOR(x), TENSOR(y), TENSOR(weight))
MIRROR(rope, TENSOR(out), TENSOR(x), TENSOR(positions),
       POINTER(table.cos, floats(args->table.positions *(args->x.shape[2] / 2))),
       POINTER(table.sin, floats(args->table.positions *(args->x.shape[2] / 2))))
MIRROR(swiglu_fwd, TENSOR(out), TENSOR(gate), TENSOR(up), FUSE(fuse))
MIRROR(swiglu_bwd, TENSOR(dgate), TENSOR(dup), TENSOR(dout), TENSOR(gate), TENSOR(up),
       FUSE(fuse[0]), FUSE(fuse[1]))
MIRROR_WITH_SCRATCH(attention_fwd, TENSOR(out), TENSOR(lse), TENSOR(q), TENSOR(k), TENSOR(v),
                    TENSOR(first_key), TENSOR(end_key))
MIRROR(attention_cached, TENSOR(out), TENSOR(qkv), TENSOR(cache))
MIRROR(attention_delta, TENSOR(delta), TENSOR(out), TENSOR(dout))
MIRROR_WITH_SCRATCH(attention_bwd, TENSOR(dq), TENSOR(dk), TENSOR(dv), TENSOR(q), TENSOR(k),
                    TENSOR(v), TENSOR(out), TENSOR(dout), TENSOR(lse), TENSOR(delta),
                    TENSOR(first_key), TENSOR(end_key))
MIRROR(lse_merge, TENSOR(acc), TENSOR(acc_lse), TENSOR(out), TENSOR(lse))
MIRROR(ce_stats, TENSOR(row_max), TENSOR(row_sum), TENSOR(target), TENSOR(logits), TENSOR(labels))
MIRROR(ce_rescale, TENSOR(row_sum), TENSOR(row_max), TENSOR(global_max))
MIRROR(ce_loss, POINTER(loss_sum, sizeof(double)), TENSOR(max), TENSOR(sum), TENSOR(target),
       TENSOR(labels))
MIRROR(ce_bwd, TENSOR(logits), TENSOR(max), TENSOR(sum), TENSOR(labels),
       POINTER(count, sizeof(int64_t)))
MIRROR(bias_fwd, TENSOR(out), TENSOR(bias))
MIRROR(bias_bwd, TENSOR(dbias), TENSOR(dout))
MIRROR(accumulate, TENSOR(acc), TENSOR(x))
MIRROR(cast, TENSOR(out), TENSOR(x))
MIRROR(axpy, TENSOR(out), TENSOR(x), TENSOR(plus))
MIRROR(sum_squares, POINTER(out, sizeof(double)), POINTER(x, floats(args->count)))
MIRROR(digest, POINTER(out, sizeof(uint64_t)), POINTER(x, floats(args->count)))
MIRROR(random_normal, POINTER(out, floats(args->count)))
MIRROR(amax, TENSOR(x),
       POINTER(amax, args->x.axes == 1 ? sizeof(float)
                                       : floats(scales_of(args->granularity, args->x.shape[0],
                                                          args->x.shape[1]))))
MIRROR(fp8_scale, POINTER(scale, floats(args->count)), POINTER(inverse, floats(args->count)),
       POINTER(amax, floats(args->count)))
MIRROR(fp8_delayed, POINTER(history.amax, floats(args->history.length * args->history.count)),
       POINTER(history.limit, floats(args->history.count)),
       POINTER(history.scale, floats(args->history.count)),
       POINTER(history.inverse, floats(args->history.count)))
MIRROR(make_form, FP8(out, scale_bytes(&args->out, args->x)), TENSOR(transposed),
       POINTER(amax, sizeof(float)), TENSOR(x))
MIRROR(fp8_count, POINTER(counts, 2 * sizeof(int64_t)), TENSOR(x),
       FP8(as, scale_bytes(&args->as, args->x)))

static int64_t end_of(const nd_flat_range *ranges, int count)
{
    int64_t end = 0;
    for (int i = 0; i < count; i++) {
        end = ranges[i].end > end ? ranges[i].end : end;
    }
    return end;
}

/* Adds the copies of the ranges, which become `moved`, to the operands, and returns the number of
 * operands. */
static size_t add_copies(mirror_operand *operands, size_t at, nd_flat_range *moved,
                         const nd_flat_range *ranges, int count)
{
    ND_ASSERT(count <= MOST_RANGES);
    for (int i = 0; i < count; i++) {
        moved[i] = ranges[i];
        operands[at++] = (mirror_operand){
            .pointer = &moved[i].copy,
            .size = (size_t)(ranges[i].end - ranges[i].begin) * sizeof(nd_bf16),
        };
    }
    return at;
}

/* An optimizer has `states` tensors of as many floats as its ranges span, and the copies of the
 * ranges. */
#define MIRROR_OPTIMIZER(op, states, ...)                                                          \
    static nd_status mirror_##op(nd_stream *stream, const nd_##op##_args *args)                    \
    {                                                                                              \
        nd_##op##_args x = *args;                                                                  \
        const size_t bytes = floats(end_of(args->ranges, args->range_count));                      \
        nd_flat_range moved[MOST_RANGES];                                                          \
        mirror_operand operands[states + MOST_RANGES] = {__VA_ARGS__};                             \
        x.ranges = moved;                                                                          \
        size_t count = add_copies(operands, states, moved, args->ranges, args->range_count);       \
        ND_TRY(mirror_to_device(stream, operands, count));                                         \
        ND_TRY(mirrored.ops->op(stream, &x));                                                      \
        return mirror_from_device(stream);                                                         \
    }

MIRROR_OPTIMIZER(adamw, 4, POINTER(p, bytes), POINTER(m, bytes), POINTER(v, bytes),
                 POINTER(grad, bytes))
MIRROR_OPTIMIZER(sgd, 2, POINTER(p, bytes), POINTER(grad, bytes))

static size_t mirror_attention_scratch(const nd_device *device, const nd_attention *a, nd_dtype act,
                                       bool backward)
{
    size_t bytes = mirrored.ops->attention_scratch(device, a, act, backward);
    ND_ASSERT(bytes <= MIRROR_SCRATCH);
    return bytes;
}

static size_t mirror_product_scratch(const nd_device *device, int64_t m, int64_t n, int64_t k,
                                     nd_dtype act)
{
    size_t bytes = mirrored.ops->product_scratch(device, m, n, k, act);
    ND_ASSERT(bytes <= MIRROR_SCRATCH);
    return bytes;
}

static nd_ops table = {.name = "cuda",
                       .attention_scratch = mirror_attention_scratch,
                       .product_scratch = mirror_product_scratch,
                       ND_EACH_OP(ND_OP_ENTRY, mirror_)};

nd_status mirror_open(nd_device *device, const nd_ops *ops, const nd_ops **out)
{
    mirrored.device = device;
    mirrored.ops = ops;
    table.fp8_rows = ops->fp8_rows;
    table.tuner = ops->tuner;
    table.workspace = ops->workspace;
    table.attention_cached_scratch = ops->attention_cached_scratch;
    table.attention_uses_delta = ops->attention_uses_delta;
    table.form = ops->form;
    ND_TRY(nd_ops_check(&table));
    ND_TRY(nd_device_alloc(device, MIRROR_ARENA, (void **)&mirrored.arena));
    ND_TRY(nd_device_alloc(device, MIRROR_SCRATCH, (void **)&mirrored.scratch));
    *out = &table;
    return ND_OK;
}

void mirror_close(void)
{
    nd_device_free(mirrored.device, mirrored.arena, MIRROR_ARENA);
    nd_device_free(mirrored.device, mirrored.scratch, MIRROR_SCRATCH);
}

// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/mirror.h"

#include <stdint.h>

#include "kernels/ops_list.h"
#include "runtime/device/cuda.h"

enum { RANGES = 24, MOST_RANGES = 8, ARENA = 64 << 20, SCRATCH = 64 << 20 };

typedef struct range {
    uintptr_t begin, end; /* host */
    char *device;
} range;

static struct {
    nd_device *device;
    const nd_ops *ops;
    char *arena, *scratch;
    range ranges[RANGES];
    int count;
} m;

static void start(void)
{
    m.count = 0;
}

static void see(const void *p, size_t bytes)
{
    if (p && bytes > 0) {
        ND_ASSERT(m.count < RANGES);
        m.ranges[m.count++] = (range){(uintptr_t)p, (uintptr_t)p + bytes, NULL};
    }
}

static void see_tensor(nd_tensor t)
{
    int64_t last = 0;
    for (int i = 0; i < t.axes; i++) {
        last += (t.shape[i] - 1) * t.stride[i];
    }
    if (t.data && nd_tensor_count(t) > 0) {
        see(t.data, (size_t)(last + 1) * nd_dtype_size(t.dtype));
    }
}

/* Overlapping ranges become one, so aliases stay aliases. */
static void join(void)
{
    for (int i = 0; i < m.count; i++) {
        for (int j = i + 1; j < m.count; j++) {
            range *a = &m.ranges[i], *b = &m.ranges[j];
            if (a->begin < b->end && b->begin < a->end) {
                a->begin = a->begin < b->begin ? a->begin : b->begin;
                a->end = a->end > b->end ? a->end : b->end;
                *b = m.ranges[--m.count];
                i = -1; /* it may now overlap an earlier one */
                break;
            }
        }
    }
}

static nd_status to_device(nd_stream *stream)
{
    size_t used = 0;
    join();
    for (int i = 0; i < m.count; i++) {
        range *r = &m.ranges[i];
        size_t bytes = r->end - r->begin;
        used = (used + 255) / 256 * 256 + r->begin % 256;
        ND_ASSERT(used + bytes <= ARENA);
        r->device = m.arena + used;
        ND_TRY(nd_copy(stream, r->device, (const void *)r->begin, bytes));
        used += bytes;
    }
    return ND_OK;
}

static nd_status from_device(nd_stream *stream)
{
    for (int i = 0; i < m.count; i++) {
        const range *r = &m.ranges[i];
        ND_TRY(nd_copy(stream, (void *)r->begin, r->device, r->end - r->begin));
    }
    return nd_stream_sync(stream);
}

static void *there(const void *p)
{
    uintptr_t at = (uintptr_t)p;
    for (int i = 0; i < m.count; i++) {
        const range *r = &m.ranges[i];
        if (at >= r->begin && at < r->end) {
            return r->device + (at - r->begin);
        }
    }
    return p ? m.arena : NULL; /* an empty tensor: any address of the device */
}

static nd_tensor there_tensor(nd_tensor t)
{
    t.data = there(t.data);
    return t;
}

#define T1(t) there_tensor(t)
#define RUN(op_)                                                                                   \
    ((status = to_device(s)) == ND_OK && (status = (op_)) == ND_OK ? from_device(s) : status)

/* An op of tensors alone: SEE its tensors, then call it. */
#define SEE(...)                                                                                   \
    nd_status status = ND_OK;                                                                      \
    const nd_tensor seen_[] = {__VA_ARGS__};                                                       \
    start();                                                                                       \
    for (size_t i_ = 0; i_ < sizeof seen_ / sizeof *seen_; i_++) {                                 \
        see_tensor(seen_[i_]);                                                                     \
    }

typedef nd_stream *S;
typedef nd_tensor T;

static void see_fuse(const nd_fuse *fuse)
{
    if (fuse) {
        see_tensor(fuse->codes);
        see(fuse->amax, sizeof *fuse->amax);
        see(fuse->scale, sizeof *fuse->scale);
    }
}

static const nd_fuse *there_fuse(const nd_fuse *fuse, nd_fuse *moved)
{
    if (!fuse) {
        return NULL;
    }
    *moved = (nd_fuse){there(fuse->amax), there_tensor(fuse->codes), there(fuse->scale)};
    return moved;
}

static nd_status matmul(S s, T c, T a, bool at, T b, bool bt, float beta)
{
    SEE(c, a, b)
    return RUN(m.ops->matmul(s, T1(c), T1(a), at, T1(b), bt, beta));
}

static nd_status embedding_fwd(S s, T out, T ids, T table, int64_t first)
{
    SEE(out, ids, table)
    return RUN(m.ops->embedding_fwd(s, T1(out), T1(ids), T1(table), first));
}

static nd_status embedding_bwd(S s, T dtable, T ids, T dout, int64_t first)
{
    SEE(dtable, ids, dout)
    return RUN(m.ops->embedding_bwd(s, T1(dtable), T1(ids), T1(dout), first));
}

static nd_status rmsnorm_fwd(S s, T y, T sum, T rstd, T x, T delta, T weight, float eps,
                             const nd_fuse *fuse)
{
    nd_fuse moved;
    SEE(y, sum, rstd, x, delta, weight)
    see_fuse(fuse);
    return RUN(m.ops->rmsnorm_fwd(s, T1(y), T1(sum), T1(rstd), T1(x), T1(delta), T1(weight), eps,
                                  there_fuse(fuse, &moved)));
}

static nd_status rmsnorm_bwd(S s, T dx, T dweight, T dy, T dres, T x, T weight, T rstd)
{
    SEE(dx, dweight, dy, dres, x, weight, rstd)
    return RUN(
        m.ops->rmsnorm_bwd(s, T1(dx), T1(dweight), T1(dy), T1(dres), T1(x), T1(weight), T1(rstd)));
}

static nd_status rope(S s, T out, T x, T positions, nd_rope_view table, bool inverse)
{
    SEE(out, x, positions)
    size_t bytes = (size_t)(table.positions * (x.shape[2] / 2)) * 4;
    see(table.cos, bytes);
    see(table.sin, bytes);
    if ((status = to_device(s)) != ND_OK) {
        return status;
    }
    nd_rope_view view = {there(table.cos), there(table.sin), table.positions};
    status = m.ops->rope(s, T1(out), T1(x), T1(positions), view, inverse);
    return status == ND_OK ? from_device(s) : status;
}

static nd_status swiglu_fwd(S s, T out, T gate, T up, const nd_fuse *fuse)
{
    nd_fuse moved;
    SEE(out, gate, up)
    see_fuse(fuse);
    return RUN(m.ops->swiglu_fwd(s, T1(out), T1(gate), T1(up), there_fuse(fuse, &moved)));
}

static nd_status swiglu_bwd(S s, T dgate, T dup, T dout, T gate, T up, const nd_fuse *fuse_gate,
                            const nd_fuse *fuse_up)
{
    nd_fuse moved[2];
    SEE(dgate, dup, dout, gate, up)
    see_fuse(fuse_gate);
    see_fuse(fuse_up);
    return RUN(m.ops->swiglu_bwd(s, T1(dgate), T1(dup), T1(dout), T1(gate), T1(up),
                                 there_fuse(fuse_gate, &moved[0]), there_fuse(fuse_up, &moved[1])));
}

static nd_status attention_fwd(S s, const nd_attention *a, T out, T lse, T q, T k, T v,
                               void *scratch)
{
    SEE(out, lse, q, k, v)
    return RUN(m.ops->attention_fwd(s, a, T1(out), T1(lse), T1(q), T1(k), T1(v), m.scratch));
}

static nd_status attention_delta(S s, const nd_attention *a, T delta, T out, T dout)
{
    SEE(delta, out, dout)
    return RUN(m.ops->attention_delta(s, a, T1(delta), T1(out), T1(dout)));
}

static nd_status attention_bwd(S s, const nd_attention *a, T dq, T dk, T dv, T q, T k, T v, T out,
                               T dout, T lse, T delta, bool add_q, bool add_kv, void *scratch)
{
    SEE(dq, dk, dv, q, k, v, out, dout, lse, delta)
    return RUN(m.ops->attention_bwd(s, a, T1(dq), T1(dk), T1(dv), T1(q), T1(k), T1(v), T1(out),
                                    T1(dout), T1(lse), T1(delta), add_q, add_kv, m.scratch));
}

static size_t attention_scratch(const nd_device *device, const nd_attention *a, nd_dtype act,
                                bool backward)
{
    size_t bytes = m.ops->attention_scratch(device, a, act, backward);
    ND_ASSERT(bytes <= SCRATCH);
    return bytes;
}

static nd_status lse_merge(S s, const nd_attention *a, T acc, T acc_lse, T out, T lse)
{
    SEE(acc, acc_lse, out, lse)
    return RUN(m.ops->lse_merge(s, a, T1(acc), T1(acc_lse), T1(out), T1(lse)));
}

static nd_status ce_stats(S s, T max, T sum, T target, T logits, T labels, int64_t first,
                          int64_t valid)
{
    SEE(max, sum, target, logits, labels)
    return RUN(
        m.ops->ce_stats(s, T1(max), T1(sum), T1(target), T1(logits), T1(labels), first, valid));
}

static nd_status ce_rescale(S s, T sum, T max, T global_max)
{
    SEE(sum, max, global_max)
    return RUN(m.ops->ce_rescale(s, T1(sum), T1(max), T1(global_max)));
}

static nd_status ce_loss(S s, double *loss, T max, T sum, T target, T labels)
{
    SEE(max, sum, target, labels)
    see(loss, sizeof *loss);
    return RUN(m.ops->ce_loss(s, there(loss), T1(max), T1(sum), T1(target), T1(labels)));
}

static nd_status ce_bwd(S s, T logits, T max, T sum, T labels, int64_t first, int64_t valid,
                        const int64_t *count)
{
    SEE(logits, max, sum, labels)
    see(count, sizeof *count);
    return RUN(
        m.ops->ce_bwd(s, T1(logits), T1(max), T1(sum), T1(labels), first, valid, there(count)));
}

static nd_status add(S s, T out, T a, T b)
{
    SEE(out, a, b)
    return RUN(m.ops->add(s, T1(out), T1(a), T1(b)));
}

static nd_status accumulate(S s, T acc, T x)
{
    SEE(acc, x)
    return RUN(m.ops->accumulate(s, T1(acc), T1(x)));
}

static nd_status cast(S s, T out, T x)
{
    SEE(out, x)
    return RUN(m.ops->cast(s, T1(out), T1(x)));
}

static nd_tensor floats(const float *p, int64_t count)
{
    return nd_tensor_1d((float *)p, ND_DTYPE_F32, count);
}

static nd_status sum_squares(S s, double *out, const float *x, int64_t count)
{
    SEE(floats(x, count))
    see(out, sizeof *out);
    return RUN(m.ops->sum_squares(s, there(out), there(x), count));
}

static nd_status random_normal(S s, float *out, int64_t count, float deviation, uint64_t seed,
                               uint64_t random_stream, uint64_t first)
{
    SEE(floats(out, count))
    return RUN(m.ops->random_normal(s, there(out), count, deviation, seed, random_stream, first));
}

static int64_t end_of(const nd_flat_range *ranges, int count)
{
    int64_t end = 0;
    for (int i = 0; i < count; i++) {
        end = ranges[i].end > end ? ranges[i].end : end;
    }
    return end;
}

/* The ranges with their copies there. */
static const nd_flat_range *there_ranges(const nd_flat_range *ranges, int count,
                                         nd_flat_range *moved)
{
    for (int i = 0; i < count; i++) {
        moved[i] = ranges[i];
        moved[i].copy = there(ranges[i].copy);
    }
    return moved;
}

static void see_copies(const nd_flat_range *ranges, int count)
{
    ND_ASSERT(count <= MOST_RANGES);
    for (int i = 0; i < count; i++) {
        see(ranges[i].copy, (size_t)(ranges[i].end - ranges[i].begin) * sizeof(nd_bf16));
    }
}

static nd_status adamw(S s, const nd_adamw *o, float *p, float *m1, float *m2, const float *grad,
                       const nd_flat_range *ranges, int count)
{
    int64_t n = end_of(ranges, count);
    nd_flat_range moved[MOST_RANGES];
    SEE(floats(p, n), floats(m1, n), floats(m2, n), floats(grad, n))
    see_copies(ranges, count);
    return RUN(m.ops->adamw(s, o, there(p), there(m1), there(m2), there(grad),
                            there_ranges(ranges, count, moved), count));
}

static nd_status sgd(S s, const nd_adamw *o, float *p, const float *grad,
                     const nd_flat_range *ranges, int count)
{
    int64_t n = end_of(ranges, count);
    nd_flat_range moved[MOST_RANGES];
    SEE(floats(p, n), floats(grad, n))
    see_copies(ranges, count);
    return RUN(m.ops->sgd(s, o, there(p), there(grad), there_ranges(ranges, count, moved), count));
}

static int64_t scales_of(nd_granularity g, int64_t rows, int64_t columns)
{
    return g == ND_PER_TENSOR ? 1 : g == ND_PER_ROW ? rows : columns;
}

static nd_status amax(S s, float *out, T x, nd_granularity g, bool merge)
{
    int64_t n = x.axes == 1 ? 1 : scales_of(g, x.shape[0], x.shape[1]);
    SEE(x, floats(out, n))
    return RUN(m.ops->amax(s, there(out), T1(x), g, merge));
}

static nd_status fp8_scale(S s, float *scale, float *inverse, const float *from, int64_t count,
                           nd_dtype format, bool power_of_two)
{
    SEE(floats(scale, count), floats(inverse, count), floats(from, count))
    return RUN(m.ops->fp8_scale(s, there(scale), there(inverse), there(from), count, format,
                                power_of_two));
}

static nd_status fp8_delayed(S s, const nd_fp8_history *h, nd_amax_algorithm algorithm)
{
    SEE(floats(h->amax, h->length * h->count), floats(h->limit, h->count),
        floats(h->scale, h->count), floats(h->inverse, h->count))
    if ((status = to_device(s)) != ND_OK) {
        return status;
    }
    nd_fp8_history moved = {h->length,       h->count,        there(h->amax),
                            there(h->limit), there(h->scale), there(h->inverse)};
    status = m.ops->fp8_delayed(s, &moved, algorithm);
    return status == ND_OK ? from_device(s) : status;
}

static void see_fp8(const nd_fp8 *x, int64_t rows, int64_t columns)
{
    int64_t n = scales_of(x->granularity, rows, columns);
    if (x->codes.data) {
        see_tensor(x->codes);
    }
    if (x->transposed.data) {
        see_tensor(x->transposed);
    }
    see(x->scale, (size_t)n * 4);
    see(x->inverse, (size_t)n * 4);
}

static nd_fp8 there_fp8(nd_fp8 x)
{
    x.codes.data = there(x.codes.data);
    x.transposed.data = there(x.transposed.data);
    x.scale = there(x.scale);
    x.inverse = there(x.inverse);
    return x;
}

static nd_status fp8_cast(S s, nd_fp8 out, float *largest, T x)
{
    SEE(x)
    see_fp8(&out, x.shape[0], x.axes == 1 ? 1 : x.shape[1]);
    see(largest, largest ? 4 : 0);
    return RUN(m.ops->fp8_cast(s, there_fp8(out), there(largest), T1(x)));
}

static nd_status fp8_transpose(S s, T out, T codes)
{
    SEE(out, codes)
    return RUN(m.ops->fp8_transpose(s, T1(out), T1(codes)));
}

static nd_status fp8_count(S s, int64_t counts[2], T x, nd_fp8 as)
{
    SEE(x)
    see_fp8(&as, x.shape[0], x.axes == 1 ? 1 : x.shape[1]);
    see(counts, 2 * sizeof *counts);
    return RUN(m.ops->fp8_count(s, there(counts), T1(x), there_fp8(as)));
}

static void see_operand(const nd_fp8 *x)
{
    nd_tensor t = x->codes.data ? x->codes : x->transposed;
    bool stored = x->codes.data != NULL;
    see_fp8(x, t.shape[stored ? 0 : 1], t.shape[stored ? 1 : 0]);
}

static nd_status matmul_fp8(S s, T c, nd_fp8 a, bool at, nd_fp8 b, bool bt, float beta, bool fast,
                            void *scratch)
{
    SEE(c)
    see_operand(&a);
    see_operand(&b);
    return RUN(
        m.ops->matmul_fp8(s, T1(c), there_fp8(a), at, there_fp8(b), bt, beta, fast, m.scratch));
}

static size_t matmul_fp8_scratch(const nd_device *device, int64_t rows, int64_t n, int64_t k,
                                 nd_dtype act)
{
    size_t bytes = m.ops->matmul_fp8_scratch(device, rows, n, k, act);
    ND_ASSERT(bytes <= SCRATCH);
    return bytes;
}

#define ENTRY(op) .op = op,

static nd_ops table = {.name = "cuda", ND_EACH_OP(ENTRY)};

nd_status mirror_open(nd_device *device, const nd_ops *ops, const nd_ops **out)
{
    m.device = device;
    m.ops = ops;
    table.fp8_needs_transposed = ops->fp8_needs_transposed;
    ND_TRY(nd_ops_check(&table));
    ND_TRY(nd_device_alloc(device, ARENA, (void **)&m.arena));
    ND_TRY(nd_device_alloc(device, SCRATCH, (void **)&m.scratch));
    *out = &table;
    return ND_OK;
}

void mirror_close(void)
{
    nd_device_free(m.device, m.arena, ARENA);
    nd_device_free(m.device, m.scratch, SCRATCH);
}

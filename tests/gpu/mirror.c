// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/mirror.h"

#include "kernels/ops_list.h"
#include "runtime/device/cuda.h"
#include "tests/gpu/mirror_fp8.h"
#include "tests/gpu/mirror_memory.h"

enum { MOST_RANGES = 8 };

static void see_fuse(const nd_fuse *fuse)
{
    if (fuse) {
        mirror_see_tensor(fuse->codes);
        mirror_see(fuse->amax, sizeof *fuse->amax);
        mirror_see(fuse->scale, sizeof *fuse->scale);
    }
}

static const nd_fuse *there_fuse(const nd_fuse *fuse, nd_fuse *moved)
{
    if (!fuse) {
        return NULL;
    }
    *moved = (nd_fuse){mirror_there(fuse->amax), mirror_there_tensor(fuse->codes),
                       mirror_there(fuse->scale)};
    return moved;
}

static nd_status mirror_matmul(S s, T c, T a, bool at, T b, bool bt, float beta)
{
    SEE(c, a, b)
    return RUN(mirrored.ops->matmul(s, T1(c), T1(a), at, T1(b), bt, beta));
}

static nd_status mirror_embedding_fwd(S s, T out, T ids, T table, int64_t first)
{
    SEE(out, ids, table)
    return RUN(mirrored.ops->embedding_fwd(s, T1(out), T1(ids), T1(table), first));
}

static nd_status mirror_embedding_bwd(S s, T dtable, T ids, T dout, int64_t first)
{
    SEE(dtable, ids, dout)
    return RUN(mirrored.ops->embedding_bwd(s, T1(dtable), T1(ids), T1(dout), first));
}

static nd_status mirror_rmsnorm_fwd(S s, T y, T sum, T rstd, T x, T delta, T weight, float eps,
                                    const nd_fuse *fuse)
{
    nd_fuse moved;
    SEE(y, sum, rstd, x, delta, weight)
    see_fuse(fuse);
    return RUN(mirrored.ops->rmsnorm_fwd(s, T1(y), T1(sum), T1(rstd), T1(x), T1(delta), T1(weight),
                                         eps, there_fuse(fuse, &moved)));
}

static nd_status mirror_rmsnorm_bwd(S s, T dx, T dweight, T dy, T dres, T x, T weight, T rstd)
{
    SEE(dx, dweight, dy, dres, x, weight, rstd)
    return RUN(mirrored.ops->rmsnorm_bwd(s, T1(dx), T1(dweight), T1(dy), T1(dres), T1(x),
                                         T1(weight), T1(rstd)));
}

static nd_status mirror_rope(S s, T out, T x, T positions, nd_rope_view table, bool inverse)
{
    SEE(out, x, positions)
    size_t bytes = (size_t)(table.positions * (x.shape[2] / 2)) * 4;
    mirror_see(table.cos, bytes);
    mirror_see(table.sin, bytes);
    if ((status = mirror_to_device(s)) != ND_OK) {
        return status;
    }
    nd_rope_view view = {mirror_there(table.cos), mirror_there(table.sin), table.positions};
    status = mirrored.ops->rope(s, T1(out), T1(x), T1(positions), view, inverse);
    return status == ND_OK ? mirror_from_device(s) : status;
}

static nd_status mirror_swiglu_fwd(S s, T out, T gate, T up, const nd_fuse *fuse)
{
    nd_fuse moved;
    SEE(out, gate, up)
    see_fuse(fuse);
    return RUN(mirrored.ops->swiglu_fwd(s, T1(out), T1(gate), T1(up), there_fuse(fuse, &moved)));
}

static nd_status mirror_swiglu_bwd(S s, T dgate, T dup, T dout, T gate, T up,
                                   const nd_fuse *fuse_gate, const nd_fuse *fuse_up)
{
    nd_fuse moved[2];
    SEE(dgate, dup, dout, gate, up)
    see_fuse(fuse_gate);
    see_fuse(fuse_up);
    return RUN(mirrored.ops->swiglu_bwd(s, T1(dgate), T1(dup), T1(dout), T1(gate), T1(up),
                                        there_fuse(fuse_gate, &moved[0]),
                                        there_fuse(fuse_up, &moved[1])));
}

static nd_status mirror_attention_fwd(S s, const nd_attention *a, T out, T lse, T q, T k, T v,
                                      void *scratch)
{
    SEE(out, lse, q, k, v)
    return RUN(
        mirrored.ops->attention_fwd(s, a, T1(out), T1(lse), T1(q), T1(k), T1(v), mirrored.scratch));
}

static nd_status mirror_attention_delta(S s, const nd_attention *a, T delta, T out, T dout)
{
    SEE(delta, out, dout)
    return RUN(mirrored.ops->attention_delta(s, a, T1(delta), T1(out), T1(dout)));
}

static nd_status mirror_attention_bwd(S s, const nd_attention *a, T dq, T dk, T dv, T q, T k, T v,
                                      T out, T dout, T lse, T delta, bool add_q, bool add_kv,
                                      void *scratch)
{
    SEE(dq, dk, dv, q, k, v, out, dout, lse, delta)
    return RUN(mirrored.ops->attention_bwd(s, a, T1(dq), T1(dk), T1(dv), T1(q), T1(k), T1(v),
                                           T1(out), T1(dout), T1(lse), T1(delta), add_q, add_kv,
                                           mirrored.scratch));
}

static size_t mirror_attention_scratch(const nd_device *device, const nd_attention *a, nd_dtype act,
                                       bool backward)
{
    size_t bytes = mirrored.ops->attention_scratch(device, a, act, backward);
    ND_ASSERT(bytes <= MIRROR_SCRATCH);
    return bytes;
}

static bool mirror_attention_uses_delta(const nd_device *device, const nd_attention *a,
                                        nd_dtype act)
{
    return mirrored.ops->attention_uses_delta(device, a, act);
}

static nd_status mirror_lse_merge(S s, const nd_attention *a, T acc, T acc_lse, T out, T lse)
{
    SEE(acc, acc_lse, out, lse)
    return RUN(mirrored.ops->lse_merge(s, a, T1(acc), T1(acc_lse), T1(out), T1(lse)));
}

static nd_status mirror_ce_stats(S s, T max, T sum, T target, T logits, T labels, int64_t first,
                                 int64_t valid)
{
    SEE(max, sum, target, logits, labels)
    return RUN(mirrored.ops->ce_stats(s, T1(max), T1(sum), T1(target), T1(logits), T1(labels),
                                      first, valid));
}

static nd_status mirror_ce_rescale(S s, T sum, T max, T global_max)
{
    SEE(sum, max, global_max)
    return RUN(mirrored.ops->ce_rescale(s, T1(sum), T1(max), T1(global_max)));
}

static nd_status mirror_ce_loss(S s, double *loss, T max, T sum, T target, T labels)
{
    SEE(max, sum, target, labels)
    mirror_see(loss, sizeof *loss);
    return RUN(
        mirrored.ops->ce_loss(s, mirror_there(loss), T1(max), T1(sum), T1(target), T1(labels)));
}

static nd_status mirror_ce_bwd(S s, T logits, T max, T sum, T labels, int64_t first, int64_t valid,
                               const int64_t *count)
{
    SEE(logits, max, sum, labels)
    mirror_see(count, sizeof *count);
    return RUN(mirrored.ops->ce_bwd(s, T1(logits), T1(max), T1(sum), T1(labels), first, valid,
                                    mirror_there(count)));
}

static nd_status mirror_add(S s, T out, T a, T b)
{
    SEE(out, a, b)
    return RUN(mirrored.ops->add(s, T1(out), T1(a), T1(b)));
}

static nd_status mirror_accumulate(S s, T acc, T x)
{
    SEE(acc, x)
    return RUN(mirrored.ops->accumulate(s, T1(acc), T1(x)));
}

static nd_status mirror_cast(S s, T out, T x)
{
    SEE(out, x)
    return RUN(mirrored.ops->cast(s, T1(out), T1(x)));
}

static nd_status mirror_sum_squares(S s, double *out, const float *x, int64_t count)
{
    SEE(mirror_floats(x, count))
    mirror_see(out, sizeof *out);
    return RUN(mirrored.ops->sum_squares(s, mirror_there(out), mirror_there(x), count));
}

static nd_status mirror_random_normal(S s, float *out, int64_t count, float deviation,
                                      uint64_t seed, uint64_t random_stream, uint64_t first)
{
    SEE(mirror_floats(out, count))
    return RUN(mirrored.ops->random_normal(s, mirror_there(out), count, deviation, seed,
                                           random_stream, first));
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
        moved[i].copy = mirror_there(ranges[i].copy);
    }
    return moved;
}

static void see_copies(const nd_flat_range *ranges, int count)
{
    ND_ASSERT(count <= MOST_RANGES);
    for (int i = 0; i < count; i++) {
        mirror_see(ranges[i].copy, (size_t)(ranges[i].end - ranges[i].begin) * sizeof(nd_bf16));
    }
}

static nd_status mirror_adamw(S s, const nd_adamw *o, float *p, float *m1, float *m2,
                              const float *grad, const nd_flat_range *ranges, int count)
{
    int64_t n = end_of(ranges, count);
    nd_flat_range moved[MOST_RANGES];
    SEE(mirror_floats(p, n), mirror_floats(m1, n), mirror_floats(m2, n), mirror_floats(grad, n))
    see_copies(ranges, count);
    return RUN(mirrored.ops->adamw(s, o, mirror_there(p), mirror_there(m1), mirror_there(m2),
                                   mirror_there(grad), there_ranges(ranges, count, moved), count));
}

static nd_status mirror_sgd(S s, const nd_adamw *o, float *p, const float *grad,
                            const nd_flat_range *ranges, int count)
{
    int64_t n = end_of(ranges, count);
    nd_flat_range moved[MOST_RANGES];
    SEE(mirror_floats(p, n), mirror_floats(grad, n))
    see_copies(ranges, count);
    return RUN(mirrored.ops->sgd(s, o, mirror_there(p), mirror_there(grad),
                                 there_ranges(ranges, count, moved), count));
}

#define ENTRY(op) .op = mirror_##op,

static nd_ops table = {.name = "cuda", ND_EACH_OP(ENTRY)};

nd_status mirror_open(nd_device *device, const nd_ops *ops, const nd_ops **out)
{
    mirrored.device = device;
    mirrored.ops = ops;
    table.fp8_needs_transposed = ops->fp8_needs_transposed;
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

// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/fuse.cuh"
#include "kernels/cuda/map.cuh"

using namespace nd;

namespace {

/* 1 / (1 + e^-z) with the z of g (nd_swiglu_fwd_args), and dz/dg, which is large where the sigmoid
 * is 1: so GELU's is divided exactly. */
template <class T, bool GELU> __device__ inline float sigmoid(float g)
{
    float z = GELU ? g * ((float)ND_GELU_LINEAR + (float)ND_GELU_CUBIC * g * g) : g;
    float sum = 1.0f + exp_for<T>(-z);
    return GELU ? 1.0f / sum : divide_for<T>(1.0f, sum);
}

template <bool GELU> __device__ inline float slope(float g)
{
    return GELU ? (float)ND_GELU_LINEAR + (float)(3 * ND_GELU_CUBIC) * g * g : 1.0f;
}

enum { OUT = 0, GATE, UP, CODES, FORWARD_OPERANDS };

template <class T, int N, bool GELU> struct forward_of {
    static constexpr int together = N == 1 ? 1 : 2, amaxes = 1;
    T *out;
    const T *gate, *up;
    layout<FORWARD_OPERANDS> l;
    fuse_view fuse;
    float *amax[1];

    struct state {
        int64_t row, column, to;
        float scale;
        pack<T, N> gate, up;
    };

    __device__ void load(int64_t v, state &s) const
    {
        place p = l.template find<N>(v);
        s.row = p.row;
        s.column = p.column;
        s.to = l.offset(OUT, p);
        s.scale = fuse.scale_value();
        s.gate = nd::load<N>(gate + l.offset(GATE, p));
        s.up = nd::load<N>(up + l.offset(UP, p));
    }

    __device__ void compute(const state &s, float (&x)[N]) const
    {
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            float g = get(s.gate, i);
            x[i] = g * sigmoid<T, GELU>(g) * get(s.up, i);
        }
    }

    __device__ void finish(state &s) const
    {
        float x[N];
        compute(s, x);
        store_floats<N>(out + s.to, x);
    }

    __device__ void finish(state &s, uint32_t (&sizes)[1]) const
    {
        float x[N];
        compute(s, x);
        T *to = out ? out + s.to : NULL;
        sizes[0] = larger(sizes[0], store_fused<N>(to, fuse, s.scale, s.row, s.column, x));
    }
};

template <class T, int N, bool GELU>
int forward_packs(nd_cuda_queue queue, const nd_tensor (&t)[FORWARD_OPERANDS],
                  const layout<FORWARD_OPERANDS> &l, const nd_fuse &fuse)
{
    T *out = (T *)t[OUT].data;
    const T *gate = (const T *)t[GATE].data, *up = (const T *)t[UP].data;
    if (fuse_is_on(fuse)) {
        forward_of<T, N, GELU> f = {out, gate, up, l, fuse_view_of(fuse), {fuse.amax}};
        return map_amax(queue, f, l.count());
    }
    return map(queue, forward_of<T, N, GELU>{out, gate, up, l, {}, {NULL}}, l.count());
}

template <class T, bool GELU>
int forward(nd_cuda_queue queue, const nd_tensor (&t)[FORWARD_OPERANDS], const nd_fuse &fuse)
{
    constexpr int PACK = type_of<T>::pack;
    int N;
    layout<FORWARD_OPERANDS> l = layout_of(t, PACK, fuse_is_on(fuse), &N);
    return N == PACK ? forward_packs<T, PACK, GELU>(queue, t, l, fuse)
                     : forward_packs<T, 1, GELU>(queue, t, l, fuse);
}

enum { DGATE = 0, DUP, DOUT, B_GATE, B_UP, GATE_CODES, UP_CODES, BACKWARD_OPERANDS };

/* (g s(z))' = s (1 + g (1 - s) z'). */
template <class T, int N, bool GELU> struct backward_of {
    static constexpr int together = N == 1 ? 1 : 2, amaxes = 2;
    T *dgate, *dup;
    const T *dout, *gate, *up;
    layout<BACKWARD_OPERANDS> l;
    fuse_view fuse[2];
    float *amax[2];

    struct state {
        int64_t row, column, to_gate, to_up;
        float scale[2];
        pack<T, N> dout, gate, up;
    };

    __device__ void load(int64_t v, state &s) const
    {
        place p = l.template find<N>(v);
        s.row = p.row;
        s.column = p.column;
        s.to_gate = l.offset(DGATE, p);
        s.to_up = l.offset(DUP, p);
        s.scale[0] = fuse[0].scale_value();
        s.scale[1] = fuse[1].scale_value();
        s.dout = nd::load<N>(dout + l.offset(DOUT, p));
        s.gate = nd::load<N>(gate + l.offset(B_GATE, p));
        s.up = nd::load<N>(up + l.offset(B_UP, p));
    }

    __device__ void compute(const state &s, float (&dg)[N], float (&du)[N]) const
    {
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            float g = get(s.gate, i), d = get(s.dout, i), sigma = sigmoid<T, GELU>(g);
            dg[i] = d * get(s.up, i) * sigma * (1.0f + g * (1.0f - sigma) * slope<GELU>(g));
            du[i] = d * g * sigma;
        }
    }

    __device__ void finish(state &s) const
    {
        float dg[N], du[N];
        compute(s, dg, du);
        store_floats<N>(dgate + s.to_gate, dg);
        store_floats<N>(dup + s.to_up, du);
    }

    __device__ void finish(state &s, uint32_t (&sizes)[2]) const
    {
        float dg[N], du[N];
        compute(s, dg, du);
        T *to_gate = dgate ? dgate + s.to_gate : NULL, *to_up = dup ? dup + s.to_up : NULL;
        sizes[0] =
            larger(sizes[0], store_fused<N>(to_gate, fuse[0], s.scale[0], s.row, s.column, dg));
        sizes[1] =
            larger(sizes[1], store_fused<N>(to_up, fuse[1], s.scale[1], s.row, s.column, du));
    }
};

template <class T, int N, bool GELU>
int backward_packs(nd_cuda_queue queue, const nd_tensor (&t)[BACKWARD_OPERANDS],
                   const layout<BACKWARD_OPERANDS> &l, const nd_fuse *fuse)
{
    backward_of<T, N, GELU> f = {(T *)t[DGATE].data,
                                 (T *)t[DUP].data,
                                 (const T *)t[DOUT].data,
                                 (const T *)t[B_GATE].data,
                                 (const T *)t[B_UP].data,
                                 l,
                                 {fuse_view_of(fuse[0]), fuse_view_of(fuse[1])},
                                 {fuse[0].amax, fuse[1].amax}};
    bool fused = fuse_is_on(fuse[0]) || fuse_is_on(fuse[1]);
    return fused ? map_amax(queue, f, l.count()) : map(queue, f, l.count());
}

template <class T, bool GELU>
int backward(nd_cuda_queue queue, const nd_tensor (&t)[BACKWARD_OPERANDS], const nd_fuse *fuse)
{
    constexpr int PACK = type_of<T>::pack;
    int N;
    bool fused = fuse_is_on(fuse[0]) || fuse_is_on(fuse[1]);
    layout<BACKWARD_OPERANDS> l = layout_of(t, PACK, fused, &N);
    return N == PACK ? backward_packs<T, PACK, GELU>(queue, t, l, fuse)
                     : backward_packs<T, 1, GELU>(queue, t, l, fuse);
}

} // namespace

int nd_cuda_swiglu_fwd(nd_cuda_queue queue, const nd_swiglu_fwd_args *args, void *scratch)
{
    const nd_tensor gate = args->gate;
    const nd_tensor t[FORWARD_OPERANDS] = {args->out, gate, args->up, args->fuse.codes};
    const bool f32 = gate.dtype == ND_DTYPE_F32;
    if (args->gelu) {
        return f32 ? forward<float, true>(queue, t, args->fuse)
                   : forward<bf16, true>(queue, t, args->fuse);
    }
    return f32 ? forward<float, false>(queue, t, args->fuse)
               : forward<bf16, false>(queue, t, args->fuse);
}

int nd_cuda_swiglu_bwd(nd_cuda_queue queue, const nd_swiglu_bwd_args *args, void *scratch)
{
    const nd_tensor gate = args->gate;
    const nd_tensor t[BACKWARD_OPERANDS] = {
        args->dgate, args->dup,           args->dout,         gate,
        args->up,    args->fuse[0].codes, args->fuse[1].codes};
    const bool f32 = gate.dtype == ND_DTYPE_F32;
    if (args->gelu) {
        return f32 ? backward<float, true>(queue, t, args->fuse)
                   : backward<bf16, true>(queue, t, args->fuse);
    }
    return f32 ? backward<float, false>(queue, t, args->fuse)
               : backward<bf16, false>(queue, t, args->fuse);
}

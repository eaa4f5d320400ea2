// SPDX-License-Identifier: Apache-2.0
/*
 * Casts to FP8 and transposes of codes.
 *
 * The transpose goes through shared memory in tiles of 128 x 128 codes. A thread holds 8 x 8 of
 * them: 8 columns of 8 rows. It transposes them in registers and writes one word of 8 codes per
 * column. In the tile a column's 16 words are permuted by an exclusive or with the number of its
 * group of 8 columns, so that neither the writes (16 groups, one word each) nor the reads (one
 * column, 8 pairs of words) meet in a bank; a pair stays a pair, in turned order where the group is
 * odd.
 */
#include "kernels/cuda/fuse.cuh"
#include "kernels/cuda/map.cuh"

using namespace nd;

namespace {

enum { TILE = 128, BLOCK = 8, GROUPS = TILE / BLOCK, TILE_THREADS = GROUPS * GROUPS };

struct alignas(8) codes8 {
    uint32_t low, high; /* codes 0..3 and 4..7 */
};

struct tile_args {
    int64_t rows, columns;
    const void *x;
    int64_t x_stride;
    uint8_t *codes, *transposed; /* either may be NULL */
    int64_t codes_stride, transposed_stride;
    const float *scale;
    nd_granularity granularity;
    bool e4m3;
    float *amax;
    int strips; /* tiles across */
};

__device__ inline codes8 words_of(const pack<uint8_t, 8> &x)
{
    return {x.w[0], x.w[1]};
}

/* 4 x 4 bytes: word i of the result has byte i of each. */
__device__ inline void transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                  uint32_t (&out)[4])
{
    uint32_t ab_even = __byte_perm(a, b, 0x6240), ab_odd = __byte_perm(a, b, 0x7351);
    uint32_t cd_even = __byte_perm(c, d, 0x6240), cd_odd = __byte_perm(c, d, 0x7351);
    out[0] = __byte_perm(ab_even, cd_even, 0x5410); /* a0 b0 | c0 d0 */
    out[1] = __byte_perm(ab_odd, cd_odd, 0x5410);
    out[2] = __byte_perm(ab_even, cd_even, 0x7632);
    out[3] = __byte_perm(ab_odd, cd_odd, 0x7632);
}

/* Writes the transpose of a thread's 8 x 8 codes into the tile: a word of 8 rows for each of its
 * columns. */
__device__ inline void put_block(codes8 *tile, const codes8 (&rows)[BLOCK], int column_group,
                                 int row_group)
{
    uint32_t upper[2][4], lower[2][4]; /* rows 0..3 and 4..7 of columns 0..3 and 4..7 */
    transpose4(rows[0].low, rows[1].low, rows[2].low, rows[3].low, upper[0]);
    transpose4(rows[0].high, rows[1].high, rows[2].high, rows[3].high, upper[1]);
    transpose4(rows[4].low, rows[5].low, rows[6].low, rows[7].low, lower[0]);
    transpose4(rows[4].high, rows[5].high, rows[6].high, rows[7].high, lower[1]);
    ND_UNROLL
    for (int j = 0; j < BLOCK; j++) {
        int column = column_group * BLOCK + j;
        tile[column * GROUPS + (row_group ^ column_group)] = {upper[j / 4][j % 4],
                                                              lower[j / 4][j % 4]};
    }
}

/* Writes the tile to `transposed`, 16 codes of a column at a time. */
template <bool ALIGNED>
__device__ inline void write_tile(const codes8 *tile, const tile_args &a, int64_t row0,
                                  int64_t column0)
{
    for (int i = (int)threadIdx.x; i < TILE * (GROUPS / 2); i += TILE_THREADS) {
        int column = i / (GROUPS / 2), pair = i % (GROUPS / 2), group = column / BLOCK;
        int64_t row = row0 + pair * 16, left = a.rows - row;
        if (column0 + column >= a.columns || left <= 0) {
            continue;
        }
        pack<uint32_t, 4> in =
            load<4>((const uint32_t *)(tile + column * GROUPS + 2 * (pair ^ group / 2)));
        pack<uint8_t, 16> out = {{in.e[0], in.e[1], in.e[2], in.e[3]}};
        if (group % 2) {
            out = {{in.e[2], in.e[3], in.e[0], in.e[1]}};
        }
        uint8_t *to = a.transposed + (column0 + column) * a.transposed_stride + row;
        if (ALIGNED) { /* rows are handled 16 at a time */
            store<16>(to, out);
        } else {
            for (int k = 0; k < 16 && k < left; k++) {
                to[k] = (uint8_t)(out.w[k / 4] >> (8 * (k % 4)));
            }
        }
    }
}

/* 8 adjacent elements of a row as they are stored; 0 beyond its end. */
template <class T, bool ALIGNED> struct elements8 {
    static constexpr int PACK = ALIGNED ? type_of<T>::pack : 1;
    pack<T, PACK> packs[8 / PACK];

    __device__ void read(const T *p, int64_t left)
    {
        ND_UNROLL
        for (int k = 0; k < 8 / PACK; k++) {
            packs[k] = load<PACK>(p + k * PACK, k * PACK < left);
        }
    }

    __device__ float operator[](int i) const
    {
        return get(packs[i / PACK], i % PACK);
    }
};

template <bool ALIGNED> __device__ inline void store8(uint8_t *p, codes8 x, int64_t left)
{
    if (ALIGNED) {
        store<8>(p, pack<uint8_t, 8>{{x.low, x.high}});
    } else {
        for (int k = 0; k < 8 && k < left; k++) {
            p[k] = (uint8_t)((k < 4 ? x.low : x.high) >> (8 * (k % 4)));
        }
    }
}

/* Codes of 8 adjacent columns of one row. */
template <class T, bool ALIGNED>
__device__ inline codes8 encode8(const tile_args &a, const elements8<T, ALIGNED> &x,
                                 const float (&scale)[8])
{
    float scaled[8];
    ND_UNROLL
    for (int i = 0; i < 8; i++) {
        scaled[i] = x[i] * scale[i];
    }
    return words_of(a.e4m3 ? encode_all<ND_DTYPE_F8_E4M3>(scaled)
                           : encode_all<ND_DTYPE_F8_E5M2>(scaled));
}

template <class T, bool ALIGNED>
__global__ void __launch_bounds__(TILE_THREADS) cast_tile_kernel(const tile_args a)
{
    ND_SHARED(codes8, tile, TILE * GROUPS);
    int64_t row0 = blockIdx.x / (unsigned)a.strips * (int64_t)TILE;
    int64_t column0 = blockIdx.x % (unsigned)a.strips * (int64_t)TILE;
    int column_group = (int)threadIdx.x % GROUPS, row_group = (int)threadIdx.x / GROUPS;
    int64_t column = column0 + column_group * BLOCK, left = a.columns - column;
    codes8 codes[BLOCK];
    uint32_t size = 0;
    elements8<T, ALIGNED> x[BLOCK];
    float scale[8];
    ND_UNROLL
    for (int i = 0; i < 8; i++) {
        bool own = a.granularity == ND_PER_COLUMN && column + i < a.columns;
        scale[i] = a.scale[own ? column + i : 0];
    }
    ND_UNROLL
    for (int r = 0; r < BLOCK; r++) {
        int64_t row = row0 + row_group * BLOCK + r;
        bool here = row < a.rows && left > 0;
        const T *from = (const T *)a.x + (here ? row * a.x_stride + column : 0);
        x[r].read(from, here ? left : 0);
    }
    ND_UNROLL
    for (int r = 0; r < BLOCK; r++) {
        int64_t row = row0 + row_group * BLOCK + r;
        codes[r] = {0, 0};
        if (row < a.rows && left > 0) {
            if (a.granularity == ND_PER_ROW) {
                float own = a.scale[row];
                ND_UNROLL
                for (int i = 0; i < 8; i++) {
                    scale[i] = own;
                }
            }
            codes[r] = encode8<T, ALIGNED>(a, x[r], scale);
            if (a.codes) {
                store8<ALIGNED>(a.codes + row * a.codes_stride + column, codes[r], left);
            }
        }
        ND_UNROLL
        for (int i = 0; i < 8; i++) {
            size = larger(size, size_bits(x[r][i]));
        }
    }
    put_block(tile, codes, column_group, row_group);
    if (a.amax) {
        amax_merge(a.amax, size);
    }
    __syncthreads();
    write_tile<ALIGNED>(tile, a, row0, column0);
}

template <bool ALIGNED>
__global__ void __launch_bounds__(TILE_THREADS) transpose_kernel(const tile_args a)
{
    ND_SHARED(codes8, tile, TILE * GROUPS);
    int64_t row0 = blockIdx.x / (unsigned)a.strips * (int64_t)TILE;
    int64_t column0 = blockIdx.x % (unsigned)a.strips * (int64_t)TILE;
    int column_group = (int)threadIdx.x % GROUPS, row_group = (int)threadIdx.x / GROUPS;
    int64_t column = column0 + column_group * BLOCK, left = a.columns - column;
    codes8 codes[BLOCK];
    ND_UNROLL
    for (int r = 0; r < BLOCK; r++) {
        int64_t row = row0 + row_group * BLOCK + r, n = row < a.rows ? left : 0;
        const uint8_t *from = (const uint8_t *)a.x + (n > 0 ? row * a.x_stride + column : 0);
        codes[r] = {0, 0};
        if (ALIGNED) {
            codes[r] = words_of(load<8>(from, n > 0));
        } else {
            for (int k = 0; k < 8 && k < n; k++) {
                uint32_t &word = k < 4 ? codes[r].low : codes[r].high;
                word |= (uint32_t)from[k] << (8 * (k % 4));
            }
        }
    }
    put_block(tile, codes, column_group, row_group);
    __syncthreads();
    write_tile<ALIGNED>(tile, a, row0, column0);
}

int64_t tiles_of(tile_args &a)
{
    a.strips = (int)nd_ceil_div(a.columns, TILE);
    return nd_ceil_div(a.rows, TILE) * a.strips;
}

template <class T> int cast_tiles(nd_cuda_queue queue, tile_args a)
{
    int64_t blocks = tiles_of(a);
    bool fine = a.rows % 16 == 0 && a.columns % 8 == 0 &&
                aligned(a.x, a.x_stride * (int64_t)sizeof(T)) &&
                aligned(a.codes, a.codes ? a.codes_stride : 0, 8) &&
                aligned(a.transposed, a.transposed_stride);
    return fine ? ND_LAUNCH_MEETING((cast_tile_kernel<T, true>), blocks, TILE_THREADS, queue, a)
                : ND_LAUNCH_MEETING((cast_tile_kernel<T, false>), blocks, TILE_THREADS, queue, a);
}

/* without the transpose: rows as they are */

template <class T, int N> struct cast_of {
    static constexpr int together = N == 1 ? 1 : 4, amaxes = 1;
    const T *x;
    uint8_t *codes;
    const float *scale;
    layout<2> l; /* x, codes */
    nd_granularity granularity;
    bool e4m3;
    float *amax[1];

    struct state {
        int64_t column, to;
        float scale; /* unless per column */
        pack<T, N> x;
    };

    __device__ void load(int64_t v, state &s) const
    {
        place p = l.template find<N>(v);
        s.column = p.column;
        s.to = l.offset(1, p);
        s.scale = scale[granularity == ND_PER_ROW ? p.row : 0];
        s.x = nd::load<N>(x + l.offset(0, p));
    }

    __device__ void finish(state &s, uint32_t (&sizes)[1]) const
    {
        float by[N], scaled[N];
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            by[i] = s.scale;
        }
        if (granularity == ND_PER_COLUMN) {
            ND_UNROLL
            for (int i = 0; i < N; i++) {
                by[i] = scale[s.column + i];
            }
        }
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            sizes[0] = larger(sizes[0], size_bits(get(s.x, i)));
            scaled[i] = get(s.x, i) * by[i];
        }
        pack<uint8_t, N> out =
            e4m3 ? encode_all<ND_DTYPE_F8_E4M3>(scaled) : encode_all<ND_DTYPE_F8_E5M2>(scaled);
        store<N>(codes + s.to, out);
    }

    __device__ void finish(state &s) const
    {
        uint32_t sizes[1] = {0};
        finish(s, sizes);
    }
};

template <class T> int cast_rows(nd_cuda_queue queue, nd_matrix out, float *amax, nd_tensor x)
{
    constexpr int PACK = type_of<T>::pack;
    const nd_tensor t[2] = {x, out.stored};
    int N;
    layout<2> l = layout_of(t, PACK, out.granularity != ND_PER_TENSOR, &N);
    const T *from = (const T *)x.data;
    uint8_t *codes = (uint8_t *)out.stored.data;
    bool e4m3 = out.stored.dtype == ND_DTYPE_F8_E4M3;
    if (N == 1) {
        cast_of<T, 1> f = {from, codes, out.scale, l, out.granularity, e4m3, {amax}};
        return amax ? map_amax(queue, f, l.count()) : map(queue, f, l.count());
    }
    cast_of<T, PACK> f = {from, codes, out.scale, l, out.granularity, e4m3, {amax}};
    return amax ? map_amax(queue, f, l.count()) : map(queue, f, l.count());
}

} // namespace

static int transpose(nd_cuda_queue queue, nd_tensor out, nd_tensor codes)
{
    tile_args a = {};
    a.rows = codes.shape[0];
    a.columns = codes.shape[1];
    a.x = codes.data;
    a.x_stride = codes.stride[0];
    a.transposed = (uint8_t *)out.data;
    a.transposed_stride = out.stride[0];
    int64_t blocks = tiles_of(a);
    if (blocks == 0) {
        return 0;
    }
    bool fine = a.rows % 16 == 0 && a.columns % 8 == 0 && aligned(a.x, a.x_stride, 8) &&
                aligned(a.transposed, a.transposed_stride);
    return fine ? ND_LAUNCH_MEETING((transpose_kernel<true>), blocks, TILE_THREADS, queue, a)
                : ND_LAUNCH_MEETING((transpose_kernel<false>), blocks, TILE_THREADS, queue, a);
}

int nd_cuda_make_form(nd_cuda_queue queue, const nd_make_form_args *args, void *scratch)
{
    const nd_matrix out = args->out;
    const nd_tensor transposed = args->transposed;
    float *amax = args->amax;
    const nd_tensor x = args->x;
    bool f32 = x.dtype == ND_DTYPE_F32;
    if (count_of(x) == 0) {
        return 0;
    }
    if (x.dtype == ND_DTYPE_F8_E4M3 || x.dtype == ND_DTYPE_F8_E5M2) {
        return transpose(queue, transposed, x);
    }
    if (!transposed.data) {
        return f32 ? cast_rows<float>(queue, out, amax, x) : cast_rows<bf16>(queue, out, amax, x);
    }
    tile_args a = {};
    a.rows = x.shape[0];
    a.columns = x.shape[1];
    a.x = x.data;
    a.x_stride = x.stride[0];
    a.codes = (uint8_t *)out.stored.data;
    a.codes_stride = out.stored.stride[0];
    a.transposed = (uint8_t *)transposed.data;
    a.transposed_stride = transposed.stride[0];
    a.scale = out.scale;
    a.granularity = out.granularity;
    a.e4m3 = transposed.dtype == ND_DTYPE_F8_E4M3;
    a.amax = amax;
    return f32 ? cast_tiles<float>(queue, a) : cast_tiles<bf16>(queue, a);
}

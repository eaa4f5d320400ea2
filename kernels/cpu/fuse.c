// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/fuse.h"

#include "runtime/base/math.h"

enum { PIECE = 2048, MOST = 2 }; /* elements: whole vectors of every instruction set; results */

typedef struct fused {
    int count;
    const nd_tensor *to; /* [count], as fuse */
    const nd_fuse *fuse;
    int64_t piece; /* columns of a row that are computed at a time */
    nd_cpu_piece compute;
    const void *args;
    _Atomic uint32_t *most; /* [count] */
} fused;

/* Casts piece x of result r. Returns the larger of `most` and the largest size in x. */
static uint32_t finish(const fused *w, const nd_row_ops *rows, int r, const void *x, int64_t row,
                       int64_t column, int64_t n, uint32_t most)
{
    const nd_fuse *fuse = &w->fuse[r];
    const bool bf16 = w->to[r].dtype == ND_DTYPE_BF16;
    if (fuse->codes.data) {
        uint8_t *codes = (uint8_t *)fuse->codes.data + row * fuse->codes.stride[0] + column;
        rows->cast_fp8(codes, x, fuse->scale, false, n, fuse->codes.dtype == ND_DTYPE_F8_E4M3,
                       bf16);
    }
    const uint32_t bits = fuse->amax ? rows->amax(x, n, bf16) : 0;
    return bits > most ? bits : most;
}

static void compute_rows(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const fused *w = args;
    const int64_t columns = w->to[0].shape[1];
    float buffers[MOST][PIECE];
    uint32_t most[MOST] = {0};
    for (int64_t i = begin; i < end; i++) {
        for (int64_t at = 0; at < columns; at += w->piece) {
            const int64_t n = nd_min(columns - at, w->piece);
            void *out[MOST];
            for (int r = 0; r < w->count; r++) {
                out[r] = w->to[r].data ? nd_at(w->to[r], i, at) : buffers[r];
            }
            w->compute(rows, w->args, out, i, at, n);
            for (int r = 0; r < w->count; r++) {
                most[r] = finish(w, rows, r, out[r], i, at, n, most[r]);
            }
        }
    }
    for (int r = 0; r < w->count; r++) {
        nd_raise_largest(&w->most[r], most[r]);
    }
}

void nd_cpu_fused(nd_stream *stream, int count, const nd_tensor *results, const nd_fuse *fuse,
                  int64_t work, nd_cpu_piece piece, const void *args)
{
    _Atomic uint32_t most[MOST];
    fused w = {count, results, fuse, results[0].shape[1], piece, args, most};
    for (int r = 0; r < count; r++) {
        ND_ASSERT(nd_is_fuse_of(&fuse[r], results[r], results[0].shape[0], results[0].shape[1]));
        const bool whole = results[r].data && !fuse[r].amax && !fuse[r].codes.data;
        w.piece = whole ? w.piece : nd_min(w.piece, PIECE);
        most[r] = fuse[r].amax ? nd_size_bits(*fuse[r].amax) : 0;
    }
    nd_cpu_each(stream, results[0].shape[0], work, compute_rows, &w);
    for (int r = 0; r < count; r++) {
        if (fuse[r].amax) {
            *fuse[r].amax = nd_size_of_bits(most[r]);
        }
    }
}

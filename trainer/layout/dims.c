// SPDX-License-Identifier: Apache-2.0
#include <math.h>

#include "runtime/base/math.h"
#include "trainer/layout/layout.h"

/* Logits of one head chunk. Each chunk reads the head's weight twice, and reads and writes its F32
 * gradient: 12 bytes of memory for each weight. It computes 6 FLOP for each weight and row, so with
 * 1,024 rows a CPU hardly waits for memory. A large vocabulary gets that many rows if their logits
 * take at most HEAD_LOGITS_BYTES_MOST; a smaller one gets as many as HEAD_LOGITS_BYTES hold. A GPU
 * gets enough rows to fill it. */
enum {
    HEAD_ROWS = 1024,
    HEAD_LOGITS_BYTES = 64 << 20,
    HEAD_LOGITS_BYTES_MOST = 256 << 20,
    HEAD_LOGITS_BYTES_GPU = 512 << 20
};
/* Columns of a tile of logits on a CPU: the tile of a chunk of 1,000 rows in BF16 stays in the
 * second caches of two cores, and a product that sums over its columns takes one block of gemm.c
 * with AVX-512 (at most 1,024), two equal ones with AMX (at most 768). */
enum { HEAD_COLUMNS = 1024, HEAD_COLUMNS_UNIT = 64 };
/* Rows of a product's tile on a GPU: with a chunk of whole tiles no tile is partly empty. */
enum { GPU_TILE = 128 };

/* Tokens per tp peer of one chunk; the logits of each take row_bytes. */
static int64_t head_rows(int64_t row_bytes, int64_t tp)
{
    const int64_t enough = nd_min(nd_ceil_div(HEAD_ROWS, tp), HEAD_LOGITS_BYTES_MOST / row_bytes);
    return nd_max(HEAD_LOGITS_BYTES / row_bytes, enough);
}

/* Tiles of nearly equal size. */
static int64_t head_columns(int64_t V, int64_t most)
{
    const int64_t columns = nd_ceil_div(V, nd_ceil_div(V, most > 0 ? most : HEAD_COLUMNS));
    return nd_min(V, nd_ceil_div(columns, HEAD_COLUMNS_UNIT) * HEAD_COLUMNS_UNIT);
}

nd_dims nd_dims_of(const nd_shape *shape, const nd_mesh *mesh, nd_coord coord,
                   const nd_config *config, bool gpu)
{
    const nd_family_row *family = &nd_families[shape->family];
    int64_t tp = mesh->size[ND_AXIS_TP], cp = mesh->size[ND_AXIS_CP];
    nd_dims d = {
        .B = config->train.micro_batch_size,
        .S = config->train.sequence_length,
        .C = shape->hidden,
        .D = shape->head_dim,
        .rotated = nd_shape_rotated(shape),
        .H = shape->heads / tp,
        .K = nd_shape_local_kv_heads(shape, tp),
        .kv_copies = nd_shape_kv_copies(shape, tp),
        .kv_copy = coord.at[ND_AXIS_TP] % nd_shape_kv_copies(shape, tp),
        .F = shape->ffn / tp,
        .vocab = shape->vocab,
        .act = config->train.precision == ND_PRECISION_FP32 ? ND_DTYPE_F32 : ND_DTYPE_BF16,
    };
    d.s = d.S / cp;
    d.T = d.B * d.s;
    d.Tl = d.T / tp;
    d.piece = d.T;
    d.chunks = cp > 1 ? 2 : 1;
    d.chunk = d.s / d.chunks;
    d.QKV = (d.H + 2 * d.K) * d.D;
    d.attention_scale =
        (float)(shape->attention_scale > 0 ? shape->attention_scale : 1.0 / sqrt((double)d.D));
    d.lookup_scale = (float)nd_shape_lookup_scale(shape);
    if (family->root_scale && d.act == ND_DTYPE_BF16) { /* as transformers rounds it */
        d.lookup_scale = nd_bf16_to_f32(nd_bf16_from_f32(d.lookup_scale));
    }
    d.head_scale = shape->logits_divisor > 0 ? (float)(1 / shape->logits_divisor) : 1.0f;
    d.gelu = family->gelu;
    d.norm_plus = (float)family->norm_plus;
    ND_ASSERT(d.norm_plus == 0 || shape->qk_norm != 2);
    d.stream_eps = (float)nd_shape_stream_eps(shape);
    d.normed = shape->qk_norm ? d.H + d.K : 0;
    d.qk_as_one = shape->qk_norm == 2;
    d.pre_norm = shape->post_norm != 1;
    d.post_norm = shape->post_norm != 0;
    d.V = nd_ceil_div(shape->vocab, tp);
    d.vocab_first = d.V * coord.at[ND_AXIS_TP];
    int64_t left = shape->vocab - d.vocab_first;
    d.vocab_valid = left < 0 ? 0 : nd_min(left, d.V);
    int64_t row_bytes = tp * d.V * (int64_t)nd_dtype_size(d.act);
    const nd_internal_limits *limits = &config->limits;
    int64_t rows = gpu ? HEAD_LOGITS_BYTES_GPU / row_bytes : head_rows(row_bytes, tp);
    rows -= gpu && rows > GPU_TILE ? rows % GPU_TILE : 0;
    rows = limits->head_rows > 0 ? nd_min(rows, limits->head_rows) : rows;
    d.head_rows = rows < 1 ? 1 : nd_min(rows, d.Tl);
    d.head_columns = gpu ? d.V : head_columns(d.V, limits->head_columns);
    return d;
}

nd_dims nd_dims_of_rows(nd_dims d, const nd_mesh *mesh, int64_t tokens)
{
    int64_t tp = mesh->size[ND_AXIS_TP];
    ND_ASSERT(tokens > 0 && tokens % tp == 0 && mesh->size[ND_AXIS_CP] == 1);
    d.B = d.chunks = 1;
    d.S = d.s = d.T = d.chunk = d.piece = tokens;
    d.Tl = tokens / tp;
    d.head_rows = nd_min(d.head_rows, d.Tl);
    return d;
}

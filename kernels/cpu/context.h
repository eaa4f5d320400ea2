// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_CONTEXT_H
#define ND_CPU_CONTEXT_H
/* The CPU ops keep this for one device: the chosen instruction set, the team of threads, the engine
 * of oneDNN with the primitives made so far, our own products, and the tables of tile and row
 * kernels. nd_ops_cpu creates it in nd_device.native, and closing the device destroys it. Only the
 * host thread that drives the device uses it. */
#include "kernels/cpu/dnnl_matmul.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/team.h"
#include "kernels/cpu/tile.h"
#include "kernels/ops.h"
#include "runtime/device/device.h"

enum { ND_CPU_PARTIALS = 131072 }; /* partial sums (F64) of fixed blocks: 1 MiB */
/* The most columns of rmsnorm_bwd: one block's partial sums (F32) fit into the same memory. */
enum { ND_CPU_NORM_COLUMNS = 2 * ND_CPU_PARTIALS };
/* Extents in m, n and k of a tile that is widened to F32 where oneDNN multiplies FP8 codes, or BF16
 * without AVX512_BF16. */
enum { ND_CPU_WIDEN_TILE = 512 };

/* This says whether packed weights are kept (nd_kept_form). They are where that saves enough,
 * unless the environment variable ND_CPU_PACKED forbids it (anew) or asks for it everywhere
 * (kept). */
typedef enum nd_cpu_packing {
    ND_CPU_PACKING_BY_ROWS = 0,
    ND_CPU_PACKING_ANEW,
    ND_CPU_PACKING_KEPT
} nd_cpu_packing;

typedef struct nd_cpu_context {
    nd_cpu_isa isa;
    nd_cpu_isa vectors; /* of the kernels without tiles: avx512_bf16 at most */
    nd_team *team;
    nd_dnnl *dnnl;
    nd_gemm *gemm; /* our own products of BF16 and FP8; NULL where oneDNN makes them */
    nd_cpu_packing packing;
    const nd_tile_ops *tiles_f32;  /* operands F32: always there */
    const nd_tile_ops *tiles_bf16; /* operands BF16; NULL where `isa` cannot multiply them */
    const nd_row_ops *rows;
    double *partials;   /* ND_CPU_PARTIALS; live within one op */
    float *widened;     /* tiles of products that are widened (a, b, c) where gemm is NULL */
    char products[128]; /* nd_ops_products */
} nd_cpu_context;

nd_status nd_cpu_context_create(nd_device *device);

/* The stream's context. Also makes oneDNN's OpenMP regions of the calling thread as wide as the
 * device. */
nd_cpu_context *nd_cpu_context_of(nd_stream *stream);

/* All elementwise ops use threads in this way: independent items, cut into a few contiguous ranges
 * per thread. How an op cuts its work into items depends on shapes only, so no result depends on
 * the number of threads. */

/* Does items [begin, end) of an op whose body reads the arguments alone. */
typedef void (*nd_cpu_rows_body)(const nd_row_ops *rows, const void *args, int64_t begin,
                                 int64_t end);

/*
 * Runs body over [0, items) on up to stream->device->threads threads. `work` is the number of
 * elements that one item touches. Small jobs, and all jobs of a device with one thread, run on the
 * calling thread alone.
 */
void nd_cpu_each(nd_stream *stream, int64_t items, int64_t work, nd_cpu_rows_body body,
                 const void *args);

/* The ops and queries of this backend; cpu.c makes the table of them. */
ND_EACH_OP(ND_OP_PROTOTYPE, nd_cpu_)
ND_EACH_QUERY(ND_QUERY_PROTOTYPE, nd_cpu_)

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_FORMS_H
#define ND_CPU_FORMS_H
/*
 * Results that CPU ops leave in the forms in which products read them (nd_fuse): an op computes
 * some rows and columns of its result in a small buffer, or where they are stored, and packs them
 * from there while they are in the caches. What is packed does not depend on how the result is cut.
 */
#include "kernels/cpu/context.h"
#include "kernels/cpu/view.h"
#include "runtime/base/math.h"

typedef struct nd_cpu_forms {
    const nd_gemm *gemm;
    nd_gemm_activation to;
    nd_tensor stored; /* BF16 (rows, columns); data may be NULL */
} nd_cpu_forms;

/* to: the result, whose shape is that of the forms. */
static inline nd_cpu_forms nd_cpu_forms_of(const nd_cpu_context *context, nd_tensor to,
                                           const nd_fuse *fuse)
{
    ND_ASSERT(context->gemm && nd_is_forms_of(fuse, to));
    return (nd_cpu_forms){.gemm = context->gemm,
                          .to = {.rows = to.shape[0],
                                 .columns = to.shape[1],
                                 .as_a = fuse->as_a ? fuse->as_a->memory : NULL,
                                 .as_b = fuse->as_b ? fuse->as_b->memory : NULL},
                          .stored = to};
}

/* After all blocks. */
static inline void nd_cpu_forms_end(const nd_fuse *fuse)
{
    if (fuse->as_a) {
        fuse->as_a->made = true;
    }
    if (fuse->as_b) {
        fuse->as_b->made = true;
    }
}

static inline int64_t nd_cpu_forms_blocks(const nd_cpu_forms *f)
{
    return nd_ceil_div(f->to.rows, nd_gemm_activation_unit(f->gemm));
}

/* Elements of a block, for nd_cpu_parallel. */
static inline int64_t nd_cpu_forms_work(const nd_cpu_forms *f)
{
    return nd_gemm_activation_unit(f->gemm) * f->to.columns;
}

/* The rows of a block, before its first piece. */
static inline nd_gemm_part nd_cpu_forms_block(const nd_cpu_forms *f, int64_t block)
{
    const int64_t unit = nd_gemm_activation_unit(f->gemm);
    return (nd_gemm_part){.row = block * unit, .rows = nd_min(unit, f->to.rows - block * unit)};
}

/* The next piece of the block, and where it is computed, with rows piece->stride elements apart;
 * NULL after the last one. */
static inline nd_bf16 *nd_cpu_forms_piece(const nd_cpu_forms *f, nd_gemm_part *piece)
{
    const int64_t most = ND_GEMM_SPARE / nd_gemm_activation_unit(f->gemm);
    nd_bf16 *x;
    piece->column += piece->columns;
    piece->columns = nd_min(most, f->to.columns - piece->column);
    if (f->stored.data) {
        piece->stride = f->stored.stride[0];
        x = nd_element_address(f->stored, piece->row * piece->stride + piece->column);
    } else {
        piece->stride = most;
        x = nd_gemm_spare(f->gemm);
    }
    piece->x = x;
    return piece->columns > 0 ? x : NULL;
}

#endif

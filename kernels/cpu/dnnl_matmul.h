// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_DNNL_MATMUL_H
#define ND_CPU_DNNL_MATMUL_H
/*
 * Matrix products by oneDNN (its C API, versions 2.6 and 3): one primitive per shape, made at its
 * first use and kept.
 *
 * Scratchpads are ours: one buffer that grows when a primitive is made, so a product whose
 * primitive exists allocates nothing here. Not thread-safe: one nd_dnnl per driving thread.
 * Products use the OpenMP threads of the calling thread.
 */
#include <stdbool.h>
#include <stdint.h>

#include "kernels/cpu/isa.h"
#include "runtime/tensor/dtype.h"

typedef struct nd_dnnl nd_dnnl;

/* c (m, n) = op(a) op(b) (+ c); lda, ldb, ldc are the row strides of the stored matrices,
 * in elements. */
typedef struct nd_dnnl_product {
    int64_t m, n, k, lda, ldb, ldc;
    bool a_transposed, b_transposed, accumulate;
    nd_dtype in, out;
} nd_dnnl_product;

nd_status nd_dnnl_create(nd_dnnl **out);
void nd_dnnl_destroy(nd_dnnl *dnnl); /* NULL is legal */

/* Computes a product. ND_ERR_RESOURCE: memory ran out, also where oneDNN aborts for that; such an
 * nd_dnnl computes nothing any more. */
nd_status nd_dnnl_matmul(nd_dnnl *dnnl, const nd_dnnl_product *product, void *c, const void *a,
                         const void *b);

/* oneDNN's name for the implementation of a product ("brg:avx512_core_bf16"). For tests. */
nd_status nd_dnnl_implementation(nd_dnnl *dnnl, const nd_dnnl_product *product, char out[64]);

/* Lowers oneDNN to `isa`, whatever ONEDNN_MAX_CPU_ISA says. Has an effect only before the process's
 * first product. */
void nd_dnnl_limit_isa(nd_cpu_isa isa);

/* The level oneDNN itself is limited to (ONEDNN_MAX_CPU_ISA, or the CPU). */
nd_cpu_isa nd_dnnl_effective_isa(void);

#endif

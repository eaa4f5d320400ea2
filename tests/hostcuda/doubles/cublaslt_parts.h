// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_CUBLASLT_PARTS_H
#define ND_TESTS_HOSTCUDA_CUBLASLT_PARTS_H
/* The objects of cuBLASLt's double and its rules of a product, which its files share. */
#include <cublasLt.h>
#include <stdbool.h>
#include <string.h>

typedef struct lt_desc {
    uint64_t mark;
    int32_t op_a, op_b, mode_a, mode_b;
    int32_t processors; /* that the product is laid out for; 0: all */
    int8_t fast;
    const float *scale_a, *scale_b;
} lt_desc;

typedef struct lt_layout {
    uint64_t mark, rows, columns;
    int64_t ld;
    cudaDataType type;
} lt_layout;

typedef struct lt_preference {
    uint64_t mark, workspace;
    uint32_t reductions, align[4]; /* A, B, C, D */
} lt_preference;

/* The form that an algorithm was chosen for; a product with it must have the same form. */
typedef struct lt_use {
    uint32_t m, n, k, ld_a, ld_b, ld_d;
    uint8_t type_a, type_b, type_d;
    uint8_t op_a, op_b, fast, mode;
    uint8_t processors;
} lt_use;

typedef struct lt_algorithm {
    uint16_t mark;
    uint16_t index;    /* among the three */
    uint16_t align[4]; /* A, B, C, D */
    uint32_t workspace;
    lt_use use;
} lt_algorithm;

_Static_assert(sizeof(lt_desc) <= sizeof(cublasLtMatmulDescOpaque_t), "fits");
_Static_assert(sizeof(lt_layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "fits");
_Static_assert(sizeof(lt_preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "fits");
_Static_assert(sizeof(lt_algorithm) <= sizeof(cublasLtMatmulAlgo_t), "fits");

enum { LT_DESC = 0x6d01, LT_LAYOUT, LT_PREFERENCE, LT_ALGORITHM };

extern const char *nd_lt_double_refused; /* why the last call was refused, for a debugger */

#define REFUSE_IF(cond, status)                                                                    \
    do {                                                                                           \
        if (cond) {                                                                                \
            nd_lt_double_refused = #cond;                                                          \
            return status;                                                                         \
        }                                                                                          \
    } while (0)

static inline bool is_fp8(cudaDataType type)
{
    return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

static inline size_t width(cudaDataType type)
{
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 1;
}

/* Returns success when the library would make this product at all, else why it refuses. */
cublasStatus_t nd_lt_double_check(const lt_desc *desc, const lt_layout *a, const lt_layout *b,
                                  const lt_layout *c, const lt_layout *d);
/* ND_DOUBLE_LT_VECTORS: "heuristic" refuses vectors of scales there, "product" only when a product
 * is made, "product-f32" those with D in F32 alone. */
bool nd_lt_double_refuses_vectors(const lt_desc *desc, const lt_layout *d, bool product);
lt_use nd_lt_double_use(const lt_desc *desc, const lt_layout *a, const lt_layout *b,
                        const lt_layout *d);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_DNNL_API_H
#define ND_CPU_DNNL_API_H
/* The two generations of oneDNN's C API behind one set of names: memory descriptors by value (2) or
 * by handle (3). */
#include <dnnl.h>

#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t nd_dnnl_desc;

static inline dnnl_status_t nd_dnnl_desc_init(nd_dnnl_desc *out, const dnnl_dims_t dims,
                                              dnnl_data_type_t type, const dnnl_dims_t strides)
{
    return dnnl_memory_desc_create_with_strides(out, 2, dims, type, strides);
}

static inline void nd_dnnl_desc_fini(nd_dnnl_desc *l)
{
    dnnl_memory_desc_destroy(*l);
}

static inline dnnl_status_t nd_dnnl_append_sum(dnnl_post_ops_t ops)
{
    return dnnl_post_ops_append_sum(ops, 1.0f, 0, dnnl_data_type_undef);
}

static inline dnnl_status_t nd_dnnl_describe_product(dnnl_primitive_desc_t *out,
                                                     dnnl_engine_t engine, nd_dnnl_desc *a,
                                                     nd_dnnl_desc *b, nd_dnnl_desc *c,
                                                     dnnl_primitive_attr_t attributes)
{
    return dnnl_matmul_primitive_desc_create(out, engine, *a, *b, NULL, *c, attributes);
}

static inline dnnl_status_t nd_dnnl_memory_init(dnnl_memory_t *out, const_dnnl_memory_desc_t desc,
                                                dnnl_engine_t engine)
{
    return dnnl_memory_create(out, desc, engine, DNNL_MEMORY_NONE);
}
#else
typedef dnnl_memory_desc_t nd_dnnl_desc;
typedef const dnnl_memory_desc_t *const_dnnl_memory_desc_t;

static inline dnnl_status_t nd_dnnl_desc_init(nd_dnnl_desc *out, const dnnl_dims_t dims,
                                              dnnl_data_type_t type, const dnnl_dims_t strides)
{
    return dnnl_memory_desc_init_by_strides(out, 2, dims, type, strides);
}

static inline void nd_dnnl_desc_fini(nd_dnnl_desc *l)
{
}

static inline dnnl_status_t nd_dnnl_append_sum(dnnl_post_ops_t ops)
{
    return dnnl_post_ops_append_sum(ops, 1.0f);
}

static inline dnnl_status_t nd_dnnl_describe_product(dnnl_primitive_desc_t *out,
                                                     dnnl_engine_t engine, nd_dnnl_desc *a,
                                                     nd_dnnl_desc *b, nd_dnnl_desc *c,
                                                     dnnl_primitive_attr_t attributes)
{
    dnnl_matmul_desc_t product;
    dnnl_status_t status = dnnl_matmul_desc_init(&product, a, b, NULL, c);
    return status == dnnl_success
               ? dnnl_primitive_desc_create(out, &product, attributes, engine, NULL)
               : status;
}

static inline dnnl_status_t nd_dnnl_memory_init(dnnl_memory_t *out, const_dnnl_memory_desc_t desc,
                                                dnnl_engine_t engine)
{
    return dnnl_memory_create(out, desc, engine, DNNL_MEMORY_NONE);
}
#endif

#endif

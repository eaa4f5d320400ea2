// SPDX-License-Identifier: Apache-2.0
#ifndef ND_KERNELS_OPS_LIST_H
#define ND_KERNELS_OPS_LIST_H
/*
 * The ops of a device, each named once. Everything that has an entry per op is made from these
 * lists: nd_ops, prototypes and tables of the backends, the ops of a dry run, tables of tests.
 *
 * X(op, prefix) receives the name and what was given to the list for X, which may be nothing. An
 * op takes the stream and a nd_<op>_args (kernels/ops.h, where the contracts are).
 */

/* Ops for which a backend may keep something per form of call, such as a plan of a library. */
#define ND_EACH_PREPARED_OP(X, prefix)                                                             \
    X(product, prefix)                                                                             \
    X(attention_fwd, prefix)                                                                       \
    X(attention_bwd, prefix)

/* The others. On a GPU each is a launch of a kernel of ours. */
#define ND_EACH_KERNEL_OP(X, prefix)                                                               \
    X(embedding_fwd, prefix)                                                                       \
    X(embedding_bwd, prefix)                                                                       \
    X(rmsnorm_fwd, prefix)                                                                         \
    X(rmsnorm_bwd, prefix)                                                                         \
    X(row_dots, prefix)                                                                            \
    X(rope, prefix)                                                                                \
    X(swiglu_fwd, prefix)                                                                          \
    X(swiglu_bwd, prefix)                                                                          \
    X(bias_fwd, prefix)                                                                            \
    X(bias_bwd, prefix)                                                                            \
    X(attention_cached, prefix)                                                                    \
    X(attention_delta, prefix)                                                                     \
    X(lse_merge, prefix)                                                                           \
    X(ce_stats, prefix)                                                                            \
    X(ce_rescale, prefix)                                                                          \
    X(ce_loss, prefix)                                                                             \
    X(ce_bwd, prefix)                                                                              \
    X(accumulate, prefix)                                                                          \
    X(cast, prefix)                                                                                \
    X(axpy, prefix)                                                                                \
    X(sum_squares, prefix)                                                                         \
    X(digest, prefix)                                                                              \
    X(random_normal, prefix)                                                                       \
    X(adamw, prefix)                                                                               \
    X(sgd, prefix)                                                                                 \
    X(amax, prefix)                                                                                \
    X(fp8_scale, prefix)                                                                           \
    X(fp8_delayed, prefix)                                                                         \
    X(make_form, prefix)                                                                           \
    X(fp8_count, prefix)

#define ND_EACH_OP(X, prefix)                                                                      \
    ND_EACH_PREPARED_OP(X, prefix)                                                                 \
    ND_EACH_KERNEL_OP(X, prefix)

/* Questions about an op, which run nothing: X(name, type of the answer, parameters, prefix). */
#define ND_EACH_QUERY(X, prefix)                                                                   \
    X(workspace, size_t, (const nd_device *), prefix)                                              \
    X(attention_scratch, size_t,                                                                   \
      (const nd_device *, const nd_attention *, nd_dtype act, bool backward), prefix)              \
    X(attention_cached_scratch, size_t,                                                            \
      (const nd_device *, const nd_attention *most, nd_dtype act), prefix)                         \
    X(attention_uses_delta, bool, (const nd_device *, const nd_attention *, nd_dtype act), prefix) \
    X(product_scratch, size_t, (const nd_device *, int64_t m, int64_t n, int64_t k, nd_dtype act), \
      prefix)                                                                                      \
    X(form, nd_form_rule, (const nd_device *, const nd_form_need *), prefix)

/* For the lists: a member of a table of functions, the prototype of one, and its entry. `prefix`
 * stands before the name of a function. */
#define ND_OP_MEMBER(op, prefix)    nd_status (*op)(nd_stream *, const nd_##op##_args *);
#define ND_OP_PROTOTYPE(op, prefix) nd_status prefix##op(nd_stream *, const nd_##op##_args *);
#define ND_OP_ENTRY(op, prefix)     .op = prefix##op,

#define ND_QUERY_MEMBER(query, type, parameters, prefix)    type(*query) parameters;
#define ND_QUERY_PROTOTYPE(query, type, parameters, prefix) type prefix##query parameters;
#define ND_QUERY_ENTRY(query, type, parameters, prefix)     .query = prefix##query,

#endif

// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/dnnl_matmul.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/dnnl_api.h"
#include "kernels/ops.h"
#include "runtime/base/math.h"
#include "runtime/base/process.h"

enum { PAGE = 4096, KEY_WORDS = 8 };

/* Products with equal words share one plan of oneDNN. */
typedef struct key {
    int64_t words[KEY_WORDS];
} key;

typedef struct entry {
    key key;
    struct entry *next;
    dnnl_primitive_t primitive;
    dnnl_memory_t a, b, c, scratch;
} entry;

struct nd_dnnl {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    entry *entries; /* the one that was used last comes first */
    void *scratch;
    size_t scratch_bytes;
    bool broken; /* oneDNN has aborted: it must not be called again */
};

static nd_status fail(dnnl_status_t code, const char *call)
{
    static const char *const words[] = {"success",
                                        "out of memory",
                                        "invalid arguments",
                                        "unimplemented",
                                        "last implementation reached",
                                        "runtime error",
                                        "not required"};
    const char *word = (size_t)code < sizeof words / sizeof words[0] ? words[code] : "unknown";
    const dnnl_version_t *v = dnnl_version();
    if (code == dnnl_out_of_memory) {
        return nd_fail_memory("oneDNN (%s)", call);
    }
    return nd_fail(ND_ERR_INTERNAL, "oneDNN %d.%d.%d refused %s: %s (status %d)", v->major,
                   v->minor, v->patch, call, word, (int)code);
}

#define ND_DNNL(call)                                                                              \
    do {                                                                                           \
        dnnl_status_t nd_dnnl_code_ = (call);                                                      \
        if (nd_dnnl_code_ != dnnl_success) {                                                       \
            return fail(nd_dnnl_code_, #call);                                                     \
        }                                                                                          \
    } while (0)

static dnnl_data_type_t data_type(nd_dtype dtype)
{
    ND_ASSERT(dtype == ND_DTYPE_F32 || dtype == ND_DTYPE_BF16);
    return dtype == ND_DTYPE_F32 ? dnnl_f32 : dnnl_bf16;
}

/* Extents and strides of op(x) (rows, columns) where the stored matrix has row stride `ld`. */
static void describe(int64_t rows, int64_t columns, int64_t ld, bool transposed, dnnl_dims_t dims,
                     dnnl_dims_t strides)
{
    dims[0] = rows;
    dims[1] = columns;
    strides[0] = transposed ? 1 : ld;
    strides[1] = transposed ? ld : 1;
}

/* making a primitive */

static dnnl_status_t attributes_init(dnnl_primitive_attr_t *attributes, const nd_dnnl_product *p)
{
    dnnl_status_t status = dnnl_primitive_attr_create(attributes);
    if (status != dnnl_success) {
        return status;
    }
    dnnl_post_ops_t operations = NULL;
    status = dnnl_primitive_attr_set_scratchpad_mode(*attributes, dnnl_scratchpad_mode_user);
    status = status == dnnl_success ? dnnl_post_ops_create(&operations) : status;
    if (status == dnnl_success && p->accumulate) {
        status = nd_dnnl_append_sum(operations);
    }
    status =
        status == dnnl_success ? dnnl_primitive_attr_set_post_ops(*attributes, operations) : status;
    dnnl_post_ops_destroy(operations);
    return status;
}

static dnnl_status_t plan(nd_dnnl *dnnl, const nd_dnnl_product *p, dnnl_primitive_desc_t *out)
{
    dnnl_dims_t dims[3], strides[3];
    describe(p->m, p->k, p->lda, p->a_transposed, dims[0], strides[0]);
    describe(p->k, p->n, p->ldb, p->b_transposed, dims[1], strides[1]);
    describe(p->m, p->n, p->ldc, false, dims[2], strides[2]);
    const dnnl_data_type_t types[3] = {data_type(p->in), data_type(p->in), data_type(p->out)};
    nd_dnnl_desc layouts[3];
    int made = 0;
    dnnl_status_t status = dnnl_success;
    while (made < 3 && status == dnnl_success) {
        status = nd_dnnl_desc_init(&layouts[made], dims[made], types[made], strides[made]);
        made += status == dnnl_success;
    }
    dnnl_primitive_attr_t attributes = NULL;
    status = status == dnnl_success ? attributes_init(&attributes, p) : status;
    if (status == dnnl_success) {
        status = nd_dnnl_describe_product(out, dnnl->engine, &layouts[0], &layouts[1], &layouts[2],
                                          attributes);
    }
    dnnl_primitive_attr_destroy(attributes);
    while (made > 0) {
        nd_dnnl_desc_fini(&layouts[--made]);
    }
    return status;
}

static dnnl_status_t entry_memories(nd_dnnl *dnnl, entry *e, const_dnnl_primitive_desc_t d)
{
    const struct {
        dnnl_query_t query;
        dnnl_memory_t *memory;
    } operands[] = {{dnnl_query_src_md, &e->a},
                    {dnnl_query_weights_md, &e->b},
                    {dnnl_query_dst_md, &e->c},
                    {dnnl_query_scratchpad_md, &e->scratch}};
    dnnl_status_t status = dnnl_success;
    for (int i = 0; i < 4 && status == dnnl_success; i++) {
        status = nd_dnnl_memory_init(operands[i].memory,
                                     dnnl_primitive_desc_query_md(d, operands[i].query, 0),
                                     dnnl->engine);
    }
    return status;
}

static void entry_fini(entry *e)
{
    dnnl_memory_destroy(e->a);
    dnnl_memory_destroy(e->b);
    dnnl_memory_destroy(e->c);
    dnnl_memory_destroy(e->scratch);
    dnnl_primitive_destroy(e->primitive);
}

/* The shared scratchpad covers the largest primitive; only making a primitive can enlarge it. */
static nd_status reserve_scratch(nd_dnnl *dnnl, const_dnnl_primitive_desc_t d)
{
    const_dnnl_memory_desc_t desc = dnnl_primitive_desc_query_md(d, dnnl_query_scratchpad_md, 0);
    size_t bytes = desc ? dnnl_memory_desc_get_size(desc) : 0;
    if (bytes <= dnnl->scratch_bytes) {
        return ND_OK;
    }
    bytes = nd_round_up_bytes(bytes, PAGE);
    void *larger = aligned_alloc(PAGE, bytes);
    if (!larger) {
        return nd_fail_memory("oneDNN's scratchpad (%.1f MiB)", (double)bytes / 1048576.0);
    }
    free(dnnl->scratch);
    dnnl->scratch = larger;
    dnnl->scratch_bytes = bytes;
    return ND_OK;
}

static key key_of(const nd_dnnl_product *p)
{
    return (key){{p->m, p->n, p->k, p->lda, p->ldb, p->ldc, p->in,
                  p->out * 8 + p->a_transposed * 4 + p->b_transposed * 2 + p->accumulate}};
}

static nd_status entry_init(nd_dnnl *dnnl, entry *e, const nd_dnnl_product *p)
{
    dnnl_primitive_desc_t description = NULL;
    dnnl_status_t code = plan(dnnl, p, &description);
    nd_status status = code == dnnl_success ? reserve_scratch(dnnl, description) : ND_OK;
    if (code == dnnl_success && status == ND_OK) {
        code = entry_memories(dnnl, e, description);
    }
    if (code == dnnl_success && status == ND_OK) {
        code = dnnl_primitive_create(&e->primitive, description);
    }
    dnnl_primitive_desc_destroy(description);
    if (code == dnnl_success && status == ND_OK) {
        e->key = key_of(p);
        return ND_OK;
    }
    entry_fini(e);
    free(e);
    if (status != ND_OK) {
        return status;
    }
    return nd_fail_context(fail(code, "a matrix product"),
                           "while preparing a %s product of %lld x %lld x %lld",
                           nd_dtype_name(p->in), (long long)p->m, (long long)p->n, (long long)p->k);
}

/* The entry of a product, which it moves to the front of the list. */
static nd_status find_entry(nd_dnnl *dnnl, const nd_dnnl_product *p, entry **out)
{
    const key k = key_of(p);
    entry **at = &dnnl->entries, *e;
    while (*at && memcmp(&(*at)->key, &k, sizeof k) != 0) {
        at = &(*at)->next;
    }
    e = *at;
    if (e) {
        *at = e->next;
    } else {
        ND_TRY(ND_ALLOC(1, &e));
        ND_TRY(entry_init(dnnl, e, p));
    }
    e->next = dnnl->entries;
    *out = dnnl->entries = e;
    return ND_OK;
}

/* columns with gaps */

static float element(const nd_dnnl_product *p, const void *x, int64_t row, int64_t column,
                     int64_t ld, bool transposed)
{
    int64_t at = transposed ? column * ld + row : row * ld + column;
    return p->in == ND_DTYPE_F32 ? ((const float *)x)[at]
                                 : nd_bf16_to_f32(((const nd_bf16 *)x)[at]);
}

/*
 * Computes a product of a column with gaps by plain loops. oneDNN 3.7 takes c of one column, or
 * op(a) of one row that is stored as a column, for dense: it reads and writes adjacent elements
 * where the stride is larger. Every F32 and BF16 product of its AVX-512 kernels is affected. It is
 * one row or column, at an edge of larger ones.
 */
static void multiply_plainly(const nd_dnnl_product *p, void *c, const void *a, const void *b)
{
    for (int64_t i = 0; i < p->m * p->n; i++) {
        int64_t row = i / p->n, column = i % p->n, at = row * p->ldc + column;
        float sum = 0.0f;
        for (int64_t l = 0; l < p->k; l++) {
            sum += element(p, a, row, l, p->lda, p->a_transposed) *
                   element(p, b, l, column, p->ldb, p->b_transposed);
        }
        float *f32 = (float *)c + at;
        nd_bf16 *bf16 = (nd_bf16 *)c + at;
        if (p->accumulate) {
            sum += p->out == ND_DTYPE_F32 ? *f32 : nd_bf16_to_f32(*bf16);
        }
        if (p->out == ND_DTYPE_F32) {
            *f32 = sum;
        } else {
            *bf16 = nd_bf16_from_f32(sum);
        }
    }
}

/* public */

static nd_status open_engine(nd_dnnl *dnnl)
{
    ND_DNNL(dnnl_engine_create(&dnnl->engine, dnnl_cpu, 0));
    ND_DNNL(dnnl_stream_create(&dnnl->stream, dnnl->engine, dnnl_stream_default_flags));
    return ND_OK;
}

nd_status nd_dnnl_create(nd_dnnl **out)
{
    nd_dnnl *dnnl = NULL;
    ND_TRY(ND_ALLOC(1, &dnnl));
    const nd_status status = open_engine(dnnl);
    if (status != ND_OK) {
        nd_dnnl_destroy(dnnl);
        return status;
    }
    *out = dnnl;
    return ND_OK;
}

void nd_dnnl_destroy(nd_dnnl *dnnl)
{
    if (!dnnl) {
        return;
    }
    for (entry *e = dnnl->entries, *next; e; e = next) {
        next = e->next;
        if (!dnnl->broken) {
            entry_fini(e);
        }
        free(e);
    }
    if (!dnnl->broken) {
        dnnl_stream_destroy(dnnl->stream);
        dnnl_engine_destroy(dnnl->engine);
    }
    free(dnnl->scratch);
    free(dnnl);
}

static nd_status multiply(nd_dnnl *dnnl, const nd_dnnl_product *product, void *c, const void *a,
                          const void *b)
{
    entry *e = NULL;
    ND_TRY(find_entry(dnnl, product, &e));
    ND_DNNL(dnnl_memory_set_data_handle(e->a, (void *)a));
    ND_DNNL(dnnl_memory_set_data_handle(e->b, (void *)b));
    ND_DNNL(dnnl_memory_set_data_handle(e->c, c));
    ND_DNNL(dnnl_memory_set_data_handle(e->scratch, dnnl->scratch));
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, e->a},
                                         {DNNL_ARG_WEIGHTS, e->b},
                                         {DNNL_ARG_DST, e->c},
                                         {DNNL_ARG_SCRATCHPAD, e->scratch}};
    ND_DNNL(dnnl_primitive_execute(e->primitive, dnnl->stream, 4, arguments));
    ND_DNNL(dnnl_stream_wait(dnnl->stream));
    return ND_OK;
}

typedef struct call {
    nd_dnnl *dnnl;
    const nd_dnnl_product *product;
    void *c;
    const void *a, *b;
    nd_status status;
} call;

static void run_call(void *context)
{
    call *it = context;
    it->status = multiply(it->dnnl, it->product, it->c, it->a, it->b);
}

/* oneDNN answers with a status and calls no abort of its own. But where memory runs out in one of
 * its containers, the exception of C++ finds nobody who catches it, and that aborts. */
nd_status nd_dnnl_matmul(nd_dnnl *dnnl, const nd_dnnl_product *product, void *c, const void *a,
                         const void *b)
{
    call it = {dnnl, product, c, a, b, ND_OK};
    if ((product->n == 1 && product->ldc > 1) ||
        (product->m == 1 && product->a_transposed && product->lda > 1)) {
        multiply_plainly(product, c, a, b);
        return ND_OK;
    }
    dnnl->broken = dnnl->broken || !nd_abort_guard(ND_ABORT_EXCEPTION, run_call, &it);
    return dnnl->broken
               ? nd_fail_memory("oneDNN, which aborted at a %s product of %lld x %lld x %lld",
                                nd_dtype_name(product->in), (long long)product->m,
                                (long long)product->n, (long long)product->k)
               : it.status;
}

nd_status nd_dnnl_implementation(nd_dnnl *dnnl, const nd_dnnl_product *product, char out[64])
{
    dnnl_primitive_desc_t description = NULL;
    const char *name = "";
    ND_DNNL(plan(dnnl, product, &description));
    dnnl_primitive_desc_query(description, dnnl_query_impl_info_str, 0, &name);
    snprintf(out, 64, "%s", name);
    dnnl_primitive_desc_destroy(description);
    return ND_OK;
}

void nd_dnnl_limit_isa(nd_cpu_isa isa)
{
    static const dnnl_cpu_isa_t levels[ND_CPU_ISA_COUNT] = {
        dnnl_cpu_isa_sse41, dnnl_cpu_isa_avx2, dnnl_cpu_isa_avx512_core,
        dnnl_cpu_isa_avx512_core_bf16, dnnl_cpu_isa_avx512_core_amx};
    /* Refused after the first product or when built without the control: the level then stays as it
     * is. */
    dnnl_set_max_cpu_isa(levels[isa]);
}

nd_cpu_isa nd_dnnl_effective_isa(void)
{
    unsigned level = (unsigned)dnnl_get_effective_cpu_isa();
    const struct {
        unsigned bits;
        nd_cpu_isa isa;
    } known[] = {{dnnl_cpu_isa_avx512_core_amx, ND_CPU_ISA_AMX},
                 {dnnl_cpu_isa_avx512_core_bf16, ND_CPU_ISA_AVX512_BF16},
                 {dnnl_cpu_isa_avx512_core, ND_CPU_ISA_AVX512},
                 {dnnl_cpu_isa_avx2, ND_CPU_ISA_AVX2}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if ((level & known[i].bits) == known[i].bits) {
            return known[i].isa;
        }
    }
    return ND_CPU_ISA_BASELINE;
}

const char *nd_ops_library_version(void)
{
    static _Thread_local char text[32];
    const dnnl_version_t *v = dnnl_version();
    snprintf(text, sizeof text, "%d.%d.%d", v->major, v->minor, v->patch);
    return text;
}

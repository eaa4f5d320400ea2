// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/context.h"

#include <cpuid.h>
#include <omp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/ops.h"
#include "runtime/base/math.h"
#include "runtime/base/suggest.h"

/* the instruction set (isa.h) */

static const char *const isa_names[ND_CPU_ISA_COUNT] = {"baseline",    "avx2", "avx512",
                                                        "avx512_bf16", "amx",  "amx_emulated"};

const char *nd_cpu_isa_name(nd_cpu_isa isa)
{
    return isa_names[isa];
}

/* CPUID leaf 7: EDX bits 24 (AMX-TILE) and 22 (AMX-BF16). */
static bool shows_amx_bf16(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 22 & 1);
}

nd_cpu_isa nd_cpu_isa_detect(void)
{
    const long arch_request_permission = 0x1023, tile_data = 18;
    unsigned a, b, c, d;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        return ND_CPU_ISA_BASELINE;
    }
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
        return ND_CPU_ISA_AVX2;
    }
    if (!__builtin_cpu_supports("avx512bf16")) {
        return ND_CPU_ISA_AVX512;
    }
    /* Leaf 0x1d: EAX is the last palette of tiles. A virtual machine may show AMX without any, and
     * its tile instructions then end a process. The kernel must grant the 8 KiB tile state too. */
    const bool amx = shows_amx_bf16() && __get_cpuid_count(0x1d, 0, &a, &b, &c, &d) && a >= 1 &&
                     syscall(SYS_arch_prctl, arch_request_permission, tile_data) == 0;
    return amx ? ND_CPU_ISA_AMX : ND_CPU_ISA_AVX512_BF16;
}

nd_status nd_cpu_isa_choose(nd_cpu_isa *out)
{
    nd_cpu_isa detected = nd_cpu_isa_detect();
    const char *wanted = getenv("ND_CPU_ISA");
    if (!wanted || !*wanted) {
        *out = detected;
        return ND_OK;
    }
    for (int i = 0; i < ND_CPU_ISA_COUNT; i++) {
        if (strcmp(wanted, isa_names[i]) != 0) {
            continue;
        }
        if (i == ND_CPU_ISA_AMX && i > (int)detected && shows_amx_bf16()) {
            return nd_fail(
                ND_ERR_CONFIG,
                "ND_CPU_ISA asks for amx, which this CPU shows, but Linux or the virtual "
                "machine does not let processes use its tiles, or it lacks "
                "AVX512_BF16; unset it or name %s or a lower level",
                isa_names[detected]);
        }
        if (i > (int)detected && i != ND_CPU_ISA_AMX_EMULATED) {
            return nd_fail(
                ND_ERR_CONFIG,
                "ND_CPU_ISA asks for %s, but this CPU has %s at most; unset it or name a "
                "lower level",
                wanted, isa_names[detected]);
        }
        *out = (nd_cpu_isa)i;
        return ND_OK;
    }
    return nd_fail(ND_ERR_CONFIG,
                   "ND_CPU_ISA is \"%s\"; it may be baseline, avx2, avx512, avx512_bf16, amx or "
                   "amx_emulated",
                   wanted);
}

nd_status nd_cpu_products_choose(nd_cpu_isa isa, bool *own)
{
    const bool can = isa >= ND_CPU_ISA_AVX512;
    const char *wanted = getenv("ND_CPU_PRODUCTS");
    if (!wanted || !*wanted) {
        *own = can;
        return ND_OK;
    }
    if (strcmp(wanted, "own") != 0 && strcmp(wanted, "onednn") != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "ND_CPU_PRODUCTS is \"%s\"; it may be own or onednn, or unset", wanted);
    }
    *own = strcmp(wanted, "own") == 0;
    if (*own && !can) {
        return isa < nd_cpu_isa_detect()
                   ? nd_fail(ND_ERR_CONFIG,
                             "ND_CPU_PRODUCTS asks for ndtrain's own products, which need AVX-512, "
                             "but ND_CPU_ISA or ONEDNN_MAX_CPU_ISA limits this process to %s; "
                             "unset one of them",
                             isa_names[isa])
                   : nd_fail(ND_ERR_CONFIG,
                             "ND_CPU_PRODUCTS asks for ndtrain's own products, which need AVX-512, "
                             "but this CPU has %s at most; unset ND_CPU_PRODUCTS",
                             isa_names[isa]);
    }
    return ND_OK;
}

nd_cpu_isa nd_cpu_isa_of_vectors(nd_cpu_isa isa)
{
    const nd_cpu_isa own = isa == ND_CPU_ISA_AMX_EMULATED ? nd_cpu_isa_detect() : isa;
    return own < ND_CPU_ISA_AVX512_BF16 ? own : ND_CPU_ISA_AVX512_BF16;
}

/* the context */

/* Elements of the tiles of a, b and c. */
enum { WIDENED = 3 * ND_CPU_WIDEN_TILE * ND_CPU_WIDEN_TILE };

static void destroy(void *native)
{
    nd_cpu_context *context = native;
    nd_team_destroy(context->team);
    nd_dnnl_destroy(context->dnnl);
    nd_gemm_destroy(context->gemm);
    free(context->widened);
    free(context->partials);
    free(context);
}

static void choose_kernels(nd_cpu_context *context)
{
    static const nd_tile_ops *const f32[] = {&nd_tiles_f32_baseline, &nd_tiles_f32_avx2,
                                             &nd_tiles_f32_avx512, &nd_tiles_f32_avx512_bf16};
    static const nd_tile_ops *const bf16[] = {NULL, NULL, NULL, &nd_tiles_bf16_avx512_bf16};
    static const nd_tile_ops *const emulated[] = {
        &nd_tiles_bf16_amx_emulated_baseline, &nd_tiles_bf16_amx_emulated_avx2,
        &nd_tiles_bf16_amx_emulated_avx512, &nd_tiles_bf16_amx_emulated_avx512_bf16};
    static const nd_row_ops *const rows[] = {&nd_rows_baseline, &nd_rows_avx2, &nd_rows_avx512,
                                             &nd_rows_avx512_bf16};
    context->vectors = nd_cpu_isa_of_vectors(context->isa);
    context->rows = rows[context->vectors];
    context->tiles_f32 = f32[context->vectors];
    context->tiles_bf16 = context->isa == ND_CPU_ISA_AMX            ? &nd_tiles_bf16_amx
                          : context->isa == ND_CPU_ISA_AMX_EMULATED ? emulated[context->vectors]
                                                                    : bf16[context->vectors];
}

/* The context's products of BF16 and FP8: our own, or oneDNN's and in tiles that are widened. */
static nd_status make_products(nd_cpu_context *context)
{
    static const nd_gemm_kernels *const kernels[ND_CPU_ISA_COUNT] = {
        [ND_CPU_ISA_AVX512] = &nd_gemm_avx512,
        [ND_CPU_ISA_AVX512_BF16] = &nd_gemm_avx512_bf16,
        [ND_CPU_ISA_AMX] = &nd_gemm_amx,
        [ND_CPU_ISA_AMX_EMULATED] = &nd_gemm_amx_emulated};
    bool own = false;
    ND_TRY(nd_cpu_products_choose(context->isa, &own));
    if (own) {
        const bool emulated =
            context->isa == ND_CPU_ISA_AMX_EMULATED && context->vectors >= ND_CPU_ISA_AVX512;
        return nd_gemm_create(emulated ? &nd_gemm_amx_emulated_avx512 : kernels[context->isa],
                              context->team, &context->gemm);
    }
    return ND_ALLOC(WIDENED, &context->widened);
}

/* Describes the products as nd_cpu_product chooses them. */
static void describe_products(nd_cpu_context *context)
{
    static const char *const own[ND_CPU_ISA_COUNT] = {
        [ND_CPU_ISA_AVX512] = "AVX-512 kernels",
        [ND_CPU_ISA_AVX512_BF16] = "AVX512_BF16 kernels",
        [ND_CPU_ISA_AMX] = "AMX kernels",
        [ND_CPU_ISA_AMX_EMULATED] = "emulated AMX kernels"};
    const char *version = nd_ops_library_version();
    const size_t most = sizeof context->products;
    if (context->gemm) {
        snprintf(context->products, most, "BF16 and FP8 products by ndtrain's %s, F32 by oneDNN %s",
                 own[context->isa], version);
        return;
    }
    snprintf(context->products, most,
             context->vectors >= ND_CPU_ISA_AVX512_BF16
                 ? "BF16 and F32 products by oneDNN %s, FP8 widened to F32"
                 : "F32 products by oneDNN %s, BF16 and FP8 widened to F32",
             version);
}

static bool is_set(const char *variable)
{
    const char *value = getenv(variable);
    return value && *value;
}

/* Our kernels and oneDNN have the same limit: ND_CPU_ISA where it is set, else what this process
 * can use of the CPU, or what ONEDNN_MAX_CPU_ISA leaves of that. */
static nd_status choose_isa(nd_cpu_isa *out)
{
    const bool limited = is_set("ONEDNN_MAX_CPU_ISA") || is_set("DNNL_MAX_CPU_ISA");
    ND_TRY(nd_cpu_isa_choose(out));
    if (limited && !is_set("ND_CPU_ISA")) {
        const nd_cpu_isa library = nd_dnnl_effective_isa();
        *out = library < *out ? library : *out;
    } else {
        nd_dnnl_limit_isa(*out == ND_CPU_ISA_AMX_EMULATED ? nd_cpu_isa_detect() : *out);
    }
    return ND_OK;
}

static nd_status choose_packing(nd_cpu_packing *out)
{
    const char *wanted = getenv("ND_CPU_PACKED");
    *out = ND_CPU_PACKING_BY_ROWS;
    if (!wanted || !*wanted) {
        return ND_OK;
    }
    *out = strcmp(wanted, "kept") == 0 ? ND_CPU_PACKING_KEPT : ND_CPU_PACKING_ANEW;
    return *out == ND_CPU_PACKING_KEPT || strcmp(wanted, "anew") == 0
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG, "ND_CPU_PACKED is \"%s\"; it may be kept or anew", wanted);
}

/* A misspelt variable would be without effect, and nobody would know. */
static nd_status check_name(const char *name)
{
    static const char *const known[3] = {"ND_CPU_ISA", "ND_CPU_PACKED", "ND_CPU_PRODUCTS"};
    nd_suggest search;
    nd_suggest_init(&search, name);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(name, known[i]) == 0) {
            return ND_OK;
        }
        nd_suggest_offer(&search, known[i]);
    }
    return search.best ? nd_fail(ND_ERR_CONFIG,
                                 "the environment sets %s, which ndtrain does not know; did you "
                                 "mean %s?",
                                 name, search.best)
                       : nd_fail(ND_ERR_CONFIG,
                                 "the environment sets %s, which ndtrain does not know; unset it, "
                                 "or use %s, %s or %s",
                                 name, known[0], known[1], known[2]);
}

static nd_status check_environment(void)
{
    static const char prefix[] = "ND_CPU_";
    for (char **entry = environ; entry && *entry; entry++) {
        char name[64]; /* longer ones are like none that is known */
        const int length = (int)strcspn(*entry, "=");
        const bool empty = (*entry)[length] == '\0' || (*entry)[length + 1] == '\0';
        if (strncmp(*entry, prefix, sizeof prefix - 1) == 0 && !empty) {
            snprintf(name, sizeof name, "%.*s", length, *entry);
            ND_TRY(check_name(name));
        }
    }
    return ND_OK;
}

nd_status nd_cpu_context_create(nd_device *device)
{
    ND_ASSERT(device->kind == ND_DEVICE_CPU);
    if (device->native) {
        return ND_OK;
    }
    nd_cpu_context *context = NULL;
    nd_status status = ND_OK;
    ND_TRY(check_environment());
    ND_TRY(ND_ALLOC(1, &context));
    ND_TRY_OUT(choose_isa(&context->isa));
    ND_TRY_OUT(choose_packing(&context->packing));
    choose_kernels(context);
    ND_TRY_OUT(ND_ALLOC(ND_CPU_PARTIALS, &context->partials));
    ND_TRY_OUT(nd_team_create(device->threads, &context->team));
    ND_TRY_OUT(nd_dnnl_create(&context->dnnl));
    ND_TRY_OUT(make_products(context));
    describe_products(context);
    device->native = context;
    device->native_close = destroy;
    return ND_OK;
out:
    destroy(context);
    return status;
}

/* Bytes of packed operands of products and of partial sums. */
size_t nd_cpu_workspace(const nd_device *device)
{
    const nd_cpu_context *context = device->native;
    if (device->kind != ND_DEVICE_CPU || !context) {
        return 0;
    }
    return ND_CPU_PARTIALS * sizeof *context->partials +
           (context->gemm ? nd_gemm_bytes(context->gemm) : WIDENED * sizeof *context->widened);
}

nd_cpu_context *nd_cpu_context_of(nd_stream *stream)
{
    nd_device *device = stream->device;
    ND_ASSERT(device->native);
    if (omp_get_max_threads() != device->threads) {
        omp_set_num_threads(device->threads);
    }
    return device->native;
}

nd_status nd_ops_cpu_start_threads(nd_device *device, bool f32)
{
    if (device->threads == 1) {
        return ND_OK;
    }
    ND_TRY(nd_cpu_context_create(device));
    const nd_cpu_context *context = device->native;
    return nd_team_start_early(context->team, f32 || !context->gemm);
}

const char *nd_ops_machine(const nd_device *device)
{
    const nd_cpu_context *context = device->native;
    if (device->kind != ND_DEVICE_CPU) {
        return device->name; /* device->native belongs to another backend */
    }
    return context ? nd_cpu_isa_name(context->isa) : "unknown";
}

const char *nd_ops_products(const nd_device *device)
{
    const nd_cpu_context *context = device->native;
    return device->kind == ND_DEVICE_CPU && context ? context->products : "unknown";
}

/* Elements that justify one more piece: about 10 microseconds of work, several times the cost of
 * waking a thread. */
enum { ELEMENTS_PER_PIECE = 32768 };

typedef struct ranges {
    const nd_row_ops *rows;
    nd_cpu_rows_body body;
    const void *args;
    int64_t items, pieces;
} ranges;

static void run_range(void *arg, int64_t piece)
{
    const ranges *r = arg;
    r->body(r->rows, r->args, r->items * piece / r->pieces, r->items * (piece + 1) / r->pieces);
}

void nd_cpu_each(nd_stream *stream, int64_t items, int64_t work, nd_cpu_rows_body body,
                 const void *args)
{
    const nd_cpu_context *context = stream->device->native;
    const int threads = nd_team_threads(context->team);
    int64_t pieces = nd_min(items * work / ELEMENTS_PER_PIECE, items);
    pieces = nd_min(pieces, (int64_t)threads * ND_TEAM_PIECES);
    if (threads == 1 || pieces <= 1) {
        body(context->rows, args, 0, items);
        return;
    }
    nd_team_run(context->team, pieces, run_range,
                &(ranges){context->rows, body, args, items, pieces});
}

const char *nd_ops_openmp_version(void)
{
#define ND_TEXT_(x) #x
#define ND_TEXT(x)  ND_TEXT_(x)
#ifdef __clang__
    return ND_TEXT(_OPENMP) ", clang " __clang_version__;
#else
    return ND_TEXT(_OPENMP) ", gcc " __VERSION__;
#endif
}

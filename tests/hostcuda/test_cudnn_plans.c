// SPDX-License-Identifier: Apache-2.0
/*
 * cuDNN's plans of our attention for Hopper, built without a GPU: the real library, the description
 * of an H200, and a driver library that only answers (fake_driver.c). Nothing runs. Plans must
 * exist for every form that the trainer uses, and need no more workspace than the memory plan of a
 * GPU that is not here assumes. Skipped where cuDNN or NVRTC is not found.
 */
#include <criterion/criterion.h>
#include <stdio.h>

#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/documents.h"
#include "kernels/cuda/sdpa.h"
#include "kernels/cuda/sdpa_parts.h"
#include "tests/support/skip.h"

static const char h200[] =
    "{\"version\": 1, \"deviceVer\": 900, \"deviceName\": \"NVIDIA H200\", \"cudaDeviceId\": 0, "
    "\"driverVer\": 13000, \"multiProcessorCount\": 132, \"warpSize\": 32, \"isTccDriver\": 0, "
    "\"supportCoopLaunch\": 1, \"maxGridSize\": [2147483647, 65535, 65535], "
    "\"maxBlockSize\": [1024, 1024, 64], \"regsPerBlock\": 65536, \"maxRegistersPerSM\": 65536, "
    "\"maxSharedMemoryPerBlock\": 49152, \"maxSharedMemoryPerBlockOptin\": 232448, "
    "\"reservedSharedMemoryPerBlock\": 1024, \"maxCtasPerSM\": 32, \"maxThreadsPerBlock\": 1024, "
    "\"maxThreadsPerSM\": 2048, \"pciDeviceId\": 9013, \"totalGlobalMem\": 150110994432, "
    "\"smClockRateKHz\": 1980000, \"memClockRateKHz\": 3201000, \"l2CacheSize\": 62914560}";

static nd_cudnn *cudnn;
static int64_t window; /* of the forms that a test plans */

static void open_library(void)
{
    if (nd_cudnn_create(NULL, 90, h200, &cudnn) != ND_OK) {
        fprintf(stderr, "%s\n", nd_error_last()->message);
        skip_test("cuDNN cannot be opened, or cannot plan without a driver");
    }
}

/* Heads from `column` on of rows of a fused projection, at an address that nobody reads. */
static nd_tensor heads(int64_t rows, int64_t count, int64_t head_dim, int64_t row)
{
    nd_tensor t =
        nd_tensor_4d((void *)((uintptr_t)1 << 40), ND_DTYPE_BF16, 1, rows, count, head_dim);
    t.stride[0] = rows * row;
    t.stride[1] = row;
    return t;
}

/* Bytes of the scores of the largest piece, which only cuDNN's deterministic way keeps. */
static size_t most_scores(const nd_sdpa_call *c)
{
    const nd_attention *a = &c->x.attention;
    nd_sdpa_walk walk = {0};
    nd_sdpa_piece p;
    int64_t most = 0;
    while (nd_sdpa_next(&c->cut, &walk, &p)) {
        int64_t bytes = 2 * a->batch * p.kvs * (a->heads / a->kv_heads) * p.rows * p.keys;
        most = bytes > most ? bytes : most;
    }
    return (size_t)most;
}

/* 32 heads; q, k, v lie in rows of a fused projection, and gradients are written into such rows, in
 * place. All plans of the call exist, and ask for no more scratch than is planned for a GPU that is
 * not here; a deterministic backward's ask for what the usual one does without, so it is what was
 * asked for. */
static void expect_plans_with(int64_t K, int64_t sq, int64_t sk, int64_t diag, int64_t D,
                              bool backward, bool deterministic)
{
    const int64_t H = 32, row = (H + 2 * K) * D;
    nd_attention a = {1, sq, sk, H, K, D, diag, 0.0883883f, window};
    nd_cuda_context context = {.cudnn = cudnn,
                               .facts.capability = 90,
                               .deterministic = deterministic,
                               .ordered_bytes = ND_SDPA_ORDERED_BYTES};
    nd_tensor q = heads(sq, H, D, row), k = heads(sk, K, D, row), out = heads(sq, H, D, H * D);
    nd_sdpa_call c = {.context = &context,
                      .backward = backward,
                      .x = {.attention = a,
                            .q = q,
                            .k = k,
                            .v = k,
                            .out = out,
                            .lse = nd_tensor_3d(NULL, ND_DTYPE_F32, 1, H, sq),
                            .dout = out,
                            .dq = q,
                            .dk = k,
                            .dv = k}};
    int64_t before = nd_cudnn_plan_count(cudnn);
    size_t planned = nd_cuda_sdpa_scratch_by_formula(&a, ND_DTYPE_BF16, backward,
                                                     deterministic ? ND_SDPA_ORDERED_BYTES : 0);
    cr_assert_eq(nd_sdpa_plan(&c), ND_OK, "%s", nd_error_last()->message);
    cr_expect_leq(c.layout.end, planned, "%zu bytes of scratch, %zu planned", c.layout.end,
                  planned);
    bool pieces = c.cut.adds_queries || c.cut.adds_keys;
    cr_expect(!backward || pieces || (!c.through_q && !c.through_kv),
              "gradients go by the scratch");
    size_t workspace = c.layout.stats; /* which lies first */
    cr_expect(!deterministic || workspace >= most_scores(&c), "%zu bytes, scores of %zu", workspace,
              most_scores(&c));
    printf("sq %lld, sk %lld, diagonal %lld, heads of %lld, %s%s: %lld plans, %zu bytes\n",
           (long long)sq, (long long)sk, (long long)diag, (long long)D,
           backward ? "backward" : "forward", deterministic ? ", deterministic" : "",
           (long long)(nd_cudnn_plan_count(cudnn) - before), c.layout.end);
}

/* 8 KV heads. */
static void expect_plans_of(int64_t sq, int64_t sk, int64_t diag, int64_t D, bool backward,
                            bool deterministic)
{
    expect_plans_with(8, sq, sk, diag, D, backward, deterministic);
}

/* The diagonal at the first key, none, at the last key; rows in no whole tiles of cuDNN. */
static void expect_plans(bool backward)
{
    expect_plans_of(8192, 8192, 0, 128, backward, false);
    expect_plans_of(4096, 8192, 8192, 128, backward, false);
    expect_plans_of(2048, 8192, 8192 - 2048, 128, backward, false);
    expect_plans_of(8000, 128000, 128000 - 8000, 128, backward, false); /* 128000 over cp 8 */
    expect_plans_of(8000, 8000, 8000, 128, backward, false);            /* the same as a ring */
    expect_plans_of(1001, 2002, 1001, 64, backward, false);
}

Test(cudnn_plans, forward, .init = open_library, .timeout = 300)
{
    expect_plans(false);
}

Test(cudnn_plans, backward, .init = open_library, .timeout = 300)
{
    expect_plans(true);
}

/* Groups of KV heads, and tiles. */
Test(cudnn_plans, deterministic_backward, .init = open_library, .timeout = 300)
{
    expect_plans_of(8192, 8192, 0, 128, true, true);
    expect_plans_of(1001, 2002, 1001, 64, true, true);
    expect_plans_of(8000, 128000, 128000 - 8000, 128, true, true);
    expect_plans_of(262144, 262144, 0, 128, true, true);
    cr_expect_leq(nd_cudnn_plan_count(cudnn), 12, "%lld plans",
                  (long long)nd_cudnn_plan_count(cudnn));
}

/* Blocks that cuDNN takes with a window, as one whole band: causal, and queries after a prefix. */
Test(cudnn_plans, windows, .init = open_library, .timeout = 300)
{
    window = 1000;
    for (int backward = 0; backward < 2; backward++) {
        expect_plans_of(8192, 8192, 0, 128, backward, false);
        expect_plans_of(1001, 2002, 1001, 64, backward, false);
    }
    expect_plans_of(4096, 4096, 0, 64, true, true);
}

/* Head sizes of the small models that tests and gpu_check train, in lengths of such runs and in
 * rows that fill no whole tile. */
Test(cudnn_plans, small_heads, .init = open_library, .timeout = 300)
{
    static const int64_t sizes[] = {8, 16, 32};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int backward = 0; backward < 2; backward++) {
            expect_plans_of(512, 512, 0, sizes[i], backward, false);
            expect_plans_of(1001, 2002, 1001, sizes[i], backward, false);
        }
        expect_plans_of(512, 512, 0, sizes[i], true, true);
    }
}

/* The head sizes of real models, in a length of whole tiles and in another: a whole causal block,
 * queries of the second half after a prefix, and an unmasked block, as cp has them. */
static void expect_plans_of_lengths(bool backward, bool deterministic)
{
    static const int64_t sizes[] = {64, 128}, lengths[] = {1000, 4096};
    for (int i = 0; i < 4; i++) {
        int64_t D = sizes[i / 2], S = lengths[i % 2];
        expect_plans_of(S, S, 0, D, backward, deterministic);
        expect_plans_of(S / 2, S, S / 2, D, backward, deterministic);
        expect_plans_of(S / 2, S, S, D, backward, deterministic);
        expect_plans_with(32, S, S, 0, D, backward, deterministic); /* a KV head for each head */
    }
}

Test(cudnn_plans, lengths_forward, .init = open_library, .timeout = 300)
{
    expect_plans_of_lengths(false, false);
}

Test(cudnn_plans, lengths_backward, .init = open_library, .timeout = 300)
{
    expect_plans_of_lengths(true, false);
}

Test(cudnn_plans, lengths_deterministic_backward, .init = open_library, .timeout = 300)
{
    expect_plans_of_lengths(true, true);
}

/* Checks what a layer on Hopper prepares for separate documents: a plan for each tier, forward and
 * backward, and no more bytes than the formula says. */
static void expect_segments(nd_attention a, int tiers)
{
    const int64_t batch = a.batch, S = a.sq, D = a.head_dim, H = a.heads, K = a.kv_heads;
    nd_cuda_context context = {.cudnn = cudnn, .facts.capability = 90};
    const int64_t width = (H + 2 * K) * D, before = nd_cudnn_plan_count(cudnn);
    nd_tensor qkv[3] = {heads(S, H, D, width), heads(a.sk, K, D, width), heads(a.sk, K, D, width)};
    nd_tensor out = heads(S, H, D, H * D), some = out;
    for (int i = 0; i < 3; i++) {
        qkv[i].shape[0] = out.shape[0] = batch;
    }
    const nd_attention_fwd_args forward = {
        .attention = a, .out = out, .q = qkv[0], .k = qkv[1], .v = qkv[2], .end_key = some};
    const nd_attention_bwd_args backward = {.attention = a,
                                            .q = qkv[0],
                                            .k = qkv[1],
                                            .v = qkv[2],
                                            .out = out,
                                            .dout = out,
                                            .end_key = some,
                                            .add_kv = true};
    cr_expect(nd_documents_fit(&a, false));
    nd_sdpa_call calls[] = {nd_sdpa_forward_call(&context, &forward),
                            {.context = &context, .backward = true, .x = backward}};
    for (int i = 0; i < 2; i++) {
        cr_expect(nd_documents_take(&calls[i]));
        cr_expect_leq(calls[i].documents.end, nd_documents_scratch_by_formula(&a, i == 1));
    }
    cr_expect_eq(nd_cudnn_plan_count(cudnn) - before, 2 * tiers);
    printf("documents (%d) in %lld x %lld, %lld keys, window %lld, heads of %lld: %zu bytes, by "
           "formula %zu\n",
           (int)a.documents, (long long)batch, (long long)S, (long long)a.sk, (long long)a.window,
           (long long)D, calls[1].documents.end, nd_documents_scratch_by_formula(&a, true));
}

static void expect_documents(int64_t batch, int64_t S, int64_t D, int64_t H, int64_t K, int tiers)
{
    expect_segments((nd_attention){batch, S, S, H, K, D, 0, 0.1f, 0, ND_SEGMENTS_WHOLE, 1}, tiers);
}

Test(cudnn_plans, separate_documents, .init = open_library, .timeout = 300)
{
    expect_documents(1, 8192, 128, 32, 8, 3);
    expect_documents(2, 4096, 64, 16, 4, 3);
    expect_documents(3, 1000, 80, 4, 4, 2);
    expect_documents(1, 131072, 128, 32, 8, 4);
    expect_documents(4, 96, 16, 4, 2, 1);
}

/* On a rank of cp: keys that are gathered, and those of a step of a ring; with windows. */
Test(cudnn_plans, documents_of_cp, .init = open_library, .timeout = 300)
{
    static const nd_segments d = ND_SEGMENTS_DIAGONAL, flat = ND_SEGMENTS_FLAT;
    expect_segments((nd_attention){1, 16384, 131072, 32, 8, 128, 0, 0.1f, 0, d, 2}, 4);
    expect_segments((nd_attention){1, 16384, 16384, 32, 8, 128, 0, 0.1f, 0, flat, 2}, 3);
    expect_segments((nd_attention){2, 512, 1024, 16, 4, 64, 0, 0.1f, 0, d, 2}, 2);
    expect_segments((nd_attention){2, 512, 512, 16, 4, 64, 0, 0.1f, 0, flat, 2}, 2);
    expect_segments((nd_attention){1, 2048, 8192, 16, 4, 128, 0, 0.1f, 1000, d, 2}, 3);
    expect_segments((nd_attention){1, 8192, 8192, 16, 4, 64, 0, 0.1f, 1000, ND_SEGMENTS_WHOLE, 1},
                    3);
}

/* On older GPUs cuDNN is asked for no plan of documents, and the plain kernels compute them. */
Test(cudnn_plans, no_documents_on_older_gpus, .init = open_library)
{
    const nd_attention a = {1, 512, 512, 4, 4, 64, 0, 0.1f, 0, true};
    nd_cuda_context context = {.cudnn = cudnn, .facts.capability = 80};
    nd_tensor x = heads(512, 4, 64, 256);
    const nd_attention_fwd_args forward = {
        .attention = a, .out = x, .q = x, .k = x, .v = x, .end_key = x};
    nd_sdpa_call call = nd_sdpa_forward_call(&context, &forward);
    cr_expect_not(nd_documents_take(&call));
    cr_expect_eq(nd_cudnn_plan_count(cudnn), 0);
}

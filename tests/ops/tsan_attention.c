// SPDX-License-Identifier: Apache-2.0
/* Attention under the thread sanitizer, whose backward has threads that add to one sum in turns: a
 * plain program, as Criterion does not run there. Once with threads that sleep at once when they
 * wait, once with threads that spin. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ops.h"
#include "runtime/base/rng.h"
#include "runtime/device/device.h"

enum { INPUTS = 4, RESULTS = 5, THREADS = 4, MOST = 1 << 16 };

static const nd_attention shape = {2, 130, 520, 4, 2, 16, 390, 0.25f};

/* q, k, v, dout; and dq, dk, dv, out, lse; and delta. */
static float inputs[INPUTS][MOST], results[RESULTS][MOST], delta[MOST];
/* Absent at first, then documents of 100 keys. */
static nd_tensor first_key;
static int32_t first_keys[2 * 130];

static nd_tensor of_heads(float *data, bool keys)
{
    const nd_attention *a = &shape;
    return nd_tensor_4d(data, ND_DTYPE_F32, a->batch, keys ? a->sk : a->sq,
                        keys ? a->kv_heads : a->heads, a->head_dim);
}

static nd_status call_ops(const nd_ops *ops, nd_stream *stream, void *scratch)
{
    const nd_attention *a = &shape;
    const int64_t rows = a->batch * a->heads * a->sq;
    const nd_tensor q = of_heads(inputs[0], false), k = of_heads(inputs[1], true);
    const nd_tensor v = of_heads(inputs[2], true), dout = of_heads(inputs[3], false);
    const nd_tensor out = of_heads(results[3], false);
    const nd_tensor lse = nd_tensor_1d(results[4], ND_DTYPE_F32, rows);
    const nd_tensor d = nd_tensor_1d(delta, ND_DTYPE_F32, rows);
    ND_TRY(ND_CALL(ops, stream, attention_fwd, .attention = *a, .out = out, .lse = lse, .q = q,
                   .k = k, .v = v, .first_key = first_key, .scratch = scratch));
    ND_TRY(ND_CALL(ops, stream, attention_delta, .attention = *a, .delta = d, .out = out,
                   .dout = dout));
    return ND_CALL(ops, stream, attention_bwd, .attention = *a, .dq = of_heads(results[0], false),
                   .dk = of_heads(results[1], true), .dv = of_heads(results[2], true), .q = q,
                   .k = k, .v = v, .out = out, .dout = dout, .lse = lse, .delta = d,
                   .first_key = first_key, .scratch = scratch);
}

static nd_status run(int threads)
{
    nd_device *device = NULL;
    nd_stream stream;
    const nd_ops *ops = NULL;
    ND_TRY(nd_device_open_cpu(threads, &device));
    ND_TRY(device->table->stream_init(device, &stream));
    ND_TRY(nd_ops_cpu(device, &ops));
    const size_t forward = ops->attention_scratch(device, &shape, ND_DTYPE_F32, false);
    const size_t backward = ops->attention_scratch(device, &shape, ND_DTYPE_F32, true);
    const size_t bytes = ((forward > backward ? forward : backward) + 63) / 64 * 64;
    void *scratch = aligned_alloc(64, bytes);
    const nd_status status = scratch ? call_ops(ops, &stream, scratch) : ND_ERR_RESOURCE;
    free(scratch);
    device->table->stream_fini(&stream);
    nd_device_close(device);
    return status;
}

static int compare(void)
{
    static float alone[RESULTS][MOST];
    static const char *const spins[] = {"0", "2000"};
    if (run(1) != ND_OK) {
        printf("one thread: %s\n", nd_error_last()->message);
        return 1;
    }
    memcpy(alone, results, sizeof alone);
    for (int i = 0; i < 2; i++) {
        setenv("GOMP_SPINCOUNT", spins[i], 1);
        memset(results, 0, sizeof results);
        if (run(THREADS) != ND_OK || memcmp(alone, results, sizeof alone) != 0) {
            printf("%d threads that spin %s turns: other bits than with one, or %s\n", THREADS,
                   spins[i], nd_error_last()->message);
            return 1;
        }
    }
    return 0;
}

int main(void)
{
    for (int i = 0; i < INPUTS; i++) {
        for (int j = 0; j < MOST; j++) {
            inputs[i][j] = (float)(nd_rng_u64(7, (uint64_t)i, (uint64_t)j) % 255) / 128.0f - 1.0f;
        }
    }
    if (compare() != 0) {
        return 1;
    }
    const int64_t rows = shape.batch * shape.sq;
    for (int64_t i = 0; i < rows; i++) {
        first_keys[i] = (int32_t)((i % shape.sq + shape.diag) / 100 * 100);
    }
    first_key = nd_tensor_1d(first_keys, ND_DTYPE_I32, rows);
    return compare();
}

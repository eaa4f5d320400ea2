// SPDX-License-Identifier: Apache-2.0
#include "trainer/tune/timing.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/clock.h"
#include "runtime/base/math.h"
#include "runtime/base/rng.h"
#include "runtime/tensor/fp8.h"
#include "trainer/model/linear.h"
#include "trainer/tune/measure.h"
#include "trainer/weights/weights.h"

/* Calls of ops. */

enum { REPEATS = 5, ALIGN = 256, PATTERN_BYTES = 1 << 16 };

/* Operands are filled with values: a product of zeros would need less power and so less time. */
enum { PATTERN_F32, PATTERN_BF16, PATTERN_E4M3, PATTERN_E5M2, PATTERN_ONES, PATTERNS };

static size_t span(const nd_call_matrix *m)
{
    int64_t elements = m->rows > 0 ? (m->rows - 1) * m->stride + m->columns : 0;
    return m->align == 0 ? 0 : (size_t)elements * nd_dtype_size((nd_dtype)m->dtype);
}

/* Runs calls of ops on the rank's device, on memory of its own. Used before the run's memory is
 * planned. */
typedef struct bench {
    nd_rank *rank; /* borrowed */
    char *memory;
    size_t bytes;
    char *patterns; /* host: operands' values */
} bench;

/* Byte offsets of the operands of a call. */
typedef struct places {
    size_t c, a, b, amax, scales[2], inverses[2], scratch, end;
} places;

static size_t place(size_t *at, size_t bytes)
{
    size_t begin = *at;
    *at += nd_round_up_bytes(bytes, ALIGN) + ALIGN;
    return begin;
}

static places places_of(const nd_rank *rank, const nd_call *call)
{
    places p = {0};
    size_t at = 0, entries = 1, scratch = 0;
    const nd_call_matrix *all[] = {&call->c, &call->a, &call->b};
    for (int i = 0; i < 3; i++) {
        const nd_call_matrix *m = all[i];
        const bool by_rows = m->axes == 1 || m->rows > m->columns;
        size_t longest = m->align ? (size_t)(by_rows ? m->rows : m->columns) : 1;
        entries = longest > entries && (call->kind == ND_CALL_FP8_SCALE ||
                                        call->a.along != ND_PER_TENSOR || call->b.along)
                      ? longest
                      : entries;
    }
    if (call->kind == ND_CALL_PRODUCT_FP8) {
        scratch = rank->ops->product_scratch(rank->device, call->c.rows, call->c.columns,
                                             call->a.columns, ND_DTYPE_BF16);
    }
    p.c = place(&at, span(&call->c));
    p.a = place(&at, span(&call->a));
    p.b = place(&at, span(&call->b));
    p.amax = place(&at, entries * 4);
    for (int i = 0; i < 2; i++) {
        p.scales[i] = place(&at, entries * 4);
        p.inverses[i] = place(&at, entries * 4);
    }
    p.scratch = place(&at, scratch);
    p.end = at;
    return p;
}

static char *pattern_of(const bench *b, int pattern)
{
    return b->patterns + (size_t)pattern * PATTERN_BYTES;
}

static void make_patterns(bench *b)
{
    for (int i = 0; i < PATTERN_BYTES; i++) {
        float value = nd_rng_normal(1, 2, (uint64_t)i);
        pattern_of(b, PATTERN_E4M3)[i] = (char)nd_fp8_from_f32(ND_DTYPE_F8_E4M3, value);
        pattern_of(b, PATTERN_E5M2)[i] = (char)nd_fp8_from_f32(ND_DTYPE_F8_E5M2, value);
        if (i < PATTERN_BYTES / 2) {
            ((nd_bf16 *)(void *)pattern_of(b, PATTERN_BF16))[i] = nd_bf16_from_f32(value);
        }
        if (i < PATTERN_BYTES / 4) {
            ((float *)(void *)pattern_of(b, PATTERN_F32))[i] = value;
            ((float *)(void *)pattern_of(b, PATTERN_ONES))[i] = 1.0f;
        }
    }
}

/* The memory for any one of these calls. */
static size_t bench_bytes(const nd_rank *rank, const nd_calls *calls)
{
    size_t bytes = ALIGN;
    for (int i = 0; i < calls->count; i++) {
        places p = places_of(rank, &calls->entries[i].call);
        bytes = p.end > bytes ? p.end : bytes;
    }
    return bytes;
}

static nd_status bench_open(bench *out, nd_rank *rank, const nd_calls *calls)
{
    bench b = {.rank = rank, .bytes = bench_bytes(rank, calls)};
    ND_TRY(ND_ALLOC(PATTERNS * PATTERN_BYTES, &b.patterns));
    make_patterns(&b);
    nd_status status = nd_device_alloc(rank->device, b.bytes, (void **)&b.memory);
    if (status != ND_OK) {
        free(b.patterns);
        return nd_fail_context(status, "allocating the operands of products that are timed");
    }
    *out = b;
    return ND_OK;
}

static void bench_close(bench *b)
{
    if (b->memory) {
        nd_device_free(b->rank->device, b->memory, b->bytes);
    }
    free(b->patterns);
    *b = (bench){0};
}

/* Repeats the pattern, by copies of what is already on the device. */
static nd_status fill_pattern(const bench *b, char *to, size_t bytes, int pattern)
{
    nd_stream *stream = &b->rank->stream;
    size_t filled = bytes < PATTERN_BYTES ? bytes : PATTERN_BYTES;
    if (bytes > 0) {
        ND_TRY(nd_copy(stream, to, pattern_of(b, pattern), filled));
    }
    while (filled < bytes) {
        size_t next = bytes - filled < filled ? bytes - filled : filled;
        ND_TRY(nd_copy(stream, to + filled, to, next));
        filled += next;
    }
    return ND_OK;
}

static nd_tensor tensor_at(const bench *b, size_t at, const nd_call_matrix *m)
{
    char *data = b->memory + at + (m->align < ALIGN ? m->align : 0);
    if (m->align == 0) {
        return (nd_tensor){0};
    }
    if (m->axes == 1) {
        return nd_tensor_1d(data, (nd_dtype)m->dtype, m->rows);
    }
    nd_tensor t = nd_tensor_2d(data, (nd_dtype)m->dtype, m->rows, m->columns);
    t.stride[0] = m->stride;
    return t;
}

static nd_status fill_operand(const bench *b, size_t at, const nd_call_matrix *m)
{
    int pattern = m->dtype == ND_DTYPE_F32       ? PATTERN_F32
                  : m->dtype == ND_DTYPE_BF16    ? PATTERN_BF16
                  : m->dtype == ND_DTYPE_F8_E5M2 ? PATTERN_E5M2
                                                 : PATTERN_E4M3;
    return m->align == 0 ? ND_OK : fill_pattern(b, tensor_at(b, at, m).data, span(m), pattern);
}

static nd_status fill_all(const bench *b, const nd_call *call, const places *p)
{
    ND_TRY(fill_operand(b, p->a, &call->a));
    if (call->kind == ND_CALL_PRODUCT || call->kind == ND_CALL_PRODUCT_FP8) {
        ND_TRY(fill_operand(b, p->b, &call->b));
    }
    ND_TRY(fill_pattern(b, b->memory + p->amax, p->scratch - p->amax, PATTERN_ONES));
    return ND_OK;
}

/* A call and the memory of its operands. */
typedef struct bound_call {
    const bench *bench;
    const nd_call *call;
    places at;
} bound_call;

static nd_matrix fp8_operand(const bound_call *x, int which, nd_tensor t, bool as_stored, int along)
{
    nd_matrix out = {.scale = (float *)(void *)(x->bench->memory + x->at.scales[which]),
                     .inverse = (float *)(void *)(x->bench->memory + x->at.inverses[which]),
                     .granularity = (nd_granularity)along};
    out.format = ND_DTYPE_F8_E4M3; /* of an operand that the product casts; E5M2 takes as long */
    out.stored = t;
    out.transposed = !as_stored && t.dtype != ND_DTYPE_BF16;
    return out;
}

static nd_status run_call(void *context, nd_stream *s)
{
    const bound_call *x = context;
    const bench *b = x->bench;
    const nd_call *call = x->call;
    const nd_ops *ops = b->rank->ops;
    nd_tensor c = tensor_at(b, x->at.c, &call->c), a = tensor_at(b, x->at.a, &call->a);
    nd_tensor second = tensor_at(b, x->at.b, &call->b);
    float *amax = (float *)(void *)(b->memory + x->at.amax);
    bool at = call->a_transposed, bt = call->b_transposed;
    const nd_dtype codes = ND_DTYPE_F8_E4M3;
    const nd_form_need need = {ND_W_OF_DX, 1, 1, 1, codes, codes, .uses = 1};
    /* False: products read transposed codes where the stored ones do not lie along the summed
     * axis. */
    const bool as_stored = !ops->form(b->rank->device, &need).transposed;
    nd_matrix fa, fb;
    switch ((nd_call_kind)call->kind) {
    case ND_CALL_PRODUCT:
        return ND_CALL(ops, s, product, .c = c, .a = nd_rows(a), .a_transposed = at,
                       .b = nd_rows(second), .b_transposed = bt, .beta = (float)call->beta);
    case ND_CALL_PRODUCT_FP8:
        fa = fp8_operand(x, 0, a, !at || as_stored, call->a.along);
        fb = fp8_operand(x, 1, second, bt || as_stored, call->b.along);
        return ND_CALL(ops, s, product, .c = c, .a = fa, .a_transposed = at, .b = fb,
                       .b_transposed = bt, .beta = (float)call->beta,
                       .fast_accumulation = call->fast, .scratch = b->memory + x->at.scratch);
    case ND_CALL_AMAX:
        return ND_CALL(ops, s, amax, .amax = amax, .x = a,
                       .granularity = (nd_granularity)call->a.along, .merge = call->merges);
    case ND_CALL_FP8_SCALE:
        fa = fp8_operand(x, 0, a, true, ND_PER_TENSOR);
        return ND_CALL(ops, s, fp8_scale, .scale = fa.scale, .inverse = fa.inverse, .amax = amax,
                       .count = call->a.rows, .format = ND_DTYPE_F8_E4M3);
    case ND_CALL_FP8_CAST:
        fa = fp8_operand(x, 0, c, true, call->a.along);
        return ND_CALL(ops, s, make_form, .out = fa, .transposed = second,
                       .amax = call->merges ? amax : NULL, .x = a);
    case ND_CALL_FP8_TRANSPOSE:
        return ND_CALL(ops, s, make_form, .transposed = c, .x = a);
    case ND_CALL_CAST:
        return ND_CALL(ops, s, cast, .out = c, .x = a);
    }
    return ND_OK;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times, int count)
{
    qsort(times, (size_t)count, sizeof *times, by_value);
    return times[count / 2];
}

/* On a CPU, where a call is complete when it returns. */
static nd_status host_median(bound_call *x, nd_stream *stream, double *seconds)
{
    double times[REPEATS];
    ND_TRY(run_call(x, stream)); /* which makes what the library keeps */
    for (int i = 0; i < REPEATS; i++) {
        const double begin = nd_clock_seconds();
        ND_TRY(run_call(x, stream));
        times[i] = nd_clock_seconds() - begin;
    }
    *seconds = median(times, REPEATS);
    return ND_OK;
}

/* The median time of a few calls. */
static nd_status time_call(bench *b, const nd_call *call, double *seconds)
{
    bound_call x = {b, call, places_of(b->rank, call)};
    nd_stream *stream = &b->rank->stream;
    ND_ASSERT(x.at.end <= b->bytes);
    ND_TRY(fill_all(b, call, &x.at));
    const struct nd_tuner *tuner = b->rank->ops->tuner;
    return tuner ? tuner->median(stream, run_call, &x, REPEATS, seconds)
                 : host_median(&x, stream, seconds);
}

nd_status nd_calls_time(nd_rank *rank, nd_calls *calls, double deadline, bool *cut_short)
{
    bench b;
    nd_status status = ND_OK;
    ND_TRY(bench_open(&b, rank, calls));
    for (int i = 0; i < calls->count && status == ND_OK; i++) {
        nd_call_entry *entry = &calls->entries[i];
        entry->seconds = -1.0;
        if (entry->times > 0 && nd_clock_seconds() < deadline) {
            status = time_call(&b, &entry->call, &entry->seconds);
        }
        *cut_short |= entry->times > 0 && entry->seconds < 0.0;
    }
    bench_close(&b);
    return status;
}

nd_status nd_calls_run_products(nd_rank *rank, const nd_calls *calls)
{
    bench b;
    nd_status status = ND_OK;
    ND_TRY(bench_open(&b, rank, calls));
    for (int i = 0; i < calls->count; i++) {
        const nd_call *call = &calls->entries[i].call;
        if (call->kind == ND_CALL_PRODUCT || call->kind == ND_CALL_PRODUCT_FP8) {
            bound_call x = {&b, call, places_of(rank, call)};
            ND_TRY_OUT(fill_all(&b, call, &x.at));
            ND_TRY_OUT(run_call(&x, &rank->stream));
        }
    }
    status = nd_stream_sync(&rank->stream);
out:
    bench_close(&b);
    return status;
}

/* A linear. */

/* A model whose down_proj has these extents; nothing else of it counts. */
static nd_shape shape_of(nd_linear_extents e)
{
    const int64_t head_dim = 16;
    return (nd_shape){.vocab = 16,
                      .hidden = e.n,
                      .ffn = e.k,
                      .layers = 1,
                      .heads = e.n / head_dim,
                      .kv_heads = e.n / head_dim,
                      .head_dim = head_dim,
                      .max_positions = e.m,
                      .rms_eps = 1e-5,
                      .init_std = 0.02,
                      .rope = {.theta = 10000.0}};
}

typedef struct linear_bench {
    nd_config config;
    nd_rank rank; /* alone in the world, with this configuration */
    nd_calls bf16, fp8[ND_FP8_RECIPE_COUNT], all;
} linear_bench;

static void init_linear(linear_bench *t, const nd_rank *rank, nd_linear_extents e)
{
    static char everything[] = "*";
    *t = (linear_bench){.config = *rank->config, .rank = *rank};
    t->config.train.precision = ND_PRECISION_FP8;
    t->config.train.micro_batch_size = t->config.train.gradient_accumulation_steps = 1;
    t->config.train.sequence_length = e.m;
    t->config.parallel.recompute = ND_RECOMPUTE_NONE;
    t->config.fp8.all_gather = false;
    t->config.fp8.health_interval = 0;
    t->config.fp8.filter = everything;
    t->config.resolved_mesh = (nd_mesh){{1, 1, 1, 1, 1}};
    t->rank.config = &t->config;
    t->rank.mesh = t->config.resolved_mesh;
    t->rank.coord = (nd_coord){{0}};
    t->rank.rank = 0;
    t->rank.world_size = 1;
    t->rank.shape = shape_of(e);
}

static nd_status list_calls(linear_bench *t, const nd_fp8_recipe *recipes, int count)
{
    nd_linear_choice choice = {.forced = true};
    ND_TRY(nd_dry_run(&t->rank, &choice, &t->bf16));
    ND_TRY(nd_calls_add_all(&t->all, &t->bf16));
    choice.fp8[ND_INPUT_DOWN][0] = 1;
    for (int i = 0; i < count; i++) {
        t->config.fp8.recipe = recipes[i];
        ND_TRY(nd_dry_run(&t->rank, &choice, &t->fp8[i]));
        ND_TRY(nd_calls_add_all(&t->all, &t->fp8[i]));
    }
    return ND_OK;
}

/* True for a call of down_proj in any precision: only these differ between the steps. */
static bool counts(const linear_bench *t, const nd_call *call, int recipes)
{
    const nd_call_entry *bf16 = nd_calls_find(&t->bf16, call);
    for (int i = 0; i < recipes; i++) {
        const nd_call_entry *fp8 = nd_calls_find(&t->fp8[i], call);
        if ((bf16 ? bf16->times : 0) != (fp8 ? fp8->times : 0)) {
            return true;
        }
    }
    return false;
}

static nd_status time_calls(linear_bench *t, const nd_timing *ask, int recipes, bool *stopped)
{
    bench b;
    nd_status status = ND_OK;
    ND_TRY(ask->room(ask->context, (double)bench_bytes(&t->rank, &t->all)));
    ND_TRY(bench_open(&b, &t->rank, &t->all));
    for (int i = 0; i < t->all.count; i++) {
        t->all.entries[i].seconds = -1.0;
    }
    for (int round = 0; round < ask->repeats; round++) {
        for (int i = 0; i < t->all.count && status == ND_OK && !*stopped; i++) {
            nd_call_entry *entry = &t->all.entries[i];
            double seconds = 0.0;
            *stopped = ask->stop();
            if (!*stopped && counts(t, &entry->call, recipes)) {
                status = time_call(&b, &entry->call, &seconds);
                entry->seconds = entry->seconds < 0.0 ? seconds : fmin(entry->seconds, seconds);
            }
        }
    }
    bench_close(&b);
    return status;
}

nd_status nd_time_linear(const nd_timing *ask, const nd_fp8_recipe *recipes, int count,
                         nd_linear_extents e, nd_linear_times *out)
{
    linear_bench t;
    nd_status status = ND_OK;
    ND_ASSERT(count > 0 && count <= ND_FP8_RECIPE_COUNT && ask->repeats > 0);
    if (e.m % 16 != 0 || e.k % 16 != 0 || e.n % 16 != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "a linear of %lld x %lld x %lld cannot run in FP8, which needs multiples of "
                       "16 in each of the three",
                       (long long)e.m, (long long)e.k, (long long)e.n);
    }
    init_linear(&t, ask->rank, e);
    ND_TRY_OUT(list_calls(&t, recipes, count));
    out->stopped = false;
    ND_TRY_OUT(time_calls(&t, ask, count, &out->stopped));
    if (out->stopped) {
        goto out;
    }
    out->bf16 = nd_calls_difference(&t.all, &t.bf16, &t.fp8[0], true);
    for (int i = 0; i < count; i++) {
        out->fp8[i] = out->bf16 + nd_calls_difference(&t.all, &t.fp8[i], &t.bf16, false);
    }
out:
    nd_calls_free(&t.bf16);
    nd_calls_free(&t.all);
    for (int i = 0; i < ND_FP8_RECIPE_COUNT; i++) {
        nd_calls_free(&t.fp8[i]);
    }
    return status;
}

/* A layer. */

typedef struct layer_bench {
    nd_rank *rank;
    nd_memplan plan;
    nd_model *model;
    int32_t *ids;   /* (T): tokens, labels and positions in one */
    void *gradient; /* (Tl, C) in the dtype of the residual stream: what backward begins with */
} layer_bench;

static nd_status make_layer_inputs(layer_bench *b)
{
    const nd_model *m = b->model;
    const int64_t T = m->dims.T, elements = m->dims.Tl * m->dims.C;
    ND_TRY(ND_ALLOC(T, &b->ids));
    for (int64_t i = 0; i < T; i++) {
        b->ids[i] = (int32_t)(i % m->dims.vocab);
    }
    ND_TRY(ND_ALLOC(nd_tensor_bytes(m->work.dx), (char **)&b->gradient));
    for (int64_t i = 0; i < elements; i++) {
        float value = 0.01f * nd_rng_normal(1, 3, (uint64_t)i);
        if (m->work.dx.dtype == ND_DTYPE_F32) {
            ((float *)b->gradient)[i] = value;
        } else {
            ((nd_bf16 *)b->gradient)[i] = nd_bf16_from_f32(value);
        }
    }
    return ND_OK;
}

static nd_status open_layer(layer_bench *b, const nd_timing *timing)
{
    nd_rank *r = b->rank;
    /* Each run has new weights, so packed weights, which are not planned here, would serve one. */
    const nd_model_options options = {0};
    nd_memplan_init(&b->plan);
    ND_TRY(nd_dry_run_prepare(r, &options));
    ND_TRY(nd_model_create(r, &options, &b->plan, &b->model));
    ND_TRY(nd_model_plan_weights(b->model, false, &b->plan));
    ND_TRY(timing->room(timing->context, (double)b->plan.total));
    ND_TRY(nd_memplan_commit(&b->plan, r->device));
    ND_TRY(nd_model_start(b->model));
    ND_TRY(nd_weights_init(&b->model->fsdp, r->shape.init_std, r->config->train.seed));
    return make_layer_inputs(b);
}

/* Everything that was enqueued is done, on all ranks. */
static nd_status meet(nd_rank *r)
{
    ND_TRY(nd_stream_sync(&r->stream));
    return nd_comm_barrier(r->groups.by_kind[ND_GROUP_WORLD]);
}

/* One forward and backward of the block, and the seconds of this rank. */
static nd_status run_layer(layer_bench *b, double seconds[2])
{
    static const nd_layer_range block = {0, 1};
    nd_rank *r = b->rank;
    nd_model *m = b->model;
    nd_residual residual;
    float *amax;
    nd_activation_set *set = nd_model_take_set(m);
    ND_TRY(nd_model_load_batch(m, set, b->ids, b->ids, b->ids));
    nd_fsdp_begin_step(&m->fsdp, 0);
    nd_fsdp_weights_changed(&m->fsdp);
    ND_TRY(nd_embed_forward(m, set, &residual));
    ND_TRY(meet(r));
    double begin = nd_clock_seconds();
    ND_TRY(nd_scales_refresh(&m->scales, m->fsdp.master, m->fsdp.version));
    ND_TRY(nd_blocks_forward(m, set, block, ND_PASS_TRAIN, NULL, &residual));
    ND_TRY(nd_stream_sync(&r->stream));
    seconds[0] = nd_clock_seconds() - begin;
    ND_TRY(nd_copy(&r->stream, m->work.dx.data, b->gradient, nd_tensor_bytes(m->work.dx)));
    ND_TRY(nd_gradient_prepare((nd_block_call){m, set, block.end - 1, ND_PASS_BACKWARD},
                               ND_INPUT_DOWN, &amax));
    if (amax) { /* in a step the norm above has found it */
        ND_OP(r, ND_TRACE_CAST, amax, .amax = amax, .x = m->work.dx, .granularity = ND_PER_TENSOR);
    }
    ND_TRY(meet(r));
    begin = nd_clock_seconds();
    ND_TRY(nd_blocks_backward(m, set, block, NULL));
    ND_TRY(nd_fsdp_grad_finish(&m->fsdp));
    ND_TRY(nd_stream_sync(&r->stream));
    seconds[1] = nd_clock_seconds() - begin;
    ND_TRY(nd_scales_advance(&m->scales));
    return nd_model_give_back(m, set);
}

static nd_status repeat_layer(layer_bench *b, const nd_timing *timing, double *times,
                              nd_layer_times *out)
{
    nd_rank *r = b->rank;
    const int repeats = timing->repeats;
    double *forward = times, *backward = times + repeats;
    for (int i = -1; i < repeats; i++) {
        double values[3]; /* seconds of forward and of backward, and whether it is to stop */
        ND_TRY(run_layer(b, values));
        values[2] = timing->stop();
        ND_TRY(nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, values, 3,
                                  ND_DTYPE_F64, ND_REDOP_MAX, NULL));
        out->stopped = values[2] > 0;
        if (out->stopped) {
            return ND_OK;
        }
        if (i >= 0) {
            forward[i] = values[0];
            backward[i] = values[1];
        }
    }
    out->forward = median(forward, repeats);
    out->backward = median(backward, repeats);
    return ND_OK;
}

nd_status nd_time_layer(const nd_timing *timing, nd_layer_times *out)
{
    layer_bench b = {.rank = timing->rank};
    double *times = NULL;
    nd_status status = ND_OK;
    ND_ASSERT(timing->repeats > 0 && timing->rank->shape.layers == 1);
    *out = (nd_layer_times){0};
    ND_TRY_OUT(ND_ALLOC(2 * (int64_t)timing->repeats, &times));
    ND_TRY_OUT(open_layer(&b, timing));
    status = repeat_layer(&b, timing, times, out);
out:
    free(times);
    free(b.ids);
    free(b.gradient);
    nd_model_destroy(b.model);
    nd_memplan_fini(&b.plan);
    return status;
}

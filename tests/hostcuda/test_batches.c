// SPDX-License-Identifier: Apache-2.0
/* Micro-batches on their way to a GPU: in order with compute in each order of the streams, ahead of
 * it, and without a wait of the host. */
#include <criterion/criterion.h>
#include <string.h>

#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"
#include "runtime/device/memplan.h"
#include "tests/hostcuda/doubles/double.h"
#include "trainer/model/activations.h"

enum { IDS = 0, LABELS, POSITIONS, ARRAYS };
enum { T = 70, MICROS = 7 }; /* no multiple of 64, so that arrays are padded */

typedef struct fixture {
    nd_ops ops;
    nd_config config;
    nd_dims dims;
    nd_rank rank;
    nd_memplan plan;
    nd_batches batches;
    int sets;                /* micro-batches in flight */
    nd_micro_batch batch[3]; /* those */
    int32_t *seen;           /* (MICROS, arrays, T) pinned: what compute read */
} fixture;

static int64_t accumulation = MICROS;

static void begin(fixture *f, int order, int sets)
{
    nd_cuda_options options = {.local_workers = 1};
    void *seen = NULL;
    memset(f, 0, sizeof *f);
    nd_double_machine_get()->order = order;
    f->ops.name = "cuda";
    f->sets = sets;
    f->config.train.gradient_accumulation_steps = accumulation;
    f->dims = (nd_dims){.T = T, .Tl = T / 2, .head_rows = 20}; /* tp 2, chunks of 20 and 15 rows */
    f->rank.ops = &f->ops;
    f->rank.config = &f->config;
    cr_assert_eq(nd_device_open_cuda(&options, &f->rank.device), ND_OK);
    cr_assert_eq(f->rank.device->table->stream_init(f->rank.device, &f->rank.stream), ND_OK);
    cr_assert_eq(nd_host_alloc(f->rank.device, MICROS * 3 * T * sizeof(int32_t), &seen), ND_OK);
    f->seen = seen;
    nd_memplan_init(&f->plan);
    nd_batches_plan(&f->batches, &f->rank, &f->dims, sets, &f->plan);
    cr_assert_eq(nd_memplan_commit(&f->plan, f->rank.device), ND_OK);
    cr_assert_eq(nd_batches_open(&f->batches), ND_OK);
}

static void end(fixture *f)
{
    nd_batches_close(&f->batches);
    nd_memplan_fini(&f->plan);
    nd_host_free(f->rank.device, f->seen);
    f->rank.device->table->stream_fini(&f->rank.stream);
    nd_device_close(f->rank.device);
}

static int32_t value(int micro, int array, int64_t i)
{
    return (int32_t)(micro * 10000 + array * 1000 + i);
}

static nd_micro_batch *batch_of(fixture *f, int micro)
{
    return &f->batch[micro % f->sets];
}

static void load(fixture *f, int micro)
{
    int32_t arrays[ARRAYS][T];
    for (int a = 0; a < ARRAYS; a++) {
        for (int64_t i = 0; i < T; i++) {
            arrays[a][i] = value(micro, a, i);
        }
    }
    const nd_step_batch from = {
        .inputs = arrays[IDS], .labels = arrays[LABELS], .positions = arrays[POSITIONS]};
    cr_assert_eq(nd_batches_load(&f->batches, &from, 0, micro % f->sets, batch_of(f, micro)), ND_OK,
                 "%s", nd_error_last()->message);
    memset(arrays, 0xff, sizeof arrays); /* not read any more */
}

/* Reads the current micro-batch as an op would: when the GPU comes to it. */
static void compute(fixture *f, int micro)
{
    nd_stream *stream = &f->rank.stream;
    const nd_micro_batch *batch = batch_of(f, micro);
    for (int a = 0; a < ARRAYS; a++) {
        const int32_t *from = a == IDS      ? batch->ids
                              : a == LABELS ? batch->labels
                                            : batch->positions;
        cr_assert_eq(nd_copy(stream, f->seen + (micro * 3 + a) * T, from, T * sizeof *from), ND_OK);
    }
    cr_assert_eq(nd_batches_give_back(&f->batches, batch), ND_OK);
}

/* The label that the head meets at place i: chunks of rows 0..19 and 20..34 of both tp peers. */
static int64_t label_at(int64_t i)
{
    return i < 40 ? i / 20 * 35 + i % 20 : (i - 40) / 15 * 35 + 20 + (i - 40) % 15;
}

static void expect_seen(const fixture *f, int micro)
{
    for (int64_t i = 0; i < T; i++) {
        const int32_t *seen = f->seen + micro * 3 * T;
        cr_assert_eq(seen[IDS * T + i], value(micro, IDS, i));
        cr_assert_eq(seen[LABELS * T + i], value(micro, LABELS, label_at(i)));
        cr_assert_eq(seen[POSITIONS * T + i], value(micro, POSITIONS, i),
                     "micro-batch %d: position %lld is %d", micro, (long long)i,
                     seen[POSITIONS * T + i]);
    }
}

/* Lazy: compute runs first unless it waits for the copy. Others: copies run first unless they wait
 * for what reads their slot. */
static void expect_order(int order, int sets)
{
    fixture f;
    begin(&f, order, sets);
    nd_double_counts before = nd_double_counts_get();
    nd_double_hot(true);
    for (int micro = 0; micro < MICROS + sets - 1; micro++) { /* each read sets - 1 loads later */
        if (micro < MICROS) {
            load(&f, micro);
        }
        if (micro >= sets - 1) {
            compute(&f, micro - (sets - 1));
        }
    }
    cr_expect_eq(nd_double_counts_get().host_waits, before.host_waits, "the host has waited");
    nd_double_hot(false);
    cr_assert_eq(nd_stream_sync(&f.rank.stream), ND_OK);
    for (int micro = 0; micro < MICROS; micro++) {
        expect_seen(&f, micro);
    }
    end(&f);
}

Test(batches, compute_waits_for_the_copy)
{
    expect_order(ND_DOUBLE_LAZY, 1);
}

Test(batches, a_copy_waits_for_the_reader_of_its_slot)
{
    expect_order(ND_DOUBLE_OTHERS, 1);
}

Test(batches, and_all_is_right_when_everything_runs_at_once)
{
    expect_order(ND_DOUBLE_EAGER, 1);
}

Test(batches, several_in_flight_have_slots_and_positions_of_their_own)
{
    for (int sets = 2; sets <= 3; sets++) {
        expect_order(ND_DOUBLE_LAZY, sets);
        expect_order(ND_DOUBLE_OTHERS, sets);
    }
}

/* The host comes round to the first of two places while its copy has not run yet. */
Test(batches, a_place_of_the_host_waits_for_its_copy)
{
    fixture f;
    accumulation = 1000;
    begin(&f, ND_DOUBLE_LAZY, 1);
    cr_expect_eq(f.batches.ring_count, ND_RING_MOST);
    end(&f);
    accumulation = 1;
    begin(&f, ND_DOUBLE_LAZY, 1);
    for (int micro = 0; micro < MICROS; micro++) {
        load(&f, micro);
        compute(&f, micro);
    }
    cr_assert_eq(nd_stream_sync(&f.rank.stream), ND_OK);
    for (int micro = 0; micro < MICROS; micro++) {
        expect_seen(&f, micro);
    }
    end(&f);
    accumulation = MICROS;
}

static nd_double_state until_asked(void *closure)
{
    return **(bool **)closure ? ND_DOUBLE_DONE : ND_DOUBLE_BLOCKED;
}

/* While the first micro-batch is computed, the second one arrives, and the third, whose slot is the
 * first one's, does not. */
Test(batches, the_next_one_is_copied_while_one_is_computed)
{
    fixture f;
    bool go = false, *at = &go;
    begin(&f, ND_DOUBLE_LAZY, 1);
    load(&f, 0);
    cr_assert_eq(nd_double_submit(nd_cuda_stream(&f.rank.stream), until_asked, &at, sizeof at),
                 cudaSuccess);
    compute(&f, 0);
    load(&f, 1);
    compute(&f, 1);
    load(&f, 2);
    compute(&f, 2);
    nd_double_drain();
    cudaEvent_t second = f.batches.copied[1].native, third = f.batches.copied[2].native;
    cr_expect_eq(cudaEventQuery(second), cudaSuccess, "the second one waits for compute");
    cr_expect_eq(cudaEventQuery(third), cudaErrorNotReady, "the third one overtook its reader");
    go = true;
    cr_assert_eq(nd_stream_sync(&f.rank.stream), ND_OK);
    for (int micro = 0; micro < 3; micro++) {
        expect_seen(&f, micro);
    }
    end(&f);
}

/* On a CPU: one slot, positions in it, and nothing more than the arrays. */
Test(batches, a_cpu_has_one_slot)
{
    static nd_ops cpu = {.name = "cpu"};
    nd_dims dims = {.T = 64, .Tl = 64, .head_rows = 64};
    nd_rank rank = {.ops = &cpu};
    nd_batches batches = {0};
    nd_memplan plan;
    nd_memplan_init(&plan);
    nd_batches_plan(&batches, &rank, &dims, 1, &plan);
    cr_expect_eq(plan.total, 3 * 64 * sizeof(int32_t));
    cr_expect_eq(batches.slots, 1);
    nd_memplan_fini(&plan);
}

// SPDX-License-Identifier: Apache-2.0
/* Times of linears and of a layer: that the right calls are timed, never how long they take. */
#include <criterion/criterion.h>
#include <math.h>

#include "tests/unit/trainer/mesh_ranks.h"
#include "trainer/tune/measure.h"
#include "trainer/tune/timing.h"

enum { RECIPES = 4 };
static const nd_fp8_recipe recipes[RECIPES] = {ND_FP8_TENSORWISE, ND_FP8_ROWWISE,
                                               ND_FP8_ROWWISE_GW_HP, ND_FP8_DELAYED};

static nd_status has_room(void *context, double bytes)
{
    *(double *)context = bytes;
    return ND_OK;
}

static nd_status has_no_room(void *context, double bytes)
{
    return nd_fail(ND_ERR_RESOURCE, "no room for %.0f bytes", bytes);
}

static bool goes_on(void)
{
    return false;
}

static bool stops(void)
{
    return true;
}

/* A call of a form that this number names. */
static nd_call call_of(int64_t number)
{
    return (nd_call){.kind = ND_CALL_CAST, .a = {.rows = number}};
}

static void add(nd_calls *calls, int64_t number, int64_t times, double seconds)
{
    nd_call call = call_of(number);
    calls->weight = times;
    cr_assert_eq(nd_calls_add(calls, &call), ND_OK);
    nd_calls_find(calls, &call)->seconds = seconds;
}

Test(timing, the_difference_of_two_steps)
{
    nd_calls timed = {0}, step = {0}, other = {0};
    add(&timed, 1, 1, 0.5);
    add(&timed, 2, 1, 0.25);
    add(&timed, 3, 1, -1.0);
    add(&step, 1, 3, 0);
    add(&step, 3, 2, 0);
    add(&other, 1, 1, 0);
    add(&other, 2, 4, 0);
    add(&other, 3, 2, 0);
    cr_expect_eq(nd_calls_difference(&timed, &step, &other, false), 2 * 0.5 - 4 * 0.25);
    cr_expect_eq(nd_calls_difference(&timed, &step, &other, true), 2 * 0.5);
    add(&other, 3, 1, 0);
    cr_expect(isnan(nd_calls_difference(&timed, &step, &other, false)), "one has no time");
    nd_calls_free(&timed);
    nd_calls_free(&step);
    nd_calls_free(&other);
}

Test(timing, a_linear_on_the_cpu)
{
    nd_config config;
    nd_rank rank = {.world_size = 1, .mesh = {{1, 1, 1, 1, 1}}, .config = &config};
    nd_linear_times times;
    double bytes = 0;
    nd_timing ask = {
        .rank = &rank, .repeats = 2, .stop = goes_on, .room = has_room, .context = &bytes};
    cr_assert_eq(nd_config_init(&config), ND_OK);
    cr_assert_eq(nd_device_open_cpu(1, &rank.device), ND_OK);
    cr_assert_eq(nd_ops_cpu(rank.device, &rank.ops), ND_OK, "%s", nd_error_last()->message);
    cr_assert_eq(rank.device->table->stream_init(rank.device, &rank.stream), ND_OK);
    const nd_linear_extents size = {64, 48, 32};
    cr_assert_eq(nd_time_linear(&ask, recipes, RECIPES, size, &times), ND_OK, "%s",
                 nd_error_last()->message);
    cr_expect(times.bf16 > 0 && times.bf16 < 60, "%g", times.bf16);
    for (int i = 0; i < RECIPES; i++) {
        cr_expect(times.fp8[i] > 0 && times.fp8[i] < 60, "recipe %d: %g", i, times.fp8[i]);
    }
    cr_expect_eq(nd_linear_flops(size), 6.0 * 64 * 48 * 32);
    cr_expect_geq(bytes, 64 * 48 * 2 + 32 * 48 * 2 + 64 * 32 * 2);
    cr_expect_eq(nd_time_linear(&ask, recipes, RECIPES, (nd_linear_extents){64, 40, 32}, &times),
                 ND_ERR_CONFIG, "16 does not divide 40");
    cr_expect_not(times.stopped);
    ask.stop = stops;
    cr_expect_eq(nd_time_linear(&ask, recipes, RECIPES, size, &times), ND_OK);
    cr_expect(times.stopped);
    ask.room = has_no_room;
    cr_expect_eq(nd_time_linear(&ask, recipes, RECIPES, size, &times), ND_ERR_RESOURCE,
                 "there was no room");
    bool cut_short = false;
    nd_calls calls = {.weight = 1};
    const nd_call_matrix f32 = {16, 16, 16, 2, ND_DTYPE_F32, 256},
                         bf16 = {16, 16, 16, 2, ND_DTYPE_BF16, 256};
    const nd_call cast = {.kind = ND_CALL_CAST, .c = bf16, .a = f32};
    cr_assert_eq(nd_calls_add(&calls, &cast), ND_OK);
    cr_assert_eq(nd_calls_time(&rank, &calls, 1e18, &cut_short), ND_OK);
    cr_expect(!cut_short && calls.entries[0].seconds >= 0);
    cr_assert_eq(nd_calls_time(&rank, &calls, 0, &cut_short), ND_OK);
    cr_expect(cut_short && calls.entries[0].seconds < 0, "there was no time for it");
    nd_calls_free(&calls);
    rank.device->table->stream_fini(&rank.stream);
    nd_device_close(rank.device);
    nd_config_fini(&config);
}

static nd_status time_layers(nd_rank *rank, void *context)
{
    double bytes = 0;
    nd_timing timing = {
        .rank = rank, .repeats = 2, .stop = goes_on, .room = has_room, .context = &bytes};
    nd_layer_times times;
    ND_TRY(nd_time_layer(&timing, &times));
    ND_CHECK(times.forward > 0 && times.backward > 0 && !times.stopped, "%g and %g seconds",
             times.forward, times.backward);
    ND_CHECK(bytes > 0, "the plan has %g bytes", bytes);
    timing.stop = rank->rank == 1 ? stops : goes_on; /* one of them, and all stop */
    ND_TRY(nd_time_layer(&timing, &times));
    ND_CHECK(times.stopped, "rank 1 was asked to stop");
    timing.room = has_no_room;
    ND_CHECK(nd_time_layer(&timing, &times) == ND_ERR_RESOURCE, "there was no room");
    return ND_OK;
}

Test(timing, a_layer_of_a_mesh)
{
    for (int fp8 = 0; fp8 < 2; fp8++) {
        mesh_ranks job = mesh_ranks_of((nd_mesh){{1, 1, 2, 1, 2}}, 1, false, time_layers, NULL);
        job.shape.rms_eps = 1e-5;
        job.shape.family = fp8 ? ND_FAMILY_GEMMA3_TEXT : ND_FAMILY_LLAMA;
        job.shape.qk_norm = fp8;
        job.shape.post_norm = fp8 ? 2 : 0;
        job.config.train.precision = fp8 ? ND_PRECISION_FP8 : ND_PRECISION_BF16;
        expect_ranks(&job, "fp8 %d", fp8);
    }
}

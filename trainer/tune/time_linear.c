// SPDX-License-Identifier: Apache-2.0
#include "trainer/tune/timing.h"

#include <math.h>

#include "trainer/tune/measure.h"

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

typedef struct timing {
    nd_config config;
    nd_rank rank; /* alone in the world, with this configuration */
    nd_calls bf16, fp8[ND_FP8_RECIPE_COUNT], all;
} timing;

static void fini(timing *t)
{
    nd_calls_free(&t->bf16);
    nd_calls_free(&t->all);
    for (int i = 0; i < ND_FP8_RECIPE_COUNT; i++) {
        nd_calls_free(&t->fp8[i]);
    }
}

static void init(timing *t, const nd_rank *rank, nd_linear_extents e)
{
    static char everything[] = "*";
    *t = (timing){.config = *rank->config, .rank = *rank};
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

static nd_status list_calls(timing *t, const nd_fp8_recipe *recipes, int count)
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
static bool counts(const timing *t, const nd_call *call, int recipes)
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

static nd_status time_calls(timing *t, const nd_linear_timing *ask, bool *stopped)
{
    nd_bench bench;
    nd_status status = ND_OK;
    ND_TRY(ask->room(ask->context, (double)nd_bench_bytes(&t->rank, &t->all)));
    ND_TRY(nd_bench_open(&bench, &t->rank, &t->all));
    for (int i = 0; i < t->all.count; i++) {
        t->all.entries[i].seconds = -1.0;
    }
    for (int round = 0; round < ask->rounds; round++) {
        for (int i = 0; i < t->all.count && status == ND_OK && !*stopped; i++) {
            nd_call_entry *entry = &t->all.entries[i];
            double seconds = 0.0;
            *stopped = ask->stop();
            if (!*stopped && counts(t, &entry->call, ask->recipe_count)) {
                status = nd_bench_time(&bench, &entry->call, &seconds);
                entry->seconds = entry->seconds < 0.0 ? seconds : fmin(entry->seconds, seconds);
            }
        }
    }
    nd_bench_close(&bench);
    return status;
}

nd_status nd_time_linear(const nd_linear_timing *ask, nd_linear_extents e, nd_linear_times *out)
{
    const int count = ask->recipe_count;
    timing t;
    nd_status status = ND_OK;
    ND_ASSERT(count > 0 && count <= ND_FP8_RECIPE_COUNT && ask->rounds > 0);
    if (e.m % 16 != 0 || e.k % 16 != 0 || e.n % 16 != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "a linear of %lld x %lld x %lld cannot run in FP8, which needs multiples of "
                       "16 in each of the three",
                       (long long)e.m, (long long)e.k, (long long)e.n);
    }
    init(&t, ask->rank, e);
    ND_TRY_OUT(list_calls(&t, ask->recipes, count));
    out->stopped = false;
    ND_TRY_OUT(time_calls(&t, ask, &out->stopped));
    if (out->stopped) {
        goto out;
    }
    out->bf16 = nd_calls_difference(&t.all, &t.bf16, &t.fp8[0], true);
    for (int i = 0; i < count; i++) {
        out->fp8[i] = out->bf16 + nd_calls_difference(&t.all, &t.fp8[i], &t.bf16, false);
    }
out:
    fini(&t);
    return status;
}

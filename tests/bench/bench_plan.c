// SPDX-License-Identifier: Apache-2.0
/*
 * nd_bench_plan: what the plan of a save costs one rank of Llama 3.1 405B on 16,384 ranks
 * (dp_replicate 16, dp_shard 128, tp 8). Prints one JSON line: seconds of CPU time for the layout
 * and the plan, the bytes by which they made the process grow at most, and the bytes that the rank
 * would write.
 */
#include <stdio.h>

#include "tests/bench/measure.h"
#include "trainer/checkpoint/shard.h"

enum { RANK = 16383 };

static const nd_shape llama_405b = {.vocab = 128256,
                                    .hidden = 16384,
                                    .ffn = 53248,
                                    .layers = 126,
                                    .heads = 128,
                                    .kv_heads = 8,
                                    .head_dim = 128};

/* The most memory that this program has occupied; getrusage would count that of its parent too. */
static long peak_bytes(void)
{
    char line[256];
    long kib = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) {
        sscanf(line, "VmHWM: %ld", &kib);
    }
    if (status) {
        fclose(status);
    }
    return kib * 1024;
}

static nd_status plan_rank(nd_layout **layout, nd_shard_plan *plan)
{
    const nd_mesh mesh = {{1, 16, 128, 1, 8}};
    const nd_layout_options options = {
        .shape = &llama_405b, .mesh = &mesh, .coord = nd_mesh_coord_of(&mesh, RANK)};
    ND_TRY(nd_layout_create(&options, layout));
    const nd_shard_plan_options of = {
        .layout = *layout, .mesh = &mesh, .rank = RANK, .arrays = ND_STATE_KINDS};
    return nd_shard_plan_init(plan, &of);
}

int main(void)
{
    nd_layout *layout = NULL;
    nd_shard_plan plan = {0};
    const long before = peak_bytes();
    const double begin = nd_bench_cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
    nd_status status = plan_rank(&layout, &plan);
    const double seconds = nd_bench_cpu_seconds(CLOCK_PROCESS_CPUTIME_ID) - begin;
    if (status != ND_OK) {
        fprintf(stderr, "nd_bench_plan: %s\n", nd_error_last()->message);
        return 1;
    }
    printf("{\"plan_seconds\": %.6f, \"plan_peak_bytes\": %ld, \"rank_bytes\": %llu}\n", seconds,
           peak_bytes() - before, (unsigned long long)plan.bytes);
    nd_shard_plan_fini(&plan);
    nd_layout_destroy(layout);
    return 0;
}

// SPDX-License-Identifier: Apache-2.0
/* Bytes on the wire of one step, of each kind and rank: equal to formulas of shapes and mesh. */
#include <criterion/criterion.h>

#include "tests/parity/fp8_job.h"
#include "trainer/report/report.h"
#include "trainer/step/step.h"

enum { MAX_RANKS = 8 };

typedef struct traffic_of_rank {
    int64_t got[ND_TRAFFIC_COUNT], wanted[ND_TRAFFIC_COUNT];
} traffic_of_rank;

typedef struct wire_case {
    mesh_case mesh;
    int accumulation; /* micro-batches a step */
    traffic_of_rank ranks[MAX_RANKS];
} wire_case;

static tempdir dir;

TEMPDIR_SUITE(wire, tempdir_leave_empty, .timeout = 240);

/* A gather of a unit's weights: a rank sends its shard to each other member, in codes where the
 * FP8 segment is gathered so, else in BF16. */
static int64_t weight_bytes(const nd_layout *layout, int unit)
{
    const nd_segment *s = layout->units[unit].segments;
    return (s[ND_SEGMENT_HP].shard_count * 2 + s[ND_SEGMENT_FP8].shard_count) *
           (layout->shards - 1);
}

/*
 * Embedding and tail stay from their first use to the end of the step, and with ZeRO-2 so do the
 * blocks. With ZeRO-3 two blocks are there at a time: the last two when backward begins, the first
 * two when the next micro-batch does; every other pass over a block gathers it.
 */
static int64_t weights_wanted(const nd_layout *layout, const wire_case *w)
{
    int64_t bytes = 0;
    for (int u = 0; u < layout->unit_count; u++) {
        int64_t layer = layout->units[u].layer;
        int gathers = 1;
        if (layer >= 0 && !w->mesh.zero2) {
            gathers = 2 * w->accumulation - (layer >= FP8_LAYERS - 2 ? w->accumulation : 0) -
                      (layer < 2 ? w->accumulation - 1 : 0);
        }
        bytes += weight_bytes(layout, u) * gathers;
    }
    return bytes;
}

/* Reduce-scattered in F32 at each micro-batch; over dp_replicate reduced once a step: a rank sends
 * each other member its slice, and the sum of its own slice to each. */
static int64_t gradients_wanted(const nd_layout *layout, const wire_case *w)
{
    int64_t bytes = 0;
    for (int u = 0; u < layout->unit_count; u++) {
        for (int k = 0; k < ND_SEGMENT_COUNT; k++) {
            int64_t shard = layout->units[u].segments[k].shard_count * 4;
            bytes += shard * (layout->shards - 1) * w->accumulation +
                     2 * (w->mesh.dp_replicate - 1) * (shard / w->mesh.dp_replicate);
        }
    }
    return bytes;
}

/*
 * Over tp, of (Tl, C) elements a rank: a layer gathers its two norm outputs forward, and backward
 * these and the gradients of its two outputs, in codes where one scale holds for a tensor; it
 * reduce-scatters four times in BF16. Embedding and the head's chunk have their own, in BF16, as
 * has layer 0's first input, whose q is a BF16 linear.
 */
static int64_t activations_wanted(const nd_trainer *t, const wire_case *w)
{
    const nd_dims *d = &t->model->dims;
    const nd_recipe *recipe = &t->model->scales.recipe;
    int64_t width = recipe->name && nd_recipe_is_per_tensor(recipe) ? 1 : 2;
    int64_t gathers = 6 * FP8_LAYERS * width + (width == 1 ? 2 : 0);
    return d->Tl * d->C * (w->mesh.tp - 1) * (gathers + 4 * FP8_LAYERS * 2 + 4 * 2) *
           w->accumulation;
}

/*
 * Over cp, of (T, 2 K D) keys and values a rank and layer. All-gather: to each other member in
 * BF16, forward and backward, and their gradients in F32. Ring: a hop to each but the last, forward
 * and backward, and gradients all the way round. Ulysses, in BF16: q, k, v and the output forward,
 * these again, the output's gradient and those of q, k and v backward; a KV head goes to each rank
 * that has it. Recompute full runs the forward twice, all_but_attention does not.
 */
static int64_t keys_values_wanted(const nd_dims *d, const wire_case *w)
{
    if (w->mesh.ulysses > 1) {
        const int64_t u = w->mesh.ulysses, K = d->K < u ? u : d->K;
        const int64_t again = w->mesh.recompute == ND_RECOMPUTE_FULL;
        const int64_t heads = (1 + again) * (2 * d->H + 2 * K) + 4 * d->H + 4 * K;
        return d->T * heads * d->D * 2 * (u - 1) / u * FP8_LAYERS * w->accumulation;
    }
    int64_t others = w->mesh.cp - 1, elements = d->T * 2 * d->K * d->D;
    int64_t forward = others * 2, gradients = (w->mesh.ring && others ? w->mesh.cp : others) * 4;
    int64_t passes = w->mesh.recompute == ND_RECOMPUTE_FULL ? 3 : 2;
    return elements * (forward * passes + gradients) * FP8_LAYERS * w->accumulation;
}

static nd_status count_traffic(void *context, nd_trainer *t)
{
    wire_case *w = context;
    traffic_of_rank *out = &w->ranks[t->rank->rank];
    const nd_layout *layout = t->model->layout;
    nd_traffic_bytes(&t->rank->groups, out->got);
    out->wanted[ND_TRAFFIC_WEIGHTS] = weights_wanted(layout, w);
    out->wanted[ND_TRAFFIC_GRADIENTS] = gradients_wanted(layout, w);
    out->wanted[ND_TRAFFIC_ACTIVATIONS] = activations_wanted(t, w);
    out->wanted[ND_TRAFFIC_KEYS_VALUES] = keys_values_wanted(&t->model->dims, w);
    return ND_OK;
}

static void check(const wire_case *w, nd_precision precision, nd_fp8_recipe recipe, bool all_gather)
{
    wire_case seen = *w;
    const mesh_case *mesh = &seen.mesh;
    mesh_job job = fp8_job(&dir, recipe, all_gather);
    job.precision = precision;
    job.global_batch = mesh->dp_replicate * mesh->dp_shard * w->accumulation;
    job.observe = count_traffic;
    job.context = &seen;
    mesh_trained(&job, mesh);
    for (int r = 0; r < mesh->dp_replicate * mesh->dp_shard * mesh->cp * mesh->tp; r++) {
        for (int k = 0; k < ND_TRAFFIC_OTHER; k++) {
            const traffic_of_rank *rank = &seen.ranks[r];
            cr_expect_eq(rank->got[k], rank->wanted[k], "%s, rank %d, %s: %ld, %ld wanted",
                         mesh->name, r, nd_traffic_name((nd_traffic_kind)k), (long)rank->got[k],
                         (long)rank->wanted[k]);
        }
    }
}

Test(wire, of_each_precision)
{
    static const wire_case fsdp = {{"fsdp 4", 1, 4, 1, 1, 1}, 1};
    static const wire_case both = {{"fsdp 2 x tp 2", 1, 2, 1, 2, 1}, 1};
    check(&fsdp, ND_PRECISION_FP8, ND_FP8_TENSORWISE, true);
    check(&fsdp, ND_PRECISION_FP8, ND_FP8_TENSORWISE, false);
    check(&both, ND_PRECISION_FP8, ND_FP8_TENSORWISE, true);
    check(&both, ND_PRECISION_FP8, ND_FP8_DELAYED, true);
    check(&both, ND_PRECISION_FP8, ND_FP8_ROWWISE, false);
    check(&both, ND_PRECISION_BF16, ND_FP8_TENSORWISE, false);
}

Test(wire, of_each_mesh)
{
    static const wire_case cases[] = {
        {{"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1}, 1},
        {{"hsdp 2 x 2, two micro-batches", 2, 2, 1, 1, 1}, 2},
        {{"fsdp 2, zero-2, three micro-batches", 1, 2, 1, 1, 1, .zero2 = true}, 3},
        {{"fsdp 2 x cp 2", 1, 2, 2, 1, 1}, 1},
        {{"cp 4 as a ring", 1, 1, 4, 1, 1, .ring = true}, 1},
        {{"cp 4 with ulysses", 1, 1, 4, 1, 1, .ulysses = 4}, 1},
        {{"fsdp 2 x cp 2 with ulysses, full recompute", 1, 2, 2, 1, 1, .ulysses = 2,
          .recompute = ND_RECOMPUTE_FULL},
         1},
        {{"cp 2 x tp 2, two micro-batches", 1, 1, 2, 2, 1}, 2},
        {{"fsdp 2 x cp 2, full recompute", 1, 2, 2, 1, 1, .recompute = ND_RECOMPUTE_FULL}, 1},
        {{"fsdp 2 x cp 2, recompute of all but attention", 1, 2, 2, 1, 1,
          .recompute = ND_RECOMPUTE_ALL_BUT_ATTENTION},
         1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check(&cases[i], ND_PRECISION_FP8, ND_FP8_TENSORWISE, true);
        check(&cases[i], ND_PRECISION_FP8, ND_FP8_DELAYED, false);
    }
}

// SPDX-License-Identifier: Apache-2.0
/* FSDP on ranks that are threads: gathered units, their buffers, prefetches, summed gradients. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "runtime/tensor/fp8.h"
#include "tests/unit/trainer/mesh_ranks.h"

enum { LAYERS = 5, MICROS = 3 }; /* layers: more than the two buffers that blocks share */

/* Blocks of different sizes: the largest HP segment is that of layer 3, which stays in BF16, the
 * largest FP8 segment that of layer 2. */
static const char uneven[] = "layers.0.mlp,layers.1.self_attn,layers.2.,layers.4.mlp.gate_proj";

typedef struct fsdp_case {
    nd_mesh mesh; /* pp, dp_replicate, dp_shard, cp, tp */
    nd_precision precision;
    bool zero2, tied, shares, sgd;
    int64_t micros, vocab; /* 0: mesh_ranks_of's */
} fsdp_case;

static mesh_ranks job_of(const fsdp_case *c)
{
    mesh_ranks job = mesh_ranks_of(c->mesh, LAYERS, c->tied, NULL, c);
    job.config.train.precision = c->precision;
    job.config.train.gradient_accumulation_steps = nd_max(c->micros, 1);
    job.config.optimizer.name = c->sgd ? ND_OPTIMIZER_SGD : ND_OPTIMIZER_ADAMW;
    job.shape.vocab = c->vocab > 0 ? c->vocab : job.shape.vocab;
    job.config.parallel.reshard_after_forward = !c->zero2;
    job.config.fp8.all_gather = true;
    job.config.fp8.filter = (char *)uneven;
    return job;
}

/* Runs `body` on every mesh, precision and kind of head, and, for weights, way of resharding. */
static void on_every_case(nd_status (*body)(nd_rank *, void *), bool weights,
                          const nd_precision *precisions, int precision_count)
{
    static const nd_mesh meshes[] = {{{1, 1, 1, 1, 1}}, {{1, 1, 2, 1, 1}}, {{1, 1, 3, 1, 1}},
                                     {{1, 1, 1, 1, 2}}, {{1, 1, 2, 1, 2}}, {{1, 1, 1, 2, 2}},
                                     {{1, 2, 3, 1, 1}}};
    for (size_t m = 0; m < sizeof meshes / sizeof *meshes; m++) {
        for (int variant = 0; variant < 8 * precision_count; variant++) {
            fsdp_case c = {meshes[m],   precisions[variant / 8],       variant & 1, variant & 2,
                           variant & 4, .micros = weights ? 1 : MICROS};
            mesh_ranks job = job_of(&c);
            const int shards = nd_mesh_group_size(&c.mesh, ND_GROUP_DP_SHARD_CP);
            if (weights ? c.shares && shards > 1 : c.zero2 || c.shares) {
                continue;
            }
            job.body = body;
            const int *n = c.mesh.size;
            expect_ranks(
                &job, "mesh %d %d %d %d %d, precision %d, zero-%d, tied %d, blocks share %d", n[0],
                n[1], n[2], n[3], n[4], (int)c.precision, c.zero2 ? 2 : 3, c.tied, c.shares);
        }
    }
}

/* A weight's scale is that of its largest element, wherever that lies. */
static nd_status check_scale(const mesh_shards *s, const nd_param *p, uint64_t seed, float *scale)
{
    float amax = 0.0f;
    for (int64_t e = 0; e < p->rows * p->cols; e++) {
        amax = fmaxf(amax, fabsf(mesh_param_value(seed, p, e)));
    }
    const int linear = nd_linear_of_param(p->id);
    *scale = *nd_scales_at(&s->scales, nd_site_weight(&s->scales, p->layer, linear)).scale;
    ND_CHECK(*scale == 448.0f / amax, "%s: scale %g, largest element %g", p->name, (double)*scale,
             (double)amax);
    return ND_OK;
}

/* The local block of a parameter, element by element; rows that pad a vocabulary are not
 * compared. */
static nd_status check_param(const mesh_shards *s, const nd_param *p, uint64_t seed)
{
    bool fp8 = p->segment == ND_SEGMENT_FP8;
    nd_tensor w = fp8 ? nd_fsdp_codes(&s->fsdp, p->id, p->layer)
                      : nd_fsdp_weight(&s->fsdp, p->id, p->id, p->layer);
    float scale = 1.0f;
    ND_CHECK(nd_tensor_count(w) == p->local_rows * p->local_cols, "%s has %lld elements", p->name,
             (long long)nd_tensor_count(w));
    ND_TRY(fp8 ? check_scale(s, p, seed, &scale) : ND_OK);
    for (int64_t i = 0; i < p->local_rows && p->row_begin + i < p->rows; i++) {
        for (int64_t j = 0; j < p->local_cols; j++) {
            int64_t local = i * p->local_cols + j;
            float expected =
                mesh_param_value(seed, p, (p->row_begin + i) * p->cols + p->col_begin + j);
            float found = fp8 ? ((const uint8_t *)w.data)[local] : mesh_get(w, 0, local);
            expected = fp8 ? nd_fp8_from_f32(ND_DTYPE_F8_E4M3, expected * scale) : expected;
            ND_CHECK(found == expected,
                     "%s: row %lld, column %lld of the local block is %g, not %g", p->name,
                     (long long)i, (long long)j, (double)found, (double)expected);
        }
    }
    return ND_OK;
}

static nd_status check_unit(const mesh_shards *s, const nd_unit *unit, uint64_t seed)
{
    for (int i = 0; i < unit->param_count; i++) {
        ND_TRY(check_param(s, &s->layout->params[unit->first_param + i], seed));
    }
    return ND_OK;
}

static const nd_unit *block(const mesh_shards *s, int64_t layer)
{
    return nd_layout_unit(s->layout, ND_UNIT_BLOCK, layer);
}

/* The blocks in an order, each with the one before it still there. */
static nd_status walk(mesh_shards *s, bool backward, uint64_t seed)
{
    const nd_unit *before = NULL;
    for (int64_t i = 0; i < LAYERS; i++) {
        const nd_unit *unit = block(s, backward ? LAYERS - 1 - i : i);
        ND_TRY(nd_fsdp_prefetch(&s->fsdp, unit));
        ND_TRY(nd_fsdp_acquire(&s->fsdp, unit));
        ND_TRY(check_unit(s, unit, seed));
        if (before) {
            ND_TRY(check_unit(s, before, seed));
            nd_fsdp_release(&s->fsdp, before);
        }
        before = unit;
    }
    nd_fsdp_release(&s->fsdp, before);
    return ND_OK;
}

/* Embedding and head are held around the blocks. */
static nd_status check_all(mesh_shards *s, uint64_t seed)
{
    nd_fsdp *fsdp = &s->fsdp;
    const nd_unit *ends[2] = {nd_layout_unit(s->layout, ND_UNIT_HEAD, -1),
                              nd_layout_unit(s->layout, ND_UNIT_EMBEDDING, -1)};
    ND_TRY(mesh_fill(s->layout, seed, fsdp->master));
    nd_fsdp_weights_changed(fsdp);
    ND_TRY(nd_scales_refresh(&s->scales, fsdp->master, fsdp->version));
    for (int i = 0; i < 2 && ends[i]; i++) {
        ND_TRY(nd_fsdp_acquire(fsdp, ends[i]));
    }
    ND_TRY(walk(s, false, seed));
    ND_TRY(walk(s, true, seed));
    for (int i = 0; i < 2 && ends[i]; i++) {
        ND_TRY(check_unit(s, ends[i], seed));
        nd_fsdp_release(fsdp, ends[i]);
    }
    return ND_OK;
}

static nd_status gather_body(nd_rank *rank, void *context)
{
    const fsdp_case *c = context;
    mesh_shards *s;
    ND_TRY(mesh_shards_open(rank, c->shares, &s));
    if (s->fsdp.resident) { /* by these bytes a trainer decides whether blocks share buffers */
        const size_t planned = nd_memplan_class_bytes(s->plan, ND_MEM_WEIGHTS);
        ND_CHECK(nd_fsdp_own_bytes(&s->fsdp) == planned,
                 "%zu bytes of own buffers, %zu are planned", nd_fsdp_own_bytes(&s->fsdp), planned);
    }
    ND_TRY(check_all(s, 1));
    return check_all(s, 2); /* other weights */
}

Test(fsdp, gathered_units_are_the_parameters_that_were_sharded)
{
    static const nd_precision precisions[] = {ND_PRECISION_BF16, ND_PRECISION_FP32,
                                              ND_PRECISION_FP8};
    on_every_case(gather_body, true, precisions, 3);
}

/* The plan of one of the ranks that shard, without memory. */
typedef struct planned {
    mesh_ranks job;
    nd_rank rank;
    nd_layout *layout;
    nd_fsdp fsdp;
    nd_memplan plan;
} planned;

/* stage NULL: the whole model. */
static void open_planned(planned *p, const fsdp_case *c, const nd_stage *stage, bool forward_only)
{
    p->job = job_of(c);
    p->rank = (nd_rank){.world_size = c->mesh.size[ND_AXIS_DP_SHARD],
                        .mesh = p->job.mesh,
                        .config = &p->job.config,
                        .shape = p->job.shape};
    const nd_layout_options options = {.shape = &p->job.shape,
                                       .mesh = &p->job.mesh,
                                       .stages = stage,
                                       .stage_count = stage != NULL};
    nd_memplan_init(&p->plan);
    cr_assert_eq(nd_layout_create(&options, &p->layout), ND_OK);
    cr_assert_eq(nd_fsdp_init(&p->fsdp, &p->rank, p->layout, NULL, forward_only, &p->plan), ND_OK);
}

static void close_planned(planned *p)
{
    nd_fsdp_fini(&p->fsdp);
    nd_memplan_fini(&p->plan);
    nd_layout_destroy(p->layout);
}

/* The gradients that a stage plans outside of blocks have the size of its ends, not of its first
 * unit. */
Test(fsdp, a_stage_without_an_end_plans_no_gradient_for_it)
{
    static const nd_stage stages[] = {
        {{0, 1}, true, false}, {{1, 3}, false, false}, {{3, LAYERS}, false, true}};
    static const nd_unit_kind ends[] = {ND_UNIT_EMBEDDING, ND_UNIT_BLOCK, ND_UNIT_HEAD};
    const fsdp_case c = {.mesh = {{1, 1, 2, 1, 1}}};
    for (int i = 0; i < 3; i++) {
        planned p;
        size_t found = 0;
        open_planned(&p, &c, &stages[i], false);
        const nd_unit *end = nd_layout_unit(p.layout, ends[i], -1);
        for (int b = 0; b < p.plan.count; b++) {
            bool edges =
                strcmp(p.plan.buffers[b].name, "gradients of embedding, norm and head") == 0;
            found = edges ? p.plan.buffers[b].bytes : found;
        }
        size_t expected = end ? (size_t)end->segments[ND_SEGMENT_HP].count * sizeof(float) : 0;
        cr_expect_eq(found, expected, "stage %d plans %zu bytes, not %zu", i, found, expected);
        close_planned(&p);
    }
}

/* Prefetches. */

static int64_t gathers(const mesh_shards *s)
{
    return mesh_calls(s->rank, ND_GROUP_DP_SHARD_CP, ND_COMM_ALL_GATHER);
}

typedef enum fsdp_call { PREFETCH, ACQUIRE, RELEASE, CHANGE } fsdp_call;

typedef struct script_line {
    fsdp_call call;
    int64_t layer;
    int gathers; /* all-gathers that the call begins */
} script_line;

static nd_status play(mesh_shards *s, const script_line *script, int count)
{
    for (int i = 0; i < count; i++) {
        const script_line *line = &script[i];
        const nd_unit *unit = line->layer < 0 ? NULL : block(s, line->layer);
        int64_t before = gathers(s);
        switch (line->call) {
        case PREFETCH:
            ND_TRY(nd_fsdp_prefetch(&s->fsdp, unit));
            break;
        case ACQUIRE:
            ND_TRY(nd_fsdp_acquire(&s->fsdp, unit));
            ND_TRY(check_unit(s, unit, 1));
            break;
        case RELEASE:
            ND_TRY(check_unit(s, unit, 1));
            nd_fsdp_release(&s->fsdp, unit);
            break;
        case CHANGE:
            nd_fsdp_weights_changed(&s->fsdp);
            break;
        }
        ND_CHECK(gathers(s) - before == line->gathers, "line %d began %lld gathers, not %d", i,
                 (long long)(gathers(s) - before), line->gathers);
    }
    return ND_OK;
}

static const script_line shared_buffers[] = {
    {PREFETCH, 0, 1}, {PREFETCH, 0, 0},                   /* it is on its way */
    {ACQUIRE, 0, 0},  {PREFETCH, 1, 1},                   /* one ahead */
    {PREFETCH, 2, 0},                                     /* 0 holds its buffer */
    {RELEASE, 0, 0},  {PREFETCH, 2, 1}, {PREFETCH, 3, 0}, /* 1 is on its way there */
    {ACQUIRE, 1, 0},  {PREFETCH, 3, 0}, {RELEASE, 1, 0},
    {ACQUIRE, 2, 0},  {ACQUIRE, 3, 1}, /* without prefetch */
    {RELEASE, 2, 0},  {RELEASE, 3, 0},  {PREFETCH, -1, 0},
    {ACQUIRE, 3, 0},  {RELEASE, 3, 0}, /* both are there still */
    {ACQUIRE, 2, 0},  {RELEASE, 2, 0},  {CHANGE, 0, 0},
    {ACQUIRE, 2, 1},  {RELEASE, 2, 0},
};

static const script_line own_buffers[] = {
    {PREFETCH, 0, 1}, {ACQUIRE, 0, 0}, {PREFETCH, 1, 1}, {PREFETCH, 2, 1}, /* none is in its way */
    {RELEASE, 0, 0},  {ACQUIRE, 1, 0}, {RELEASE, 1, 0},  {ACQUIRE, 2, 0},
    {RELEASE, 2, 0},  {ACQUIRE, 0, 0}, {RELEASE, 0, 0}, /* once for all micro-batches of a step */
    {CHANGE, 0, 0},   {ACQUIRE, 0, 1}, {RELEASE, 0, 0},
};

static nd_status prefetch_body(nd_rank *rank, void *context)
{
    const fsdp_case *c = context;
    mesh_shards *s;
    ND_TRY(mesh_shards_open(rank, false, &s));
    ND_TRY(mesh_fill(s->layout, 1, s->fsdp.master));
    return c->zero2
               ? play(s, own_buffers, (int)(sizeof own_buffers / sizeof *own_buffers))
               : play(s, shared_buffers, (int)(sizeof shared_buffers / sizeof *shared_buffers));
}

Test(fsdp, a_unit_is_gathered_once_and_only_into_a_free_buffer)
{
    for (int zero2 = 0; zero2 < 2; zero2++) {
        fsdp_case c = {.mesh = {{1, 1, 2, 1, 1}}, .zero2 = zero2};
        mesh_ranks job = job_of(&c);
        job.body = prefetch_body;
        expect_ranks(&job, "zero2 %d", zero2);
    }
}

/* Gradients. */

static uint64_t gradient_seed(uint64_t step, int replica, int member, int micro, bool lookup)
{
    return ((((step * 2 + (uint64_t)replica) * 8 + (uint64_t)member) * MICROS + (uint64_t)micro) *
                2 +
            lookup);
}

typedef struct gradient_pass {
    mesh_shards *s;
    uint64_t step;
    int replica, member, micro;
} gradient_pass;

/* Adds to a parameter's local gradient, or overwrites it. Rows that pad a vocabulary get 0. */
static void put_gradient(const gradient_pass *g, const nd_param *p, bool lookup, bool overwrite)
{
    uint64_t seed = gradient_seed(g->step, g->replica, g->member, g->micro, lookup);
    float *grad = nd_fsdp_grad(&g->s->fsdp, p->id, p->id, p->layer).data;
    for (int64_t i = 0; i < p->local_rows * p->local_cols; i++) {
        int64_t row = p->row_begin + i / p->local_cols;
        int64_t element = row * p->cols + p->col_begin + i % p->local_cols;
        float value = row < p->rows ? mesh_param_value(seed, p, element) : 0.0f;
        grad[i] = overwrite ? value : grad[i] + value;
    }
}

/* As the model does: products overwrite a fresh gradient, sums start at zero. */
static nd_status write_unit(const gradient_pass *g, const nd_unit *unit)
{
    nd_fsdp *fsdp = &g->s->fsdp;
    for (int i = 0; i < unit->param_count; i++) {
        const nd_param *p = &g->s->layout->params[unit->first_param + i];
        bool sums = p->axes == 1 || unit->kind == ND_UNIT_EMBEDDING;
        if (sums) {
            ND_TRY(nd_fsdp_grad_zero_if_fresh(fsdp, p->id, p->layer));
        }
        put_gradient(g, p, false, !sums && nd_fsdp_grad_beta(fsdp, unit) == 0.0f);
    }
    return ND_OK;
}

static void poison_unit(const gradient_pass *g, const nd_unit *unit)
{
    for (int i = 0; i < unit->param_count; i++) {
        const nd_param *p = &g->s->layout->params[unit->first_param + i];
        float *grad = nd_fsdp_grad(&g->s->fsdp, p->id, p->id, p->layer).data;
        for (int64_t e = 0; e < p->local_rows * p->local_cols; e++) {
            grad[e] = NAN;
        }
    }
}

static nd_status begin_unit(const gradient_pass *g, const nd_unit *unit)
{
    ND_TRY(nd_fsdp_grad_acquire(&g->s->fsdp, unit));
    if (g->s->layout->shards > 1) { /* what an earlier unit left */
        poison_unit(g, unit);
    }
    return write_unit(g, unit);
}

/* One backward: head, blocks in reverse, embedding. A tied table's gradient is completed last. */
static nd_status micro_batch(const gradient_pass *g)
{
    nd_fsdp *fsdp = &g->s->fsdp;
    const nd_layout *layout = g->s->layout;
    const nd_unit *head = nd_layout_unit(layout, ND_UNIT_HEAD, -1);
    const nd_param *table = nd_layout_param(layout, ND_PARAM_EMBED, -1);
    ND_TRY(begin_unit(g, head));
    if (!layout->tied) {
        ND_TRY(nd_fsdp_grad_release(fsdp, head));
    }
    for (int64_t l = LAYERS - 1; l >= 0; l--) {
        ND_TRY(begin_unit(g, block(g->s, l)));
        ND_TRY(nd_fsdp_grad_release(fsdp, block(g->s, l)));
    }
    if (!layout->tied) {
        ND_TRY(begin_unit(g, table->unit));
    }
    put_gradient(g, table, true, false);
    ND_TRY(nd_fsdp_grad_release(fsdp, table->unit));
    return nd_fsdp_grad_finish(fsdp);
}

/* The sum over the members of the shard group and over micro-batches. */
static nd_status check_sum(void *context, const nd_span *span)
{
    const gradient_pass *g = context;
    const nd_param *p = span->param;
    for (int64_t i = 0; i < span->rows * span->cols; i++) {
        int64_t e = nd_span_global(span, i);
        float found = g->s->fsdp.grad[span->begin + i], expected = 0.0f;
        for (int n = 0; n < g->s->layout->shards * MICROS * 2; n++) {
            bool lookup = n & 1;
            uint64_t seed =
                gradient_seed(g->step, g->replica, n / 2 / MICROS, n / 2 % MICROS, lookup);
            expected += !lookup || p->id == ND_PARAM_EMBED ? mesh_param_value(seed, p, e) : 0.0f;
        }
        ND_CHECK(found == expected, "step %d: gradient %lld of %s is %g, not %g", (int)g->step,
                 (long long)e, p->name, (double)found, (double)expected);
    }
    return ND_OK;
}

static nd_status gradient_body(nd_rank *rank, void *context)
{
    mesh_shards *s;
    ND_TRY(mesh_shards_open(rank, false, &s));
    gradient_pass g = {
        .s = s, .replica = rank->coord.at[ND_AXIS_DP_REPLICATE], .member = s->layout->shard_index};
    for (int64_t i = 0; i < s->layout->shard_total; i++) {
        s->fsdp.grad[i] = NAN;
    }
    for (g.step = 1; g.step <= 2; g.step++) {
        nd_fsdp_begin_step(&s->fsdp, 0);
        for (g.micro = 0; g.micro < MICROS; g.micro++) {
            ND_TRY(micro_batch(&g));
        }
        ND_TRY(mesh_each_span(s->layout, check_sum, &g));
    }
    return ND_OK;
}

Test(fsdp, gradients_add_over_ranks_and_micro_batches)
{
    static const nd_precision precisions[] = {ND_PRECISION_BF16, ND_PRECISION_FP8};
    on_every_case(gradient_body, false, precisions, 2);
}

/* Shards of weights and, to train, of gradients and of AdamW's two moments; gradients of two blocks
 * and of the larger end, and what later micro-batches reduce into. */
Test(fsdp, what_training_needs_is_planned_for_training_alone)
{
    static const struct {
        bool forward_only, sgd;
        int64_t micros, states, received;
    } cases[] = {{false, false, 1, 4, 0}, {false, true, 2, 2, 3}, {true, false, 2, 1, 0}};
    for (int i = 0; i < 3; i++) {
        const fsdp_case c = {
            {{1, 1, 2, 1, 1}}, ND_PRECISION_FP32, .sgd = cases[i].sgd, .micros = cases[i].micros};
        planned p;
        open_planned(&p, &c, NULL, cases[i].forward_only);
        const int64_t block = nd_layout_unit(p.layout, ND_UNIT_BLOCK, 0)->shard_count,
                      end = nd_layout_unit(p.layout, ND_UNIT_HEAD, -1)->shard_count,
                      gradients = 2 * (2 * block + end) + cases[i].received * nd_max(block, end);
        cr_expect_eq(nd_memplan_class_bytes(&p.plan, ND_MEM_STATE),
                     (size_t)(cases[i].states * p.layout->shard_total) * sizeof(float));
        cr_expect_eq(nd_memplan_class_bytes(&p.plan, ND_MEM_GRADIENTS),
                     cases[i].forward_only ? 0 : (size_t)gradients * sizeof(float), "case %d", i);
        close_planned(&p);
    }
}

/* In BF16 they are 2 bytes for each parameter, and each of two shards keeps its half beside the
 * blocks that are gathered; what is read is converted in pieces. */
Test(fsdp, forward_only_in_bf16_plans_no_master_weights)
{
    for (int i = 0; i < 3; i++) { /* the last one's ends are read in several pieces */
        const int shards = 1 + i % 2;
        const fsdp_case c = {
            {{1, 1, shards, 1, 1}}, ND_PRECISION_BF16, .vocab = i < 2 ? 0 : ND_FSDP_PIECE / 32 + 1};
        planned p;
        open_planned(&p, &c, NULL, true);
        cr_assert_eq(nd_fsdp_plan_weights(&p.fsdp, false, &p.plan), ND_OK);
        const nd_layout *layout = p.layout;
        const int64_t block = nd_layout_unit(layout, ND_UNIT_BLOCK, 0)->shard_count;
        const int64_t whole = layout->shard_total * shards;
        const int64_t gathered = shards == 1 ? whole : whole - (LAYERS - 2) * shards * block;
        const int64_t kept = shards == 1 ? 0 : LAYERS * block;
        int64_t most = 0;
        for (int u = 0; u < layout->unit_count; u++) {
            most = nd_max(most, layout->units[u].shard_count);
        }
        most = nd_min(most, ND_FSDP_PIECE);
        cr_expect_eq(nd_memplan_class_bytes(&p.plan, ND_MEM_STATE), 0);
        cr_expect_eq(nd_memplan_class_bytes(&p.plan, ND_MEM_WEIGHTS),
                     (size_t)(gathered + kept) * sizeof(nd_bf16), "%d shards", shards);
        cr_expect_eq(nd_memplan_class_bytes(&p.plan, ND_MEM_SCRATCH), (size_t)most * sizeof(float));
        close_planned(&p);
    }
}

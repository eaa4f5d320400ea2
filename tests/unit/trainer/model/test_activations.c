// SPDX-License-Identifier: Apache-2.0
/* The plan of a model has its tensors, by their shapes, and no more. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/unit/trainer/mesh_ranks.h"

/* A rank of tp 2, in F32. All heads of q and of k are normed as one, and norms are before and
 * behind the branches. Statistics of Tl tokens are 256 bytes, to which activations are padded. */
enum { T = 128, Tl = 64, L = 3, C = 32, F = 32, H = 2, K = 2, D = 16, QKV = 96, V = 49 };

/* These are numbers of floats. */
enum {
    LEAST = Tl * (3 * C + 2), /* a block's input, and its branches before the norms behind them */
    REST = Tl * (3 * C + 2) + T * (QKV + (H + K) * (D + 1) + H * D + H + 3 * F),
    OUTPUTS = 2 * Tl * C + T * F,         /* of the norms before the branches, and of SwiGLU */
    ATTENTION = Tl * C + T * (H * D + H), /* its output, and the residual stream behind it */
    DELAYED = 4 * Tl * C + T * QKV, /* gradients of outputs, until those of weights are made */
    /* A branch, q k around their norms with sums of both, gathered tokens, sums over tp. */
    SHARED = Tl * C + T * (H + K) * D + 2 * T + 2 * T * C,
    DELTA = T * H,
    BACKWARD = 2 * Tl * C + T * F + T * H * D, /* of the stream, a norm, SwiGLU, attention */
    AT_ONCE = Tl * C + T * QKV,                /* of a branch, of q k v, where none is delayed */
    SET = Tl * C + Tl,                         /* the last residual stream and its statistics */
    CHUNK = Tl * C + T * C + T * V + 4 * T + (int)sizeof(nd_step_numbers) / 4,
    TRAINS = SHARED + DELTA + BACKWARD + AT_ONCE,
    TRAINS_HEAD = SET + CHUNK + Tl * C + T * C
};

static const nd_kv_options cache = {.tokens = T, .slots = 5, .capacity = 64, .logits = 4};

static const struct {
    nd_model_options options;
    int64_t activations, scratch, head;
    nd_recompute recompute;
} cases[] = {
    {{0}, L *(LEAST + REST), TRAINS, TRAINS_HEAD},
    {{.sets = 2, .delays = true, .sources = 2},
     2 * L *(LEAST + REST + DELAYED),
     SHARED + DELTA + BACKWARD,
     2 * (SET + Tl * C) + CHUNK + T *C + 4 * 2},
    {{.forward_only = true}, 0, LEAST + REST + SHARED + DELTA, SET + CHUNK},
    {{.forward_only = true, .cache = &cache},
     0,
     LEAST + REST + SHARED,
     SET + Tl *C + 4 * (C + V + 2 * V)}, /* rows, their logits, those of both ranks */
    {{0}, L *(LEAST + REST - OUTPUTS), TRAINS + OUTPUTS, TRAINS_HEAD, ND_RECOMPUTE_SELECTIVE},
    {{0},
     L *(LEAST + ATTENTION),
     TRAINS + REST - ATTENTION,
     TRAINS_HEAD,
     ND_RECOMPUTE_ALL_BUT_ATTENTION},
    {{0}, L *LEAST, TRAINS + REST, TRAINS_HEAD, ND_RECOMPUTE_FULL},
};

/* Plans what rank 0 has of a model with these options. */
static void plan_model(const mesh_ranks *job, const nd_model_options *options, nd_memplan *plan)
{
    nd_rank rank = {.mesh = job->mesh, .config = &job->config, .shape = job->shape};
    nd_model *m = NULL;
    nd_memplan_init(plan);
    cr_assert_eq(nd_ops_ref(&rank.ops), ND_OK);
    cr_assert_eq(nd_model_create(&rank, options, plan, &m), ND_OK, "%s", nd_error_last()->message);
    nd_model_destroy(m);
}

Test(activations, a_plan_has_the_tensors_of_a_step)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mesh_ranks job = mesh_ranks_of((nd_mesh){{1, 1, 1, 1, 2}}, L, false, NULL, NULL);
        nd_memplan plan;
        int64_t found[ND_MEM_CLASS_COUNT] = {0};
        job.config.train.sequence_length = T;
        job.config.parallel.recompute = cases[i].recompute;
        job.shape.qk_norm = job.shape.post_norm = 2;
        plan_model(&job, &cases[i].options, &plan);
        for (int b = 0; b < plan.count; b++) {
            const bool of_backend = strcmp(plan.buffers[b].name, "attention: blocks") == 0;
            found[plan.buffers[b].class] += of_backend ? 0 : (int64_t)plan.buffers[b].bytes / 4;
        }
        cr_expect_eq(found[ND_MEM_ACTIVATIONS], cases[i].activations, "case %zu", i);
        cr_expect_eq(found[ND_MEM_SCRATCH], cases[i].scratch, "case %zu", i);
        cr_expect_eq(found[ND_MEM_HEAD], cases[i].head, "case %zu", i);
        cr_expect_eq(found[ND_MEM_CACHE], i == 3 ? L * 5 * 64 * 2 * K * D : 0, "case %zu", i);
        nd_memplan_fini(&plan);
    }
}

/* The plan of a rank of cp 2 and tp 2 for so many rows of documents that stay separate. */
static void plan_rows(int64_t rows, nd_cp_comm comm, nd_fp8_recipe recipe, nd_memplan *plan)
{
    const nd_mesh mesh = {{1, 1, 1, 2, 2}, comm == ND_CP_ULYSSES ? 2 : 1};
    mesh_ranks job = mesh_ranks_of(mesh, L, false, NULL, NULL);
    job.config.train.sequence_length = T;
    job.config.train.micro_batch_size = rows;
    job.config.train.precision = ND_PRECISION_FP8;
    job.config.parallel.cp_comm = comm;
    job.config.fp8.recipe = recipe;
    plan_model(&job, &(nd_model_options){.separate = true}, plan);
}

/* A buffer grows with the tokens, or does not depend on them: no size is cut to 32 bits. */
Test(activations, so_many_times_as_many_rows_need_so_many_times_as_much)
{
    enum { TIMES = 1 << 12, PARAMETERS = 4096 }; /* bytes of scales beside those of tokens */
    const int64_t rows = 1 << 14;                /* already more than a chunk of the head */
    static const nd_cp_comm comms[] = {ND_CP_RING, ND_CP_ALLGATHER, ND_CP_ULYSSES};
    static const nd_fp8_recipe recipes[] = {ND_FP8_TENSORWISE, ND_FP8_ROWWISE, ND_FP8_DELAYED};
    for (int i = 0; i < 9; i++) {
        static nd_memplan few, many;
        plan_rows(rows, comms[i % 3], recipes[i / 3], &few);
        plan_rows(rows * TIMES, comms[i % 3], recipes[i / 3], &many);
        for (int b = 0; b < few.count; b++) {
            const size_t one = few.buffers[b].bytes, all = many.buffers[b].bytes;
            cr_expect(all == one || few.buffers[b].external ||
                          one * TIMES - all <= PARAMETERS * TIMES,
                      "case %d, %s: %zu, then %zu bytes", i, few.buffers[b].name, one, all);
        }
        nd_memplan_fini(&few);
        nd_memplan_fini(&many);
    }
}

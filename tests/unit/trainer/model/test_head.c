// SPDX-License-Identifier: Apache-2.0
/*
 * Embedding, head and loss with the vocabulary split over tp, against the plain formulas in F64 of
 * the whole vocabulary.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/mesh_ranks.h"

enum { T = 32, C = 32, MOST_V = 97, MOST_DP = 2, MICROS = 2, WEIGHTS = 1, NOT_COUNTED = -100 };

typedef enum label_kind { SOME_IGNORED = 0, FIRST_ROWS, NONE_ON_RANK_1 } label_kind;

typedef struct head_case {
    const char *name;
    int dp, tp;
    int64_t vocab, head_rows; /* 0: one chunk */
    label_kind labels;
    int64_t columns; /* of a tile of logits; 0: one tile */
    bool tied;
} head_case;

/* Results of the whole batch, one micro-batch of each data rank. */
typedef struct head_world {
    const head_case *of;
    int64_t counted;
    int32_t ids[MOST_DP][T], labels[MOST_DP][T];
    double loss[MOST_DP];
    double dh[MOST_DP][T][C], dh_size[MOST_DP][T][C];  /* and the sums of the sizes of the terms */
    double dx[MOST_DP][T][C];                          /* behind the final norm's backward */
    double dw[MOST_V][C], dtable[MOST_V][C], dnorm[C]; /* of head, lookup, norm */
    float found_head[MOST_V][C], found_table[MOST_V][C]; /* by the ranks that hold them */
    float found_norm[4][C];                              /* of each tp rank */
} head_world;

/* With eps 0 the final norm multiplies this residual stream by its weight alone. */
static double stream_value(int dp, int64_t token, int64_t column)
{
    return mesh_value(40, (dp * T + token) * C + column) < 0.0f ? -1.0 : 1.0;
}

static int32_t label_of(const head_case *c, int dp, int64_t token)
{
    int32_t label = (int32_t)((token * 37 + dp * 11 + 3) % c->vocab);
    switch (c->labels) {
    case SOME_IGNORED:
        break;
    case FIRST_ROWS: /* of tp 4 the first rank has them all */
        return label % (int32_t)((c->vocab + 3) / 4);
    case NONE_ON_RANK_1:
        return dp == 1 ? NOT_COUNTED : label;
    }
    return token % 5 == 2 ? NOT_COUNTED : label;
}

typedef struct head_weights {
    double w[MOST_V][C], norm[C];
} head_weights;

static void read_weights(const nd_layout *whole, head_weights *out)
{
    const nd_param *w = nd_layout_param(whole, ND_PARAM_HEAD, -1);
    const nd_param *norm = nd_layout_param(whole, ND_PARAM_NORM_F, -1);
    for (int64_t i = 0; i < w->rows * C; i++) {
        out->w[i / C][i % C] = (double)mesh_param_value(WEIGHTS, w, i);
    }
    for (int64_t k = 0; k < C; k++) {
        out->norm[k] = (double)mesh_param_value(WEIGHTS, norm, k);
    }
}

/* Cross entropy of one token; dlogits (V) are divided by the counted labels. */
static double loss_of(const head_world *world, const head_weights *weights, int dp, int64_t t,
                      double dlogits[MOST_V])
{
    const int64_t V = world->of->vocab;
    int32_t label = world->labels[dp][t];
    double total = 0.0, target = 0.0;
    memset(dlogits, 0, MOST_V * sizeof *dlogits);
    for (int64_t v = 0; v < V && label != NOT_COUNTED; v++) {
        double logit = 0.0;
        for (int64_t k = 0; k < C; k++) {
            logit += stream_value(dp, t, k) * weights->norm[k] * weights->w[v][k];
        }
        target = v == label ? logit : target;
        dlogits[v] = exp(logit);
        total += dlogits[v];
    }
    for (int64_t v = 0; v < V && label != NOT_COUNTED; v++) {
        dlogits[v] = (dlogits[v] / total - (v == label ? 1.0 : 0.0)) / (double)world->counted;
    }
    return label == NOT_COUNTED ? 0.0 : log(total) - target;
}

static void token_gradients(head_world *world, const head_weights *weights, int dp, int64_t t,
                            const double dlogits[MOST_V])
{
    double mean = 0.0;
    for (int64_t k = 0; k < C; k++) {
        double dh = 0.0, x = stream_value(dp, t, k);
        for (int64_t v = 0; v < world->of->vocab; v++) {
            dh += dlogits[v] * weights->w[v][k];
            world->dh_size[dp][t][k] += fabs(dlogits[v] * weights->w[v][k]);
            world->dw[v][k] += MICROS * dlogits[v] * x * weights->norm[k];
        }
        world->dh[dp][t][k] = dh;
        world->dnorm[k] += MICROS * dh * x;
        mean += dh * weights->norm[k] * x / C;
    }
    for (int64_t k = 0; k < C; k++) {
        double dx = world->dh[dp][t][k] * weights->norm[k] - stream_value(dp, t, k) * mean;
        world->dx[dp][t][k] = dx;
        world->dtable[world->ids[dp][t]][k] += MICROS * dx;
    }
}

static void make_world(head_world *world, const nd_layout *whole)
{
    head_weights *weights = calloc(1, sizeof *weights);
    double dlogits[MOST_V];
    const int dps = world->of->dp;
    read_weights(whole, weights);
    for (int i = 0; i < dps * T; i++) {
        world->ids[i / T][i % T] = (int32_t)((i * 13 + 5) % world->of->vocab);
        world->labels[i / T][i % T] = label_of(world->of, i / T, i % T);
        world->counted += world->labels[i / T][i % T] != NOT_COUNTED;
    }
    for (int i = 0; i < dps * T; i++) {
        world->loss[i / T] += loss_of(world, weights, i / T, i % T, dlogits);
        token_gradients(world, weights, i / T, i % T, dlogits);
    }
    free(weights);
}

/* One rank. */

typedef struct head_test {
    head_world *world;
    nd_model *model;
    nd_activation_set *set;
    int dp, tp;
} head_test;

/* Each rank's tokens of the residual stream; the last block's output is half of it. */
static nd_residual residual(const head_test *test)
{
    nd_model *m = test->model;
    nd_residual in = {.x = nd_set_block(test->set, 0)->x_mid, .delta = m->work.branch};
    for (int64_t i = 0; i < m->dims.Tl; i++) {
        for (int64_t k = 0; k < C; k++) {
            float value = (float)stream_value(test->dp, m->dims.Tl * test->tp + i, k);
            mesh_put(in.x, i, k, 0.5f * value);
            mesh_put(in.delta, i, k, 0.5f * value);
        }
    }
    return in;
}

/* F32 rounds probabilities and sums by a few 2^-24, each at most a token's share of the loss. */
static bool near(double found, double expected, double size)
{
    return fabs(found - expected) <= 0x1p-20 * size;
}

static nd_status check_rows(const head_test *test, const char *what, nd_tensor found,
                            double (*expected)[C])
{
    const head_world *world = test->world;
    double share = 1.0 / (double)world->counted;
    for (int64_t i = 0; i < test->model->dims.Tl; i++) {
        int64_t t = test->model->dims.Tl * test->tp + i;
        for (int64_t k = 0; k < C; k++) {
            double size = world->dh_size[test->dp][t][k] + share;
            ND_CHECK(near((double)mesh_get(found, i, k), expected[t][k], size),
                     "%s (%lld, %lld) is %.9g, not %.9g", what, (long long)t, (long long)k,
                     (double)mesh_get(found, i, k), expected[t][k]);
        }
    }
    return ND_OK;
}

static nd_status check_embedded(const head_test *test, nd_tensor x)
{
    const nd_model *m = test->model;
    const nd_param *table = nd_layout_param(m->layout, ND_PARAM_EMBED, -1);
    for (int64_t i = 0; i < m->dims.Tl * C; i++) {
        int64_t t = m->dims.Tl * test->tp + i / C;
        float expected =
            mesh_param_value(WEIGHTS, table, test->world->ids[test->dp][t] * C + i % C);
        ND_CHECK(mesh_get(x, i / C, i % C) == expected, "embedding of token %lld is %g, not %g",
                 (long long)t, (double)mesh_get(x, i / C, i % C), (double)expected);
    }
    return ND_OK;
}

/* Rows that pad the vocabulary are in the gradient norm, so they must be 0. */
static nd_status check_padding(const head_test *test)
{
    const nd_model *m = test->model;
    nd_tensor dw = nd_fsdp_grad(&m->fsdp, ND_PARAM_HEAD, ND_PARAM_HEAD, -1);
    for (int64_t i = m->dims.vocab_valid * C; i < m->dims.V * C; i++) {
        ND_CHECK(mesh_get(dw, i / C, i % C) == 0.0f,
                 "row %lld pads the vocabulary, its gradient is %g", (long long)(i / C),
                 (double)mesh_get(dw, i / C, i % C));
    }
    return ND_OK;
}

static nd_status check_loss(const head_test *test, double times)
{
    double found = test->model->numbers->loss_sum;
    double expected = times * test->world->loss[test->dp];
    ND_CHECK(near(found, expected, times * T), "the loss is %.9g, not %.9g", found, expected);
    return ND_OK;
}

/* Logits of each row, from the chunk that has it as from one chunk of all. */
static nd_status check_samples(head_test *test, nd_residual in)
{
    nd_model *m = test->model;
    const int64_t rows_of_chunk = m->dims.head_rows;
    static _Thread_local float logits[2][MOST_V];
    for (int64_t row = 0; row < m->dims.T; row++) {
        for (int i = 0; i < 2; i++) {
            m->dims.head_rows = i == 0 ? rows_of_chunk : m->dims.Tl;
            ND_TRY(nd_head_sample(m, test->set, in, row, logits[i]));
        }
        m->dims.head_rows = rows_of_chunk;
        ND_CHECK(memcmp(logits[0], logits[1], (size_t)m->dims.vocab * sizeof **logits) == 0,
                 "chunks of %lld rows give other logits of row %lld", (long long)rows_of_chunk,
                 (long long)row);
    }
    return ND_OK;
}

static nd_status micro_batch(head_test *test, int micro)
{
    nd_model *m = test->model;
    head_world *world = test->world;
    const nd_unit *block = nd_layout_unit(m->layout, ND_UNIT_BLOCK, 0);
    nd_residual embedded;
    m->numbers->loss_sum = 0.0;
    m->numbers->tokens = world->counted;
    ND_TRY(nd_embed_forward(m, test->set, &embedded));
    ND_TRY(check_embedded(test, embedded.x));
    ND_TRY(nd_fsdp_acquire(&m->fsdp, block)); /* the embedding has prefetched it */
    nd_fsdp_release(&m->fsdp, block);
    nd_residual in = residual(test);
    ND_TRY(nd_head_forward(m, test->set, ND_PASS_TRAIN, in));
    ND_TRY(check_loss(test, 1.0));
    ND_TRY(check_padding(test));
    ND_TRY(
        check_rows(test, "gradient of the normed stream", test->set->head.dh, world->dh[test->dp]));
    ND_TRY(nd_head_forward(m, test->set, ND_PASS_EVAL, in)); /* adds its loss, writes no gradient */
    ND_TRY(check_loss(test, 2.0));
    ND_TRY(check_samples(test, in));
    ND_TRY(nd_head_backward(m, test->set));
    ND_TRY(check_rows(test, "gradient of the stream", m->work.dx, world->dx[test->dp]));
    ND_TRY(nd_embed_backward(m, test->set));
    return nd_fsdp_grad_finish(&m->fsdp);
}

/* Spans of different ranks do not overlap, except those of the norm, which has a row for each tp
 * rank. */
static nd_status collect(void *context, const nd_span *span)
{
    head_test *test = context;
    head_world *world = test->world;
    const nd_param *p = span->param;
    for (int64_t i = 0; i < span->rows * span->cols; i++) {
        int64_t e = nd_span_global(span, i);
        float value = test->model->fsdp.grad[span->begin + i];
        if (p->id == ND_PARAM_NORM_F) {
            world->found_norm[test->tp][e] = value;
        } else if (p->id == ND_PARAM_HEAD) {
            world->found_head[e / C][e % C] = value;
        } else if (p->id == ND_PARAM_EMBED) {
            world->found_table[e / C][e % C] = value;
        }
    }
    return ND_OK;
}

static nd_status body(nd_rank *rank, void *context)
{
    head_test t = {
        .world = context, .dp = rank->coord.at[ND_AXIS_DP_SHARD], .tp = rank->coord.at[ND_AXIS_TP]};
    ND_TRY(mesh_model_open(rank, NULL, WEIGHTS, &t.model));
    nd_model *m = t.model;
    const head_case *c = t.world->of;
    /* Buffers were planned for one chunk; the labels are ordered by the rows of a chunk. */
    m->dims.head_rows = c->head_rows ? c->head_rows : m->dims.head_rows;
    ND_CHECK(m->dims.head_rows == (c->head_rows ? c->head_rows : m->dims.Tl), "more chunks than 1");
    ND_CHECK(m->dims.head_columns == m->dims.V, "more tiles than 1");
    m->dims.head_columns = c->columns ? c->columns : m->dims.V;
    ND_TRY(mesh_load_ids(m, t.world->ids[t.dp], t.world->labels[t.dp], &t.set));
    nd_fsdp_begin_step(&m->fsdp, 0);
    for (int micro = 0; micro < MICROS; micro++) {
        ND_TRY(micro_batch(&t, micro));
    }
    return mesh_each_span(m->layout, collect, &t);
}

/* Gradients summed over data ranks, chunks and micro-batches. Sizes: every counted token has a
 * share of 1 / counted, of which at most a weight of 1 reaches an element. */
static void check_gradients(const head_world *world)
{
    const head_case *c = world->of;
    const double size = 2.0 * MICROS * MOST_DP * T / (double)world->counted;
    for (int64_t i = 0; i < c->vocab * C; i++) {
        int64_t v = i / C, k = i % C;
        double head = world->dw[v][k] + (c->tied ? world->dtable[v][k] : 0.0);
        double found = (double)(c->tied ? world->found_table : world->found_head)[v][k];
        cr_assert(near(found, head, size), "%s: gradient (%ld, %ld) of the head is %.9g, not %.9g",
                  c->name, (long)v, (long)k, found, head);
        cr_assert(c->tied || near((double)world->found_table[v][k], world->dtable[v][k], size),
                  "%s: gradient (%ld, %ld) of the table is %.9g, not %.9g", c->name, (long)v,
                  (long)k, (double)world->found_table[v][k], world->dtable[v][k]);
    }
    for (int64_t k = 0; k < C; k++) {
        double found = 0.0;
        for (int t = 0; t < c->tp; t++) {
            found += (double)world->found_norm[t][k];
        }
        cr_assert(near(found, world->dnorm[k], size),
                  "%s: gradient %ld of the norm is %.9g, not %.9g", c->name, (long)k, found,
                  world->dnorm[k]);
    }
}

static void run(const head_case *c)
{
    const nd_mesh mesh = {{1, 1, c->dp, 1, c->tp}};
    head_world *world = calloc(1, sizeof *world);
    nd_layout *whole = NULL;
    mesh_ranks job = mesh_ranks_of(mesh, 1, c->tied, body, world);
    job.shape.vocab = c->vocab;
    job.config.train.gradient_accumulation_steps = MICROS;
    job.config.train.sample_prompt = (char *)"x";
    world->of = c;
    cr_assert_eq(nd_layout_create(&(nd_layout_options){.shape = &job.shape}, &whole), ND_OK);
    make_world(world, whole);
    expect_ranks(&job, "%s", c->name);
    check_gradients(world);
    nd_layout_destroy(whole);
    free(world);
}

/* Runs each case with a head of its own and with the table's, on tp 1, 2 and so on up to
 * `most_tp`. */
static void run_all(const head_case *cases, size_t count, int most_tp)
{
    for (size_t i = 0; i < count; i++) {
        for (int tp = 1; tp <= most_tp; tp *= 2) {
            head_case c = cases[i];
            c.tp = tp;
            run(&c);
            c.tied = true;
            run(&c);
        }
    }
}

Test(head, vocabulary_split_over_tp)
{
    const head_case whole = {"the whole vocabulary", 1, 1, 97};
    run_all(&whole, 1, 4);
    run(&(head_case){"a rank of padding alone", 1, 4, 5});
    run(&(head_case){"labels of the first rank alone", 1, 4, 97, 0, FIRST_ROWS});
}

Test(head, chunks)
{
    const head_case cases[] = {{"chunks of 3 rows", 1, 1, 97, 3}, {"chunks of 1 row", 1, 1, 5, 1}};
    run_all(cases, 2, 4);
}

/* V is 97, 49 and 25: no tile divides it, and with tp 4 the last one of the last rank is padding
 * alone. */
Test(head, tiles_of_the_vocabulary)
{
    const head_case cases[] = {{"tiles of 8", 1, 1, 97, 0, SOME_IGNORED, 8},
                               {"tiles of 24 and chunks", 1, 1, 97, 3, SOME_IGNORED, 24},
                               {"tiles of 1 and rows of 1", 1, 1, 5, 1, SOME_IGNORED, 1}};
    run_all(cases, 3, 4);
    run(&(head_case){"no label", 2, 2, 97, 3, NONE_ON_RANK_1, 24});
}

Test(head, no_label_counts_on_a_data_rank)
{
    const head_case cases[] = {{"two data ranks", 2, 1, 97, 3},
                               {"no label", 2, 1, 97, 3, NONE_ON_RANK_1}};
    run_all(cases, 2, 2);
}

/* BF16: the rows' gradient is summed over tiles in F32 and rounded once. */

enum { MANY = 1500, TILES = 2 };

static nd_status forward_in_tiles(nd_model *m, nd_activation_set *set, int64_t columns,
                                  nd_tensor dh, nd_tensor dw)
{
    nd_residual in = {.x = nd_set_block(set, 0)->x_mid};
    for (int64_t i = 0; i < m->dims.T * C; i++) {
        ((nd_bf16 *)in.x.data)[i] = nd_bf16_from_f32((float)stream_value(0, i / C, i % C));
    }
    m->numbers->loss_sum = 0.0;
    m->numbers->tokens = T;
    m->dims.head_columns = columns;
    nd_fsdp_begin_step(&m->fsdp, 0);
    ND_TRY(nd_head_forward(m, set, ND_PASS_TRAIN, in));
    memcpy(dh.data, set->head.dh.data, nd_tensor_bytes(dh));
    memcpy(dw.data, nd_fsdp_grad(&m->fsdp, ND_PARAM_HEAD, ND_PARAM_HEAD, -1).data,
           nd_tensor_bytes(dw));
    ND_TRY(nd_head_backward(m, set));
    return nd_fsdp_grad_finish(&m->fsdp);
}

/* The statistics differ by rounding in F32, so an element of dlogits by one step of BF16, of which
 * a row has at most two shares of 1 / T and a column one from each row. Weights are at most 1, rows
 * at most 1; then a dh is rounded once more. */
static nd_status same_in_tiles(nd_model *m, nd_activation_set *set)
{
    static nd_bf16 dh[2][T * C];
    static float dw[2][MANY * C];
    const double step = 0x1p-8, share = 1.0 / T;
    double loss[2];
    ND_CHECK(m->dims.head_columns < MANY && TILES * m->dims.head_columns >= MANY, "not %d tiles",
             TILES);
    const int64_t columns[2] = {m->dims.head_columns, MANY};
    for (int i = 0; i < 2; i++) {
        ND_CHECK(m->work.head.dsum, "no sum over tiles");
        m->work.head.dsum = i == 1 ? NULL : m->work.head.dsum; /* one tile needs none */
        ND_TRY(forward_in_tiles(m, set, columns[i], nd_tensor_2d(dh[i], ND_DTYPE_BF16, T, C),
                                nd_tensor_2d(dw[i], ND_DTYPE_F32, MANY, C)));
        loss[i] = m->numbers->loss_sum;
    }
    ND_CHECK(fabs(loss[0] - loss[1]) <= 0x1p-20 * T, "the loss is %.9g in tiles, else %.9g",
             loss[0], loss[1]);
    for (int64_t i = 0; i < MANY * C; i++) {
        double size = fabs((double)dw[1][i]) + 0x1p-20;
        ND_CHECK(fabs((double)dw[0][i] - (double)dw[1][i]) <= step * (size + 2.0 * share),
                 "dw %lld is %g in tiles, else %g", (long long)i, (double)dw[0][i],
                 (double)dw[1][i]);
    }
    for (int64_t i = 0; i < T * C; i++) {
        double tiled = (double)nd_bf16_to_f32(dh[0][i]), whole = (double)nd_bf16_to_f32(dh[1][i]);
        ND_CHECK(fabs(tiled - whole) <= step * (fabs(whole) + 2.0 * share),
                 "dh %lld is %g in tiles, else %g", (long long)i, tiled, whole);
    }
    return ND_OK;
}

static nd_status bf16_body(nd_rank *rank, void *context)
{
    static int32_t ids[T], labels[T];
    nd_model *m = NULL;
    nd_activation_set *set;
    for (int i = 0; i < T; i++) {
        ids[i] = i;
        labels[i] = i * 97 % MANY;
    }
    ND_TRY(mesh_model_open(rank, NULL, WEIGHTS, &m));
    ND_TRY(mesh_load_ids(m, ids, labels, &set));
    return same_in_tiles(m, set);
}

Test(head, bf16_tiles_are_summed_before_they_are_rounded)
{
    mesh_ranks job = mesh_ranks_of((nd_mesh){{1, 1, 1, 1, 1}}, 1, false, bf16_body, NULL);
    job.shape.vocab = MANY;
    job.config.train.precision = ND_PRECISION_BF16;
    expect_ranks(&job, "in tiles");
}

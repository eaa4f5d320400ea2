// SPDX-License-Identifier: Apache-2.0
/*
 * A sequence that is computed through the cache, in any pieces and beside any others, has the
 * logits of the whole: bit for bit, as the reference ops compute each row by itself. They are those
 * of the training model's forward too.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "runtime/base/math.h"
#include "tests/unit/trainer/mesh_ranks.h"

enum { T = 32, V = 97, LAYERS = 3, SLOTS = 3, LONG = 20, SHORT = 5 };

static const nd_kv_options kv = {.tokens = T, .slots = SLOTS, .capacity = T, .logits = 4};
static const nd_model_options cached = {.forward_only = true, .cache = &kv};

static int32_t id_at(int sequence, int64_t i)
{
    return (int32_t)((sequence * 31 + i * i * 7 + i * 3 + 5) % V);
}

/* A segment and the sequence that its tokens come from. */
typedef struct piece {
    nd_kv_segment segment;
    int sequence;
} piece;

/* Computes the pieces in one call; logits of all rows, in their order. */
static nd_status compute(nd_model *m, const piece *pieces, int count, float *logits)
{
    int32_t ids[T] = {0}, positions[T] = {0};
    int64_t rows[T], n = 0;
    nd_kv_segment segments[SLOTS];
    nd_activation_set *set = nd_model_take_set(m);
    for (int i = 0; i < count; i++) {
        segments[i] = pieces[i].segment;
        for (int64_t j = 0; j < segments[i].rows; j++, n++) {
            ids[n] = id_at(pieces[i].sequence, segments[i].length + j);
            positions[n] = (int32_t)(segments[i].length + j);
            rows[n] = n;
        }
    }
    ND_TRY(nd_model_load_batch(m, set, ids, ids, positions));
    ND_TRY(nd_model_logits(
        m, set,
        &(nd_logits_call){.kv = {segments, count}, .rows = rows, .count = n, .logits = logits}));
    return nd_model_give_back(m, set);
}

static nd_status check_equal(const float *a, const float *b, int64_t rows, const char *what)
{
    for (int64_t i = 0; i < rows; i++) {
        ND_CHECK(memcmp(a + i * V, b + i * V, V * sizeof *a) == 0,
                 "%s: row %lld has other logits: %.9g, not %.9g, is the first", what, (long long)i,
                 (double)a[i * V], (double)b[i * V]);
    }
    return ND_OK;
}

/* One sequence in pieces, of one token and of several. */
static nd_status in_pieces(nd_model *m, const float *whole)
{
    static const int64_t rows[] = {7, 1, 1, 5, 6};
    static float logits[T * V];
    int64_t length = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const piece p = {{.slot = 1, .length = length, .rows = rows[i]}, 0};
        ND_TRY(compute(m, &p, 1, logits));
        ND_TRY(check_equal(logits, whole + length * V, rows[i], "in pieces"));
        length += rows[i];
    }
    ND_CHECK(length == LONG, "the pieces are not the whole");
    return ND_OK;
}

/* Two sequences in one call, one of which goes on; and a slot that is used again. */
static nd_status side_by_side(nd_model *m, const float *whole, const float *other)
{
    static float logits[T * V];
    const piece first[] = {{{.slot = 2, .length = 0, .rows = 9}, 0},
                           {{.slot = 1, .length = 0, .rows = SHORT - 1}, 1}};
    const piece second[] = {{{.slot = 1, .length = SHORT - 1, .rows = 1}, 1},
                            {{.slot = 0, .length = 0, .rows = 3}, 0},
                            {{.slot = 2, .length = 9, .rows = LONG - 9}, 0}};
    ND_TRY(compute(m, first, 2, logits));
    ND_TRY(check_equal(logits, whole, 9, "beside another"));
    ND_TRY(check_equal(logits + 9 * V, other, SHORT - 1, "in a slot that was used before"));
    ND_TRY(compute(m, second, 3, logits));
    ND_TRY(check_equal(logits, other + (SHORT - 1) * V, 1, "the second sequence goes on"));
    ND_TRY(check_equal(logits + V, whole, 3, "begun again"));
    return check_equal(logits + 4 * V, whole + 9 * V, LONG - 9, "the first sequence goes on");
}

static nd_status pieces_body(nd_rank *rank, void *context)
{
    static float whole[T * V], other[T * V];
    nd_model *m = NULL;
    ND_TRY(mesh_model_open(rank, &cached, 3, &m));
    ND_TRY(compute(m, &(piece){{.slot = 0, .length = 0, .rows = LONG}, 0}, 1, whole));
    ND_TRY(compute(m, &(piece){{.slot = 0, .length = 0, .rows = SHORT}, 1}, 1, other));
    ND_TRY(in_pieces(m, whole));
    return side_by_side(m, whole, other);
}

static mesh_ranks job_of(int tp, bool tied, nd_precision precision,
                         nd_status (*body)(nd_rank *rank, void *context), void *context)
{
    mesh_ranks job = mesh_ranks_of((nd_mesh){{1, 1, 1, 1, tp}}, LAYERS, tied, body, context);
    job.shape.rms_eps = 1e-5;
    job.config.train.precision = precision;
    return job;
}

Test(kv_cache, pieces_have_the_logits_of_the_whole)
{
    static const nd_precision precisions[] = {ND_PRECISION_FP32, ND_PRECISION_BF16,
                                              ND_PRECISION_FP8};
    for (int p = 0; p < 3; p++) {
        for (int tied = 0; tied < 2; tied++) {
            mesh_ranks job = job_of(1, tied == 1, precisions[p], pieces_body, NULL);
            job.config.fp8.recipe = ND_FP8_ROWWISE; /* a row's scale is its own */
            expect_ranks(&job, "precision %d, tied %d", p, tied);
        }
    }
}

/* A backend whose FP8 products refuse other numbers of rows than multiples of 16. */
enum { SIXTEEN = 16 };

static nd_ops sixteens;
static const nd_ops *any_rows;

static nd_status only_sixteens(nd_stream *stream, const nd_product_args *x)
{
    ND_CHECK(!nd_matrix_is_fp8(&x->a) ||
                 (x->c.shape[0] % SIXTEEN == 0 && x->a.stored.shape[0] == x->c.shape[0]),
             "a product of %lld rows", (long long)x->c.shape[0]);
    return any_rows->product(stream, x);
}

/* Calls of 1 to 20 rows, most of them with rows behind; logits (rows of all calls, V). */
static nd_status some_calls(nd_rank *rank, float *logits, int64_t *rows)
{
    static const int64_t lengths[] = {3, 1, 5, 8, 1};
    const piece two[] = {{{.slot = 2, .length = 0, .rows = 11}, 0},
                         {{.slot = 0, .length = LONG - 2, .rows = 1}, 1}};
    nd_model *m = NULL;
    int64_t length = 0;
    *rows = 0;
    ND_TRY(mesh_model_open(rank, &cached, 3, &m));
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        const piece p = {{.slot = 0, .length = length, .rows = lengths[i]}, 1};
        ND_TRY(compute(m, &p, 1, logits + *rows * V));
        *rows += lengths[i];
        length += lengths[i];
    }
    ND_TRY(compute(m, two, 2, logits + *rows * V));
    *rows += 12;
    ND_TRY(compute(m, &(piece){{.slot = 1, .length = 0, .rows = LONG}, 0}, 1, logits + *rows * V));
    *rows += LONG;
    return ND_OK;
}

static nd_status padding_body(nd_rank *rank, void *context)
{
    enum { ROWS = 60 };
    float any[ROWS * V], padded[ROWS * V]; /* of the thread's stack, as above */
    int64_t rows = 0;
    ND_TRY(some_calls(rank, any, &rows));
    rank->ops = &sixteens;
    ND_TRY(some_calls(rank, padded, &rows));
    ND_CHECK(rows <= ROWS, "%lld rows", (long long)rows);
    return check_equal(padded, any, rows, "with padded products");
}

Test(kv_cache, padded_fp8_products_give_the_same_bits)
{
    static const nd_fp8_recipe recipes[] = {ND_FP8_TENSORWISE, ND_FP8_ROWWISE,
                                            ND_FP8_ROWWISE_GW_HP};
    cr_assert_eq(nd_ops_ref(&any_rows), ND_OK);
    sixteens = *any_rows;
    sixteens.fp8_rows = SIXTEEN;
    sixteens.product = only_sixteens;
    for (int tp = 1; tp <= 2; tp++) {
        for (int i = 0; i < 3; i++) {
            mesh_ranks job = job_of(tp, false, ND_PRECISION_FP8, padding_body, NULL);
            job.config.fp8.recipe = recipes[i];
            expect_ranks(&job, "recipe %d, tp %d", i, tp);
        }
    }
}

/* A short call, before and after a longer one whose rows lie where the short one has none: with one
 * scale for all rows of a call, these must not count. */
static nd_status unused_rows_body(nd_rank *rank, void *context)
{
    const piece few = {{.slot = 0, .length = 0, .rows = 1}, 0};
    const piece many = {{.slot = 1, .length = 0, .rows = LONG}, 1};
    float before[T * V], after[T * V];
    nd_model *m = NULL;
    ND_TRY(mesh_model_open(rank, &cached, 3, &m));
    ND_TRY(compute(m, &few, 1, before));
    ND_TRY(compute(m, &many, 1, after));
    ND_TRY(compute(m, &few, 1, after));
    return check_equal(after, before, few.segment.rows, "after a longer call");
}

Test(kv_cache, rows_of_an_earlier_call_do_not_count_in_fp8)
{
    /* tp computes one row as four */
    mesh_ranks job = job_of(4, false, ND_PRECISION_FP8, unused_rows_body, NULL);
    job.config.fp8.recipe = ND_FP8_TENSORWISE;
    cr_assert_eq(mesh_ranks_run(&job), ND_OK, "%s", nd_error_last()->message);
}

/* NLL of all labels, from logits. */
static double nll_of(const float *logits, const int32_t *labels)
{
    double sum = 0;
    for (int64_t i = 0; i < T; i++) {
        const float *row = logits + i * V;
        double most = row[0], all = 0;
        for (int v = 1; v < V; v++) {
            most = fmax(most, row[v]);
        }
        for (int v = 0; v < V; v++) {
            all += exp(row[v] - most);
        }
        sum += log(all) + most - row[labels[i]];
    }
    return sum;
}

/* The loss of a validation is that of the cached model's logits. On each rank the buffers are those
 * of the thread's stack: tp ranks run at the same time. */
static nd_status loss_body(nd_rank *rank, void *context)
{
    int32_t ids[T], labels[T];
    float logits[T * V];
    nd_model *m = NULL;
    nd_activation_set *set;
    double loss = 0;
    for (int i = 0; i < T; i++) {
        ids[i] = id_at(0, i);
        labels[i] = id_at(0, i + 1);
    }
    ND_TRY(mesh_model_open(rank, &(nd_model_options){.forward_only = true}, 3, &m));
    ND_TRY(mesh_load_ids(m, ids, labels, &set));
    ND_TRY(nd_model_forward(m, set, ND_PASS_EVAL));
    loss = m->numbers->loss_sum;
    ND_TRY(mesh_model_open(rank, &cached, 3, &m));
    ND_TRY(compute(m, &(piece){{.slot = 0, .length = 0, .rows = T}, 0}, 1, logits));
    double expected = nll_of(logits, labels);
    ND_CHECK(fabs(loss - expected) <= 1e-5 * expected, "the loss is %.9g, the logits say %.9g",
             loss, expected);
    return ND_OK;
}

Test(kv_cache, logits_are_those_of_the_training_model)
{
    /* Windows: of no layer, of all, from layer 1 on, of all but the second, of the second alone. */
    static const int64_t windows[][2] = {
        {0}, {5}, {1, 1 << 0}, {T - 1, 1 << 1}, {8, 1 << 0 | 1 << 2}};
    for (int i = 0; i < 3 * 5; i++) {
        const int64_t *window = windows[i / 3];
        mesh_ranks job = job_of(1 << i % 3, false, ND_PRECISION_FP32, loss_body, NULL);
        job.shape.window = window[0];
        job.shape.full.bits[0] = (uint64_t)window[1];
        expect_ranks(&job, "tp %d, window %lld", 1 << i % 3, (long long)window[0]);
    }
}

/* Rows that tp does not divide: 1, 3 and 5 of them, and all ranks have the same logits. */
static nd_status odd_rows_body(nd_rank *rank, void *context)
{
    float *out = context; /* (tp, LONG, V) */
    nd_model *m = NULL;
    ND_TRY(mesh_model_open(rank, &cached, 3, &m));
    float *own = out + (int64_t)rank->rank * LONG * V;
    for (int64_t length = 0, rows = 1; length < LONG; length += rows) {
        rows = nd_min(1 + length % 5, LONG - length);
        const piece p = {{.slot = 0, .length = length, .rows = rows}, 0};
        ND_TRY(compute(m, &p, 1, own + length * V));
    }
    return ND_OK;
}

Test(kv_cache, any_number_of_rows_on_tp_ranks)
{
    static float results[3][4 * LONG * V];
    double worst = 0, largest = 0;
    for (int i = 0; i < 3; i++) {
        mesh_ranks job = job_of(1 << i, false, ND_PRECISION_FP32, odd_rows_body, results[i]);
        expect_ranks(&job, "tp %d", 1 << i);
        for (int r = 1; r < 1 << i; r++) {
            cr_expect_eq(memcmp(results[i], results[i] + r * LONG * V, LONG * V * sizeof(float)), 0,
                         "tp rank %d has logits of its own", r);
        }
        for (int64_t j = 0; j < (int64_t)LONG * V; j++) {
            worst = fmax(worst, fabs((double)results[i][j] - (double)results[0][j]));
            largest = fmax(largest, fabs((double)results[0][j]));
        }
    }
    /* Sums of tp partial sums are rounded to F32 in each of 3 layers; attention scores of up to a
     * hundred turn 2^-24 of them into 1e-5 of a probability. Another row would differ by all. */
    cr_expect_lt(worst, 1e-3 * largest);
}

/* Logits of so many rows at once that more are computed than are wanted: those of four by four. */
static nd_status many_logits_body(nd_rank *rank, void *context)
{
    nd_kv_options all = kv;
    const nd_kv_options *caches[] = {&kv, &all};
    const piece odd = {{.slot = 0, .length = 0, .rows = LONG - 1}, 0};
    float logits[2][T * V];
    all.logits = T;
    for (int i = 0; i < 2; i++) {
        const nd_model_options options = {.forward_only = true, .cache = caches[i]};
        nd_model *m = NULL;
        ND_TRY(mesh_model_open(rank, &options, 3, &m));
        ND_TRY(compute(m, &odd, 1, logits[i]));
    }
    return check_equal(logits[1], logits[0], odd.segment.rows, "all rows at once");
}

Test(kv_cache, logits_of_many_rows_at_once_on_tp_ranks)
{
    mesh_ranks job = job_of(2, false, ND_PRECISION_FP32, many_logits_body, NULL);
    cr_assert_neq(nd_kv_round_rows(LONG - 1, 1, T), LONG - 1);
    cr_assert_eq(mesh_ranks_run(&job), ND_OK, "%s", nd_error_last()->message);
}

Test(kv_cache, few_numbers_of_rows_are_computed_and_at_most_an_eighth_too_many)
{
    int forms = 0;
    for (int64_t tp = 1; tp <= 4; tp++) {
        const int64_t most = 512 * tp;
        int64_t before = 0;
        for (int64_t rows = 1; rows <= most; rows++) {
            int64_t computed = nd_kv_round_rows(rows, tp, most);
            cr_assert_geq(computed, rows);
            cr_assert_leq(computed, most);
            cr_assert_eq(computed % tp, 0);
            cr_assert_lt(8 * (computed - rows), rows + 8 * tp);
            cr_assert_geq(computed, before);
            forms += tp == 1 && computed > before;
            before = computed;
        }
    }
    cr_expect_leq(forms, 64, "%d forms up to 512 rows", forms);
}

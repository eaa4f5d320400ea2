// SPDX-License-Identifier: Apache-2.0
/*
 * Scales of rows and columns where tensor parallelism splits what one of them covers: on each rank
 * they are, with the codes, those of the whole matrix, put together here from the ranks' parts and
 * cast by the reference ops. The whole weights and the first input are one worker's, bit for bit.
 *
 * The linears of one input are converted at a time, so that each cast's operand is known:
 *
 *                                     input     weight    gradient
 *   column-parallel (q k v; gate up)  whole     rows      columns
 *   row-parallel (o; down)            columns   columns   whole
 *
 * Scales that tp splits lie together, and one reduction gives those of all linears of an input.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "tests/parity/cast_spy.h"
#include "tests/parity/mesh_data.h"
#include "trainer/step/step.h"

enum { MAX_RANKS = 4, VOCAB = 97, SEQUENCE = 64, HIDDEN = 64, LAYERS = 2 };

typedef enum operand { INPUT, WEIGHT, GRADIENT } operand;
typedef enum part { WHOLE, ROWS, COLUMNS } part;

static const part parts[2][3] = {{WHOLE, ROWS, COLUMNS}, {COLUMNS, COLUMNS, WHOLE}};

static tempdir dir;

TEMPDIR_SUITE(fp8_rows, tempdir_leave_empty, .timeout = 120);
static cast_spy spies[MAX_RANKS];
static const float *vectors[3], *joint; /* rank 0's */
static int64_t joint_count;

static nd_status spy_on(void *context, nd_trainer *t, int64_t step)
{
    const nd_scales *s = &t->model->scales;
    int rank = t->rank->rank;
    if (rank == 0) {
        for (int i = 0; i < 3; i++) {
            vectors[i] = s->vectors[i].scale;
        }
        joint = s->joint.scale;
        joint_count = s->joint_count;
    }
    cast_spy_start(&spies[rank], t->rank);
    return ND_OK;
}

/* Scales that tp splits: each linear's of the first operand, and then of its weight where that has
 * several. A scale that lies elsewhere is a site's: a weight with one scale. */
static operand operand_of(const spied_cast *c, bool row_parallel, bool weights_too)
{
    int64_t of_linear = SEQUENCE + (weights_too ? HIDDEN : 0);
    if (c->at >= joint && c->at < joint + joint_count) {
        bool first = (c->at - joint) % of_linear == 0;
        return !first ? WEIGHT : row_parallel ? INPUT : GRADIENT;
    }
    return c->at == vectors[INPUT] ? INPUT : c->at == vectors[GRADIENT] ? GRADIENT : WEIGHT;
}

/* Returns true when each scale covers a row or a column of which a rank has only a part. */
static bool is_shared(nd_granularity granularity, part p)
{
    return (granularity == ND_PER_ROW && p == COLUMNS) ||
           (granularity == ND_PER_COLUMN && p == ROWS);
}

/* Cast i of all ranks as one matrix. */
static nd_bf16 *put_together(int i, int ranks, part p, int64_t *rows, int64_t *columns)
{
    const spied_cast *first = &spies[0].casts[i];
    *rows = first->rows * (p == ROWS ? ranks : 1);
    *columns = first->columns * (p == COLUMNS ? ranks : 1);
    nd_bf16 *x = cast_spy_memory((size_t)(*rows * *columns) * 2);
    for (int r = 0; r < ranks; r++) {
        const spied_cast *c = &spies[r].casts[i];
        int64_t row = p == ROWS ? r * c->rows : 0, column = p == COLUMNS ? r * c->columns : 0;
        cr_assert(c->rows == first->rows && c->columns == first->columns);
        for (int64_t k = 0; k < c->rows; k++) {
            nd_bf16 *to = x + (row + k) * *columns + column;
            const nd_bf16 *from = c->x + k * c->columns;
            size_t bytes = (size_t)c->columns * 2;
            cr_assert(p != WHOLE || r == 0 || memcmp(to, from, bytes) == 0, "row %ld", (long)k);
            memcpy(to, from, bytes);
        }
    }
    return x;
}

/* comparisons */

/* A rank's scales and codes are its part of the whole's. Returns how many of the scales its part
 * alone would not give. */
static int compare_part(const spied_cast *c, const spied_cast *whole, part p, int rank,
                        const char *what)
{
    int others = 0;
    int64_t row = p == ROWS ? rank * c->rows : 0, column = p == COLUMNS ? rank * c->columns : 0;
    int64_t scales = cast_spy_scales(c->granularity, c->rows, c->columns);
    int64_t first = c->granularity == ND_PER_TENSOR ? 0
                    : c->granularity == ND_PER_ROW  ? row
                                                    : column;
    const spied_cast alone = cast_by_reference(c->x, c->granularity, c->rows, c->columns, true);
    for (int64_t g = 0; g < scales; g++) {
        int exponent;
        cr_assert_eq(c->scale[g], whole->scale[first + g], "%s: scale %ld is %g on rank %d, not %g",
                     what, (long)g, c->scale[g], rank, whole->scale[first + g]);
        cr_assert_eq(frexpf(c->scale[g], &exponent), 0.5f, "%s: %g", what, c->scale[g]);
        others += c->scale[g] != alone.scale[g];
    }
    for (int64_t k = 0; k < c->rows; k++) {
        cr_assert_eq(memcmp(c->codes + k * c->columns,
                            whole->codes + (row + k) * whole->columns + column, (size_t)c->columns),
                     0, "%s: codes of row %ld on rank %d", what, (long)k, rank);
    }
    return others;
}

/* The linears that are converted, which have one input. */
typedef struct linears {
    const char *filter;
    int count;
    bool row_parallel;
} linears;

static const linears cases[] = {
    {"k_proj", 1, false},
    {"up_proj", 1, false},
    {"q_proj,v_proj", 2, false},
    {"q_proj,k_proj,v_proj", 3, false},
    {"gate_proj,up_proj", 2, false},
    {"o_proj", 1, true},
    {"down_proj", 1, true},
};
enum { CASES = sizeof cases / sizeof *cases };

/* `alone`: one worker's casts, or NULL. */
static void compare(const cast_spy *alone, const mesh_case *mesh, const linears *l,
                    nd_fp8_recipe recipe)
{
    static const char *const names[] = {"input", "weight", "gradient"};
    for (int i = 0; i < spies[0].count; i++) {
        char what[128];
        int64_t rows, columns;
        int others = 0;
        nd_granularity granularity = spies[0].casts[i].granularity;
        operand o = operand_of(&spies[0].casts[i], l->row_parallel,
                               recipe == ND_FP8_ROWWISE || l->row_parallel);
        part p = mesh->tp == 1 ? WHOLE : parts[l->row_parallel][o];
        snprintf(what, sizeof what, "%s, %s, cast %d, %s", mesh->name, l->filter, i, names[o]);
        nd_bf16 *x = put_together(i, mesh->tp, p, &rows, &columns);
        const spied_cast whole = cast_by_reference(x, granularity, rows, columns, true);
        for (int r = 0; r < mesh->tp; r++) {
            others += compare_part(&spies[r].casts[i], &whole, p, r, what);
        }
        /* One scale of a whole matrix may be each part's: it is rounded to a power of two. */
        cr_expect(granularity == ND_PER_TENSOR || (others > 0) == is_shared(granularity, p),
                  "%s: %d scales are of other ranks", what, others);
        if (alone && (o == WEIGHT || (i == 0 && strcmp(l->filter, "k_proj") == 0))) {
            const spied_cast *a = &alone->casts[i];
            cr_assert(a->rows == rows && a->columns == columns && a->granularity == granularity);
            cr_expect_eq(memcmp(a->x, x, (size_t)(rows * columns) * 2), 0, "%s: values", what);
            cr_expect_eq(memcmp(a->codes, whole.codes, (size_t)(rows * columns)), 0, "%s", what);
        }
    }
}

static mesh_job job_of(nd_fp8_recipe recipe)
{
    mesh_job job = mesh_sized_job(&dir, 4 * (SEQUENCE + 1), mesh_small_llama(VOCAB),
                                  ND_PRECISION_FP8, 1, SEQUENCE, 1);
    cr_assert(job.shape.hidden == HIDDEN && job.shape.layers == LAYERS);
    job.recipe = recipe;
    return job;
}

/* `once`, `each`: casts for an input, and for each linear that reads it, in its three products. */
static void rows_of_the_whole(nd_fp8_recipe recipe, int once, int each)
{
    static const mesh_case meshes[] = {{"tp 2", 1, 1, 1, 2, 1}, {"tp 4", 1, 1, 1, 4, 1}};
    mesh_job job = job_of(recipe);
    job.before_step = spy_on;
    for (const linears *l = cases; l < cases + CASES; l++) {
        static cast_spy alone;
        int casts = LAYERS * (once + each * l->count);
        job.filter = l->filter;
        /* Scales of the columns of all heads, or those of the MLP, are the most. */
        job.shape.ffn = strchr("kqo", l->filter[0]) ? 96 : 192;
        mesh_trained(&job, &mesh_one);
        cr_assert(spies[0].count == casts && casts <= CAST_SPY_MAX, "%d", spies[0].count);
        compare(NULL, &mesh_one, l, recipe);
        alone = spies[0];
        for (int i = 0; i < 2; i++) {
            mesh_trained(&job, &meshes[i]);
            compare(&alone, &meshes[i], l, recipe);
            for (int r = 0; r < meshes[i].tp; r++) {
                cr_expect_eq(spies[r].count, alone.count);
            }
        }
    }
}

Test(fp8_rows, rowwise)
{
    rows_of_the_whole(ND_FP8_ROWWISE, 2, 4);
}

/* Its weights have one scale in the product of the input's gradient, and that of the weight's is
 * in BF16. */
Test(fp8_rows, rowwise_with_gw_hp)
{
    rows_of_the_whole(ND_FP8_ROWWISE_GW_HP, 1, 3);
}

/* reductions */

/* All-reduces over tp of one step with two micro-batches. */
static int64_t reductions(const mesh_job *job, const mesh_case *mesh)
{
    return mesh_trained(job, mesh).calls[ND_GROUP_TP][ND_COMM_ALL_REDUCE];
}

/*
 * Before y of o and of down, and before dx of q k v and of gate up, one reduction gives the scales
 * of all that tp splits. One scale of an input or of a gradient cannot wait for others: with one
 * scale per tensor each input and the gradients of its linears' outputs need one.
 */
Test(fp8_rows, one_reduction_for_the_linears_of_an_input)
{
    static const nd_fp8_recipe rowwise[] = {ND_FP8_ROWWISE, ND_FP8_ROWWISE_GW_HP};
    enum { MICROS = 2 };
    mesh_case mesh = {"tp 2", 1, 1, 1, 2, 1};
    mesh_job job = job_of(ND_FP8_ROWWISE);
    job.global_batch = MICROS;
    job.precision = ND_PRECISION_BF16;
    int64_t without = reductions(&job, &mesh), found;
    job.precision = ND_PRECISION_FP8;
    for (int r = 0; r < 2; r++) {
        job.recipe = rowwise[r];
        for (const linears *l = cases; l < cases + CASES; l++) {
            job.filter = l->filter;
            found = reductions(&job, &mesh) - without;
            cr_expect_eq(found, MICROS * LAYERS, "%s: %ld", l->filter, (long)found);
        }
        job.filter = "*";
        found = reductions(&job, &mesh) - without;
        cr_expect_eq(found, MICROS * LAYERS * 4, "all: %ld", (long)found);
        mesh.recompute = ND_RECOMPUTE_ALL_BUT_ATTENTION; /* o is not computed again */
        found = reductions(&job, &mesh) - without;
        cr_expect_eq(found, MICROS * LAYERS * 4, "all but attention: %ld", (long)found);
        mesh.recompute = ND_RECOMPUTE_FULL;
        found = reductions(&job, &mesh) - without;
        cr_expect_eq(found, MICROS * LAYERS * 5, "with recompute: %ld", (long)found);
        mesh.recompute = ND_RECOMPUTE_NONE;
    }
    job.recipe = ND_FP8_TENSORWISE;
    found = reductions(&job, &mesh) - without;
    cr_expect_eq(found, MICROS * LAYERS * 8, "one scale each: %ld", (long)found);
}

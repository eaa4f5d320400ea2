// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <malloc.h>
#include <stdlib.h>
#include <time.h>

#include "runtime/base/rng.h"
#include "tests/support/tempdir.h"
#include "tests/unit/trainer/checkpoint/fake_state.h"
#include "tests/unit/trainer/shapes.h"
#include "trainer/checkpoint/shard.h"

/* How often each element of each tensor was written, over all ranks. */
typedef struct cover {
    nd_layout *whole; /* of one worker: names and sizes */
    unsigned char **seen;
    int64_t written; /* by the current rank */
} cover;

static void mark(cover *c, const nd_piece *piece)
{
    const nd_param *p = nd_layout_param(c->whole, piece->span.param->id, piece->span.param->layer);
    int64_t t = p - c->whole->params;
    cr_assert_str_eq(p->name, piece->span.param->name);
    const nd_span *r = &piece->span;
    for (int64_t row = r->row; row < r->row + r->rows; row++) {
        for (int64_t col = r->col; col < r->col + r->cols; col++) {
            cr_assert(row < p->rows && col < p->cols);
            c->seen[t][row * p->cols + col]++;
        }
    }
    c->written += nd_span_elements(r);
}

static void check_mesh(const nd_shape *shape, const nd_mesh *mesh, bool converts)
{
    cover c = {.whole = fake_layout(shape, &(nd_mesh){{1, 1, 1, 1, 1}}, 0, false)};
    char text[128];
    int world = nd_mesh_world_size(mesh);
    nd_mesh_format(mesh, text, sizeof text);
    c.seen = calloc((size_t)c.whole->param_count, sizeof *c.seen);
    for (int i = 0; i < c.whole->param_count; i++) {
        c.seen[i] = calloc((size_t)(c.whole->params[i].rows * c.whole->params[i].cols), 1);
    }
    for (int rank = 0; rank < world; rank++) {
        nd_layout *layout = fake_layout(shape, mesh, rank, converts);
        nd_holder holder = nd_holder_of(mesh, rank);
        c.written = 0;
        nd_piece *pieces = calloc(3 * (size_t)layout->param_count, sizeof *pieces);
        const int count = nd_pieces_written(layout, &holder, pieces);
        for (int i = 0; i < count; i++) {
            mark(&c, &pieces[i]);
            for (int j = i - 1; j >= 0 && pieces[j].span.param == pieces[i].span.param; j--) {
                cr_assert_neq(pieces[j].kind, pieces[i].kind, "%s, rank %d", text, rank);
            }
        }
        free(pieces);
        /* An even share, but for what moving to the beginning of a row shifts. */
        int64_t share = layout->shard_total / holder.replicas;
        cr_assert_leq(c.written, share + 2 * 36, "%s, rank %d", text, rank);
        nd_layout_destroy(layout);
    }
    for (int i = 0; i < c.whole->param_count; i++) {
        const nd_param *p = &c.whole->params[i];
        for (int64_t e = 0; e < p->rows * p->cols; e++) {
            cr_assert_eq(c.seen[i][e], 1, "%s: element %ld of %s is written %d times", text,
                         (long)e, p->name, c.seen[i][e]);
        }
        free(c.seen[i]);
    }
    free(c.seen);
    nd_layout_destroy(c.whole);
}

Test(plan, every_element_is_written_once_on_random_meshes)
{
    static const int tps[] = {1, 2, 4};
    for (uint64_t i = 0; i < 60; i++) {
        nd_shape shape = fake_shape(i % 2 == 1);
        shape.kv_heads = 4 >> i % 3; /* of which ranks of tp have copies */
        nd_mesh mesh = {{1, 1 + (int)(nd_rng_u64(7, 1, i) % 4), 1 + (int)(nd_rng_u64(7, 2, i) % 7),
                         1 + (int)(nd_rng_u64(7, 3, i) % 3), tps[nd_rng_u64(7, 4, i) % 3]}};
        check_mesh(&shape, &mesh, i % 3 == 0);
    }
    const nd_shape shape = fake_shape(false); /* of fewer rows than ranks */
    check_mesh(&shape, &(nd_mesh){{1, 50, 1, 1, 1}}, false);
    check_mesh(&shape, &(nd_mesh){{1, 2, 96, 1, 4}}, true);
}

static double cpu_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* A rank's plan is a matter of its own tensors, whatever the world: at most a second and 100 MB. */
Test(plan, a_rank_of_16384_plans_in_no_time)
{
    const nd_mesh mesh = {{1, 16, 128, 1, 8}};
    double begin = cpu_seconds();
    size_t allocated = mallinfo2().uordblks + mallinfo2().hblkhd;
    nd_layout *layout = fake_layout(&llama_405b, &mesh, 16383, false);
    nd_shard_plan_options options = {
        .layout = layout, .mesh = &mesh, .rank = 16383, .arrays = ND_STATE_KINDS};
    nd_shard_plan plan;
    assert_ok(nd_shard_plan_init(&plan, &options));
    double seconds = cpu_seconds() - begin;
    size_t bytes = mallinfo2().uordblks + mallinfo2().hblkhd - allocated;
    cr_assert_lt(bytes, 100000000, "%zu bytes", bytes);
    cr_assert_lt(seconds, 1.0, "%g s", seconds);
    cr_assert_gt(plan.bytes, 290000000ull);
    cr_assert_lt(plan.bytes, 310000000ull); /* 12 bytes x 405.9e9 / 16384 = 297 MB */
    nd_shard_plan_fini(&plan);
    nd_layout_destroy(layout);
}

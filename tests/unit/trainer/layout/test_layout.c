// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/layout/layout.h"

static nd_llama_shape shape_of(bool tied)
{
    return (nd_llama_shape){.vocab = 97,
                            .hidden = 20,
                            .ffn = 36,
                            .layers = 3,
                            .heads = 8,
                            .kv_heads = 4,
                            .head_dim = 4,
                            .tied = tied};
}

typedef struct cover {
    nd_layout *whole; /* of a mesh of one: names and sizes */
    unsigned char **seen;
    int tp;
} cover;

static nd_status mark(void *context, const nd_run *run)
{
    cover *c = context;
    int t = -1;
    for (int i = 0; i < c->whole->param_count; i++) {
        t = strcmp(c->whole->params[i].name, run->param->name) == 0 ? i : t;
    }
    cr_assert_geq(t, 0, "%s", run->param->name);
    const nd_param *p = &c->whole->params[t];
    cr_assert(run->global_begin >= 0 && run->count > 0 &&
              run->global_begin + run->count <= p->rows * p->cols);
    for (int64_t i = 0; i < run->count; i++) {
        c->seen[t][run->global_begin + i]++;
    }
    return ND_OK;
}

static nd_layout *layout_of(const nd_llama_shape *shape, int shards, int tp, int shard_index,
                            int tp_index)
{
    nd_layout *layout = NULL;
    nd_mesh mesh = {{1, 1, shards, 1, tp}};
    nd_coord coord = {{0, 0, shard_index, 0, tp_index}};
    cr_assert_eq(nd_layout_create(shape, &mesh, coord, NULL, NULL, &layout), ND_OK);
    return layout;
}

/* Over all shards and tp ranks every element is held once; replicated ones once per tp rank. */
static void check_cover(const nd_llama_shape *shape, int shards, int tp)
{
    cover c = {.whole = layout_of(shape, 1, 1, 0, 0), .tp = tp};
    c.seen = calloc((size_t)c.whole->param_count, sizeof *c.seen);
    for (int i = 0; i < c.whole->param_count; i++) {
        c.seen[i] = calloc((size_t)(c.whole->params[i].rows * c.whole->params[i].cols), 1);
    }
    for (int s = 0; s < shards; s++) {
        for (int t = 0; t < tp; t++) {
            nd_layout *layout = layout_of(shape, shards, tp, s, t);
            for (int u = 0; u < layout->unit_count; u++) {
                cr_assert_eq(nd_layout_each_run(layout, u, s, mark, &c), ND_OK);
            }
            nd_layout_destroy(layout);
        }
    }
    for (int i = 0; i < c.whole->param_count; i++) {
        const nd_param *p = &c.whole->params[i];
        for (int64_t e = 0; e < p->rows * p->cols; e++) {
            cr_assert_eq(c.seen[i][e], p->split == ND_SPLIT_NONE ? tp : 1,
                         "%s element %ld, %d shards, tp %d: %d times", p->name, (long)e, shards, tp,
                         c.seen[i][e]);
        }
        free(c.seen[i]);
    }
    free(c.seen);
    nd_layout_destroy(c.whole);
}

Test(params, every_element_has_its_holders)
{
    static const int shards[] = {1, 2, 3, 6, 8}, tps[] = {1, 2, 4};
    for (int tied = 0; tied < 2; tied++) {
        nd_llama_shape shape = shape_of(tied);
        for (size_t s = 0; s < sizeof shards / sizeof *shards; s++) {
            for (size_t t = 0; t < sizeof tps / sizeof *tps; t++) {
                check_cover(&shape, shards[s], tps[t]);
            }
        }
    }
}

Test(params, fused_products_are_neighbours)
{
    nd_llama_shape shape = shape_of(false);
    nd_layout *layout = layout_of(&shape, 3, 2, 1, 1);
    for (int64_t l = 0; l < shape.layers; l++) {
        const nd_param *q = &layout->params[nd_layout_find(layout, ND_PARAM_Q, l)];
        const nd_param *k = &layout->params[nd_layout_find(layout, ND_PARAM_K, l)];
        const nd_param *v = &layout->params[nd_layout_find(layout, ND_PARAM_V, l)];
        const nd_param *gate = &layout->params[nd_layout_find(layout, ND_PARAM_GATE, l)];
        const nd_param *up = &layout->params[nd_layout_find(layout, ND_PARAM_UP, l)];
        cr_assert_eq(k->offset, q->offset + q->local_rows * q->local_cols);
        cr_assert_eq(v->offset, k->offset + k->local_rows * k->local_cols);
        cr_assert_eq(up->offset, gate->offset + gate->local_rows * gate->local_cols);
    }
    nd_layout_destroy(layout);
}

Test(params, decay_covers_matrices_and_replicated_covers_norms)
{
    nd_llama_shape shape = shape_of(true);
    nd_layout *layout = layout_of(&shape, 1, 2, 0, 0);
    nd_flat_range *all = NULL, *replicated = NULL;
    int all_count = 0, replicated_count = 0;
    int64_t decayed = 0, norms = 0, matrices = 0;
    cr_assert_eq(nd_layout_decay_ranges(layout, &all, &all_count), ND_OK);
    cr_assert_eq(nd_layout_replicated_ranges(layout, &replicated, &replicated_count), ND_OK);
    for (int i = 0; i < all_count; i++) {
        decayed += all[i].decay ? all[i].end - all[i].begin : 0;
    }
    for (int i = 0; i < replicated_count; i++) {
        norms += replicated[i].end - replicated[i].begin;
        cr_assert(!replicated[i].decay);
    }
    for (int i = 0; i < layout->param_count; i++) {
        matrices += layout->params[i].axes == 2
                        ? layout->params[i].local_rows * layout->params[i].local_cols
                        : 0;
    }
    cr_assert_eq(decayed, matrices);
    cr_assert_eq(norms, (2 * shape.layers + 1) * shape.hidden);
    free(all);
    free(replicated);
    nd_layout_destroy(layout);
}

Test(params, each_draws_from_a_stream_of_its_own_on_every_mesh)
{
    nd_llama_shape shape = shape_of(false);
    nd_layout *a = layout_of(&shape, 1, 1, 0, 0), *b = layout_of(&shape, 3, 2, 2, 1);
    cr_assert_eq(a->param_count, b->param_count);
    for (int i = 0; i < a->param_count; i++) {
        cr_assert_eq(a->params[i].stream, b->params[i].stream, "%s", a->params[i].name);
        for (int j = 0; j < i; j++) {
            cr_assert_neq(a->params[i].stream, a->params[j].stream, "%s and %s", a->params[i].name,
                          a->params[j].name);
        }
    }
    nd_layout_destroy(a);
    nd_layout_destroy(b);
}

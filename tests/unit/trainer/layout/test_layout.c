// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>

#include "tests/unit/trainer/shapes.h"
#include "trainer/layout/layout.h"

static nd_shape shape_of(bool tied)
{
    return (nd_shape){SIZES(97, 20, 36, 3, 8, 4, 4), .tied = tied};
}

static nd_layout *layout; /* of the test */

static nd_layout *layout_of(const nd_shape *shape, int shards, int tp, int shard_index,
                            int tp_index)
{
    nd_layout *made = NULL;
    const nd_mesh mesh = {{1, 1, shards, 1, tp}};
    const nd_layout_options options = {
        .shape = shape, .mesh = &mesh, .coord = {{0, 0, shard_index, 0, tp_index}}};
    cr_assert_eq(nd_layout_create(&options, &made), ND_OK);
    return made;
}

Test(params, fused_products_are_adjacent)
{
    nd_shape shape = shape_of(false);
    layout = layout_of(&shape, 3, 2, 1, 1);
    for (int64_t l = 0; l < shape.layers; l++) {
        const nd_param *q = nd_layout_param(layout, ND_PARAM_Q, l);
        const nd_param *k = nd_layout_param(layout, ND_PARAM_K, l);
        const nd_param *v = nd_layout_param(layout, ND_PARAM_V, l);
        const nd_param *gate = nd_layout_param(layout, ND_PARAM_GATE, l);
        const nd_param *up = nd_layout_param(layout, ND_PARAM_UP, l);
        cr_assert_eq(k->offset, q->offset + q->local_rows * q->local_cols);
        cr_assert_eq(v->offset, k->offset + k->local_rows * k->local_cols);
        cr_assert_eq(up->offset, gate->offset + gate->local_rows * gate->local_cols);
    }
}

/* Ops read from multiples of 64 elements: of linears with one input, and of biases, the first. */
Test(params, tensors_are_aligned)
{
    static const nd_param_id ids[] = {ND_PARAM_Q, ND_PARAM_O, ND_PARAM_DOWN, ND_PARAM_Q_BIAS};
    nd_shape shape = shape_of(false);
    shape.qkv_bias = 1;
    layout = layout_of(&shape, 3, 2, 1, 1);
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        cr_expect_eq(nd_layout_param(layout, ids[i], 2)->offset % 64, 0, "parameter %zu", i);
    }
}

Test(params, each_draws_from_a_stream_of_its_own_on_every_mesh)
{
    nd_shape shape = shape_of(false);
    nd_layout *a = layout_of(&shape, 1, 1, 0, 0), *b = layout_of(&shape, 3, 2, 2, 1);
    cr_assert_eq(a->param_count, b->param_count);
    for (int i = 0; i < a->param_count; i++) {
        cr_assert_eq(a->params[i].random_stream, b->params[i].random_stream, "%s",
                     a->params[i].name);
        for (int j = 0; j < i; j++) {
            cr_assert_neq(a->params[i].random_stream, a->params[j].random_stream, "%s and %s",
                          a->params[i].name, a->params[j].name);
        }
    }
    nd_layout_destroy(a);
    nd_layout_destroy(b);
}

/* A rank of a pipeline: what it holds lies as in the whole model's layout, under the same names and
 * streams; what it does not hold is absent. */
Test(params, a_stage_holds_its_layers_alone)
{
    nd_shape shape = shape_of(false);
    const nd_stage stages[] = {{{2, 3}, false, true}, {{0, 1}, true, false}};
    nd_layout_options options = {.shape = &shape, .stages = stages, .stage_count = 2};
    nd_layout *whole = layout_of(&shape, 1, 1, 0, 0), *part = NULL;
    cr_assert_eq(nd_layout_create(&options, &part), ND_OK);
    cr_expect_eq(part->unit_count, 4);
    cr_expect_eq(part->block_count, 2);
    cr_expect_null(nd_layout_unit(part, ND_UNIT_BLOCK, 1));
    cr_expect_null(nd_layout_param(part, ND_PARAM_Q, 1));
    cr_expect_eq(nd_layout_unit(part, ND_UNIT_BLOCK, 2)->index, 0);
    cr_expect_eq(nd_layout_unit(part, ND_UNIT_HEAD, -1)->index, 1);
    cr_expect_eq(nd_layout_unit(part, ND_UNIT_EMBEDDING, -1)->index, 2);
    cr_expect_eq(nd_layout_unit(part, ND_UNIT_BLOCK, 0)->index, 3);
    for (int i = 0; i < part->param_count; i++) {
        const nd_param *p = &part->params[i], *q = nd_layout_param(whole, p->id, p->layer);
        cr_expect_str_eq(p->name, q->name);
        cr_expect_eq(p->random_stream, q->random_stream);
        cr_expect_eq(p->offset, q->offset);
    }
    nd_layout_destroy(whole);
    nd_layout_destroy(part);
}

/* Tied: one table, in the head's unit, under the name of the embedding. */
Test(params, a_tied_table_is_in_the_unit_of_the_head)
{
    nd_shape shape = shape_of(true);
    layout = layout_of(&shape, 1, 1, 0, 0);
    const nd_unit *head = nd_layout_unit(layout, ND_UNIT_HEAD, -1);
    cr_expect_null(nd_layout_unit(layout, ND_UNIT_EMBEDDING, -1));
    cr_expect_eq(nd_layout_param(layout, ND_PARAM_EMBED, -1)->unit, head);
    cr_expect_eq(nd_layout_param(layout, ND_PARAM_HEAD, -1),
                 nd_layout_param(layout, ND_PARAM_EMBED, -1));
    cr_expect_str_eq(nd_layout_param(layout, ND_PARAM_HEAD, -1)->name, "model.embed_tokens.weight");
}

/* A chunk of the head on a CPU has 1,024 rows of the product where their logits have room in 256
 * MiB, and more where 64 MiB hold more; never more than there are tokens. */
Test(dims, chunks_of_the_head_have_rows_enough_to_pay_for_its_weight)
{
    static const struct {
        int64_t vocab, tokens, tp;
        nd_precision precision;
        int64_t rows;                             /* of one tp peer */
        bool gpu;                                 /* whole tiles of 128 rows, and all columns */
        int64_t columns, most_rows, most_columns; /* columns 0: any; most 0: no limit */
    } cases[] = {
        {32000, 8192, 1, ND_PRECISION_BF16, 1048},
        {1000, 65536, 1, ND_PRECISION_BF16, 33554},
        {128256, 8192, 1, ND_PRECISION_BF16, 1024},
        {128256, 8192, 2, ND_PRECISION_BF16, 512},
        {128256, 8192, 1, ND_PRECISION_FP32, 523},
        {1 << 20, 8192, 1, ND_PRECISION_BF16, 128},
        {1 << 28, 8192, 1, ND_PRECISION_BF16, 1},
        {128256, 600, 1, ND_PRECISION_BF16, 600},
        {128256, 8192, 1, ND_PRECISION_BF16, 2048, true, 128256},
        {1 << 21, 8192, 1, ND_PRECISION_BF16, 128, true, 1 << 21},
        {1 << 22, 8192, 1, ND_PRECISION_BF16, 64, true, 1 << 22},
        {128256, 8192, 1, ND_PRECISION_BF16, 100, true, 128256, 100, 64},
        {1000, 50, 1, ND_PRECISION_BF16, 50, false, 1000},
        {1100, 50, 1, ND_PRECISION_BF16, 50, false, 576}, /* two nearly equal tiles of 64s */
        {32000, 50, 1, ND_PRECISION_BF16, 7, false, 512, 7, 500},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_shape shape = shape_of(false);
        nd_config config = {0};
        const nd_mesh mesh = {{1, 1, 1, 1, (int)cases[i].tp}};
        shape.vocab = cases[i].vocab;
        config.train.micro_batch_size = 1;
        config.train.sequence_length = cases[i].tokens;
        config.train.precision = cases[i].precision;
        config.limits.head_rows = cases[i].most_rows;
        config.limits.head_columns = cases[i].most_columns;
        const nd_dims d =
            nd_dims_of(&shape, &mesh, nd_mesh_coord_of(&mesh, 0), &config, cases[i].gpu);
        cr_expect_eq(d.head_rows, cases[i].rows, "case %zu: %ld rows", i, (long)d.head_rows);
        cr_expect(!cases[i].columns || d.head_columns == cases[i].columns, "case %zu: %ld columns",
                  i, (long)d.head_columns);
    }
}

/* Gemma's factor of embeddings is rounded to the type that is computed with: sqrt(3072) to 55.5. */
Test(dims, embeddings_are_multiplied_as_in_transformers)
{
    nd_shape shape = shape_of(false);
    nd_config config = {.train = {.micro_batch_size = 1, .sequence_length = 16}};
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    shape.family = ND_FAMILY_GEMMA3_TEXT;
    shape.hidden = 3072;
    config.train.precision = ND_PRECISION_FP32;
    nd_dims d = nd_dims_of(&shape, &one, (nd_coord){{0}}, &config, false);
    cr_expect_eq(d.lookup_scale, (float)sqrt(3072));
    cr_expect(d.gelu && d.norm_plus == 1);
    config.train.precision = ND_PRECISION_BF16;
    cr_expect_eq(nd_dims_of(&shape, &one, (nd_coord){{0}}, &config, false).lookup_scale, 55.5f);
}

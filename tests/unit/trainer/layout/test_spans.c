// SPDX-License-Identifier: Apache-2.0
/*
 * The shards of random models on random meshes, each rank's by its own layout and by that of the
 * first one of its group, which is asked for all shards: every element of every parameter lies in
 * one place of one rank (of each tp rank, when tp does not split it; of some, when it is of a KV
 * head that they share), one of them owns it, no two elements lie in the same place, and padding
 * belongs to none.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/shapes.h"
#include "trainer/layout/layout.h"

enum { ROUNDS = 60 };

typedef struct random_case {
    nd_shape shape;
    nd_mesh mesh;
    unsigned converted; /* bit i: linear i of even layers, bit i + 7: of odd layers */
    char text[160];
} random_case;

typedef struct dice {
    uint64_t round, thrown;
} dice;

/* 1 to `most` */
static int64_t throw_dice(dice *d, int64_t most)
{
    uint64_t x = (d->round * 1000 + ++d->thrown) * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    return (int64_t)((x ^ x >> 31) % (uint64_t)most) + 1;
}

static random_case case_of(uint64_t round)
{
    dice d = {.round = round};
    int64_t tp = throw_dice(&d, 4), groups = throw_dice(&d, 2);
    random_case c = {
        .mesh = {{[ND_AXIS_PP] = 1,
                  [ND_AXIS_DP_REPLICATE] = (int)throw_dice(&d, 2),
                  [ND_AXIS_DP_SHARD] = (int)throw_dice(&d, 5),
                  [ND_AXIS_CP] = (int)throw_dice(&d, 3),
                  [ND_AXIS_TP] = (int)tp}},
        .shape = {.vocab = throw_dice(&d, 90),
                  .hidden = throw_dice(&d, 40),
                  .ffn = tp * throw_dice(&d, 12),
                  .layers = throw_dice(&d, 3),
                  .kv_heads = tp * groups,
                  .heads = tp * groups * throw_dice(&d, 3),
                  .head_dim = 2 * throw_dice(&d, 4),
                  .tied = throw_dice(&d, 2) == 2},
        .converted = throw_dice(&d, 2) == 1 ? 0 : (unsigned)throw_dice(&d, 1 << 14),
    };
    const int64_t any = throw_dice(&d, c.shape.heads);
    c.shape.kv_heads = c.shape.heads % any == 0 ? any : c.shape.kv_heads;
    snprintf(c.text, sizeof c.text,
             "dp_shard %d cp %d tp %d, V %d C %d F %d, %d and %d heads of %d%s, FP8 %#x",
             c.mesh.size[ND_AXIS_DP_SHARD], c.mesh.size[ND_AXIS_CP], c.mesh.size[ND_AXIS_TP],
             (int)c.shape.vocab, (int)c.shape.hidden, (int)c.shape.ffn, (int)c.shape.heads,
             (int)c.shape.kv_heads, (int)c.shape.head_dim, c.shape.tied ? ", tied" : "",
             c.converted);
    return c;
}

static bool converts(void *context, const nd_param *param)
{
    const random_case *c = context;
    int linear = nd_linear_of_param(param->id);
    return c->converted >> (linear + (param->layer % 2 ? ND_LINEAR_COUNT : 0)) & 1;
}

static nd_layout *layout_at(const random_case *c, const nd_mesh *mesh, nd_coord coord)
{
    nd_layout *layout = NULL;
    nd_layout_options options = {.shape = &c->shape,
                                 .mesh = mesh,
                                 .coord = coord,
                                 .converts = converts,
                                 .context = (void *)c};
    cr_assert_eq(nd_layout_create(&options, &layout), ND_OK);
    return layout;
}

/* The elements that the ranks of one replica hold and own. */
typedef struct holdings {
    const random_case *of;
    nd_layout *whole;        /* of a mesh of one: names and sizes */
    unsigned char **holders; /* [params][elements]: ranks that hold it */
    unsigned char **owners;  /* [params][elements]: of those, ranks that own it */
    const nd_layout *layout; /* of the rank whose spans are visited */
    const nd_layout *first;  /* by whose layout they are */
    const nd_unit *unit;
    const nd_param **held; /* [shard_total]: whose element lies there; NULL: padding */
    nd_span before;        /* the span before, number `spans` of its parameter */
    int spans;
} holdings;

static int index_of(const nd_layout *whole, const char *name)
{
    for (int i = 0; i < whole->param_count; i++) {
        if (strcmp(whole->params[i].name, name) == 0) {
            return i;
        }
    }
    cr_assert_fail("no parameter %s", name);
    return -1;
}

/* A span lies in its rank's block, where this is in the shard, and follows the one before. */
static void check_place(holdings *h, const nd_span *span)
{
    const nd_param *p = span->param;
    const nd_segment *segment = &h->unit->segments[p->segment];
    const int64_t row = span->row - p->row_begin, col = span->col - p->col_begin;
    cr_assert(p->unit == h->unit && span->rows > 0 && span->cols > 0);
    cr_assert(row >= 0 && row + span->rows <= p->local_rows && col >= 0 &&
                  col + span->cols <= p->local_cols,
              "%s: a span of %s leaves its block", h->of->text, p->name);
    cr_assert_eq(span->begin - segment->shard_offset +
                     h->layout->shard_index * segment->shard_count,
                 p->offset + row * p->local_cols + col, "%s: %s", h->of->text, p->name);
    h->spans = h->before.param == p ? h->spans + 1 : 1;
    cr_assert(h->spans <= 3 && (h->spans == 1 || span->begin > h->before.begin), "%s: %s",
              h->of->text, p->name);
    h->before = *span;
}

static nd_status hold(void *context, const nd_span *span)
{
    holdings *h = context;
    const nd_param *p = span->param;
    const nd_segment *segment = &h->unit->segments[p->segment];
    int64_t count = span->rows * span->cols, shard = segment->shard_offset;
    int param = index_of(h->whole, p->name);
    check_place(h, span);
    cr_assert(span->begin >= shard && span->begin + count <= shard + segment->shard_count,
              "%s: a span of %s leaves its segment's shard", h->of->text, p->name);
    cr_assert(span->begin >= h->unit->shard_offset &&
                  span->begin + count <= h->unit->shard_offset + h->unit->shard_count,
              "%s: a span of %s leaves its unit's shard", h->of->text, p->name);
    for (int64_t i = 0; i < count; i++) {
        int64_t element = nd_span_global(span, i), place = span->begin + i;
        const int64_t run = i % nd_span_adjacent(span);
        cr_assert_eq(element, nd_span_global(span, i - run) + run);
        cr_assert(element >= 0 && element < p->rows * p->cols, "%s: %s has no element %ld",
                  h->of->text, p->name, (long)element);
        cr_assert_null(h->held[place], "%s: %s and %s share a place of the flat state", h->of->text,
                       p->name, h->held[place] ? h->held[place]->name : "");
        h->held[place] = p;
        h->holders[param][element]++;
        h->owners[param][element] += p->owned;
    }
    return ND_OK;
}

/* The ranges of the optimizer and of the norm hold the spans, each place once, and besides only the
 * rows that pad a vocabulary to tp. */
static void check_ranges(const holdings *h)
{
    const nd_layout *layout = h->layout;
    const nd_param **held = calloc((size_t)layout->shard_total, sizeof *held);
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[i];
        nd_flat_range range = nd_layout_shard_range(layout, p);
        cr_assert_eq(range.decay, range.begin < range.end && p->axes == 2, "%s: decay of %s",
                     h->of->text, p->name);
        for (int64_t place = range.begin; place < range.end; place++) {
            bool vocabulary = p->id == ND_PARAM_EMBED || p->id == ND_PARAM_HEAD;
            cr_assert_null(held[place]);
            held[place] = &h->first->params[i];
            const nd_param *there = h->held[place];
            cr_assert(there == &h->first->params[i] || (!there && vocabulary),
                      "%s: the range of %s holds padding", h->of->text, p->name);
        }
    }
    for (int64_t place = 0; place < layout->shard_total; place++) {
        cr_assert(!h->held[place] || held[place] == h->held[place],
                  "%s: an element of %s lies in no range", h->of->text, h->held[place]->name);
    }
    free(held);
}

static void hold_rank(holdings *h, nd_coord coord)
{
    const nd_coord beginning = {{[ND_AXIS_DP_REPLICATE] = coord.at[ND_AXIS_DP_REPLICATE],
                                 [ND_AXIS_TP] = coord.at[ND_AXIS_TP]}};
    nd_layout *layout = layout_at(h->of, &h->of->mesh, coord),
              *first = layout_at(h->of, &h->of->mesh, beginning);
    h->held = calloc((size_t)layout->shard_total, sizeof *h->held);
    h->layout = layout;
    h->first = first;
    h->before.param = NULL;
    int64_t end = 0;
    for (int u = 0; u < first->unit_count; u++) {
        h->unit = &first->units[u];
        cr_assert_eq(h->unit->shard_offset, end, "%s: units are not adjacent", h->of->text);
        end += h->unit->shard_count;
        cr_assert_eq(nd_layout_each_span(first, h->unit, layout->shard_index, hold, h), ND_OK);
    }
    cr_assert_eq(layout->shard_total, end);
    check_ranges(h);
    free(h->held);
    nd_layout_destroy(first);
    nd_layout_destroy(layout);
}

static void check_holders(const holdings *h)
{
    const int tp = h->of->mesh.size[ND_AXIS_TP];
    int copies = 1; /* the least that deals equally many KV heads to each rank */
    while (copies * h->of->shape.kv_heads % tp != 0) {
        copies++;
    }
    for (int i = 0; i < h->whole->param_count; i++) {
        const nd_param *p = &h->whole->params[i];
        const bool shared = (p->id == ND_PARAM_K || p->id == ND_PARAM_V);
        for (int64_t e = 0; e < p->rows * p->cols; e++) {
            cr_assert_eq(h->holders[i][e],
                         p->axes == 1 ? tp
                         : shared     ? copies
                                      : 1,
                         "%s: %d ranks hold element %ld of %s", h->of->text, h->holders[i][e],
                         (long)e, p->name);
            cr_assert_eq(h->owners[i][e], 1, "%s: %d ranks own element %ld of %s", h->of->text,
                         h->owners[i][e], (long)e, p->name);
        }
    }
}

static void check_replica(const random_case *c, int replica)
{
    holdings h = {.of = c, .whole = layout_at(c, NULL, (nd_coord){{0}})};
    h.holders = calloc((size_t)h.whole->param_count, sizeof *h.holders);
    h.owners = calloc((size_t)h.whole->param_count, sizeof *h.owners);
    for (int i = 0; i < h.whole->param_count; i++) {
        const size_t elements = (size_t)(h.whole->params[i].rows * h.whole->params[i].cols);
        h.holders[i] = calloc(2 * elements, 1);
        h.owners[i] = h.holders[i] + elements;
    }
    for (int rank = 0; rank < nd_mesh_world_size(&c->mesh); rank++) {
        nd_coord coord = nd_mesh_coord_of(&c->mesh, rank);
        if (coord.at[ND_AXIS_DP_REPLICATE] == replica) {
            hold_rank(&h, coord);
        }
    }
    check_holders(&h);
    for (int i = 0; i < h.whole->param_count; i++) {
        free(h.holders[i]);
    }
    free(h.holders);
    free(h.owners);
    nd_layout_destroy(h.whole);
}

Test(spans, every_element_lies_in_one_place_of_random_meshes)
{
    for (uint64_t round = 0; round < ROUNDS; round++) {
        random_case c = case_of(round);
        for (int replica = 0; replica < c.mesh.size[ND_AXIS_DP_REPLICATE]; replica++) {
            check_replica(&c, replica);
        }
    }
}

/* Fewer vocabulary rows than tp ranks: the last ones hold nothing but padding. */
Test(spans, a_vocabulary_smaller_than_tp)
{
    random_case c = {.mesh = {{1, 1, 2, 1, 4}},
                     .shape = {SIZES(5, 12, 8, 1, 4, 4, 2)},
                     .text = "vocabulary of 5"};
    check_replica(&c, 0);
}

// SPDX-License-Identifier: Apache-2.0
/* Which tensors there are, and which of them log.dump_tensors names. */
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "trainer/dump/parts.h"

const nd_dump_row nd_dump_rows[ND_DUMP_POINTS] = {
#define ND_POINT(id, unit, name, gradient, rows, columns, param, when)                             \
    {name,                                                                                         \
     ND_UNIT_##unit,                                                                               \
     gradient,                                                                                     \
     ND_DUMP_ROWS_##rows,                                                                          \
     ND_DUMP_COLUMNS_##columns,                                                                    \
     ND_PARAM_##param,                                                                             \
     ND_DUMP_WHEN_##when},
#include "trainer/dump/points.def"
#undef ND_POINT
};

static bool has(const nd_shape *shape, int64_t tp, const nd_dump_row *row)
{
    const bool when[] = {[ND_DUMP_WHEN_ALWAYS] = true,
                         [ND_DUMP_WHEN_PRE_NORM] = shape->post_norm != 1,
                         [ND_DUMP_WHEN_POST_NORM] = shape->post_norm == 1,
                         [ND_DUMP_WHEN_ONE_COPY] = nd_shape_kv_copies(shape, tp) == 1};
    return when[row->when];
}

/* The next word of a list, without spaces before it; false: there is none. */
static bool next_word(const char **list, char word[ND_DUMP_NAME])
{
    const char *begin = *list + strspn(*list, " ,");
    const size_t n = strcspn(begin, ",");
    snprintf(word, ND_DUMP_NAME, "%.*s", (int)n, begin);
    *list = begin + n;
    return n > 0;
}

bool nd_dump_names(const char *list, const char *name)
{
    char pattern[ND_DUMP_NAME];
    bool found = false;
    while (!found && next_word(&list, pattern)) {
        found = fnmatch(pattern, name, 0) == 0;
    }
    return found;
}

/* The points of one unit in one pass. */
static nd_status each_point(const nd_dump_all *all, nd_dump_subject of, nd_unit_kind unit,
                            bool gradient, int64_t *order)
{
    for (int p = 0; p < ND_DUMP_POINTS; p++) {
        const nd_dump_row *row = &nd_dump_rows[p];
        if (row->unit != unit || row->gradient != gradient) {
            continue;
        }
        of.order = (*order)++;
        if (!has(all->shape, all->tp, row)) {
            continue;
        }
        char block[40] = "";
        if (unit == ND_UNIT_BLOCK) {
            snprintf(block, sizeof block, "model.layers.%lld.", (long long)of.layer);
        }
        snprintf(of.name, sizeof of.name, "%s%s", block, row->name);
        of.row = row;
        ND_TRY(all->visit(all->context, &of));
    }
    return ND_OK;
}

static nd_status each_param(const nd_dump_all *all, bool gradient, int64_t *order)
{
    const nd_layout *layout = all->layout;
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[gradient ? layout->param_count - 1 - i : i];
        nd_dump_subject of = {.param = p, .gradient = gradient, .order = (*order)++};
        snprintf(of.name, sizeof of.name, "%s%s", p->name, gradient ? ".grad" : "");
        ND_TRY(all->visit(all->context, &of));
    }
    return ND_OK;
}

nd_status nd_dump_each(const nd_dump_all *all)
{
    const int64_t layers = all->layout->layers;
    int64_t order = 0;
    ND_TRY(each_param(all, false, &order));
    for (int micro = 0; micro < all->micros; micro++) {
        nd_dump_subject of = {.micro = micro, .layer = -1};
        for (int64_t l = 0; l < layers; l++) {
            of.layer = l;
            ND_TRY(each_point(all, of, ND_UNIT_BLOCK, false, &order));
        }
        of.layer = -1;
        ND_TRY(each_point(all, of, ND_UNIT_HEAD, false, &order));
        ND_TRY(each_point(all, of, ND_UNIT_HEAD, true, &order));
        for (int64_t l = layers; l-- > 0;) {
            of.layer = l;
            ND_TRY(each_point(all, of, ND_UNIT_BLOCK, true, &order));
        }
    }
    return each_param(all, true, &order);
}

/* A word of the list, looked for among the names. */
typedef struct search {
    char word[ND_DUMP_NAME];
    bool found;
    nd_suggest suggest;
    char near[ND_DUMP_NAME];
    char known[1500]; /* those of layer 0, with N in its place */
} search;

static nd_status look(void *context, const nd_dump_subject *of)
{
    search *s = context;
    const int before = s->suggest.distance;
    s->found |= fnmatch(s->word, of->name, 0) == 0;
    nd_suggest_offer(&s->suggest, of->name);
    if (s->suggest.distance < before) {
        snprintf(s->near, sizeof s->near, "%s", of->name);
    }
    const char *last = strrchr(s->known, ' '), *in_layer = strstr(of->name, ".layers.0.");
    const size_t length = strlen(s->known);
    if ((in_layer || !strstr(of->name, ".layers.")) && !(of->param && of->gradient)) {
        snprintf(s->known + length, sizeof s->known - length, "%s%s%s", last || length ? ", " : "",
                 in_layer ? "N." : "", in_layer ? in_layer + sizeof ".layers.0." - 1 : of->name);
    }
    return ND_OK;
}

static nd_status check_word(nd_dump_all *all, search *s)
{
    nd_suggest_init(&s->suggest, s->word);
    all->context = s;
    ND_TRY(nd_dump_each(all));
    return s->found
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "log.dump_tensors has \"%s\", which is no tensor of this "
                         "model%s%s%s; there are, with N. for model.layers.NUMBER. and also .grad "
                         "of each weight: %s",
                         s->word, s->near[0] ? "; did you mean \"" : "", s->near,
                         s->near[0] ? "\"?" : "", s->known);
}

nd_status nd_dump_check(const nd_config *config, const nd_shape *shape)
{
    const char *list = config->log.dump_tensors;
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    const nd_layout_options options = {.shape = shape, .mesh = &one};
    nd_layout *layout = NULL;
    nd_status status = ND_OK;
    if (!*list) {
        return ND_OK;
    }
    ND_TRY(nd_layout_create(&options, &layout));
    nd_dump_all all = {.layout = layout,
                       .shape = shape,
                       .tp = config->resolved_mesh.size[ND_AXIS_TP],
                       .micros = 1,
                       .visit = look};
    search s = {.found = false};
    while (status == ND_OK && next_word(&list, s.word)) {
        status = check_word(&all, &s);
        s = (search){.found = false};
    }
    nd_layout_destroy(layout);
    return status;
}

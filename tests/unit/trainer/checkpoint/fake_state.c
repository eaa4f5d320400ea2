// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/trainer/checkpoint/fake_state.h"

#include <stdio.h>
#include <stdlib.h>

#include "tests/unit/trainer/shapes.h"

nd_shape fake_shape(bool tied)
{
    return (nd_shape){SIZES(97, 24, 36, 3, 8, 4, 4),
                      .max_positions = 64,
                      .rms_eps = 1e-5,
                      .init_std = 0.02,
                      .tied = tied,
                      .rope = {.theta = 10000.0},
                      .bos_id = -1,
                      .eos_id = -1};
}

static bool is_odd(void *context, const nd_param *param)
{
    return param->fp8 && param->layer % 2 == 1;
}

nd_layout *fake_layout(const nd_shape *shape, const nd_mesh *mesh, int rank, bool converts)
{
    nd_layout *layout = NULL;
    nd_layout_options options = {.shape = shape,
                                 .mesh = mesh,
                                 .coord = nd_mesh_coord_of(mesh, rank),
                                 .converts = converts ? is_odd : NULL};
    ND_ASSERT(nd_layout_create(&options, &layout) == ND_OK);
    return layout;
}

float fake_value(nd_state_kind array, const char *param, int64_t element)
{
    uint32_t hash = 2166136261u;
    for (const char *c = param; *c; c++) {
        hash = (hash ^ (uint8_t)*c) * 16777619u;
    }
    hash = (hash ^ (uint32_t)array) * 16777619u;
    hash = (hash ^ (uint32_t)element) * 2654435761u;
    return (float)(hash >> 9); /* 23 bits */
}

static fake_state allocate(const nd_layout *layout, float value)
{
    fake_state state;
    for (int a = 0; a < ND_STATE_KINDS; a++) {
        state.arrays[a] = malloc((size_t)layout->shard_total * sizeof(float));
        ND_ASSERT(state.arrays[a]);
        for (int64_t i = 0; i < layout->shard_total; i++) {
            state.arrays[a][i] = value;
        }
    }
    return state;
}

typedef struct visit {
    fake_state *state;
    int arrays;
    bool checks;
} visit;

static nd_status visit_span(void *context, const nd_span *span)
{
    visit *v = context;
    for (int64_t i = 0; i < span->rows * span->cols; i++) {
        int64_t element = nd_span_global(span, i);
        for (int a = 0; a < v->arrays; a++) {
            float *at = &v->state->arrays[a][span->begin + i];
            float value = fake_value(a, span->param->name, element);
            if (!v->checks) {
                *at = value;
            } else if (*at != value) {
                fprintf(stderr, "%s of %s at element %lld is %g, not %g\n", nd_state_kind_names[a],
                        span->param->name, (long long)element, (double)*at, (double)value);
                abort();
            }
        }
    }
    return ND_OK;
}

nd_status fake_each_span(const nd_layout *layout, nd_span_visit *each, void *context)
{
    for (int u = 0; u < layout->unit_count; u++) {
        ND_TRY(nd_layout_each_span(layout, &layout->units[u], layout->shard_index, each, context));
    }
    return ND_OK;
}

fake_state fake_make(const nd_layout *layout)
{
    fake_state state = allocate(layout, -1.0f);
    visit v = {.state = &state, .arrays = ND_STATE_KINDS};
    ND_ASSERT(fake_each_span(layout, visit_span, &v) == ND_OK);
    return state;
}

fake_state fake_empty(const nd_layout *layout)
{
    return allocate(layout, -2.0f);
}

void fake_free(fake_state *state)
{
    for (int a = 0; a < ND_STATE_KINDS; a++) {
        free(state->arrays[a]);
    }
}

void fake_check(const nd_layout *layout, const fake_state *state, int arrays)
{
    visit v = {.state = (fake_state *)state, .arrays = arrays, .checks = true};
    ND_ASSERT(fake_each_span(layout, visit_span, &v) == ND_OK);
}

// SPDX-License-Identifier: Apache-2.0
/* Families, and which meshes can hold a shape. */
#include "trainer/shape/shape.h"

#include <stdio.h>

enum { OFFERED_MAX = 8 };

const nd_family_row nd_families[ND_FAMILY_COUNT] = {
#define WINDOW(rule)       ND_WINDOW_##rule
#define ND_FAMILY(id, ...) [ND_FAMILY_##id] = {__VA_ARGS__},
#include "trainer/shape/family.def"
#undef ND_FAMILY
};

/* "1, 2 or 4" */
static void print_sizes(const int64_t *fits, int count, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < count && used < size; i++) {
        const char *between = i == 0 ? "" : i == count - 1 ? " or " : ", ";
        used += (size_t)snprintf(text + used, size - used, "%s%lld", between, (long long)fits[i]);
    }
}

static nd_status check_divides(const nd_shape *shape, const char *what, int64_t extent, int size)
{
    int64_t fits[OFFERED_MAX];
    int count = 0;
    char sizes[160];
    if (extent % size == 0) {
        return ND_OK;
    }
    for (int64_t n = 1; n <= shape->heads && count < OFFERED_MAX; n++) {
        if (shape->heads % n == 0 && shape->ffn % n == 0) {
            fits[count++] = n;
        }
    }
    print_sizes(fits, count, sizes, sizeof sizes);
    return nd_fail(ND_ERR_CONFIG,
                   "the model's %s is %lld, which mesh.tp %d does not divide, but each "
                   "tensor-parallel rank holds an equal part; give --tp-size %s",
                   what, (long long)extent, size, sizes);
}

/* "give --ulysses 2 or 4 and ...": the sizes that divide cp and deal the heads of a rank evenly. */
static void advise_ulysses(int64_t heads, int64_t kv_heads, int cp, char *text, size_t size)
{
    int64_t fits[OFFERED_MAX];
    int count = 0;
    char sizes[160];
    for (int64_t n = 2; n <= nd_min(cp, heads) && count < OFFERED_MAX; n++) {
        if (cp % n == 0 && heads % n == 0 && (kv_heads % n == 0 || n % kv_heads == 0)) {
            fits[count++] = n;
        }
    }
    print_sizes(fits, count, sizes, sizeof sizes);
    if (count == 0) {
        snprintf(
            text, size,
            "with mesh.cp %d no --ulysses above 1 is possible, so leave it out, with --cp-comm "
            "allgather or ring",
            cp);
    } else {
        snprintf(text, size, "give --ulysses %s and --cp-comm allgather or ring", sizes);
    }
}

/* Heads of a tensor-parallel rank are dealt to the ranks of the group ulysses; KV heads too, or
 * several ranks have the same one. */
static nd_status check_ulysses(const nd_shape *shape, const nd_mesh *mesh)
{
    char advice[256];
    const int64_t tp = mesh->size[ND_AXIS_TP], ranks = nd_mesh_group_size(mesh, ND_GROUP_ULYSSES);
    const int64_t heads = shape->heads / tp;
    const int64_t kv_heads = nd_shape_local_kv_heads(shape, tp);
    advise_ulysses(heads, kv_heads, mesh->size[ND_AXIS_CP], advice, sizeof advice);
    if (heads % ranks != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "the model's num_attention_heads %lld / mesh.tp %lld = %lld heads cannot be "
                       "dealt evenly to %lld ranks (parallel.ulysses, or mesh.cp with "
                       "parallel.cp_comm ulysses); %s",
                       (long long)shape->heads, (long long)tp, (long long)heads, (long long)ranks,
                       advice);
    }
    if (kv_heads % ranks != 0 && ranks % kv_heads != 0) {
        return nd_fail(
            ND_ERR_CONFIG,
            "a rank of mesh.tp %lld has %lld of num_key_value_heads %lld, which neither divide "
            "%lld "
            "ranks (parallel.ulysses, or mesh.cp with parallel.cp_comm ulysses) nor are a multiple "
            "of them; %s",
            (long long)tp, (long long)kv_heads, (long long)shape->kv_heads, (long long)ranks,
            advice);
    }
    return ND_OK;
}

/* The next longer sequence that cp and tp divide. */
static long long next_length(int64_t micro_batch, int64_t sequence, int cp, int tp)
{
    const int64_t unit = cp > 1 ? 2 * (int64_t)cp : 1;
    int64_t length = (sequence / unit + 1) * unit;
    while (micro_batch * (length / cp) % tp != 0) {
        length += unit;
    }
    return (long long)length;
}

nd_status nd_shape_check_mesh(const nd_shape *shape, const nd_mesh *mesh, int64_t micro_batch,
                              int64_t sequence)
{
    int tp = mesh->size[ND_AXIS_TP], cp = mesh->size[ND_AXIS_CP];
    ND_TRY(check_divides(shape, "num_attention_heads", shape->heads, tp));
    ND_TRY(check_divides(shape, "intermediate_size", shape->ffn, tp));
    ND_TRY(check_ulysses(shape, mesh));
    if (shape->head_dim % 2 != 0) {
        return nd_fail(ND_ERR_CONFIG, "the model's head_dim %lld is odd; RoPE needs an even one",
                       (long long)shape->head_dim);
    }
    if (cp > 1 && sequence % (2 * (int64_t)cp) != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.sequence_length %lld is not divisible by 2 x mesh.cp = %lld; context "
                       "parallelism gives each rank two chunks, so take a length such as %lld",
                       (long long)sequence, 2 * (long long)cp,
                       next_length(micro_batch, sequence, cp, tp));
    }
    int64_t tokens = micro_batch * (sequence / cp);
    if (tokens % tp != 0) {
        return nd_fail(
            ND_ERR_CONFIG,
            "train.micro_batch_size %lld x train.sequence_length %lld / mesh.cp %d = %lld "
            "local tokens are not divisible by mesh.tp %d; take a length such as %lld",
            (long long)micro_batch, (long long)sequence, cp, (long long)tokens, tp,
            next_length(micro_batch, sequence, cp, tp));
    }
    return ND_OK;
}

int64_t nd_shape_window(const nd_shape *s, int64_t layer, int64_t keys)
{
    return nd_layer_set_has(&s->full, layer) || s->window >= keys ? 0 : s->window;
}

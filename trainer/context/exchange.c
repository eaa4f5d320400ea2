// SPDX-License-Identifier: Apache-2.0
#include "trainer/context/cp.h"

#include <math.h>
#include <stdio.h>

#include "runtime/base/math.h"

/* Keys: gathered once a pass and once in backward, while their gradients are reduced beside
 * products; a ring's travel beside attention, but their gradients one hop behind are waited for.
 * Heads: q, k, v and the output in each pass; q, k, v again, the output and its gradient in
 * backward, while the last exchange goes on beside products. */
static double exposed_bytes(const nd_shape *shape, const nd_config *config, const nd_mesh *mesh,
                            bool ring)
{
    const double tp = mesh->size[ND_AXIS_TP], u = nd_mesh_group_size(mesh, ND_GROUP_ULYSSES);
    const double others = nd_mesh_group_size(mesh, ND_GROUP_CP) - 1;
    const double H = (double)shape->heads / tp;
    const double K = (double)nd_shape_local_kv_heads(shape, mesh->size[ND_AXIS_TP]);
    const double copies = K < u ? u : K; /* KV heads that are sent, with replicas */
    const double act = config->train.precision == ND_PRECISION_FP32 ? 4 : 2;
    const double passes = config->parallel.recompute == ND_RECOMPUTE_FULL ? 2 : 1;
    const double heads = passes * (2 * H + 2 * copies) + 3 * H + 2 * copies;
    const double keys = 2 * copies * others * (ring ? 4 : act * (passes + 1));
    const double tokens = (double)config->train.micro_batch_size *
                          (double)config->train.sequence_length / mesh->size[ND_AXIS_CP] *
                          (double)config->train.gradient_accumulation_steps;
    return tokens * (double)shape->head_dim * (double)shape->layers *
           (heads * act * (u - 1) / u + keys);
}

int nd_cp_list_exchanges(const nd_shape *shape, const nd_config *config,
                         nd_cp_exchange list[ND_CP_EXCHANGES_MAX])
{
    nd_mesh mesh = config->resolved_mesh;
    const int cp = mesh.size[ND_AXIS_CP];
    const int64_t most = nd_min(cp, shape->heads), tp = mesh.size[ND_AXIS_TP];
    int count = 0;
    for (mesh.ulysses = 1; mesh.ulysses <= most; mesh.ulysses++) {
        const int64_t u = mesh.ulysses, heads = shape->heads / tp;
        const int64_t kv_heads = nd_shape_local_kv_heads(shape, tp);
        const bool fits = cp % u == 0 && heads % u == 0 && (kv_heads % u == 0 || u % kv_heads == 0);
        for (int ring = 0; ring < (u < cp ? 2 : 1); ring++) {
            if (fits && count < ND_CP_EXCHANGES_MAX) {
                list[count++] =
                    (nd_cp_exchange){mesh.ulysses, ring, exposed_bytes(shape, config, &mesh, ring)};
            }
        }
    }
    return count;
}

nd_cp_exchange nd_cp_exchange_of(const nd_shape *shape, const nd_config *config)
{
    nd_cp_exchange list[ND_CP_EXCHANGES_MAX],
        best = {
            .ulysses = nd_mesh_group_size(&config->resolved_mesh, ND_GROUP_ULYSSES),
            .ring = config->parallel.cp_comm == ND_CP_RING,
            .exposed_bytes = INFINITY,
        };
    const bool chooses = config->parallel.cp_comm == ND_CP_AUTO;
    const int given = best.ulysses, count = nd_cp_list_exchanges(shape, config, list);
    for (int i = 0; i < count; i++) {
        const bool as_given = list[i].ulysses == given && list[i].ring == best.ring;
        const bool may = chooses ? given == 1 || list[i].ulysses == given : as_given;
        best = may && list[i].exposed_bytes < best.exposed_bytes ? list[i] : best;
    }
    return best;
}

nd_mesh nd_shape_mesh(const nd_shape *shape, const nd_config *config)
{
    nd_mesh mesh = config->resolved_mesh;
    mesh.kv_copies = (int)nd_shape_kv_copies(shape, mesh.size[ND_AXIS_TP]);
    mesh.ulysses = nd_cp_exchange_of(shape, config).ulysses;
    return mesh;
}

const char *nd_cp_exchange_format(const nd_cp_exchange *e, const nd_mesh *mesh, char *buffer,
                                  size_t size)
{
    const char *keys = e->ring ? "ring" : "allgather";
    if (e->ulysses == 1) {
        snprintf(buffer, size, "%s", keys);
    } else if (e->ulysses == mesh->size[ND_AXIS_CP]) {
        snprintf(buffer, size, "ulysses");
    } else {
        snprintf(buffer, size, "ulysses %d, then %s", e->ulysses, keys);
    }
    return buffer;
}

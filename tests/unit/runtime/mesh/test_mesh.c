// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "runtime/mesh/mesh.h"
#include "tests/support/tempdir.h"

Test(mesh, rank_formula_and_back)
{
    nd_mesh mesh = {{1, 2, 3, 2, 5}};
    for (int r = 0; r < nd_mesh_world_size(&mesh); r++) {
        nd_coord c = nd_mesh_coord_of(&mesh, r);
        cr_assert_eq((((c.at[0] * 2 + c.at[1]) * 3 + c.at[2]) * 2 + c.at[3]) * 5 + c.at[4], r);
        cr_assert_eq(nd_mesh_rank_of(&mesh, c), r);
    }
}

static void check_groups(nd_mesh mesh)
{
    int world = nd_mesh_world_size(&mesh);
    for (nd_group_kind k = 0; k < ND_GROUP_COUNT; k++) {
        int size = nd_mesh_group_size(&mesh, k);
        for (int r = 0; r < world; r++) {
            int index = nd_mesh_group_index(&mesh, k, r);
            cr_assert_eq(nd_mesh_group_member(&mesh, k, r, index), r);
            for (int i = 0, last = -1; i < size; i++) {
                int member = nd_mesh_group_member(&mesh, k, r, i);
                cr_assert_gt(member, last, "members ascend");
                last = member;
                cr_assert_eq(nd_mesh_group_index(&mesh, k, member), i);
            }
        }
    }
}

Test(mesh, groups_partition_the_world_and_agree)
{
    const nd_mesh mesh = {{1, 2, 3, 2, 2}}, heads = {{1, 1, 2, 6, 2}, 3};
    check_groups(mesh);
    check_groups(heads);
    cr_expect_eq(nd_mesh_group_size(&heads, ND_GROUP_DP_SHARD_CP), 12);
    cr_expect_eq(nd_mesh_group_size(&heads, ND_GROUP_CP), 2);
    cr_expect_eq(nd_mesh_group_size(&heads, ND_GROUP_ULYSSES), 3);
    cr_expect_eq(nd_mesh_group_member(&heads, ND_GROUP_ULYSSES, 8, 2), 10, "adjacent in cp");
    cr_expect_eq(nd_mesh_group_member(&heads, ND_GROUP_CP, 8, 0), 2, "the same place");
    cr_assert_eq(nd_mesh_group_size(&mesh, ND_GROUP_DP_SHARD_CP), 6);
    cr_assert_eq(nd_mesh_group_member(&mesh, ND_GROUP_TP, 5, 0), 4, "tp peers are adjacent");
    cr_assert_eq(nd_mesh_group_member(&mesh, ND_GROUP_DP_SHARD, 1, 2), 9);
}

Test(mesh, a_group_has_a_communicator_when_it_carries_something)
{
    for (nd_group_kind k = 0; k < ND_GROUP_COUNT; k++) {
        nd_group_traffic t = nd_group_rows[k].carries;
        bool shards = k == ND_GROUP_DP_SHARD_CP, idle = k == ND_GROUP_DP || k == ND_GROUP_DP_SHARD;
        cr_expect_eq(nd_group_rows[k].communicators,
                     shards ? 2
                     : idle ? 0
                            : 1,
                     "%s", nd_group_name(k));
        cr_expect(!idle || (t.all_gather == ND_TRAFFIC_OTHER && t.rest == ND_TRAFFIC_OTHER));
        cr_expect_gt(strlen(nd_group_rows[k].use), 0);
    }
    nd_group_traffic shards = nd_group_rows[ND_GROUP_DP_SHARD_CP].carries;
    cr_expect(shards.all_gather == ND_TRAFFIC_WEIGHTS &&
              shards.reduce_scatter == ND_TRAFFIC_GRADIENTS);
    nd_group_traffic tp = nd_group_rows[ND_GROUP_TP].carries;
    cr_expect(tp.reduce_scatter == ND_TRAFFIC_ACTIVATIONS && tp.rest == ND_TRAFFIC_OTHER);
}

/* By members of every rank, over meshes with and without axes of size 1. */
Test(mesh, equal_groups_have_equal_members)
{
    int equal = 0;
    for (int sizes = 0; sizes < 32; sizes++) {
        nd_mesh mesh = {
            {1, sizes & 1 ? 2 : 1, sizes & 2 ? 3 : 1, sizes & 4 ? 4 : 1, sizes & 8 ? 2 : 1},
            sizes & 16 ? 1 : 2 << (sizes & 1)};
        mesh.ulysses = mesh.size[ND_AXIS_CP] > 1 ? mesh.ulysses : 1;
        for (nd_group_kind a = 0; a < ND_GROUP_COUNT; a++) {
            for (nd_group_kind b = 0; b < ND_GROUP_COUNT; b++) {
                int size = nd_mesh_group_size(&mesh, a);
                bool same = size == nd_mesh_group_size(&mesh, b);
                for (int rank = 0; same && rank < nd_mesh_world_size(&mesh); rank++) {
                    for (int m = 0; m < size; m++) {
                        same &= nd_mesh_group_member(&mesh, a, rank, m) ==
                                nd_mesh_group_member(&mesh, b, rank, m);
                    }
                }
                cr_expect_eq(nd_mesh_groups_are_equal(&mesh, a, b), same, "%s and %s, mesh %d",
                             nd_group_name(a), nd_group_name(b), sizes);
                equal += same && a != b;
            }
        }
    }
    cr_expect_gt(equal, 100);
}

Test(mesh, resolve_fills_dp_shard_and_names_the_numbers)
{
    nd_mesh mesh = {{1, 2, -1, 1, 2}};
    cr_assert_eq(nd_mesh_resolve(&mesh, 12), ND_OK);
    cr_assert_eq(mesh.size[ND_AXIS_DP_SHARD], 3);
    nd_mesh wrong = {{1, 2, 2, 1, 2}};
    cr_assert_eq(nd_mesh_resolve(&wrong, 6), ND_ERR_CONFIG);
    cr_assert(strstr(nd_error_last()->message, "= 8 workers") &&
              strstr(nd_error_last()->message, "is 6"));
    nd_mesh left = {{1, 2, -1, 1, 2}};
    cr_assert_eq(nd_mesh_resolve(&left, 6), ND_ERR_CONFIG);
    cr_assert_str_eq(nd_error_last()->message,
                     "mesh.dp_shard is -1 (what is left), but dp_replicate 2 x cp 1 x tp 2 = 4 "
                     "does not divide the 6 workers; change an axis or launch.workers");
    nd_mesh replicas = {{1, -1, 2, 1, 2}};
    cr_assert_eq(nd_mesh_resolve(&replicas, 12), ND_OK);
    cr_assert_eq(replicas.size[ND_AXIS_DP_REPLICATE], 3);
    nd_mesh two = {{1, -1, -1, 1, 2}};
    assert_fails(nd_mesh_resolve(&two, 8), ND_ERR_CONFIG,
                 "mesh.dp_replicate and mesh.dp_shard are both -1");
    nd_mesh reserved = {{-1, 1, 1, 1, 1}};
    cr_assert_eq(nd_mesh_resolve(&reserved, 1), ND_ERR_CONFIG, "pp is no axis to be filled");
    nd_mesh zero = {{1, 0, 1, 1, 1}};
    cr_assert_eq(nd_mesh_resolve(&zero, 1), ND_ERR_CONFIG);
    nd_mesh huge = {{1, 1 << 30, -1, 1 << 30, 1 << 30}}; /* its product would overflow */
    assert_fails(nd_mesh_resolve(&huge, 8), ND_ERR_CONFIG, "more than 16777216 ranks");
    nd_mesh most = {{1, 1, -1, 1, 1 << 24}};
    assert_ok(nd_mesh_resolve(&most, 1 << 24));
    nd_mesh square = {{1, 1, -1, 1 << 16, 1 << 16}}; /* 32 bits of its product are 0 */
    assert_fails(nd_mesh_resolve(&square, 8), ND_ERR_CONFIG, "more than 16777216 ranks");
}

/* Adjacent ranks of tp, and without copies each alone. */
Test(mesh, copies_of_kv_heads_are_groups_within_tp)
{
    const nd_mesh mesh = {{1, 1, 2, 1, 6}, .kv_copies = 3}, none = {{1, 1, 2, 1, 6}};
    for (int rank = 0; rank < 12; rank++) {
        cr_expect_eq(nd_mesh_group_size(&none, ND_GROUP_KV_COPIES), 1);
        cr_expect_eq(nd_mesh_group_member(&none, ND_GROUP_KV_COPIES, rank, 0), rank);
        cr_expect_eq(nd_mesh_group_size(&mesh, ND_GROUP_KV_COPIES), 3);
        cr_expect_eq(nd_mesh_group_index(&mesh, ND_GROUP_KV_COPIES, rank), rank % 3);
        for (int i = 0; i < 3; i++) {
            cr_expect_eq(nd_mesh_group_member(&mesh, ND_GROUP_KV_COPIES, rank, i),
                         rank - rank % 3 + i);
        }
    }
    cr_expect_not(nd_mesh_groups_are_equal(&mesh, ND_GROUP_KV_COPIES, ND_GROUP_TP));
}

Test(mesh, a_rank_is_named_by_its_coordinates)
{
    const nd_mesh mesh = {{1, 2, 3, 2, 2}}, hybrid = {{1, 2, 2, 1, 2}}, one = {{1, 1, 1, 1, 1}};
    char text[64];
    cr_expect_str_eq(nd_mesh_format_rank(&mesh, 23, text, sizeof text), "r1 s2 c1 t1");
    cr_expect_str_eq(nd_mesh_format_rank(&hybrid, 5, text, sizeof text), "r1 s0 t1");
    cr_expect_str_eq(nd_mesh_format_rank(&one, 0, text, sizeof text), "");
    cr_expect_str_eq(nd_mesh_format_rank(&mesh, 23, text, 6), "r1 s2", "cut, never beyond");
}

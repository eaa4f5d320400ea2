// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "trainer/worker/worker.h"

/* The cards stay the test's. */
static nd_peers take(nd_peer_card *cards, int count, int rank)
{
    nd_peers peers = {.cards = cards};
    assert_ok(nd_peers_index(&peers, count, rank));
    return peers;
}

Test(peers, hosts_are_listed_once_in_the_order_of_ranks)
{
    nd_peer_card block[] = {{"b", 1}, {"b", 1}, {"a", 1}, {"a", 1}};
    nd_peer_card round[] = {{"b", 1}, {"a", 1}, {"c", 1}, {"b", 1}, {"a", 1}, {"c", 1}};
    nd_peers peers = take(block, 4, 0);
    cr_assert_eq(peers.host_count, 2);
    cr_assert_str_eq(peers.hosts[0], "b");
    cr_assert_str_eq(peers.hosts[1], "a");
    free(peers.hosts);
    peers = take(round, 6, 4);
    cr_assert_eq(peers.host_count, 3);
    cr_assert_str_eq(peers.hosts[2], "c");
    cr_assert_eq(peers.sharers, 2);
    cr_assert_eq(peers.share, 1);
    free(peers.hosts);
}

Test(peers, a_mask_is_shared_by_those_of_the_host_that_have_the_same)
{
    nd_peer_card cards[] = {{"a", 1}, {"a", 2}, {"a", 1}, {"a", 1}, {"b", 1}};
    nd_peers peers = take(cards, 5, 3);
    cr_assert_eq(peers.sharers, 3);
    cr_assert_eq(peers.share, 2);
    free(peers.hosts);
    peers = take(cards, 5, 1); /* its own mask, as each task of srun --cpus-per-task has */
    cr_assert_eq(peers.sharers, 1);
    cr_assert_eq(peers.share, 0);
    free(peers.hosts);
}

Test(peers, two_ranks_on_one_gpu_are_named)
{
    const nd_peer_card cards[] = {{"a", 1}, {"a", 1}, {"b", 1}, {"b", 1}};
    nd_peer_device devices[] = {
        {"cuda", "0000:1"}, {"cuda", "0000:2"}, {"cuda", "0000:1"}, {"cuda", "0000:2"}};
    assert_ok(nd_peers_check_devices(cards, devices, 4));
    strcpy(devices[3].gpu, "0000:1");
    assert_fails(nd_peers_check_devices(cards, devices, 4), ND_ERR_CONFIG,
                 "ranks 2 and 3 of host b would both train on GPU 0000:1");
    const nd_peer_device cpus[] = {{"cpu", ""}, {"cpu", ""}, {"cpu", ""}, {"cpu", ""}};
    assert_ok(nd_peers_check_devices(cards, cpus, 4));
}

Test(peers, one_kind_of_device_for_all)
{
    const nd_peer_card cards[] = {{"a", 1}, {"b", 1}};
    const nd_peer_device devices[] = {{"cuda", "0000:1"}, {"cpu", ""}};
    assert_fails(nd_peers_check_devices(cards, devices, 2), ND_ERR_CONFIG,
                 "rank 0 (host a) trains on cuda, but rank 1 (host b) on cpu");
}

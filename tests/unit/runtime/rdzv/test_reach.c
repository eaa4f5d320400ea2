// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/address.h"

#include <string.h>

#include "tests/support/tempdir.h"

static tempdir dir;

static void setup(void)
{
    tempdir_make(&dir);
}

static void teardown(void)
{
    tempdir_remove(&dir);
}

TestSuite(reach, .init = setup, .fini = teardown);

static uint64_t network(const char *boot_id_file, const char *host)
{
    nd_reach_card card;
    nd_reach_describe(boot_id_file, host, &card);
    cr_assert_str_eq(card.host, host);
    return card.network;
}

Test(reach, the_boot_tells_systems_apart_whatever_they_are_called)
{
    char one[PATH_MAX], other[PATH_MAX];
    snprintf(one, sizeof one, "%s", tempdir_write(&dir, "one", "1b4e28ba", 8));
    snprintf(other, sizeof other, "%s", tempdir_write(&dir, "other", "6fa459ea", 8));
    cr_assert_eq(network(one, "node1"), network(one, "node2"));
    cr_assert_neq(network(one, "node1"), network(other, "node1"));
    cr_assert_eq(network(NULL, "node1"), network(NULL, "node2")); /* this system's own */
}

Test(reach, without_a_boot_id_the_host_name_stands_for_it)
{
    const char *nowhere = "/nowhere/boot_id";
    char empty[PATH_MAX];
    snprintf(empty, sizeof empty, "%s", tempdir_write(&dir, "empty", "", 0));
    cr_assert_neq(network(nowhere, "node1"), network(nowhere, "node2"));
    cr_assert_eq(network(nowhere, "node1"), network(nowhere, "node1"));
    cr_assert_neq(network(empty, "node1"), network(empty, "node2"));
}

Test(reach, ranks_of_one_network_meet_on_loopback)
{
    nd_reach_card cards[3] = {{7, "node1"}, {7, "node2"}, {7, "node3"}};
    char text[ND_ADDRESS_TEXT_MAX];
    assert_ok(nd_reach_choose(cards, 3, text));
    cr_assert_str_eq(text, "127.0.0.1");
    cards[2] = (nd_reach_card){8, "nobody.invalid"};
    if (nd_reach_choose(cards, 3, text) == ND_OK) { /* a machine without a network has none */
        cr_assert_str_neq(text, "127.0.0.1");
    } else {
        cr_assert_not_null(strstr(nd_error_last()->message, "rank 2 (host nobody.invalid)"));
    }
}

// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <net/if.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "runtime/rdzv/address.h"
#include "tests/support/skip.h"
#include "tests/support/tempdir.h"

static void parses(const char *text, const char *host, int port)
{
    char got[ND_HOST_MAX];
    int number = -1;
    assert_ok(nd_endpoint_parse(text, got, &number));
    cr_assert_str_eq(got, host);
    cr_assert_eq(number, port);
}

Test(address, endpoints)
{
    parses("node-a:29500", "node-a", 29500);
    parses("10.0.0.1:0", "10.0.0.1", 0);
    parses("[fe80::1]:65535", "fe80::1", 65535);
    parses("a:1", "a", 1);
}

Test(address, what_is_no_endpoint)
{
    static const char *const bad[] = {
        "",      "node-a",    ":29500",     "node-a:",     "node-a:65536",          "node-a:-1",
        "[]:80", "fe80::1:5", "node-a:80x", "node-a:80:1", "node-a:99999999999999", "[fe80::1]",
    };
    char host[ND_HOST_MAX] = "untouched", longer[ND_HOST_MAX + 8];
    int port = 7;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        nd_status status = nd_endpoint_parse(bad[i], host, &port);
        cr_assert_eq(status, ND_ERR_CONFIG, "'%s' gave %d", bad[i], status);
        cr_assert_not_null(strstr(nd_error_last()->message, "host:port"));
    }
    memset(longer, 'a', sizeof longer);
    memcpy(longer + ND_HOST_MAX, ":80", 4);
    assert_fails(nd_endpoint_parse(longer, host, &port), ND_ERR_CONFIG, "host:port");
    cr_assert_str_eq(host, "untouched");
    cr_assert_eq(port, 7);
}

static void resolves(const char *host, const char *text, bool loopback)
{
    nd_address addresses[ND_ADDRESS_MAX];
    char got[ND_ADDRESS_TEXT_MAX];
    int count = 0;
    assert_ok(nd_address_resolve(host, 29500, addresses, &count));
    cr_assert_geq(count, 1);
    nd_address_text(&addresses[0], got);
    cr_assert_str_eq(got, text);
    cr_assert_eq(ntohs(((const struct sockaddr_in *)&addresses[0].storage)->sin_port), 29500);
    cr_assert_eq(nd_address_is_loopback(&addresses[0]), loopback, "%s", host);
}

Test(address, numeric_addresses)
{
    resolves("127.0.0.1", "127.0.0.1", true);
    resolves("127.8.9.1", "127.8.9.1", true);
    resolves("10.0.0.1", "10.0.0.1", false);
    resolves("0.0.0.0", "0.0.0.0", false);
    resolves("::1", "::1", true);
    resolves("fd00::7", "fd00::7", false);
}

Test(address, a_name_that_is_none)
{
    nd_address addresses[ND_ADDRESS_MAX];
    int count = 0;
    assert_fails(nd_address_resolve("no name", 1, addresses, &count), ND_ERR_IO, "no name");
}

static void expect_choice(const char *host, int nodes, const char *expected)
{
    char text[ND_ADDRESS_TEXT_MAX];
    assert_ok(nd_address_choose(host, nodes, text));
    cr_expect_str_eq(text, expected, "%s on %d nodes: %s", host, nodes, text);
}

Test(address, ranks_of_one_node_meet_on_loopback)
{
    expect_choice("192.0.2.7", 1, "127.0.0.1");
}

/* Alone in a network of its own, in which loopback has one further address. */
Test(address, ranks_of_several_nodes_meet_where_the_name_leads_on_this_host)
{
    static const char *const useless[] = {"127.0.0.1", "fe80::1", "198.51.100.8", "nobody.invalid"};
    char text[ND_ADDRESS_TEXT_MAX];
    if (unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) {
        skip_test("this system gives no network of its own");
    }
    struct ifreq request = {.ifr_name = "lo"};
    struct sockaddr_in own = {.sin_family = AF_INET};
    cr_assert_eq(inet_pton(AF_INET, "192.0.2.7", &own.sin_addr), 1);
    memcpy(&request.ifr_addr, &own, sizeof own);
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    cr_assert(fd >= 0 && ioctl(fd, SIOCSIFADDR, &request) == 0, "%s", strerror(errno));
    request.ifr_flags = IFF_UP;
    cr_assert_eq(ioctl(fd, SIOCSIFFLAGS, &request), 0);
    close(fd);
    expect_choice("192.0.2.7", 2, "192.0.2.7");
    for (size_t i = 0; i < sizeof useless / sizeof *useless; i++) {
        assert_fails(nd_address_choose(useless[i], 2, text), ND_ERR_CONFIG,
                     "--rdzv-endpoint ADDRESS:0");
    }
}

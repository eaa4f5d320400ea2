// SPDX-License-Identifier: Apache-2.0
/* Who may send to a rank of another host: only who proves the job's key, and says first for whom
 * its messages are. */
#include <criterion/criterion.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/net/link.h"
#include "runtime/comm/net/net.h"

static const uint8_t job_key[ND_KEY_BYTES] = {1}, other_key[ND_KEY_BYTES] = {2};

/* As net_hello of net_state.h. */
typedef struct greeting {
    uint8_t token[ND_NET_TOKEN_BYTES];
    int32_t rank, unused;
} greeting;

static void open_net(nd_net_card cards[2], nd_net **net)
{
    nd_address addresses[ND_ADDRESS_MAX];
    nd_tls_context *client, *server;
    int count;
    cr_assert_eq(nd_address_resolve("127.0.0.1", 0, addresses, &count), ND_OK);
    cr_assert_eq(nd_tls_context_create(false, job_key, &client), ND_OK);
    cr_assert_eq(nd_tls_context_create(true, job_key, &server), ND_OK);
    cr_assert_eq(nd_net_open(0, 2, &addresses[0], client, server, &cards[0], net), ND_OK, "%s",
                 nd_error_last()->message);
    cards[1] = cards[0];
    nd_net_meet(*net, cards);
}

/* Whether the net answers a connection with this key and hello; else it closes the connection. */
static bool is_answered(nd_net *net, const nd_net_card *card, const uint8_t key[ND_KEY_BYTES],
                        const greeting *hello)
{
    nd_tls_context *client;
    nd_link *link;
    char answer;
    size_t count = 0;
    bool idle, said = false;
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    cr_assert_eq(nd_tls_context_create(false, key, &client), ND_OK);
    cr_assert_eq(nd_link_connect(&card->address, client, epoll, &link), ND_OK);
    nd_status status = ND_OK;
    for (double until = nd_clock_seconds() + 20; status == ND_OK && count == 0;) {
        cr_assert_lt(nd_clock_seconds(), until, "the net neither answers nor closes");
        status = nd_link_flush(link, &idle);
        if (status == ND_OK && idle && nd_tls_established(link->tls) && !said) {
            status = nd_link_write(link, hello, sizeof *hello);
            said = true;
        }
        nd_net_progress(net);
        status = status == ND_OK ? nd_link_read(link, &answer, 1, &count) : status;
    }
    nd_link_close(link);
    nd_tls_context_destroy(client);
    close(epoll);
    return count == 1;
}

Test(net, only_the_key_and_the_token_open_a_connection)
{
    nd_net *net;
    nd_net_card cards[2];
    open_net(cards, &net);
    greeting hello = {.rank = 1};
    memcpy(hello.token, cards[0].token, sizeof hello.token);
    cr_expect_not(is_answered(net, &cards[0], other_key, &hello), "another key");
    hello.rank = 2;
    cr_expect_not(is_answered(net, &cards[0], job_key, &hello), "a rank that there is not");
    hello.rank = 1;
    hello.token[5] ^= 1;
    cr_expect_not(is_answered(net, &cards[0], job_key, &hello), "another token");
    hello.token[5] ^= 1;
    cr_expect(is_answered(net, &cards[0], job_key, &hello), "a rank of the job");
    cr_expect_not(is_answered(net, &cards[0], job_key, &hello), "the same rank again");
    cr_expect_not(nd_net_gone(net, 0));
    cr_expect(nd_net_gone(net, 1), "its connection has ended");
    nd_net_close(net, true);
}

// SPDX-License-Identifier: Apache-2.0
/* Who may send to a rank of another host: only who proves the job's key, and says first for whom
 * its messages are. */
#include <criterion/criterion.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/net/net_state.h"
#include "tests/support/tempdir.h"

static const nd_tls_use ranks = {.identity = "ndtrain-ranks", .records = ND_TLS_RECORDS};
static const uint8_t job_key[ND_KEY_BYTES] = {1}, other_key[ND_KEY_BYTES] = {2};

static nd_tls_context *context_of(bool server, const uint8_t key[ND_KEY_BYTES],
                                  const nd_tls_use *use)
{
    nd_tls_context *context;
    cr_assert_eq(nd_tls_context_create(server, key, &context), ND_OK);
    if (use) {
        nd_tls_context_set(context, use);
    }
    return context;
}

/* Rank 0 of two, whose other one is at the same address. */
static nd_status meet_itself(void *context, const void *send, void *recv, size_t bytes)
{
    memcpy(recv, send, bytes);
    memcpy((char *)recv + bytes, send, bytes);
    return ND_OK;
}

static nd_net *net;
static const nd_net_card *card;       /* of that net */
static net_hello hello = {.rank = 1}; /* with its token */

static void open_net(void)
{
    const nd_transport_options options = {.rank = 0, .size = 2, .exchange = meet_itself};
    nd_address addresses[ND_ADDRESS_MAX];
    int count, fd;
    cr_assert_eq(nd_address_resolve("127.0.0.1", 0, addresses, &count), ND_OK);
    const nd_comm_network network = {.address = addresses[0],
                                     .client = context_of(false, job_key, NULL),
                                     .server = context_of(true, job_key, NULL)};
    cr_assert_eq(nd_net_open(&options, &network, &fd, &net), ND_OK, "%s", nd_error_last()->message);
    card = &net->peers[0].card;
    memcpy(hello.token, card->token, sizeof hello.token);
}

static void close_net(void)
{
    nd_net_close(net, true);
}

TestSuite(net, .init = open_net, .fini = close_net);

typedef struct visitor {
    nd_tls_context *client;
    nd_link *link;
    int epoll;
} visitor;

static void leave(visitor *v)
{
    nd_link_close(v->link);
    nd_tls_context_destroy(v->client);
    close(v->epoll);
}

/* Returns whether the net answers a connection with this key, protocol (NULL: the store's) and
 * hello (NULL: none); otherwise the net closes it. */
static bool greet(const uint8_t key[ND_KEY_BYTES], const nd_tls_use *use,
                  const net_hello *said_hello, visitor *v)
{
    nd_link *link;
    char answer = 0;
    size_t count = 0;
    bool idle, said = !said_hello;
    v->client = context_of(false, key, use);
    v->epoll = epoll_create1(EPOLL_CLOEXEC);
    cr_assert_eq(nd_link_connect(&card->address, v->client, v->epoll, &link), ND_OK);
    v->link = link;
    nd_status status = ND_OK;
    for (double until = nd_clock_seconds() + 20; status == ND_OK && count == 0;) {
        cr_assert_lt(nd_clock_seconds(), until, "the net neither answers nor closes");
        status = nd_link_flush(link, &idle);
        if (status == ND_OK && idle && nd_tls_established(link->tls) && !said) {
            status = nd_link_write(link, said_hello, sizeof *said_hello, &idle);
            said = true;
        }
        nd_net_progress(net);
        status = status == ND_OK ? nd_link_read(link, &answer, 1, &count) : status;
    }
    cr_expect(count == 0 || answer == NET_WELCOME);
    return count == 1;
}

static bool is_answered(const uint8_t key[ND_KEY_BYTES], const nd_tls_use *use,
                        const net_hello *said_hello)
{
    visitor v;
    bool answered = greet(key, use, said_hello, &v);
    leave(&v);
    return answered;
}

Test(net, only_the_key_and_the_token_open_a_connection)
{
    cr_expect_not(is_answered(other_key, &ranks, &hello), "another key");
    cr_expect_not(is_answered(job_key, NULL, &hello), "the store's protocol");
    hello.rank = 2;
    cr_expect_not(is_answered(job_key, &ranks, &hello), "a rank that there is not");
    hello.rank = 1;
    hello.token[5] ^= 1;
    cr_expect_not(is_answered(job_key, &ranks, &hello), "another token");
    hello.token[5] ^= 1;
    cr_expect(is_answered(job_key, &ranks, &hello), "a rank of the job");
    cr_expect_not(is_answered(job_key, &ranks, &hello), "the same rank again");
    cr_expect_not(nd_net_gone(net, 0));
    cr_expect(nd_net_gone(net, 1), "its connection has ended");
}

/* A port without a key, and one with the key that says nothing more. */
Test(net, who_says_no_hello_is_sent_away)
{
    char byte;
    int silent = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const nd_address *at = &card->address;
    cr_assert_eq(connect(silent, (const struct sockaddr *)&at->storage, at->bytes), 0);
    cr_expect_not(is_answered(job_key, &ranks, NULL));
    cr_expect_eq(recv(silent, &byte, 1, MSG_DONTWAIT), 0, "the silent one is still connected");
    close(silent);
    cr_expect_not(nd_net_gone(net, 1));
}

/* Until it is raised again, no descriptor can be opened. */
static struct rlimit forbid_files(void)
{
    struct rlimit old;
    int next = dup(STDOUT_FILENO);
    close(next);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &old), 0);
    const struct rlimit none = {.rlim_cur = (rlim_t)next, .rlim_max = old.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    return old;
}

Test(net, a_rank_without_descriptors_fails_with_that_reason)
{
    nd_p2p_request request = {.state = ND_REQUEST_POSTED, .peer = 1};
    struct rlimit old = forbid_files();
    assert_fails(nd_net_send(net, &request), ND_ERR_RESOURCE, "Too many open files");
    setrlimit(RLIMIT_NOFILE, &old);
    nd_error_clear();
    cr_expect_eq(nd_net_progress(net), ND_ERR_RESOURCE, "the first reason stays");
    cr_expect(strstr(nd_error_last()->message, "Too many open files"), "%s",
              nd_error_last()->message);
}

/* Its answer to a large message needs a connection. The other rank has done nothing wrong. */
Test(net, a_rank_without_descriptors_does_not_blame_the_sender)
{
    static char buffer[2 * NET_EAGER_BYTES];
    visitor v;
    bool idle;
    cr_assert(greet(job_key, &ranks, &hello, &v));
    nd_p2p_request request = {
        .state = ND_REQUEST_POSTED, .peer = 1, .tag = 7, .buffer = buffer, .bytes = sizeof buffer};
    const net_head offer = {.tag = 7, .bytes = sizeof buffer, .kind = NET_OFFER};
    cr_assert_eq(nd_net_recv(net, &request), ND_OK);
    cr_assert_eq(nd_link_write(v.link, &offer, sizeof offer, &idle), ND_OK);
    struct rlimit old = forbid_files();
    nd_status status = ND_OK;
    for (double until = nd_clock_seconds() + 20; status == ND_OK && !nd_net_gone(net, 1);) {
        cr_assert_lt(nd_clock_seconds(), until, "the rank waits for the deadline");
        status = nd_net_progress(net);
    }
    setrlimit(RLIMIT_NOFILE, &old);
    cr_expect_eq(status, ND_ERR_RESOURCE, "%d", status);
    leave(&v);
}

/* It may also be the second one, and one of which another number of bytes is wanted. */
Test(net, a_message_may_be_asked_for_while_its_bytes_come)
{
    enum { BYTES = 8, FIRST = sizeof(net_head) + 3 };
    static const size_t wanted[] = {BYTES, BYTES, BYTES - 1};
    char message[sizeof(net_head) + BYTES] = "";
    const net_head head = {.tag = 7, .bytes = BYTES, .kind = NET_EAGER};
    visitor v;
    nd_tag tag;
    size_t bytes;
    bool idle;
    const double until = nd_clock_seconds() + 20;
    memcpy(message, &head, sizeof head);
    memcpy(message + sizeof head, "eagerly", BYTES);
    cr_assert(greet(job_key, &ranks, &hello, &v));
    for (int i = 0; i < 3; i++) {
        char got[BYTES] = "";
        nd_p2p_request request = {
            .state = ND_REQUEST_POSTED, .peer = 1, .tag = 7, .buffer = got, .bytes = wanted[i]};
        assert_ok(nd_link_write(v.link, message, FIRST, &idle));
        while (!nd_net_peek(net, 7, UINT64_MAX, &tag, &bytes)) {
            cr_assert_lt(nd_clock_seconds(), until, "its head does not come");
            assert_ok(nd_net_progress(net));
        }
        assert_ok(nd_net_recv(net, &request));
        cr_expect_not(nd_net_peek(net, 7, UINT64_MAX, &tag, &bytes), "somebody wants it");
        assert_ok(nd_link_write(v.link, message + FIRST, sizeof message - FIRST, &idle));
        while (atomic_load(&request.state) == ND_REQUEST_POSTED) {
            cr_assert_lt(nd_clock_seconds(), until, "the rest does not come");
            assert_ok(nd_net_progress(net));
        }
        cr_expect_eq(atomic_load(&request.state), i < 2 ? ND_REQUEST_DONE : ND_REQUEST_FAILED);
        cr_expect_str_eq(got, i < 2 ? "eagerly" : "");
    }
    leave(&v);
}

Test(net, a_connection_that_cannot_be_accepted_yet_does_not_keep_a_rank_awake)
{
    int waiting = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const nd_address *at = &card->address;
    cr_assert_eq(connect(waiting, (const struct sockaddr *)&at->storage, at->bytes), 0);
    struct pollfd polled = {.fd = net->epoll, .events = POLLIN};
    struct rlimit old = forbid_files();
    cr_assert_eq(poll(&polled, 1, 20000), 1);
    cr_expect_eq(nd_net_progress(net), ND_OK);
    cr_expect_eq(poll(&polled, 1, 0), 0);
    setrlimit(RLIMIT_NOFILE, &old);
    cr_expect(is_answered(job_key, &ranks, &hello));
    close(waiting);
}

/* The other side of a connection that `net` makes: answers its hello with `answer`, and returns the
 * number of bytes that follow before the connection ends or has a head. */
static size_t answer_with(int listener, nd_tls_context *server, char answer)
{
    char bytes[sizeof(net_head)];
    size_t count = 0, got;
    bool said = false, idle;
    int fd = -1, epoll = epoll_create1(EPOLL_CLOEXEC);
    nd_link *link;
    double until = nd_clock_seconds() + 20;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) < 0) {
        cr_assert_lt(nd_clock_seconds(), until, "no connection is made");
        nd_net_progress(net);
    }
    cr_assert_eq(nd_link_accept(fd, server, epoll, &link), ND_OK);
    while (count < sizeof bytes && nd_link_flush(link, &idle) == ND_OK &&
           nd_link_read(link, bytes + count, sizeof bytes - count, &got) == ND_OK) {
        cr_assert_lt(nd_clock_seconds(), until, "neither a message nor the end comes");
        nd_net_progress(net);
        count += got;
        if (!said && count == sizeof bytes) {
            said = true;
            count = 0;
            cr_assert_eq(nd_link_write(link, &answer, 1, &idle), ND_OK);
        }
    }
    nd_link_close(link);
    close(epoll);
    return said ? count : 0;
}

Test(net, only_a_welcome_gets_messages)
{
    nd_tls_context *server = context_of(true, job_key, &ranks);
    nd_address *at = &net->peers[1].card.address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    ((struct sockaddr_in *)&at->storage)->sin_port = 0;
    cr_assert_eq(bind(listener, (struct sockaddr *)&at->storage, at->bytes), 0);
    cr_assert_eq(listen(listener, 4), 0);
    cr_assert_eq(getsockname(listener, (struct sockaddr *)&at->storage, &at->bytes), 0);
    nd_p2p_request request = {.state = ND_REQUEST_POSTED, .peer = 1};
    cr_assert_eq(nd_net_send(net, &request), ND_OK);
    cr_expect_eq(answer_with(listener, server, 0), 0, "another answer is taken for a welcome");
    cr_expect_eq(atomic_load(&request.state), ND_REQUEST_POSTED);
    cr_expect_eq(answer_with(listener, server, NET_WELCOME), sizeof(net_head));
    close(listener);
    nd_tls_context_destroy(server);
}

Test(net, an_idle_connection_to_a_host_that_is_gone_ends_within_half_a_minute)
{
    visitor v;
    int on, idle, probe, probes;
    socklen_t bytes = sizeof on;
    cr_assert(greet(job_key, &ranks, &hello, &v));
    cr_assert_eq(getsockopt(v.link->fd, SOL_SOCKET, SO_KEEPALIVE, &on, &bytes), 0);
    cr_assert_eq(getsockopt(v.link->fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, &bytes), 0);
    cr_assert_eq(getsockopt(v.link->fd, IPPROTO_TCP, TCP_KEEPINTVL, &probe, &bytes), 0);
    cr_assert_eq(getsockopt(v.link->fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, &bytes), 0);
    cr_expect(on && idle + probe * probes <= 30);
    leave(&v);
}

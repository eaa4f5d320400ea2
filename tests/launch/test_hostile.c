// SPDX-License-Identifier: Apache-2.0
/*
 * Attacks on a job of two nodes through its network: clients without the key at every phase of a
 * join, members that misbehave, and a network that stalls, drops and corrupts. Nobody without the
 * key disturbs the job. Whatever a member or the network does, each ndlaunch ends soon with a
 * documented code and a sentence. Jobs that wait for a deadline run at the same time.
 */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "runtime/base/clock.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/channel.h"
#include "runtime/rdzv/key.h"
#include "tests/launch/proxy.h"
#include "tests/launch/tiny_job.h"
#include "tests/support/cipher.h"
#include "tests/support/patience.h"
#include "tests/support/port.h"
#include "tests/support/sentences.h"

enum { CALL_SECONDS = 60, RECORD_MAX = 8192 }; /* of one call of an attacker */

static const char PATIENT[] = "100"; /* the time to join where nothing is to be waited for */
static tempdir dir;
static tiny_nodes job = {.nodes = 2, .workers = 4};
static uint8_t key[ND_KEY_BYTES];
static int port;

static void setup(void)
{
    tiny_write_inputs(&dir);
    tiny_nodes_meet(&job, &dir);
    port = atoi(strchr(job.endpoint, ':') + 1);
    assert_ok(nd_key_read_file(job.key_file, key));
    launched_use_test_worker("self", NULL);
}

TEMPDIR_SUITE(hostile, setup);

static void start_node(launched *l, int node, int at, const char *seconds)
{
    static int starts;
    snprintf(job.endpoint, sizeof job.endpoint, "127.0.0.1:%d", at);
    tiny_nodes_start(l, &job, node, starts++, WORDS("--rdzv-timeout-seconds", seconds));
}

static int dial(void)
{
    const struct timeval patience = {.tv_sec = CALL_SECONDS};
    int fd = port_connect(port);
    for (int i = 0; fd < 0 && i < CALL_SECONDS * 100; i++) {
        usleep(10000);
        fd = port_connect(port);
    }
    cr_assert_geq(fd, 0, "nobody listens");
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    return fd;
}

static void hang_up(int fd, bool reset)
{
    const struct linger now = {.l_onoff = 1};
    if (reset) {
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    }
    close(fd);
}

/* Bytes that the store can make nothing of; it closes the connection. */
static void send_and_be_dropped(const void *bytes, size_t count)
{
    char answer[4096];
    int fd = dial();
    ssize_t n = send(fd, bytes, count, MSG_NOSIGNAL);
    while (n >= 0 && (n = recv(fd, answer, sizeof answer, 0)) > 0) {
    }
    cr_assert(n == 0 || errno == ECONNRESET || errno == EPIPE, "not dropped: %s", strerror(errno));
    close(fd);
}

/* A handshake by hand, whose sent bytes are kept; `until` bounds the bytes that are sent. */
typedef struct record {
    char bytes[RECORD_MAX];
    size_t size;
} record;

static void send_output(int fd, nd_tls *tls, record *sent, size_t until)
{
    char cipher[4096];
    size_t count;
    while ((count = take_cipher(tls, cipher, sizeof cipher)) > 0) {
        size_t left = until - sent->size;
        count = count < left ? count : left;
        cr_assert_leq(sent->size + count, sizeof sent->bytes);
        memcpy(sent->bytes + sent->size, cipher, count);
        sent->size += count;
        send(fd, cipher, count, MSG_NOSIGNAL);
    }
}

static void put_hello(nd_wire_buffer *out, uint8_t role, uint32_t index, const char *version)
{
    nd_wire_begin(out, ND_WIRE_HELLO);
    nd_wire_put_u32(out, ND_WIRE_PROTOCOL);
    nd_wire_put_text(out, version);
    nd_wire_put_text(out, "");
    nd_wire_put_u32(out, 0);
    nd_wire_put_u32(out, role);
    nd_wire_put_u32(out, index);
    nd_wire_put_text(out, "attacker");
    assert_ok(nd_wire_end(out));
}

/* Begins to join, sends at most `until` bytes, and leaves. All bytes of the client's handshake and
 * of a hello that is refused are in *sent. */
static void join_until(size_t until, bool reset, record *sent)
{
    nd_tls_context *context;
    nd_tls *tls;
    nd_wire_buffer hello = {0};
    char bytes[4096];
    int fd = dial();
    sent->size = 0;
    assert_ok(nd_tls_context_create(false, key, &context));
    assert_ok(nd_tls_create(context, &tls));
    send_output(fd, tls, sent, until);
    while (sent->size < until && !nd_tls_established(tls)) {
        ssize_t n = recv(fd, bytes, sizeof bytes, 0);
        cr_assert_gt(n, 0, "dropped in the handshake");
        assert_ok(nd_tls_input(tls, bytes, (size_t)n));
        send_output(fd, tls, sent, until);
    }
    if (nd_tls_established(tls)) {
        put_hello(&hello, ND_WIRE_NODE, 77, ND_VERSION);
        assert_ok(nd_tls_write(tls, hello.data, hello.size));
        send_output(fd, tls, sent, until);
    }
    nd_wire_buffer_fini(&hello);
    nd_tls_destroy(tls);
    nd_tls_context_destroy(context);
    hang_up(fd, reset);
}

static void send_junk(void)
{
    char junk[16384];
    uint32_t state = 1;
    for (size_t i = 0; i < sizeof junk; i++) {
        state = state * 1664525u + 1013904223u;
        junk[i] = (char)(state >> 24);
    }
    send_and_be_dropped(junk, sizeof junk);
    send_and_be_dropped("GET / HTTP/1.1\r\nHost: x\r\n\r\n", 27);
    send_and_be_dropped("SSH-2.0-OpenSSH_9.2\r\n", 21);
    junk[0] = 0x16; /* a handshake record of TLS with junk inside */
    junk[1] = junk[2] = 3;
    junk[3] = 0;
    junk[4] = 64;
    send_and_be_dropped(junk, sizeof junk);
}

/* Plain frames, as of a member that uses no TLS. */
static void send_plain_frames(void)
{
    nd_wire_buffer out = {0};
    put_hello(&out, ND_WIRE_NODE, 1, ND_VERSION);
    send_and_be_dropped(out.data, out.size);
    nd_wire_buffer_fini(&out);
}

static void use_another_key(void)
{
    uint8_t other[ND_KEY_BYTES];
    nd_channel *channel = NULL;
    memcpy(other, key, sizeof other);
    other[31] ^= 1;
    assert_fails(nd_channel_open("127.0.0.1", port, other, CALL_SECONDS, &channel), ND_ERR_CONFIG,
                 "refuses this member");
}

/* Sends again the bytes that a member with the key once sent. */
static void replay(void)
{
    record sent;
    join_until(RECORD_MAX, false, &sent);
    cr_assert_gt(sent.size, 100);
    send_and_be_dropped(sent.bytes, sent.size);
}

/* A join that breaks off behind each of its bytes that begins something, and some others. */
static void break_off(void)
{
    record sent, whole;
    join_until(RECORD_MAX, true, &whole);
    for (size_t until = 1; until <= whole.size; until += until < 8 ? 1 : 37) {
        join_until(until, until % 2 == 0, &sent);
    }
}

/* Frames of somebody with the key whose hello is refused: each is answered and dropped. */
static void be_refused(const void *frames, size_t count)
{
    nd_channel *channel;
    nd_wire_frame frame;
    nd_wire_buffer out = {.data = (uint8_t *)frames, .size = count};
    int64_t deadline = nd_clock_ns() + (int64_t)CALL_SECONDS * 1000000000;
    assert_ok(nd_channel_open("127.0.0.1", port, key, CALL_SECONDS, &channel));
    nd_status status = nd_channel_send(channel, &out, deadline);
    status = status == ND_OK ? nd_channel_receive(channel, deadline, &frame) : status;
    cr_assert(status == ND_ERR_IO || (status == ND_OK && frame.type == ND_WIRE_ERROR),
              "%d: not refused", status);
    nd_channel_close(channel);
}

static void say_wrong_hellos(void)
{
    static const struct {
        uint8_t role;
        uint32_t index;
        const char *version;
    } hellos[] = {{ND_WIRE_NODE, 0, ND_VERSION},
                  {ND_WIRE_NODE, 2, ND_VERSION},
                  {ND_WIRE_NODE, ~0u, ND_VERSION},
                  {ND_WIRE_NODE, 1, "0.0"},
                  {ND_WIRE_NODE, 1, ""},
                  {ND_WIRE_WORKER, 0, ND_VERSION},
                  {7, 1, ND_VERSION}};
    static const char odd[][12] = {
        "\0\0\0\0",             /* no length */
        "\xff\xff\xff\xff\x01", /* a long frame */
        "\x01\x02\0\0\x01",     /* one byte above the limit of a stranger */
        "\x01\0\0\0\x01",       /* a hello without a body */
        "\x01\0\0\0\x03",       /* a request before the hello */
        "\x05\0\0\0\x01\xff\xff\xff\xff",
    };
    for (size_t i = 0; i < sizeof hellos / sizeof *hellos; i++) {
        nd_wire_buffer out = {0};
        put_hello(&out, hellos[i].role, hellos[i].index, hellos[i].version);
        be_refused(out.data, out.size);
        nd_wire_buffer_fini(&out);
    }
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        be_refused(odd[i], sizeof odd[i]);
    }
}

/* One store gets all of it, and then its second node. */
Test(hostile, nobody_is_kept_from_joining)
{
    static void (*const attacks[])(void) = {send_junk, send_plain_frames, use_another_key,
                                            replay,    break_off,         say_wrong_hellos};
    launched nodes[2];
    start_node(&nodes[0], 0, port, PATIENT);
    for (size_t i = 0; i < sizeof attacks / sizeof *attacks; i++) {
        double begin = nd_clock_seconds();
        attacks[i]();
        cr_assert_lt(nd_clock_seconds() - begin, patience(PATIENCE_SECONDS), "attack %zu", i);
        cr_assert_eq(waitpid(nodes[0].pid, NULL, WNOHANG), 0, "attack %zu: %s", i,
                     launched_read(&nodes[0]));
    }
    start_node(&nodes[1], 1, port, PATIENT);
    nodes[0].begin = nodes[1].begin; /* it had to wait for this node */
    launched_ends(&nodes[1], 0);
    launched_ends(&nodes[0], 0);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(sentences_in(launched_read(&nodes[i])), 0, "node %d: %s", i, nodes[i].text);
    }
    assert_says(&nodes[0], "to the store was refused: ");
}

static bool is_documented(int code)
{
    return code == 0 || code == 2 || code == 71 || code == 74 || code == 124;
}

/* A node of a job that is attacked. */
typedef struct attacked {
    launched l;
    int port;
} attacked;

static void start_attacked(attacked *a, int node, int at, const char *seconds)
{
    a->port = at;
    start_node(&a->l, node, at, seconds);
}

/* A code of docs/launch.md, with one sentence where it is none of success. */
static void ends_well(attacked *a, const char *what, long number)
{
    launched *l = &a->l;
    double left = l->begin + patience(PATIENCE_SECONDS) - nd_clock_seconds();
    int code = launched_wait(l, left);
    cr_assert(is_documented(code), "%s %ld: %d: %s", what, number, code, launched_read(l));
    cr_assert_eq(sentences_in(launched_read(l)), code != 0, "%s %ld: %d and not one sentence: %s",
                 what, number, code, l->text);
}

/* The frames that node 1, which has the key, sends after it has joined. */
typedef struct misdeed {
    const char *name, *frames;
    size_t count;
} misdeed;

/* Joins, sends the frames, and resets its connection. */
static void misbehave(const attacked *node, const misdeed *deed)
{
    nd_channel *channel;
    char joined[ND_WIRE_TEXT_MAX];
    int world;
    nd_wire_buffer out = {.data = (uint8_t *)deed->frames, .size = deed->count};
    int64_t deadline = nd_clock_ns() + (int64_t)CALL_SECONDS * 1000000000;
    const nd_hello hello = {.version = ND_VERSION,
                            .run_id = "",
                            .host = "attacker\033[2J",
                            .role = ND_WIRE_NODE,
                            .index = 1};
    assert_ok(nd_channel_open("127.0.0.1", node->port, key, CALL_SECONDS, &channel));
    assert_ok(nd_channel_hello(channel, &hello, deadline, joined, sizeof joined, &world));
    if (deed->count > 0) {
        assert_ok(nd_channel_send(channel, &out, deadline));
    }
    int fd = dup(nd_channel_fd(channel)); /* the connection outlives the channel */
    cr_assert_geq(fd, 0, "%s", strerror(errno));
    nd_channel_close(channel);
    hang_up(fd, true);
}

Test(hostile, a_member_that_misbehaves_ends_the_job_with_a_sentence)
{
    static const char join_of_many[] = "\x09\0\0\0\x40\xff\xff\xff\xff\xff\xff\xff\xff";
    static const char unknown[] = "\x01\0\0\0\x5f", of_a_worker[] = "\x01\0\0\0\x03";
    char frames[40 * 7];
    const misdeed deeds[] = {{"a reset", NULL, 0},
                             {"a join of many", join_of_many, sizeof join_of_many - 1},
                             {"an unknown message", unknown, sizeof unknown - 1},
                             {"a worker's request", of_a_worker, sizeof of_a_worker - 1},
                             {"empty messages", frames, sizeof frames}};
    enum { DEEDS = sizeof deeds / sizeof *deeds };
    static attacked nodes[DEEDS];
    for (size_t i = 0; i < sizeof frames; i++) { /* empty messages of every type of a node */
        static const char head[] = {3, 0, 0, 0, 0, 0, 0};
        frames[i] = i % 7 == 4 ? (char)(ND_WIRE_NODE_FIRST + i / 7 % 32) : head[i % 7];
    }
    for (int i = 0; i < DEEDS; i++) { /* each node waits so long for node 1, first and again */
        start_attacked(&nodes[i], 0, port_reserve(), "8");
    }
    for (int i = 0; i < DEEDS; i++) {
        misbehave(&nodes[i], &deeds[i]);
    }
    for (int i = 0; i < DEEDS; i++) {
        ends_well(&nodes[i], deeds[i].name, (long)deeds[i].count);
        cr_assert_null(strchr(launched_read(&nodes[i].l), '\033'), "%s: %s", deeds[i].name,
                       nodes[i].l.text);
    }
}

/* Both nodes of a job whose node 1 reaches the store through a network that does harm. */
typedef struct harmed {
    attacked nodes[2];
    pid_t proxy;
} harmed;

static void harm_all(const proxy_rule *rules, int count)
{
    static const char *const names[] = {"drop", "reset", "corruption", "stall"};
    harmed *jobs = calloc((size_t)count, sizeof *jobs);
    cr_assert_not_null(jobs);
    for (int i = 0; i < count; i++) {
        int near = port_reserve(), far = port_reserve();
        start_attacked(&jobs[i].nodes[0], 0, far, "4");
        jobs[i].proxy = proxy_start(&rules[i], near, far);
        start_attacked(&jobs[i].nodes[1], 1, near, "4");
    }
    for (int i = 0; i < count; i++) {
        for (int node = 0; node < 2; node++) {
            ends_well(&jobs[i].nodes[node], names[rules[i].harm], rules[i].after);
        }
        proxy_stop(jobs[i].proxy);
    }
    free(jobs);
}

static void harm_at_some_bytes(proxy_harm kind, bool to_store)
{
    static const long places[] = {3, 250, 700, 1500};
    enum { PLACES = sizeof places / sizeof *places };
    proxy_rule rules[PLACES];
    for (int i = 0; i < PLACES; i++) {
        rules[i] = (proxy_rule){.harm = kind, .to_store = to_store, .after = places[i], .last = 3};
    }
    harm_all(rules, PLACES);
}

#define TEST_HARM(name, kind, to_store)                                                            \
    Test(hostile, a_network_that_##name)                                                           \
    {                                                                                              \
        harm_at_some_bytes(kind, to_store);                                                        \
    }
TEST_HARM(drops_what_goes_to_the_store, PROXY_DROPS, true)
TEST_HARM(drops_what_comes_from_the_store, PROXY_DROPS, false)
TEST_HARM(resets, PROXY_RESETS, false)
TEST_HARM(corrupts, PROXY_CORRUPTS, true)

/* In the handshake, behind the join, and of a worker. */
Test(hostile, a_network_that_stalls)
{
    static const proxy_rule rules[] = {
        {.harm = PROXY_STALLS, .to_store = true, .after = 100, .last = 0},
        {.harm = PROXY_STALLS, .to_store = false, .after = 900, .last = 0},
        {.harm = PROXY_STALLS, .to_store = true, .after = 700, .from = 1, .last = 1}};
    harm_all(rules, sizeof rules / sizeof *rules);
}

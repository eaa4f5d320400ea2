// SPDX-License-Identifier: Apache-2.0
/* The store's engine, driven by frames in memory with a clock of the test's own. */
#include <criterion/criterion.h>
#include <string.h>
#include <zstd.h>

#include "runtime/base/rng.h"
#include "runtime/rdzv/server_state.h"
#include "tests/support/tempdir.h"

enum { PEERS = 80 };
static const int64_t second = 1000000000;

typedef struct client {
    nd_peer *peer;
    nd_wire_parser answers;
    bool dropped;
} client;

static client clients[PEERS];
static char notices[1 << 14];
static nd_server *server;
static uint64_t timeout_ms = 30000; /* of requests that wait */
static int64_t now = 1000000000;

static void on_send(void *transport, const void *bytes, size_t count)
{
    client *c = transport;
    assert_ok(nd_wire_feed(&c->answers, bytes, count));
}

static void on_drop(void *transport)
{
    ((client *)transport)->dropped = true;
}

static void on_notice(void *context, const char *line)
{
    size_t used = strlen(notices);
    snprintf(notices + used, sizeof notices - used, "%s\n", line);
}

static void open_server(int world)
{
    nd_server_options options = {
        .version = "1.2", .run_id = "job", .epoch = 3, .world_size = world, .nnodes = 2};
    nd_server_hooks hooks = {.send = on_send, .drop = on_drop, .notice = on_notice};
    assert_ok(nd_server_create(&options, &hooks, &server));
}

static void connect_client(int i)
{
    nd_wire_parser_fini(&clients[i].answers); /* of a client that came before */
    nd_wire_parser_init(&clients[i].answers, ND_WIRE_LIMIT_MEMBER);
    assert_ok(nd_server_connect(server, &clients[i], "10.0.0.9 port 7", now, &clients[i].peer));
}

static void give(int i, nd_wire_buffer *out)
{
    assert_ok(nd_wire_end(out));
    nd_server_receive(server, clients[i].peer, out->data, out->size, now);
    nd_wire_buffer_fini(out);
    *out = (nd_wire_buffer){0};
}

static void hello(int i, const char *version, const char *run, uint32_t epoch, nd_wire_role role,
                  int index)
{
    nd_wire_buffer out = {0};
    nd_wire_begin(&out, ND_WIRE_HELLO);
    nd_wire_put_u32(&out, ND_WIRE_PROTOCOL);
    nd_wire_put_text(&out, version);
    nd_wire_put_text(&out, run);
    nd_wire_put_u32(&out, epoch);
    nd_wire_put_u32(&out, role);
    nd_wire_put_u32(&out, (uint32_t)index);
    nd_wire_put_text(&out, "hosty");
    give(i, &out);
}

static nd_wire_frame answer(int i)
{
    nd_wire_frame frame;
    assert_ok(nd_wire_next(&clients[i].answers, &frame));
    return frame;
}

/* A new client, which is accepted. */
static void welcome(int i, const char *run, uint32_t epoch, nd_wire_role role, int index)
{
    connect_client(i);
    hello(i, "1.2", run, epoch, role, index);
    cr_assert_eq(answer(i).type, ND_WIRE_WELCOME);
}

static void join(int i)
{
    welcome(i, "job", 3, ND_WIRE_WORKER, i);
}

static void open_joined(int world, int joined)
{
    open_server(world);
    for (int i = 0; i < joined; i++) {
        join(i);
    }
}

static void request(int i, nd_wire_type type, const char *key, const void *value, size_t bytes)
{
    nd_wire_buffer out = {0};
    nd_wire_begin(&out, type);
    nd_wire_put_u32(&out, 7 + (uint32_t)i); /* which no other client has */
    if (type == ND_WIRE_EXCHANGE) {
        nd_wire_put_u64(&out, timeout_ms);
    }
    nd_wire_put_text(&out, key);
    if (type != ND_WIRE_GET) {
        nd_wire_put_blob(&out, value, bytes);
    }
    give(i, &out);
}

static char message[ND_ERROR_MESSAGE_MAX];

/* The next answer is an error with this status and these words. */
static void expect_error(int i, nd_status status, const char *words)
{
    nd_wire_frame frame = answer(i);
    cr_assert_eq(frame.type, ND_WIRE_ERROR);
    nd_wire_cursor cursor = nd_wire_body(&frame);
    const uint32_t number = nd_wire_get_u32(&cursor); /* 0: of the connection */
    cr_assert(number == 0 || number == 7 + (uint32_t)i, "request %u", number);
    cr_assert_eq(nd_wire_get_u32(&cursor), (uint32_t)status);
    nd_wire_get_text(&cursor, message, sizeof message);
    cr_assert_not_null(strstr(message, words), "no \"%s\" in: %s", words, message);
}

/* A new client, whose hello is refused. */
static void refuse(int i, const char *version, const char *run, uint32_t epoch, nd_wire_role role,
                   int index, const char *words)
{
    connect_client(i);
    hello(i, version, run, epoch, role, index);
    expect_error(i, ND_ERR_CONFIG, words);
    cr_assert(clients[i].dropped);
}

static void close_server(void)
{
    nd_server_destroy(server);
    for (int i = 0; i < PEERS; i++) {
        nd_wire_parser_fini(&clients[i].answers);
    }
}

TestSuite(server, .fini = close_server, .timeout = 120);

static void leave(int i)
{
    nd_wire_buffer out = {0};
    nd_wire_begin(&out, ND_WIRE_BYE);
    give(i, &out);
    nd_server_gone(server, clients[i].peer);
}

/* The next answer to `i` is a slice; behind its request number. */
static nd_wire_cursor slice_of(int i)
{
    nd_wire_frame frame = answer(i);
    cr_assert_eq(frame.type, ND_WIRE_SLICE);
    nd_wire_cursor cursor = nd_wire_body(&frame);
    cr_assert_eq(nd_wire_get_u32(&cursor), 7 + (uint32_t)i);
    return cursor;
}

/* It is the whole result. */
static void expect_result(int i, const char *expected)
{
    char result[64] = "";
    size_t count, bytes = strlen(expected);
    nd_wire_cursor cursor = slice_of(i);
    cr_assert_eq(nd_wire_get_u64(&cursor), 0);
    uint64_t size = nd_wire_get_u64(&cursor);
    const uint8_t *packed = nd_wire_get_blob(&cursor, &count);
    cr_assert(nd_wire_finished(&cursor) && count == size);
    cr_assert_eq(ZSTD_decompress(result, bytes, packed, count), bytes);
    cr_assert_str_eq(result, expected);
}

Test(server, an_exchange_gives_everyone_all_parts_in_rank_order)
{
    open_joined(3, 3);
    request(2, ND_WIRE_EXCHANGE, "x", "cc", 2);
    request(0, ND_WIRE_EXCHANGE, "x", "aa", 2);
    cr_assert_eq(answer(0).type, ND_WIRE_NONE);
    request(1, ND_WIRE_EXCHANGE, "x", "bb", 2);
    for (int i = 0; i < 3; i++) {
        expect_result(i, "aabbcc");
    }
}

static void set(int i, const char *key, const char *value)
{
    request(i, ND_WIRE_SET, key, value, strlen(value));
    cr_assert_eq(answer(i).type, ND_WIRE_DONE);
}

static void expect_value(int i, const char *expected)
{
    size_t count;
    nd_wire_frame frame = answer(i);
    cr_assert_eq(frame.type, ND_WIRE_VALUE);
    nd_wire_cursor cursor = nd_wire_body(&frame);
    cr_assert_eq(nd_wire_get_u32(&cursor), 7 + (uint32_t)i);
    const uint8_t *bytes = nd_wire_get_blob(&cursor, &count);
    cr_assert(nd_wire_finished(&cursor) && count == strlen(expected));
    cr_assert_arr_eq(bytes, expected, count);
}

/* The value is that of the same key, and the first one stays. */
Test(server, get_waits_for_set)
{
    open_joined(2, 2);
    request(0, ND_WIRE_GET, "key", NULL, 0);
    set(1, "other", "no");
    cr_assert_eq(answer(0).type, ND_WIRE_NONE);
    set(1, "key", "value");
    expect_value(0, "value");
    set(1, "key", "later");
    request(0, ND_WIRE_GET, "key", NULL, 0);
    expect_value(0, "value");
}

Test(server, missing_ranks_are_named_while_others_wait)
{
    open_server(8);
    for (int i = 0; i < 8; i += i == 2 ? 2 : 1) { /* rank 3 never comes */
        join(i);
        if (i != 5) { /* rank 5 is there, but does not enter */
            request(i, ND_WIRE_EXCHANGE, "meet", "z", 1);
        }
    }
    now += 11 * second;
    nd_server_tick(server, now);
    cr_assert_not_null(strstr(notices, "waiting at 'meet' for 11 s; missing of 8 ranks: 3, 5 "
                                       "(never connected: 3)"),
                       "%s", notices);
    const size_t said = strlen(notices);
    now += 9 * second;
    nd_server_tick(server, now);
    cr_assert_eq(strlen(notices), said, "it is said every ten seconds: %s", notices);
    now += 11 * second;
    nd_server_tick(server, now);
    expect_error(0, ND_ERR_HANG, "missing of 8 ranks: 3, 5");
}

/* All ranks of an exchange have the earliest deadline, whoever has it. */
Test(server, an_exchange_ends_at_the_earliest_deadline)
{
    static const uint64_t timeouts[3][3] = {
        {10000, 40000, 50000}, {40000, 10000, 50000}, {50000, 40000, 10000}};
    open_joined(4, 3);
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < 3; i++) {
            timeout_ms = timeouts[k][i];
            request(i, ND_WIRE_EXCHANGE, "meet", "z", 1);
        }
        now += 9 * second;
        nd_server_tick(server, now);
        cr_assert_eq(answer(0).type, ND_WIRE_NONE);
        now += 2 * second;
        nd_server_tick(server, now);
        for (int i = 0; i < 3; i++) {
            expect_error(i, ND_ERR_HANG, "was not complete after 11 s");
        }
    }
}

Test(server, the_rank_of_a_lost_worker_stays_taken)
{
    open_joined(2, 2);
    nd_server_gone(server, clients[1].peer);
    refuse(2, "1.2", "job", 3, ND_WIRE_WORKER, 1, "rank 1, claimed by hosty, is taken");
}

/* One that is lost within it does not get what the others wait for. */
Test(server, a_rank_that_is_lost_or_leaves_ends_the_others_wait)
{
    static const struct {
        bool enters, leaves;
        const char *words;
    } cases[] = {{false, false, "rank 1 (hosty) was lost while others waited at 'meet'"},
                 {true, false, "rank 1 (hosty) was lost while others waited at 'meet'"},
                 {false, true, "rank 1 (hosty) left the job while others waited at 'meet'"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_server_destroy(server);
        open_joined(3, 3);
        request(0, ND_WIRE_EXCHANGE, "meet", "z", 1);
        if (cases[i].enters) {
            request(1, ND_WIRE_EXCHANGE, "meet", "y", 1);
        }
        cases[i].leaves ? leave(1) : nd_server_gone(server, clients[1].peer);
        expect_error(0, ND_ERR_IO, cases[i].words);
        cr_assert_eq(nd_server_members(server, ND_WIRE_WORKER), 2);
    }
}

/* Before the others come; a wait for a key goes on, which any rank may set. */
Test(server, what_comes_after_a_rank_left_cannot_be_complete)
{
    open_joined(3, 3);
    request(2, ND_WIRE_GET, "key", NULL, 0);
    leave(1);
    cr_assert_eq(answer(2).type, ND_WIRE_NONE);
    request(0, ND_WIRE_EXCHANGE, "meet", "z", 1);
    expect_error(0, ND_ERR_IO, "the exchange 'meet' cannot be completed: rank 1 left the job");
    nd_server_gone(server, clients[0].peer);
    expect_error(2, ND_ERR_IO, "rank 0 (hosty) was lost while others waited for the key 'key'");
}

Test(server, all_parts_of_an_exchange_have_one_size)
{
    open_joined(3, 2);
    request(0, ND_WIRE_EXCHANGE, "x", "aa", 2);
    request(1, ND_WIRE_EXCHANGE, "x", "bbb", 3);
    for (int i = 0; i < 2; i++) {
        expect_error(i, ND_ERR_INTERNAL, "rank 1 entered the exchange 'x' with 3 bytes, others");
    }
}

/* A result of more than 1 GiB; of one rank it would be a message that the store takes. */
Test(server, an_exchange_that_is_too_large_is_refused)
{
    enum { PART = ND_WIRE_LIMIT_MEMBER / 2, WORLD = ND_SERVER_EXCHANGE_MAX / PART };
    static char part[PART + 1];
    open_joined(WORLD, 1);
    request(0, ND_WIRE_EXCHANGE, "x", part, sizeof part);
    expect_error(0, ND_ERR_INTERNAL, "524289 bytes by each of 2048 ranks is too large");
}

/* The store did not run for longer than the caller waited. */
Test(server, a_rank_may_give_up_a_wait_and_ask_again)
{
    open_server(2);
    join(0);
    request(0, ND_WIRE_GET, "never", NULL, 0);
    set(0, "key", "zero");
    cr_assert_not(clients[0].dropped);
    set(0, "never", "now");
    cr_assert_eq(answer(0).type, ND_WIRE_NONE, "the wait is over");
}

/* The others wait on, until it comes back to the same exchange. */
Test(server, a_rank_may_give_up_an_exchange_and_come_back)
{
    open_joined(3, 3);
    request(2, ND_WIRE_EXCHANGE, "meet", "x", 1);
    request(0, ND_WIRE_EXCHANGE, "meet", "a", 1);
    request(0, ND_WIRE_EXCHANGE, "meet", "b", 1);
    set(0, "n", "");
    cr_assert_not(clients[0].dropped);
    request(1, ND_WIRE_EXCHANGE, "meet", "c", 1);
    cr_assert_eq(answer(1).type, ND_WIRE_NONE);
    now += 11 * second;
    nd_server_tick(server, now);
    cr_assert_not_null(strstr(notices, "missing of 3 ranks: 0\n"), "%s", notices);
    request(0, ND_WIRE_EXCHANGE, "meet", "d", 1);
    for (int i = 0; i < 3; i++) {
        expect_result(i, "dcx");
    }
}

/* Fills `out` with bytes that cannot be compressed. */
static void fill_randomly(uint64_t seed, char *out, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        out[i] = (char)nd_rng_u64(seed, 1, i);
    }
}

/* The sizes that the first slice of a result names: of the packed result, of its own part. */
static void first_slice(const char *part, size_t count, uint64_t *packed, size_t *sent)
{
    request(0, ND_WIRE_EXCHANGE, "large", part, count);
    request(1, ND_WIRE_EXCHANGE, "large", part, count);
    cr_assert_eq(answer(1).type, ND_WIRE_SLICE);
    nd_wire_cursor cursor = slice_of(0);
    nd_wire_get_u64(&cursor);
    *packed = nd_wire_get_u64(&cursor);
    nd_wire_get_blob(&cursor, sent);
}

/* Thousands of ranks send names of the same hosts. */
Test(server, a_long_result_is_packed)
{
    static char part[ND_SERVER_SLICE];
    uint64_t packed;
    size_t sent;
    open_joined(2, 2);
    first_slice(part, sizeof part, &packed, &sent);
    cr_assert(packed == sent && sent < 1024, "%zu of %zu", sent, (size_t)packed);
    cr_assert_eq(answer(0).type, ND_WIRE_NONE, "that is all");
}

/* A rank that gave up while the result was on its way to it gets no further part of that. */
Test(server, a_rank_may_give_up_a_result)
{
    static char part[ND_SERVER_SLICE], other[ND_SERVER_SLICE];
    fill_randomly(1, part, sizeof part);
    fill_randomly(2, other, sizeof other);
    open_joined(2, 2);
    request(0, ND_WIRE_EXCHANGE, "large", part, sizeof part);
    request(1, ND_WIRE_EXCHANGE, "large", other, sizeof other);
    cr_assert_eq(answer(0).type, ND_WIRE_SLICE);
    set(0, "n", "");
    nd_server_drained(server, clients[0].peer);
    cr_assert_eq(answer(0).type, ND_WIRE_NONE);
    cr_assert_eq(answer(1).type, ND_WIRE_SLICE);
    nd_server_drained(server, clients[1].peer);
    cr_assert_eq(answer(1).type, ND_WIRE_SLICE, "the other gets all of it");
}

Test(server, hello_must_fit_version_job_epoch_and_place)
{
    open_server(2);
    static const struct {
        const char *version, *run;
        uint32_t epoch;
        nd_wire_role role;
        int index;
        const char *words;
    } cases[] = {
        {"1.3", "job", 3, ND_WIRE_WORKER, 0, "a member has version 1.3 (protocol "},
        {"1.2", "jab", 3, ND_WIRE_WORKER, 0, "belongs to start 3 of job jab, this store to"},
        {"1.2", "job", 2, ND_WIRE_WORKER, 0,
         "belongs to start 2 of job job, this store to start 3 of job job"},
        {"1.2", "job", 3, ND_WIRE_WORKER, 2, "outside of a world of 2"},
        {"1.2", "", 3, ND_WIRE_NODE, 2, "node rank 2 of hosty is outside of 1 to 1"},
        {"1.2", "", 3, ND_WIRE_NODE, 0, "outside of 1 to 1"},
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        refuse(i, cases[i].version, cases[i].run, cases[i].epoch, cases[i].role, cases[i].index,
               cases[i].words);
    }
    welcome(20, "", 3, ND_WIRE_NODE, 1);
    refuse(21, "1.2", "", 3, ND_WIRE_NODE, 1, "is taken");
    join(1);
    refuse(22, "1.2", "job", 3, ND_WIRE_WORKER, 1, "rank 1, claimed by hosty, is taken");
}

/* Another version may lay out what follows its number otherwise, as protocol 3 did the role. */
Test(server, another_protocol_is_told_its_version_whatever_follows)
{
    nd_wire_buffer out = {0};
    open_server(2);
    connect_client(0);
    nd_wire_begin(&out, ND_WIRE_HELLO);
    nd_wire_put_u32(&out, 3);
    nd_wire_put_text(&out, "1.1");
    nd_wire_put_text(&out, "job");
    nd_wire_put_u32(&out, 3);
    nd_wire_put_u32(&out, ND_WIRE_WORKER);
    out.size -= 3; /* the role was a byte */
    nd_wire_put_u32(&out, 1);
    nd_wire_put_text(&out, "hosty");
    give(0, &out);
    expect_error(0, ND_ERR_CONFIG, "a member has version 1.1 (protocol 3), the store has 1.2");
    cr_assert(clients[0].dropped);
}

/* A worker of another start is refused; a node that names no start is accepted, and so is a job. */
Test(server, a_later_start_refuses_members_of_another_one)
{
    open_server(2);
    nd_server_restart(server, "job.4", 4, 2);
    static const struct {
        const char *run;
        uint32_t epoch;
        nd_wire_role role;
        const char *words;
    } cases[] = {
        {"job", 3, ND_WIRE_WORKER,
         "rank 1 on hosty belongs to start 3 of job job, this store to start 4"},
        {"job.5", 5, ND_WIRE_WORKER, "belongs to start 5 of job job.5, this store to start 4"},
        {"job", 3, ND_WIRE_NODE, "node 1 on hosty belongs to start 3 of job job"},
        {"job", 4, ND_WIRE_WORKER, "this store to start 4 of job job.4"},
        {"jobs.4", 4, ND_WIRE_WORKER,
         "of job job.4; others are refused, so give each job a port of its own"},
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        refuse(i, "1.2", cases[i].run, cases[i].epoch, cases[i].role, 1, cases[i].words);
        const bool other_job = strcmp(cases[i].run, "jobs.4") == 0;
        cr_expect_eq(strstr(message, "a port of its own") != NULL, other_job, "%s", message);
    }
    connect_client(20);
    hello(20, "1.2", "", 0, ND_WIRE_NODE, 1);
    nd_wire_frame frame = answer(20);
    cr_assert_eq(frame.type, ND_WIRE_WELCOME);
    nd_wire_cursor cursor = nd_wire_body(&frame);
    char name[ND_WIRE_TEXT_MAX];
    nd_wire_get_text(&cursor, name, sizeof name);
    cr_assert_str_eq(name, "job");
    welcome(21, "job.4", 4, ND_WIRE_WORKER, 1);
}

/* On fewer nodes, and on all of them again. */
Test(server, a_later_start_may_have_fewer_workers)
{
    open_joined(3, 3);
    nd_server_restart(server, "job.4", 4, 2);
    for (int i = 0; i < 3; i++) {
        expect_error(i, ND_ERR_IO, "this start of the job has ended");
        nd_server_gone(server, clients[i].peer);
    }
    refuse(3, "1.2", "job.4", 4, ND_WIRE_WORKER, 2, "2");
    for (int i = 4; i < 6; i++) {
        welcome(i, "job.4", 4, ND_WIRE_WORKER, i - 4);
    }
    nd_server_restart(server, "job.5", 5, 3);
    welcome(6, "job.5", 5, ND_WIRE_WORKER, 2);
}

/* Names of keys and exchanges come again, and nothing of the former start answers them. */
Test(server, a_later_start_finds_the_store_empty)
{
    open_joined(2, 2);
    request(0, ND_WIRE_SET, "k", "old", 3);
    cr_assert_eq(answer(0).type, ND_WIRE_DONE);
    request(0, ND_WIRE_EXCHANGE, "meet", "aa", 2);
    request(1, ND_WIRE_GET, "other", NULL, 0);
    nd_server_restart(server, "job.4", 4, 2);
    for (int i = 0; i < 2; i++) {
        expect_error(i, ND_ERR_IO, "this start of the job has ended");
        cr_assert(clients[i].dropped);
        request(i, ND_WIRE_SET, "late", "x", 1); /* of a worker that does not know it yet */
    }
    for (int i = 2; i < 4; i++) {
        welcome(i, "job.4", 4, ND_WIRE_WORKER, i - 2);
    }
    /* The former workers' connections close while the new ones are there. */
    nd_server_gone(server, clients[0].peer);
    nd_server_gone(server, clients[1].peer);
    request(2, ND_WIRE_GET, "k", NULL, 0);
    request(3, ND_WIRE_GET, "late", NULL, 0);
    cr_assert_eq(answer(2).type, ND_WIRE_NONE);
    cr_assert_eq(answer(3).type, ND_WIRE_NONE);
    request(2, ND_WIRE_EXCHANGE, "meet", "bbb", 3);
    request(3, ND_WIRE_EXCHANGE, "meet", "ccc", 3);
    cr_assert_eq(answer(2).type, ND_WIRE_SLICE);
    cr_assert_eq(answer(3).type, ND_WIRE_SLICE);
}

Test(server, values_have_an_end)
{
    static char value[ND_WIRE_LIMIT_MEMBER / 2];
    int64_t taken = 0;
    open_joined(2, 2);
    for (;; taken++) {
        char key[32];
        snprintf(key, sizeof key, "k%d", (int)taken);
        request(0, ND_WIRE_SET, key, value, sizeof value);
        nd_wire_frame frame = answer(0);
        if (frame.type != ND_WIRE_DONE) {
            cr_assert_eq(frame.type, ND_WIRE_ERROR);
            break;
        }
        cr_assert_lt(taken, 4096);
    }
    cr_assert_leq(taken * (int64_t)sizeof value, ND_SERVER_VALUES_MAX);
    cr_assert_gt((taken + 2) * (int64_t)sizeof value, ND_SERVER_VALUES_MAX);
    set(1, "k0", ""); /* it is set, and takes no more */
    request(1, ND_WIRE_SET, "one more", value, sizeof value);
    expect_error(1, ND_ERR_INTERNAL, "the store is full");
    nd_server_restart(server, "job.4", 4, 2);
    welcome(2, "job.4", 4, ND_WIRE_WORKER, 0);
    request(2, ND_WIRE_SET, "k0", value, sizeof value);
    cr_assert_eq(answer(2).type, ND_WIRE_DONE, "a later start begins with an empty store");
}

/* Many strangers fill no terminal. */
Test(server, three_refused_connections_are_told_in_ten_seconds)
{
    open_server(2);
    for (int i = 0; i < 22; i++) {
        const size_t said = strlen(notices);
        nd_server_note_refused(server, "10.0.0.9 port 7", "it is junk", now + i * second);
        cr_expect_eq(strlen(notices) > said, i % 11 < 3, "number %d: %s", i, notices);
    }
}

Test(server, strangers_are_few_short_lived_and_brief)
{
    open_server(2);
    void *leaving;
    for (int i = 0; i < ND_STRANGERS_LEAST; i++) {
        cr_assert(nd_server_has_room(server, now, &leaving));
        connect_client(i);
    }
    cr_assert_not(nd_server_has_room(server, now, &leaving));
    cr_assert_null(leaving, "all have come only now");
    nd_server_receive(server, clients[0].peer, NULL, 0, now); /* a sign */
    cr_assert_not(nd_server_has_room(server, now + second / 10, &leaving));
    cr_assert_eq(leaving, &clients[1], "the oldest that is silent");
    cr_assert_not_null(strstr(notices, "it said nothing while others waited"));
    nd_server_gone(server, clients[1].peer);
    cr_assert(nd_server_has_room(server, now + second / 10, &leaving));
    clients[1].dropped = true;
    static const uint8_t large[] = {1, 2, 0, 0, 1}; /* 513 bytes */
    nd_server_receive(server, clients[3].peer, large, sizeof large, now);
    cr_assert(clients[3].dropped);
    nd_server_receive(server, clients[2].peer, NULL, 0, now + 4 * second); /* no hello, either */
    nd_server_tick(server, now + 6 * second);
    for (int k = 0; k < ND_STRANGERS_LEAST; k++) {
        cr_assert(clients[k].dropped);
    }
    cr_assert_not_null(strstr(notices, "refused"));
}

Test(server, a_member_that_sends_junk_is_dropped)
{
    open_server(2);
    join(0);
    nd_wire_buffer out = {0};
    nd_wire_begin(&out, ND_WIRE_SET); /* a set without key and value */
    nd_wire_put_u32(&out, 1);
    give(0, &out);
    expect_error(0, ND_ERR_IO, "a damaged set message");
    cr_assert(clients[0].dropped);
}

// SPDX-License-Identifier: Apache-2.0
/* A member's end of the connection, against a store of rank 0, in a thread of this process. */
#include <criterion/criterion.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/channel.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/store.h"
#include "tests/support/port.h"
#include "tests/support/tempdir.h"

static tempdir dir;
static nd_identity id;
static nd_store *store;
static nd_channel *channel;
static uint8_t key[ND_KEY_BYTES];

static void setup(void)
{
    tempdir_make(&dir);
    id = (nd_identity){.source = ND_IDENTITY_ENVIRONMENT,
                       .world_size = 3,
                       .local_world_size = 3,
                       .nnodes = 1,
                       .master_addr = "127.0.0.1",
                       .master_port = port_reserve(),
                       .run_id = "job"};
    assert_ok(nd_key_make_file(tempdir_file(&dir, "key")));
    assert_ok(nd_key_read_file(dir.name, key));
    setenv("ND_RDZV_KEY_FILE", dir.name, 1);
    assert_ok(nd_store_open(&id, 20, NULL, &store));
}

static void teardown(void)
{
    nd_channel_close(channel);
    nd_store_close(store, true);
    tempdir_remove(&dir);
}

TestSuite(channel, .init = setup, .fini = teardown, .timeout = 120);

static int64_t soon(void)
{
    return nd_clock_ns() + 20000000000;
}

static nd_status say_hello(const char *version, int index)
{
    nd_hello hello = {.version = version,
                      .run_id = "job",
                      .host = "here",
                      .role = ND_WIRE_WORKER,
                      .index = index};
    char run_id[ND_WIRE_TEXT_MAX];
    int world = 0;
    ND_TRY(nd_channel_hello(channel, &hello, soon(), run_id, sizeof run_id, &world));
    cr_assert_str_eq(run_id, "job");
    cr_assert_eq(world, 3);
    return ND_OK;
}

static void open_channel(void)
{
    assert_ok(nd_channel_open("127.0.0.1", id.master_port, key, 20, &channel));
}

static void send_request(nd_wire_buffer *out)
{
    assert_ok(nd_wire_end(out));
    assert_ok(nd_channel_send(channel, out, soon()));
    nd_wire_buffer_fini(out);
}

Test(channel, a_large_value_comes_back_as_it_was)
{
    enum { BYTES = 300000 }; /* many TLS records */
    static uint8_t value[BYTES];
    nd_wire_buffer out = {0};
    nd_wire_frame frame;
    size_t count;
    for (size_t i = 0; i < BYTES; i++) {
        value[i] = (uint8_t)(i * i / 7 + i);
    }
    open_channel();
    cr_assert_str_eq(nd_channel_peer(channel), "127.0.0.1");
    assert_ok(say_hello(ND_VERSION, 1));
    nd_wire_begin(&out, ND_WIRE_SET);
    nd_wire_put_u32(&out, 1);
    nd_wire_put_text(&out, "large");
    nd_wire_put_blob(&out, value, BYTES);
    send_request(&out);
    assert_ok(nd_channel_receive(channel, soon(), &frame));
    cr_assert_eq(frame.type, ND_WIRE_DONE);
    out = (nd_wire_buffer){0};
    nd_wire_begin(&out, ND_WIRE_GET);
    nd_wire_put_u32(&out, 2);
    nd_wire_put_text(&out, "large");
    send_request(&out);
    assert_ok(nd_channel_receive(channel, soon(), &frame));
    cr_assert_eq(frame.type, ND_WIRE_VALUE);
    nd_wire_cursor cursor = nd_wire_body(&frame);
    cr_assert_eq(nd_wire_get_u32(&cursor), 2);
    const uint8_t *got = nd_wire_get_blob(&cursor, &count);
    cr_assert(nd_wire_finished(&cursor));
    cr_assert_eq(count, BYTES);
    cr_assert_arr_eq(got, value, BYTES);
}

/* In the past it takes what is there. */
Test(channel, a_silent_store_is_a_deadline)
{
    nd_wire_frame frame = {.type = ND_WIRE_DONE};
    open_channel();
    assert_ok(say_hello(ND_VERSION, 1));
    assert_ok(nd_channel_receive(channel, 0, &frame));
    cr_assert_eq(frame.type, ND_WIRE_NONE);
    assert_fails(nd_channel_receive(channel, nd_clock_ns() + 50000000, &frame), ND_ERR_HANG,
                 "no answer from the store");
}

Test(channel, another_key_is_refused)
{
    uint8_t other[ND_KEY_BYTES];
    memcpy(other, key, sizeof other);
    other[31] ^= 1;
    assert_fails(nd_channel_open("127.0.0.1", id.master_port, other, 20, &channel), ND_ERR_CONFIG,
                 "refuses this member");
    channel = NULL;
    open_channel(); /* and the store still serves who has the key */
    assert_ok(say_hello(ND_VERSION, 1));
}

Test(channel, a_refused_hello_has_the_stores_sentence)
{
    open_channel();
    assert_fails(say_hello("9.9.9", 1), ND_ERR_CONFIG, "9.9.9");
    nd_channel_close(channel);
    open_channel();
    assert_fails(say_hello(ND_VERSION, 3), ND_ERR_CONFIG, "rank 3");
}

Test(channel, a_store_that_ends_is_a_lost_connection)
{
    nd_wire_frame frame;
    open_channel();
    assert_ok(say_hello(ND_VERSION, 1));
    nd_store_close(store, true);
    store = NULL;
    assert_fails(nd_channel_receive(channel, soon(), &frame), ND_ERR_IO, "store");
}

Test(channel, nobody_there_is_a_deadline_with_host_and_port)
{
    char words[64];
    int fd, port = port_silent(&fd);
    snprintf(words, sizeof words, "127.0.0.1 port %d was not reached", port);
    assert_fails(nd_channel_open("127.0.0.1", port, key, 0.2, &channel), ND_ERR_HANG, words);
    channel = NULL;
    close(fd);
}

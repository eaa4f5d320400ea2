// SPDX-License-Identifier: Apache-2.0
/* Frames of the rendezvous protocol: round trip in pieces, damage, limits. */
#include <criterion/criterion.h>
#include <string.h>

#include "runtime/rdzv/wire.h"
#include "tests/support/tempdir.h"

static void write_sample(nd_wire_buffer *out)
{
    nd_wire_begin(out, ND_WIRE_SET);
    nd_wire_put_u32(out, 200);
    nd_wire_put_u32(out, 4000000000u);
    nd_wire_put_u64(out, UINT64_C(1) << 63);
    nd_wire_put_text(out, "a key");
    nd_wire_put_blob(out, "\0\1\2", 3);
    assert_ok(nd_wire_end(out));
}

Test(wire, frames_come_back_whole_from_bytes_one_by_one)
{
    nd_wire_buffer out = {0};
    nd_wire_parser parser;
    nd_wire_frame frame;
    int seen = 0;
    write_sample(&out);
    write_sample(&out);
    nd_wire_parser_init(&parser, ND_WIRE_LIMIT_MEMBER);
    for (size_t i = 0; i < out.size; i++) {
        assert_ok(nd_wire_feed(&parser, out.data + i, 1));
        assert_ok(nd_wire_next(&parser, &frame));
        if (frame.type == ND_WIRE_NONE) {
            continue;
        }
        char text[16];
        size_t count;
        nd_wire_cursor cursor = nd_wire_body(&frame);
        cr_assert_eq(frame.type, ND_WIRE_SET);
        cr_assert_eq(nd_wire_get_u32(&cursor), 200u);
        cr_assert_eq(nd_wire_get_u32(&cursor), 4000000000u);
        cr_assert_eq(nd_wire_get_u64(&cursor), UINT64_C(1) << 63);
        nd_wire_get_text(&cursor, text, sizeof text);
        cr_assert_str_eq(text, "a key");
        cr_assert_arr_eq(nd_wire_get_blob(&cursor, &count), "\0\1\2", 3);
        cr_assert(nd_wire_finished(&cursor));
        seen++;
    }
    cr_assert_eq(seen, 2);
    nd_wire_parser_fini(&parser);
    nd_wire_buffer_fini(&out);
}

/* So that the number of allocations of a worker does not depend on how its messages arrive. */
Test(wire, what_comes_in_parts_takes_the_same_room)
{
    nd_wire_buffer out = {0};
    nd_wire_frame frame;
    nd_wire_parser parts, whole;
    for (int i = 0; i < 300; i++) {
        write_sample(&out);
    }
    cr_assert(out.size > 8192 && out.size <= 16384, "%zu bytes", out.size);
    nd_wire_parser_init(&parts, ND_WIRE_LIMIT_MEMBER);
    nd_wire_parser_init(&whole, ND_WIRE_LIMIT_MEMBER);
    assert_ok(nd_wire_feed(&parts, out.data, 1));
    const uint8_t *first = parts.data;
    for (size_t i = 1; i < out.size; i++) {
        assert_ok(nd_wire_feed(&parts, out.data + i, 1));
        assert_ok(nd_wire_next(&parts, &frame));
    }
    assert_ok(nd_wire_feed(&whole, out.data, out.size));
    cr_assert_eq(parts.capacity, whole.capacity);
    cr_assert_eq(parts.data, first, "it has grown");
    nd_wire_parser_fini(&parts);
    nd_wire_parser_fini(&whole);
    nd_wire_buffer_fini(&out);
}

Test(wire, the_length_is_little_endian_and_counts_the_type)
{
    nd_wire_buffer out = {0};
    nd_wire_begin(&out, ND_WIRE_BYE);
    assert_ok(nd_wire_end(&out));
    cr_assert_eq(out.size, 5);
    cr_assert_arr_eq(out.data, "\1\0\0\0\2", 5);
    nd_wire_buffer_fini(&out);
}

Test(wire, lengths_of_zero_or_beyond_the_limit_are_refused_before_their_bytes_come)
{
    static const struct {
        uint8_t length[4];
        const char *refusal; /* NULL: it may come */
    } cases[] = {{{0, 0, 0, 0}, "a frame of 0 bytes"}, {{1, 2, 0, 0}, "513 bytes"}, {{0, 2, 0, 0}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_wire_frame frame;
        nd_wire_parser parser;
        nd_wire_parser_init(&parser, ND_WIRE_LIMIT_STRANGER);
        assert_ok(nd_wire_feed(&parser, cases[i].length, 4));
        if (cases[i].refusal) {
            assert_fails(nd_wire_next(&parser, &frame), ND_ERR_IO, cases[i].refusal);
        } else {
            assert_ok(nd_wire_next(&parser, &frame));
            cr_assert_eq(frame.type, ND_WIRE_NONE);
        }
        nd_wire_parser_fini(&parser);
    }
}

Test(wire, short_long_and_lying_bodies_are_bad)
{
    nd_wire_buffer out = {0};
    char small[5]; /* without room for the NUL of "a key" */
    size_t count;
    write_sample(&out);
    const uint8_t *body = out.data + ND_WIRE_HEADER + 1;
    size_t bytes = out.size - ND_WIRE_HEADER - 1;
    for (size_t kept = 0; kept < bytes; kept++) { /* every truncation */
        nd_wire_cursor cursor = {.at = body, .end = body + kept};
        char text[16];
        nd_wire_get_u32(&cursor);
        nd_wire_get_u32(&cursor);
        nd_wire_get_u64(&cursor);
        nd_wire_get_text(&cursor, text, sizeof text);
        nd_wire_get_blob(&cursor, &count);
        cr_assert_not(nd_wire_finished(&cursor), "%zu bytes", kept);
    }
    nd_wire_cursor cursor = {.at = body, .end = body + bytes};
    nd_wire_get_u32(&cursor);
    cr_assert_not(nd_wire_finished(&cursor)); /* something is left over */
    nd_wire_get_u32(&cursor);
    nd_wire_get_u64(&cursor);
    nd_wire_get_text(&cursor, small, sizeof small); /* too long for it */
    cr_assert_str_eq(small, "");
    cr_assert(cursor.bad);
    static const uint8_t lying[] = {255, 255, 255, 255, 'a'};
    cursor = (nd_wire_cursor){.at = lying, .end = lying + sizeof lying};
    nd_wire_get_blob(&cursor, &count);
    cr_assert(cursor.bad);
    static const uint8_t cut[] = {3, 0, 0, 0, 'a', 0, 'b'};
    cursor = (nd_wire_cursor){.at = cut, .end = cut + sizeof cut};
    nd_wire_get_text(&cursor, small, sizeof small);
    cr_assert(cursor.bad, "a text has no NUL inside");
    nd_wire_buffer_fini(&out);
}

Test(wire, a_frame_above_the_members_limit_is_not_written)
{
    nd_wire_buffer out = {0};
    uint8_t *bytes = calloc(1, ND_WIRE_LIMIT_MEMBER);
    nd_wire_begin(&out, ND_WIRE_SET);
    nd_wire_put_blob(&out, bytes, ND_WIRE_LIMIT_MEMBER);
    assert_fails(nd_wire_end(&out), ND_ERR_INTERNAL, "above the limit");
    free(bytes);
    nd_wire_buffer_fini(&out);
}

// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/wire.h"

#include <stdlib.h>
#include <string.h>

/* The first buffer of a parser. What the store answers in a small job fits into a worker's, however
 * it arrives. A store with many peers has smaller ones. */
enum { FIRST_BYTES = 4096, FIRST_BYTES_OF_MEMBER = 16384 };

/* Makes room for `needed` bytes, of which the first allocation has at least `first`. */
static bool grow(uint8_t **data, size_t *capacity, size_t needed, size_t first)
{
    size_t bytes = *capacity ? *capacity : first;
    while (bytes < needed) {
        bytes *= 2;
    }
    uint8_t *grown = bytes > *capacity ? realloc(*data, bytes) : *data;
    if (grown) {
        *data = grown;
        *capacity = bytes;
    }
    return grown != NULL;
}

static void put_bytes(nd_wire_buffer *buffer, const void *bytes, size_t count)
{
    buffer->failed |= !grow(&buffer->data, &buffer->capacity, buffer->size + count, 256);
    if (count > 0 && !buffer->failed) {
        memcpy(buffer->data + buffer->size, bytes, count);
        buffer->size += count;
    }
}

static void store_le(uint8_t *out, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(value >> (8 * i));
    }
}

static uint64_t load_le(const uint8_t *in, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) {
        value |= (uint64_t)in[i] << (8 * i);
    }
    return value;
}

void nd_wire_buffer_fini(nd_wire_buffer *buffer)
{
    free(buffer->data);
    *buffer = (nd_wire_buffer){0};
}

void nd_wire_begin(nd_wire_buffer *buffer, nd_wire_type type)
{
    buffer->frame = buffer->size;
    nd_wire_put_u32(buffer, 0);
    put_bytes(buffer, &(uint8_t){(uint8_t)type}, 1);
}

void nd_wire_put_u32(nd_wire_buffer *buffer, uint32_t value)
{
    uint8_t bytes[4];
    store_le(bytes, value, 4);
    put_bytes(buffer, bytes, 4);
}

void nd_wire_put_u64(nd_wire_buffer *buffer, uint64_t value)
{
    uint8_t bytes[8];
    store_le(bytes, value, 8);
    put_bytes(buffer, bytes, 8);
}

void nd_wire_put_text(nd_wire_buffer *buffer, const char *text)
{
    nd_wire_put_blob(buffer, text, strlen(text));
}

void nd_wire_put_blob(nd_wire_buffer *buffer, const void *bytes, size_t count)
{
    nd_wire_put_u32(buffer, (uint32_t)count);
    put_bytes(buffer, bytes, count);
}

nd_status nd_wire_end(nd_wire_buffer *buffer)
{
    size_t length = buffer->size - buffer->frame - ND_WIRE_HEADER;
    if (buffer->failed) {
        buffer->size = buffer->frame;
        return nd_fail_memory("a rendezvous message");
    }
    if (length > ND_WIRE_LIMIT_MEMBER) {
        buffer->size = buffer->frame;
        return nd_fail(ND_ERR_INTERNAL,
                       "a rendezvous message of %zu bytes is above the limit of %d", length,
                       ND_WIRE_LIMIT_MEMBER);
    }
    store_le(buffer->data + buffer->frame, length, ND_WIRE_HEADER);
    return ND_OK;
}

static const uint8_t *take_bytes(nd_wire_cursor *cursor, size_t count)
{
    if (cursor->bad || (size_t)(cursor->end - cursor->at) < count) {
        cursor->bad = true;
        return NULL;
    }
    const uint8_t *at = cursor->at;
    cursor->at += count;
    return at;
}

uint32_t nd_wire_get_u32(nd_wire_cursor *cursor)
{
    const uint8_t *at = take_bytes(cursor, 4);
    return at ? (uint32_t)load_le(at, 4) : 0;
}

uint64_t nd_wire_get_u64(nd_wire_cursor *cursor)
{
    const uint8_t *at = take_bytes(cursor, 8);
    return at ? load_le(at, 8) : 0;
}

void nd_wire_get_text(nd_wire_cursor *cursor, char *out, size_t capacity)
{
    size_t count;
    const uint8_t *at = nd_wire_get_blob(cursor, &count);
    out[0] = '\0';
    if (!at) {
        return;
    }
    if (count >= capacity || memchr(at, 0, count)) {
        cursor->bad = true;
        return;
    }
    memcpy(out, at, count);
    out[count] = '\0';
}

const uint8_t *nd_wire_get_blob(nd_wire_cursor *cursor, size_t *count)
{
    *count = nd_wire_get_u32(cursor);
    const uint8_t *at = take_bytes(cursor, *count);
    if (!at) {
        *count = 0;
    }
    return at;
}

bool nd_wire_finished(const nd_wire_cursor *cursor)
{
    return !cursor->bad && cursor->at == cursor->end;
}

void nd_wire_parser_init(nd_wire_parser *parser, size_t limit)
{
    *parser = (nd_wire_parser){.limit = limit,
                               .first = limit > ND_WIRE_LIMIT_STRANGER ? FIRST_BYTES_OF_MEMBER
                                                                       : FIRST_BYTES};
}

void nd_wire_parser_fini(nd_wire_parser *parser)
{
    free(parser->data);
    *parser = (nd_wire_parser){0};
}

nd_status nd_wire_feed(nd_wire_parser *parser, const void *bytes, size_t count)
{
    if (count == 0) {
        return ND_OK;
    }
    if (parser->begin > 0) {
        memmove(parser->data, parser->data + parser->begin, parser->end - parser->begin);
        parser->end -= parser->begin;
        parser->begin = 0;
    }
    if (!grow(&parser->data, &parser->capacity, parser->end + count, parser->first)) {
        return nd_fail_memory("%zu bytes of rendezvous input", parser->end + count);
    }
    memcpy(parser->data + parser->end, bytes, count);
    parser->end += count;
    return ND_OK;
}

nd_status nd_wire_next(nd_wire_parser *parser, nd_wire_frame *frame)
{
    *frame = (nd_wire_frame){.type = ND_WIRE_NONE};
    size_t have = parser->end - parser->begin;
    if (have < ND_WIRE_HEADER) {
        return ND_OK;
    }
    const uint8_t *at = parser->data + parser->begin;
    size_t length = (size_t)load_le(at, ND_WIRE_HEADER);
    if (length == 0 || length > parser->limit) {
        return nd_fail(ND_ERR_IO, "a frame of %zu bytes, where 1 to %zu are allowed", length,
                       parser->limit);
    }
    if (have - ND_WIRE_HEADER < length) {
        return ND_OK;
    }
    *frame = (nd_wire_frame){.type = (nd_wire_type)at[ND_WIRE_HEADER],
                             .body = at + ND_WIRE_HEADER + 1,
                             .bytes = length - 1};
    parser->begin += ND_WIRE_HEADER + length;
    return ND_OK;
}

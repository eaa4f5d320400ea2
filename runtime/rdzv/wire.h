// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_WIRE_H
#define ND_RDZV_WIRE_H
/*
 * The rendezvous protocol's frames, without I/O: bytes in, frames out.
 *
 * A frame is u32 length (of type and body), u8 type, body. Integers are little-endian; a text or a
 * blob is u32 length and bytes. The length is checked against the parser's limit before anything is
 * kept for it: 512 bytes until the peer's hello is accepted, 1 MiB after. Writers collect an
 * allocation failure and give it at nd_wire_end; readers collect a short body and give it at
 * nd_wire_finished, so that a message is written or read in one run of calls.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

enum {
    ND_WIRE_PROTOCOL = 5,
    ND_WIRE_HEADER = 4,           /* bytes of the length */
    ND_WIRE_LIMIT_STRANGER = 512, /* length of a frame before hello */
    ND_WIRE_LIMIT_MEMBER = 1 << 20,
    ND_WIRE_TEXT_MAX = 256, /* names, keys, hosts, with their NUL */
};

typedef enum nd_wire_type {
    ND_WIRE_NONE = 0,
    /* to the store */
    ND_WIRE_HELLO =
        1, /* u32 protocol, text version, text run id, u32 epoch, u32 role, u32 index, text host */
    ND_WIRE_BYE,      /* - */
    ND_WIRE_SET,      /* u32 request, text key, blob value */
    ND_WIRE_GET,      /* u32 request, text key; the answer waits until it is set */
    ND_WIRE_EXCHANGE, /* u32 request, u64 timeout ms, text name, blob value */
    /* from the store */
    ND_WIRE_WELCOME = 32, /* text run id (to a node: the job's), u32 world size */
    ND_WIRE_ERROR,        /* u32 request (0: the connection), u32 status, text message (long) */
    ND_WIRE_DONE,         /* u32 request; the key is set */
    ND_WIRE_VALUE,        /* u32 request, blob value */
    ND_WIRE_SLICE, /* u32 request, u64 offset, u64 size, blob part of the result, packed by zstd */
    /* between launchers, bodies in launcher/launcher.h */
    ND_WIRE_NODE_FIRST = 64,
    ND_WIRE_NODE_LAST = 95,
} nd_wire_type;

typedef enum nd_wire_role { ND_WIRE_WORKER = 0, ND_WIRE_NODE } nd_wire_role;

/* A growing byte buffer that frames are written into, one after the other. Owned by the caller
 * (fini). */
typedef struct nd_wire_buffer {
    uint8_t *data;
    size_t size, capacity;
    size_t frame; /* start of the frame being written */
    bool failed;  /* an allocation failed */
} nd_wire_buffer;

void nd_wire_buffer_fini(nd_wire_buffer *buffer);
void nd_wire_begin(nd_wire_buffer *buffer, nd_wire_type type);
void nd_wire_put_u32(nd_wire_buffer *buffer, uint32_t value);
void nd_wire_put_u64(nd_wire_buffer *buffer, uint64_t value);
void nd_wire_put_text(nd_wire_buffer *buffer, const char *text);
void nd_wire_put_blob(nd_wire_buffer *buffer, const void *bytes, size_t count);
/* Closes the frame. ND_ERR_INTERNAL when memory ran out or the frame is longer than
 * ND_WIRE_LIMIT_MEMBER. */
nd_status nd_wire_end(nd_wire_buffer *buffer);

/* Reads a body in order; `bad` sticks. */
typedef struct nd_wire_cursor {
    const uint8_t *at, *end;
    bool bad;
} nd_wire_cursor;

uint32_t nd_wire_get_u32(nd_wire_cursor *cursor);
uint64_t nd_wire_get_u64(nd_wire_cursor *cursor);
/* Copies into out (capacity with NUL); longer text or a NUL inside is bad; *out is then "". */
void nd_wire_get_text(nd_wire_cursor *cursor, char *out, size_t capacity);
/* Borrowed from the frame. */
const uint8_t *nd_wire_get_blob(nd_wire_cursor *cursor, size_t *count);
/* True when everything was there and nothing is left over. */
bool nd_wire_finished(const nd_wire_cursor *cursor);

typedef struct nd_wire_frame {
    nd_wire_type type; /* ND_WIRE_NONE: no whole frame yet */
    const uint8_t *body;
    size_t bytes;
} nd_wire_frame;

static inline nd_wire_cursor nd_wire_body(const nd_wire_frame *frame)
{
    return (nd_wire_cursor){.at = frame->body, .end = frame->body + frame->bytes};
}

typedef struct nd_wire_parser {
    uint8_t *data;
    size_t begin, end, capacity;
    size_t limit; /* largest length accepted now */
    size_t first; /* capacity at the first input */
} nd_wire_parser;

void nd_wire_parser_init(nd_wire_parser *parser, size_t limit);
void nd_wire_parser_fini(nd_wire_parser *parser);
/* Keeps a copy of the bytes. */
nd_status nd_wire_feed(nd_wire_parser *parser, const void *bytes, size_t count);
/* The next whole frame, valid until the next feed. ND_ERR_IO for a length of 0 or beyond the
 * limit. */
nd_status nd_wire_next(nd_wire_parser *parser, nd_wire_frame *frame);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_NET_LINK_H
#define ND_COMM_NET_LINK_H
/*
 * One encrypted connection: a non-blocking socket and its TLS session, which also holds the
 * ciphertext that the socket has not taken yet. It belongs to an epoll, where its data is the link
 * itself.
 */
#include "runtime/rdzv/address.h"
#include "runtime/rdzv/tls.h"

enum { ND_LINK_CHUNK = 32 << 10 }; /* most plaintext that is encrypted at once */

typedef struct nd_link {
    int fd, epoll;
    nd_tls *tls;
    bool connecting, wants_out;
} nd_link;

/* From connect or accept on. ND_ERR_IO when the address cannot be reached at all; ND_ERR_RESOURCE
 * when this process has no descriptor or memory for it. The same holds below: ND_ERR_IO and
 * ND_ERR_CONFIG are the other side's, ND_ERR_RESOURCE and ND_ERR_INTERNAL are this one's. */
nd_status nd_link_connect(const nd_address *to, nd_tls_context *client, int epoll, nd_link **out);
/* Takes the descriptor in every case. */
nd_status nd_link_accept(int fd, nd_tls_context *server, int epoll, nd_link **out);
void nd_link_close(nd_link *link); /* NULL is legal */

/* Sends ciphertext, the handshake's too; *idle: the socket has taken all of it. */
nd_status nd_link_flush(nd_link *link, bool *idle);
/* At most ND_LINK_CHUNK bytes, when established, with a flush. ND_ERR_IO when it was not idle. */
nd_status nd_link_write(nd_link *link, const void *bytes, size_t count, bool *idle);
/* Nobody has acknowledged what was sent for about half a minute. */
bool nd_link_is_dead(const nd_link *link);
/* Plaintext that is there now, after one look at the socket where there is none; *count 0: none.
 * ND_ERR_IO at its end, too. */
nd_status nd_link_read(nd_link *link, void *out, size_t capacity, size_t *count);

#endif

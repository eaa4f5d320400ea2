// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_ADDRESS_H
#define ND_RDZV_ADDRESS_H
/* Endpoints ("host:port", "[v6]:port"), addresses of names, and the address at which the other
 * ranks can reach rank 0. Addresses that are sent to other ranks are numeric. */
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "runtime/base/status.h"

enum { ND_ADDRESS_MAX = 16, ND_ADDRESS_TEXT_MAX = 80, ND_HOST_MAX = 256 };

typedef struct nd_address {
    struct sockaddr_storage storage;
    socklen_t bytes;
} nd_address;

/* ND_ERR_CONFIG with the fix when it is not host:port with a port of 0 to 65535. */
nd_status nd_endpoint_parse(const char *text, char host[ND_HOST_MAX], int *port);

/* IPv4 and IPv6, in the resolver's order; *count is at least 1. ND_ERR_IO with the resolver's
 * reason. */
nd_status nd_address_resolve(const char *host, int port, nd_address out[ND_ADDRESS_MAX],
                             int *count);
bool nd_address_is_loopback(const nd_address *address);
/* "127.0.0.1" or "::1", without the port. */
void nd_address_text(const nd_address *address, char out[ND_ADDRESS_TEXT_MAX]);

/* The address of this host, which is called `host`, for the ranks of a job on so many nodes:
 * loopback for one node, else the first to which the name resolves, else that of the first
 * interface; it is neither loopback nor link-local, and can be bound. ND_ERR_CONFIG: none is. */
nd_status nd_address_choose(const char *host, int nodes, char out[ND_ADDRESS_TEXT_MAX]);

#endif

// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

nd_status nd_endpoint_parse(const char *text, char host[ND_HOST_MAX], int *port)
{
    const char *colon = strrchr(text, ':');
    const char *begin = text, *end = colon;
    if (colon && text[0] == '[' && colon > text && colon[-1] == ']') {
        begin++;
        end--;
    } else if (colon && memchr(text, ':', (size_t)(colon - text))) {
        colon = NULL; /* an IPv6 address without brackets: its last group is no port */
    }
    char *rest = NULL;
    long value = colon && colon[1] ? strtol(colon + 1, &rest, 10) : -1;
    if (!colon || end == begin || end - begin >= ND_HOST_MAX || !rest || *rest || value < 0 ||
        value > 65535) {
        return nd_fail(ND_ERR_CONFIG,
                       "the endpoint '%s' is not host:port (IPv6: [address]:port) with a port of 0 "
                       "to 65535",
                       text);
    }
    memcpy(host, begin, (size_t)(end - begin));
    host[end - begin] = '\0';
    *port = (int)value;
    return ND_OK;
}

nd_status nd_address_resolve(const char *host, int port, nd_address out[ND_ADDRESS_MAX], int *count)
{
    char service[16];
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *list = NULL;
    snprintf(service, sizeof service, "%d", port);
    int rc = getaddrinfo(host, service, &hints, &list);
    if (rc != 0) {
        return nd_fail(ND_ERR_IO, "the host name %s cannot be resolved: %s", host,
                       rc == EAI_SYSTEM ? strerror(errno) : gai_strerror(rc));
    }
    int n = 0;
    for (const struct addrinfo *a = list; a && n < ND_ADDRESS_MAX; a = a->ai_next) {
        memcpy(&out[n].storage, a->ai_addr, a->ai_addrlen);
        out[n++].bytes = a->ai_addrlen;
    }
    freeaddrinfo(list);
    if (n == 0) {
        return nd_fail(ND_ERR_IO, "the host name %s has no address", host);
    }
    *count = n;
    return ND_OK;
}

bool nd_address_is_loopback(const nd_address *address)
{
    if (address->storage.ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address->storage;
        return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
    }
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&address->storage;
    return address->storage.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

int nd_address_port(const nd_address *address)
{
    /* The port lies at the same place in both families. */
    return ntohs(((const struct sockaddr_in *)&address->storage)->sin_port);
}

void nd_address_text(const nd_address *address, char out[ND_ADDRESS_TEXT_MAX])
{
    if (getnameinfo((const struct sockaddr *)&address->storage, address->bytes, out,
                    ND_ADDRESS_TEXT_MAX, NULL, 0, NI_NUMERICHOST) != 0) {
        snprintf(out, ND_ADDRESS_TEXT_MAX, "unknown address");
    }
}

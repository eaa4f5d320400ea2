// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    if (rc == EAI_MEMORY) {
        return nd_fail_memory("the addresses of host %s", host);
    }
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

void nd_address_text(const nd_address *address, char out[ND_ADDRESS_TEXT_MAX])
{
    if (getnameinfo((const struct sockaddr *)&address->storage, address->bytes, out,
                    ND_ADDRESS_TEXT_MAX, NULL, 0, NI_NUMERICHOST) != 0) {
        snprintf(out, ND_ADDRESS_TEXT_MAX, "unknown address");
    }
}

/* Other hosts may reach the address, and it is one of this host. */
static bool is_usable(const nd_address *address)
{
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)&address->storage;
    bool link_local =
        address->storage.ss_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr);
    if (nd_address_is_loopback(address) || link_local) {
        return false;
    }
    int fd = socket(address->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool usable =
        fd >= 0 && bind(fd, (const struct sockaddr *)&address->storage, address->bytes) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return usable;
}

/* The first interface that is up and leads off this host; IPv4 before IPv6. */
static bool first_interface(nd_address *out)
{
    static const int families[] = {AF_INET, AF_INET6};
    static const socklen_t sizes[] = {sizeof(struct sockaddr_in), sizeof(struct sockaddr_in6)};
    struct ifaddrs *all = NULL;
    bool found = false;
    if (getifaddrs(&all) != 0) {
        return false;
    }
    for (int f = 0; f < 2 && !found; f++) {
        for (struct ifaddrs *i = all; i && !found; i = i->ifa_next) {
            if (i->ifa_addr && i->ifa_addr->sa_family == families[f] && (i->ifa_flags & IFF_UP) &&
                !(i->ifa_flags & IFF_LOOPBACK)) {
                memcpy(&out->storage, i->ifa_addr, sizes[f]);
                out->bytes = sizes[f];
                found = is_usable(out);
            }
        }
    }
    freeifaddrs(all);
    return found;
}

/* The first usable address to which the name of this host resolves. */
static bool address_of_name(const char *host, nd_address *out)
{
    nd_address addresses[ND_ADDRESS_MAX];
    int count;
    if (nd_address_resolve(host, 0, addresses, &count) != ND_OK) {
        nd_error_clear();
        return false;
    }
    for (int i = 0; i < count; i++) {
        if (is_usable(&addresses[i])) {
            *out = addresses[i];
            return true;
        }
    }
    return false;
}

nd_status nd_address_choose(const char *host, int nodes, char out[ND_ADDRESS_TEXT_MAX])
{
    nd_address address;
    if (nodes == 1) {
        snprintf(out, ND_ADDRESS_TEXT_MAX, "127.0.0.1");
        return ND_OK;
    }
    if (!address_of_name(host, &address) && !first_interface(&address)) {
        return nd_fail(ND_ERR_CONFIG,
                       "neither the name of host %s nor an interface gives an address of this host "
                       "that the other nodes of %d can reach; give one with --rdzv-endpoint "
                       "ADDRESS:0",
                       host, nodes);
    }
    nd_address_text(&address, out);
    return ND_OK;
}

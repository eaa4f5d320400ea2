// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_NET_NET_H
#define ND_COMM_NET_NET_H
/*
 * Tagged messages between ranks of different hosts: TLS 1.3 with the job's key over TCP, so that
 * nobody without the key can read, change, add or disturb a message. One thread drives a net.
 *
 * A connection carries what one rank sends to another, and is made when it first sends. The other
 * side answers the first bytes (hello: whom they are for, who sends) with one byte; from then on
 * the end of the connection is the end of the peer. Before, a lost connection is tried again.
 *
 * A message is a head and its bytes. Small ones leave at once and wait in memory for their
 * receiver. Of a large one only the head leaves (OFFER); its bytes follow when the other side has
 * posted the receive (READY), straight into its buffer.
 *
 * An error of this rank itself (memory, descriptors) is kept, and returned by whatever queues a
 * message and by every later progress. What a peer does ends its connection.
 */
#include "runtime/comm/p2p.h"

typedef struct nd_net nd_net;

/*
 * Listens at the address of `network`, whose contexts it takes in every case, and learns from
 * options->exchange where the others listen. *fd is readable when nd_net_progress has something to
 * do; a lost connection is tried again by the next progress that is late enough. ND_ERR_IO,
 * ND_ERR_RESOURCE.
 */
nd_status nd_net_open(const nd_transport_options *options, const nd_comm_network *network, int *fd,
                      nd_net **out);
/* With `flush` first sends what is complete for the caller, for 2 s at most. NULL is legal. */
void nd_net_close(nd_net *net, bool flush);

/* As in nd_p2p. After nd_net_cancel of a pending request, which follows a fault, nothing moves any
 * more; other ranks notice the end when the net is closed. */
nd_status nd_net_send(nd_net *net, nd_p2p_request *request);
nd_status nd_net_recv(nd_net *net, nd_p2p_request *request);
void nd_net_cancel(nd_net *net, nd_p2p_request *request);
nd_status nd_net_progress(nd_net *net);
bool nd_net_peek(const nd_net *net, nd_tag wanted, nd_tag mask, nd_tag *found, size_t *bytes);
bool nd_net_gone(const nd_net *net, int rank);

#endif

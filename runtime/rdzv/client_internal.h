// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_CLIENT_INTERNAL_H
#define ND_RDZV_CLIENT_INTERNAL_H
/* What client.c (opening, watching, closing) and client_request.c, on which it stands, share. */
#include "runtime/rdzv/channel.h"
#include "runtime/rdzv/hosting.h"
#include "runtime/rdzv/pmix.h"
#include "runtime/rdzv/server.h"
#include "runtime/rdzv/shared_key.h"
#include "runtime/rdzv/store.h"
#include "runtime/rdzv/watch.h"

struct nd_store {
    int rank, world_size;
    double timeout_seconds;
    uint32_t request;
    nd_wire_buffer out;
    nd_channel *channel; /* or, in a world of one, the engine itself: */
    nd_server *server;
    nd_peer *self;
    nd_wire_parser answers;
    nd_hosting *hosting;                   /* rank 0 of a start without ndlaunch */
    char key_path[ND_SHARED_KEY_PATH_MAX]; /* private key file to remove, or "" */
    nd_pmix *pmix;                         /* exchanges go over it; borrowed, or NULL */
    nd_watch *watch;                       /* of the connection to rank 0 */
    bool hosted;                           /* by rank 0 */
    void (*lost)(void *context, const char *sentence);
    void *lost_context;
};

extern const int64_t nd_store_margin_ns;

/* Sends store->out to whoever is the store. */
nd_status nd_store_send(nd_store *store, int64_t deadline);
nd_status nd_store_next(nd_store *store, int64_t deadline, nd_wire_frame *frame);
int64_t nd_store_deadline(const nd_store *store); /* of a call that begins now */

#endif

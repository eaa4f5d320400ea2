// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/ucx/ucx_state.h"

#include <errno.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/comm/report.h"

/* The first poll entry is the worker's; pidfds follow, in no order. */
static void watch_process(ucx_state *state, int rank)
{
    ucx_peer *peer = &state->peers[rank];
    if (peer->card.host != state->host || rank == state->rank) {
        return;
    }
    peer->pidfd = (int)syscall(SYS_pidfd_open, (pid_t)peer->card.pid, 0);
    if (peer->pidfd <
        0) { /* ESRCH: it has ended. Otherwise an older kernel: the deadline remains. */
        peer->gone = errno == ESRCH;
        return;
    }
    state->polled[state->polled_count] = (struct pollfd){.fd = peer->pidfd, .events = POLLIN};
    state->polled_rank[state->polled_count++] = rank;
}

void ucx_mark_gone(ucx_state *state, int rank)
{
    state->peers[rank].gone = true;
    for (int i = 1; i < state->polled_count; i++) {
        if (state->polled_rank[i] == rank) {
            state->polled_count--;
            state->polled[i] = state->polled[state->polled_count];
            state->polled_rank[i] = state->polled_rank[state->polled_count];
            close(state->peers[rank].pidfd);
            state->peers[rank].pidfd = -1;
            break;
        }
    }
}

/* Called by UCX while it progresses, when a connection breaks. */
static void on_error(void *argument, ucp_ep_h endpoint, ucs_status_t code)
{
    ((ucx_peer *)argument)->gone = true;
}

nd_status ucx_connect(nd_transport *transport, int rank)
{
    ucx_state *state = ucx_state_of(transport);
    ucx_peer *peer = &state->peers[rank];
    if (peer->endpoint) {
        return ND_OK;
    }
    /* Shared memory has no error handling in UCX; asking for it would leave only TCP between ranks
     * of one host. */
    bool remote = peer->card.host != state->host;
    const ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)(state->addresses + (size_t)rank * state->address_stride),
        .err_mode = remote ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE,
        .err_handler = {.cb = on_error, .arg = peer}};
    ucs_status_t code = ucp_ep_create(state->worker, &params, &peer->endpoint);
    if (code != UCS_OK) {
        peer->endpoint = NULL;
        return nd_fail(ND_ERR_IO,
                       "rank %d cannot reach rank %d: %s; check UCX_TLS and UCX_NET_DEVICES "
                       "(ucx_info -d lists what this host has)",
                       state->rank, rank, ucs_status_string(code));
    }
    watch_process(state, rank);
    return ND_OK;
}

bool ucx_gone(nd_transport *transport, int rank)
{
    return ucx_state_of(transport)->peers[rank].gone;
}

void ucx_describe(nd_transport *transport, int rank, char *text, size_t size)
{
    const ucx_state *state = ucx_state_of(transport);
    const ucx_card *card = &state->peers[rank].card;
    if (card->host != state->host) {
        snprintf(text, size, " (on another host)");
        return;
    }
    nd_report_process(card->pid, text, size);
}

// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/ucx/ucx_state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void read_file(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, size - 1);
    text[n > 0 ? n : 0] = '\0';
    if (fd >= 0) {
        close(fd);
    }
}

uint64_t ucx_host_identity(void)
{
    char text[64];
    struct stat pids = {0};
    read_file("/proc/sys/kernel/random/boot_id", text, sizeof text);
    if (stat("/proc/self/ns/pid", &pids) != 0) {
        pids.st_ino = 0;
    }
    uint64_t h = UINT64_C(0xcbf29ce484222325) ^ (uint64_t)pids.st_ino;
    for (const char *c = text; *c; c++) {
        h = (h ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
    }
    return h;
}

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

/* State letter of /proc/<pid>/stat, the first field behind the name; '\0' when there is none. */
static char process_state(int pid)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    read_file(path, text, sizeof text);
    const char *name_end = strrchr(text, ')');
    return name_end && name_end[1] == ' ' ? name_end[2] : '\0';
}

static const char *state_in_words(char letter)
{
    switch (letter) {
    case 'T':
    case 't':
        return "stopped by a signal or a debugger";
    case 'Z':
    case 'X':
    case '\0':
        return "not there any more";
    case 'D':
        return "in uninterruptible I/O";
    case 'S':
        return "sleeping";
    default:
        return "running";
    }
}

void ucx_describe(nd_transport *transport, int rank, char *text, size_t size)
{
    const ucx_state *state = ucx_state_of(transport);
    const ucx_card *card = &state->peers[rank].card;
    if (card->host != state->host) {
        snprintf(text, size, " (on another host)");
        return;
    }
    snprintf(text, size, " (process %d is %s)", card->pid,
             state_in_words(process_state(card->pid)));
}

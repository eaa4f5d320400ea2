// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/ucx/ucx.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "runtime/base/shm_folder.h"
#include "runtime/comm/backend.h"

static const char shared_memory[] = "/dev/shm";

/*
 * The program's own choice, whatever UCX's environment and files say: shared memory that is this
 * user's alone, which that of sysv is not, and nothing that opens a port. With adaptive progress
 * UCX aborts the process when a datagram of a stranger wakes it before it has a peer.
 */
static nd_status read_config(ucp_config_t **out)
{
    ucp_config_t *config;
    ND_TRY(ND_UCX(ucp_config_read(NULL, NULL, &config)));
    nd_status status = ND_UCX(ucp_config_modify(config, "TLS", "posix,cma,self"));
    if (status == ND_OK) {
        status = ND_UCX(ucp_config_modify(config, "ADAPTIVE_PROGRESS", "n"));
    }
    if (status != ND_OK) {
        nd_ucx.ucp_config_release(config);
        return status;
    }
    *out = config;
    return ND_OK;
}

/* Where UCX makes the files behind its shared memory, so that a killed process leaves nothing that
 * the next one does not remove. UCX 1.13 takes it from the environment only. */
static void set_own_folder(void)
{
    char folder[ND_SHM_FOLDER_MAX];
    nd_shm_folders_clean();
    nd_shm_folder_make(folder);
    setenv("UCX_POSIX_DIR", folder[0] ? folder : shared_memory, 1);
}

static bool is_one_host(const ucx_state *state)
{
    int rank = 0;
    while (rank < state->size && state->peers[rank].place.host == state->host) {
        rank++;
    }
    return rank == state->size;
}

static nd_status create_worker(ucx_state *state)
{
    ucp_config_t *config;
    ND_TRY(nd_ucx_load(state->rank == 0));
    set_own_folder();
    ND_TRY(read_config(&config));
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES |
                                               UCP_PARAM_FIELD_ESTIMATED_NUM_EPS |
                                               UCP_PARAM_FIELD_NAME,
                                 .features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP,
                                 .estimated_num_eps = (size_t)state->size,
                                 .name = "ndtrain"};
    nd_status status =
        ND_UCX(ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &state->context));
    nd_ucx.ucp_config_release(config);
    ND_TRY(status);
    const ucp_worker_params_t worker_params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_EVENTS,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
        .events = UCP_WAKEUP_TAG_RECV | UCP_WAKEUP_TAG_SEND | UCP_WAKEUP_RX | UCP_WAKEUP_TX};
    ND_TRY(ND_UCX(ucp_worker_create(state->context, &worker_params, &state->worker)));
    int fd = -1;
    ND_TRY(ND_UCX(ucp_worker_get_efd(state->worker, &fd)));
    state->polled[0] = (struct pollfd){.fd = fd, .events = POLLIN};
    state->polled[1] = (struct pollfd){.fd = -1, .events = POLLIN};
    state->polled_count = 2;
    return ND_OK;
}

/* Equal on ranks that share memory and can wake each other: UCX asks for the same IPC namespace,
 * its sockets belong to a network namespace, and a process of another user namespace may not open
 * the descriptors behind this one's memory. */
static nd_status find_host(const nd_ucx_options *options, uint64_t *out)
{
    ND_TRY(nd_report_host((const char *const[]){"pid", "ipc", "net", "user", NULL}, out));
    *out ^= options->apart ? (uint64_t)options->rank + 1 : 0;
    return ND_OK;
}

static nd_status exchange_places(ucx_state *state, const nd_ucx_options *options)
{
    nd_status status;
    ucx_place own = {.host = state->host, .pid = (int32_t)getpid()}, *all = NULL;
    ND_TRY(ND_ALLOC(state->size, &all));
    ND_TRY_OUT(options->exchange(options->exchange_context, &own, all, sizeof own));
    for (int r = 0; r < state->size; r++) {
        state->peers[r].place = all[r];
    }
out:
    free(all);
    return status;
}

static nd_status open_net(ucx_state *state, const nd_ucx_options *options)
{
    nd_status status = ND_OK;
    nd_comm_network network = {0};
    nd_net_card own = {0}, *all = NULL;
    ND_TRY(options->network(options->exchange_context, &network));
    ND_TRY(nd_net_open(state->rank, state->size, &network.address, network.client, network.server,
                       &own, &state->net));
    ND_TRY(ND_ALLOC(state->size, &all));
    ND_TRY_OUT(options->exchange(options->exchange_context, &own, all, sizeof own));
    nd_net_meet(state->net, all);
    state->polled[1].fd = nd_net_fd(state->net);
out:
    free(all);
    return status;
}

/* First the lengths, then the addresses, padded to the longest. */
static nd_status exchange_addresses(ucx_state *state, const nd_ucx_options *options)
{
    nd_status status = ND_OK;
    ucp_address_t *address = NULL;
    size_t own = 0, *lengths = NULL;
    char *mine = NULL;
    ND_TRY(ND_UCX(ucp_worker_get_address(state->worker, &address, &own)));
    ND_TRY_OUT(ND_ALLOC(state->size, &lengths));
    ND_TRY_OUT(options->exchange(options->exchange_context, &own, lengths, sizeof own));
    for (int r = 0; r < state->size; r++) {
        if (lengths[r] > state->address_stride) {
            state->address_stride = lengths[r];
        }
    }
    ND_TRY_OUT(ND_ALLOC(state->address_stride, &mine));
    ND_TRY_OUT(ND_ALLOC(state->address_stride * (size_t)state->size, &state->addresses));
    memcpy(mine, address, own);
    ND_TRY_OUT(options->exchange(options->exchange_context, mine, state->addresses,
                                 state->address_stride));
out:
    free(lengths);
    free(mine);
    nd_ucx.ucp_worker_release_address(state->worker, address);
    return status;
}

static nd_status fill_state(ucx_state *state, const nd_ucx_options *options)
{
    state->rank = options->rank;
    state->size = options->size;
    ND_TRY(ND_ALLOC(state->size, &state->peers));
    for (int r = 0; r < state->size; r++) {
        state->peers[r].pidfd = -1;
    }
    ND_TRY(ND_ALLOC(state->size + 2, &state->polled));
    ND_TRY(ND_ALLOC(state->size + 2, &state->polled_rank));
    ND_TRY(find_host(options, &state->host));
    ND_TRY(exchange_places(state, options));
    ND_TRY(create_worker(state));
    ND_TRY(exchange_addresses(state, options));
    return is_one_host(state) ? ND_OK : open_net(state, options);
}

nd_status nd_transport_open_ucx(const nd_ucx_options *options, nd_transport **out)
{
    ND_ASSERT(options->progress && options->exchange && options->timeout_seconds > 0);
    if (options->size > 1 << ND_TAG_RANK_BITS) {
        return nd_fail(ND_ERR_CONFIG, "%d ranks are more than the %d that message tags number",
                       options->size, 1 << ND_TAG_RANK_BITS);
    }
    nd_transport *transport = NULL;
    ucx_state *state = NULL;
    ND_TRY(nd_p2p_transport_create(&nd_ucx_p2p, &transport));
    nd_status status = ND_ALLOC(1, &state);
    if (status == ND_OK) {
        ((nd_p2p_transport *)transport->native)->state = state;
        status = fill_state(state, options);
    }
    if (status != ND_OK) { /* so that it does not take leave of ranks that it has not met */
        ((nd_p2p_transport *)transport->native)->failed = status;
        nd_transport_close(transport);
        return status;
    }
    transport->rank = options->rank;
    transport->size = options->size;
    transport->timeout_seconds = options->timeout_seconds;
    transport->progress = options->progress;
    transport->page = options->page;
    transport->slot_of_rank = options->slot_of_rank;
    transport->slot_context = options->slot_context;
    *out = transport;
    return ND_OK;
}

nd_status nd_transport_check_ucx_room(int64_t local_workers)
{
    /* Two segments of a worker: 4,300,800 and 12,288 bytes with UCX 1.13. */
    const uint64_t each = 4313088;
    struct statvfs fs;
    nd_shm_folders_clean();
    if (statvfs(shared_memory, &fs) != 0) {
        return errno == ENOENT || errno == ENOTDIR
                   ? ND_OK
                   : nd_fail(ND_ERR_IO, "%s cannot be read: %s", shared_memory, strerror(errno));
    }
    uint64_t room = (uint64_t)fs.f_bavail * fs.f_frsize, needed = each * (uint64_t)local_workers;
    if (room >= needed) {
        return ND_OK;
    }
    return nd_fail(
        ND_ERR_RESOURCE,
        "%s has room for %.1f MiB, but the shared memory of %lld workers needs %.1f MiB; "
        "enlarge it (docker run --shm-size, mount -o remount,size=)",
        shared_memory, (double)room / 0x1p20, (long long)local_workers, (double)needed / 0x1p20);
}

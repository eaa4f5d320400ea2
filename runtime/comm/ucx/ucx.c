// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/ucx/ucx.h"

#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "runtime/base/shm_folder.h"
#include "runtime/comm/backend.h"

/* Where UCX makes the files behind its shared memory, so that a killed process leaves nothing that
 * the next one does not remove. UCX 1.13 takes it from the environment only. A user's choice is
 * kept: then this returns false. */
static bool set_own_folder(void)
{
    char folder[ND_SHM_FOLDER_MAX];
    if (getenv("UCX_POSIX_DIR")) {
        return false;
    }
    nd_shm_folders_clean();
    nd_shm_folder_make(folder);
    return folder[0] && setenv("UCX_POSIX_DIR", folder, 1) == 0;
}

static nd_status create_worker(ucx_state *state)
{
    ucp_config_t *config = NULL;
    ND_TRY(ND_UCX(ucp_config_read(NULL, NULL, &config)));
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES |
                                               UCP_PARAM_FIELD_ESTIMATED_NUM_EPS |
                                               UCP_PARAM_FIELD_NAME,
                                 .features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP,
                                 .estimated_num_eps = (size_t)state->size,
                                 .name = "ndtrain"};
    nd_status status = ND_UCX(ucp_init(&params, config, &state->context));
    ucp_config_release(config);
    ND_TRY(status);
    const ucp_worker_params_t worker_params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_EVENTS,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
        .events = UCP_WAKEUP_TAG_RECV | UCP_WAKEUP_TAG_SEND | UCP_WAKEUP_RX | UCP_WAKEUP_TX};
    ND_TRY(ND_UCX(ucp_worker_create(state->context, &worker_params, &state->worker)));
    int fd = -1;
    ND_TRY(ND_UCX(ucp_worker_get_efd(state->worker, &fd)));
    state->polled[0] = (struct pollfd){.fd = fd, .events = POLLIN};
    state->polled_count = 1;
    return ND_OK;
}

static nd_status open_worker(ucx_state *state)
{
    bool own = set_own_folder();
    nd_status status = create_worker(state);
    if (own) {
        unsetenv("UCX_POSIX_DIR");
    }
    return status;
}

/* First the cards, which hold the length of each address, then the addresses, padded to the
 * longest. */
static nd_status exchange_addresses(ucx_state *state, const nd_ucx_options *options)
{
    nd_status status = ND_OK;
    ucp_address_t *address = NULL;
    size_t bytes = 0;
    char *mine = NULL;
    ucx_card *cards = NULL;
    ND_TRY(ND_UCX(ucp_worker_get_address(state->worker, &address, &bytes)));
    ucx_card card = {
        .host = state->host, .pid = (int32_t)getpid(), .address_bytes = (uint32_t)bytes};
    ND_TRY_OUT(ND_ALLOC(state->size, &cards));
    ND_TRY_OUT(options->exchange(options->exchange_context, &card, cards, sizeof card));
    for (int r = 0; r < state->size; r++) {
        state->peers[r].card = cards[r];
        if (cards[r].address_bytes > state->address_stride) {
            state->address_stride = cards[r].address_bytes;
        }
    }
    ND_TRY_OUT(ND_ALLOC(state->address_stride, &mine));
    ND_TRY_OUT(ND_ALLOC(state->address_stride * (size_t)state->size, &state->addresses));
    memcpy(mine, address, bytes);
    ND_TRY_OUT(options->exchange(options->exchange_context, mine, state->addresses,
                                 state->address_stride));
out:
    free(cards);
    free(mine);
    ucp_worker_release_address(state->worker, address);
    return status;
}

static nd_status fill_state(ucx_state *state, const nd_ucx_options *options)
{
    state->rank = options->rank;
    state->size = options->size;
    state->host = nd_report_host();
    ND_TRY(ND_ALLOC(state->size, &state->peers));
    for (int r = 0; r < state->size; r++) {
        state->peers[r].pidfd = -1;
    }
    ND_TRY(ND_ALLOC(state->size + 1, &state->polled));
    ND_TRY(ND_ALLOC(state->size + 1, &state->polled_rank));
    ND_TRY(open_worker(state));
    return exchange_addresses(state, options);
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
    ND_TRY(nd_p2p_transport_create(&nd_p2p_ucx_backend, &nd_ucx_p2p, &transport));
    nd_status status = ND_ALLOC(1, &state);
    if (status == ND_OK) {
        ((nd_p2p_transport *)transport->native)->state = state;
        status = fill_state(state, options);
    }
    if (status != ND_OK) {
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
    const char *chosen = getenv("UCX_POSIX_DIR"), *folder = chosen ? chosen : "/dev/shm";
    struct statvfs fs;
    nd_shm_folders_clean();
    if (getenv("UCX_TLS") || statvfs(folder, &fs) != 0) {
        return ND_OK;
    }
    uint64_t room = (uint64_t)fs.f_bavail * fs.f_frsize, needed = each * (uint64_t)local_workers;
    if (room >= needed) {
        return ND_OK;
    }
    return nd_fail(
        ND_ERR_RESOURCE,
        "%s has room for %.1f MiB, but the shared memory of %lld workers needs %.1f MiB; "
        "enlarge it (docker run --shm-size, mount -o remount,size=), or set "
        "UCX_TLS=^posix to do without it",
        folder, (double)room / 0x1p20, (long long)local_workers, (double)needed / 0x1p20);
}

const char *nd_transport_ucx_version(void)
{
    return ucp_get_version_string();
}

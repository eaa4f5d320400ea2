// SPDX-License-Identifier: Apache-2.0
/* Operations that are enqueued and have not ended. */
#include "runtime/base/clock.h"
#include "runtime/comm/nccl/nccl.h"
#include "runtime/device/cuda_check.h"

nd_status nccl_ring_init(nd_device *device, nccl_ring *ring)
{
    for (int i = 0; i < NCCL_RING; i++) {
        nccl_entry *e = &ring->entries[i];
        ND_CUDA(device, cudaEventCreateWithFlags(&e->begin, cudaEventDisableTiming));
        ND_CUDA(device, cudaEventCreateWithFlags(&e->end, cudaEventDisableTiming));
    }
    return ND_OK;
}

void nccl_ring_fini(nccl_ring *ring)
{
    for (int i = 0; i < NCCL_RING; i++) {
        nccl_entry *e = &ring->entries[i];
        if (e->begin) {
            cudaEventDestroy(e->begin);
        }
        if (e->end) {
            cudaEventDestroy(e->end);
        }
    }
}

/* Removes the operations that have ended. An error of the device counts as pending: the next call
 * of the driving thread reports it with a better sentence. */
static void drop_ended(nccl_state *state, nccl_ring *ring)
{
    int64_t before = ring->tail;
    while (ring->tail < ring->head &&
           cudaEventQuery(ring->entries[ring->tail % NCCL_RING].end) == cudaSuccess) {
        ring->tail++;
        ring->begun_ns = 0;
    }
    if (ring->tail > before) {
        state->progress_ns = nd_clock_ns();
        state->ended = ring->entries[(ring->tail - 1) % NCCL_RING];
    }
}

static nccl_pending pending_of(const nccl_comm *nc)
{
    const nccl_ring *ring = &nc->ring;
    return (nccl_pending){nc->comm, ring->entries[ring->tail % NCCL_RING], ring->begun_ns};
}

void nccl_ring_advance(nccl_state *state, nccl_pending *oldest)
{
    int64_t now = nd_clock_ns();
    *oldest = (nccl_pending){0};
    for (nccl_comm *nc = state->comms; nc; nc = nc->next) {
        nccl_ring *ring = &nc->ring;
        drop_ended(state, ring);
        if (ring->tail == ring->head) {
            continue;
        }
        if (!ring->begun_ns &&
            cudaEventQuery(ring->entries[ring->tail % NCCL_RING].begin) == cudaSuccess) {
            ring->begun_ns = now;
        }
        if (!oldest->comm ||
            (ring->begun_ns && (!oldest->begun_ns || ring->begun_ns < oldest->begun_ns))) {
            *oldest = pending_of(nc);
        }
    }
}

bool nccl_ring_has_room(nccl_state *state, nccl_comm *nc)
{
    pthread_mutex_lock(&state->ring);
    if (nc->ring.head - nc->ring.tail == NCCL_RING) {
        drop_ended(state, &nc->ring);
    }
    bool room = nc->ring.head - nc->ring.tail < NCCL_RING;
    pthread_mutex_unlock(&state->ring);
    return room;
}

void nccl_ring_enter(nccl_state *state, nccl_comm *nc)
{
    pthread_mutex_lock(&state->ring);
    nc->ring.head++;
    pthread_mutex_unlock(&state->ring);
}

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_NCCL_PARTS_H
#define ND_TESTS_HOSTCUDA_NCCL_PARTS_H
/* Types and functions of NCCL's double: communicators (nccl.c) and operations (nccl_ops.c). */
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RANKS = 16, SPLITS = 40, PAIRS = 2 * RANKS, CAPACITY = 16 << 20, WORLD_SPLIT = 0 };
enum { COLLECTIVES = 4 }; /* most of a group */

typedef struct member { /* of one split, indexed by world rank */
    _Atomic int ready, finalized;
    _Atomic int color, key, max_blocks;
    _Atomic uint64_t published, consumed;
    _Atomic uint64_t signature[2];  /* of the operation in each half */
    _Atomic int64_t sent[2][RANKS]; /* group calls: bytes for each member, one after the other */
} member;

typedef struct shared {
    _Atomic int joined, broken; /* broken: an ncclResult_t */
    _Atomic int given_up;       /* ranks that have aborted the world */
    member members[SPLITS][RANKS];
} shared;

typedef enum kind { ALL_REDUCE = 1, ALL_GATHER, REDUCE_SCATTER, BROADCAST, GROUP } kind;

typedef struct pair {
    bool receives;
    char *buffer;
    size_t bytes;
    int peer;
} pair;

typedef struct call {
    ncclComm_t comm;
    kind kind;
    const char *send;
    char *recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root;
    uint64_t number;
    bool published;
    int pair_count;
    pair pairs[PAIRS];
} call;

struct ncclComm {
    shared *shared;
    char *data; /* [SPLITS][RANKS][2][CAPACITY] */
    int world_rank, world_size, split, next_split;
    int size, index, ranks[RANKS];
    uint64_t enqueued;
    _Atomic uint64_t ran;
    int file; /* of the world in the process that made it, until all have opened it; else -1 */
    bool settled, finalizing;
    int unpolled;            /* answers of "in progress" that are still to come */
    call begun[COLLECTIVES]; /* not yet in the queue of their stream */
    int begun_count;
    cudaStream_t begun_stream;
    _Atomic bool aborted;
    int color, key, max_blocks;        /* max_blocks: maxCTAs; 0: not given */
    struct ncclComm *parent, **result; /* of a split: whose it is, and where it is to be written */
    pthread_t maker;                   /* of a parent: makes a child */
    bool has_maker;
    _Atomic bool made;     /* the maker has ended */
    const void *device;    /* of this process */
    struct ncclComm *next; /* among those of this process */
};

/* Aborts where the communicator's last call has not been polled to its end. */
void nccl_need_settled(ncclComm_t comm);
/* Puts what has begun into the queue of its stream, for the thread that drives the device. */
ncclResult_t nccl_launch(ncclComm_t comm);

#endif

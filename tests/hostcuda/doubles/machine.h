// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_MACHINE_H
#define ND_TESTS_HOSTCUDA_MACHINE_H
/* Types and functions that the files of the CUDA runtime's double share. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "tests/hostcuda/doubles/double.h"

enum { MACHINE_DEVICES = 32, MACHINE_REGIONS = 256, MACHINE_LOADED = 4096 };

typedef struct task {
    struct task *next;
    nd_double_task *run;
    size_t bytes;
    _Alignas(max_align_t) unsigned char closure[];
} task;

struct CUgraph_st { /* also the executable graph */
    task *head, **tail;
    cudaStream_t origin;
    bool invalid;     /* an illegal call has ended the capture */
    pthread_t thread; /* that began the capture, and must end it */
};

struct CUevent_st {
    _Atomic uint64_t recorded, done; /* numbers of the last record enqueued and run */
    int pending;                     /* tasks that hold it */
    bool destroyed, timed;
    int64_t when_ns;
    cudaGraph_t capture;      /* recorded inside a capture */
    cudaStream_t recorded_on; /* then: by this stream */
};

struct CUstream_st {
    struct CUstream_st *next;
    task *head, **tail;
    uint64_t submitted, finished;
    int priority; /* not heeded */
    cudaGraph_t capture;
    bool unjoined; /* capture: work that the origin does not wait for yet */
    bool running;
};

typedef struct region {
    char *begin;
    size_t bytes, mapped;
    bool device; /* else pinned host memory */
} region;

typedef struct double_device {
    struct CUstream_st *streams;
    region regions[MACHINE_REGIONS];
    int region_count;
    size_t used;
    int64_t spent_ns; /* nd_double_spend */
    int open;         /* nested: device memory is accessible */
    _Atomic cudaError_t broken;
    _Atomic pthread_t driver; /* the thread that made its latest stream; queues run in no other */
    bool hot;                 /* nd_double_hot */
    bool settling;            /* NCCL's last answer was that a call is in progress */
    bool waiting;             /* the host has asked since it last enqueued something */
    uint64_t draws;           /* of the random order */
    uint64_t loaded[MACHINE_LOADED]; /* hashes of what was used */
    int loaded_count;
    nd_double_counts counts;
} double_device;

double_device *machine_current(void);
bool machine_is_driver(const double_device *device); /* the calling thread */
cudaError_t machine_error(cudaError_t error);        /* remembers it for cudaGetLastError */
void machine_open(double_device *device);            /* device memory becomes accessible */
void machine_close(double_device *device);
const region *machine_find(const double_device *device, const void *p, size_t bytes);
/* One task, of which the caller is the owner: its closure is copied into it. */
task *queue_task(nd_double_task *run, const void *closure, size_t bytes);
/* Aborts when a stream of the current device is captured: calls that may wait for the device are
 * forbidden to the capturing thread, whatever stream they are about. */
void machine_outside_capture(const char *call);
/* Makes a stream's capture invalid for an illegal call on it; returns the error of that call. */
cudaError_t machine_end_capture(cudaStream_t stream);
void queue_run(double_device *device, cudaStream_t stream, uint64_t until);
void queue_round(double_device *device, cudaStream_t stream); /* as far as it goes now */
/* Runs tasks at a query: all that can run now; in the random order only a few. */
void queue_look(double_device *device, cudaStream_t stream);
uint64_t machine_draw(double_device *device);
void queue_wait(double_device *device, cudaStream_t stream);
void queue_wait_all(double_device *device);
void event_forget(const task *t); /* which will not run: nothing, where it is none of an event */
void queue_asked(double_device *device, bool pending); /* a query, for the counts */

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_DOUBLE_H
#define ND_TESTS_HOSTCUDA_DOUBLE_H
/*
 * A double of the CUDA runtime for tests on machines without a GPU: the entry points that ndtrain
 * calls, with the same names, over host memory.
 *
 * Streams are queues. Nothing runs when it is enqueued: a queue runs when the host waits for it,
 * and other queues only as far as it waits for them, so a missing wait between two streams shows as
 * a wrong result. Device memory is not accessible (PROT_NONE) while the host runs, only while
 * queues run. What is allocated, also pinned, holds anything but zeros. The default stream has no
 * double: cudaMemset and cudaMemcpy do not link. A broken rule of CUDA prints a sentence and aborts
 * the process. One thread drives one device; others may only query events, which then runs nothing.
 *
 * The environment, read at first use: ND_DOUBLE_DEVICES (8; 0: none; -1: no driver; -2: a driver
 * that does not start), ND_DOUBLE_DRIVER (13000), ND_DOUBLE_CAPABILITY (90), ND_DOUBLE_MEMORY (MiB,
 * 65536), ND_DOUBLE_OTHER (none: the number of the GPU that has another name),
 * ND_DOUBLE_QUEUE (0: a stream holds any number of tasks; else so many, and one more waits in the
 * call until one is done),
 * ND_DOUBLE_NOTES (none: a file that gets a line with the variables that CUDA and NCCL read once),
 * ND_DOUBLE_WRONG_DOCUMENTS (none; set: cuDNN's results of ragged tensors are NaN),
 * ND_DOUBLE_FREE (none; set: freeing does not return, as where a kernel waits for a peer),
 * ND_DOUBLE_ORDER (lazy; eager: everything runs when it is enqueued, as far as it can; others: the
 * other queues first; random:SEED: each call runs a few tasks of queues that it draws),
 * ND_DOUBLE_CAPTURE (strict: a capture also refuses a kernel, product or attention that is used for
 * the first time, unless CUDA_MODULE_LOADING=EAGER, and a wait for any stream).
 */
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum nd_double_state { ND_DOUBLE_DONE, ND_DOUBLE_BLOCKED } nd_double_state;

/* One piece of work on a stream; called again while it is blocked. The closure is copied, and freed
 * after it is done. */
typedef nd_double_state nd_double_task(void *closure);

/* For copies, events and doubles of libraries: work that may wait for other ranks. */
cudaError_t nd_double_submit(cudaStream_t stream, nd_double_task *task, const void *closure,
                             size_t bytes);
/* For kernels: work that runs through. */
cudaError_t nd_double_launch(cudaStream_t stream, void (*kernel)(void *closure),
                             const void *closure, size_t bytes);

/* For doubles of what the driver loads at its first use: a kernel or a form of a library, known by
 * these bytes. Not cudaSuccess where the stream is captured and that ends the capture. */
cudaError_t nd_double_load(cudaStream_t stream, const void *what, size_t bytes);

/* From a task: the device has failed, and every later call reports it. */
void nd_double_break(cudaError_t error);

/* Aborts unless the range is device memory of the current device, or when it straddles an end of an
 * allocation; `what` names the argument. */
void nd_double_need_device(const char *what, const void *p, size_t bytes);
/* Aborts with a sentence about what the real library would have refused or done wrong. */
void nd_double_violation(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* Appends "library NAME=value ..." to the file ND_DOUBLE_NOTES; the names end with NULL. */
void nd_double_note_environment(const char *library, const char *const *names);

/* From a task: the device's clock, which events read, goes on by so much more. */
void nd_double_spend(double seconds);

/* Runs everything that can run on the current device. */
void nd_double_drain(void);

/* The machine that tests set up, before the calls that it should change. */
typedef struct nd_double_machine {
    int devices; /* 0: none, -1: no driver, -2: a driver that does not start */
    int driver;  /* 13000: CUDA 13.0 */
    int capability;
    size_t memory;
    int other;              /* the GPU that has another name; -1: none */
    unsigned char id[16];   /* of every GPU; zeros: the driver is silent */
    long queue;             /* what a stream holds; one more waits inside the call. 0: anything */
    long refused_rows;      /* cuDNN has no plan for so many queries; 0: for any number */
    size_t attention_extra; /* bytes of workspace beside those of the formula */
    enum { ND_DOUBLE_LAZY, ND_DOUBLE_EAGER, ND_DOUBLE_OTHERS, ND_DOUBLE_RANDOM } order;
    uint64_t seed;       /* of the random order */
    bool strict_capture; /* ND_DOUBLE_CAPTURE */
} nd_double_machine;

nd_double_machine *nd_double_machine_get(void);

/* Bits for what a descriptor of cuBLASLt holds of a product in FP8; its A is our second operand. */
enum {
    ND_DOUBLE_A_E5M2 = 1, /* else E4M3 */
    ND_DOUBLE_B_E5M2 = 2,
    ND_DOUBLE_D_F32 = 4, /* else BF16 */
    ND_DOUBLE_ADDS = 8,  /* beta is not 0 */
    ND_DOUBLE_FAST = 16, /* accumulation */
    ND_DOUBLE_FP8_KINDS = 32
};

/* How often something was called, for tests. */
typedef struct nd_double_counts {
    long allocations, frees, submitted, graphs_launched, timings;
    long host_waits; /* queries of unfinished work until the next is enqueued count once */
    long calls;      /* that enqueued something: a graph counts once, what is captured does not */
    long fp8_products[ND_DOUBLE_FP8_KINDS]; /* that ran */
    long pinned_bytes;                      /* allocated now */
    /* cuDNN's backwards of attention as they were asked for; those of a graph when captured. */
    long usual_backwards, ordered_backwards;
} nd_double_counts;
nd_double_counts nd_double_counts_get(void);

/* From true to false, allocations and copies from or to memory that is neither a device's nor
 * pinned abort with a sentence. Counts for the current device. */
void nd_double_hot(bool hot);

#ifdef __cplusplus
}
#endif
#endif

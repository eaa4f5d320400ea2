// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_FIBERS_H
#define ND_TESTS_FIBERS_H
/*
 * The threads of a block as fibers: each runs until it meets the others at a barrier or a shuffle,
 * then the next one runs.
 *
 * A launch ends the process with a sentence when the kernel does what a GPU punishes with a hang, a
 * fault or silence: a barrier that some threads of the block have left out by returning, a shuffle
 * that some lanes of the warp do not take part in, different exchanges met in one warp, a
 * misaligned access of packs, threads that meet in a launch that promised they do not, more than
 * 1024 threads, more than 48 KiB of shared memory. Shared memory holds NaN bytes at the start of
 * each block.
 *
 * A race shows only in some orders, so threads, warps and blocks can run in three.
 *
 * All state belongs to the host thread that launches: several may launch at a time.
 */
#include <stddef.h>
#include <stdint.h>

enum hostcuda_order { HOSTCUDA_ASCENDING = 0, HOSTCUDA_DESCENDING, HOSTCUDA_SHUFFLED };

struct CUstream_st;

#ifdef __cplusplus
extern "C" {
#endif
/* For all launches from now on. */
void hostcuda_set_order(enum hostcuda_order order);
/* Kernels launched by the calling thread so far. */
int64_t hostcuda_launch_count(void);

/*
 * In a program that has the double of the CUDA runtime (doubles/double.h), launches go onto its
 * streams; in others they run at once. A cudaError_t.
 */
int nd_double_launch(struct CUstream_st *stream, void (*kernel)(void *closure), const void *closure,
                     size_t bytes) __attribute__((weak));
/* Before the launch of a kernel, which its address tells from others. A cudaError_t. */
int nd_double_load(struct CUstream_st *stream, const void *what, size_t bytes)
    __attribute__((weak));
#ifdef __cplusplus
}

namespace hostcuda {

struct index {
    unsigned x, y, z;
};

/* The built-in variables of the thread that runs. */
struct place {
    index thread, block, block_size, grid_size;
};
extern thread_local place here;

enum exchange_kind { SYNC = 1, SHUFFLE, REDUCE };

/* Memory of the block that runs: the same for every thread that gives the same key. */
void *shared(const void *key, size_t bytes);
void wait_block();
/*
 * All lanes of the warp give a word and get those of all 32. Valid until the lane's next exchange
 * but one.
 */
const uint64_t *exchange(unsigned mask, uint64_t word, exchange_kind kind);
void expect_aligned(const void *p, size_t bytes, const char *file, int line);

/* Runs thread(context) for every thread of the grid. */
void run_grid(const char *kernel, int64_t grid, int64_t block, bool meets, void (*thread)(void *),
              void *context);

template <class F> int submit(CUstream_st *queue, const F &work)
{
    if (nd_double_launch) {
        return nd_double_launch(
            queue, [](void *closure) { (*(F *)closure)(); }, &work, sizeof work);
    }
    work();
    return 0;
}

template <class F>
int launch(const char *kernel, int64_t grid, int64_t block, bool meets, CUstream_st *queue,
           const F &thread)
{
    return submit(queue, [=]() {
        run_grid(
            kernel, grid, block, meets, [](void *context) { (*(const F *)context)(); },
            (void *)&thread);
    });
}

} // namespace hostcuda
#endif
#endif

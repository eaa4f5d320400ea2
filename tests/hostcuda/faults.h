// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_FAULTS_H
#define ND_TESTS_FAULTS_H
/* Kernels with a mistake each, for tests of the emulator (fibers.h). Compiled for the host only. */
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
void faults_return_before_a_barrier(void);
void faults_leave_out_a_shuffle(void);
void faults_meet_where_none_was_promised(void);
void faults_load_a_pack_across_a_boundary(void);
/* Sums 64 numbers by way of shared memory, with and without the barrier between the writes and the reads. */
float faults_sum(int with_barrier);
/* 1 when shared memory begins with NaNs in each of two blocks. */
int faults_shared_memory_is_fresh(void);
/* A sum over shuffles and barriers of 3 blocks of `threads` threads with the numbers 0, 1, 2, ... of each block. */
double faults_tree(int threads);
#ifdef __cplusplus
}
#endif
#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_FAULTS_H
#define ND_TESTS_FAULTS_H
/* Kernels with a mistake each, for tests of the emulator (fibers.h), and pieces of kernels.
 * Compiled for the host only. */
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
void faults_return_before_a_barrier(void);
void faults_leave_out_a_shuffle(void);
void faults_meet_where_none_was_promised(void);
void faults_load_a_pack_across_a_boundary(void);
/* Sums 64 numbers by way of shared memory, with and without the barrier between the writes and the
 * reads. */
float faults_sum(int with_barrier);
/* 1 when shared memory begins with NaNs in each of two blocks. */
int faults_shared_memory_is_fresh(void);
/* A sum over shuffles and barriers of 3 blocks of `threads` threads with the numbers 0, 1, 2, ...
 * of each block. */
double faults_tree(int threads);
/* The quotient by nd::divider. n and d below 2^31. */
uint32_t pieces_quotient(uint32_t n, uint32_t d);
/*
 * Where element `index` (row-major over the shape, of 3 axes with the last contiguous) of a view
 * with these strides lies by nd::layout, in packs of 1; wide: by its 64-bit way for many packs.
 */
int64_t pieces_offset(const int64_t shape[3], const int64_t stride[3], int64_t index, int wide);
#ifdef __cplusplus
}
#endif
#endif

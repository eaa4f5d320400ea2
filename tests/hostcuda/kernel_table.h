// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_KERNEL_TABLE_H
#define ND_TESTS_KERNEL_TABLE_H
/*
 * The CUDA kernels as a backend over host memory, without the device and the libraries beside them:
 * every op that has a kernel of ours is its launcher, products and attention are the reference's.
 * One thread at a time uses it.
 */
#include "kernels/ops.h"

const nd_ops *nd_ops_kernels(void);

#endif

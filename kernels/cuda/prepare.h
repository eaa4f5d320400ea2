// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_PREPARE_H
#define ND_CUDA_PREPARE_H
/* nd_ops.prepare of the CUDA backend: the plans of cuBLASLt and cuDNN, made before step 1. */
#include "kernels/ops.h"

extern const nd_ops nd_cuda_prepare_ops;

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_BACKENDS_H
#define ND_COMM_BACKENDS_H
/* The backends that exist without a library. */
#include "runtime/comm/comm.h"

extern const nd_comm_backend nd_self_backend;

#endif

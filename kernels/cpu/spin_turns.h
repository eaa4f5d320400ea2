// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_SPIN_TURNS_H
#define ND_CPU_SPIN_TURNS_H
#include <stdint.h>

/* How many turns a thread of ours spins before it sleeps: those of GOMP_SPINCOUNT, otherwise those
 * of OMP_WAIT_POLICY, both read as libgomp reads them, so that one setting is enough. Without
 * either, or where libgomp would not take them, 2,000: about what sleeping and waking cost. */
int64_t nd_cpu_spin_turns(void);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_SPIN_TURNS_H
#define ND_CPU_SPIN_TURNS_H
#include <stdint.h>

/* How many turns a thread of the team spins before it sleeps: what GOMP_SPINCOUNT gives, or without
 * it OMP_WAIT_POLICY. Both are read as libgomp reads them, so one setting covers its threads and
 * ours. Without a value that libgomp would take there are 2,000 turns, about what sleeping and
 * waking cost. */
int64_t nd_cpu_spin_turns(void);

#endif

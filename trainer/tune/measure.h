// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TUNE_MEASURE_H
#define ND_TUNE_MEASURE_H
#include "trainer/tune/tuning.h"

/*
 * On one rank with a GPU: times for `budget` seconds at most and fills linears and choices; what
 * there was no time for stays as it was asked, or the library's first. Leaves the device with its
 * forms forgotten.
 */
nd_status nd_measure(nd_rank *rank, double budget, nd_tuning *tuning);

#endif

// SPDX-License-Identifier: Apache-2.0
/* Schedules of a model of one stage, other than the sequential one, for mesh_job.schedule. */
#ifndef TESTS_PARITY_SCHEDULES_H
#define TESTS_PARITY_SCHEDULES_H
#include "trainer/schedule/schedule.h"

/* The weights of each pass are gathered for it alone. */
nd_status schedule_resharding(int micros, nd_schedule *out);
/* All weight gradients of a micro-batch come after its input gradients, without its weights. */
nd_status schedule_split(int micros, nd_schedule *out);
/* Those of each micro-batch come after the input gradients of the next one. */
nd_status schedule_overlapping(int micros, nd_schedule *out);

#endif

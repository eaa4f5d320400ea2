// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_LIMITS_H
#define ND_BASE_LIMITS_H
/* Limits that the system sets to this process; its children inherit them. */
#include <stdint.h>

/*
 * Raises the number of files that may be open to what the user is allowed (1,024 is a usual
 * default, too few for a thousand connections), and returns it.
 */
int64_t nd_limits_raise_files(void);

#endif

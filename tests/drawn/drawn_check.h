// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_DRAWN_DRAWN_CHECK_H
#define TESTS_DRAWN_DRAWN_CHECK_H
#include "runtime/base/status.h"
#include "tests/drawn/drawn_case.h"

/*
 * Runs a case, in a process of its own, since it sets the environment of the ops:
 *
 *   one step of one worker in F32 by the ops of kernels/ref
 *   one worker, in the precision of the case
 *   the mesh, which saves its model first and reads it, saves a checkpoint in the middle, and goes
 *   from there to the end once more
 *   a fresh start from the checkpoint
 *
 * and compares them. Fails with a sentence that says what differs.
 */
nd_status drawn_check(const drawn_case *c);

#endif

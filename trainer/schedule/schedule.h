// SPDX-License-Identifier: Apache-2.0
#ifndef ND_SCHEDULE_SCHEDULE_H
#define ND_SCHEDULE_SCHEDULE_H
/*
 * A schedule is what a rank does in a step, as a list of actions. A generator makes the list from a
 * few numbers, nd_schedule_check proves that it can be run, and one interpreter (step/step.c) runs
 * it. So the order of micro-batches is data: no code of the model knows it.
 *
 * A stage is a range of the model's layers that lies on one rank. Stage 0 reads tokens, the last
 * one computes the loss. Today a rank has one stage, which is the whole model.
 *
 * Gradients of weights add up in the order of the list, so two schedules give the same bits where
 * each stage has its weight gradients in the same order of micro-batches.
 */
#include <stdbool.h>

#include "runtime/base/status.h"

/*
 * The actions of a stage; those before ND_UNSHARD are of one micro-batch.
 *   forward           from the stage's input to its output, or to the loss, with the gradients that
 *                     the head finds inside its forward
 *   input gradient    from the gradient of the output to that of the input, and the gradients of
 *                     norms, biases and embedding
 *   weight gradient   the gradients of the linears, and the unit-by-unit reduction over shards. The
 *                     weights themselves are not read
 *   backward          both at once
 *   send, receive     the output to the next stage, the gradient of the input to the previous one;
 *                     and what those send
 *   unshard, reshard  the stage's weights begin to be gathered; their buffers are free again
 *   reduce            the stage's gradients are summed over tp and over replicas, after the last
 *                     micro-batch
 */
typedef enum nd_action_kind {
    ND_RECEIVE_INPUT = 0,
    ND_FORWARD,
    ND_SEND_OUTPUT,
    ND_RECEIVE_GRADIENT,
    ND_INPUT_GRADIENT,
    ND_WEIGHT_GRADIENT,
    ND_BACKWARD,
    ND_SEND_GRADIENT,
    ND_UNSHARD,
    ND_RESHARD,
    ND_REDUCE,
    ND_ACTION_KIND_COUNT
} nd_action_kind;

typedef struct nd_action {
    nd_action_kind kind;
    int stage, micro; /* micro: 0 where the action is of no micro-batch */
} nd_action;

/* The list of one rank. */
typedef struct nd_schedule {
    int stages;         /* of all ranks */
    int micros;         /* micro-batches of a step */
    nd_action *actions; /* owned */
    int count;
} nd_schedule;

/* A checked schedule needs this of the rank's memory. */
typedef struct nd_schedule_needs {
    int sets;    /* the most micro-batches that are between forward and weight gradient at once */
    bool delays; /* some weight gradient comes after its input gradient, as an action of its own */
} nd_schedule_needs;

/* Each micro-batch forward and backward, one after the other, then the reduction; one stage. */
nd_status nd_schedule_sequential(int micros, nd_schedule *out);
void nd_schedule_fini(nd_schedule *schedule);

/*
 * Checks that the list can be run, and is a whole step of each stage that it names: every
 * micro-batch has a forward, both gradients and what it exchanges with adjacent stages, each once
 * and after what it reads; weights are there when they are read; the last stage, whose forward
 * begins the gradients of the head, has one micro-batch between forward and input gradient; the
 * reduction comes last. ND_ERR_INTERNAL names the first action that is wrong, or what is missing.
 * That all ranks' lists fit together is not looked at.
 */
nd_status nd_schedule_check(const nd_schedule *schedule, nd_schedule_needs *out);

#endif

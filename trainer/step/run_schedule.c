// SPDX-License-Identifier: Apache-2.0
/* Runs a step's list of actions (trainer/schedule). */
#include "trainer/step/parts.h"

static void begin_phase(const nd_trainer *t, nd_phase phase, const char *name)
{
    nd_rank *r = t->rank;
    nd_progress_set_phase(r->progress, phase, t->position.step + 1);
    nd_range_push(r->device, name);
}

static nd_status forward(const nd_trainer *t, const nd_step_batch *batch, int micro)
{
    nd_model *m = t->model;
    nd_activation_set *set = nd_model_take_set(m);
    ND_TRY(nd_model_load(m, set, batch, micro));
    begin_phase(t, ND_PHASE_FORWARD, "forward");
    ND_TRY(nd_model_forward(m, set, ND_PASS_TRAIN));
    nd_range_pop(m->rank->device);
    return ND_OK;
}

typedef nd_status part_of_backward(nd_model *m, nd_activation_set *set);

/* `last`: nothing reads the set afterwards. */
static nd_status backward(const nd_trainer *t, int micro, part_of_backward *part, bool last)
{
    nd_model *m = t->model;
    nd_activation_set *set = m->sets;
    while (!set->taken || set->micro != micro) { /* the one that its forward took */
        set++;
        ND_ASSERT(set < m->sets + m->set_count);
    }
    begin_phase(t, ND_PHASE_BACKWARD, "backward");
    ND_TRY(part(m, set));
    nd_range_pop(m->rank->device);
    return last ? nd_model_give_back(m, set) : ND_OK;
}

static nd_status run_action(nd_trainer *t, const nd_step_batch *batch, const nd_action *action)
{
    nd_model *m = t->model;
    switch (action->kind) {
    case ND_UNSHARD:
        return nd_model_unshard(m);
    case ND_FORWARD:
        return forward(t, batch, action->micro);
    case ND_BACKWARD:
        return backward(t, action->micro, nd_model_backward, true);
    case ND_INPUT_GRADIENT:
        return backward(t, action->micro, nd_model_input_gradient, false);
    case ND_WEIGHT_GRADIENT:
        return backward(t, action->micro, nd_model_weight_gradient, true);
    case ND_RESHARD:
        return nd_fsdp_reshard(&m->fsdp);
    case ND_REDUCE:
        return nd_fsdp_grad_reduce(&m->fsdp);
    default:
        break;
    }
    return nd_fail(ND_ERR_INTERNAL, "action %d is of a model of several stages", (int)action->kind);
}

nd_status nd_schedule_run(nd_trainer *t, const nd_step_batch *batch)
{
    for (int i = 0; i < t->schedule.count; i++) {
        ND_TRY(run_action(t, batch, &t->schedule.actions[i]));
    }
    return ND_OK;
}

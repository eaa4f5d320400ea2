// SPDX-License-Identifier: Apache-2.0
/* While a block is computed the next unit's weights are on their way, forward and backward. */
#include <criterion/criterion.h>

#include "tests/unit/trainer/mesh_ranks.h"

enum { LAYERS = 5, T = 32 };

/* The observations of the spying ops of one rank; each rank is a thread. */
typedef struct spy {
    const nd_model *model;
    const nd_ops *ops;
    int64_t forward, backward; /* blocks so far */
    bool late;                 /* the unit that comes next was not on its way */
} spy;

static _Thread_local spy *of_thread;

/* In the middle of block `layer`. NULL: no unit comes next. */
static void look(int64_t layer, const nd_unit *next)
{
    const nd_fsdp *fsdp = &of_thread->model->fsdp;
    const nd_weight_slot *now =
        nd_fsdp_slot_holding(fsdp, nd_layout_unit(fsdp->layout, ND_UNIT_BLOCK, layer));
    bool here = now && now->held && !now->pending;
    of_thread->late |= !here || (next && !nd_fsdp_slot_holding(fsdp, next));
}

static nd_status attention_fwd(nd_stream *stream, const nd_attention_fwd_args *args)
{
    const nd_layout *layout = of_thread->model->layout;
    int64_t layer = of_thread->forward++;
    look(layer, layer + 1 < LAYERS ? nd_layout_unit(layout, ND_UNIT_BLOCK, layer + 1)
                                   : nd_layout_unit(layout, ND_UNIT_HEAD, -1));
    return of_thread->ops->attention_fwd(stream, args);
}

static nd_status attention_bwd(nd_stream *stream, const nd_attention_bwd_args *args)
{
    int64_t layer = LAYERS - 1 - of_thread->backward++;
    look(layer, nd_layout_unit(of_thread->model->layout, ND_UNIT_BLOCK, layer - 1));
    return of_thread->ops->attention_bwd(stream, args);
}

static nd_status body(nd_rank *rank, void *context)
{
    spy eye = {.ops = rank->ops};
    nd_ops spying = *rank->ops;
    nd_model *m = NULL;
    nd_activation_set *set;
    spying.attention_fwd = attention_fwd;
    spying.attention_bwd = attention_bwd;
    rank->ops = &spying;
    of_thread = &eye;
    ND_TRY(mesh_model_open(rank, NULL, 1, &m));
    eye.model = m;
    ND_TRY(mesh_load_batch(m, 1, &set));
    m->numbers->tokens = 2 * T;
    nd_fsdp_begin_step(&m->fsdp, 0);
    ND_TRY(nd_model_forward(m, set, ND_PASS_TRAIN));
    ND_CHECK(!eye.late && eye.forward == LAYERS, "forward: a unit was not prefetched");
    ND_TRY(nd_model_backward(m, set));
    ND_CHECK(!eye.late && eye.backward == LAYERS, "backward: a unit was not prefetched");
    return nd_model_give_back(m, set);
}

Test(prefetch, the_next_unit_is_gathered_one_ahead)
{
    for (int zero2 = 0; zero2 < 2; zero2++) {
        mesh_ranks job = mesh_ranks_of((nd_mesh){{1, 1, 2, 1, 1}}, LAYERS, false, body, NULL);
        job.shape.rms_eps = 1e-5;
        job.config.parallel.reshard_after_forward = !zero2;
        job.config.train.precision = ND_PRECISION_BF16;
        expect_ranks(&job, "zero-%d", zero2 ? 2 : 3);
    }
}

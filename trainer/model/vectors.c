// SPDX-License-Identifier: Apache-2.0
/* Where the gradients of norms and biases of a block are summed up. */
#include "trainer/model/model.h"

nd_tensor nd_block_vector_gradient(nd_block_call c, nd_param_id first, nd_param_id last)
{
    const nd_layout *layout = c.model->layout;
    const nd_unit *unit = nd_layout_unit(layout, ND_UNIT_BLOCK, c.layer);
    float *waits = nd_set_block(c.set, c.layer)->dvectors.data;
    int64_t before = 0, rows = 0;
    if (!waits) {
        return nd_fsdp_grad(&c.model->fsdp, first, last, c.layer);
    }
    for (int i = unit->first_param; i < unit->first_param + unit->param_count; i++) {
        const nd_param *p = &layout->params[i];
        before += p->axes == 1 && p->id < first ? p->local_rows : 0;
        rows += p->id >= first && p->id <= last ? p->local_rows : 0;
    }
    return nd_tensor_1d(waits + before, ND_DTYPE_F32, rows);
}

// SPDX-License-Identifier: Apache-2.0
/* Memory of the FP8 products: what they share among all blocks. */
#include "trainer/model/linear.h"

enum { ID_X, ID_X_T, ID_DY, ID_DY_T, ID_DY_LOCAL, ID_W, ID_W_T, ID_GEMM };

static int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

int64_t nd_linear_vector(const nd_dims *d)
{
    return max_i64(max_i64(d->T, d->C), max_i64(d->QKV, 2 * d->F));
}

static size_t gemm_scratch(const nd_model *m, int64_t n, int64_t k)
{
    const nd_dims *d = &m->dims;
    const nd_device *device = m->rank->device;
    const nd_ops *ops = m->rank->ops;
    size_t y = ops->matmul_fp8_scratch(device, d->T, n, k, d->act);
    size_t dx = ops->matmul_fp8_scratch(device, d->T, k, n, d->act);
    size_t dw = ops->matmul_fp8_scratch(device, n, k, d->T, d->act);
    y = y > dx ? y : dx;
    return y > dw ? y : dw;
}

void nd_linear_plan(nd_model *m, nd_memplan *plan, int first_id)
{
    const nd_dims *d = &m->dims;
    const nd_scales *s = &m->scales;
    int64_t per_tensor = nd_recipe_is_per_tensor(&s->recipe);
    int64_t transposes = m->rank->ops->fp8_needs_transposed;
    int64_t inputs = max_i64(d->C, d->H * d->D), outputs = max_i64(inputs, d->F);
    /* Delayed: SwiGLU's backward makes the codes of gate's and of up's gradient at once. */
    int64_t together = nd_recipe_is_delayed(&s->recipe) ? max_i64(outputs, 2 * d->F) : outputs;
    int64_t weight = 0;
    size_t scratch = 0;
    if (!s->recipe.name) {
        return;
    }
    for (int i = 0; i < m->layout->param_count; i++) {
        const nd_param *p = &m->layout->params[i];
        if (p->fp8) {
            size_t bytes = gemm_scratch(m, p->local_rows, p->local_cols);
            weight = max_i64(weight, p->local_rows * p->local_cols);
            scratch = scratch > bytes ? scratch : bytes;
        }
    }
    const struct {
        const char *name;
        int64_t bytes;
    } specs[ND_LINEAR_PLAN_IDS] = {
        [ID_X] = {"fp8: input of a product", d->T * (per_tensor ? inputs : max_i64(inputs, d->F))},
        [ID_X_T] = {"fp8: input, transposed", transposes * d->T * max_i64(inputs, d->F)},
        [ID_DY] = {"fp8: output gradients", d->T * together},
        [ID_DY_T] = {"fp8: output gradients, transposed", transposes * d->T * outputs},
        [ID_DY_LOCAL] = {"fp8: gradient before its gather", d->T == d->Tl ? 0 : d->Tl * d->C},
        [ID_W] = {"fp8: weight of a product", s->codes_gathered ? 0 : weight},
        [ID_W_T] = {"fp8: weight, transposed", transposes * weight},
        [ID_GEMM] = {"fp8: work space of products", (int64_t)scratch},
    };
    for (int i = 0; i < ND_LINEAR_PLAN_IDS; i++) {
        m->ids_of_plan[first_id + i] =
            nd_memplan_add(plan, ND_MEM_SCRATCH, specs[i].name, specs[i].bytes, 1);
    }
}

void nd_linear_bind(nd_model *m, const nd_memplan *plan, int first_id)
{
    if (!m->scales.recipe.name) {
        return;
    }
    const int *id = m->ids_of_plan + first_id;
    m->fp8 = (nd_fp8_scratch){
        .x = nd_memplan_at(plan, id[ID_X]),
        .x_transposed = nd_memplan_at(plan, id[ID_X_T]),
        .dy = nd_memplan_at(plan, id[ID_DY]),
        .dy_transposed = nd_memplan_at(plan, id[ID_DY_T]),
        .dy_local = nd_memplan_at(plan, id[ID_DY_LOCAL]),
        .w = nd_memplan_at(plan, id[ID_W]),
        .w_transposed = nd_memplan_at(plan, id[ID_W_T]),
        .gemm = nd_memplan_at(plan, id[ID_GEMM]),
    };
}

// SPDX-License-Identifier: Apache-2.0
/* Memory of the FP8 products: what they share among all blocks. */
#include "trainer/model/linear.h"

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

void nd_linear_plan(nd_model *m, nd_memplan *plan)
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
    nd_fp8_scratch *f = &m->fp8;
    const struct {
        const char *name;
        int64_t bytes;
        void **pointer;
    } wants[] = {
        {"fp8: input of a product", d->T * (per_tensor ? inputs : max_i64(inputs, d->F)), &f->x},
        {"fp8: input, transposed", transposes * d->T * max_i64(inputs, d->F), &f->x_transposed},
        {"fp8: output gradients", d->T * together, &f->dy},
        {"fp8: output gradients, transposed", transposes * d->T * outputs, &f->dy_transposed},
        {"fp8: gradient before its gather", d->T == d->Tl ? 0 : d->Tl * d->C, &f->dy_local},
        {"fp8: weight of a product", s->codes_gathered ? 0 : weight, &f->w},
        {"fp8: weight, transposed", transposes * weight, &f->w_transposed},
        {"fp8: work space of products", (int64_t)scratch, &f->gemm},
    };
    for (size_t i = 0; i < sizeof wants / sizeof *wants; i++) {
        nd_memplan_want(plan, ND_MEM_SCRATCH, wants[i].name, (size_t)wants[i].bytes,
                        wants[i].pointer);
    }
}

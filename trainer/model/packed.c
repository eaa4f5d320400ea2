// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/packed.h"

#include <stdlib.h>

#include "runtime/base/math.h"

enum { ALIGNMENT = 256 };

nd_status nd_packed_init(nd_packed_weights *p, const nd_rank *rank, const nd_fsdp *fsdp,
                         int64_t tiles)
{
    const int64_t most = 2 * (fsdp->layout->param_count + tiles);
    *p = (nd_packed_weights){.rank = rank, .fsdp = fsdp, .most = (int)most};
    return ND_ALLOC(most, &p->weights);
}

void nd_packed_fini(nd_packed_weights *p)
{
    free(p->weights);
    *p = (nd_packed_weights){0};
}

/* Forms stand in the order of their layers, the head's behind them in that of its tiles. */
static bool stands_before(const nd_packed_weight *a, const nd_packed_weight *b)
{
    const int64_t x = a->layer < 0 ? INT64_MAX : a->layer, y = b->layer < 0 ? INT64_MAX : b->layer;
    return x < y || (x == y && a->row < b->row);
}

void nd_packed_want(nd_packed_weights *p, const nd_packed_weight *which, nd_form_rule form)
{
    const nd_param *param = nd_layout_param(p->fsdp->layout, which->first, which->layer);
    nd_packed_weight w = *which;
    w.bytes = form.bytes;
    if (form.maker == ND_FORM_BY_PRODUCT && form.bytes > 0 &&
        nd_fsdp_has_own_slot(p->fsdp, param->unit)) {
        ND_ASSERT(p->count < p->most);
        ND_ASSERT(p->count == 0 || !stands_before(&w, &p->weights[p->count - 1]));
        p->weights[p->count++] = w;
    }
}

size_t nd_packed_bytes(const nd_packed_weights *p, bool head)
{
    size_t bytes = 0;
    for (int i = 0; i < p->count; i++) {
        const nd_packed_weight *w = &p->weights[i];
        bytes += (w->layer < 0) == head ? nd_round_up_bytes(w->bytes, ALIGNMENT) : 0;
    }
    return bytes;
}

void nd_packed_plan(nd_packed_weights *p, bool head, nd_memplan *plan)
{
    const char *name = head ? "head, packed" : "decoder blocks, packed";
    const int want = nd_memplan_want(plan, ND_MEM_WEIGHTS, name, nd_packed_bytes(p, head), NULL);
    size_t offset = 0;
    for (int i = 0; i < p->count; i++) {
        nd_packed_weight *w = &p->weights[i];
        if ((w->layer < 0) == head) {
            nd_memplan_also(plan, want, offset, &w->form.memory);
            offset += nd_round_up_bytes(w->bytes, ALIGNMENT);
        }
    }
}

nd_kept_form *nd_packed_form_of(nd_packed_weights *p, const nd_packed_weight *x)
{
    int low = 0;
    for (int high = p->count; low < high;) {
        const int middle = low + (high - low) / 2;
        const bool below = stands_before(&p->weights[middle], x);
        low = below ? middle + 1 : low;
        high = below ? high : middle;
    }
    for (int i = low; i < p->count && !stands_before(x, &p->weights[i]); i++) {
        nd_packed_weight *w = &p->weights[i];
        if (w->first == x->first && w->last == x->last && w->transposed == x->transposed) {
            w->form.made = w->form.made && w->version == p->fsdp->version;
            w->version = p->fsdp->version;
            return w->form.memory ? &w->form : NULL;
        }
    }
    return NULL;
}

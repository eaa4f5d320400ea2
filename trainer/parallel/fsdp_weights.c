// SPDX-License-Identifier: Apache-2.0
/* Gathered weights: their memory, which slot holds which unit, its all-gathers, views into it. */
#include "trainer/parallel/fsdp.h"

#include "runtime/base/math.h"

nd_dtype nd_fsdp_gathered_dtype(const nd_fsdp *fsdp, nd_segment_kind kind)
{
    return kind == ND_SEGMENT_FP8 ? ND_DTYPE_U8 : fsdp->act;
}

/* Elements of a segment in a slot: those of its unit or, where blocks share slots, of the largest
 * block, since a filter may leave a linear of one block in BF16. */
static int64_t slot_count(const nd_fsdp *fsdp, nd_segment_kind kind, int slot)
{
    const bool shared = fsdp->blocks_share && slot < ND_FSDP_BLOCK_SLOTS;
    int64_t most = 0;
    for (int i = 0; i < fsdp->layout->unit_count; i++) {
        const nd_unit *u = &fsdp->layout->units[i];
        if (fsdp->slot_of_unit[i] == slot || (shared && u->kind == ND_UNIT_BLOCK)) {
            most = nd_max(most, u->segments[kind].count);
        }
    }
    return most;
}

/* Slots [first, end) are parts of one buffer for a segment. */
static void plan_slots(nd_fsdp *fsdp, nd_segment_kind kind, const char *name, int first, int end,
                       nd_memplan *plan)
{
    const size_t width = fsdp->aliased ? 0 : nd_dtype_size(nd_fsdp_gathered_dtype(fsdp, kind));
    int64_t all = 0, before = 0;
    for (int s = first; s < end; s++) {
        all += slot_count(fsdp, kind, s);
    }
    int want = nd_memplan_want(plan, ND_MEM_WEIGHTS, name, (size_t)all * width, NULL);
    for (int s = first; s < end; s++) {
        nd_memplan_also(plan, want, (size_t)before * width, &fsdp->slots[s].data[kind]);
        before += slot_count(fsdp, kind, s);
    }
}

size_t nd_fsdp_own_bytes(const nd_fsdp *fsdp)
{
    size_t bytes = 0;
    for (int u = 0; u < fsdp->layout->unit_count && !fsdp->aliased; u++) {
        const nd_segment *segments = fsdp->layout->units[u].segments;
        bytes += (size_t)segments[ND_SEGMENT_HP].count * nd_dtype_size(fsdp->act) +
                 (size_t)segments[ND_SEGMENT_FP8].count;
    }
    return bytes;
}

/* Plans what a model without master weights has in their place. */
static void plan_kept(nd_fsdp *fsdp, nd_memplan *plan)
{
    static const char *const names[] = {"decoder blocks, shards",
                                        "decoder blocks, shards of codes"};
    const nd_layout *layout = fsdp->layout;
    int64_t landing = 0;
    bool codes = false;
    for (nd_segment_kind kind = 0; kind < ND_SEGMENT_COUNT; kind++) {
        int64_t blocks = 0;
        for (int u = 0; u < layout->unit_count; u++) {
            const nd_segment *segment = &layout->units[u].segments[kind];
            landing = nd_max(landing, segment->shard_count);
            codes |= kind == ND_SEGMENT_FP8 && segment->count > 0;
            blocks += layout->units[u].kind == ND_UNIT_BLOCK ? segment->shard_count : 0;
        }
        size_t width = nd_dtype_size(nd_fsdp_gathered_dtype(fsdp, kind));
        nd_memplan_want(plan, ND_MEM_WEIGHTS, names[kind],
                        fsdp->converts && fsdp->blocks_share ? (size_t)blocks * width : 0,
                        &fsdp->kept[kind]);
    }
    fsdp->landing_count = fsdp->converts ? nd_min(landing, ND_FSDP_PIECE) : 0;
    nd_memplan_want(plan, ND_MEM_SCRATCH, "weights as they are read",
                    (size_t)fsdp->landing_count * sizeof *fsdp->landing, &fsdp->landing);
    const bool rounds = fsdp->converts && codes && fsdp->scales->from_bf16;
    nd_memplan_want(plan, ND_MEM_SCRATCH, "weights as they are read, in bf16",
                    rounds ? (size_t)fsdp->landing_count * sizeof *fsdp->rounded : 0,
                    &fsdp->rounded);
}

nd_status nd_fsdp_plan_weights(nd_fsdp *fsdp, bool shares, nd_memplan *plan)
{
    const nd_layout *layout = fsdp->layout;
    fsdp->resident =
        (layout->shards == 1 && !shares) || !fsdp->rank->config->parallel.reshard_after_forward;
    const bool shared = !fsdp->resident && layout->block_count > ND_FSDP_BLOCK_SLOTS;
    const int slots = shared ? ND_FSDP_BLOCK_SLOTS : layout->block_count;
    int blocks = 0;
    fsdp->slot_count = slots + 2; /* head, embedding */
    fsdp->blocks_share = shared;
    ND_TRY(ND_ALLOC(fsdp->slot_count, &fsdp->slots));
    ND_TRY(ND_ALLOC(layout->unit_count, &fsdp->slot_of_unit));
    for (int u = 0; u < layout->unit_count; u++) {
        nd_unit_kind kind = layout->units[u].kind;
        fsdp->slot_of_unit[u] = kind == ND_UNIT_BLOCK  ? blocks++ % slots
                                : kind == ND_UNIT_HEAD ? slots
                                                       : slots + 1;
    }
    nd_memplan_want(plan, ND_MEM_SCRATCH, "tp: replicated gradients",
                    (size_t)fsdp->packed_count * 4, &fsdp->packed);
    plan_slots(fsdp, ND_SEGMENT_HP, "decoder blocks", 0, slots, plan);
    plan_slots(fsdp, ND_SEGMENT_FP8, "decoder blocks, fp8 codes", 0, slots, plan);
    plan_slots(fsdp, ND_SEGMENT_HP, "embedding", slots + 1, slots + 2, plan);
    plan_slots(fsdp, ND_SEGMENT_HP, "norm and head", slots, slots + 1, plan);
    plan_kept(fsdp, plan);
    return ND_OK;
}

void nd_fsdp_weights_changed(nd_fsdp *fsdp)
{
    fsdp->version++;
}

nd_bf16 *nd_fsdp_resident(const nd_fsdp *fsdp, int64_t begin)
{
    const nd_layout *layout = fsdp->layout;
    for (int u = 0; u < layout->unit_count && fsdp->act == ND_DTYPE_BF16; u++) {
        const nd_segment *hp = &layout->units[u].segments[ND_SEGMENT_HP];
        int64_t at = begin - hp->shard_offset;
        if (nd_fsdp_has_own_slot(fsdp, &layout->units[u]) && at >= 0 && at < hp->shard_count) {
            nd_bf16 *gathered = fsdp->slots[fsdp->slot_of_unit[u]].data[ND_SEGMENT_HP];
            return gathered + hp->shard_count * layout->shard_index + at;
        }
    }
    return NULL;
}

void nd_fsdp_weights_updated(nd_fsdp *fsdp)
{
    nd_fsdp_weights_changed(fsdp);
    for (int u = 0; u < fsdp->layout->unit_count && fsdp->act == ND_DTYPE_BF16; u++) {
        if (nd_fsdp_has_own_slot(fsdp, &fsdp->layout->units[u])) {
            fsdp->slots[fsdp->slot_of_unit[u]].own_version = fsdp->version;
        }
    }
}

nd_weight_slot *nd_fsdp_slot_holding(const nd_fsdp *fsdp, const nd_unit *unit)
{
    nd_weight_slot *slot = &fsdp->slots[fsdp->slot_of_unit[unit->index]];
    return slot->unit == unit && slot->version == fsdp->version ? slot : NULL;
}

/* Casts this rank's part of the unit's codes, each weight with its own scale. */
static nd_status cast_codes(nd_fsdp *fsdp, const nd_unit *unit, char *own)
{
    nd_scales *scales = fsdp->scales;
    int64_t layer = unit->layer;
    int64_t begin = unit->segments[ND_SEGMENT_FP8].shard_offset;
    for (int linear = 0; linear < ND_LINEAR_COUNT; linear++) {
        int64_t site = nd_site_weight(scales, layer, linear);
        const nd_flat_range range = nd_scales_part(scales, site);
        int64_t count = range.end - range.begin;
        if (count == 0) {
            continue;
        }
        const nd_cast_rule *rule = &scales->recipe.rules[ND_W_OF_Y];
        const nd_tensor codes = nd_tensor_1d(own + (range.begin - begin), rule->format, count);
        const nd_matrix out = nd_matrix_with(nd_scales_at(scales, site), rule, codes);
        const nd_tensor x = nd_tensor_1d(fsdp->master + range.begin, ND_DTYPE_F32, count);
        ND_OP(fsdp->rank, ND_TRACE_CAST, make_form, .out = out, .x = x);
        ND_TRY(nd_scales_count(scales, site, &out, x));
        scales->casts.weights++;
    }
    return ND_OK;
}

/* The place that lies `elements` elements of what is gathered behind `base`. */
static void *behind(const nd_fsdp *fsdp, nd_segment_kind kind, void *base, int64_t elements)
{
    return (char *)base + (size_t)elements * nd_dtype_size(nd_fsdp_gathered_dtype(fsdp, kind));
}

/* This rank's part of a gathered unit. */
static void *part_in(const nd_fsdp *fsdp, const nd_weight_slot *slot, const nd_unit *unit,
                     nd_segment_kind kind)
{
    return behind(fsdp, kind, slot->data[kind],
                  unit->segments[kind].shard_count * fsdp->layout->shard_index);
}

void *nd_fsdp_kept(const nd_fsdp *fsdp, const nd_unit *unit, nd_segment_kind kind)
{
    int64_t before = 0;
    ND_ASSERT(fsdp->converts);
    if (nd_fsdp_has_own_slot(fsdp, unit)) {
        return part_in(fsdp, &fsdp->slots[fsdp->slot_of_unit[unit->index]], unit, kind);
    }
    for (const nd_unit *u = fsdp->layout->units; u < unit; u++) {
        before += u->kind == ND_UNIT_BLOCK ? u->segments[kind].shard_count : 0;
    }
    return behind(fsdp, kind, fsdp->kept[kind], before);
}

/* Loaded values in the device's memory; for codes as these are made from them. */
static nd_status land(nd_fsdp *fsdp, int64_t count, const float *values, bool codes, nd_tensor *out)
{
    nd_rank *r = fsdp->rank;
    ND_ASSERT(count <= fsdp->landing_count);
    *out = nd_tensor_1d((float *)values, ND_DTYPE_F32, count);
    if (r->device->kind != ND_DEVICE_CPU) {
        out->data = fsdp->landing;
        ND_TRY(nd_copy(&r->stream, fsdp->landing, values, (size_t)count * sizeof *values));
    }
    if (codes && fsdp->rounded) {
        const nd_tensor rounded = nd_tensor_1d(fsdp->rounded, ND_DTYPE_BF16, count);
        ND_OP(r, ND_TRACE_CAST, cast, .out = rounded, .x = *out);
        *out = rounded;
    }
    return ND_OK;
}

/* Returns which element of a parameter's local block element `begin` of the flat state arrays
 * is. */
static int64_t local_element(const nd_fsdp *fsdp, const nd_param *p, int64_t begin)
{
    const nd_segment *segment = &p->unit->segments[p->segment];
    return begin - segment->shard_offset + segment->shard_count * fsdp->layout->shard_index -
           p->offset;
}

nd_status nd_fsdp_measure(nd_fsdp *fsdp, const nd_param *p, int64_t begin, int64_t count,
                          const float *values)
{
    nd_scales *s = fsdp->scales;
    nd_tensor x;
    ND_TRY(land(fsdp, count, values, true, &x));
    const nd_scale_ref at = nd_scales_of_elements(s, p, local_element(fsdp, p, begin), &x);
    ND_OP(fsdp->rank, ND_TRACE_CAST, amax, .amax = at.amax, .x = x,
          .granularity = s->recipe.rules[ND_W_OF_Y].granularity, .merge = true);
    return nd_stream_sync(&fsdp->rank->stream);
}

nd_status nd_fsdp_put(nd_fsdp *fsdp, const nd_param *p, int64_t begin, int64_t count,
                      const float *values)
{
    nd_rank *r = fsdp->rank;
    nd_scales *s = fsdp->scales;
    const bool codes = p->segment == ND_SEGMENT_FP8;
    nd_tensor x;
    if (!fsdp->converts) {
        if (values != fsdp->master + begin) {
            ND_TRY(
                nd_copy(&r->stream, fsdp->master + begin, values, (size_t)count * sizeof *values));
        }
        return nd_stream_sync(&r->stream);
    }
    ND_TRY(land(fsdp, count, values, codes, &x));
    void *shard = nd_fsdp_kept(fsdp, p->unit, p->segment);
    const int64_t at = begin - p->unit->segments[p->segment].shard_offset;
    const nd_tensor kept = nd_tensor_1d(behind(fsdp, p->segment, shard, at), fsdp->act, count);
    if (codes) {
        const nd_scale_ref scale = nd_scales_of_elements(s, p, local_element(fsdp, p, begin), &x);
        nd_matrix out = nd_matrix_with(scale, &s->recipe.rules[ND_W_OF_Y], x);
        out.stored.data = kept.data;
        out.stored.dtype = out.format;
        ND_OP(r, ND_TRACE_CAST, make_form, .out = out, .x = x);
        s->casts.weights++;
    } else {
        ND_OP(r, ND_TRACE_CAST, cast, .out = kept, .x = x);
    }
    return nd_stream_sync(&r->stream);
}

/* This rank's shard in the dtype that is gathered, at its place in the gathered buffer. */
static nd_status cast_own_part(nd_fsdp *fsdp, nd_weight_slot *slot, nd_segment_kind kind)
{
    const nd_segment *segment = &slot->unit->segments[kind];
    void *own = part_in(fsdp, slot, slot->unit, kind);
    if (fsdp->converts) {
        const void *kept = nd_fsdp_kept(fsdp, slot->unit, kind);
        const size_t width = nd_dtype_size(nd_fsdp_gathered_dtype(fsdp, kind));
        return own == kept
                   ? ND_OK
                   : nd_copy(&fsdp->rank->stream, own, kept, (size_t)segment->shard_count * width);
    }
    if (kind == ND_SEGMENT_FP8) {
        return cast_codes(fsdp, slot->unit, own);
    }
    if (slot->own_version == fsdp->version) { /* the optimizer has written it */
        return ND_OK;
    }
    int64_t n = segment->shard_count;
    ND_OP(fsdp->rank, ND_TRACE_ELEMENTWISE, cast, .out = nd_tensor_1d(own, fsdp->act, n),
          .x = nd_tensor_1d(fsdp->master + segment->shard_offset, ND_DTYPE_F32, n));
    return ND_OK;
}

/* Both segments in one call. */
static nd_status gather(nd_fsdp *fsdp, nd_weight_slot *slot)
{
    nd_rank *r = fsdp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_DP_SHARD_CP];
    const nd_unit *unit = slot->unit;
    ND_RUN(r, ND_TRACE_COMMUNICATION, nd_comm_group_begin(comm));
    for (nd_segment_kind kind = 0; kind < ND_SEGMENT_COUNT; kind++) {
        if (unit->segments[kind].count > 0) {
            ND_COMM(r, comm, all_gather, &slot->gathered[kind],
                    .send = part_in(fsdp, slot, unit, kind), .recv = slot->data[kind],
                    .count = unit->segments[kind].shard_count,
                    .dtype = nd_fsdp_gathered_dtype(fsdp, kind));
        }
    }
    ND_RUN(r, ND_TRACE_COMMUNICATION, nd_comm_group_end(comm));
    return ND_OK;
}

static nd_status begin_gather(nd_fsdp *fsdp, nd_weight_slot *slot, const nd_unit *unit)
{
    const nd_segment *segments = unit->segments;
    slot->unit = unit;
    slot->version = fsdp->version;
    if (fsdp->aliased) {
        slot->data[ND_SEGMENT_HP] = fsdp->master + segments[ND_SEGMENT_HP].shard_offset;
        return ND_OK;
    }
    for (nd_segment_kind kind = 0; kind < ND_SEGMENT_COUNT; kind++) {
        if (segments[kind].count > 0) {
            ND_TRY(cast_own_part(fsdp, slot, kind));
        }
    }
    ND_TRY(gather(fsdp, slot));
    slot->pending = true;
    return ND_OK;
}

static nd_status finish_gather(nd_fsdp *fsdp, nd_weight_slot *slot)
{
    nd_rank *r = fsdp->rank;
    slot->pending = false;
    for (nd_segment_kind kind = 0; kind < ND_SEGMENT_COUNT; kind++) {
        if (slot->unit->segments[kind].count > 0) {
            ND_RUN(r, ND_TRACE_COMMUNICATION, nd_stream_wait(&r->stream, &slot->gathered[kind]));
        }
    }
    return ND_OK;
}

nd_status nd_fsdp_prefetch(nd_fsdp *fsdp, const nd_unit *unit)
{
    if (!unit || nd_fsdp_slot_holding(fsdp, unit)) {
        return ND_OK;
    }
    nd_weight_slot *slot = &fsdp->slots[fsdp->slot_of_unit[unit->index]];
    const bool in_use = !nd_fsdp_has_own_slot(fsdp, unit) && (slot->held || slot->pending);
    return in_use ? ND_OK : begin_gather(fsdp, slot, unit);
}

nd_status nd_fsdp_acquire(nd_fsdp *fsdp, const nd_unit *unit)
{
    ND_TRY(nd_fsdp_prefetch(fsdp, unit));
    nd_weight_slot *slot = nd_fsdp_slot_holding(fsdp, unit);
    ND_ASSERT(slot); /* the caller releases a block before it acquires the next but one */
    if (slot->pending) {
        ND_TRY(finish_gather(fsdp, slot));
    }
    slot->held = true;
    return ND_OK;
}

void nd_fsdp_release(nd_fsdp *fsdp, const nd_unit *unit)
{
    nd_weight_slot *slot = nd_fsdp_slot_holding(fsdp, unit);
    ND_ASSERT(slot && slot->held);
    slot->held = false;
}

nd_status nd_fsdp_reshard(nd_fsdp *fsdp)
{
    for (int s = 0; s < fsdp->slot_count; s++) {
        nd_weight_slot *slot = &fsdp->slots[s];
        ND_ASSERT(!slot->held);
        ND_TRY(slot->pending ? finish_gather(fsdp, slot) : ND_OK);
        slot->unit = NULL;
    }
    return ND_OK;
}

nd_tensor nd_fsdp_weight(const nd_fsdp *fsdp, nd_param_id first, nd_param_id last, int64_t layer)
{
    const nd_unit *unit = nd_layout_param(fsdp->layout, first, layer)->unit;
    const nd_weight_slot *slot = nd_fsdp_slot_holding(fsdp, unit);
    ND_ASSERT(slot && slot->held);
    return nd_layout_view(fsdp->layout, first, last, layer, slot->data[ND_SEGMENT_HP], fsdp->act);
}

nd_tensor nd_fsdp_codes(const nd_fsdp *fsdp, nd_param_id id, int64_t layer)
{
    const nd_param *p = nd_layout_param(fsdp->layout, id, layer);
    const nd_weight_slot *slot = nd_fsdp_slot_holding(fsdp, p->unit);
    ND_ASSERT(slot && slot->held && p->segment == ND_SEGMENT_FP8);
    return nd_layout_view(fsdp->layout, id, id, layer, slot->data[ND_SEGMENT_FP8],
                          ND_DTYPE_F8_E4M3);
}

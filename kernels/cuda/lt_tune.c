// SPDX-License-Identifier: Apache-2.0
/* Autotune (cuda_ops.h): the fastest of the library's algorithms for each form, and choices in and
 * out. */
#include <string.h>

#include "kernels/cuda/context.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/lt.h"
#include "runtime/base/clock.h"
#include "runtime/device/cuda_check.h"

enum { REPEATS = 5, MOST_REPEATS = 16 };

static nd_lt *lt_of(const nd_device *device)
{
    return nd_cuda_context_of(device)->lt;
}

void nd_ops_cuda_tune(nd_device *device, int candidates, double seconds)
{
    nd_lt *lt = lt_of(device);
    lt->candidates = candidates > ND_LT_CANDIDATES ? ND_LT_CANDIDATES : candidates;
    lt->deadline = nd_clock_seconds() + seconds;
    for (int i = 0; i < ND_LT_PLANS; i++) {
        lt->plans[i].touched = false;
    }
}

typedef struct candidate {
    nd_lt *lt;
    nd_lt_plan *plan;
    const nd_lt_operands *x;
} candidate;

static nd_status run_candidate(void *context, nd_stream *stream)
{
    candidate *c = context;
    return nd_lt_run(c->lt, stream, c->plan, c->x);
}

/* An algorithm that a record could not restore must not be chosen. *workspace: what the library
 * asks for, which a replay compares. */
static bool can_be_replayed(nd_lt *lt, nd_lt_plan *plan,
                            const cublasLtMatmulHeuristicResult_t *proposed, size_t *workspace)
{
    cublasLtMatmulHeuristicResult_t result = {0};
    cublasStatus_t status = lt->library.check(lt->handle, &plan->desc, &plan->a, &plan->b, &plan->d,
                                              &plan->d, &proposed->algo, &result);
    *workspace = result.workspaceSize;
    return status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= ND_LT_WORKSPACE;
}

nd_status nd_lt_choose(nd_lt *lt, nd_stream *stream, nd_lt_plan *plan, const nd_lt_operands *x,
                       const cublasLtMatmulHeuristicResult_t *results, int found)
{
    candidate c = {lt, plan, x};
    double seconds = 0.0;
    int best = -1;
    for (int i = 0; i < found && nd_clock_seconds() < lt->deadline; i++) {
        plan->algorithm = results[i].algo;
        if (!can_be_replayed(lt, plan, &results[i], &plan->workspace)) {
            continue;
        }
        if (nd_ops_cuda_median(stream, run_candidate, &c, REPEATS, &seconds) != ND_OK) {
            nd_error_clear(); /* this GPU cannot run it; a broken device fails again below */
            continue;
        }
        plan->candidates++;
        plan->first_seconds = i == 0 ? seconds : plan->first_seconds;
        best = best < 0 || seconds < plan->seconds ? i : best;
        plan->seconds = best == i ? seconds : plan->seconds;
    }
    plan->picked = best < 0 ? 0 : best;
    plan->algorithm = results[plan->picked].algo;
    plan->chosen = can_be_replayed(lt, plan, &results[plan->picked], &plan->workspace);
    if (!plan->chosen) {
        plan->workspace = results[0].workspaceSize;
    }
    return nd_stream_sync(stream);
}

nd_status nd_ops_cuda_median(nd_stream *stream, nd_status (*call)(void *context, nd_stream *stream),
                             void *context, int repeats, double *seconds)
{
    cudaEvent_t events[2 * MOST_REPEATS] = {0};
    float ms[MOST_REPEATS];
    cudaError_t error = cudaSuccess;
    ND_ASSERT(repeats > 0 && repeats <= MOST_REPEATS);
    nd_status status = call(context, stream); /* warm */
    for (int i = 0; i < 2 * repeats && status == ND_OK && error == cudaSuccess; i++) {
        error = cudaEventCreate(&events[i]);
        error = error == cudaSuccess ? cudaEventRecord(events[i], nd_cuda_stream(stream)) : error;
        if (error == cudaSuccess && i % 2 == 0) {
            status = call(context, stream);
        }
    }
    status = status == ND_OK && error == cudaSuccess ? nd_stream_sync(stream) : status;
    for (int i = 0; i < repeats && status == ND_OK && error == cudaSuccess; i++) {
        error = cudaEventElapsedTime(&ms[i], events[2 * i], events[2 * i + 1]);
        for (int j = i; j > 0 && ms[j] < ms[j - 1]; j--) {
            float swap = ms[j];
            ms[j] = ms[j - 1];
            ms[j - 1] = swap;
        }
    }
    for (int i = 0; i < 2 * repeats && events[i]; i++) {
        cudaEventDestroy(events[i]);
    }
    if (status == ND_OK && error != cudaSuccess) {
        return nd_cuda_failed(stream->device, error, "an event that times");
    }
    ND_TRY(status);
    *seconds = (double)ms[repeats / 2] * 1e-3;
    return ND_OK;
}

int nd_ops_cuda_choices(const nd_device *device, nd_lt_choice out[ND_LT_PLANS])
{
    const nd_lt *lt = lt_of(device);
    int count = 0;
    for (int number = 0; number < lt->plan_count; number++) {
        for (int i = 0; i < ND_LT_PLANS; i++) {
            const nd_lt_plan *p = &lt->plans[i];
            if (!p->used || !p->chosen || !p->touched || p->number != number) {
                continue;
            }
            nd_lt_choice choice = {
                .key = p->key,
                .workspace = (int64_t)p->workspace,
                .candidates = p->candidates,
                .picked = p->picked,
                .seconds = p->seconds,
                .first_seconds = p->first_seconds,
                .traits = nd_lt_traits_of(&lt->library, &p->algorithm),
            };
            memcpy(choice.algorithm, &p->algorithm, sizeof choice.algorithm);
            out[count++] = choice;
        }
    }
    return count;
}

nd_status nd_ops_cuda_install(nd_device *device, const nd_lt_choice *choices, int count)
{
    nd_lt *lt = lt_of(device);
    memset(lt->plans, 0, sizeof lt->plans);
    lt->plan_count = 0;
    lt->candidates = 1;
    lt->installed = true;
    for (int i = 0; i < count && i < ND_LT_PLANS - 1; i++) {
        nd_lt_plan *plan = nd_lt_slot(lt, &choices[i].key);
        if (plan->used) {
            return nd_fail(ND_ERR_DATA, "choice %d of autotune is for the form of an earlier one",
                           i);
        }
        ND_TRY(nd_lt_plan_restore(lt, &choices[i], plan));
        plan->number = lt->plan_count++;
    }
    return ND_OK;
}

int nd_ops_cuda_unchosen(const nd_device *device)
{
    const nd_lt *lt = lt_of(device);
    int count = 0;
    for (int i = 0; i < ND_LT_PLANS && lt->installed; i++) {
        count += lt->plans[i].used && !lt->plans[i].refused && !lt->plans[i].chosen;
    }
    return count;
}

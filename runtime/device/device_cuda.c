// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/cuda.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "runtime/base/clock.h"
#include "runtime/base/math.h"
#include "runtime/device/cuda_check.h"
#include "runtime/device/cuda_recent_ops.h"
#ifdef ND_HAVE_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

/* For the work that is enqueued while the host does not wait: at most some thousand kernels. */
static const double PATIENCE_SECONDS = 3600;

/* By how much a sleep may last longer; Linux usually adds 50 us, as much as the sleeps here. */
static const unsigned long TIMER_SLACK_NS = 1000;

/* The ops that a device enqueued last. */

static void format_recent_ops(const nd_device *device, char *text, size_t size)
{
    const nd_cuda_recent_ops *recent = &nd_cuda_device_of(device)->recent_ops;
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < ND_CUDA_RECENT_OPS && used < size; i++) {
        const char *op = recent->ops[(recent->next + i) % ND_CUDA_RECENT_OPS];
        if (op) {
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", op);
        }
    }
}

/* Faults that the program does not cause: their status, and what to do. */
typedef struct known_fault {
    cudaError_t error;
    nd_status status;
    const char *fix;
} known_fault;

static const known_fault known_faults[] = {
    {cudaErrorMemoryAllocation, ND_ERR_RESOURCE,
     "device memory outside the plan is used up; use recompute, a smaller micro batch, a shorter "
     "sequence or more shards"},
    {cudaErrorDevicesUnavailable, ND_ERR_RESOURCE,
     "another process has this GPU for itself, or its compute mode admits none (nvidia-smi -q -d "
     "COMPUTE)"},
    {cudaErrorNoKernelImageForDevice, ND_ERR_CONFIG,
     "this program was built for other GPUs; build it on this machine, or with "
     "-Dgpu_architectures"},
    {cudaErrorSystemNotReady, ND_ERR_CONFIG,
     "GPUs behind NVSwitch need the fabric manager; start it (systemctl start "
     "nvidia-fabricmanager)"},
    {cudaErrorSystemDriverMismatch, ND_ERR_CONFIG,
     "the driver's module and its libraries are of different versions; restart the machine after "
     "an update of the driver"},
    {cudaErrorCompatNotSupportedOnDevice, ND_ERR_CONFIG,
     "the CUDA compatibility package does not support this GPU; take it out of LD_LIBRARY_PATH"},
    {cudaErrorECCUncorrectable, ND_ERR_INTERNAL,
     "the GPU's memory has a fault that cannot be corrected; choose another GPU (nvidia-smi -q -d "
     "ECC)"},
    {cudaErrorNvlinkUncorrectable, ND_ERR_INTERNAL,
     "an NVLink has a fault that cannot be corrected; choose another GPU (nvidia-smi nvlink -e)"},
};

nd_status nd_cuda_failed(const nd_device *device, cudaError_t error, const char *call)
{
    char ops[1024] = "", left[64] = "";
    size_t free_bytes = 0, total = 0;
    const char *name = cudaGetErrorName(error), *meaning = cudaGetErrorString(error);
    const known_fault *known = NULL;
    for (size_t i = 0; i < sizeof known_faults / sizeof *known_faults; i++) {
        known = known_faults[i].error == error ? &known_faults[i] : known;
    }
    cudaGetLastError(); /* clears a fault that is not sticky, so that it is reported once */
    if (error == cudaErrorMemoryAllocation && cudaMemGetInfo(&free_bytes, &total) == cudaSuccess) {
        snprintf(left, sizeof left, ", %.2f of %.2f GiB are free", (double)free_bytes / nd_gib,
                 (double)total / nd_gib);
    }
    bool of_cuda = device && device->kind == ND_DEVICE_CUDA;
    if (!known && of_cuda && !nd_cuda_device_of(device)->sync_each_op) {
        format_recent_ops(device, ops, sizeof ops);
    }
    return nd_fail(known ? known->status : ND_ERR_INTERNAL,
                   "CUDA error %d (%s: %s) from %.120s on %s%s%s%s%s%s%s", (int)error, name,
                   meaning, call, device ? device->name : "the GPU", left, known ? "; " : "",
                   known ? known->fix : "", ops[0] ? ", after the ops " : "", ops,
                   ops[0] ? "; the fault may be of any of them, ND_CUDA_SYNC=1 finds which" : "");
}

static void append_op(nd_cuda_recent_ops *recent, const char *op)
{
    const char *end = ", ...)";
    size_t used = strlen(recent->captured), needed = strlen(op) + 2;
    if (used + needed + strlen(end) < sizeof recent->captured) {
        snprintf(recent->captured + used, sizeof recent->captured - used, "%s%s",
                 recent->captured_ops == 0 ? " (" : ", ", op);
        recent->captured_ops++;
    } else if (recent->captured[used - 1] != '.') {
        snprintf(recent->captured + used, sizeof recent->captured - used, ", ...");
    }
}

/* Remembers that `op` was enqueued. False while a graph is captured: then the op has not run. */
static bool note_op(nd_device *device, const char *op)
{
    nd_cuda_recent_ops *recent = &nd_cuda_device_of(device)->recent_ops;
    if (recent->captures) {
        append_op(recent, op);
        return false;
    }
    recent->ops[recent->next] = op;
    recent->next = (recent->next + 1) % ND_CUDA_RECENT_OPS;
    return true;
}

/* The device. */

/* False when freeing would wait without end (cuda_recent_ops.h). */
static bool frees(const nd_device *device)
{
    return !nd_cuda_device_of(device)->given_up;
}

void nd_cuda_give_up(nd_device *device)
{
    nd_cuda_device_of(device)->given_up = true;
}

static void cuda_free(nd_device *device, void *p, size_t bytes)
{
    if (frees(device)) {
        cudaFree(p);
    }
}

static void cuda_close(nd_device *device)
{
    if (device->native_close && frees(device)) {
        device->native_close(device->native);
    }
    free(nd_cuda_device_of(device));
}

/* The host waits for a stream, or for an event (the other is NULL). A fault is reported as one of
 * `call`. */
static nd_status wait_for(nd_device *device, cudaStream_t stream, cudaEvent_t event,
                          const char *call)
{
    int64_t begin = nd_clock_ns();
    for (;;) {
        cudaError_t state = event ? cudaEventQuery(event) : cudaStreamQuery(stream);
        if (state == cudaSuccess) {
            return ND_OK;
        }
        if (state != cudaErrorNotReady) {
            return nd_cuda_failed(device, state, call);
        }
        double seconds = (double)(nd_clock_ns() - begin) * 1e-9;
        nd_status status = ND_OK;
        if (device->while_waiting) { /* a transport has its own deadline */
            status = device->while_waiting(device->waiting_context, seconds);
        } else if (seconds >= nd_cuda_device_of(device)->patience) {
            char ops[1024];
            format_recent_ops(device, ops, sizeof ops);
            status = nd_fail(ND_ERR_HANG,
                             "%s has not ended in %.1f s what was enqueued on it%s%s; see "
                             "nvidia-smi and the kernel's log (Xid)",
                             device->name, seconds, ops[0] ? ", last the ops " : "", ops);
        }
        if (status != ND_OK) {
            nd_cuda_give_up(device);
            return status;
        }
        if (seconds < 0.002) {
            sched_yield();
        } else {
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        }
    }
}

nd_status nd_cuda_op_done(nd_stream *stream, const char *op, cudaError_t launched)
{
    nd_device *device = stream->device;
    bool runs = note_op(device, op);
    if (launched != cudaSuccess) {
        return nd_cuda_failed(device, launched, op);
    }
    bool waits = runs && nd_cuda_device_of(device)->sync_each_op;
    return waits ? wait_for(device, nd_cuda_stream(stream), NULL, op) : ND_OK;
}

/* Graphs. */

static void ops_end(nd_device *device, char out[ND_CUDA_OPS_MAX])
{
    nd_cuda_recent_ops *recent = &nd_cuda_device_of(device)->recent_ops;
    recent->captures = false;
    if (recent->captured_ops > 0) {
        strcat(recent->captured, ")"); /* note_op left room for it */
    }
    memcpy(out, recent->captured, ND_CUDA_OPS_MAX);
}

struct nd_device_graph {
    nd_device *device;
    cudaGraphExec_t executable;
    char ops[ND_CUDA_OPS_MAX];
};

static nd_status cuda_capture_begin(nd_stream *stream, const char *name)
{
    ND_CUDA(stream->device,
            cudaStreamBeginCapture(nd_cuda_stream(stream), cudaStreamCaptureModeThreadLocal));
    nd_cuda_recent_ops *recent = &nd_cuda_device_of(stream->device)->recent_ops;
    recent->captures = true;
    recent->captured_ops = 0;
    snprintf(recent->captured, sizeof recent->captured, "%s", name);
    return ND_OK;
}

static nd_status cuda_capture_end(nd_stream *stream, nd_device_graph **out)
{
    nd_device *device = stream->device;
    cudaGraph_t recorded = NULL;
    nd_device_graph *graph = NULL;
    char ops[ND_CUDA_OPS_MAX];
    ops_end(device, ops);
    ND_CUDA(device, cudaStreamEndCapture(nd_cuda_stream(stream), &recorded));
    nd_status status = ND_ALLOC(1, &graph);
    if (status == ND_OK) {
        cudaError_t error = cudaGraphInstantiate(&graph->executable, recorded, 0);
        graph->device = device;
        memcpy(graph->ops, ops, sizeof ops);
        if (error != cudaSuccess) {
            status = nd_cuda_failed(device, error, "cudaGraphInstantiate");
            free(graph);
        }
    }
    cudaGraphDestroy(recorded);
    if (status == ND_OK) {
        *out = graph;
    }
    return status;
}

static void cuda_capture_cancel(nd_stream *stream)
{
    cudaGraph_t recorded = NULL;
    char ops[ND_CUDA_OPS_MAX];
    ops_end(stream->device, ops);
    cudaStreamEndCapture(nd_cuda_stream(stream), &recorded);
    if (recorded) {
        cudaGraphDestroy(recorded);
    }
    cudaGetLastError(); /* a capture that an illegal call ended reports that error again */
}

static nd_status cuda_graph_launch(nd_device_graph *graph, nd_stream *stream)
{
    cudaError_t launched = cudaGraphLaunch(graph->executable, nd_cuda_stream(stream));
    return nd_cuda_op_done(stream, graph->ops, launched);
}

static void cuda_graph_destroy(nd_device_graph *graph)
{
    nd_cuda_recent_ops *recent = &nd_cuda_device_of(graph->device)->recent_ops;
    for (int i = 0; i < ND_CUDA_RECENT_OPS; i++) { /* the graph's text no longer exists */
        recent->ops[i] = recent->ops[i] == graph->ops ? NULL : recent->ops[i];
    }
    cudaGraphExecDestroy(graph->executable);
    free(graph);
}

/* Zeros before the call returns: a memset of the default stream would not be ordered before the
 * first work of our streams, which do not wait for that one. */
static nd_status clear(nd_device *device, void *p, size_t bytes)
{
    cudaStream_t stream;
    ND_CUDA(device, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaError_t error = cudaMemsetAsync(p, 0, bytes, stream);
    nd_status status = error == cudaSuccess ? wait_for(device, stream, NULL, "zeroing memory")
                                            : nd_cuda_failed(device, error, "cudaMemsetAsync");
    cudaStreamDestroy(stream);
    return status;
}

static nd_status cuda_alloc(nd_device *device, size_t bytes, void **out)
{
    size_t free_bytes = 0, total = 0;
    void *p = NULL;
    ND_CUDA(device, cudaMemGetInfo(&free_bytes, &total));
    cudaError_t error =
        bytes > free_bytes ? cudaErrorMemoryAllocation : cudaMalloc(&p, bytes ? bytes : 1);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError(); /* not sticky: taken back */
        return nd_fail(ND_ERR_RESOURCE,
                       "out of device memory: the plan needs %.2f GiB in one piece, and %.2f of "
                       "%.2f GiB are free on %s; use recompute, a smaller micro batch, a shorter "
                       "sequence or more shards (ndtrain plan shows what each needs)",
                       (double)bytes / nd_gib, (double)free_bytes / nd_gib, (double)total / nd_gib,
                       device->name);
    }
    ND_CUDA(device, error);
    nd_status status = clear(device, p, bytes ? bytes : 1);
    if (status != ND_OK) {
        cuda_free(device, p, bytes);
        return status;
    }
    *out = p;
    return ND_OK;
}

static nd_status cuda_host_alloc(nd_device *device, size_t bytes, void **out)
{
    void *p = NULL;
    cudaError_t error = cudaHostAlloc(&p, bytes ? bytes : 1, cudaHostAllocDefault);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError(); /* not sticky: taken back */
        return nd_fail(ND_ERR_RESOURCE,
                       "out of host memory: %.2f MiB that the GPU copies from cannot be pinned; "
                       "give this machine, container or job more memory",
                       (double)bytes / 1048576.0);
    }
    ND_CUDA(device, error);
    memset(p, 0, bytes);
    *out = p;
    return ND_OK;
}

static void cuda_host_free(nd_device *device, void *p)
{
    if (p && frees(device)) {
        cudaFreeHost(p);
    }
}

static nd_status cuda_copy(nd_stream *stream, void *dst, const void *src, size_t bytes)
{
    if (bytes > 0) {
        ND_CUDA(stream->device,
                cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, nd_cuda_stream(stream)));
    }
    return ND_OK;
}

static nd_status cuda_zero(nd_stream *stream, void *dst, size_t bytes)
{
    if (bytes > 0) {
        ND_CUDA(stream->device, cudaMemsetAsync(dst, 0, bytes, nd_cuda_stream(stream)));
    }
    return ND_OK;
}

static nd_status make_stream(nd_device *device, bool urgent, nd_stream *stream)
{
    int least = 0, greatest = 0;
    cudaStream_t native = NULL;
    ND_CUDA(device, cudaDeviceGetStreamPriorityRange(&least, &greatest));
    ND_CUDA(device, cudaStreamCreateWithPriority(&native, cudaStreamNonBlocking,
                                                 urgent ? greatest : least));
    *stream = (nd_stream){.device = device, .native = native};
    return ND_OK;
}

static nd_status cuda_stream_init(nd_device *device, nd_stream *stream)
{
    return make_stream(device, false, stream);
}

static nd_status cuda_stream_init_urgent(nd_device *device, nd_stream *stream)
{
    return make_stream(device, true, stream);
}

static void cuda_stream_fini(nd_stream *stream)
{
    if (stream->native) {
        cudaStreamDestroy(nd_cuda_stream(stream));
        stream->native = NULL;
    }
}

static nd_status cuda_event_init(nd_device *device, nd_event *event)
{
    cudaEvent_t native = NULL;
    ND_CUDA(device, cudaEventCreateWithFlags(&native, cudaEventDisableTiming));
    *event = (nd_event){.native = native};
    return ND_OK;
}

static void cuda_event_fini(nd_event *event)
{
    if (event->native) {
        cudaEventDestroy((cudaEvent_t)event->native);
        event->native = NULL;
    }
}

static nd_status cuda_event_record(nd_event *event, nd_stream *stream)
{
    ND_CUDA(stream->device, cudaEventRecord((cudaEvent_t)event->native, nd_cuda_stream(stream)));
    return ND_OK;
}

static nd_status cuda_stream_wait(nd_stream *stream, nd_event *event)
{
    if (event->native) {
        ND_CUDA(stream->device,
                cudaStreamWaitEvent(nd_cuda_stream(stream), (cudaEvent_t)event->native, 0));
    }
    return ND_OK;
}

static nd_status cuda_stream_sync(nd_stream *stream)
{
    return wait_for(stream->device, nd_cuda_stream(stream), NULL, "cudaStreamQuery");
}

static nd_status cuda_event_sync(nd_device *device, nd_event *event)
{
    cudaEvent_t native = event->native;
    return native ? wait_for(device, NULL, native, "cudaEventQuery") : ND_OK;
}

static nd_status cuda_event_query(nd_device *device, nd_event *event, bool *done)
{
    cudaError_t state = event->native ? cudaEventQuery((cudaEvent_t)event->native) : cudaSuccess;
    *done = state == cudaSuccess;
    if (state != cudaSuccess && state != cudaErrorNotReady) {
        return nd_fail(ND_ERR_INTERNAL, "%s failed: %s", "cudaEventQuery",
                       cudaGetErrorString(state));
    }
    return ND_OK;
}

#ifdef ND_HAVE_NVTX
static void cuda_range_push(const char *name)
{
    nvtxRangePushA(name);
}

static void cuda_range_pop(void)
{
    nvtxRangePop();
}
#endif

static const nd_device_table cuda_table = {
    .name = "cuda",
    .close = cuda_close,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .host_alloc = cuda_host_alloc,
    .host_free = cuda_host_free,
    .copy = cuda_copy,
    .zero = cuda_zero,
    .stream_init = cuda_stream_init,
    .stream_init_urgent = cuda_stream_init_urgent,
    .stream_fini = cuda_stream_fini,
    .event_init = cuda_event_init,
    .event_fini = cuda_event_fini,
    .event_record = cuda_event_record,
    .stream_wait = cuda_stream_wait,
    .stream_sync = cuda_stream_sync,
    .event_sync = cuda_event_sync,
    .event_query = cuda_event_query,
#ifdef ND_HAVE_NVTX
    .range_push = cuda_range_push,
    .range_pop = cuda_range_pop,
#endif
    .capture_begin = cuda_capture_begin,
    .capture_end = cuda_capture_end,
    .capture_cancel = cuda_capture_cancel,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
};

/* 0: none that loads. */
static int driver_version(void)
{
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return driver;
}

bool nd_cuda_has_driver(void)
{
    return driver_version() > 0;
}

static nd_status no_driver(void)
{
    int driver = driver_version();
    if (driver == 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "device cuda needs an NVIDIA driver and this machine has none that loads "
                       "(libcuda.so.1); install it, or use --device cpu");
    }
    return nd_fail(ND_ERR_CONFIG,
                   "the NVIDIA driver here supports CUDA %d.%d and this program was built with "
                   "%d.%d; install a newer driver, or use --device cpu",
                   driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
                   CUDART_VERSION % 1000 / 10);
}

nd_status nd_cuda_count(int *out)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorInsufficientDriver || error == cudaErrorStubLibrary) {
        cudaGetLastError();
        return no_driver();
    }
    if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        cudaGetLastError();
        return nd_fail(ND_ERR_CONFIG,
                       "device cuda needs a GPU and the driver sees none%s%s%s; use --device cpu",
                       visible ? " (CUDA_VISIBLE_DEVICES is '" : "", visible ? visible : "",
                       visible ? "')" : "");
    }
    ND_CUDA(NULL, error);
    *out = count;
    return ND_OK;
}

static nd_status check_capability(const nd_cuda_options *options, const struct cudaDeviceProp *gpu)
{
    int capability = gpu->major * 10 + gpu->minor;
    if (capability < 80) {
        return nd_fail(ND_ERR_CONFIG,
                       "GPU %d (%s) has compute capability %d.%d; ndtrain needs 8.0 (Ampere) or "
                       "newer; choose another by launch.gpu_ids, or use --device cpu",
                       options->ordinal, gpu->name, gpu->major, gpu->minor);
    }
    if (options->fp8 && capability < 89) {
        return nd_fail(ND_ERR_CONFIG,
                       "GPU %d (%s) has compute capability %d.%d; precision fp8 needs 8.9 (Ada, "
                       "Hopper) or newer; use --precision bf16",
                       options->ordinal, gpu->name, gpu->major, gpu->minor);
    }
    return ND_OK;
}

nd_status nd_device_open_cuda(const nd_cuda_options *options, nd_device **out)
{
    int count = 0;
    struct cudaDeviceProp gpu;
    const char *sync = getenv("ND_CUDA_SYNC");
    ND_TRY(nd_cuda_count(&count));
    if (options->local_workers > count || options->ordinal >= count) {
        return nd_fail(ND_ERR_CONFIG,
                       "%d worker%s of this host need a GPU each, GPU %d among them, and %d %s "
                       "visible; use fewer workers, or set launch.gpu_ids and CUDA_VISIBLE_DEVICES",
                       options->local_workers, options->local_workers == 1 ? "" : "s",
                       options->ordinal, count, count == 1 ? "is" : "are");
    }
    ND_CUDA(NULL, cudaGetDeviceProperties(&gpu, options->ordinal));
    ND_TRY(check_capability(options, &gpu));
    ND_CUDA(NULL, cudaSetDevice(options->ordinal));
    prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0); /* of this thread, which drives the device */
    nd_cuda_device *cuda = NULL;
    ND_TRY(ND_ALLOC(1, &cuda));
    cuda->device.table = &cuda_table;
    cuda->device.kind = ND_DEVICE_CUDA;
    cuda->device.ordinal = options->ordinal;
    cuda->device.threads = 1;
    cuda->patience = PATIENCE_SECONDS;
    cuda->sync_each_op = sync && sync[0] && strcmp(sync, "0") != 0;
    snprintf(cuda->device.name, sizeof cuda->device.name, "%.80s", gpu.name);
    *out = &cuda->device;
    return ND_OK;
}

static void format_id(const struct cudaDeviceProp *gpu, char out[ND_CUDA_ID_MAX])
{
    const unsigned char *u = (const unsigned char *)gpu->uuid.bytes;
    bool known = false;
    int used = snprintf(out, ND_CUDA_ID_MAX, "GPU-");
    for (int i = 0; i < 16; i++) {
        known |= u[i] != 0;
        used += snprintf(out + used, ND_CUDA_ID_MAX - (size_t)used, "%02x%s", u[i],
                         i == 3 || i == 5 || i == 7 || i == 9 ? "-" : "");
    }
    out[0] = known ? out[0] : '\0';
}

nd_status nd_cuda_info_of(nd_device *device, nd_cuda_info *out)
{
    struct cudaDeviceProp gpu;
    nd_cuda_info info = {0};
    ND_ASSERT(device->kind == ND_DEVICE_CUDA);
    ND_CUDA(device, cudaGetDeviceProperties(&gpu, device->ordinal));
    ND_CUDA(device, cudaMemGetInfo(&info.free_bytes, &info.total_bytes));
    ND_CUDA(device, cudaDriverGetVersion(&info.driver));
    ND_CUDA(device, cudaRuntimeGetVersion(&info.runtime));
    info.major = gpu.major;
    info.minor = gpu.minor;
    info.processors = gpu.multiProcessorCount;
    format_id(&gpu, info.id);
    *out = info;
    return ND_OK;
}

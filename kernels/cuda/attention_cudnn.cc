// SPDX-License-Identifier: Apache-2.0
/* The headers of this project are C. */
extern "C" {
#include "kernels/cuda/attention_cudnn.h"
#include "runtime/device/cuda_library.h"
}

#include <cuda_runtime_api.h>
#include <cudnn_frontend.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cudnn_frontend {
void *cudnn_dlhandle = nullptr; /* where the frontend looks for cuDNN's functions */
}

namespace fe = cudnn_frontend;
using fe::graph::Graph;
using fe::graph::Tensor_attributes;

/* Below 9.6 a mask whose diagonal ends at the last key needs lengths of multiples of 64. */
enum { OLDEST = 90600 };
/* NVIDIA names these two as having bugs in attention (cudnn-frontend, sdpa_support_surface.h). */
enum { BROKEN_FROM = 91000, BROKEN_TO = 91001 };
enum uid : int64_t { Q = 1, K, V, OUT, STATS, DOUT, DQ, DK, DV, ROWS_Q, ROWS_KV, STARTS };

static_assert(std::has_unique_object_representations_v<nd_sdpa_strides>, "no padding");

/* FNV-1a over 8 bytes at a time. */
struct hash_of_form {
    size_t operator()(const nd_sdpa_form &form) const
    {
        uint64_t words[sizeof form / 8], hash = 14695981039346656037u;
        static_assert(sizeof words == sizeof form, "whole words");
        std::memcpy(words, &form, sizeof form);
        for (uint64_t word : words) {
            hash = (hash ^ word) * 1099511628211u;
            hash ^= hash >> 32;
        }
        return hash;
    }
};

struct same_form {
    bool operator()(const nd_sdpa_form &a, const nd_sdpa_form &b) const
    {
        return std::memcmp(&a, &b, sizeof a) == 0;
    }
};

struct plan {
    std::shared_ptr<Graph> graph;
    std::unordered_map<int64_t, void *> pointers; /* filled anew for each call */
    int64_t workspace = 0;
};

struct nd_cudnn {
    nd_device *device;
    int capability;
    cudnnHandle_t handle = nullptr;
    std::shared_ptr<fe::DeviceProperties> description;
    std::unordered_map<nd_sdpa_form, plan, hash_of_form, same_form> plans;
};

static nd_status failed(const char *call, const std::string &message)
{
    return nd_fail(ND_ERR_INTERNAL, "cuDNN attention, %s: %.900s", call, message.c_str());
}

#define ND_CUDNN(call_)                                                                            \
    do {                                                                                           \
        auto nd_cudnn_error_ = (call_);                                                            \
        if (nd_cudnn_error_.is_bad()) {                                                            \
            return failed(#call_, nd_cudnn_error_.get_message());                                  \
        }                                                                                          \
    } while (0)

/* cuDNN asks the loader for NVRTC and cuBLASLt by their bare names. */
static void load_what_cudnn_needs(void)
{
    char nvrtc[32], cublaslt[32];
    snprintf(nvrtc, sizeof nvrtc, "libnvrtc.so.%d", CUDART_VERSION / 1000);
    snprintf(cublaslt, sizeof cublaslt, "libcublasLt.so.%d", CUDART_VERSION / 1000);
    nd_cuda_library_preload(nvrtc, "libnvrtc-builtins.so.*");
    nd_cuda_library_preload(cublaslt, nullptr);
}

static nd_status check_version(size_t version)
{
    if (version < OLDEST) {
        return nd_fail(ND_ERR_CONFIG,
                       "cuDNN here is version %zu and device cuda needs %d or newer; install a "
                       "newer cuDNN 9",
                       version, (int)OLDEST);
    }
    if (version >= BROKEN_FROM && version <= BROKEN_TO) {
        return nd_fail(ND_ERR_CONFIG,
                       "cuDNN here is version 9.10.%zu, whose attention has known bugs (9.10.0 and "
                       "9.10.1); install cuDNN 9.10.2 or newer",
                       version - BROKEN_FROM);
    }
    return ND_OK;
}

static nd_status open_library(void)
{
    static const char *const names[] = {"libcudnn.so.9", nullptr};
    load_what_cudnn_needs();
    ND_TRY(nd_cuda_library_load("cuDNN", names, true, &fe::cudnn_dlhandle));
    return check_version(fe::detail::get_backend_version());
}

static nd_status describe_device(nd_cudnn *cudnn, const char *description)
{
    std::vector<uint8_t> bytes(description, description + std::strlen(description));
    cudnn->description = std::make_shared<fe::DeviceProperties>();
    ND_CUDNN(cudnn->description->deserialize(bytes));
    return ND_OK;
}

extern "C" nd_status nd_cudnn_create(nd_device *device, int capability, const char *description,
                                     nd_cudnn **out)
{
    ND_TRY(open_library());
    nd_cudnn *cudnn = new (std::nothrow) nd_cudnn{};
    if (!cudnn) {
        return nd_fail_memory("the plans of cuDNN");
    }
    cudnn->device = device;
    cudnn->capability = capability;
    nd_status status = ND_OK;
    if (device) {
        cudnnStatus_t created = fe::detail::create_handle(&cudnn->handle);
        if (created != CUDNN_STATUS_SUCCESS) {
            status = failed("cudnnCreate", fe::detail::get_error_string(created));
        }
    } else {
        status = describe_device(cudnn, description);
    }
    if (status != ND_OK) {
        nd_cudnn_destroy(cudnn);
        return status;
    }
    *out = cudnn;
    return ND_OK;
}

extern "C" void nd_cudnn_destroy(nd_cudnn *cudnn)
{
    if (cudnn) {
        cudnn->plans.clear();
        if (cudnn->handle) {
            fe::detail::destroy_handle(cudnn->handle);
        }
        delete cudnn;
    }
}

extern "C" bool nd_cudnn_is_built(void)
{
    return true;
}

extern "C" size_t nd_cudnn_version(const nd_cudnn *cudnn)
{
    return fe::detail::get_backend_version();
}

/* (B, heads, rows, D) as cuDNN orders the axes. */
static Tensor_attributes tensor(const nd_sdpa_form &f, const char *name, int64_t id, int64_t heads,
                                int64_t rows, const nd_sdpa_strides &s)
{
    return Tensor_attributes()
        .set_name(name)
        .set_uid(id)
        .set_dim({f.batch, heads, rows, f.head_dim})
        .set_stride({s.batch, s.head, s.row, 1});
}

static Tensor_attributes statistics(const nd_sdpa_form &f)
{
    return Tensor_attributes()
        .set_name("stats")
        .set_uid(STATS)
        .set_dim({f.batch, f.heads, f.sq, 1})
        .set_stride({f.heads * f.sq, f.tokens > 0 ? 1 : f.sq, f.tokens > 0 ? f.heads : 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
}

using handle = std::shared_ptr<Tensor_attributes>;

/* Tensors that say where documents lie; empty where the batch is a usual one. */
struct documents {
    handle rows_q, rows_kv, starts[ND_RAGGED_KINDS];

    documents(Graph &graph, const nd_sdpa_form &f)
    {
        const auto numbers = [&](int64_t id, int64_t count, fe::DataType_t type) {
            return graph.tensor(Tensor_attributes()
                                    .set_name("documents")
                                    .set_uid(id)
                                    .set_dim({count, 1, 1, 1})
                                    .set_stride({1, 1, 1, 1})
                                    .set_data_type(type));
        };
        if (f.tokens > 0) {
            rows_q = numbers(ROWS_Q, f.batch, fe::DataType_t::INT32);
            rows_kv = numbers(ROWS_KV, f.batch, fe::DataType_t::INT32);
            for (int i = 0; i < (f.backward ? ND_RAGGED_KINDS : ND_RAGGED_DOUT); i++) {
                starts[i] = numbers(STARTS + i, f.batch + 1, fe::DataType_t::INT64);
            }
        }
    }

    Tensor_attributes of(Tensor_attributes t, nd_sdpa_ragged kind) const
    {
        return starts[kind] ? t.set_ragged_offset(starts[kind]) : t;
    }

    template <typename Options> void set_lengths(Options &options) const
    {
        if (rows_q) {
            options.set_padding_mask(true).set_seq_len_q(rows_q).set_seq_len_kv(rows_kv);
        }
    }
};

template <typename Options> static void set_mask(Options &options, const nd_sdpa_form &f)
{
    if (f.mask != ND_SDPA_ALL) {
        options.set_diagonal_alignment(f.mask == ND_SDPA_TOP_LEFT
                                           ? fe::DiagonalAlignment_t::TOP_LEFT
                                           : fe::DiagonalAlignment_t::BOTTOM_RIGHT);
        options.set_diagonal_band_right_bound(0);
        if (f.window > 0) {
            options.set_diagonal_band_left_bound(f.window);
        }
    }
}

static void finish_output(const std::shared_ptr<Tensor_attributes> &t, Tensor_attributes as)
{
    t->set_output(true).set_uid(as.get_uid()).set_dim(as.get_dim()).set_stride(as.get_stride());
    t->set_ragged_offset(as.get_ragged_offset());
}

static void make_forward(Graph &graph, const nd_sdpa_form &f)
{
    const documents d(graph, f);
    auto q = graph.tensor(d.of(tensor(f, "q", Q, f.heads, f.sq, f.q), ND_RAGGED_Q));
    auto k = graph.tensor(d.of(tensor(f, "k", K, f.kv_heads, f.sk, f.k), ND_RAGGED_KV));
    auto v = graph.tensor(d.of(tensor(f, "v", V, f.kv_heads, f.sk, f.v), ND_RAGGED_KV));
    auto options = fe::graph::SDPA_attributes().set_name("forward").set_generate_stats(true);
    options.set_attn_scale(f.scale);
    set_mask(options, f);
    d.set_lengths(options);
    auto [out, stats] = graph.sdpa(q, k, v, options);
    finish_output(out, d.of(tensor(f, "out", OUT, f.heads, f.sq, f.out), ND_RAGGED_OUT));
    finish_output(stats, d.of(statistics(f), ND_RAGGED_STATS));
    stats->set_data_type(fe::DataType_t::FLOAT);
}

static void make_backward(Graph &graph, const nd_sdpa_form &f)
{
    const documents d(graph, f);
    auto q = graph.tensor(d.of(tensor(f, "q", Q, f.heads, f.sq, f.q), ND_RAGGED_Q));
    auto k = graph.tensor(d.of(tensor(f, "k", K, f.kv_heads, f.sk, f.k), ND_RAGGED_KV));
    auto v = graph.tensor(d.of(tensor(f, "v", V, f.kv_heads, f.sk, f.v), ND_RAGGED_KV));
    auto out = graph.tensor(d.of(tensor(f, "out", OUT, f.heads, f.sq, f.out), ND_RAGGED_OUT));
    auto dout = graph.tensor(d.of(tensor(f, "dout", DOUT, f.heads, f.sq, f.dout), ND_RAGGED_DOUT));
    auto stats = graph.tensor(d.of(statistics(f), ND_RAGGED_STATS));
    auto options = fe::graph::SDPA_backward_attributes().set_name("backward");
    options.set_attn_scale(f.scale);
    options.set_deterministic_algorithm(f.deterministic != 0);
    set_mask(options, f);
    d.set_lengths(options);
    if (f.tokens > 0) { /* or the workspace would be that of `batch` segments of `sq` rows */
        options.set_max_total_seq_len_q(f.tokens).set_max_total_seq_len_kv(f.key_tokens);
    }
    auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, stats, options);
    finish_output(dq, d.of(tensor(f, "dq", DQ, f.heads, f.sq, f.dq), ND_RAGGED_DQ));
    finish_output(dk, d.of(tensor(f, "dk", DK, f.kv_heads, f.sk, f.dk), ND_RAGGED_DKV));
    finish_output(dv, d.of(tensor(f, "dv", DV, f.kv_heads, f.sk, f.dv), ND_RAGGED_DKV));
}

static nd_status build(nd_cudnn *cudnn, const nd_sdpa_form &form, plan &p)
{
    p.graph = std::make_shared<Graph>();
    Graph &graph = *p.graph;
    graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    /* Without this the frontend asks the GPU through a libcudart.so that it opens itself; ours is
     * linked in. */
    graph.set_sm_version(cudnn->capability);
    if (!cudnn->handle) {
        graph.set_device_properties(cudnn->description);
    }
    if (form.backward) {
        make_backward(graph, form);
    } else {
        make_forward(graph, form);
    }
    ND_CUDNN(graph.validate());
    if (cudnn->handle) {
        ND_CUDNN(graph.build_operation_graph(cudnn->handle));
    } else {
        ND_CUDNN(graph.build_operation_graph());
    }
    ND_CUDNN(graph.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}));
    ND_CUDNN(graph.check_support());
    ND_CUDNN(graph.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE));
    ND_CUDNN(graph.get_workspace_size(p.workspace));
    return ND_OK;
}

static nd_status find_plan(nd_cudnn *cudnn, const nd_sdpa_form *form, plan **out)
{
    auto known = cudnn->plans.find(*form);
    if (known != cudnn->plans.end()) {
        *out = &known->second;
        return ND_OK;
    }
    plan made;
    nd_status status = build(cudnn, *form, made);
    if (status != ND_OK) {
        return nd_fail_context(
            status,
            "planning %s of batch %lld, %lld queries, %lld keys, %lld heads, %lld KV heads, heads "
            "of %lld, cuDNN %zu",
            form->backward ? "the backward" : "the forward", (long long)form->batch,
            (long long)form->sq, (long long)form->sk, (long long)form->heads,
            (long long)form->kv_heads, (long long)form->head_dim, nd_cudnn_version(cudnn));
    }
    *out = &cudnn->plans.emplace(*form, std::move(made)).first->second;
    return ND_OK;
}

/* The interface is C: no C++ type leaves this file. */
template <typename Body> static nd_status guarded(Body body)
{
    try {
        return body();
    } catch (const std::exception &e) {
        return failed("an exception", e.what());
    }
}

extern "C" nd_status nd_cudnn_workspace(nd_cudnn *cudnn, const nd_sdpa_form *form, size_t *out)
{
    return guarded([&]() -> nd_status {
        plan *p = nullptr;
        ND_TRY(find_plan(cudnn, form, &p));
        *out = (size_t)p->workspace;
        return ND_OK;
    });
}

extern "C" int64_t nd_cudnn_plan_count(const nd_cudnn *cudnn)
{
    return (int64_t)cudnn->plans.size();
}

extern "C" nd_status nd_cudnn_run(nd_cudnn *cudnn, nd_stream *stream, const nd_sdpa_form *form,
                                  const nd_sdpa_tensors *t)
{
    return guarded([&]() -> nd_status {
        plan *p = nullptr;
        ND_TRY(find_plan(cudnn, form, &p));
        auto &at = p->pointers;
        at[Q] = const_cast<void *>(t->q);
        at[K] = const_cast<void *>(t->k);
        at[V] = const_cast<void *>(t->v);
        at[OUT] = t->out;
        at[STATS] = t->stats;
        if (form->backward) {
            at[DOUT] = const_cast<void *>(t->dout);
            at[DQ] = t->dq;
            at[DK] = t->dk;
            at[DV] = t->dv;
        }
        if (form->tokens > 0) {
            at[ROWS_Q] = const_cast<int32_t *>(t->rows);
            at[ROWS_KV] = const_cast<int32_t *>(t->keys);
            for (int i = 0; i < ND_RAGGED_KINDS; i++) {
                at[STARTS + i] = const_cast<int64_t *>(t->starts[i]);
            }
        }
        cudnnStatus_t set = fe::detail::set_stream(cudnn->handle, (cudaStream_t)stream->native);
        if (set != CUDNN_STATUS_SUCCESS) {
            return failed("cudnnSetStream", fe::detail::get_error_string(set));
        }
        ND_CUDNN(p->graph->execute(cudnn->handle, at, t->workspace));
        return ND_OK;
    });
}

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_ATTENTION_CUDNN_H
#define ND_CUDA_ATTENTION_CUDNN_H
/*
 * Scaled dot-product attention of cuDNN behind a C interface: BF16, forward with LSE and backward,
 * one plan per form, kept once it was made. libcudnn is opened at run time. attention_cudnn.cc is
 * the only C++ of the host side.
 *
 * A plan costs about a second to build, so a run makes its plans before step 1. Building needs no
 * GPU when a description of one is given.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nd_cudnn nd_cudnn;

typedef enum nd_sdpa_mask {
    ND_SDPA_ALL = 0,      /* every query sees every key */
    ND_SDPA_TOP_LEFT,     /* query i sees keys 0..i */
    ND_SDPA_BOTTOM_RIGHT, /* query i sees keys 0..i + sk - sq; sq <= sk */
} nd_sdpa_mask;

/* Strides in elements of the axes (batch, sequence, head); the last axis is contiguous. */
typedef struct nd_sdpa_strides {
    int64_t batch, row, head;
} nd_sdpa_strides;

/*
 * The form of a call that a plan is made for. Forms are compared by bytes: zero one first.
 * Statistics are F32 (B, H, Sq), packed: for other strides cuDNN has plans only since 9.26.
 *
 * tokens > 0: the batch is segments of documents, of at most sq rows and sk keys, which lie
 * anywhere in tensors of so many tokens and key_tokens (cuDNN's ragged tensors). nd_sdpa_tensors
 * says where and how long they are when the call runs, and the mask's diagonal is that of each;
 * statistics are F32 (tokens, H), k and v have the same strides, dk and dv too, and strides of the
 * batch mean nothing. What lies between segments is not read into any result, but results there may
 * be overwritten.
 */
typedef struct nd_sdpa_form {
    int64_t batch, sq, sk, heads, kv_heads, head_dim;
    nd_sdpa_strides q, k, v, out, dout, dq, dk, dv; /* forward: the first four */
    /* A query sees the last `window` of the keys that the mask leaves; 0: all of them. */
    int64_t window;
    float scale;
    int32_t mask; /* nd_sdpa_mask */
    int32_t backward, deterministic;
    int64_t tokens, key_tokens;
} nd_sdpa_form;

/* Tensors whose segments begin at the same elements. The first four are those of the forward. */
typedef enum nd_sdpa_ragged {
    ND_RAGGED_Q = 0,
    ND_RAGGED_KV,
    ND_RAGGED_OUT,
    ND_RAGGED_STATS,
    ND_RAGGED_DOUT,
    ND_RAGGED_DQ,
    ND_RAGGED_DKV,
    ND_RAGGED_KINDS
} nd_sdpa_ragged;

/* Device pointers, aligned to 16 bytes. Forward writes out and stats; backward reads them and
 * writes dq, dk, dv. */
typedef struct nd_sdpa_tensors {
    const void *q, *k, *v;
    void *out;
    float *stats;
    const void *dout;
    void *dq, *dk, *dv;
    void *workspace;
    /* On the device, of segments alone: the rows and the keys of each (batch), 0 where there is
     * none, and where the elements of each kind begin (batch + 1), ascending, with the tensor's end
     * last. */
    const int32_t *rows, *keys;
    const int64_t *starts[ND_RAGGED_KINDS];
} nd_sdpa_tensors;

/*
 * ND_ERR_CONFIG when the library is missing or too old, or when this program was built without
 * cudnn-frontend. device NULL: only builds plans, for the GPU that `description` describes (cuDNN's
 * JSON, see docs/cuda.md).
 */
nd_status nd_cudnn_create(nd_device *device, int capability, const char *description,
                          nd_cudnn **out);
/* True if this program was built with cudnn-frontend. */
bool nd_cudnn_is_built(void);
void nd_cudnn_destroy(nd_cudnn *cudnn); /* NULL is legal */
/* 91900: 9.19.0. */
size_t nd_cudnn_version(const nd_cudnn *cudnn);

/* Bytes that a call of this form needs; builds its plan where there is none yet. */
nd_status nd_cudnn_workspace(nd_cudnn *cudnn, const nd_sdpa_form *form, size_t *out);
nd_status nd_cudnn_run(nd_cudnn *cudnn, nd_stream *stream, const nd_sdpa_form *form,
                       const nd_sdpa_tensors *tensors);
/* Plans built so far. */
int64_t nd_cudnn_plan_count(const nd_cudnn *cudnn);

#ifdef __cplusplus
}
#endif
#endif

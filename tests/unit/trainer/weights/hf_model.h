// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_UNIT_TRAINER_CKPT_HF_MODEL_H
#define TESTS_UNIT_TRAINER_CKPT_HF_MODEL_H
/* A small model as a folder of Hugging Face's, for the tests of its writer and its reader. */
#include "tests/support/shell.h"
#include "trainer/weights/gguf.h"
#include "trainer/weights/weights.h"

enum { HF_TENSORS_MAX = 64 };

typedef struct hf_tensor {
    char name[ND_PARAM_NAME];
    int axes;
    int64_t shape[2];
} hf_tensor;

extern tempdir hf_dir;                       /* the test's folder */
extern hf_tensor hf_tensors[HF_TENSORS_MAX]; /* after hf_list_tensors or hf_write_model */
extern int hf_tensor_count;

/* Makes and removes the folder of a test suite. */
void hf_setup(void);
void hf_teardown(void);
/* No file is open that was not when the folder was made. */
void hf_expect_closed(void);
/* A command in the test's folder, which must succeed. */
#define hf_shell(...) shell(&hf_dir, shell_line(__VA_ARGS__))

nd_hf_writer_options hf_options_of(bool tied, nd_dtype dtype);
void hf_list_tensors(const nd_shape *shape);
int64_t hf_count_of(const hf_tensor *t);
/* Returns the value of an element of one of the model's tensors. */
float hf_value_of(int tensor, int64_t element);
/* Elements [begin, end) of tensor i, at most 65,536. */
nd_status hf_write_piece(nd_hf_writer *writer, int i, int64_t begin, int64_t end);
/* Makes a writer of hf_dir/name, with all tensors written and no commit; returns the path. */
const char *hf_begin_model(const char *name, const nd_hf_writer_options *options,
                           nd_hf_writer **writer);
/* The whole model into hf_dir/name; returns the path, valid until the next tempdir_file. */
const char *hf_write_model(const char *name, const nd_hf_writer_options *options);
/* The file hf_dir/name of values of this type that are so many times those of the model. */
nd_status hf_write_gguf(const char *name, nd_shape shape, int type, float scale);

#endif

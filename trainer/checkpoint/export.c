// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/export.h"

#include <stdlib.h>

#include "runtime/base/math.h"
#include "trainer/checkpoint/tensors.h"
#include "trainer/corpus/chat.h"
#include "trainer/weights/weights.h"

static nd_status write_part(void *context, const nd_tensor_part *part)
{
    const nd_param *p = part->param;
    int64_t n = 0;
    for (int64_t done = 0; done < part->count; done += n) {
        const int64_t at = part->begin + done;
        n = nd_min(part->count - done, nd_param_adjacent(p, at));
        ND_TRY(nd_hf_writer_write(context, p->file_name, nd_param_in_file(p, at), n,
                                  part->values[0] + done));
    }
    return ND_OK;
}

static nd_status open_writer(const char *folder, const nd_manifest *manifest,
                             const nd_export_options *options, const nd_layout *layout,
                             nd_hf_writer **out)
{
    const char *chat = nd_manifest_pairs_find(&manifest->config, "data.chat_format");
    const nd_hf_writer_options writer = {.shape = manifest->shape,
                                         .dtype = options->dtype,
                                         .byte_tokenizer = options->byte_tokenizer,
                                         .source = options->source,
                                         .tokenizer = options->tokenizer,
                                         .chat = nd_chat_choice_of(chat),
                                         .takes_empty = true,
                                         .inside = !options->out};
    nd_hf_tensor *tensors = NULL;
    int count = 0;
    ND_TRY(nd_hf_tensors_of(layout, &tensors, &count));
    nd_status status =
        nd_hf_writer_open(options->out ? options->out : folder, &writer, tensors, count, out);
    free(tensors);
    return status;
}

nd_status nd_checkpoint_export(const char *folder, const nd_manifest *manifest,
                               const nd_export_options *options)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    nd_layout *layout = NULL;
    nd_source *source = NULL;
    nd_hf_writer *writer = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_manifest_layout(manifest, &one, (nd_coord){{0}}, &layout));
    ND_TRY_OUT(nd_source_open_checkpoint(folder, manifest, options->verify, &source));
    ND_TRY_OUT(open_writer(folder, manifest, options, layout, &writer));
    const nd_tensors_walk walk = {.layout = layout,
                                  .arrays = 1,
                                  .sources = {source},
                                  .source_count = 1,
                                  .visit = write_part,
                                  .context = writer};
    ND_TRY_OUT(nd_tensors_each(&walk));
    nd_hf_writer *complete = writer;
    writer = NULL;
    ND_TRY_OUT(nd_hf_writer_commit(complete));
out:
    nd_hf_writer_abort(writer);
    nd_source_close(source);
    nd_layout_destroy(layout);
    return status;
}

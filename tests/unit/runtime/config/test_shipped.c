// SPDX-License-Identifier: Apache-2.0
/* The configurations in configs/: each is read and resolved, and its model fits its mesh. */
#include "support.h"

#include "runtime/base/fs.h"
#include "runtime/config/reader.h"
#include "trainer/layout/layout.h"

static const struct {
    const char *file;
    int64_t workers;
    int mesh[4]; /* dp_replicate, dp_shard, cp, tp */
    int64_t parameters;
} shipped[] = {
    /* Parameters of the Llamas: formats.md's shapes, head and input embedding both counted. */
    {"configs/tp_hsdp.yaml", 8, {2, 2, 1, 2}, 3082496},
    {"configs/cp.yaml", 8, {1, 1, 8, 1}, 3082496},
    {"configs/llama-3.1-8b/tp_hsdp.yaml", 8, {2, 2, 1, 2}, 8030261248},
    {"configs/llama-3.1-8b/cp.yaml", 8, {1, 1, 8, 1}, 8030261248},
    {"configs/llama-3.1-8b/fp8.yaml", 8, {1, 8, 1, 1}, 8030261248},
    {"configs/llama-3.1-70b/tp_hsdp.yaml", 64, {2, 8, 1, 4}, 70553706496},
    {"configs/llama-3.1-405b/tp_hsdp.yaml", 1024, {2, 64, 1, 8}, 405853388800},
};

Test(shipped, each_is_whole)
{
    for (size_t i = 0; i < sizeof shipped / sizeof shipped[0]; i++) {
        nd_config c;
        nd_shape shape;
        assert_ok(FLAGS(&c, "--config-file", source_path(shipped[i].file)));
        cr_assert_eq(nd_config_resolve(&c), ND_OK, "%s: %s", shipped[i].file,
                     nd_error_last()->message);
        cr_expect_eq(c.launch.workers, shipped[i].workers);
        cr_expect_eq(memcmp(c.resolved_mesh.size + 1, shipped[i].mesh, sizeof shipped[i].mesh), 0,
                     "%s", shipped[i].file);
        assert_ok(nd_shape_read(source_path(c.model.config), &shape));
        cr_expect_eq(nd_shape_parameters(&shape), shipped[i].parameters, "%s", shipped[i].file);
        cr_expect_eq(nd_shape_check_mesh(&shape, &c.resolved_mesh, c.train.micro_batch_size,
                                         c.train.sequence_length),
                     ND_OK, "%s: %s", shipped[i].file, nd_error_last()->message);
        cr_expect_leq(c.train.sequence_length, shape.max_positions);
        nd_config_fini(&c);
    }
}

Test(shipped, the_documentation_names_every_key_and_default)
{
    char *text = NULL;
    size_t size = 0;
    assert_ok(nd_fs_read(source_path("docs/config.md"), 1 << 20, ND_ERR_DATA, &text, &size));
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        const nd_field *f = &nd_fields[i];
        const char *wanted = printed("| `%s`%s | %s |", f->name, f->job ? "" : " *node*",
                                     *f->initial ? f->initial : "empty");
        cr_expect(strstr(text, wanted), "docs/config.md has no line with %s", wanted);
    }
    free(text);
}

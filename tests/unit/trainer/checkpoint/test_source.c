// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "runtime/base/math.h"
#include "tests/support/shell.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/folder.h"

TestSuite(source, .init = fake_setup, .fini = fake_teardown);

/* pp, dp_replicate, dp_shard, cp, tp */
static const nd_mesh meshes[] = {
    {{1, 1, 1, 1, 1}}, {{1, 3, 1, 1, 1}}, {{1, 1, 4, 1, 1}}, {{1, 1, 1, 1, 2}}, {{1, 1, 3, 1, 2}},
    {{1, 2, 2, 1, 1}}, {{1, 1, 1, 2, 1}}, {{1, 2, 2, 1, 2}}, {{1, 1, 2, 3, 4}}, {{1, 1, 7, 1, 1}},
};
enum { MESHES = sizeof meshes / sizeof *meshes };

/* Every rank of `to` finds its state. */
static void check_load(const fake_saved *s, const nd_mesh *to, bool converts)
{
    char text[2][96];
    nd_mesh_format(&s->manifest.mesh, text[0], sizeof text[0]);
    nd_mesh_format(to, text[1], sizeof text[1]);
    for (int rank = 0; rank < nd_mesh_world_size(to); rank++) {
        cr_assert_eq(fake_load_rank(s, to, rank, converts), ND_OK, "%s to %s: %s", text[0], text[1],
                     nd_error_last()->message);
    }
}

Test(source, any_mesh_loads_what_any_mesh_wrote)
{
    for (int from = 0; from <= MESHES; from++) { /* the last one has weights without moments */
        const nd_shape shape = fake_shape(from % 2 == 1);
        const bool last = from == MESHES;
        fake_write(fake_run.path, &shape, &meshes[last ? 7 : from], last ? 1 : ND_STATE_KINDS, from,
                   from % 3 == 0, from % 2 ? ND_CHECKSUM_SHA256 : ND_CHECKSUM_XXH3);
        fake_saved s = fake_open(fake_run.path, from);
        for (int to = 0; to < MESHES; to++) {
            check_load(&s, &meshes[to], to % 2 == 0);
        }
        cr_assert_eq(s.manifest.arrays, last ? 1 : ND_STATE_KINDS);
        assert_ok(fake_verify(s.path));
        nd_fs_remove_tree(s.path);
        fake_forget(&s);
    }
}

/* Which chunks of which files hold a byte that a rank wants, found out element by element. */
enum { WRITERS_MAX = 24, CHUNKS_MAX = 64 };
typedef struct chunks {
    nd_layout *layouts[WRITERS_MAX];
    nd_shard_plan plans[WRITERS_MAX];
    int writers;
    nd_source *source; /* asked for the same */
    float *memory;
    bool needed[WRITERS_MAX][ND_PIECE_KINDS][CHUNKS_MAX];
    int64_t pieces; /* stored rectangles of which some part is wanted */
} chunks;

/* Returns whether the piece has something that is wanted. */
static bool mark_rows(const nd_piece *piece, const nd_span *want, bool *needed)
{
    const nd_span *have = &piece->span;
    const int64_t first_row = nd_max(have->row, want->row);
    const int64_t row_end = nd_min(have->row + have->rows, want->row + want->rows);
    const int64_t begin = nd_max(have->col, want->col);
    const int64_t end = nd_min(have->col + have->cols, want->col + want->cols);
    for (int64_t row = first_row; row < row_end && begin < end; row++) {
        const int64_t at = (row - have->row) * have->cols - have->col;
        uint64_t first = piece->begin + 4 * (uint64_t)(at + begin);
        uint64_t last = piece->begin + 4 * (uint64_t)(at + end) - 1;
        cr_assert_lt(last / ND_CHUNK_BYTES, CHUNKS_MAX);
        for (uint64_t i = first / ND_CHUNK_BYTES; i <= last / ND_CHUNK_BYTES; i++) {
            needed[i] = true;
        }
    }
    return begin < end && first_row < row_end;
}

static nd_status mark_span(void *context, const nd_span *span)
{
    chunks *c = context;
    for (int w = 0; w < c->writers; w++) {
        for (int i = 0; i < c->plans[w].piece_count; i++) {
            const nd_piece *piece = &c->plans[w].pieces[i];
            if (strcmp(piece->span.param->name, span->param->name) == 0) {
                c->pieces += mark_rows(piece, span, c->needed[w][piece->kind]);
            }
        }
    }
    return nd_source_add(c->source, span, ND_STATE_MASTER, c->memory + span->begin);
}

static int64_t needed_bytes(const chunks *c)
{
    int64_t bytes = 0;
    for (int w = 0; w < c->writers; w++) {
        for (int k = 0; k < ND_PIECE_KINDS; k++) {
            for (int64_t i = 0; i < CHUNKS_MAX; i++) {
                int64_t left = (int64_t)c->plans[w].files[k].bytes - i * ND_CHUNK_BYTES;
                bytes += !c->needed[w][k][i] ? 0 : left < ND_CHUNK_BYTES ? left : ND_CHUNK_BYTES;
            }
        }
    }
    return bytes;
}

/* Every rank of `to` reads the chunks that hold something of its own, each once. Where tp cuts both
 * meshes alike, what it wants of a rectangle has two ends, and only chunks there hold more. */
static void check_reads(chunks *c, const fake_saved *s, const nd_mesh *to)
{
    const nd_manifest *m = &s->manifest;
    for (int rank = 0; rank < nd_mesh_world_size(to); rank++) {
        nd_layout *layout = fake_layout(&m->shape, to, rank, true);
        int64_t asked = 0; /* writers that have something for it */
        memset(c->needed, 0, sizeof c->needed);
        c->pieces = 0;
        c->memory = malloc((size_t)layout->shard_total * sizeof *c->memory);
        assert_ok(nd_source_open(s->path, m, true, &c->source));
        assert_ok(fake_each_span(layout, mark_span, c));
        assert_ok(nd_source_run(c->source));
        const nd_source_stats stats = nd_source_get_stats(c->source);
        cr_assert_eq(stats.read_bytes, needed_bytes(c), "rank %d reads %lld bytes of %lld", rank,
                     (long long)stats.read_bytes, (long long)needed_bytes(c));
        for (int w = 0; w < c->writers; w++) {
            asked += memchr(c->needed[w], true, sizeof c->needed[w]) != NULL;
        }
        /* Only the files of all replicas together say which replica has something for this rank. */
        cr_assert(m->mesh.size[ND_AXIS_DP_REPLICATE] > 1 || stats.kept == asked,
                  "rank %d asks %lld writers of %lld", rank, (long long)stats.kept,
                  (long long)asked);
        cr_assert(m->mesh.size[ND_AXIS_TP] != to->size[ND_AXIS_TP] ||
                  stats.read_bytes <= stats.wanted_bytes + 2 * ND_CHUNK_BYTES * c->pieces);
        nd_source_close(c->source);
        free(c->memory);
        nd_layout_destroy(layout);
    }
}

Test(source, every_rank_reads_the_chunks_that_it_needs_and_each_once)
{
    chunks *c = calloc(1, sizeof *c);
    nd_shape shape = fake_shape(false); /* of 12 MB, so that files have several chunks */
    shape.vocab = 3000;
    shape.hidden = 256;
    shape.ffn = 1024;
    shape.layers = 2;
    shape.head_dim = 32;
    for (int from = 0; from < MESHES; from++) {
        fake_write(fake_run.path, &shape, &meshes[from], 1, from, false,
                   from % 5 == 4 ? ND_CHECKSUM_SHA256 : ND_CHECKSUM_XXH3);
        fake_saved s = fake_open(fake_run.path, from);
        const nd_manifest *m = &s.manifest;
        c->writers = m->writer_count;
        for (int rank = 0; rank < c->writers; rank++) {
            c->layouts[rank] = fake_layout(&m->shape, &m->mesh, rank, false);
            fake_plan(m, c->layouts[rank], rank, &c->plans[rank]);
        }
        for (int to = 0; to < MESHES; to++) {
            check_reads(c, &s, &meshes[to]);
        }
        for (int rank = 0; rank < c->writers; rank++) {
            nd_shard_plan_fini(&c->plans[rank]);
            nd_layout_destroy(c->layouts[rank]);
        }
        nd_fs_remove_tree(s.path);
        fake_forget(&s);
    }
    free(c);
}

static fake_saved save_of_two_ranks(int64_t step)
{
    const nd_mesh mesh = {{1, 1, 2, 1, 1}};
    const nd_shape shape = fake_shape(false);
    return fake_save(&shape, &mesh, ND_STATE_KINDS, step);
}

/* Opens that fail with EMFILE say nothing about the files. */
Test(source, a_call_that_fails_is_no_damage)
{
    nd_manifest again = {0};
    nd_source *source = NULL;
    fake_state state;
    struct rlimit before, none;
    fake_saved s = save_of_two_ranks(3);
    assert_ok(nd_source_open(s.path, &s.manifest, true, &source));
    nd_layout *layout = fake_layout(&s.manifest.shape, &fake_one, 0, false);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = (struct rlimit){.rlim_cur = 0, .rlim_max = before.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    nd_status loaded = fake_load(source, layout, ND_STATE_KINDS, &state);
    nd_status read = nd_manifest_read(s.path, &again);
    bool ours = false;
    nd_status looked = nd_checkpoint_is_ours(s.path, &ours);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
    cr_assert_eq(loaded, ND_ERR_IO);
    cr_assert_eq(read, ND_ERR_IO);
    cr_assert_eq(looked, ND_OK);
    cr_assert(ours);
    fake_free(&state);
    nd_layout_destroy(layout);
    nd_source_close(source);
    assert_ok(fake_load_all(s.path));
    fake_forget(&s);
}

Test(source, refuses_files_that_are_missing_cut_linked_or_foreign)
{
    static nd_status (*const calls[])(const char *) = {fake_load_all, fake_verify};
    static const struct {
        const char *command;
        const char *says[2]; /* each of the calls behind it; "": it succeeds; NULL: not called */
    } cases[] = {
        {"mv $f ../../kept", {"No such file"}},
        {"ln -s ../../kept $f", {"it is a link", "it is a link"}},
        {"rm $f && mkdir $f", {"is a folder, not a file"}},
        {"rmdir $f && cp ../../kept $f", {"", ""}},
        {"truncate -s -1 $f", {"it was written with"}},
        {"cp ../../kept $f && touch foreign.safetensors", {NULL, "files; the checkpoint has"}},
    };
    fake_saved s = save_of_two_ranks(1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shell(&fake_run, shell_line("cd checkpoint-1/state && "
                                    "f=shard-00002-model-00001-of-00002.safetensors && %s",
                                    cases[i].command));
        for (int k = 0; k < 2; k++) {
            const char *words = cases[i].says[k];
            nd_error_clear();
            const nd_status status = words ? calls[k](s.path) : ND_OK;
            cr_assert_eq(status, words && words[0] ? ND_ERR_DATA : ND_OK, "%s, call %d: %d",
                         cases[i].command, k, (int)status);
            cr_assert(!words || strstr(nd_error_last()->message, words), "%s, call %d: %s",
                      cases[i].command, k, nd_error_last()->message);
        }
    }
    fake_forget(&s);
}

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`ndtrain plan` for real sizes: nothing is allocated, so any machine can plan any job."""
import os
import re

import steps
from steps import SOURCE, check, test

GIB = 1 << 30


def plan(t, flags, code=0, says=(), never=()):
    """In the source tree: the shipped files name each other by paths from there."""
    t.folder = SOURCE
    return t.run(f"ndtrain plan --config-file configs/{flags}", code, says, never)


def after(t, words):
    """The number behind the words."""
    found = re.search(re.escape(words) + r"\s*(-?[0-9.]+(?:e[-+]?[0-9]+)?)", t.out)
    check(found, f"no {words!r} and a number in:\n{t.out}{t.log}")
    return float(found[1])


def near(a, b, share):
    check(abs(a - b) <= share * abs(b), f"{a} and {b}")


def part(t, name):
    """The line "NAME NUMBER GiB" of a part of the memory; None: it is not there."""
    found = re.search(rf"^ +{re.escape(name)} +([0-9.]+) (\S+)", t.out, re.M)
    check(not found or found[2] == "GiB", t.out)
    return float(found[1]) if found else None


def parts_are_the_total(t):
    """Parts are lines with two spaces before them; what they are made of has four. Each number is rounded to 0.001."""
    lines = t.out.split("\nmemory plan of rank ")[1].split("\n  total")[0].splitlines()[1:]
    parts = [float(re.search("[0-9][0-9.]*", line)[0]) for line in lines if line[2] != " "]
    check(len(parts) >= 6 and abs(sum(parts) - part(t, "total")) <= 0.0005 * (len(parts) + 1), t.out)


@test
def llama_8b_on_eight_workers(t):
    file = "llama-3.1-8b/tp_hsdp.yaml"
    plan(t, f"{file} --rank 5", says=(
        "mesh: 2 x 2 x 1 x 2 (dp_replicate x dp_shard x cp x tp), 8 workers", "groups of rank 5 ", "  tp                2 ranks 4, 5 ",
        "  dp_shard_cp       2 ranks 5, 7 ", "  dp_replicate      2 ranks 1, 5 ", "  model             4 ranks 4, 5, 6, 7 ",
        "model: 8030261248 parameters", "memory plan of rank 5", "\nfits one H100: ", "\nestimated step, all workers: H100 "))
    longest = after(t, "\nlongest sequence that fits one H100: ")
    check(longest > 8192 and longest % 2 == 0, "tokens that the ranks of tp share")
    # F32 shards of 8,030,261,248 parameters over dp_shard 2 x tp 2; the padding is below a thousandth.
    gib = 8030261248 / 4 * 4 / GIB
    near(part(t, "master weights"), gib, 1e-3)
    near(part(t, "state"), 4 * gib, 1e-3)
    parts_are_the_total(t)
    plan(t, f"{file} --device cuda --num-processes 1 --dp-shard-size 1 --dp-replicate-size 1 --tp-size 1", 1, says=(
        "\ndoes not fit one H100: ", "\nlongest sequence that fits one H100: none\n", " (dp_replicate x dp_shard x cp x tp), 1 worker; "))
    check(t.log.startswith("error: the job does not fit; ") and t.log.count("\n") == 1, t.log)
    check(part(t, "NCCL, estimated") is None, "one GPU has no peer")
    check(part(t, "CUDA graphs, estimated") is None, "they are off")
    plan(t, f"{file} --device cuda --cuda-graphs true", never="pinned")
    # tp, dp_replicate, dp_shard_cp twice, dp_cp, model and the world: 7 x 288 MiB.
    check(abs(part(t, "NCCL, estimated") - 7 * 288 / 1024) <= 1e-3 and part(t, "driver and libraries") == 1.0, t.out)
    # 32 layers of at least 4 products forward and 8 backward, and of 4 gathers or reductions over tp that divide each: 20 times 64 KiB.
    check(part(t, "CUDA graphs, estimated") >= 32 * 20 / 16384, t.out)
    parts_are_the_total(t)
    # Masters and two moments of 8 billion parameters, of which 8 ranks write an eighth each.
    plan(t, f"{file} --device cuda --checkpoint-frequency 100", says="\ncheckpoints: 11.22 GiB of pinned host memory a worker\n"
                                                                     "loading a checkpoint: 0.07 GiB of host memory a worker\n")
    plan(t, f"{file} --device cuda --resume-from-checkpoint latest", says="\nloading a checkpoint: ", never="pinned")
    plan(t, "tp_hsdp.yaml", says=" MiB\nfits this host: 8 workers of ")
    words = t.out.split("\nfits this host: ")[1].split("\n")[0]
    workers, each, every, physical, free = map(float, re.findall(r"[0-9.]*[0-9]", words))
    check(workers == 8 and abs(every - 8 * each) <= 0.05 + 8 * 0.005 and 0 < free <= physical, words)
    check(abs(each - after(t, "\n  total") / 1024) <= 0.005 + 1e-5, t.out)
    check(physical <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB + 0.05, words)


@test
def workers_share_the_cpus(t):
    """The estimate of 8 workers on the CPUs of one has the products take as long as they do on that one."""
    rate, cpu = [], min(os.sched_getaffinity(0))
    for workers in 1, 8:
        t.folder = SOURCE
        t.run(["taskset", "-c", cpu, *t.command(f"ndtrain plan --device cpu --explain --num-processes {workers} --threads-per-worker 1")])
        rate.append(after(t, "\n  CPU by "))
    near(rate[1] / rate[0], 1 / 8, 0.08)


@test
def llama_405b_on_16384_workers(t):
    # A plan starts nothing, so that its nodes need no place to meet.
    t.folder = SOURCE
    t.run("ndtrain plan --nnodes 8 --nproc-per-node 8", says=("mesh: ", ", 64 workers"))
    t.run("ndtrain check --nnodes 8 --nproc-per-node 8", 2, "launch.rdzv_endpoint is empty, so the nodes cannot meet")
    file = "llama-3.1-405b/tp_hsdp.yaml"
    plan(t, f"{file} --num-processes 16384 --dp-replicate-size 32 --rank 16383", says=(
        "mesh: 32 x 64 x 1 x 8 (dp_replicate x dp_shard x cp x tp), 16384 workers",
        "  tp                8 ranks 16376, 16377, 16378, 16379, ... 16383 ",
        "  dp_shard_cp      64 ranks 15879, 15887, 15895, 15903, ... 16383 ",
        "  dp_replicate     32 ranks 511, 1023, 1535, 2047, ... 16383 ", "  dp             2048 ranks 7, 15, 23, 31, ... 16383 ",
        "estimated step, all workers: H100 "))
    near(part(t, "master weights"), 405853388800 / 512 * 4 / GIB, 1e-3)  # dp_shard 64 x tp 8
    parts_are_the_total(t)
    plan(t, f"{file} --num-processes 1024 --dp-replicate-size 2 --device cpu --explain", 1, "\ndoes not fit this host: 1024 workers of ")


@test
def fp8_products_take_half_the_time_on_a_gpu(t):
    def seconds(flags, machine):
        plan(t, f"llama-3.1-8b/fp8.yaml --explain --recompute none {flags}", None)  # it need not fit
        return after(t, f"\n  {machine}: ")

    bf16, fp8 = (seconds(f"--precision {precision}", "H100") for precision in ("bf16", "fp8"))
    check(0.5 * bf16 < fp8 < 0.75 * bf16, f"{bf16} and {fp8} s")
    near(seconds("--precision fp8 --device cpu", "CPU"), seconds("--precision bf16 --device cpu", "CPU"), 1e-3)
    for precision, says, never in ("fp8", "\nautotune: a run may leave more linears in BF16", "\0"), ("bf16", (), "\nautotune: "):
        plan(t, f"llama-3.1-8b/fp8.yaml --set kernels.autotune=true --precision {precision}", None, says, never)


def rated_flops():
    """(name, FLOP/s in BF16) of gpu_rates.h."""
    rows = re.findall(r'^ *\{"(\w+)", ([^}]*)\}', (SOURCE / "trainer/commands/gpu_rates.h").read_text(), re.M)
    return [(name, float(numbers.split(", ")[2])) for name, numbers in rows]


@test
def estimates_for_gpus_are_by_the_ops_of_a_step(t):
    """6 FLOPs for each of 7.505e9 weights and token, 16 x 8192 tokens a worker; full recompute makes the blocks' products but the last
    again. FP8 takes most of them."""
    file = "llama-3.1-8b/fp8.yaml --device cuda --gradient-accumulation-steps 16 --explain"
    flops = 6 * 7.505 * 16 * 8.192  # TFLOP
    plan(t, f"{file} --precision bf16 --recompute none", says=("\nfits one H200: ", "no gaps between ops"))
    plain = after(t, "work of a worker: ")
    near(plain, flops, 2e-3)
    check([name for name, _ in rated_flops()] == ["H100", "H200"], rated_flops())
    for name, rate in rated_flops():
        near(after(t, f"\n  {name}: "), flops * 1e12 / rate, 2e-3)
    plan(t, f"{file} --precision bf16 --recompute full")
    full = after(t, "work of a worker: ")
    check(1.15 * plain < full < plain * 4 / 3, f"{full} and {plain} TFLOP")
    plan(t, f"{file} --recompute none")
    left, fp8 = after(t, "work of a worker: "), after(t, " in BF16, ")
    near(left + fp8, plain, 2e-3)
    check(fp8 > 0.8 * plain, f"{fp8} and {plain} TFLOP")


@test
def a_step_is_made_of_its_parts(t):
    """All communication is hidden, or none: where compute takes longer, and where communication does. A step of 8 workers has the tokens
    of 4, as two share each sequence."""
    parts, waits = ("products", "attention", "other ops", "update", "communication"), []
    for tokens, nodes in (8192, 1), (64, 4):
        plan(t, f"llama-3.1-8b/tp_hsdp.yaml --explain --sequence-length {tokens} --gradient-accumulation-steps 3 --micro-batch-size 2 "
                f"--recompute full --nnodes {nodes} --nproc-per-node {8 // nodes}", None)  # it need not fit
        shown = re.findall(r"^  (H[12]00: .* communication)$", t.out, re.M)
        steps_of = re.findall(r"(H[12]00) (\S+) to (\S+) s, (\S+) to (\S+) tokens/s", t.out.split("\nestimated step, all workers: ")[1])
        for line, (name, *step) in zip(shown, steps_of):
            seconds = {part: float(re.search(rf"(\S+) s {part}", line)[1]) for part in parts}
            shortest, longest, slow, fast = map(float, step)
            compute, wait = sum(seconds.values()) - seconds["communication"], seconds["communication"]
            near(longest, compute + wait, 2e-3)
            near(shortest, max(compute, wait), 2e-3)
            near(slow, 4 * 3 * 2 * tokens / longest, 2e-3)
            near(fast, 4 * 3 * 2 * tokens / shortest, 2e-3)
            waits.append(wait > compute)
            check(line.startswith(name), line)
        sent = after(t, " GB sent within a host, ") if nodes > 1 else 0
        near(after(t, "\n  exposed communication: ") + after(t, "; the other "), after(t, " GB moved, ") + sent, 2e-3)
    check(waits == [False, False, True, True], waits)


@test
def replicas_add_their_gradients_once(t):
    """Each of two sends a half of its F32 gradients, and then a half of the sums. The update reads gradients twice, reads and writes
    masters and two moments, and writes BF16 weights."""
    weights = 8030261248
    file = "llama-3.1-8b/tp_hsdp.yaml --device cuda --explain --num-processes 2 --dp-replicate-size 2 --dp-shard-size 1 --tp-size 1"
    for name, arrays in ("adamw", 3), ("sgd", 1):  # masters, and two moments
        plan(t, f"{file} --optimizer {name}", None)  # it need not fit
        near(after(t, " GB moved, "), 2 * 4 * weights / 2 * 1e-9, 1e-3)
        near(after(t, " s other ops, "), (2 * 4 + arrays * 2 * 4 + 2) * weights / (3.35e12 * 0.92), 1e-3)
    plan(t, f"{file} --nnodes 2 --nproc-per-node 1", None)
    near(after(t, " GB sent within a host, "), 2 * 4 * weights / 2 * 1e-9, 1e-3)


@test
def eight_gpus_of_80_gb_keep_gathered_weights(t):
    """The 8B configuration for eight GPUs keeps gathered weights, for which these have room."""
    plan(t, "llama-3.1-8b/fp8.yaml --device cuda", says="\nfits one H100: ")
    kept = part(t, "total")
    plan(t, "llama-3.1-8b/fp8.yaml --device cuda --reshard-after-forward true")
    check(kept > part(t, "total"), t.out)


@test
def documents_are_those_that_are_given(t):
    """Separate ones have first keys. The data are not opened, so auto is planned as join, which is said of JSON lines."""
    words = "data.documents is auto, and planned as join; "
    batches = {}
    for rule in "join", "separate", "auto":
        plan(t, f"cp.yaml --data-path rows.jsonl --documents {rule}")
        batches[rule] = after(t, "\n    micro-batches: ids, labels, positions")
        check((words in t.log) == (rule == "auto"), t.log)
    check(batches["separate"] > batches["join"] == batches["auto"], batches)
    plan(t, "cp.yaml --data-path text.txt --documents auto", never=words)
    plan(t, "cp.yaml --data-path rows.jsonl --data-format text --documents auto", never=words)
    for data in "rows.ndjson.gz", "rows.txt --data-format jsonl":
        plan(t, f"cp.yaml --data-path {data} --documents auto")
        check(words in t.log, t.log)


@test
def separate_documents_on_a_gpu_are_warned_of(t):
    """A run warns of them at its start."""
    words = "warning: data.documents is separate, and the plain attention"
    plan(t, "cp.yaml --documents separate --device cuda", says="data.documents is separate: cuDNN computes its attention\n", never=words)
    plan(t, "cp.yaml --documents separate --device cuda --precision fp32", says=words)
    plan(t, "cp.yaml --documents separate --device cpu", never=words)
    plan(t, "cp.yaml --documents join --device cuda", never=words)


@test
def steps_of_a_small_model_have_digits(t):
    """So has a step of microseconds."""
    t.model("one.json", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_key_value_heads=..., max_position_embeddings=...)
    t.run("ndtrain plan --device cuda --explain --sequence-length 32 --set model.config=one.json", never=" 0 to ")
    check(after(t, "\nestimated step, all workers: H100 ") > 0 and after(t, "\n  H100: ") > 0, t.out)


@test
def the_longest_sequence_that_fits(t):
    """A sequence of that length fits, and the next one that the mesh takes does not."""
    command = "llama-3.1-8b/cp.yaml --recompute none --sequence-length"
    unit = 8 * 2  # two chunks a rank
    plan(t, f"{command} 128000",
         says="\nlongest sequence that fits one H200: 131072 tokens, as many as the model has positions\n")
    longest = int(after(t, "\nlongest sequence that fits one H100: "))
    check(longest > 0 and longest % unit == 0, t.out)
    plan(t, f"{command} {longest}")
    check(after(t, "\nfits one H100: ") < 79.6 and after(t, "\nlongest sequence that fits one H100: ") == longest, t.out)
    plan(t, f"{command} {longest + unit}")
    check(after(t, "\ndoes not fit one H100: ") > 79.6, t.out)  # by the digits shown
    check(after(t, "\nlongest sequence that fits one H100: ") == longest, t.out)


@test
def a_rank_outside_of_the_mesh(t):
    plan(t, "llama-3.1-8b/tp_hsdp.yaml --rank 8", 2, "--rank 8 is not in the mesh; use a rank from 0 to 7")


@test
def a_longer_sequence_is_refused(t):
    """Longer ones would be computed in pieces, which this recipe refuses."""
    command = "cp.yaml --device cpu --precision fp8 --set fp8.recipe=tensorwise --tiled-mlp -1 --sequence-length"
    plan(t, f"{command} 2048", says=" tokens; a longer one is refused\n")
    longest = int(after(t, "\nlongest sequence that fits this host: "))
    plan(t, f"{command} {longest}")
    plan(t, f"{command} {longest + 8 * 16}", 2,  # rows of FP8 products a rank
         "parallel.tiled_mlp is -1, but fp8.recipe tensorwise has scales or sums that follow")


def row(t, name):
    """(GiB, seconds of a step) in the row of the table of other settings."""
    found = re.search(rf"^  {re.escape(name)} +([0-9.]+) GiB +(\S+) %  \S+ (\S+) to \S+ s", t.out, re.M)
    check(found, f"no {name} in:\n{t.out}")
    own, other = float(re.search(r"\n  as it is +([0-9.]+) GiB", t.out)[1]), float(found[1])
    check(abs((other / own - 1) * 100 - float(found[2])) <= 0.051 + 0.05 * (1 + other / own) / own, found[0])  # GiB have three digits
    return other, float(found[3])


def row_refuses(t, name, why):
    found = re.search(rf"^  {re.escape(name)} .*not possible: .*", t.out, re.M)
    check(found and why in found[0], f"no {why!r} of {name} in:\n{t.out}")


@test
def other_settings_are_planned_too(t):
    """What --explain says of another setting is what the plan with that setting says."""
    file = "llama-3.1-8b/tp_hsdp.yaml"
    plan(t, f"{file} --recompute none --explain", says="\nwhy:\n")
    own, full, wide = row(t, "as it is")[0], row(t, "parallel.recompute: full")[0], row(t, "mesh.tp: 4, on 16 workers")
    check(abs(own - part(t, "total")) <= 2e-3 and full < own and wide[0] < own, t.out)
    plan(t, f"{file} --recompute none --num-processes 16 --nnodes 2 --nproc-per-node 8 --tp-size 4")  # the further workers are on a further host
    check(abs(wide[0] - part(t, "total")) <= 2e-3 and wide[1] == after(t, "\nestimated step, all workers: H100 "), (wide, t.out))
    plan(t, f"{file} --recompute full")
    check(abs(full - part(t, "total")) <= 2e-3, t.out)
    plan(t, f"{file} --recompute none", never="why:")
    t.run("ndtrain check --explain", 2, "--explain; it belongs to `ndtrain plan`")


@test
def recompute_of_all_but_attention_lies_between_selective_and_full(t):
    """Attention is most of a step of a long sequence."""
    file, modes = "llama-3.1-8b/cp.yaml --explain --recompute", ("full", "all_but_attention", "selective")
    plan(t, f"{file} full")
    gib, seconds = zip(*(row(t, "as it is" if mode == "full" else f"parallel.recompute: {mode}") for mode in modes))
    # Two further tensors of (T, C) in BF16 and the lse for each block, 16,000 tokens a rank; full has one of each that all blocks share.
    kept = 31 * 16000 * (2 * 4096 * 2 + 32 * 4) / GIB
    check(abs(gib[1] - gib[0] - kept) <= 2e-3 and gib[2] > gib[1], (gib, kept))
    check(seconds[0] > seconds[1] > seconds[2], seconds)
    # Again, per token and block: the products of q k v, and of gate and up, 2 FLOPs for each weight; full also that of o, and two products
    # of the scores.
    weights, o = 4096 * (4096 + 2 * 1024 + 2 * 14336), 4096 * 4096
    work, attention = {}, {}
    for mode in modes:
        plan(t, f"{file} {mode}")
        work[mode], attention[mode] = after(t, "work of a worker: "), after(t, " in F32, ")
    share = (work["all_but_attention"] - work["selective"]) / (work["full"] - work["selective"])
    check(abs(share - weights / (weights + o)) <= 2e-2, work)
    # Two products of scores forward, which full makes twice, and five backward.
    check(abs(attention["all_but_attention"] / attention["full"] - 7 / 9) <= 2e-3, attention)


@test
def the_other_way_to_gather_keys_is_planned_where_cp_is_used(t):
    file = "cp.yaml --sequence-length 128000 --explain"
    plan(t, file, says="further workers are on further hosts like this one:\n")
    own, ring = row(t, "as it is")[0], row(t, "parallel.cp_comm: ring")[0]
    check(ring < own and row(t, "parallel.tiled_mlp: -1")[0] < own, t.out)
    plan(t, f"{file} --cp-comm ring")
    check(row(t, "as it is")[0] == ring and row(t, "parallel.cp_comm: allgather")[0] == own, t.out)
    plan(t, "llama-3.1-8b/cp.yaml --cp-comm auto --explain", says=(
        "attention over the 8 ranks of mesh.cp: ", ", the least as parallel.cp_comm auto asks; GB that", "\n  ulysses 2, then ring "))
    row(t, "parallel.cp_comm: ulysses")
    plan(t, "tp_hsdp.yaml --explain", never="cp_comm")


@test
def other_settings_that_cannot_be_say_why(t):
    """A setting that a run refuses at its start is a row with that sentence, not a plan."""
    plan(t, "llama-3.1-405b/tp_hsdp.yaml --explain")
    row(t, "mesh.tp: 16, on 2048 workers")  # two ranks have copies of a KV head
    row(t, "mesh.cp: 2, on 2048 workers")
    plan(t, "tp_hsdp.yaml --tp-size 8 --dp-replicate-size 1 --dp-shard-size 1 --explain", says="  kv_copies         2 ranks 0, 1 ")
    row_refuses(t, "mesh.tp: 16, on 16 workers", "the model's num_attention_heads is 8, which mesh.tp 16 does not divide")
    plan(t, "tp_hsdp.yaml --sequence-length 18 --explain")
    row_refuses(t, "mesh.cp: 2, on 16 workers", "train.sequence_length 18 is not divisible by 2 x mesh.cp = 4")
    plan(t, "tp_hsdp.yaml --sequence-length 9 --micro-batch-size 2 --explain")
    row_refuses(t, "train.micro_batch_size: 1, train.gradient_accumulation_steps: 2", "local tokens are not divisible by mesh.tp 2")
    plan(t, "tp_hsdp.yaml --precision fp8 --set fp8.filter='*' --sequence-length 16 --explain")
    row_refuses(t, "mesh.cp: 2, on 16 workers", "FP8 products need a number divisible by 16")
    plan(t, "tp_hsdp.yaml --num-processes 16777216 --dp-shard-size -1 --explain", None)
    row_refuses(t, "mesh.dp_shard: 8388608, on 33554432 workers", "launch.workers is 33554432")


@test
def shipped_files_are_explained(t):
    """Every row of a shipped file's table has a plan or a reason."""
    files = sorted(path.relative_to(SOURCE / "configs") for path in (SOURCE / "configs").rglob("*.yaml"))
    check(len(files) == 10, files)
    for file in files:
        plan(t, f"{file} --explain")
        rows = t.out.split("\n  as it is ")[1].splitlines()[1:]
        check(len(rows) >= 6 and all(line.endswith(" tokens/s") or " not possible: " in line for line in rows), f"{file}:\n{t.out}")


@test
def shapes_of_other_families(t):
    """The numbers of parameters of the published models."""
    for folder, parameters in ("qwen3-8b", 8190735360), ("qwen3-32b", 32762123264), ("mistral-7b", 7248023552), ("phi-4", 14659507200):
        plan(t, f"llama-3.1-8b/fp8.yaml --set model.config=configs/{folder}/config.json --set train.sequence_length=4096 "
                "--set launch.workers=32 --set mesh.dp_shard=32", says=f"model: {parameters} parameters")


steps.main("plan")

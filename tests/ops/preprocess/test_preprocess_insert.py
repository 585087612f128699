from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.ops.preprocess.preprocess_insert import preprocess_insert
from dsv4_compile.reference.common.kv_format import load_kv
from dsv4_compile.testing import assert_bitwise, check_op, hostile_indices, padded, refuse_synchronization, strided
from tests.ops.preprocess.compressor_engine import EPS
from tests.ops.preprocess.preprocess_layer import (
    CACHES,
    LATENT,
    PADDING,
    PER_TOKEN,
    WINDOW_BLOCK,
    Layer,
    storage,
    with_copied_caches,
)
from tests.support import scalar

MLA: dict[str, Any] = {"fmt": "fp8_ds_mla", "dim": 512, "rope_dim": 64, "dtype": torch.bfloat16, "max_len": 160}
CSA: dict[str, Any] = {**MLA, "ratio": 4, "key_dim": 128}
KINDS: dict[str, dict[str, Any]] = {
    "swa": {"ratio": 0},
    "swa fp8_ds_mla": {**MLA, "ratio": 0},
    "swa fp8": {"ratio": 0, "fmt": "fp8", "kv_scale": torch.tensor([0.03])},
    "hca": {"ratio": 128},
    "hca fp8_ds_mla": {**MLA, "ratio": 128},
    "csa": {"ratio": 4},
    "csa hadamard": {"ratio": 4, "hadamard": True},
    "csa fp8, indexer_fp8": {
        **CSA,
        "fmt": "fp8",
        "dim": 128,
        "kv_scale": torch.tensor([0.03]),
        "key_fmt": "indexer_fp8",
    },
    "csa fp8_ds_mla, indexer_fp8 hadamard": {**CSA, "key_fmt": "indexer_fp8", "hadamard": True},
    "csa fp8_ds_mla, indexer_mxfp4": {**CSA, "key_fmt": "indexer_mxfp4"},
    "another ratio": {"ratio": 8},
}
KIND = pytest.mark.parametrize("kind", KINDS)
SMALL = pytest.mark.parametrize("kind", ["swa", "hca", "csa"])
STEP = [*((0, p) for p in range(125, 131)), PADDING, *((1, p) for p in range(2, 9)), (2, 127), PADDING, PADDING]
"""A chunk that passes a group's end, a prompt from the middle of a group, a decode that closes one, and padding."""


def layer(kind: str, **options: Any) -> Layer:
    return Layer(**{**KINDS[kind], "requests": 3, **options})


def separately(a: dict[str, Any]) -> Tensor:
    """What the op replaces, one after the other."""
    ops = torch.ops.dsv4
    qr, kv = ops.fused_q_kv_rmsnorm(
        a["qr"].to(a["q_weight"].dtype), a["kv"].to(a["kv_weight"].dtype), a["q_weight"], a["kv_weight"], EPS
    )
    where = a["positions"], a["cos_sin_cache"]
    ops.kv_rope_insert(
        kv, a["window_cache"], a["window_slot_mapping"], *where, WINDOW_BLOCK, a["cache_format"], a["kv_scale"]
    )
    for prefix, entries, fmt in (("", "compressed_", a["cache_format"]), ("indexer_", "indexer_", None)):
        if f"{prefix}kv_score" in a:
            states = {name: a[f"{prefix}{name}"] for name in ("kv_score", "ape", "norm_weight", "state_cache")}
            slots, ratio = a[f"{prefix}state_slot_mapping"], a["ratio"]
            state_block = layout.state_block_size(ratio)
            ops.save_partial_states(
                states["kv_score"], states["ape"], states["state_cache"], slots, where[0], state_block
            )
            ops.compress_norm_rope_insert(
                states["state_cache"], slots, a[f"{prefix}state_block_table"], a["token_to_req"], where[0],
                a[f"{entries}slot_mapping"], states["norm_weight"], where[1], a[f"{entries}cache"], EPS, ratio,
                state_block, layout.storage_block_size(ratio), fmt or a["indexer_cache_format"],
                a.get("hadamard", False) and not fmt, a["kv_scale"] if fmt else None,
            )  # fmt: skip
    return qr


def both(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the op and the ops that it replaces on equal caches; all bytes are equal. Returns the op's arguments."""
    ours, theirs = with_copied_caches(arguments), with_copied_caches(arguments)
    assert_bitwise(preprocess_insert(**ours), separately(theirs), strides=True)
    for name in CACHES:
        if name in ours:
            assert_bitwise(storage(ours[name]), storage(theirs[name]), label=name)
    return ours


def changed(arguments: dict[str, Any], name: str, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {**arguments, name: change(arguments[name])} if name in arguments else arguments


@KIND
def test_it_does_what_the_separate_ops_do(kind: str) -> None:
    model = layer(kind)
    before = [(r, p) for r in range(3) for p in range(128)]
    preprocess_insert(**model.arguments(before, model.projection(len(before))))
    arguments = model.arguments(STEP, model.projection(len(STEP)))
    after = both(arguments)
    for name in CACHES:
        if name in after:
            assert not torch.equal(storage(after[name]), storage(arguments[name])), f"{name} was not written"


@SMALL
def test_results_match_arithmetic_in_double(kind: str) -> None:
    model = layer(kind, requests=1)
    projection = model.projection(260)
    qr = torch.cat(
        [
            preprocess_insert(**model.arguments([(0, p) for p in range(*chunk)], projection[slice(*chunk)]))
            for chunk in ((0, 126), (126, 127), (127, 260))
        ]
    )
    latent, kv, *scores = projection.split(model.widths, dim=1)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        x = x.double()
        return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * weight

    torch.testing.assert_close(qr.double(), norm(latent, model.q_weight), rtol=2e-6, atol=2e-6)
    position = torch.arange(260)
    slots = model.window_table[0, position // WINDOW_BLOCK].long() * WINDOW_BLOCK + position % WINDOW_BLOCK
    rows = zip(norm(kv, model.kv_weight).tolist(), model.table.tolist(), strict=False)
    expected = torch.tensor([scalar.rotate(row, angles) for row, angles in rows])
    torch.testing.assert_close(load_kv(model.window, "plain", WINDOW_BLOCK, slots), expected, rtol=2e-6, atol=2e-6)
    for engine, history in zip([e for e in (model.main, model.keys) if e], scores, strict=True):
        engine.check(history)


@SMALL
@pytest.mark.parametrize("rounded", [None, torch.bfloat16])
def test_a_float32_projection_is_rounded_once_to_dtype_or_that_of_the_weights(
    kind: str, rounded: torch.dtype | None
) -> None:
    model = layer(kind, dtype=torch.bfloat16 if rounded is None else torch.float32, rounded=rounded)
    arguments = model.arguments(STEP, model.projection(len(STEP)))
    assert arguments["qr"].dtype is torch.float32
    rounded = {**arguments, "qr": arguments["qr"].bfloat16(), "kv": arguments["kv"].bfloat16()}
    results = []
    for unchanged in (arguments, rounded):
        call = with_copied_caches(unchanged)
        results.append([preprocess_insert(**call), *(storage(call[name]) for name in CACHES if name in call)])
    assert results[0][0].dtype is torch.bfloat16
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_inputs_keep_their_dtype_beside_float32_weights(dtype: torch.dtype) -> None:
    model = layer("swa")
    arguments = model.arguments(STEP, model.projection(len(STEP)))
    arguments |= {"qr": arguments["qr"].to(dtype), "kv": arguments["kv"].to(dtype)}
    assert preprocess_insert(**arguments).dtype is dtype


@SMALL
@pytest.mark.parametrize("spread", [padded, strided])
def test_layout_of_the_arguments_does_not_matter(kind: str, spread: Callable[[Tensor], Tensor]) -> None:
    model = layer(kind)
    arguments = model.arguments(STEP, model.projection(len(STEP)))
    dense = {n: x.contiguous() if isinstance(x, Tensor) and n not in CACHES else x for n, x in arguments.items()}
    apart = {n: spread(x) if isinstance(x, Tensor) and x is not model.kv_scale else x for n, x in arguments.items()}
    dense = with_copied_caches(dense)
    assert_bitwise(preprocess_insert(**apart), preprocess_insert(**dense))
    for name in CACHES:
        if name in apart:
            assert_bitwise(apart[name].contiguous(), dense[name].contiguous(), label=name)


@SMALL
@pytest.mark.parametrize("tokens", [[], [(0, 127)], [(1, 3)], [PADDING]])
def test_no_token_and_one(kind: str, tokens: list[tuple[int, int]]) -> None:
    model = layer(kind)
    arguments = model.arguments(tokens, model.projection(len(tokens)))
    both(arguments)
    assert preprocess_insert(**arguments).shape == (len(tokens), LATENT)


@SMALL
def test_padding_rows_are_normed_and_stored_nowhere(kind: str) -> None:
    model = layer(kind)
    arguments = with_copied_caches(model.arguments([PADDING] * 5, model.projection(5)))
    arguments["window_slot_mapping"] = arguments["window_slot_mapping"][:2]
    before = with_copied_caches(arguments)
    assert preprocess_insert(**arguments).isfinite().all()
    for name in CACHES:
        if name in arguments:
            assert_bitwise(storage(arguments[name]), storage(before[name]), label=name)


def some_hostile(x: Tensor) -> Tensor:
    """Two of five values replaced by none that is legal, so that legal slots stay distinct."""
    return torch.where(torch.rand(x.shape) < 0.4, hostile_indices(x.shape, 10**6, fraction=1.0, dtype=x.dtype), x)


@SMALL
@pytest.mark.parametrize("name", [n for n in PER_TOKEN if not n.endswith(("qr", "kv", "kv_score"))])
def test_hostile_indices_do_what_they_do_to_the_separate_ops(kind: str, name: str) -> None:
    model = layer(kind)
    both(changed(model.arguments(STEP, model.projection(len(STEP))), name, some_hostile))


@SMALL
def test_hostile_block_tables_are_never_followed(kind: str) -> None:
    model = layer(kind)
    arguments = model.arguments(STEP, model.projection(len(STEP)))
    for name in ("state_block_table", "indexer_state_block_table"):
        arguments = changed(arguments, name, some_hostile)
    both(arguments)


@SMALL
def test_reference_never_synchronises(kind: str) -> None:
    model = layer(kind)
    arguments = model.arguments(STEP, model.projection(len(STEP)))
    with refuse_synchronization():
        preprocess_insert(**arguments)


def positional(arguments: dict[str, Any]) -> list[Any]:
    schema = preprocess_insert._schema.arguments
    return [arguments.get(a.name, a.default_value if a.has_default_value() else None) for a in schema]


@pytest.mark.parametrize("kind", ["swa", "hca", "csa hadamard"])
def test_op_keeps_its_promises(kind: str) -> None:
    model = layer(kind)
    full = positional(model.arguments(STEP, model.projection(len(STEP))))
    check_op(preprocess_insert, [full])
    few = [positional(model.arguments(tokens, model.projection(len(tokens)))) for tokens in ([], [(0, 127)])]
    check_op(preprocess_insert, few, utilities=False)


def test_compiles_once_for_every_token_count() -> None:
    model = layer("csa", requests=1)

    def step(projection: Tensor, caches: dict[str, Tensor], rest: dict[str, Any]) -> Tensor:
        qr, kv, *scores = (projection * 2).split(model.widths, dim=1)
        inputs = {"qr": qr, "kv": kv, "kv_score": scores[0], "indexer_kv_score": scores[1]}
        return torch.ops.dsv4.preprocess_insert(**{**rest, **caches, **inputs}) + caches["compressed_cache"].nansum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 8, 21):
            projection = model.projection(tokens)
            arguments = model.arguments([(0, p) for p in range(tokens)], projection)
            torch._dynamo.mark_dynamic(projection, 0)
            for name in set(PER_TOKEN) & set(arguments) - {"qr", "kv", "kv_score", "indexer_kv_score"}:
                torch._dynamo.mark_dynamic(arguments[name], 0)
            results = []
            for function in (compiled, step):
                mine = with_copied_caches(arguments)
                caches = {name: mine.pop(name) for name in CACHES}
                rest = {n: x for n, x in mine.items() if n not in ("qr", "kv", "kv_score", "indexer_kv_score")}
                results.append([function(projection, caches, rest), *caches.values()])
            for got, want in zip(*results, strict=True):
                assert_bitwise(got, want)


GROUPS = ("kv_score", "ape", "norm_weight", "state_cache", "state_slot_mapping", "state_block_table")
MAIN = (*GROUPS, "compressed_cache", "compressed_slot_mapping")
INDEXER = (*(f"indexer_{name}" for name in GROUPS), "indexer_cache", "indexer_slot_mapping")


@pytest.mark.parametrize("name", MAIN + INDEXER)
def test_a_compressor_without_one_of_its_arguments_is_refused(name: str) -> None:
    model = layer("csa")
    arguments = model.arguments(STEP, model.projection(len(STEP)))
    field = name.removeprefix("indexer_").removeprefix("compressed_")
    with pytest.raises(InputError, match=rf"E201(.|\n)*compressor without its {field}"):
        preprocess_insert(**{**arguments, name: None})


def without(names: tuple[str, ...]) -> dict[str, Any]:
    return dict.fromkeys(names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({**without(MAIN), "ratio": 0}, "an indexer's compressor without a main one"),
        (without(INDEXER), "indexer_cache_format='plain'"),
        ({**without(INDEXER), "indexer_cache_format": "", "hadamard": True}, "hadamard=True without an indexer"),
        ({"ratio": 0}, "ratio is 0 without a compressor"),
        ({"ratio": 8}, r"state_cache is \[P, 8"),
        ({"indexer_cache_format": "fp8_ds_mla"}, "unknown cache format"),
        ({"cache_format": "indexer_fp8"}, "unknown cache format"),
        ({"kv_scale": torch.ones(1)}, "kv_scale with plain"),
        ({"kv_score": torch.zeros(17, 64, dtype=torch.bfloat16)}, r"kv_score \[T, 2\*w\] is float32"),
        ({"indexer_ape": torch.zeros(5, 32)}, r"\(indexer\): ape has a row for every place"),
        ({"token_to_req": torch.zeros(17)}, "token_to_req"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "positions has a row for every token"),
        ({"dtype": torch.int8}, "dtype is bfloat16, float16 or float32"),
        ({"qr": torch.zeros(3, LATENT)}, "qr and kv have the same tokens"),
        ({"window_block_size": 8}, "plain cache is"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    model = layer("csa")
    arguments = model.arguments(STEP, model.projection(len(STEP)))
    before = with_copied_caches(arguments)
    with pytest.raises(InputError, match=message):
        preprocess_insert(**{**arguments, **change})
    for name in CACHES:
        assert_bitwise(storage(arguments[name]), storage(before[name]), label=name)

"""Tests of whole layers against Hugging Face's unquantised attention, for any split of the tokens into steps."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.loading import hf_name
from dsv4_compile.testing import assert_bitwise
from tests.modules.engine import KINDS, Engine, our_layer
from tests.modules.test_compiled_layer import CASES, random_layer
from tests.support import hf_layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "steps", [[300], [1, 5, 44, 250], [1] * 140 + [160]], ids=["whole", "chunked", "token-by-token"]
)
def test_any_split_into_steps_equals_hugging_face(kind: str, steps: list[int]) -> None:
    source = hf_layer.hf_attention(hf_layer.hf_config(kind, hf_layer.SMALL))
    hidden = torch.randn(sum(steps), source.config.hidden_size)
    expected = hf_layer.evaluate(source, hidden)
    engine = Engine(our_layer(source, "float32", 512), 1, 512)
    got = torch.cat([engine.step([chunk])[0] for chunk in hidden.split(steps)])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_equals_each_request_alone(kind: str) -> None:
    """Decodes, multi-token decodes, chunked prefills, a fresh prefill and padding rows share one step."""
    source = hf_layer.hf_attention(hf_layer.hf_config(kind, hf_layer.SMALL))
    plans = [[131, 1, 1], [60, 3, 70], [0, 150, 40], [7, 0, 128], [0, 0, 5]]
    sequences = [torch.randn(sum(plan), source.config.hidden_size) for plan in plans]
    engine = Engine(our_layer(source, "float32", 512), len(plans), 512, max_step_tokens=150)
    pieces = [sequence.split(plan) for sequence, plan in zip(sequences, plans, strict=True)]
    outputs = [engine.step([p[i] for p in pieces], padding=i) for i in range(3)]
    for b, sequence in enumerate(sequences):
        got = torch.cat([out[b] for out in outputs])
        torch.testing.assert_close(got, hf_layer.evaluate(source, sequence), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows_are_zero_and_write_no_cache(kind: str) -> None:
    source = hf_layer.hf_attention(hf_layer.hf_config(kind, hf_layer.SMALL))
    layer = our_layer(source, "float32", 256)
    engine = Engine(layer, 2, 256)
    engine.step([torch.randn(20, 96), torch.randn(9, 96)])
    before = {name: t.clone() for name, t in engine.paged.layers[0].tensors().items()}
    with torch.inference_mode():
        out = layer(torch.randn(4, 96), engine.metadata([0, 0], 4), engine.paged.layers[0])
    assert torch.equal(out, torch.zeros_like(out))
    for name, tensor in engine.paged.layers[0].tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["float32", "fp8-cache-and-weights"])
def test_a_token_beyond_the_rope_table_gives_nan_and_leaves_other_requests_alone(kind: str, form: str) -> None:
    """An error would take a synchronisation, and the rotation of a different position would look right."""
    config, kwargs = CASES[form]
    layer = random_layer(config, kind, **kwargs | {"max_seq_len": 40})
    engine, alone = Engine(layer, 2, 256), Engine(layer, 2, 256)
    long, short = torch.randn(51, config.hidden_size).to(layer.q_norm.weight.dtype).split((42, 9))
    first, second = engine.step([long, short])
    assert first[:40].isfinite().all() and first[40:].isnan().any(dim=1).all()
    # On a CPU the order of sums in attention depends on the other requests of the step.
    torch.testing.assert_close(second, alone.step([long[:0], short])[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_step_of_no_tokens_gives_no_rows_and_writes_nothing(kind: str, fp8: bool) -> None:
    config, kwargs = CASES["fp8-cache-and-weights" if fp8 else "float32"]
    engine = Engine(random_layer(config, kind, **kwargs), 1, 256)
    before = {name: t.clone() for name, t in engine.paged.layers[0].tensors().items()}
    out = engine.step([torch.empty(0, config.hidden_size, dtype=kwargs.get("dtype", torch.bfloat16))])[0]
    assert out.shape == (0, config.hidden_size)
    for name, tensor in engine.paged.layers[0].tensors().items():
        assert_bitwise(tensor, before[name], label=name)


@pytest.mark.parametrize(
    ("kind", "dims"),
    [("csa", hf_layer.FLASH), ("hca", hf_layer.FLASH), ("csa", hf_layer.PRO)],
    ids=["csa-flash", "hca-flash", "csa-pro"],
)
def test_real_dimensions(kind: str, dims: dict[str, int]) -> None:
    """float32 caches reproduce the unquantised layer to rounding; fp8_ds_mla caches keep its direction.

    These kinds attend to a window as the third does.
    """
    source = hf_layer.hf_attention(hf_layer.hf_config(kind, dims))
    # More than a window and a whole group at ratio 128; the larger weights are multiplied with fewer tokens.
    hidden = torch.randn(136 if dims is hf_layer.FLASH else 20, source.config.hidden_size)
    expected = hf_layer.evaluate(source, hidden)
    exact = torch.cat(Engine(our_layer(source, "float32", 256), 1, 256).step([hidden]))
    assert (exact - expected).abs().max() < 1e-5
    quantised = torch.cat(Engine(our_layer(source, "fp8_ds_mla", 256), 1, 256).step([hidden]))
    assert torch.nn.functional.cosine_similarity(quantised, expected, dim=-1).min() > 0.999


def test_every_parameter_has_a_hugging_face_name() -> None:
    for kind in KINDS:
        source = hf_layer.hf_attention(hf_layer.hf_config(kind, hf_layer.SMALL))
        layer = our_layer(source, "float32", 256)
        assert {hf_name(name) for name, _ in layer.named_parameters()} == set(dict(source.named_parameters()))

"""Decoder layers of the vLLM plug-in as far as they go without vLLM: weights, what is unsupported, the switch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import DSV4Error
from dsv4_compile.integrations.vllm import _compat, registration, whole_limits
from dsv4_compile.integrations.vllm.layer_parts import LayerParts
from dsv4_compile.integrations.vllm.weights import LayerWeights, NamedTensors
from dsv4_compile.parallel import Ranks
from dsv4_compile.reference.common.block_scale import dequantize_weight
from dsv4_compile.reference.common.quant import dequantize_mxfp4, quantize_mxfp4

HIDDEN, WIDTH, EXPERTS, TOP_K, VOCAB, STREAMS = 256, 256, 6, 2, 16, 2
HASHED, BIASED = 0, 1
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LEFT_OUT = {"ignored_layers": [f"model.layers.{i}.ffn.{prefix}experts" for i in (0, 1) for prefix in ("", "shared_")]}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp4": {"quantization_config": FP8},
    "fp8": {"quantization_config": FP8, "expert_dtype": "fp8"},
    "left-out": {"quantization_config": FP8 | LEFT_OUT},
}


def hf_config(**changes: Any) -> Any:
    """Return the settings of a model that decoder layers read."""
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_shared_experts": 1,
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "num_hash_layers": 1,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": STREAMS,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 3,
        "rms_norm_eps": 1e-6,
    }
    return SimpleNamespace(**settings | changes)


class Checkpoint:
    """Random tensors of a layer under vLLM's names, and the values that they stand for in float32."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind, self.index, self.random = kind, index, torch.Generator().manual_seed(index)
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        mixes = (STREAMS + 2) * STREAMS
        for block in ("attn", "ffn"):
            shapes = {"fn": (mixes, STREAMS * HIDDEN), "base": (mixes,), "scale": (3,)}
            for name, shape in shapes.items():
                self.put(f"hc_{block}_{name}", torch.randn(shape, generator=self.random))
            self.put(f"{block}_norm.weight", torch.randn(HIDDEN, generator=self.random).bfloat16())
        self.put("ffn.gate.weight", torch.randn(EXPERTS, HIDDEN, generator=self.random).bfloat16() * 0.1)
        if index == HASHED:
            self.put("ffn.gate.tid2eid", torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(VOCAB)]))
        else:
            self.put("ffn.gate.e_score_correction_bias", torch.randn(EXPERTS, generator=self.random))
        for expert in range(EXPERTS):
            for weight, shape in (("w1", (WIDTH, HIDDEN)), ("w3", (WIDTH, HIDDEN)), ("w2", (HIDDEN, WIDTH))):
                self.matrix(f"ffn.experts.{expert}.{weight}", {"fp4": "mxfp4", "fp8": "e4m3"}.get(kind, ""), *shape)
        shared = "e4m3" if kind in ("fp4", "fp8") else ""
        for weight, shape in (("w1", (WIDTH, HIDDEN)), ("w3", (WIDTH, HIDDEN)), ("down_proj", (HIDDEN, WIDTH))):
            self.matrix(f"ffn.shared_experts.{weight}", shared, *shape)

    def put(self, name: str, tensor: Tensor) -> None:
        self.tensors[f"layers.{self.index}.{name}"] = tensor

    def matrix(self, name: str, form: str, *shape: int) -> None:
        value = torch.randn(shape, generator=self.random) * shape[1] ** -0.5
        if form == "mxfp4":
            packed, byte = quantize_mxfp4(value)
            self.put(f"{name}.weight", packed.view(torch.int8))
            self.put(f"{name}.weight_scale", byte.view(torch.float8_e8m0fnu))
            self.values[name] = dequantize_mxfp4(packed, byte)
        elif form == "e4m3":
            scale = torch.rand(shape[0] // 128, shape[1] // 128, generator=self.random) / 16 + 0.01
            scale = scale.to(torch.float8_e8m0fnu) if self.kind == "fp4" else scale
            weight = (value * 16).to(torch.float8_e4m3fn)
            self.put(f"{name}.weight", weight)
            self.put(f"{name}.weight_scale_inv", scale)
            self.values[name] = dequantize_weight(weight, scale)
        else:
            self.put(f"{name}.weight", value.bfloat16())
            self.values[name] = value.bfloat16().float()

    def expert(self, name: str, x: Tensor) -> Tensor:
        """Return what one expert makes of float32 x."""
        down = "down_proj" if name == "shared_experts" else "w2"
        w1, w3, w2 = (self.values[f"ffn.{name}.{weight}"] for weight in ("w1", "w3", down))
        return (torch.nn.functional.silu((x @ w1.T).clamp(max=10)) * (x @ w3.T).clamp(-10, 10)) @ w2.T

    def experts(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the result of router and experts for x, token by token and expert by expert, in float32."""
        router = {name.removeprefix(f"layers.{self.index}.ffn.gate."): t for name, t in self.tensors.items()}
        x = x.float()
        scores = torch.nn.functional.softplus(x @ router["weight"].float().T).sqrt()
        if self.index == HASHED:
            chosen = router["tid2eid"][tokens]
        else:
            chosen = (scores + router["e_score_correction_bias"]).topk(TOP_K, 1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * 1.5
        out = self.expert("shared_experts", x)
        for row, experts in enumerate(chosen.tolist()):
            for rank, expert in enumerate(experts):
                out[row] += weights[row, rank] * self.expert(f"experts.{expert}", x[row : row + 1])[0]
        return out


def loaded(checkpoint: Checkpoint, interleaved: bool = False, **of_rank: Any) -> LayerParts:
    """Return the layer of a checkpoint, loaded in two pieces and in a different order."""
    parts = LayerParts(hf_config(**CHECKPOINTS[checkpoint.kind]), checkpoint.index, torch.bfloat16, **of_rank)
    parts.ffn.interleaved |= interleaved
    load(parts, checkpoint)
    return parts


def load(parts: LayerParts, checkpoint: Checkpoint) -> None:
    weights = LayerWeights({checkpoint.index: parts})
    named = list(reversed(checkpoint.tensors.items()))
    attention = (f"layers.{checkpoint.index}.attn.wkv.weight", torch.zeros(1))
    assert list(weights.others([*named[:7], attention])) == [attention], "attention has a loader of its own"
    assert [name for name, _ in weights.others([("norm.weight", torch.ones(1)), *named[7:]])] == ["norm.weight"]
    assert weights.finish() == {f"layers.{checkpoint.index}.{name}" for name, _ in parts.named_parameters()}


@pytest.mark.parametrize("index", [HASHED, BIASED], ids=["hashed", "biased"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_experts_of_a_checkpoint_are_those_of_its_values(kind: str, index: int) -> None:
    checkpoint = Checkpoint(kind, index)
    x, tokens = torch.randn(7, HIDDEN, generator=checkpoint.random).bfloat16(), torch.arange(7)
    got, want = loaded(checkpoint).ffn(x, tokens).float(), checkpoint.experts(x, tokens)
    assert float((got - want).norm(dim=1).div(want.norm(dim=1)).max()) < 1e-2


@pytest.mark.parametrize("whole", [False, True], ids=["rows", "experts"])
@pytest.mark.parametrize("kind", ["bfloat16", "fp4", "fp8"])
def test_experts_of_all_ranks_add_up_to_those_of_one(kind: str, whole: bool) -> None:
    checkpoint = Checkpoint(kind, BIASED)
    x, tokens = torch.randn(7, HIDDEN, generator=checkpoint.random).bfloat16(), torch.arange(7)
    ranks = [loaded(checkpoint, ranks=Ranks(rank, 2, ""), whole=whole).ffn for rank in range(2)]
    got, want = sum(rank(x, tokens).float() for rank in ranks), checkpoint.experts(x, tokens)
    assert float((got - want).norm(dim=1).div(want.norm(dim=1)).max()) < 1e-2
    shape = (EXPERTS // 2, 2 * WIDTH) if whole else (EXPERTS, WIDTH)
    assert [rank.w13.shape[:2] for rank in ranks] == [shape] * 2


def test_connections_have_the_tensors_of_the_checkpoint() -> None:
    checkpoint = Checkpoint("bfloat16", BIASED)
    parts = loaded(checkpoint)
    for block, connection in (("attn", parts.hc_attn), ("ffn", parts.hc_ffn)):
        tensors = {name: checkpoint.tensors[f"layers.1.hc_{block}_{name}"] for name in ("fn", "base", "scale")}
        tensors["norm"] = checkpoint.tensors[f"layers.1.{block}_norm.weight"]
        assert all(torch.equal(getattr(connection, name), tensor) for name, tensor in tensors.items())


def test_connection_gives_a_sub_layer_what_was_pending() -> None:
    connection = loaded(Checkpoint("bfloat16", BIASED)).hc_attn
    streams = torch.randn(3, STREAMS, HIDDEN).bfloat16()
    first, y, post, comb = connection(streams, None)
    assert first is streams and y.shape == (3, HIDDEN)
    after, *mixed = connection(streams, (y, post, comb))
    assert torch.equal(after, torch.ops.dsv4.mhc_post(streams, y, post, comb))
    assert all(map(torch.equal, mixed, connection(after, None)[1:]))


def test_interleaved_weights_give_the_same_and_are_loaded_again() -> None:
    checkpoint = Checkpoint("fp4", BIASED)
    plain, other = loaded(checkpoint).ffn, loaded(checkpoint, interleaved=True)
    x, tokens = torch.randn(5, HIDDEN, generator=checkpoint.random).bfloat16(), torch.arange(5)
    assert not torch.equal(plain.w13, other.ffn.w13)
    assert torch.equal(plain(x, tokens), other.ffn(x, tokens))
    before = other.ffn.w13.clone()
    load(other, checkpoint)
    assert torch.equal(other.ffn.w13, before)


def broken(change: Any) -> NamedTensors:
    named = dict(Checkpoint("fp4", BIASED).tensors)
    change(named)
    return named.items()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda named: named.pop("layers.1.ffn.experts.3.w2.weight_scale"),
            r"no tensor layers\.1\.ffn\.experts\.3\.w2\.scale",
        ),
        (lambda named: named.update({"layers.1.ffn.gate.tid2eid": torch.zeros(1)}), r"no ffn\.gate\.tid2eid"),
        (lambda named: named.update({"layers.1.ffn.experts.6.w1.weight": torch.zeros(1)}), "no ffn.experts.6.w1"),
        (lambda named: named.update({"layers.1.hc_ffn_scale": torch.zeros(4)}), r"hc_ffn_scale.*\[4\]"),
        (
            lambda named: named.update({"layers.1.ffn.experts.0.w1.weight": torch.zeros(WIDTH, HIDDEN // 2)}),
            "experts.0.w1.weight torch.float32",
        ),
        (
            lambda named: named.update({"layers.1.ffn.shared_experts.w1.weight": torch.zeros(WIDTH, HIDDEN)}),
            "shared_experts.w1.weight of dtype torch.float32",
        ),
    ],
    ids=["missing", "table", "expert", "shape", "mxfp4", "e4m3"],
)
def test_tensor_that_does_not_belong_is_an_error_with_its_name(change: Any, words: str) -> None:
    weights = LayerWeights({BIASED: LayerParts(hf_config(**CHECKPOINTS["fp4"]), BIASED, torch.bfloat16)})
    with pytest.raises(DSV4Error, match=f"E207(.*\n)*.*{words}"):
        _ = list(weights.others(broken(change))), weights.finish()


def test_tensor_that_comes_twice_is_an_error() -> None:
    weights = LayerWeights({BIASED: LayerParts(hf_config(), BIASED, torch.bfloat16)})
    twice = [("layers.1.hc_attn_scale", torch.ones(3))] * 2
    with pytest.raises(DSV4Error, match=r"E207(.*\n)*.*hc_attn_scale"):
        _ = list(weights.others(twice))


def test_layer_that_does_not_come_is_an_error() -> None:
    weights = LayerWeights({BIASED: LayerParts(hf_config(), BIASED, torch.bfloat16)})
    with pytest.raises(DSV4Error, match=r"E207(.*\n)*.*layers\.1\.hc_attn_fn"):
        weights.finish()


def engine(hf: dict[str, Any], parallel: dict[str, Any], **changes: Any) -> Any:
    """Return a configuration of vLLM as far as `whole_limits` reads it."""
    model = SimpleNamespace(hf_config=hf_config(**hf), **changes)
    return SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(**parallel))


@pytest.mark.parametrize(
    ("hf", "words"),
    [
        ({"scoring_func": "softmax"}, "root of softplus"),
        ({"norm_topk_prob": False}, "divides weights"),
        ({"topk_method": "greedy"}, "adds a bias"),
        ({"hidden_act": "gelu"}, "SwiGLU"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"swiglu_limit": None}, "clamps"),
        ({"vision_n_layers": 3}, "tokens of images"),
        ({"quantization_config": FP8, "expert_dtype": "int4"}, "expert_dtype='int4'"),
        ({"quantization_config": FP8 | {"moe_quant_algo": "NVFP4"}}, "NVFP4"),
        ({"quantization_config": FP8 | {"ignored_layers": ["re:.*ffn.*"]}}, "left out as a whole"),
        ({"quantization_config": FP8, "moe_intermediate_size": 64}, "multiple of 128"),
        ({"quantization_config": FP8, "moe_intermediate_size": 48, "n_shared_experts": None}, "multiple of 32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_model_has_one_reason(hf: dict[str, Any], words: str) -> None:
    reasons = whole_limits.why_unsupported(engine(hf, {}))
    assert len(reasons) == 1 and words in reasons[0], reasons


@pytest.mark.parametrize(
    ("parallel", "changes", "words"),
    [
        ({"data_parallel_size": 2}, {}, "data_parallel_size=2"),
        ({"tensor_parallel_size": 3}, {}, "256 rows of an expert, 256 rows of the shared expert; use 1 or 2 or 4"),
        ({"tensor_parallel_size": 4, "enable_expert_parallel": True}, {}, "6 experts; use 1 or 2 ranks"),
        ({"enable_eplb": True}, {}, "enable_eplb"),
        ({}, {"quantization": "fp8"}, "as they come"),
        ({}, {"enable_prompt_embeds": True}, "token ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_engine_has_one_reason(parallel: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    reasons = whole_limits.why_unsupported(engine({}, parallel, **changes))
    assert len(reasons) == 1 and words in reasons[0], reasons


def test_experts_of_vllm_that_are_chosen_are_a_reason() -> None:
    config = engine({}, {})
    config.kernel_config = SimpleNamespace(moe_backend="marlin")
    assert "moe_backend='marlin'" in " ".join(whole_limits.why_unsupported(config))


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_supported_model_has_none(kind: str) -> None:
    config = engine(CHECKPOINTS[kind], {"data_parallel_size": 1, "enable_expert_parallel": False})
    config.kernel_config = SimpleNamespace(moe_backend="auto")
    assert whole_limits.why_unsupported(config) == []


def test_switch_chooses_what_is_replaced() -> None:
    settings = [registration.Settings.from_environment({registration.SWITCH: value}) for value in ("0", "1", "all")]
    assert [(setting.on, setting.whole) for setting in settings] == [(False, False), (True, False), (True, True)]


def test_version_without_a_layer_to_replace_is_an_error_for_whole_layers_alone() -> None:
    model = _compat.MODELS["cpu"]
    fields = _compat.COMMON_FIELDS | _compat.STATE_FIELDS
    installed = _compat.Installed("0.32.0", "cpu", model.names, fields)
    registration.check_version(installed)
    with pytest.raises(DSV4Error, match=f"E801(.*\n)*.*without {_compat.LAYER}"):
        registration.check_version(installed, whole=True)
    registration.check_version(replace(installed, names=model.names | {_compat.LAYER}), whole=True)

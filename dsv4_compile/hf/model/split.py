"""A converted model that is split over ranks: each keeps its part of the weights and makes the same calls.

Attention is split by heads and output groups, the shared expert by rows, routed experts by expert or by rows, embedding
and output head by vocabulary. Two all-reduces a layer; everything else, caches included, is the same on every rank.
"""

from __future__ import annotations

import functools
import inspect
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from ..._compat import device_architecture
from ...config import DeepseekV4Config
from ...errors import check, fail
from ...layout import MX_TILE, WEIGHT_TILE
from ...parallel import Ranks, agreement, all_gather, all_reduce, host_waits, peers, symmetric, watchdog
from ...parallel.collectives import first_object
from ...parallel.split import Split, Whole, attention_sizes, check_divides, check_layout, part_of, split_of
from ...reference.moe.expert_weights import weight_format
from ...runtime import groups
from .call_facts import fact, generation_facts
from .causal_lm import CompilableForCausalLM
from .generate_call import is_undisturbed
from .in_step import Generation, InStep, is_agreed, naming_faults

_P = ParamSpec("_P")
_R = TypeVar("_R")

_BLOCK = {"float": 1, "e4m3": WEIGHT_TILE, "mxfp4": MX_TILE}


class SplitEmbedding(nn.Embedding):  # type: ignore[misc]
    """Embedding of a part of the vocabulary; other ranks add the rows of other tokens."""

    ranks: Ranks
    first: int

    def forward(self, input: Tensor) -> Tensor:
        """Return `[..., hidden]` for token ids `[...]`."""
        local = input - self.first
        known = (local >= 0) & (local < self.weight.shape[0])
        rows = nn.functional.embedding(torch.where(known, local, 0), self.weight)
        return all_reduce(torch.where(known.unsqueeze(-1), rows, 0), self.ranks)


class SplitHead(nn.Linear):  # type: ignore[misc]
    """Output head of a part of the vocabulary, which returns the logits of all of it."""

    ranks: Ranks

    def forward(self, input: Tensor) -> Tensor:
        """Return `[..., vocabulary]` for `[..., hidden]`."""
        return all_gather(super().forward(input), self.ranks)


class SplitForCausalLM(CompilableForCausalLM):
    """Language model of which this process has a part."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Raise E701: a rank has a part of the weights."""
        fail("E701", got="save_pretrained of a model that is split", why=_PART, fix="save the model before convert")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place; ranks that compiled with other options differ at the next call."""
        super().compile(*args, **kwargs)
        for module in (self, self.model):
            module.__dict__["dsv4_compiled"] = repr(fact({"args": args, **kwargs}))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run `generate`, whose options, arguments and results are compared with those of all ranks.

        Where code of the caller runs between steps, as in `logits_processor`, each step is compared too.

        Raises E702 on all ranks for a call that differs or that one of them rejects, E703 for a rank that is gone.
        """
        in_step: InStep = self.model.dsv4_in_step
        bound = inspect.signature(GenerationMixin.generate).bind_partial(self, *args, **kwargs).arguments
        others = bound.pop("kwargs", {})
        arguments = {name: value for name, value in bound.items() if name not in ("self", "generation_config")} | others
        in_step.generation = generation = Generation(arguments, is_undisturbed(self, args, kwargs))
        try:
            with naming_faults(in_step):
                result = super().generate(*args, **kwargs)
                in_step.end_generation(result, self.draft_statistics)
        except BaseException as fault:
            in_step.fail_generation(generation, fault)
            raise
        finally:
            in_step.generation = None
        return result

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> None:
        signature = inspect.signature(CompilableForCausalLM._prepare_cache_for_generation)
        call = signature.bind(self, *args, **kwargs).arguments
        options, mode = call["generation_config"], call["generation_mode"]
        if options.max_time is not None:
            fail("E701", got="max_time", why="clocks of ranks differ", fix="pass max_new_tokens")
        in_step: InStep = self.model.dsv4_in_step
        generation = in_step.generation
        facts = {"rows": call["batch_size"], "length": call["max_cache_length"], "mode": mode.value}
        arguments = {} if generation is None else generation.arguments
        with in_step.watched():
            facts |= generation_facts(self, options, arguments)
            undisturbed = agreement.agree("generate", facts, in_step.ranks, generation and generation.undisturbed)
            if options.do_sample:
                share_random_state(self.model.dsv4_cache.seq_lens.device, in_step.ranks)
        if generation is not None:
            generation.agreed, generation.in_lockstep = True, not all(undisturbed)
        super()._prepare_cache_for_generation(*args, **kwargs)


SplitForCausalLM.__name__ = CompilableForCausalLM.__name__
_PART = "this rank has a part of its weights"


def on_all_ranks(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate `convert` or `load`: ranks of a mesh raise E702 if only some of them raise an error there."""

    @functools.wraps(function)
    def convert(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        mesh: Any = kwargs.get("mesh")
        timeout: Any = kwargs.get("rank_timeout", watchdog.TIMEOUT)
        if mesh is None:
            return function(*args, **kwargs)
        ranks = Ranks.of(mesh)
        peers.meet(ranks)
        agreement.compare_barriers()
        try:
            if host_waits.watch(ranks, timeout) is not None:
                groups.free_before_destruction()
            return function(*args, **kwargs)
        except Exception as fault:
            if not is_agreed(fault) and not fault.__dict__.get("dsv4_told"):
                fault.__dict__["dsv4_told"] = True
                agreement.reject("convert", fault, ranks)
            raise

    return convert


def check_splittable(attention_only: bool) -> None:
    """Raise E701 for a conversion of attention alone."""
    check(
        not attention_only,
        "E701",
        got="mesh with attention_only=True",
        why="transformers' own experts, embedding and head are not split",
        fix="pass attention_only=False",
    )


def with_collectives(ranks: Ranks, collectives: str, device: torch.device) -> Ranks:
    """Return `ranks` with the all-reduce that `collectives` names, ready on `device`. Raises E302 if it cannot be."""
    known = ("functional", "symmetric")
    check(collectives in known, "E302", got=f"collectives={collectives!r}", fix=f"pass one of {', '.join(known)}")
    if collectives == "functional":
        return ranks
    symmetric.prepare(ranks, device)
    return replace(ranks, symmetric=True)


def keep_part(model: Any, ranks: Ranks, expert_layout: str = "experts") -> None:
    """Let a transformers model, possibly on the meta device, keep this rank's part of its weights, and free the rest.

    `convert` does it; who fills a model part by part does it before, with the mesh that convert is given later.

    Raises E701, before anything is changed, if the ranks do not divide the model.
    """
    check_layout(expert_layout)
    check_divides(sizes(model, expert_layout), ranks)
    for name, parameter in model.named_parameters():
        if (how := split_of(name, expert_layout)) is not None:
            parameter.data = part_of(parameter.data, how, ranks).clone()
    model.__dict__["dsv4_part"] = replace(ranks, symmetric=False), expert_layout


def split(model: Any, ranks: Ranks, expert_layout: str, options: Mapping[str, Any]) -> InStep:
    """Make a transformers model that of one rank: its part of the weights, and an embedding and a head that know it.

    Args:
        model: a `DeepseekV4ForCausalLM`, the same on every rank, or one after `keep_part`.
        expert_layout: one of `EXPERT_LAYOUTS`.
        options: what else ranks have to agree about.

    Raises E701 if the ranks do not divide it, E702 if ranks differ, both before anything is changed.
    """
    has_part = "dsv4_part" in model.__dict__
    wanted = replace(ranks, symmetric=False), expert_layout
    if has_part and model.dsv4_part != wanted:
        fail("E701", got=f"a part for {model.dsv4_part}", why=f"convert is for {wanted}")
    if not has_part:
        check_layout(expert_layout)
        check_divides(sizes(model, expert_layout), ranks)
    device = model.lm_head.weight.device
    facts = {**options, "expert_layout": expert_layout, "configuration": model.config.to_json_string()}
    facts |= facts_of_weights(model, lambda name: split_of(name, expert_layout), device)
    agreement.check_agree("convert", facts, ranks)
    if not has_part:
        keep_part(model, ranks, expert_layout)
    in_step = InStep(ranks, device, options["rank_timeout"])
    embedding, head = model.model.embed_tokens, model.lm_head
    embedding.__class__, head.__class__ = SplitEmbedding, SplitHead
    embedding.ranks = head.ranks = ranks
    embedding.first = ranks.part(model.config.vocab_size)[0]
    return in_step


def facts_of_weights(
    model: nn.Module, rule: Callable[[str], Split | None], device: torch.device, *more: Tensor
) -> dict[str, Any]:
    """Return what ranks have in common: machine, versions, and the weights that `rule` does not split, with `more`."""
    named = dict(model.named_parameters())
    unsplit = [parameter for name, parameter in named.items() if rule(name) is None]
    return {
        "versions": [f"{name} {version(name)}" for name in ("torch", "transformers", "dsv4_compile")],
        "python": platform.python_version(),
        "CPU": torch.backends.cpu.get_cpu_capability(),
        "device": f"{device.type} {device_architecture(device)}",
        "dtypes": sorted({str(parameter.dtype) for parameter in named.values()}),
        "bits of weights that all ranks have": agreement.digest(*unsplit, *more),
    }


def place_experts(model: Any, ranks: Ranks, expert_layout: str) -> None:
    """Tell the converted layers which experts they have, and that they add their parts up."""
    experts = ranks.part(model.config.n_routed_experts)
    for layer in model.model.layers:
        layer.mlp.ranks = ranks
        layer.mlp.first_expert = experts[0] if expert_layout == "experts" else 0


def sizes(model: Any, expert_layout: str) -> list[Whole]:
    """Return the sizes of a transformers model that ranks divide."""
    config = model.config
    divided = [Whole("tokens in the vocabulary", config.vocab_size)]
    for layer in model.model.layers:
        projections = (getattr(layer.self_attn, f"{name}_proj").weight for name in ("q_b", "o_a", "o_b"))
        quantised = any(weight.dtype is torch.float8_e4m3fn for weight in projections)
        divided += attention_sizes(DeepseekV4Config.from_hf(config), fp8=quantised)
        shared, routed = layer.mlp.shared_experts.up_proj.weight, layer.mlp.experts.down_proj
        divided.append(Whole("rows of the shared expert", shared.shape[0], _BLOCK[weight_format(shared)]))
        if expert_layout == "experts":
            divided.append(Whole("experts", routed.shape[0]))
        else:
            kind = weight_format(routed)
            columns = routed.shape[-1] * (2 if kind == "mxfp4" else 1)
            divided.append(Whole("rows of an expert", columns, _BLOCK[kind]))
    return list(dict.fromkeys(divided))


def share_random_state(device: torch.device, ranks: Ranks) -> None:
    """Give the random generators of `device` on all ranks the state of rank 0, so that they sample the same tokens."""
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    where: Callable[..., Any] = module.set_rng_state
    state = module.get_rng_state() if device.type == "cpu" else module.get_rng_state(device)
    shared = first_object(state, ranks)
    where(shared) if device.type == "cpu" else where(shared, device)

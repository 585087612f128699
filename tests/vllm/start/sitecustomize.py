"""Kernels of vLLM's CPU model in PyTorch, for CPUs that vLLM has none for: they need AVX512-BF16.

Where vLLM has them, its routers alone are replaced, which do not take the few experts of the tests' models.

Python imports this file in every process that has its folder in PYTHONPATH, so workers have the kernels too. vLLM looks
for them when it is imported: they are defined before. Nothing of the plug-in is here, and nothing for a GPU.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

import torch
from torch import Tensor

lib = torch.library.Library("_C", "FRAGMENT")


def define(schema: str, function) -> None:
    lib.define(schema)
    lib.impl(schema.partition("(")[0], function, "CPU")


def hc_pre(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mult: int, iters: int, rms_eps: float, eps: float):
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_torch

    post, comb, y = mhc_pre_torch(x, fn, scale, base, rms_eps, eps, eps, 2.0, iters)
    return y.clone(), post.flatten(1).clone(), comb.clone()


def hc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    return mhc_post_torch(x, residual, post.unsqueeze(-1), comb).clone()


def hc_head(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    flat = x.flatten(1).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    mix = torch.sigmoid(flat @ fn.T * scale + base) + eps
    return (mix.unsqueeze(-1) * x.float()).sum(1).to(x.dtype)


def weights_of(logits: Tensor, ids: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    chosen = torch.nn.functional.softplus(logits.float()).sqrt().gather(1, ids)
    return chosen / chosen.sum(-1, keepdim=True) * factor, ids.to(torch.int32)


def hash_topk(logits: Tensor, ids: Tensor, topk: int, score: str, shared: int, experts: int, factor: float):
    return weights_of(logits, ids.long(), factor)


def biased_topk(x: Tensor, logits: Tensor, bias: Tensor, topk: int, norm: bool, score: str, shared: int, factor, on):
    scores = torch.nn.functional.softplus(logits.float()).sqrt() + bias
    return weights_of(logits, scores.topk(topk, dim=-1).indices, factor)


class Routers(MetaPathFinder):
    """Replaces the functions that call vLLM's routers, when their module is loaded."""

    def find_spec(self, name: str, path, target=None):
        spec = PathFinder.find_spec(name, path) if name == "vllm._custom_ops" else None
        if spec is not None:
            load = spec.loader.exec_module

            def load_and_replace(module) -> None:
                load(module)
                module.hash_topk_cpu, module.biased_topk_cpu = hash_topk, biased_topk

            spec.loader.exec_module = load_and_replace
        return spec


if torch.version.cuda is None and torch.cpu._is_avx512_bf16_supported():
    sys.meta_path.insert(0, Routers())
elif torch.version.cuda is None:
    define(
        "hc_pre_fused_cpu(Tensor x, Tensor fn, Tensor scale, Tensor base, int mult, int iters, float rms_eps, "
        "float eps) -> (Tensor, Tensor, Tensor)",
        hc_pre,
    )
    define("hc_post_fused_cpu(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor", hc_post)
    define(
        "hc_head_fused_cpu(Tensor x, Tensor fn, Tensor scale, Tensor base, float eps, float norm_eps) -> Tensor",
        hc_head,
    )
    define(
        "hash_topk_cpu(Tensor logits, Tensor ids, int topk, str score, int shared, int experts, float factor)"
        " -> (Tensor, Tensor)",
        hash_topk,
    )
    define(
        "biased_topk_cpu(Tensor x, Tensor logits, Tensor bias, int topk, bool norm, str score, int shared, "
        "float? factor, bool on) -> (Tensor, Tensor)",
        biased_topk,
    )

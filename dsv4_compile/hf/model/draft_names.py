"""Names of draft weights in checkpoints (`mtp.*`), and the files that `save_pretrained` writes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...checkpoints.index import INDEX, SINGLE
from ...errors import check
from ..loading.checkpoint import official_name
from .draft_model import PROJECTIONS
from .draft_settings import DSPARK

_FIRST = ("main_proj", "main_norm", "e_proj", "h_proj", "enorm", "hnorm")
"""Modules that checkpoints store with the first stage; others outside of layers belong to the last one."""
_NAMES = {
    "markov_w1": "markov_head.markov_w1.weight",
    "markov_w2": "markov_head.markov_w2.weight",
    "confidence_proj": "confidence_head.proj.weight",
    "own_embed.weight": "embed.weight",
    "own_head.weight": "head.weight",
}


def draft_name(name: str, stages: int) -> str:
    """Return the name under which checkpoints store a parameter of a `DraftModel` with so many stages."""
    name = name.replace("weight_scale_inv", "scale") if name.startswith(PROJECTIONS) else name
    if name.split(".")[0] in _FIRST:
        return f"mtp.0.{name}"
    official = _NAMES.get(name) or official_name(name)
    layer = official.removeprefix("layers.")
    return f"mtp.{layer}" if layer != official else f"mtp.{stages - 1}.{official}"


def stored_tensors(drafts: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield draft weights as DeepSeek stores them: in their formats, experts one by one."""
    for name, tensor in drafts.state_dict().items():
        official = draft_name(name, drafts.settings.stages)
        prefix, experts, matrix = official.rpartition(".experts.")
        if not experts:
            yield official, tensor
            continue
        matrix, _, leaf = matrix.partition(".")
        for i, expert in enumerate(tensor):
            parts = zip(("w1", "w3"), expert.chunk(2), strict=True) if matrix == "gate_up_proj" else [("w2", expert)]
            for part, value in parts:
                yield f"{prefix}.experts.{i}.{part}.{leaf or 'weight'}", value


def save_with_drafts(save: Callable[..., None], drafts: Any, folder: Any, *args: Any, **options: Any) -> None:
    """Call transformers' `save_pretrained`, and add draft layers, if there are some, to what it has written.

    Raises E208 for `push_to_hub`, which would push the folder before.
    """
    if drafts is None:
        save(folder, *args, **options)
        return
    pushed = options.get("push_to_hub", False)
    check(not pushed, "E208", got="push_to_hub with draft layers", fix="save_pretrained, then push the folder")
    save(folder, *args, **options)
    if options.get("is_main_process", True):
        save_drafts(drafts, Path(folder))


def save_drafts(drafts: Any, folder: Path) -> None:
    """Add files with the draft layers, and what the configuration says of them, to a folder of the saved target."""
    index_file, single = folder / INDEX, folder / SINGLE
    if single.exists():  # an index may be left over from an earlier save
        names = list(_names(single))
        file = "model-00001-of-00001.safetensors"
        single.rename(folder / file)
        index: dict[str, Any] = {"metadata": {"total_size": (folder / file).stat().st_size}}
        index["weight_map"] = dict.fromkeys(names, file)
    else:
        index = json.loads(index_file.read_text(encoding="utf-8"))
    stages: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored_tensors(drafts):
        stages.setdefault(name.split(".")[1], {})[name] = tensor
    for stage, tensors in stages.items():
        file = f"model-mtp-{stage}.safetensors"
        # Clones: rows of one matrix share its memory, which the format does not know.
        save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, folder / file)
        index["weight_map"] |= dict.fromkeys(tensors, file)
        index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    index_file.write_text(json.dumps(index, indent=2), encoding="utf-8")
    settings, config_file = drafts.settings, folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) | {"n_mtp_layers": settings.stages}
    if settings.kind == DSPARK:
        config |= {
            "dspark_block_size": settings.num_drafts,
            "dspark_noise_token_id": settings.noise_token,
            "dspark_target_layer_ids": list(settings.taps.layers),
            "dspark_markov_rank": settings.markov_rank,
        }
    config_file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _names(file: Path) -> Iterator[str]:
    with safe_open(file, "pt") as opened:
        yield from opened.keys()

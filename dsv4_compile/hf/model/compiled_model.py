"""Compiled code of a converted model in a folder that travels: `save_compiled` and `use_compiled`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from ...errors import DSV4Error, check, error, fail
from ...passes.choose import source_digest
from ...runtime import compile_caches, compiled_folder, compiled_in_use, machine_facts, source_keys
from .convert import check_converted

_log = logging.getLogger("dsv4_compile.hf")
_NOT_COMPILED = ("_name_or_path", "architectures", "transformers_version", "id2label", "label2id")
"""Keys of a configuration that no graph depends on."""
_FIX = "build it again for this model with `dsv4 build` or hf.save_compiled"


def save_compiled(model: Any, path: str | os.PathLike[str]) -> str:
    """Write everything that compiling made in this process to a folder, and return the folder's digest.

    Call the compiled model before, in every batch size and kind of call that is to start at once: a prompt and a step
    of one sequence, and of several. A split model writes a folder for each rank below `path`; every rank calls this.

    What the folder holds is code. `hf.load(compiled=path, compiled_digest=digest)` starts from it on an equal machine.

    Args:
        model: a converted model (see `convert`) that was compiled with backend="dsv4".
        path: a folder that does not exist, is empty, or is a compiled folder, which is replaced.

    Raises E501 for a folder with other files, E502 if nothing was compiled.
    """
    check_converted(model)
    device = model.model.dsv4_cache.seq_lens.device
    options = compiled_in_use.options_so_far()
    check(bool(options), "E502", got='a process in which backend="dsv4" compiled nothing', fix="call the model first")
    files = compile_caches.collect(device)
    made_for = machine_facts.made_for(device, source_digest())
    if any(name.startswith("inductor/") for name in files):
        made_for["vectors"] = machine_facts.vector_instructions()
    made_for["sources"] = source_keys.recorded()
    configuration = configuration_of(model)
    folder = _of_rank(model, path)
    digest = compiled_folder.write(folder, files, made_for, {**configuration, "options": options})
    size = sum(map(len, files.values())) / 1e6
    _log.info("%s: %d files, %.1f MB, digest %s", folder, len(files), size, digest)
    return digest


def use_compiled(
    model: Any, path: str | os.PathLike[str], *, digest: str | None = None, required: bool = False
) -> bool:
    """Put what `save_compiled` wrote into the caches of this process, and return whether that was done.

    Call it before the model's first call. Graphs are traced as always, and what the folder has is not compiled again.
    Where anything differs (versions, GPU or CPU, the model's configuration, sizes, cache formats, dtypes of weights),
    or the folder is damaged, nothing is written, and the reason is in the log: the model compiles.

    The folder is code of whoever wrote it: pass one that you built, or one with the `digest` that its builder told you.

    Args:
        digest: what `save_compiled` returned and `dsv4 build` printed; None trusts who could write the folder.
        required: raise in place of compiling, here and for graphs that the folder lacks.

    Raises E501 for another digest; with `required` E501 for a damaged folder and E502 for one made for something else.
    """
    check_converted(model)
    folder = _of_rank(model, path)
    device = model.model.dsv4_cache.seq_lens.device
    try:
        compiled = compiled_folder.read(folder, digest)
        _check_equal(compiled, model, device)
        compile_caches.place(compiled.files, device)
        source_keys.take(compiled.made_for.get("sources"))
    except (DSV4Error, OSError) as raised:
        full = error("E502", got=str(folder), why=f"the caches cannot be written: {raised}")
        fault = raised if isinstance(raised, DSV4Error) else full
        if required or (fault.code == "E501" and digest is not None):
            raise fault from None
        _log.warning("compiles, and does not use %s: %s; %s", folder, fault.got, fault.why or fault.fix)
        return False
    compiled_in_use.use(folder, required=required, options=list(compiled.configuration["options"]))
    _log.info("%s: %d files are in the caches", folder, len(compiled.files))
    return True


def configuration_of(model: Any) -> dict[str, Any]:
    """Return what graphs of a converted model depend on, as plain values."""
    cache, ranks = model.model.dsv4_cache.paged, model.model.layers[0].self_attn.dsv4.ranks
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    tensors = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    kinds = {str(dtype): sum(other == dtype for _, other, _ in tensors) for dtype in {each[1] for each in tensors}}
    formats = cache.cache_format
    return {
        "model": {name: value for name, value in config.items() if name not in _NOT_COMPILED},
        "max_batch_size": cache.max_batch_size,
        "max_seq_len": cache.max_seq_len,
        "max_step_tokens": cache.max_step_tokens,
        "caches": {field.name: str(getattr(formats, field.name)) for field in fields(formats)},
        "attention_only": model.model.dsv4_read is None,
        "ranks": None if ranks is None else asdict(ranks),
        "weights": {**kinds, "names": hashlib.sha256(repr(sorted(tensors)).encode()).hexdigest()[:16]},
        "threads": torch.get_num_threads(),
    }


def _check_equal(compiled: compiled_folder.Compiled, model: Any, device: torch.device) -> None:
    """Raise E502 with the first field in which the folder differs from this process and model."""
    stored = dict(compiled.made_for)
    vectors = stored.pop("vectors", None)
    stored.pop("sources", None)  # hashes of files that this machine may have or not
    why = compiled_folder.difference("made_for", stored, machine_facts.made_for(device, source_digest()))
    configuration = dict(compiled.configuration)
    options = configuration.pop("options", None)
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        fail("E501", got=f"{compiled.folder} without the options of its graphs", fix=_FIX)
    why = why or compiled_folder.difference("configuration", configuration, configuration_of(model))
    if not why and vectors is not None and not machine_facts.expect_vector_instructions(vectors):
        why = f"made_for.vectors was {vectors}, and torch generates C++ for others on this CPU"
    check(not why, "E502", got=str(compiled.folder), why=why, fix=_FIX)


def _of_rank(model: Any, path: str | os.PathLike[str]) -> Path:
    from ...checkpoints.paths import folder_of

    ranks = model.model.layers[0].self_attn.dsv4.ranks
    return folder_of(path) if ranks is None else folder_of(path) / f"rank-{ranks.rank}-of-{ranks.size}"

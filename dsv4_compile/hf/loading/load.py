"""Loading of a checkpoint folder into a converted model (`load`), tensor by tensor to its final place on the device.

Everything that headers can tell is checked before anything is allocated. Then parameters are allocated, those that
convert stacks as rows of one matrix, and filled by threads, each tensor by reads into its memory (`fill`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...cache import CacheFormat, PagedCaches
from ...checkpoints.header import Stored
from ...checkpoints.reader import Reader
from ...config import DeepseekV4Config
from ...errors import DSV4Error, check, error, fail
from ...loading import hf_name
from ...models.v41.cache import V41Format
from ...models.v41.config import MODEL_TYPE
from ...modules import DeepseekV4Attention
from ...modules.linear import Linear
from ...parallel import Ranks, agreement, gather_objects, watchdog
from ...runtime import start_times
from ...sizes import check_optional_size, check_size, free_memory, shown
from ..model.arguments import check_flags
from ..model.compiled_model import use_compiled
from ..model.convert import convert
from ..model.draft_settings import check_step
from ..model.split import check_splittable, on_all_ranks
from ..model.warm_up import check_serving, compile_and_warm_up
from .checkpoint import Checkpoint, Problems, read_checkpoint, without_drafts
from .draft_placement import cache_bytes, describe_drafts, place_drafts
from .fill import fill
from .folder_config import generation_config
from .placement import Placement, hf, place, targets
from .split_load import split_placement
from .v41_folder import load_v41

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("dsv4_compile.hf")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_GIGA = 10**9


@on_all_ranks
def load(
    path: str | Path,
    *,
    max_batch_size: int,
    max_seq_len: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    dequantize: bool = False,
    kv_cache_dtype: str | CacheFormat | V41Format = "auto",
    indexer_cache_dtype: str = "auto",
    hadamard: bool = False,
    max_step_tokens: int | None = None,
    attention_only: bool = False,
    mesh: DeviceMesh | None = None,
    expert_layout: str = "experts",
    collectives: str = "functional",
    rank_timeout: float = watchdog.TIMEOUT,
    drafts: str = "auto",
    num_drafts: int | None = None,
    compiled: str | Path | None = None,
    compiled_digest: str | None = None,
    compiled_required: bool = False,
    warm_up: bool | Mapping[str, Any] = False,
) -> Any:
    """Load a DeepSeek-V4 checkpoint and return it converted (see `convert`), in eval mode.

    A folder of DeepSeek-V4.1 becomes a language model around `models.v41.load` that generates, compiles and saves as
    this one does. It has no `indexer_cache_dtype`, `hadamard`, `attention_only`, `num_drafts` and `compiled` (E208);
    `kv_cache_dtype` is a `models.v41.V41Format`.

    Args:
        path: a folder with `config.json` and safetensors files, as DeepSeek publishes it or as transformers'
            `save_pretrained` writes it.
        device: where the model goes (None = the GPU if there is one, else the CPU).
        dtype: dtype of floating weights: bfloat16, float16 or float32 (None = that of `config.json`). Weights that
            transformers keeps in float32 stay so.
        dequantize: make e4m3 and MXFP4 weights floating, in `dtype`. Without it they stay as they are stored, and ops
            quantise the inputs of e4m3 linears as DeepSeek does.
        max_batch_size, max_seq_len, kv_cache_dtype, indexer_cache_dtype, hadamard, max_step_tokens, attention_only:
            see `convert`.
        mesh, expert_layout, collectives, rank_timeout: see `convert`. A rank reads and allocates its part alone.
        drafts: draft layers (`mtp.*`), which become `model.dsv4_drafts`. "on" loads them and raises E209 for a folder
            without; "off" leaves them out; "auto" loads those of a folder if they fit next to the model, its caches and
            a twentieth of the free memory, on all ranks. A warning says that they are left out.
        num_drafts: tokens that MTP layers draft in a step, 1 to 3 (None = 1). DSpark layers have a fixed number.
        compiled, compiled_digest, compiled_required: path, digest and required of `use_compiled`: a folder that
            `dsv4 build` or `save_compiled` wrote, whose code the model starts from. It is code, so none is looked for
            in `path`.
        warm_up: return a model nobody waits for: compiled in place, kernels built, and on a GPU captured, see
            `hf.warm_up`. True compiles with fullgraph=True, and on a GPU `dsv4.cudagraph="full"`; a dict has options
            of backend="dsv4" that differ. Drafts warm up too, and all ranks of a split model.

    Memory holds the weights and, while they are read, at most 16 MiB for each thread that reads, pinned for a GPU, and
    one tensor that is converted. Threads are as many as CPUs that the process may use, at most 16. The log (INFO) and
    the progress say where the seconds went; `dsv4 doctor FOLDER --start` prints a table. Parameters need no gradient.

    Raises, before anything is allocated: E209 for a folder that is incomplete or damaged, E207 for tensors that do not
    fit the configuration, E205 for another model, E210 if weights and caches do not fit into the device's memory,
    and with `warm_up` E301 and E420 for its options, E101 without a C++ compiler on a CPU, E208 under autocast.
    """
    sizes: dict[str, Any] = {
        "max_batch_size": check_size("max_batch_size", max_batch_size),
        "max_seq_len": check_size("max_seq_len", max_seq_len),
        "max_step_tokens": check_optional_size("max_step_tokens", max_step_tokens),
    }
    check_flags(
        dequantize=dequantize, hadamard=hadamard, attention_only=attention_only, compiled_required=compiled_required
    )
    place_on = _device(device)
    check(dtype is None or dtype in _FLOATS, "E201", got=f"dtype={dtype}", rule=f"dtype is one of {_FLOATS}, or None")
    check(
        not torch.is_inference_mode_enabled(),
        "E208",
        got="load under torch.inference_mode()",
        why="weights that are made there could not be moved or replaced",
        fix="load outside, and run the model inside",
    )
    options_of_warm_up = _options_of(warm_up, place_on, compiled is None)
    modes = ("auto", "on", "off")
    check(drafts in modes, "E201", got=f"drafts={drafts!r}", rule=f"drafts is one of {', '.join(modes)}")
    begin = time.monotonic()
    checkpoint = read_checkpoint(path)
    if checkpoint.config.get("model_type") == MODEL_TYPE:
        only_v4 = {
            "indexer_cache_dtype": indexer_cache_dtype != "auto",
            "hadamard": hadamard,
            "attention_only": attention_only,
            "num_drafts": num_drafts is not None,
            "compiled": compiled is not None,
        }
        options: dict[str, Any] = {"device": place_on, "dtype": dtype, "dequantize": dequantize, "mesh": mesh}
        options |= {"expert_layout": expert_layout, "collectives": collectives, "rank_timeout": rank_timeout}
        options |= {"kv_cache_dtype": kv_cache_dtype, "drafts": drafts}
        v41 = load_v41(checkpoint, sizes, only_v4=only_v4, **options)
        if options_of_warm_up is not None:
            compile_and_warm_up(v41, options_of_warm_up)
        return v41
    if isinstance(kv_cache_dtype, V41Format):
        fail("E202", got="a V41Format for a folder of DeepSeek-V4", fix="pass a CacheFormat, or the name of one")
    if drafts == "on" and not checkpoint.drafts:
        raise without_drafts(checkpoint)
    draft_placement = None
    try:
        placement = place(checkpoint, dtype=dtype, dequantize=dequantize)
        if drafts != "off":
            draft_placement = place_drafts(checkpoint, placement, dequantize=dequantize, num_drafts=num_drafts)
    except DSV4Error as fault:
        if fault.code == "E207":  # missing layers or experts: files that are missing or damaged explain it
            _raise_first(checkpoint.folder, checkpoint.problems)
        raise
    placements = [placement] if draft_placement is None else [placement, draft_placement]
    _raise_first(checkpoint.folder, checkpoint.problems, *(each.problems for each in placements))
    if draft_placement is not None:
        check_step(draft_placement.model.settings, sizes["max_step_tokens"])
    if mesh is not None:
        check_splittable(attention_only)
        for each in placements:
            split_placement(each, Ranks.of(mesh), expert_layout)
    generation = generation_config(checkpoint.folder, placement.model.config.vocab_size)
    ours = DeepseekV4Config.from_hf(placement.model.config)
    model_dtype = placement.model.config.dtype
    formats = CacheFormat.resolve(kv_cache_dtype, indexer_cache_dtype, model_dtype=model_dtype, hadamard=hadamard)
    one = PagedCaches(ours, **sizes | {"max_batch_size": 1}, cache_format=formats, device="meta").nbytes
    weights, caches, reason = placement.nbytes(), one * sizes["max_batch_size"], ""
    if draft_placement is not None:
        more = draft_placement.nbytes(), cache_bytes(draft_placement, formats) * sizes["max_batch_size"]
        if drafts == "on" or _fit(weights + caches + sum(more), place_on, mesh):
            weights, caches = weights + more[0], caches + more[1]
        else:
            placements, draft_placement = [placement], None
            reason = (
                '; they do not fit next to the model, and drafts="on" raises an error that says how much is missing'
            )
    check_memory(checkpoint.folder, place_on, weights, caches)
    if checkpoint.drafts and draft_placement is None:
        _log.warning("%s: draft layers are not loaded, %s%s", checkpoint.folder, describe_drafts(checkpoint), reason)
    model = placement.model
    if placement.tied is not None:
        _check_tied(checkpoint, placement.tied)
    planned = time.monotonic()
    start_times.count("read", planned - begin)
    for each in placements:
        allocate(each, DeepseekV4Config.from_hf(each.model.config), place_on)
    allocated = time.monotonic()
    filled = [fill(each, checkpoint.sources, place_on) for each in placements]
    read = time.monotonic()
    model.config.name_or_path = str(checkpoint.folder)
    model.generation_config = generation or model.generation_config
    options = {
        "kv_cache_dtype": kv_cache_dtype,
        "indexer_cache_dtype": indexer_cache_dtype,
        "hadamard": hadamard,
        "mesh": mesh,
        "expert_layout": expert_layout,
        "collectives": collectives,
        "rank_timeout": rank_timeout,
        "drafts": None if draft_placement is None else draft_placement.model,
    }
    with place_on:  # whatever the caller's default device is
        converted = convert(model.eval(), **sizes, **options, attention_only=attention_only)
    start_times.count("read", read - allocated)
    start_times.count("place", allocated - planned + time.monotonic() - read)
    _log.info(
        "%s: %.2f GB on %s; headers %.1f s, allocation %.1f s, weights %.1f s (%s), conversion %.1f s",
        *(checkpoint.folder, sum(each.nbytes for each in filled) / _GIGA, place_on, planned - begin),
        *(allocated - planned, read - allocated, "; ".join(map(str, filled)), time.monotonic() - read),
    )
    if compiled is not None:
        use_compiled(converted, compiled, digest=compiled_digest, required=compiled_required)
    if mesh is not None:  # a rank alone in a warm-up would wait for the others
        agreement.check_agree("load", {"warm_up": repr(warm_up)}, Ranks.of(mesh))
    if options_of_warm_up is not None:
        compile_and_warm_up(converted, options_of_warm_up)
    return converted


def _options_of(warm_up: Any, device: torch.device, compiles: bool) -> Mapping[str, Any] | None:
    """Return the options to compile with, or None for a model that is not warmed up.

    Raises E201 for a value that is neither, and what `check_serving` raises.
    """
    good = type(warm_up) is bool or isinstance(warm_up, Mapping)
    rule = 'warm_up is True, False, or a dict of options as {"dsv4.strict": "after_warmup"}'
    check(good, "E201", got=f"warm_up={shown(warm_up)}", rule=rule, fix="pass one of them")
    if warm_up is False:
        return None
    options: Mapping[str, Any] = {} if warm_up is True else warm_up
    check_serving(device, options, compiles=compiles)
    return options


def _device(device: torch.device | str | None) -> torch.device:
    """Return the device to load onto, or raise E201 if it does not exist."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as fault:
        raise error("E201", got=f"device={device!r}", why=str(fault).splitlines()[0], fix="cuda, cuda:1, cpu") from None
    count = torch.cuda.device_count()
    check(
        found.type != "meta" and (found.type != "cuda" or (found.index or 0) < count),
        "E201",
        got=f"device={str(found)!r}",
        rule="weights are loaded onto a device that this process sees",
        why=f"torch sees {count} CUDA devices",
        fix="pass a different device; without a GPU, device='cpu'",
    )
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def _raise_first(folder: Path, *groups: Problems) -> None:
    """Raise the first problem, with the number of the others."""
    kept = [problem for group in groups for problem in group.kept]
    count = sum(group.count for group in groups)
    if not kept:
        return
    first = kept[0]
    if count > 1:
        more = f"{first.why or 'the headers say so'}; {count - 1} more: dsv4 doctor {folder}"
        first = error(first.code, got=first.got, why=more, fix=first.fix)
    raise first


def _fit(nbytes: int, device: torch.device, mesh: DeviceMesh | None) -> bool:
    """Return whether `nbytes` of weights and caches leave a twentieth of the free memory, on all ranks of `mesh`."""
    free = free_memory(device)
    fits = free is None or nbytes <= 0.95 * free
    return fits if mesh is None else all(gather_objects(fits, Ranks.of(mesh)))


def check_memory(folder: Path, device: torch.device, weights: int, caches: int) -> None:
    """Raise E210 unless weights and caches fit into the memory of `device`."""
    free = free_memory(device)
    needed = f"{weights / _GIGA:.2f} GB of weights and {caches / _GIGA:.2f} GB of caches"
    check(
        free is None or weights + caches <= free,
        "E210",
        got=f"{needed} for {(free or 0) / _GIGA:.2f} GB free on {device}",
        why="activations need memory, too",
        fix=f"dsv4 doctor {folder} lists GPUs that hold it; smaller max_batch_size or max_seq_len need fewer caches",
    )


def _check_tied(checkpoint: Checkpoint, head: Stored) -> None:
    """Raise E207 unless a stored output head equals the embedding that it is tied to."""
    embedding = checkpoint.tensors["embed.weight"]
    values = []
    for stored in (head, embedding):
        with Reader(checkpoint.sources[stored.file]) as reader:
            values.append(reader.read(stored))
    equal = torch.equal(*values)
    check(equal, "E207", got=f"{head} differs from {embedding}", why="config.json has tie_word_embeddings=true")


def allocate(placement: Placement, config: DeepseekV4Config, device: torch.device) -> None:
    """Give every parameter and buffer of the model on the meta device uninitialised memory on `device`.

    Weights that a converted model stacks are rows of one matrix from the start, so that none is ever copied.
    """
    model, dtypes = placement.model, placement.dtypes
    shapes = {name: tensor.shape for name, tensor in targets(model)}
    made: dict[str, Tensor] = {}
    for names in _stacks(placement, config):
        heights = [shapes[name][0] for name in names]
        size = (sum(heights), *shapes[names[0]][1:])
        matrix = torch.empty(size, dtype=dtypes[names[0]], device=device)
        made.update(zip(names, matrix.split(heights), strict=True))
    tied = model.config.tie_word_embeddings
    for name, shape in shapes.items():
        tensor = made.get(name)
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtypes[name], device=device)
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False) if leaf in module._parameters else tensor)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    for path, module in list(model.named_modules()):
        if type(module) is hf.DeepseekV4RotaryEmbedding:
            with torch.device("cpu"):
                rotary = hf.DeepseekV4RotaryEmbedding(model.config)
            model.set_submodule(path, rotary.to(device))


def _stacks(placement: Placement, config: DeepseekV4Config) -> Iterator[list[str]]:
    """Yield names of parameters that a converted model stacks: linears of one input that are stored alike."""
    known = dict(targets(placement.model))
    for i in range(config.num_layers):
        ours = DeepseekV4Attention(config, i, device="meta", max_seq_len=1)
        names = {module: name for name, module in ours.named_modules() if isinstance(module, Linear)}
        layer = f"model.layers.{i}"
        stacks = [[names[part] for part in stack.parts] for stack in (*ours.hidden_stacks, *ours.latent_stacks)]
        groups = [[f"{layer}.self_attn.{hf_name(f'{name}.weight')}" for name in stack] for stack in stacks]
        groups.append([f"{layer}.mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up")])
        groups += [[f"{weight}_scale_inv" for weight in group if f"{weight}_scale_inv" in known] for group in groups]
        for group in groups:
            for _, alike in groupby(group, lambda name: placement.dtypes[name]):
                yield list(alike)

"""Recording in vLLM's worker processes, one for each rank of its tensor parallel group.

vLLM imports this file in every worker (`worker_extension_cls`), before it builds the model, and adds the methods of
`RecordingRank` to its worker.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import recording
import serve
import torch
from vllm import ModelRegistry

from dsv4_compile import DeepseekV4Attention, DeepseekV4Config
from dsv4_compile.loading import load_attention_from_safetensors

MODEL = serve.RECORDING_WHOLE if os.environ["DSV4_VLLM"] == "all" else serve.RECORDING
ModelRegistry.register_model("DeepseekV4ForCausalLM", MODEL)


class RecordingRank:
    """Methods of a worker that records the rows of every layer, which are the same on all ranks."""

    model_runner: Any
    vllm_config: Any

    def start_recording(self, padding: int) -> None:
        """Record every step from now on."""
        self.recorded = recording.Recording(padding=padding)
        self.recording_model = self.model_runner.get_model().model
        self.recorder = self.recorded.of(self.model_runner, self.recording_model)
        self.recorder.__enter__()

    def finish_recording(self, tokens: dict[str, list[int]], folder: str) -> dict[str, Any]:
        """Compare every row with whole layers of the checkpoint, in this process; `tokens` by a request's name.

        Rank 0 writes the model's outputs.
        """
        from torch._dynamo import utils as dynamo

        self.recorder.__exit__(None, None, None)
        rows, model = self.recorded.rows, self.recording_model
        named = recording.named(rows, tokens)
        with torch.device(self.model_runner.device):
            errors = recording.compare(model, self.recorded, named, self.whole_layers())
        attention, ranks = model.attention[0], model.attention[0].ranks
        if ranks.rank == 0:
            torch.save(recording.outputs(rows, named), Path(folder) / "final.pt")
        bits = [row.final.view(torch.int16).cpu().numpy().tobytes() for name in sorted(rows) for row in rows[name]]
        return asdict(errors) | {
            "rank": ranks.rank,
            "ranks": ranks.size,
            "heads": attention.layer.wq_b.weight.shape[0] // attention.layer.config.head_dim,
            "bits": hashlib.sha256(b"".join(bits)).hexdigest(),
            "steps": self.recorded.steps,
            "sets": len(model.sets),
            "graphs": [dynamo.counters["stats"]["unique_graphs"]],
            "breaks": sum(dynamo.counters["graph_break"].values()),
        }

    def whole_layers(self) -> list[DeepseekV4Attention]:
        """Return the checkpoint's attention layers, with all heads."""
        model = self.vllm_config.model_config
        config = DeepseekV4Config.from_hf(model.hf_config)
        layers = []
        for index in range(config.num_layers):
            settings: dict[str, Any] = {"fp8": hasattr(model.hf_config, "quantization_config"), "dtype": model.dtype}
            layer = DeepseekV4Attention(
                config, index, kv_cache_dtype="fp8_ds_mla", max_seq_len=model.max_model_len, **settings
            )
            load_attention_from_safetensors(layer, model.model, prefix=f"layers.{index}.attn.")
            layers.append(layer)
        return layers

"""Not a test: folders and configurations from a hostile world.

`values()` and `folders()` are tables of cases by name, each a function that spoils a copy of a good folder.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hf import official

Spoil = Callable[[Path], Any]
INDEX, SHARD = "model.safetensors.index.json", "model-00002-of-00004.safetensors"

TEXTS: dict[str, str] = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "minus": "-1",
    "one": "1",
    "half": "0.5",
    "billion": "1000000000",
    "2**63": str(2**63),
    "digits": "9" * 5000,
    "1e308": "1e308",
    "1e999": "1e999",
    "nan": "NaN",
    "inf": "-Infinity",
    "text": '"7"',
    "hub": '"org/repo"',
    "path": '"../../../etc/passwd"',
    "long": json.dumps("x" * 100_000),
    "surrogate": '"\\ud800"',
    "escape": '"\\u001b[2Jverdict: all is well\\u0000"',
    "list": "[]",
    "lists": "[[1], {}, null]",
    "object": "{}",
    "odd-object": '{"": 1, "main": 5, "type": [], "class": "os.system"}',
    "deep": "[" * 50_000 + "]" * 50_000,
}
"""Hostile values, as JSON spells them."""
CODE_KEYS = (
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation_internal",
    "auto_map",
    "trust_remote_code",
    "custom_pipelines",
    "num_labels",
    "id2label",
    "per_layer_config",
    "name_or_path",
    "is_encoder_decoder",
    "pad_token_id",
)
"""Keys that no checkpoint of DeepSeek has, and that transformers acts on."""
NESTED = {
    "rope_scaling": official.CONFIG["rope_scaling"],
    "quantization_config": official.CONFIG["quantization_config"],
}


def write_config(folder: Path, text: str) -> None:
    replaced(folder / "config.json", text.encode("utf-8", "surrogatepass"))


def with_value(key: str, text: str, inside: str = "") -> Spoil:
    """Set one key of the configuration, or of an object inside it, to a value that is spelled out."""

    def spoil(folder: Path) -> None:
        config = json.loads(json.dumps(official.CONFIG))
        (config[inside] if inside else config)[key] = "@value@"
        write_config(folder, json.dumps(config).replace('"@value@"', text))

    return spoil


def values() -> dict[str, Spoil]:
    """Return every field of `config.json`, nested ones and some that name code, with every hostile value."""
    fields = [("", key) for key in (*official.CONFIG, *CODE_KEYS)]
    fields += [(inside, key) for inside, fields_inside in NESTED.items() for key in fields_inside]
    return {
        f"{inside}{'.' if inside else ''}{key}={name}": with_value(key, text, inside)
        for inside, key in fields
        for name, text in TEXTS.items()
    }


def replaced(file: Path, data: bytes) -> None:
    """Write a file anew: those of a copied folder are links to the same bytes."""
    file.unlink(missing_ok=True)
    file.write_bytes(data)


def linked(file: Path, target: str | Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(target)


def fifo(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def folder_instead(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()


def sparse(file: Path, size: int) -> None:
    replaced(file, b"{")
    os.truncate(file, size)


def bytes_of(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b"{}"


FILES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda file: replaced(file, b""),
    "zeros": lambda file: replaced(file, bytes(1000)),
    "byte-order-mark": lambda file: replaced(file, b"\xef\xbb\xbf" + bytes_of(file)),
    "utf-16": lambda file: replaced(file, bytes_of(file).decode("latin-1").encode("utf-16")),
    "latin-1": lambda file: replaced(file, b'{"a": "\xe9"}'),
    "half": lambda file: replaced(file, bytes_of(file)[: len(bytes_of(file)) // 2]),
    "twice": lambda file: replaced(file, bytes_of(file) * 2),
    "list": lambda file: replaced(file, b"[1, 2]"),
    "number": lambda file: replaced(file, b"7"),
    "null": lambda file: replaced(file, b"null"),
    "two-keys": lambda file: replaced(file, b'{"weight_map": {}, "weight_map": {"a": "b"}}'),
    "deep-lists": lambda file: replaced(file, b"[" * 200_000),
    "deep-objects": lambda file: replaced(file, b'{"a":' * 200_000),
    "many-lists": lambda file: replaced(file, b'{"a": [' + b"[]," * 1_000_000 + b"[]]}"),
    "sparse": lambda file: sparse(file, 3 << 30),
    "fifo": fifo,
    "folder": folder_instead,
    "dangling": lambda file: linked(file, "nothing"),
    "itself": lambda file: linked(file, file.name),
    "passwd": lambda file: linked(file, "/etc/passwd"),
    "zero-device": lambda file: linked(file, "/dev/zero"),
    "terminal": lambda file: linked(file, "/dev/tty"),
    "process": lambda file: linked(file, "/proc/self/environ"),
    "upwards": lambda file: linked(file, "../../secret.json"),
}
"""Replacements of a plain file: links, devices and special files."""
NAMES: dict[str, Any] = {
    "upwards": "../secret.json",
    "absolute": "/etc/passwd",
    "upwards-inside": "a/../../secret.json",
    "inside-and-back": f"a/../{SHARD}",
    "this-folder": f"./{SHARD}",
    "nul": "model\0.safetensors",
    "backslash": "..\\secret.json",
    "drive": "C:\\secret",
    "empty": "",
    "dot": ".",
    "dots": "..",
    "slash": "/",
    "slashes": f"//{SHARD}",
    "trailing": f"{SHARD}/",
    "newline": "a\nverdict: all is well",
    "escape": "\x1b[2J",
    "bidi": "a\u202etxt.safetensors",
    "zero-width": "a\u200b.safetensors",
    "surrogate": "\ud800",
    "long": "x" * 300,
    "very-long": "x/" * 3000,
    "home": "~/secret",
    "process": "/proc/self/environ",
    "config": "config.json",
    "number": 7,
    "list": ["a"],
    "null": None,
}
"""File names in an index."""
TENSORS: dict[str, str] = {
    "digits": "layers." + "9" * 5000 + ".x",
    "nine-digits": "layers.999999999.attn_norm.weight",
    "other-digits": "layers.\u0663.attn_norm.weight",
    "zeros": "layers.0001.attn_norm.weight",
    "minus": "layers.-1.attn_norm.weight",
    "expert": "layers.0.ffn.experts.999999999.w1.weight",
    "expert-digits": "layers.0.ffn.experts." + "9" * 5000 + ".w1.weight",
    "nul": "a\0b",
    "surrogate": "\ud800",
    "escape": "\x1b[2J",
    "newline": "a\nb",
    "empty": "",
    "long": "x" * 100_000,
    "dots": "......",
    "metadata": "__metadata__",
    "class": "__class__",
}
"""Names of tensors."""
OFFSETS = ("[0, NaN]", "[]", "[0]", "[1, 0]", "[-1, 1]", '["0", "1"]', "null", "[0.0, 1.5]", "7", "{}", "[true, false]")
OFFSETS += (f"[0, {2**63}]", f"[0, {'9' * 5000}]", "[0, 1, 2]", "[[0], [1]]", "[0, 1e999]")
SHAPES = ("null", "7", '"2"', "{}", "[null]", "[-1]", "[1.5]", "[true]", f"[{2**63}]", f"[{'9' * 5000}]", "[NaN]", "[]")
SHAPES += ("[[1]]", "[" + "1," * 100_000 + "1]", f"[{2**40}, {2**40}]", "[0]")
DTYPES = ("null", "7", "[]", "{}", '""', '"F99"', '"os.system"', '"\\ud800"', '"bf16"', json.dumps("x" * 100_000))
ENTRIES = ("null", "7", "[]", "{}", '"x"', '{"dtype": "F32"}', "[" * 50_000 + "]" * 50_000)


def with_header(change: Callable[[str], str]) -> Spoil:
    """Rewrite the text of a shard's header, and leave the data as they are."""

    def spoil(folder: Path) -> None:
        data = (folder / SHARD).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        text = change(data[8 : 8 + length].decode()).encode("utf-8", "surrogatepass")
        replaced(folder / SHARD, struct.pack("<Q", len(text)) + text + data[8 + length :])

    return spoil


def with_field(key: str, text: str) -> Spoil:
    """Set a field of the first tensor in a header, or the whole entry if `key` is empty."""

    def change(header: str) -> str:
        entries = json.loads(header)
        name = next(name for name in entries if name != "__metadata__")
        entries[name] = (entries[name] | {key: "@value@"}) if key else "@value@"
        return json.dumps(entries).replace('"@value@"', text)

    return with_header(change)


def with_length(length: int) -> Spoil:
    def spoil(folder: Path) -> None:
        replaced(folder / SHARD, struct.pack("<Q", length) + (folder / SHARD).read_bytes()[8:])

    return spoil


def with_name(name: str) -> Spoil:
    """Rename a tensor in the header and in the index."""

    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        old = next(key for key, file in index["weight_map"].items() if file == SHARD)
        index["weight_map"][name] = index["weight_map"].pop(old)
        replaced(folder / INDEX, json.dumps(index).encode())
        with_header(lambda header: header.replace(json.dumps(old), json.dumps(name)))(folder)

    return spoil


def many_tensors(count: int) -> Spoil:
    """Write a header of so many tensors of one byte."""

    def spoil(folder: Path) -> None:
        header = ",".join(f'"{i:x}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(count))
        text = f"{{{header}}}".encode()
        replaced(folder / SHARD, struct.pack("<Q", len(text)) + text)
        with (folder / SHARD).open("r+b") as stream:
            stream.truncate(8 + len(text) + count)

    return spoil


def with_index(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        replaced(folder / INDEX, json.dumps(change(index) or index).encode())

    return spoil


def with_shard_named(name: Any) -> Spoil:
    def change(index: dict[str, Any]) -> None:
        for tensor, file in index["weight_map"].items():
            if file == SHARD:
                index["weight_map"][tensor] = name

    return with_index(change)


CODE = "import pathlib\npathlib.Path(__file__).with_name('executed').write_text('')\n"


def with_module(name: str) -> Spoil:
    """Put a module into the folder that leaves a file when it is imported, and name it wherever names are read."""

    def spoil(folder: Path) -> None:
        (folder / f"{name}.py").write_text(CODE)
        classes = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModel"), f"{name}.Model")
        config = official.CONFIG | {"auto_map": classes, "trust_remote_code": True, "attn_implementation": name}
        write_config(folder, json.dumps(config))
        replaced(folder / "generation_config.json", json.dumps({"custom_generate": name, "auto_map": classes}).encode())

    return spoil


def folders() -> dict[str, Spoil]:
    """Return all damages of a folder by name."""
    found: dict[str, Spoil] = {}
    for file in ("config.json", INDEX, SHARD, "generation_config.json", "model.safetensors"):
        found |= {f"{file}:{kind}": lambda folder, file=file, kind=kind: FILES[kind](folder / file) for kind in FILES}
    found |= {f"file-name:{name}": with_shard_named(value) for name, value in NAMES.items()}
    found |= {f"tensor-name:{name}": with_name(value) for name, value in TENSORS.items()}
    for key, texts in {"data_offsets": OFFSETS, "shape": SHAPES, "dtype": DTYPES, "": ENTRIES}.items():
        found |= {f"header:{key}={text[:20]}#{i}": with_field(key, text) for i, text in enumerate(texts)}
    lengths = (0, 1, 7, 2**31, 2**40, 2**63, 2**64 - 1, 100_000_000, 99_999_999)
    found |= {f"header-length:{length}": with_length(length) for length in lengths}
    found |= {
        f"index:{text}": with_index(lambda i, text=text: {"weight_map": json.loads(text)}) for text in ENTRIES[:5]
    }
    modules = ("modeling_deepseek_v4", "configuration_deepseek_v4", "json", "torch", "safetensors", "sitecustomize")
    found |= {f"module:{name}": with_module(name) for name in modules}
    found |= {f"tensors:{count}": many_tensors(count) for count in (1_500_000, 1_200_000, 199_000)}
    names = {f"layers.1.ffn.experts.{i}.w1.weight": f"model-{i}.safetensors" for i in range(199_000)}
    found["files:199000"] = with_index(lambda index: {"weight_map": names})
    found["files:9000"] = with_index(lambda index: {"weight_map": dict(list(names.items())[:9000])})
    found["files-of-99999"] = lambda folder: [
        (folder / INDEX).unlink(),
        *((folder / f"model-00001-of-{count}.safetensors").touch() for count in ("99999",)),
        *(file.unlink() for file in official.files(folder) if file.name.endswith("00004.safetensors")),
    ]
    found["metadata"] = with_header(lambda header: header.replace('"format":"pt"', '"format":[7]'))
    found["metadata-list"] = with_header(lambda header: header.replace('{"format":"pt"}', "[]"))
    return found

"""The keys of a plan: dotted names whose tokens may be patterns, as in `layers.*.attn.w[qkv]`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

__all__ = ["generic_name", "matching", "near_misses", "plan_names"]


def matching(key: str, names: Iterable[str]) -> list[str]:
    """The names that a key matches: as many tokens, each matched as a file name pattern.

    >>> matching("layers.*.w[qk]", ["layers.0.wq", "layers.1.wk", "layers.0.attn.wq", "norm"])
    ['layers.0.wq', 'layers.1.wk']
    >>> matching("", ["", "layers"])
    ['']
    """
    tokens = key.split(".")
    return [
        name
        for name in names
        if name.count(".") == len(tokens) - 1
        and bool(name) == bool(key)
        and all(fnmatchcase(a, b) for a, b in zip(name.split("."), tokens, strict=True))
    ]


# Names that a wrapper gives the module that it has replaced: plans are written for models without wrappers.
_WRAPPED = {
    "base_layer": "adapters of peft",
    "_orig_mod": "torch.compile",
    "_checkpoint_wrapped_module": "torch's wrapper for activation checkpointing",
}


def plan_names(names: Iterable[str]) -> dict[str, str]:
    """Full names by the names that plans know them under: a module inside a wrapper has the name of the wrapper.

    >>> plan_names(["q", "q.base_layer", "q.lora_A"])
    {'q': 'q.base_layer', 'q.base_layer': 'q.base_layer', 'q.lora_A': 'q.lora_A'}
    """
    full = {name: name for name in names}
    for name in list(full):
        tokens = name.split(".")
        if not _WRAPPED.keys().isdisjoint(tokens):
            full[".".join(t for t in tokens if t not in _WRAPPED)] = name
    return full


def generic_name(name: str) -> str:
    """A name with its numbers replaced by `*`.

    >>> generic_name("layers.0.mlp.1")
    'layers.*.mlp.*'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def near_misses(key: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The names that a key that matches none was probably meant for, numbers replaced by `*`.

    >>> near_misses("layers.*.q_prj", ["layers.0.q_proj", "layers.0.o_proj", "norm"])[0]
    'layers.*.q_proj'
    """
    # a name of numbers only says nothing if they are replaced
    readable = {n: n if set(generic_name(n)) <= set("*.") else generic_name(n) for n in names if n}
    known = list(dict.fromkeys(readable.values()))
    generic = generic_name(key)
    nested = [n for n in known if generic.endswith(f".{generic_name(n)}") or n.endswith(f".{generic}")]
    close = difflib.get_close_matches(generic, known, n=most, cutoff=0.5)
    return list(dict.fromkeys([*nested, *close]))[:most]

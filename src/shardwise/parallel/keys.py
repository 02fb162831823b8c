"""The keys of a plan: dotted names whose tokens may be patterns, as in `layers.*.attn.w[qkv]`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

__all__ = ["generic_name", "matching", "near_misses"]


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
        and all(fnmatchcase(a, b) for a, b in zip(name.split("."), tokens, strict=True))
    ]


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

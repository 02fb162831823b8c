"""Every private torch and CPython API that shardwise uses, one module per subject.

Each is behind a function with a documented meaning and a self-test, so that the next release of torch is an edit of this room.
"""

__all__: list[str] = []

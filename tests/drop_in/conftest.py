"""Modules that install shardwise, or load torch's package, when they are imported: only fresh processes may do that."""

collect_ignore = [
    "installed_torch.py",
    "installed_torchtitan.py",
    "installed_transformers.py",
    "only_shardwise.py",
    "torch_torchtitan.py",
    "torch_transformers.py",
]

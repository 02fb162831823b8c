"""Modules that install shardwise, load torch's package or import clients, when they are imported: only fresh processes may do that."""

collect_ignore = [
    "accelerate_runs.py",
    "installed_torch.py",
    "installed_torchtitan.py",
    "installed_transformers.py",
    "only_shardwise.py",
    "peft_runs.py",
    "torch_runs.py",
    "torch_torchtitan.py",
    "torch_transformers.py",
    "torchtitan_runs.py",
    "transformers_runs.py",
]
